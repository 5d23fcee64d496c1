// Facts about experts' weights in a file: what the file holds and which files are refused, who stays in memory, what prefetch
// promises, how reads fail. Who stays is judged by a model of its own; bytes by a formula of expert and place.
#include "switchyard/expert_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>

#include "testing.hpp"

namespace switchyard::test {
namespace {

constexpr int64_t page = 4096;
constexpr int64_t never_ms = 20000 * slowness;
constexpr int64_t short_ms = slowness > 1 ? 200 : 60;

std::vector<std::byte> weights_of(int64_t expert, int64_t bytes) {
    std::vector<std::byte> weights(static_cast<size_t>(bytes));
    for (size_t i = 0; i < weights.size(); ++i)
        weights[i] = static_cast<std::byte>(mix(static_cast<uint64_t>(expert) + 1, i / 8) >> (i % 8 * 8));
    return weights;
}

std::vector<char> content_of(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

void write_content(const std::string& path, const std::vector<char>& content) {
    std::ofstream(path, std::ios::binary | std::ios::trunc).write(content.data(), static_cast<std::streamsize>(content.size()));
}

class ExpertMemoryTest : public testing::Test {
 protected:
    void SetUp() override {
        std::string name = testing::TempDir() + "experts.XXXXXX";
        ASSERT_NE(mkdtemp(name.data()), nullptr);
        folder = name;
        path = folder + "/layer";
    }
    void TearDown() override { std::filesystem::remove_all(folder); }

    void create(int64_t experts, int64_t bytes) {
        expert_bytes = bytes;
        ExpertMemory::create(path, experts, bytes, [&](int64_t e, std::byte* to) {
            const std::vector<std::byte> weights = weights_of(e, bytes);
            std::memcpy(to, weights.data(), weights.size());
        });
    }
    ExpertMemory open(int64_t room, ExpertMemoryOptions o = {}) const {
        o.memory_bytes = room * ((expert_bytes + page - 1) / page * page);
        o.timeout_ms = never_ms;
        return ExpertMemory::open(path, o);
    }
    Outcome refusal_of(ExpertMemoryOptions o = {.memory_bytes = 1 << 20}) const {
        return outcome_of([&] { ExpertMemory::open(path, o); });
    }
    std::string difference_of(const ExpertMemory::Lease& lease) const {
        return difference("expert " + std::to_string(lease.expert()), {lease.data(), static_cast<size_t>(expert_bytes)},
                          weights_of(lease.expert(), expert_bytes));
    }
    std::set<std::string> names() const {
        std::set<std::string> all;
        for (const auto& entry : std::filesystem::directory_iterator(folder)) all.insert(entry.path().filename());
        return all;
    }
    static std::set<int64_t> residents(const ExpertMemory& memory) {
        std::set<int64_t> all;
        for (int64_t e = 0; e < memory.experts(); ++e)
            if (memory.is_resident(e)) all.insert(e);
        return all;
    }
    static std::vector<int64_t> list(std::span<const int64_t> of) { return {of.begin(), of.end()}; }

    std::string folder, path;
    int64_t expert_bytes = 0;
};

// -------------------------------------------------------------------------------------------------------------------- file

using ExpertFile = ExpertMemoryTest;

TEST_F(ExpertFile, HoldsAHeaderAndExpertsAtWholePages) {
    create(3, 5000);
    const std::vector<char> file = content_of(path);
    ASSERT_EQ(static_cast<int64_t>(file.size()), page + 3 * 2 * page);
    EXPECT_EQ(std::string(file.data(), 8), "SYEXPERT");
    const auto number = [&](size_t at) {
        int64_t n;
        std::memcpy(&n, file.data() + at, sizeof n);
        return n;
    };
    EXPECT_EQ(number(8), int64_t{4096} << 32 | 1);  // version, page
    EXPECT_EQ(number(16), 3);
    EXPECT_EQ(number(24), 5000);
    EXPECT_EQ(number(32), 8192);
    for (int64_t e = 0; e < 3; ++e) {
        std::vector<std::byte> want = weights_of(e, 5000);
        want.resize(8192);
        EXPECT_EQ(
            difference("expert", std::as_bytes(std::span(file).subspan(static_cast<size_t>(page + e * 8192), 8192)), want), "");
    }
    EXPECT_TRUE(std::all_of(file.begin() + 48, file.begin() + page, [](char c) { return c == 0; }));
    EXPECT_EQ(names(), std::set<std::string>{"layer"});
    EXPECT_EQ(std::filesystem::status(path).permissions() & std::filesystem::perms::owner_write,
              std::filesystem::perms::owner_write);

    std::vector<std::vector<std::byte>> weights;
    std::vector<const void*> pointers;
    for (int64_t e = 0; e < 3; ++e) weights.push_back(weights_of(e, 5000)), pointers.push_back(weights.back().data());
    ExpertMemory::create(path + "2", pointers, 5000);
    EXPECT_EQ(content_of(path + "2"), file);
}

TEST_F(ExpertFile, ReplacesAnOlderOneThatStaysAsItIsForWhoHasItOpen) {
    create(2, 100);
    ExpertMemory old = open(1);
    create(5, 300);
    EXPECT_EQ(open(1).experts(), 5);
    expert_bytes = 100;
    EXPECT_EQ(difference_of(old.acquire(1)), "");
}

TEST_F(ExpertFile, OfWhichNothingIsLeftWhenItCannotBeWritten) {
    const auto fill = [](int64_t, std::byte*) {};
    const auto refused = [&](const std::string& where, int64_t experts, int64_t bytes) {
        return outcome_of([&] { ExpertMemory::create(where, experts, bytes, fill); });
    };
    EXPECT_TRUE(is_error(refused(path, 0, 8), Code::bad_input, {"0 of 8 bytes"}));
    EXPECT_TRUE(is_error(refused(path, 8, 0), Code::bad_input));
    EXPECT_TRUE(is_error(refused(path, -1, 8), Code::bad_input));
    EXPECT_TRUE(is_error(refused(path, INT64_MAX, INT64_MAX), Code::bad_input));
    EXPECT_TRUE(is_error(refused(path, INT64_MAX / 4096, 1), Code::bad_input));
    EXPECT_TRUE(is_error(outcome_of([&] { ExpertMemory::create(path, 1, 1, nullptr); }), Code::bad_input, {"without one"}));
    const std::vector<const void*> null = {&fill, nullptr};
    EXPECT_TRUE(is_error(outcome_of([&] { ExpertMemory::create(path, null, 1); }), Code::bad_input, {"expert 1", "null"}));
    EXPECT_TRUE(is_error(refused(folder + "/no/layer", 1, 8), Code::system, {"/no/layer", "cannot be created"}));
    EXPECT_TRUE(is_error(refused(path, int64_t{1} << 40, 4096), Code::system, {"no room for a file of", "4503599627374592"}));
    EXPECT_TRUE(is_error(refused(folder, 1, 8), Code::system, {"cannot get this name"})) << "a folder has it";
    EXPECT_THROW(ExpertMemory::create(path, 3, 8,
                                      [](int64_t e, std::byte*) {
                                          if (e == 1) throw std::runtime_error("no weights");
                                      }),
                 std::runtime_error);
    {
        rlimit was{};
        getrlimit(RLIMIT_FSIZE, &was);
        rlimit low = was;
        low.rlim_cur = 10000;
        setrlimit(RLIMIT_FSIZE, &low);
        const Outcome out = refused(path, 2, 8);  // an error, not a signal
        setrlimit(RLIMIT_FSIZE, &was);
        EXPECT_TRUE(is_error(out, Code::system, {"ulimit -f", "10000"}));
    }
    EXPECT_EQ(names(), std::set<std::string>());
}

TEST_F(ExpertFile, IsRefusedWhenItIsNone) {
    EXPECT_TRUE(is_error(refusal_of(), Code::system, {path, "No such file"}));
    std::filesystem::create_directory(path);
    EXPECT_TRUE(is_error(refusal_of(), Code::bad_input, {path, "not a regular file"}));
    std::filesystem::remove(path);
    ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
    EXPECT_TRUE(is_error(refusal_of(), Code::bad_input, {"not a regular file"})) << "and nobody waits for a writer";
    std::filesystem::remove(path);
    write_content(path, {});
    EXPECT_TRUE(is_error(refusal_of(), Code::bad_input, {"0 bytes"}));
    write_content(path, std::vector<char>(47));
    EXPECT_TRUE(is_error(refusal_of(), Code::bad_input, {"47 bytes"}));
    write_content(path, std::vector<char>(20000, 'x'));
    EXPECT_TRUE(is_error(refusal_of(), Code::bad_input, {"SYEXPERT"}));
    if (geteuid() != 0) {
        std::filesystem::permissions(path, std::filesystem::perms::none);
        EXPECT_TRUE(is_error(refusal_of(), Code::system, {"Permission denied"}));
    }
}

TEST_F(ExpertFile, IsRefusedWhenAnyByteOfItsHeaderIsAnother) {
    create(3, 5000);
    const std::vector<char> right = content_of(path);
    for (size_t i = 0; i < 48; ++i) {
        std::vector<char> wrong = right;
        wrong[i] = static_cast<char>(wrong[i] ^ 0x10);
        write_content(path, wrong);
        EXPECT_TRUE(is_error(refusal_of(), i < 8 ? Code::bad_input : i < 16 ? Code::mismatch : Code::corrupt, {path})) << i;
    }
    write_content(path, right);
    EXPECT_EQ(refusal_of().code, Code::ok);
}

TEST_F(ExpertFile, IsRefusedWhenItIsCutOrAddedTo) {
    create(3, 5000);
    const std::vector<char> right = content_of(path);
    for (const size_t bytes : {size_t{48}, size_t{4096}, right.size() - 4096, right.size() - 1, right.size() + 1}) {
        std::vector<char> wrong = right;
        wrong.resize(bytes);
        write_content(path, wrong);
        EXPECT_TRUE(is_error(refusal_of(), Code::corrupt, {path, std::to_string(bytes), std::to_string(right.size())}));
    }
}

TEST_F(ExpertFile, IsRefusedWhenItIsNotTheOneThatIsExpected) {
    create(3, 5000);
    EXPECT_TRUE(is_error(refusal_of({.memory_bytes = 8192, .experts = 4}), Code::mismatch, {"3 of 5000", "4 of 5000"}));
    EXPECT_TRUE(is_error(refusal_of({.memory_bytes = 8192, .expert_bytes = 5001}), Code::mismatch, {"3 of 5001"}));
    EXPECT_EQ(refusal_of({.memory_bytes = 8192, .experts = 3, .expert_bytes = 5000}).code, Code::ok);
}

TEST_F(ExpertFile, OptionsThatCannotBeAreRefused) {
    create(3, 5000);
    EXPECT_TRUE(is_error(refusal_of({}), Code::bad_input, {"memory_bytes is 0"}));
    EXPECT_TRUE(is_error(refusal_of({.memory_bytes = 8191}), Code::bad_input, {"memory_bytes is 8191", "takes 8192"}));
    EXPECT_TRUE(is_error(refusal_of({.memory_bytes = 8192, .experts = -1}), Code::bad_input, {"experts is -1"}));
    EXPECT_TRUE(is_error(refusal_of({.memory_bytes = 8192, .expert_bytes = -1}), Code::bad_input));
    EXPECT_TRUE(is_error(refusal_of({.memory_bytes = 8192, .readers = 0}), Code::bad_input, {"readers is 0", "1..64"}));
    EXPECT_TRUE(is_error(refusal_of({.memory_bytes = 8192, .readers = 65}), Code::bad_input));
    EXPECT_TRUE(is_error(refusal_of({.memory_bytes = 8192, .chunk_bytes = 0}), Code::bad_input));
    EXPECT_TRUE(is_error(refusal_of({.memory_bytes = 8192, .timeout_ms = 0}), Code::bad_input));
}

TEST_F(ExpertFile, MayBeReachedByASymbolicLink) {
    create(2, 10);
    std::filesystem::create_symlink("layer", folder + "/link");
    path = folder + "/link";
    ExpertMemory memory = open(1);
    EXPECT_EQ(difference_of(memory.acquire(1)), "");
}

TEST_F(ExpertFile, IsReadAlikeWhateverTheFileSystemAndTheOptionsAre) {
    for (const std::string& where : {folder, std::string("/dev/shm")}) {
        path = where + "/layer-" + std::to_string(getpid());
        for (const int64_t bytes : {1, 4095, 4096, 4097, 300'000}) {
            create(4, bytes);
            for (const bool direct : {true, false})
                for (const int64_t readers : {1, 3})
                    for (const int64_t chunk : {1, 5000, 1 << 20}) {
                        ExpertMemory memory = open(2, {.readers = readers, .chunk_bytes = chunk, .direct = direct});
                        EXPECT_TRUE(direct || !memory.direct());
                        EXPECT_EQ(memory.expert_bytes(), bytes);
                        EXPECT_EQ(memory.stride(), (bytes + page - 1) / page * page);
                        for (int64_t e = 0; e < 4; ++e) {
                            const ExpertMemory::Lease lease = memory.acquire(e);
                            EXPECT_EQ(difference_of(lease), "");
                            EXPECT_EQ(reinterpret_cast<uintptr_t>(lease.data()) % page, 0U);
                        }
                    }
        }
        std::filesystem::remove(path);
    }
}

// ------------------------------------------------------------------------------------------------------------------ memory

using Residents = ExpertMemoryTest;

TEST_F(Residents, AreThoseThatALeastRecentlyUsedListKeeps) {
    // The model: who is in memory, with its leases and when the last of them ended.
    struct Entry {
        int64_t leases = 0, ended = 0;
    };
    Random random;
    create(9, 5000);
    for (int64_t room = 1; room <= 9; ++room) {
        ExpertMemory memory = open(room, {.readers = 1 + random.below(3), .chunk_bytes = page});
        ASSERT_EQ(memory.room(), room);
        std::map<int64_t, Entry> model;
        std::vector<ExpertMemory::Lease> leases;
        uint64_t hits = 0, misses = 0;
        for (int64_t n = 0; n < scaled(400); ++n) {
            if (!leases.empty() && random.one_in(2)) {
                std::swap(leases[static_cast<size_t>(random.below(static_cast<int64_t>(leases.size())))], leases.back());
                Entry& entry = model.at(leases.back().expert());
                if (--entry.leases == 0) entry.ended = n + 1;
                leases.pop_back();
            } else {
                const int64_t e = random.below(9);
                const bool hit = model.contains(e);
                if (!hit && static_cast<int64_t>(model.size()) == room) {
                    auto oldest = model.end();
                    for (auto it = model.begin(); it != model.end(); ++it)
                        if (it->second.leases == 0 && (oldest == model.end() || it->second.ended < oldest->second.ended))
                            oldest = it;
                    if (oldest == model.end()) {
                        EXPECT_TRUE(is_error(outcome_of([&] { memory.acquire(e); }), Code::capacity,
                                             {"all the room, " + std::to_string(room) + " experts of 8192"}));
                        continue;
                    }
                    model.erase(oldest);
                }
                leases.push_back(memory.acquire(e));
                EXPECT_EQ(difference_of(leases.back()), "");
                ++model[e].leases;
                ++(hit ? hits : misses);
            }
            std::set<int64_t> want;
            for (const auto& entry : model) want.insert(entry.first);
            ASSERT_EQ(residents(memory), want) << "room " << room << ", step " << n;
        }
        for (const ExpertMemory::Lease& lease : leases) EXPECT_EQ(difference_of(lease), "");
        const ExpertMemoryStats stats = memory.stats();
        EXPECT_EQ(stats.hits, hits);
        EXPECT_EQ(stats.misses, misses);
        EXPECT_EQ(stats.bytes_read, misses * 8192);
        EXPECT_EQ(stats.prefetches, 0U);
        EXPECT_GE(stats.wait_ns, 0);
        EXPECT_GT(stats.read_ns, 0);
    }
}

TEST_F(Residents, LimitAboveAllExpertsHoldsAll) {
    create(3, 5000);
    ExpertMemory memory = open(100);
    EXPECT_EQ(memory.room(), 3);
    for (int round = 0; round < 2; ++round)
        for (int64_t e = 0; e < 3; ++e) EXPECT_EQ(difference_of(memory.acquire(e)), "");
    EXPECT_EQ(memory.stats().misses, 3U);
    EXPECT_EQ(memory.stats().hits, 3U);
}

TEST_F(Residents, LeaseMovesAndOutlivesItsMemory) {
    create(2, 5000);
    std::optional<ExpertMemory> memory = open(1);
    ExpertMemory::Lease lease = memory->acquire(1);
    ExpertMemory::Lease moved = std::move(lease);
    EXPECT_EQ(lease.data(), nullptr);
    EXPECT_EQ(lease.expert(), -1);
    ExpertMemory::Lease again = memory->acquire(1);  // of an expert that is held
    EXPECT_EQ(again.data(), moved.data());
    again = ExpertMemory::Lease();
    EXPECT_TRUE(is_error(outcome_of([&] { memory->acquire(0); }), Code::capacity));
    ExpertMemory other = std::move(*memory);
    EXPECT_TRUE(is_error(outcome_of([&] { memory->acquire(0); }), Code::stale, {"acquire", "moved away"}));
    memory.reset();
    other = open(1);
    EXPECT_EQ(difference_of(moved), "");
    moved = other.acquire(0);
    EXPECT_EQ(difference_of(moved), "");
}

TEST_F(Residents, CallsWithBadArgumentsAreRefused) {
    create(3, 10);
    ExpertMemory memory = open(1);
    EXPECT_TRUE(is_error(outcome_of([&] { memory.acquire(-1); }), Code::bad_input, {"expert -1", path, "has 3"}));
    EXPECT_TRUE(is_error(outcome_of([&] { memory.acquire(3); }), Code::bad_input, {"expert 3"}));
    EXPECT_TRUE(is_error(outcome_of([&] { memory.acquire(0, -1); }), Code::bad_input, {"timeout_ms is -1"}));
    const std::vector<int64_t> few = {1, 1}, negative = {1, -2, 0};
    EXPECT_TRUE(is_error(outcome_of([&] { memory.prefetch(few); }), Code::bad_input, {"prefetch: 2 counts", "3 experts"}));
    EXPECT_TRUE(is_error(outcome_of([&] { memory.order(few); }), Code::bad_input, {"order: 2 counts"}));
    EXPECT_TRUE(is_error(outcome_of([&] { memory.order(negative); }), Code::bad_input, {"counts[1] is -2"}));
    EXPECT_FALSE(memory.is_resident(-1) || memory.is_resident(3));
    EXPECT_EQ(difference_of(memory.acquire(2)), "");
}

TEST_F(Residents, AreNotThereInAForkedChild) {
    create(3, 10);
    ExpertMemory memory = open(2);
    std::optional<ExpertMemory::Lease> lease = memory.acquire(0);
    const pid_t child = fork();
    if (child == 0) {
        Watchdog::watch("the forked child");
        const Outcome end = outcome_of([&] { memory.acquire(1); });
        const int file = memfd_create("weights", 0);
        const bool is_there = write(file, lease->data(), 1) == 1;  // a direct read must never end in the child's pages
        lease.reset();
        {
            const ExpertMemory taken = std::move(memory);  // ends here, and waits for no thread
        }
        _exit(is_error(end, Code::stale, {"acquire in process " + std::to_string(getpid()), "Fork first"}) && !is_there ? 0
                                                                                                                        : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT_EQ(difference_of(*lease), "");
    EXPECT_EQ(difference_of(memory.acquire(1)), "");
}

// ---------------------------------------------------------------------------------------------------------------- prefetch

using Prefetch = ExpertMemoryTest;

TEST_F(Prefetch, ReadsWhatIsMissingOnceAndDrivesOutNothingThatIsNeeded) {
    Random random;
    create(12, 9000);
    for (const int64_t room : {1, 2, 5, 11, 12}) {
        ExpertMemory memory = open(room, {.readers = 1 + random.below(3), .chunk_bytes = page});
        for (int64_t round = 0; round < scaled(60); ++round) {
            std::vector<int64_t> counts(12);
            for (int64_t& n : counts) n = random.one_in(3) ? 0 : random.below(5);
            std::set<int64_t> needed, there;
            for (int64_t e = 0; e < 12; ++e)
                if (counts[static_cast<size_t>(e)] > 0) needed.insert(e);
            for (const int64_t e : residents(memory))
                if (needed.contains(e)) there.insert(e);
            const uint64_t missing = needed.size() - there.size(), before = memory.stats().bytes_read;
            memory.prefetch(counts);
            const std::vector<int64_t> order = list(memory.order(counts));
            EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()), needed);
            EXPECT_EQ(order.size(), needed.size());
            for (const int64_t e : order) {
                const std::set<int64_t> now = residents(memory);
                for (const int64_t other : now)
                    if (needed.contains(other)) there.insert(other);
                for (const int64_t other : there) EXPECT_TRUE(now.contains(other)) << other << " was driven out";
                const ExpertMemory::Lease lease = memory.acquire(e);
                EXPECT_EQ(difference_of(lease), "");
                there.erase(e);
                needed.erase(e);
            }
            EXPECT_EQ(memory.stats().bytes_read - before, missing * 12288);
        }
        const ExpertMemoryStats stats = memory.stats();
        EXPECT_EQ(stats.prefetches_used, stats.prefetches);
        EXPECT_EQ(stats.prefetches_lost, 0U);
        EXPECT_EQ(stats.bytes_read, stats.prefetches * 12288) << "nothing had to be read by an acquire";
    }
}

TEST_F(Prefetch, OfMoreThanThereIsRoomForReadsLessThanTheListAlone) {
    create(8, 5000);
    const std::vector<int64_t> counts(8, 1);
    ExpertMemory plain = open(4), better = open(4);
    for (int round = 0; round < 5; ++round) {
        const uint64_t before_plain = plain.stats().bytes_read, before = better.stats().bytes_read;
        for (int64_t e = 0; e < 8; ++e) plain.acquire(e);
        better.prefetch(counts);
        for (const int64_t e : list(better.order(counts))) better.acquire(e);
        if (round == 0) continue;
        EXPECT_EQ(plain.stats().bytes_read - before_plain, 8 * 8192U) << "each drives out the one that is needed next";
        EXPECT_EQ(better.stats().bytes_read - before, 4 * 8192U) << "those in memory come first";
    }
}

TEST_F(Prefetch, OrderIsResidentsFirstAndFewerRowsFirst) {
    create(6, 100);
    ExpertMemory memory = open(3);
    for (const int64_t e : {0, 4, 5}) memory.acquire(e);
    const std::vector<int64_t> counts = {9, 2, 7, 0, 3, 3};
    EXPECT_EQ(list(memory.order(counts)), (std::vector<int64_t>{4, 5, 0, 1, 2}));
    EXPECT_EQ(list(memory.order(std::vector<int64_t>(6))), std::vector<int64_t>());
    EXPECT_EQ(residents(memory), (std::set<int64_t>{0, 4, 5})) << "order only looks";
}

/// Stops the readers of a memory while it lives, in a signal handler: nothing is read, and what waits stays as it is.
class HeldReaders {
 public:
    explicit HeldReaders(const std::set<pid_t>& readers) {
        held = 0;
        released = false;
        struct sigaction action {};
        action.sa_handler = hold;
        sigaction(SIGUSR2, &action, nullptr);
        for (const pid_t reader : readers) {
            while (!sleeps(reader)) sleep_ms(1);  // with the mutex in its hands it would hold up the test
            syscall(SYS_tgkill, getpid(), reader, SIGUSR2);
        }
        while (held < static_cast<int>(readers.size())) sleep_ms(1);
    }
    ~HeldReaders() { release(); }
    void release() { released = true; }

    static std::set<pid_t> threads() {
        std::set<pid_t> all;
        for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
            all.insert(std::stoi(entry.path().filename()));
        return all;
    }

 private:
    static bool sleeps(pid_t thread) {
        std::ifstream in("/proc/self/task/" + std::to_string(thread) + "/stat");
        std::string line;
        std::getline(in, line);
        return line.find(") S ") != std::string::npos;
    }
    static void hold(int) {
        ++held;
        const timespec pause{0, 1'000'000};
        while (!released) nanosleep(&pause, nullptr);
    }
    static std::atomic<int> held;
    static std::atomic<bool> released;
};
std::atomic<int> HeldReaders::held{0};
std::atomic<bool> HeldReaders::released{false};

class SlowStorage : public ExpertMemoryTest {
 protected:
    void hold(int64_t experts, int64_t room) {
        create(experts, 9000);
        std::thread([] {}).join();  // what comes with a process's first thread is there now
        const std::set<pid_t> before = HeldReaders::threads();
        memory.emplace(open(room, {.readers = 2, .chunk_bytes = page}));
        std::set<pid_t> readers;
        for (const pid_t thread : HeldReaders::threads())
            if (!before.contains(thread)) readers.insert(thread);
        ASSERT_EQ(readers.size(), 2U);
        storage.emplace(readers);
    }
    std::optional<ExpertMemory> memory;
    std::optional<HeldReaders> storage;
};

TEST_F(SlowStorage, AcquireEndsAtItsDeadlineAndTheReadGoesOn) {
    hold(3, 2);
    const Outcome late = outcome_of([&] { memory->acquire(2, short_ms); });
    ASSERT_TRUE(is_error(late, Code::timed_out, {"expert 2", path, "timed out after ", "0 of its 12288 bytes"}));
    EXPECT_GE(std::stoll(late.text.substr(late.text.find("after ") + 6)), short_ms) << late.text;
    EXPECT_GE(memory->stats().wait_ns, short_ms * 1'000'000);
    storage->release();
    EXPECT_EQ(difference_of(memory->acquire(2)), "");
    EXPECT_EQ(memory->stats().bytes_read, 12288U) << "it was not read again";
    EXPECT_EQ(memory->stats().hits + memory->stats().misses, 1U);
}

TEST_F(SlowStorage, PrefetchNeverWaitsAndItsReadsComeInTheirOrder) {
    hold(5, 3);
    const std::vector<int64_t> counts = {5, 0, 3, 4, 1};
    memory->prefetch(counts);
    EXPECT_EQ(memory->stats().prefetches, 3U) << "as many as there is room for";
    EXPECT_EQ(list(memory->order(counts)), (std::vector<int64_t>{4, 2, 3, 0}));
    const std::vector<int64_t> other = {1, 1, 1, 1, 2};  // those being read come first, and in the order of their reads
    EXPECT_EQ(list(memory->order(other)), (std::vector<int64_t>{4, 2, 3, 0, 1}));
    EXPECT_EQ(outcome_of([&] { memory->acquire(3, 1); }).code, Code::timed_out);
    EXPECT_EQ(list(memory->order(counts)), (std::vector<int64_t>{3, 4, 2, 0})) << "what was asked for goes first";
    storage->release();
    for (const int64_t e : list(memory->order(counts))) EXPECT_EQ(difference_of(memory->acquire(e)), "");
    EXPECT_EQ(memory->stats().prefetches_used, 4U);
}

TEST_F(SlowStorage, NewPrefetchGivesUpWhatOnlyTheOldOneWanted) {
    hold(4, 2);
    memory->prefetch(std::vector<int64_t>{1, 1, 0, 0});
    memory->prefetch(std::vector<int64_t>{0, 1, 1, 0});
    EXPECT_EQ(memory->stats().prefetches, 3U);
    EXPECT_EQ(memory->stats().prefetches_lost, 1U);
    storage->release();
    for (const int64_t e : {1, 2}) EXPECT_EQ(difference_of(memory->acquire(e)), "");
    EXPECT_EQ(residents(*memory), (std::set<int64_t>{1, 2}));
    EXPECT_EQ(memory->stats().bytes_read, 2 * 12288U);
}

TEST_F(SlowStorage, AcquireOutOfOrderTakesTheRoomOfTheLastInTurn) {
    hold(4, 2);
    memory->prefetch(std::vector<int64_t>{1, 2, 3, 0});
    EXPECT_TRUE(is_error(outcome_of([&] { memory->acquire(3, short_ms); }), Code::timed_out));  // 1 has given way
    EXPECT_EQ(memory->stats().prefetches_lost, 1U);
    storage->release();
    EXPECT_EQ(difference_of(memory->acquire(3)), "");
    for (const int64_t e : {0, 1, 2}) EXPECT_EQ(difference_of(memory->acquire(e)), "");
    EXPECT_EQ(memory->stats().hits + memory->stats().misses, 4U);
}

TEST_F(SlowStorage, DestructorDoesNotReadWhatIsAnnounced) {
    hold(4, 4);
    memory->prefetch(std::vector<int64_t>(4, 1));
    std::thread later([&] {
        sleep_ms(short_ms);
        storage->release();
    });
    memory.reset();
    later.join();
}

// ------------------------------------------------------------------------------------------------------------------ trouble

using Trouble = ExpertMemoryTest;

TEST_F(Trouble, FileCutShortWhileItIsOpenIsAnErrorOfTheExpertsThatAreGone) {
    create(3, 9000);
    const std::vector<char> right = content_of(path);
    for (const int64_t left : {page, page + 12288 + 100, page + 12288 + 4096, page + 2 * 12288 - 1}) {
        for (const bool direct : {true, false}) {
            write_content(path, right);
            ExpertMemory memory = open(2, {.chunk_bytes = page, .direct = direct});
            ASSERT_EQ(truncate(path.c_str(), left), 0);
            const auto gone = [&] { memory.acquire(1); };
            EXPECT_TRUE(is_error(outcome_of(gone), Code::system,
                                 {path, "expert 1", std::to_string(left) + " now", "had " + std::to_string(right.size())}));
            EXPECT_TRUE(is_error(outcome_of(gone), Code::system)) << "again";
            if (left > page + 12288) {
                EXPECT_EQ(difference_of(memory.acquire(0)), "");
            }
            memory.prefetch(std::vector<int64_t>{0, 1, 0});
            EXPECT_TRUE(is_error(outcome_of(gone), Code::system)) << "announced";
            const int fd = ::open(path.c_str(), O_WRONLY);
            ASSERT_EQ(pwrite(fd, right.data(), right.size(), 0), static_cast<ssize_t>(right.size()));
            ::close(fd);
            EXPECT_EQ(difference_of(memory.acquire(1)), "") << "the file is whole again";
        }
    }
}

TEST_F(Trouble, ReadErrorTellsWhereAndIsTriedAgain) {
    create(3, 9000);
    ExpertMemory memory = open(1);
    int at = -1;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code ignored;
        if (std::filesystem::read_symlink(entry.path(), ignored) == path) at = std::stoi(entry.path().filename());
    }
    ASSERT_GE(at, 0);
    const int good = dup(at), bad = ::open(path.c_str(), O_WRONLY);
    ASSERT_EQ(dup2(bad, at), at);
    const Outcome end = outcome_of([&] { memory.acquire(1); });
    ASSERT_EQ(dup2(good, at), at);
    ::close(good);
    ::close(bad);
    EXPECT_TRUE(is_error(end, Code::system, {path, "expert 1", "byte 16384", "Bad file descriptor"}));
    EXPECT_EQ(difference_of(memory.acquire(1)), "");
}

TEST_F(Trouble, EveryMixtureOfCallsGivesTheBytesOfTheFile) {
    Random random;
    create(10, 20'000);
    for (int64_t n = 0; n < scaled(30); ++n) {
        const int64_t room = 1 + random.below(10);
        ExpertMemory memory =
            open(room, {.readers = 1 + random.below(4), .chunk_bytes = random.pick<int64_t>({1, 9000, 1 << 20})});
        std::vector<ExpertMemory::Lease> leases;
        uint64_t acquired = 0;
        for (int64_t step = 0; step < 100; ++step) {
            if (random.one_in(4)) {
                std::vector<int64_t> counts(10);
                for (int64_t& c : counts) c = random.below(4);
                memory.prefetch(counts);
            }
            if (static_cast<int64_t>(leases.size()) >= room || (!leases.empty() && random.one_in(2)))
                leases.erase(leases.begin() + random.below(static_cast<int64_t>(leases.size())));
            try {
                leases.push_back(memory.acquire(random.below(10), random.one_in(5) ? 1 : 0));
                ++acquired;
                ASSERT_EQ(difference_of(leases.back()), "");
            } catch (const Error& e) {
                ASSERT_EQ(e.code(), Code::timed_out) << e.what();
            }
        }
        for (const ExpertMemory::Lease& lease : leases) ASSERT_EQ(difference_of(lease), "");
        const ExpertMemoryStats stats = memory.stats();
        EXPECT_EQ(stats.hits + stats.misses, acquired);
        EXPECT_LE(stats.prefetches_used + stats.prefetches_lost, stats.prefetches);
    }
}

}  // namespace
}  // namespace switchyard::test
