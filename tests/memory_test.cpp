// Facts about what a window lies in and where threads run: huge pages, NUMA nodes, CPUs.
//
// The pool of huge pages belongs to the machine: where this process may, it reserves some and gives them back; else what needs
// them is skipped, and what happens without them is still checked. NUMA facts are checked on described machines.
#include <sched.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <thread>

#include "core/machine.hpp"
#include "testing.hpp"
#include "transport/transport.hpp"

namespace switchyard::test {
namespace {

constexpr int64_t huge_bytes = 2 << 20;

int64_t number_in(const std::string& path) {
    std::ifstream in(path);
    int64_t n = -1;
    in >> n;
    return n;
}

class HugePool : public testing::Test {
 protected:
    const std::string pool = "/sys/kernel/mm/hugepages/hugepages-2048kB/";
    int64_t before = number_in(pool + "nr_hugepages");

    int64_t free_pages() const { return number_in(pool + "free_hugepages"); }
    /// Makes at least `pages` free ones; false where that is not allowed or there is no such memory.
    bool reserve(int64_t pages) {
        if (free_pages() < pages) std::ofstream(pool + "nr_hugepages") << before + pages;
        return free_pages() >= pages;
    }
    ~HugePool() override {
        if (number_in(pool + "nr_hugepages") != before) std::ofstream(pool + "nr_hugepages") << before;
    }

    static Options options(HugePages huge) {
        Options o;
        o.hidden = 512;
        o.topk = 2;
        o.experts = 4;
        o.tokens_max = 600;
        o.depth = 1;
        o.huge_pages = huge;
        return o;
    }
    /// Opens two ranks as threads, or as the ranks of a group of processes that happen to live in one; plays a round.
    static std::vector<std::string> play(HugePages huge, bool shm) {
        const Options o = options(huge);
        std::vector<std::string> told(2);
        Random random(3);
        const Problem problem = make_problem(random, o, {600, 599});
        std::vector<Session> local;
        if (!shm) local = Session::open_local(o, 2);
        static int number = 0;
        const std::string name = "memory-test-" + std::to_string(getpid()) + "-" + std::to_string(number++);
        on_ranks(2, [&](int r) {
            Session session = shm ? Session::open(o, {.rank = r, .size = 2, .name = name, .token = "t"})
                                  : std::move(local[static_cast<size_t>(r)]);
            told[static_cast<size_t>(r)] = session.memory_text();
            for (int i = 0; i < 3; ++i) EXPECT_EQ(difference_of_round(session, problem), "");
        });
        return told;
    }
};

TEST_F(HugePool, IsUsedByEveryRankWhenItIsLargeEnoughAndGivenBack) {
    // Two windows: expand_x and y of 2398 rows of 1 KiB each, and little beside.
    const int64_t each = (2 * 2400 * 1024 + huge_bytes) / huge_bytes + 1;
    if (!reserve(2 * each)) GTEST_SKIP() << "no huge pages here, and none may be reserved";
    const int64_t free_before = free_pages();
    for (const bool shm : {false, true})
        for (const HugePages huge : {HugePages::automatic, HugePages::yes}) {
            for (const std::string& text : play(huge, shm)) EXPECT_TRUE(text.starts_with("pages of 2048 KiB")) << text;
            EXPECT_EQ(free_pages(), free_before) << "shm " << shm;
        }
    for (const bool shm : {false, true})
        for (const std::string& text : play(HugePages::no, shm)) EXPECT_FALSE(text.starts_with("pages of 2048")) << text;
}

TEST_F(HugePool, AWindowThatDoesNotFitFallsBackOrIsRefusedWithTheCure) {
    Options o = options(HugePages::automatic);
    // Larger than all that is free, and sparse: ordinary pages hold it.
    o.rows_max = (std::max<int64_t>(free_pages(), 0) + 2) * huge_bytes / 1024;
    std::vector<Session> sessions = Session::open_local(o, 2);
    EXPECT_FALSE(sessions[0].memory_text().starts_with("pages of 2048")) << sessions[0].memory_text();
    sessions.clear();
    o.huge_pages = HugePages::yes;
    for (const bool shm : {false, true}) {
        try {
            if (shm)
                Session::open(o,
                              {.rank = 0, .size = 1, .name = "memory-test-refused-" + std::to_string(getpid()), .token = ""});
            else
                Session::open_local(o, 2);
            ADD_FAILURE() << "opened";
        } catch (const Error& e) {
            EXPECT_EQ(e.code(), Code::system);
            EXPECT_NE(std::string(e.what()).find("vm.nr_hugepages"), std::string::npos) << e.what();
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------- NUMA

TEST(NumaMap, NamesTheNodesNearSomeOfTheCpus) {
    const NumaMap four("node:4 core:2 pu:1");  // CPUs 0,1 | 2,3 | 4,5 | 6,7
    EXPECT_EQ(four.nodes_near({2, 3}), std::vector<int>{1});
    EXPECT_EQ(four.nodes_near({3}), std::vector<int>{1});
    EXPECT_EQ(four.nodes_near({0, 7}), (std::vector<int>{0, 3}));
    EXPECT_EQ(four.nodes_near({0, 2, 4, 6}), std::vector<int>{}) << "near all of them: nothing to choose";
    EXPECT_EQ(four.nodes_near({}), std::vector<int>{});
    const NumaMap one("node:1 core:8 pu:1");
    EXPECT_EQ(one.nodes_near({2}), std::vector<int>{});
    const NumaMap nonsense("node:none");
    EXPECT_EQ(nonsense.nodes_near({2}), std::vector<int>{});
}

// ------------------------------------------------------------------------------------------------------------------- CPUs

TEST(ShareOf, DealsCpusInOrderAndLeavesNobodyWithout) {
    const std::vector<int> cpus = {2, 3, 5, 8, 9};
    EXPECT_EQ(share_of(cpus, 0, 2), (std::vector<int>{2, 3}));
    EXPECT_EQ(share_of(cpus, 1, 2), (std::vector<int>{5, 8, 9}));
    EXPECT_EQ(share_of(cpus, 0, 1), cpus);
    EXPECT_EQ(share_of(cpus, 6, 7), std::vector<int>{3}) << "more processes than CPUs: around again";
    EXPECT_EQ(share_of({}, 0, 2), std::vector<int>{});
    for (int64_t count = 1; count <= 5; ++count) {
        std::vector<int> dealt;
        for (int64_t i = 0; i < count; ++i)
            for (const int cpu : share_of(cpus, i, count)) dealt.push_back(cpu);
        EXPECT_EQ(dealt, cpus) << count;
    }
}

TEST(AllowedCpus, AreThoseOfTheAffinity) {
    const std::vector<int> all = allowed_cpus();
    ASSERT_FALSE(all.empty());
    EXPECT_GE(usable_cpus(), 1);
    EXPECT_LE(usable_cpus(), static_cast<int>(all.size()));
    std::thread([&] {
        ASSERT_TRUE(pin_this_thread(all.back()));
        EXPECT_EQ(allowed_cpus(), std::vector<int>{all.back()});
        EXPECT_EQ(sched_getcpu(), all.back());
    }).join();
    EXPECT_EQ(allowed_cpus(), all) << "only that thread was pinned";
    EXPECT_FALSE(pin_this_thread(-1));
}

TEST(Pin, PutsHelpersOnTheRanksOwnCpusAndSaysSo) {
    const std::vector<int> cpus = allowed_cpus();
    Options o;
    o.hidden = 64;
    o.topk = 2;
    o.experts = 4;
    o.tokens_max = 200;
    o.workers = 3;
    o.pin = true;
    Random random(5);
    const Problem problem = make_problem(random, o, {200, 100});
    std::vector<Session> sessions = Session::open_local(o, 2);
    for (size_t r = 0; r < 2; ++r) {
        const std::vector<int> own = share_of(cpus, static_cast<int64_t>(r), 2);
        const std::string expected =
            ", helpers on CPUs " + std::to_string(own[1 % own.size()]) + ", " + std::to_string(own[2 % own.size()]);
        EXPECT_TRUE(sessions[r].memory_text().ends_with(expected)) << sessions[r].memory_text() << " against" << expected;
    }
    on_ranks(2, [&](int r) {
        EXPECT_EQ(difference_of_round(sessions[static_cast<size_t>(r)], problem), "");
        EXPECT_EQ(allowed_cpus(), cpus) << "the caller's thread is left alone";
    });
    o.pin = false;
    sessions = Session::open_local(o, 2);
    EXPECT_EQ(sessions[0].memory_text().find("CPU"), std::string::npos);
}

}  // namespace
}  // namespace switchyard::test
