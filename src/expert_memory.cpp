// One mutex guards everything but the bytes of experts. The caller's thread decides what is read and who is driven out; the
// readers take chunks from there, read without the mutex, and tell the caller when an expert is whole.
#include "switchyard/expert_memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/clock.hpp"
#include "core/process.hpp"

namespace switchyard {
namespace {

[[noreturn]] void refuse(Code code, std::string text) {
    throw Error(Status(code, std::move(text)));
}

[[noreturn]] void refuse_system(const std::string& path, const std::string& what, int error) {
    refuse(Code::system, fmt::format("experts in {}: {}: {}.", path, what, std::strerror(error)));
}

// ------------------------------------------------------------------------------------------------------------------ file

constexpr int64_t page_bytes = 4096;  // what a read past the page cache may be made of on any file system
constexpr int64_t huge_page_bytes = 2 << 20;

int64_t in_pages(int64_t bytes) {
    return (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

// The first page of a file, zero behind this; expert e lies at byte page_bytes + e * stride, zero behind its expert_bytes.
// Numbers are little endian. docs/expert_memory.md
struct Header {
    char magic[8] = {'S', 'Y', 'E', 'X', 'P', 'E', 'R', 'T'};
    uint32_t version = 1;
    uint32_t page = page_bytes;
    int64_t experts = 0;
    int64_t expert_bytes = 0;
    int64_t stride = 0;
    uint64_t checksum = 0;  // of what stands before it

    uint64_t right_checksum() const {  // FNV-1a
        uint64_t sum = 0xCBF29CE484222325;
        const auto* bytes = reinterpret_cast<const unsigned char*>(this);
        for (size_t i = 0; i < offsetof(Header, checksum); ++i) sum = (sum ^ bytes[i]) * 0x100000001B3;
        return sum;
    }
    int64_t at(int64_t expert) const { return page_bytes + expert * stride; }
    int64_t file_bytes() const { return at(experts); }
};
static_assert(sizeof(Header) == 48);

// False when the sizes are none, or make a file larger than 63 bits tell.
bool are_sizes(int64_t experts, int64_t expert_bytes) {
    int64_t all = 0;
    return experts >= 1 && expert_bytes >= 1 && expert_bytes <= INT64_MAX - page_bytes &&
           !__builtin_mul_overflow(in_pages(expert_bytes), experts, &all) && all <= INT64_MAX - page_bytes;
}

// A file that is written under another name, and gets its own when it is whole and on disk.
class NewFile {
 public:
    explicit NewFile(const std::string& path) : path_(path) {
        static std::atomic<uint32_t> names{0};  // makes names different, orders nothing
        for (int left = 100; fd_ < 0; --left) {
            part_ = fmt::format("{}.{}-{}.part", path, getpid(), names.fetch_add(1, std::memory_order_relaxed));
            fd_ = ::open(part_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
            if (fd_ < 0 && (errno != EEXIST || left == 0)) refuse_system(path_, part_ + " cannot be created", errno);
        }
    }
    ~NewFile() {
        if (fd_ < 0) return;
        ::close(fd_);
        ::unlink(part_.c_str());
    }
    NewFile(const NewFile&) = delete;
    NewFile& operator=(const NewFile&) = delete;

    // Before anything is written: no room is told now, and a limit by an error where writing would raise a signal.
    void reserve(int64_t bytes) const {
        rlimit limit{};
        if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
            static_cast<uint64_t>(bytes) > limit.rlim_cur)
            refuse(Code::system,
                   fmt::format("experts in {}: the file takes {} bytes; the limit of file sizes is {} (ulimit -f). "
                               "Raise it.",
                               path_, bytes, limit.rlim_cur));
        if (fallocate(fd_, 0, 0, bytes) != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
            refuse_system(path_, fmt::format("there is no room for a file of {} bytes", bytes), errno);
    }
    void write(const std::byte* from, int64_t bytes) {
        for (int64_t done = 0; done < bytes;) {
            const ssize_t n = ::write(fd_, from + done, static_cast<size_t>(bytes - done));
            if (n > 0)
                done += n;
            else if (n == 0 || errno != EINTR)
                refuse_system(path_, fmt::format("{} cannot be written at byte {}", part_, written_ + done),
                              n == 0 ? EIO : errno);
        }
        written_ += bytes;
    }
    void publish() {
        if (fsync(fd_) != 0) refuse_system(path_, part_ + " cannot be brought to disk", errno);
        posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);  // a wish: weights that were only written take memory from others
        if (::rename(part_.c_str(), path_.c_str()) != 0) refuse_system(path_, part_ + " cannot get this name", errno);
        ::close(std::exchange(fd_, -1));
        // The name is on disk when its folder is.
        const size_t slash = path_.rfind('/');
        const std::string folder = slash == std::string::npos ? "." : path_.substr(0, std::max<size_t>(slash, 1));
        const int at = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        const bool well = at >= 0 && (fsync(at) == 0 || errno == EINVAL);  // EINVAL: this file system has nothing to bring
        const int error = errno;
        if (at >= 0) ::close(at);
        if (!well) refuse_system(path_, "written, but its folder cannot be brought to disk", error);
    }

 private:
    const std::string path_;
    std::string part_;
    int fd_ = -1;
    int64_t written_ = 0;
};

// An opened file of experts.
class ExpertFile {
 public:
    ExpertFile(std::string path, bool direct) : path_(std::move(path)) {
        // Not to be held up by a pipe under this name: what is no regular file is refused below.
        const int how = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
        fd_ = direct ? ::open(path_.c_str(), how | O_DIRECT) : -1;
        direct_ = fd_ >= 0;
        if (fd_ < 0 && (!direct || errno == EINVAL)) fd_ = ::open(path_.c_str(), how);
        if (fd_ < 0) refuse_system(path_, "cannot be opened", errno);
        try {
            read_header();
        } catch (...) {
            ::close(fd_);
            throw;
        }
    }
    ~ExpertFile() { ::close(fd_); }
    ExpertFile(const ExpertFile&) = delete;
    ExpertFile& operator=(const ExpertFile&) = delete;

    const std::string& path() const { return path_; }
    const Header& header() const { return header_; }
    bool direct() const { return direct_; }

    // Where and why a read ended early: errno, or 0 at the end of the file.
    struct Trouble {
        int64_t at = -1;
        int error = 0;
    };
    Trouble read(std::byte* to, int64_t bytes, int64_t at) const {
        for (int64_t done = 0; done < bytes;) {
            const ssize_t n = pread(fd_, to + done, static_cast<size_t>(bytes - done), at + done);
            if (n > 0)
                done += n;
            else if (n == 0 || errno != EINTR)
                return {at + done, n == 0 ? 0 : errno};
        }
        return {};
    }
    // In words, for the expert that was to be read. A file that has been cut short may also tell of it by EINVAL, when its end
    // is not at a page.
    Status status_of(const Trouble& trouble, int64_t expert) const {
        struct stat now {};
        if (fstat(fd_, &now) == 0 && now.st_size < header_.file_bytes())
            return {Code::system,
                    fmt::format("experts in {}: expert {} lies at bytes {} to {}; the file has {} now, and had {} when "
                                "it was opened. Write it again, under another name or by ExpertMemory::create.",
                                path_, expert, header_.at(expert), header_.at(expert + 1), now.st_size, header_.file_bytes())};
        return {Code::system,
                fmt::format("experts in {}: expert {} cannot be read at byte {}: {}. The next acquire tries again.", path_,
                            expert, trouble.at, trouble.error != 0 ? std::strerror(trouble.error) : "it ended there")};
    }

 private:
    void read_header() {
        struct stat file {};
        if (fstat(fd_, &file) != 0) refuse_system(path_, "cannot be looked at", errno);
        const auto foreign = [&](const std::string& why) {
            refuse(Code::bad_input,
                   fmt::format("experts in {}: {}. Name a file that ExpertMemory::create has written.", path_, why));
        };
        if (!S_ISREG(file.st_mode)) foreign("not a regular file");
        alignas(page_bytes) std::byte first[page_bytes];
        ssize_t n = pread(fd_, first, sizeof first, 0);
        if (n < 0 && errno == EINVAL && direct_) {  // some file systems refuse not before the first read
            direct_ = false;
            fcntl(fd_, F_SETFL, 0);
            n = pread(fd_, first, sizeof first, 0);
        }
        if (n < 0) refuse_system(path_, "the header cannot be read", errno);
        if (n < static_cast<ssize_t>(sizeof header_))
            foreign(fmt::format("it has {} bytes, too few for a header", file.st_size));
        std::memcpy(&header_, first, sizeof header_);
        const Header right;
        if (std::memcmp(header_.magic, right.magic, sizeof right.magic) != 0) foreign("it does not begin with SYEXPERT");
        if (header_.version != right.version || header_.page != right.page)
            refuse(Code::mismatch,
                   fmt::format("experts in {}: format {} in pages of {}; this build reads format {} in pages of "
                               "{}. Write the file again.",
                               path_, header_.version, header_.page, right.version, right.page));
        if (header_.checksum != header_.right_checksum() || !are_sizes(header_.experts, header_.expert_bytes) ||
            header_.stride != in_pages(header_.expert_bytes))
            refuse(Code::corrupt, fmt::format("experts in {}: the header is damaged (bytes 0 to {}). Write the file again.",
                                              path_, sizeof header_));
        if (file.st_size != header_.file_bytes())
            refuse(Code::corrupt,
                   fmt::format("experts in {}: the file has {} bytes; {} experts of {} bytes take {}. It was cut "
                               "short, or added to: write it again.",
                               path_, file.st_size, header_.experts, header_.expert_bytes, header_.file_bytes()));
    }

    const std::string path_;
    int fd_ = -1;
    bool direct_ = false;
    Header header_;
};

// The memory for weights. Touched at once, so that a lack of it is an error here and no signal later. Forked children do not
// get it: the pages that a direct read is under way to must stay the parent's own.
class Pages {
 public:
    explicit Pages(int64_t bytes) {
        const bool huge = bytes >= huge_page_bytes;
        mapped_ = static_cast<size_t>(bytes + (huge ? huge_page_bytes : 0));
        map_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map_ == MAP_FAILED) throw std::bad_alloc();
        const auto mask = static_cast<uintptr_t>(huge ? huge_page_bytes - 1 : 0);
        start_ = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(map_) + mask) & ~mask);
        const auto size = static_cast<size_t>(bytes);
        madvise(map_, mapped_, MADV_DONTFORK);
        if (huge) madvise(start_, size, MADV_HUGEPAGE);  // a wish
        constexpr int populate_write = 23;               // MADV_POPULATE_WRITE, Linux 5.14
        if (madvise(start_, size, populate_write) == 0) return;
        if (errno != EINVAL) {
            munmap(map_, mapped_);
            throw std::bad_alloc();
        }
        for (size_t i = 0; i < size; i += page_bytes) start_[i] = std::byte{0};
    }
    ~Pages() { munmap(map_, mapped_); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;
    std::byte* start() const { return start_; }

 private:
    void* map_;
    size_t mapped_;
    std::byte* start_;
};

}  // namespace

void ExpertMemory::create(const std::string& path, int64_t experts, int64_t expert_bytes,
                          const std::function<void(int64_t expert, std::byte* to)>& fill) {
    if (!are_sizes(experts, expert_bytes) || !fill)
        refuse(Code::bad_input,
               fmt::format("experts for {}: {} of {} bytes{}; allowed: 1 or more of each, 63 bits together, and a "
                           "function that fills them.",
                           path, experts, expert_bytes, fill ? "" : " without one"));
    Header header;
    header.experts = experts;
    header.expert_bytes = expert_bytes;
    header.stride = in_pages(expert_bytes);
    header.checksum = header.right_checksum();

    const auto stride = static_cast<size_t>(header.stride);
    const std::unique_ptr<std::byte, void (*)(void*)> buffer(static_cast<std::byte*>(std::aligned_alloc(page_bytes, stride)),
                                                             std::free);
    if (!buffer) refuse(Code::system, fmt::format("experts for {}: no memory for one of {} bytes.", path, expert_bytes));
    NewFile file(path);
    file.reserve(header.file_bytes());
    std::memset(buffer.get(), 0, page_bytes);
    std::memcpy(buffer.get(), &header, sizeof header);
    file.write(buffer.get(), page_bytes);
    for (int64_t e = 0; e < experts; ++e) {
        std::memset(buffer.get(), 0, stride);
        fill(e, buffer.get());
        file.write(buffer.get(), header.stride);
    }
    file.publish();
}

void ExpertMemory::create(const std::string& path, std::span<const void* const> experts, int64_t expert_bytes) {
    for (size_t e = 0; e < experts.size(); ++e)
        if (!experts[e]) refuse(Code::bad_input, fmt::format("experts for {}: the weights of expert {} are null.", path, e));
    create(path, static_cast<int64_t>(experts.size()), expert_bytes, [&](int64_t e, std::byte* to) {
        std::memcpy(to, experts[static_cast<size_t>(e)], static_cast<size_t>(expert_bytes));
    });
}

// ---------------------------------------------------------------------------------------------------------------- memory

struct ExpertMemory::Impl {
    // Room for one expert.
    struct Frame {
        enum class State { empty, reading, whole, failed };
        State state = State::empty;
        int64_t expert = -1;  // -1 also while the rest of a read that was given up is awaited
        int64_t holders = 0;  // leases, and an acquire that waits
        bool ahead = false;   // read for prefetch(), and not acquired yet
        int64_t next = 0;     // first byte that no reader has taken
        int64_t taken = 0;    // chunks being read
        uint64_t turn = 0;    // readers take the lowest first; 0: an acquire waits
        uint64_t used = 0;    // when its last lease ended, by `clock`
        ExpertFile::Trouble trouble;
    };
    using State = Frame::State;
    static constexpr int32_t nowhere = -1;

    const std::unique_ptr<const ExpertFile> file;
    const Header& header = file->header();
    const ExpertMemoryOptions options;
    const int64_t chunk;
    const Pages pages;
    const Birthplace born;

    mutable std::mutex mutex;
    std::condition_variable work;     // for readers: there is something to read, or `stop`
    std::condition_variable arrived;  // for acquire: a frame is not being read any more
    std::vector<Frame> frames;
    std::vector<int32_t> frame_of;  // [experts] or nowhere
    std::vector<uint8_t> wanted;    // [experts] announced by the last prefetch(), and not acquired since
    std::vector<int64_t> plan;      // what was announced, in the order in which it is to be read
    std::vector<int64_t> ordered;   // what order() has told
    uint64_t clock = 0, turns = 0;
    int64_t reading = 0, reading_since = 0;  // how many readers read, and since when one does
    bool room_is_awaited = false;            // by an acquire, before all that was announced
    bool stop = false;
    ExpertMemoryStats stats;
    std::vector<std::thread> readers;

    Impl(std::unique_ptr<const ExpertFile> opened, const ExpertMemoryOptions& o, int64_t room)
        : file(std::move(opened)),
          options(o),
          chunk(in_pages(std::min(o.chunk_bytes, header.stride))),
          pages(room * header.stride),
          frames(static_cast<size_t>(room)),
          frame_of(static_cast<size_t>(header.experts), nowhere),
          wanted(static_cast<size_t>(header.experts)) {
        plan.reserve(wanted.size());
        ordered.reserve(wanted.size());
        readers.reserve(static_cast<size_t>(o.readers));
        try {
            while (static_cast<int64_t>(readers.size()) < o.readers) readers.emplace_back([this] { read_chunks(); });
        } catch (...) {
            end_readers();
            throw;
        }
    }
    ~Impl() { end_readers(); }
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    void end_readers() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            stop = true;
        }
        work.notify_all();
        for (std::thread& t : readers) t.join();
        readers.clear();
    }

    // All below: under `mutex`.

    Frame* frame_with(int64_t expert) {
        const int32_t at = frame_of[static_cast<size_t>(expert)];
        return at == nowhere ? nullptr : &frames[static_cast<size_t>(at)];
    }
    std::byte* bytes_of(const Frame& f) const { return pages.start() + (&f - frames.data()) * header.stride; }
    bool is_wanted(int64_t expert) const { return wanted[static_cast<size_t>(expert)] != 0; }

    // Takes a frame from its expert, if any.
    void forget(Frame& f) {
        if (f.expert < 0) return;
        frame_of[static_cast<size_t>(f.expert)] = nowhere;
        if (f.ahead) ++stats.prefetches_lost;
        if (f.state == State::failed) wanted[static_cast<size_t>(f.expert)] = 0;  // only acquire tries again, and tells
        f.expert = -1;
        f.ahead = false;
    }

    void begin(Frame& f, int64_t expert, bool ahead) {
        forget(f);
        f = {};
        f.state = State::reading;
        f.expert = expert;
        f.ahead = ahead;
        if (ahead) f.turn = ++turns, ++stats.prefetches;
        f.used = ++clock;
        frame_of[static_cast<size_t>(expert)] = static_cast<int32_t>(&f - frames.data());
        work.notify_all();
    }

    void give_up(Frame& f) {
        forget(f);
        f.next = header.stride;
        if (f.taken == 0) f = {};
    }

    // The frame that is given to the next expert, or null. What was announced stays, unless it is `needed` now.
    Frame* find_room(bool needed) {
        const auto keep = [&](const Frame& f) {
            return std::tuple(f.state == State::whole, f.state == State::whole && is_wanted(f.expert), f.used);
        };
        Frame* best = nullptr;
        for (Frame& f : frames) {
            if (f.holders > 0 || f.state == State::reading) continue;
            if (!needed && f.state == State::whole && is_wanted(f.expert)) continue;
            if (!best || keep(f) < keep(*best)) best = &f;
        }
        return best;
    }

    // Begins what was announced and has room.
    void read_ahead() {
        for (const int64_t e : plan) {
            if (!is_wanted(e) || frame_with(e)) continue;
            Frame* f = find_room(false);
            if (!f) return;
            begin(*f, e, true);
        }
    }

    // The experts with rows into `to`, as order() tells; `to` has room for all.
    void put_in_order(std::span<const int64_t> counts, std::vector<int64_t>& to, const char* call) {
        if (counts.size() != wanted.size())
            refuse(Code::bad_input,
                   fmt::format("{}: {} counts; the file {} has {} experts.", call, counts.size(), file->path(), wanted.size()));
        for (size_t e = 0; e < counts.size(); ++e)
            if (counts[e] < 0)
                refuse(Code::bad_input, fmt::format("{}: counts[{}] is {}; allowed: 0 and more.", call, e, counts[e]));
        to.clear();
        for (size_t e = 0; e < counts.size(); ++e)
            if (counts[e] > 0) to.push_back(static_cast<int64_t>(e));
        const auto place = [&](int64_t e) {
            const Frame* f = frame_with(e);
            const int where = !f || f->state == State::failed ? 2 : f->state == State::reading ? 1 : 0;
            return std::tuple(where, where == 1 ? f->turn : 0, counts[static_cast<size_t>(e)], e);
        };
        std::sort(to.begin(), to.end(), [&](int64_t a, int64_t b) { return place(a) < place(b); });
    }

    // Waits until done() is true; false at the deadline.
    template <class Done>
    bool wait(std::unique_lock<std::mutex>& lock, const Deadline& deadline, Done done) {
        const int64_t start = now_ns();
        const bool in_time = arrived.wait_for(lock, std::chrono::nanoseconds(deadline.at_ns - start), done);
        stats.wait_ns += now_ns() - start;
        return in_time;
    }

    // A frame for an expert that is needed now; null at the deadline. Where all are being read into, the last in turn gives
    // way.
    Frame* make_room(std::unique_lock<std::mutex>& lock, const Deadline& deadline) {
        Frame* found = find_room(true);
        if (found) return found;
        Frame* last = nullptr;
        bool comes = false;
        for (Frame& f : frames) {
            if (f.holders > 0) continue;
            comes = comes || f.expert < 0;
            if (!last || f.turn > last->turn) last = &f;
        }
        if (!comes) give_up(*last);
        room_is_awaited = true;
        wait(lock, deadline, [&] { return (found = find_room(true)) != nullptr; });
        room_is_awaited = false;
        return found;
    }

    Frame* next_to_read() {
        Frame* next = nullptr;
        for (Frame& f : frames)
            if (f.state == State::reading && f.next < header.stride && (!next || f.turn < next->turn)) next = &f;
        return next;
    }

    // A reader: takes chunk by chunk, and leaves the mutex while it reads.
    void read_chunks() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            Frame* f = nullptr;
            work.wait(lock, [&] { return stop || (f = next_to_read()) != nullptr; });
            if (stop) return;
            const int64_t first = f->next, bytes = std::min(chunk, header.stride - first), expert = f->expert;
            f->next += bytes;
            ++f->taken;
            if (reading++ == 0) reading_since = now_ns();
            lock.unlock();
            const ExpertFile::Trouble trouble = file->read(bytes_of(*f) + first, bytes, header.at(expert) + first);
            lock.lock();
            if (--reading == 0) stats.read_ns += now_ns() - reading_since;
            --f->taken;
            if (trouble.at < 0)
                stats.bytes_read += static_cast<uint64_t>(bytes);
            else if (f->trouble.at < 0)
                f->trouble = trouble, f->next = header.stride;  // the first that is met is told
            if (f->taken > 0 || f->next < header.stride) continue;
            if (f->expert < 0) {
                *f = {};
                if (!stop && !room_is_awaited) read_ahead();
            } else {
                f->state = f->trouble.at < 0 ? State::whole : State::failed;
            }
            arrived.notify_all();
        }
    }

    void end_lease(int64_t expert) {
        const std::lock_guard<std::mutex> lock(mutex);
        Frame& f = *frame_with(expert);
        if (--f.holders > 0) return;
        f.used = ++clock;
        if (!stop) read_ahead();
    }
};

ExpertMemory ExpertMemory::open(const std::string& path, const ExpertMemoryOptions& o) {
    const auto check = [](const char* name, int64_t value, int64_t low, int64_t high) {
        if (value < low || value > high)
            refuse(Code::bad_input, fmt::format("ExpertMemory: {} is {}; allowed: {}..{}.", name, value, low, high));
    };
    check("memory_bytes", o.memory_bytes, 1, INT64_MAX);
    check("experts", o.experts, 0, INT64_MAX);
    check("expert_bytes", o.expert_bytes, 0, INT64_MAX);
    check("readers", o.readers, 1, 64);
    check("chunk_bytes", o.chunk_bytes, 1, INT64_MAX);
    check("timeout_ms", o.timeout_ms, 1, INT64_MAX);
    auto file = std::make_unique<const ExpertFile>(path, o.direct);
    const Header& header = file->header();
    if ((o.experts && o.experts != header.experts) || (o.expert_bytes && o.expert_bytes != header.expert_bytes))
        refuse(Code::mismatch,
               fmt::format("experts in {}: {} of {} bytes; expected are {} of {}. Is it the file of another layer, or "
                           "of another rank?",
                           path, header.experts, header.expert_bytes, o.experts ? o.experts : header.experts,
                           o.expert_bytes ? o.expert_bytes : header.expert_bytes));
    const int64_t stride = header.stride, room = std::min(o.memory_bytes / stride, header.experts);
    if (room < 1)
        refuse(Code::bad_input,
               fmt::format("ExpertMemory: memory_bytes is {}; one expert of {} takes {}.", o.memory_bytes, path, stride));
    try {
        // A forked child leaves its copy as it is: the threads are not there, and what they wait for would never end.
        return ExpertMemory(std::shared_ptr<Impl>(new Impl(std::move(file), o, room), [](Impl* impl) {
            if (impl->born.here()) delete impl;
        }));
    } catch (const std::bad_alloc&) {
        refuse(Code::system,
               fmt::format("ExpertMemory: no memory for {} experts of {} bytes. Lower memory_bytes.", room, stride));
    } catch (const std::system_error& e) {
        refuse(Code::system,
               fmt::format("ExpertMemory: {} readers cannot be started: {}. Lower option readers.", o.readers, e.what()));
    }
}

ExpertMemory::ExpertMemory(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
ExpertMemory::ExpertMemory(ExpertMemory&&) noexcept = default;
ExpertMemory& ExpertMemory::operator=(ExpertMemory&& other) noexcept {
    ExpertMemory taken(std::move(other));
    std::swap(impl_, taken.impl_);
    return *this;
}
ExpertMemory::~ExpertMemory() {
    if (impl_ && impl_->born.here()) impl_->end_readers();
}

ExpertMemory::Impl& ExpertMemory::impl(const char* call) const {
    if (!impl_) refuse(Code::stale, fmt::format("{} of an ExpertMemory that was moved away.", call));
    if (!impl_->born.here())
        refuse(Code::stale,
               fmt::format("{} in process {} of an ExpertMemory of process {}: a forked child has no weights. Fork first, "
                           "then open.",
                           call, getpid(), impl_->born.process()));
    return *impl_;
}

void ExpertMemory::prefetch(std::span<const int64_t> counts) {
    Impl& s = impl("prefetch");
    const std::lock_guard<std::mutex> lock(s.mutex);
    s.put_in_order(counts, s.plan, "prefetch");
    std::fill(s.wanted.begin(), s.wanted.end(), 0);
    for (const int64_t e : s.plan) s.wanted[static_cast<size_t>(e)] = 1;
    for (Impl::Frame& f : s.frames)
        if (f.state == Impl::State::reading && f.expert >= 0 && !s.is_wanted(f.expert)) s.give_up(f);
    s.read_ahead();
}

std::span<const int64_t> ExpertMemory::order(std::span<const int64_t> counts) {
    Impl& s = impl("order");
    const std::lock_guard<std::mutex> lock(s.mutex);
    s.put_in_order(counts, s.ordered, "order");
    return s.ordered;
}

ExpertMemory::Lease ExpertMemory::acquire(int64_t expert, int64_t timeout_ms) {
    Impl& s = impl("acquire");
    if (expert < 0 || expert >= s.header.experts)
        refuse(Code::bad_input,
               fmt::format("acquire of expert {}; the file {} has {}.", expert, s.file->path(), s.header.experts));
    if (timeout_ms < 0)
        refuse(Code::bad_input,
               fmt::format("acquire: timeout_ms is {}; allowed: 0 (that of the options) or milliseconds.", timeout_ms));
    const Deadline deadline = Deadline::after_ms(timeout_ms > 0 ? timeout_ms : s.options.timeout_ms);
    const auto late = [&](const std::string& why) {
        refuse(Code::timed_out,
               fmt::format("acquire of expert {} of {} timed out after {} ms: {}. Raise timeout_ms if the storage is "
                           "slow; otherwise see what else it does.",
                           expert, s.file->path(), deadline.waited_ms(), why));
    };
    std::unique_lock<std::mutex> lock(s.mutex);
    Impl::Frame* f = s.frame_with(expert);
    if (!f) {
        if (std::all_of(s.frames.begin(), s.frames.end(), [](const Impl::Frame& other) { return other.holders > 0; }))
            refuse(
                Code::capacity,
                fmt::format("acquire of expert {} of {}: leases hold all the room, {} experts of {} bytes. End one first, or "
                            "open with more memory_bytes.",
                            expert, s.file->path(), s.frames.size(), s.header.stride));
        if (!(f = s.make_room(lock, deadline))) late("all room is being read into");
        s.begin(*f, expert, false);
    }
    ++f->holders;
    const bool hit = f->state == Impl::State::whole;
    if (f->state == Impl::State::reading) {
        f->turn = 0;
        if (!s.wait(lock, deadline, [&] { return f->state != Impl::State::reading; })) {
            --f->holders;
            late(fmt::format("{} of its {} bytes have been read or are being read", f->next, s.header.stride));
        }
    }
    if (f->state == Impl::State::failed) {
        --f->holders;
        const Status why = s.file->status_of(f->trouble, expert);
        s.forget(*f);
        *f = {};
        throw Error(why);
    }
    ++(hit ? s.stats.hits : s.stats.misses);
    if (f->ahead) f->ahead = false, ++s.stats.prefetches_used;
    s.wanted[static_cast<size_t>(expert)] = 0;
    Lease lease;
    lease.memory_ = impl_;
    lease.data_ = s.bytes_of(*f);
    lease.expert_ = expert;
    return lease;
}

ExpertMemory::Lease::Lease(Lease&& other) noexcept
    : memory_(std::move(other.memory_)),
      data_(std::exchange(other.data_, nullptr)),
      expert_(std::exchange(other.expert_, -1)) {}

ExpertMemory::Lease& ExpertMemory::Lease::operator=(Lease&& other) noexcept {
    Lease taken(std::move(other));
    std::swap(memory_, taken.memory_);
    std::swap(data_, taken.data_);
    std::swap(expert_, taken.expert_);
    return *this;
}

ExpertMemory::Lease::~Lease() {
    if (!memory_) return;
    Impl& s = *static_cast<Impl*>(memory_.get());
    if (s.born.here()) s.end_lease(expert_);
}

int64_t ExpertMemory::experts() const {
    return impl("experts").header.experts;
}
int64_t ExpertMemory::expert_bytes() const {
    return impl("expert_bytes").header.expert_bytes;
}
int64_t ExpertMemory::stride() const {
    return impl("stride").header.stride;
}
int64_t ExpertMemory::room() const {
    return static_cast<int64_t>(impl("room").frames.size());
}
bool ExpertMemory::is_resident(int64_t expert) const {
    Impl& s = impl("is_resident");
    if (expert < 0 || expert >= s.header.experts) return false;
    const std::lock_guard<std::mutex> lock(s.mutex);
    const Impl::Frame* f = s.frame_with(expert);
    return f && f->state == Impl::State::whole;
}
bool ExpertMemory::direct() const {
    return impl("direct").file->direct();
}
ExpertMemoryStats ExpertMemory::stats() const {
    Impl& s = impl("stats");
    const std::lock_guard<std::mutex> lock(s.mutex);
    ExpertMemoryStats now = s.stats;
    if (s.reading > 0) now.read_ns += now_ns() - s.reading_since;
    return now;
}

}  // namespace switchyard
