// A group seen from outside: windows made by hand, flag by flag, and what must be said about them.
#include "switchyard/inspect.hpp"

#include <fmt/format.h>

#include "core/clock.hpp"
#include "layout/window.hpp"
#include "testing.hpp"

namespace switchyard::test {
namespace {

using inspect::Life;
using inspect::Phase;
using layout::Flag;
using layout::Turn;
using layout::Word;

// Windows of a group that nobody plays. Flags are raised as a rank raises them: in every window.
struct Crafted {
    explicit Crafted(int ranks, Landing landing = Landing::packed, int64_t depth = 2) {
        options.hidden = 8;
        options.topk = 2;
        options.experts = 2 * ranks;
        options.tokens_max = 4;
        options.rows_max = 4 * 2 * ranks;
        options.cell_rows = 4 * 2;
        options.depth = depth;
        options.landing = landing;
        w = layout::window_of({.ranks = ranks,
                               .depth = depth,
                               .experts = options.experts,
                               .experts_per_rank = 2,
                               .hidden = 8,
                               .topk = 2,
                               .tokens_max = 4,
                               .rows_max = options.rows_max,
                               .cell_rows = options.cell_rows,
                               .token = TokenType::f16,
                               .dispatch = Format::none,
                               .combine = Format::none,
                               .weights = false,
                               .landing = landing,
                               .group_ranks = 1,
                               .push = true});
        for (int r = 0; r < ranks; ++r) {
            bytes.emplace_back(w.bytes);
            const layout::WindowHeader h = layout::header_of(w, r, 4700 + r);
            std::memcpy(bytes.back().data(), &h, sizeof h);
            processes.push_back({.id = 4700 + r, .life = Life::running});
        }
    }

    template <class T>
    void store(int window, uint64_t offset, const T& value) {
        std::memcpy(bytes[static_cast<size_t>(window)].data() + offset, &value, sizeof value);
    }
    void raise(Flag flag, uint64_t epoch, int writer, uint32_t code = 0, int whose = -1) {
        for (int in = 0; in < ranks(); ++in)
            store(in, w.flag_line(epoch % static_cast<uint64_t>(w.shape.depth), writer) + layout::flag_offset(flag),
                  Word::of(epoch, code, whose < 0 ? writer : whose).bits);
    }
    /// Everything of an epoch, to its end.
    void play(uint64_t epoch) {
        for (int r = 0; r < ranks(); ++r) {
            if (options.landing == Landing::packed) raise(Flag::counted, epoch, r);
            raise(Flag::arrived, epoch, r);
            raise(Flag::returned, epoch, r);
        }
    }
    /// The count row of `writer`, the same number for each expert, in every window.
    void count(uint64_t epoch, int writer, int32_t rows) {
        const layout::CountHead head{.epoch = epoch, .tag = 0, .tokens = 4, .expects = 0, .reserved = {}};
        const std::vector<int32_t> counts(static_cast<size_t>(options.experts), rows);
        for (int in = 0; in < ranks(); ++in) {
            const uint64_t row = w.count_row(epoch % static_cast<uint64_t>(w.shape.depth), writer);
            store(in, row, head);
            std::memcpy(bytes[static_cast<size_t>(in)].data() + row + sizeof head, counts.data(), counts.size() * 4);
        }
    }
    /// The rank sleeps in a call that began `ms` ago.
    void sleep(int rank, int64_t ms = 0) {
        store(rank, w.bell,
              layout::Bell{.bell = 7, .sleepers = 1, .waiting_since_ns = now_ns() - ms * 1'000'000, .reserved = {}});
    }
    void member(int writer, const layout::MemberLine& line) {
        for (int in = 0; in < ranks(); ++in) store(in, w.member(writer), line);
    }
    void life(int rank, Life l) { processes[static_cast<size_t>(rank)].life = l; }

    int ranks() const { return static_cast<int>(w.shape.ranks); }
    inspect::Group look() const {
        inspect::Window window;
        const Status s = inspect::read_window(std::span(bytes[0]).first(inspect::header_bytes), &window);
        EXPECT_TRUE(s.ok()) << s.text();
        return inspect::look(window, processes, [&](int rank, uint64_t offset, void* to, size_t n) {
            const std::vector<std::byte>& from = bytes[static_cast<size_t>(rank)];
            if (offset > from.size() || n > from.size() - offset) return false;
            std::memcpy(to, from.data() + offset, n);
            return true;
        });
    }
    /// What is said: first each rank, then the remarks, "!" before trouble. Ranks that sleep are taken to have called 12.3 s
    /// ago.
    std::string text() const {
        inspect::Group g = look();
        for (inspect::Member& m : g.members)
            if (m.waited_ms >= 0) m.waited_ms = 12'300;
        std::string t;
        for (const inspect::Member& m : g.members) t += fmt::format("{}: {}\n", m.rank, inspect::phase_text(m));
        for (const inspect::Remark& r : inspect::remarks(g))
            t += fmt::format("{} {}{}\n", r.is_trouble ? "!" : "-", r.text, r.cure.empty() ? "" : " -> " + r.cure);
        return t;
    }

    Options options;
    layout::Window w;
    std::vector<std::vector<std::byte>> bytes;
    std::vector<inspect::Process> processes;
};

TEST(Inspect, NamesTheStoppedRankWhoseRowsTheOthersWaitFor) {
    Crafted g(3);
    g.play(40);
    for (int r = 0; r < 3; ++r) g.raise(Flag::counted, 41, r), g.count(41, r, 1);
    g.raise(Flag::arrived, 41, 0);
    g.raise(Flag::arrived, 41, 2);
    g.sleep(0);
    g.sleep(2);
    g.life(1, Life::stopped);
    EXPECT_EQ(
        g.text(),
        "0: waits in dispatch 41 for the rows of rank 1\n"
        "1: moves its rows in dispatch 41\n"
        "2: waits in dispatch 41 for the rows of rank 1\n"
        "- ranks 0 and 2 wait in dispatch 41 for the rows of rank 1, whose process 4701 is stopped; the first of them called "
        "12.3 s ago\n"
        "! rank 1 (process 4701) is stopped; it moves its rows in dispatch 41 -> kill -CONT 4701\n");
    const inspect::Group seen = g.look();
    EXPECT_EQ(seen.members[0].told,
              (inspect::Told{.counted = 41, .arrived = 41, .returned = 40, .gone = 0, .regroup = 0, .closed = false}));
    EXPECT_EQ(seen.members[1].told.arrived, 40U);
    EXPECT_GE(seen.members[0].waited_ms, 0);
    EXPECT_EQ(seen.members[1].waited_ms, -1);
}

TEST(Inspect, ARankWithoutRowsIsNotAwaited) {
    Crafted g(2);
    g.raise(Flag::counted, 1, 0);
    g.raise(Flag::counted, 1, 1);
    g.count(1, 0, 3);
    g.count(1, 1, 0);
    g.raise(Flag::arrived, 1, 0);
    EXPECT_EQ(g.text(),
              "0: holds the batch of epoch 1: its experts are at work, or combine was not called\n"
              "1: holds the batch of epoch 1: its experts are at work, or combine was not called\n");
}

TEST(Inspect, ARankStoppedInItsSleepHasNotTheBatchYet) {
    for (const int64_t depth : {1, 2}) {
        Crafted g(2, Landing::packed, depth);
        for (const int r : {0, 1}) g.raise(Flag::counted, 1, r), g.count(1, r, 1), g.raise(Flag::arrived, 1, r);
        g.raise(Flag::returned, 1, 0);
        g.sleep(0);
        g.sleep(1);
        g.life(1, Life::stopped);
        EXPECT_EQ(
            g.text(),
            "0: waits in combine 1 for the experts' output of rank 1\n"
            "1: has not looked yet: all that dispatch 1 waits for is there\n"
            "- rank 0 waits in combine 1 for the experts' output of rank 1, whose process 4701 is stopped; it called 12.3 s "
            "ago\n"
            "! rank 1 (process 4701) is stopped; it has not looked yet: all that dispatch 1 waits for is there -> kill "
            "-CONT 4701\n");
    }
}

TEST(Inspect, FollowsTheChainToTheRankAtItsEnd) {
    Crafted g(3);
    g.play(6);
    // Rank 2 has not called dispatch 7; rank 1 waits for its counts; rank 0 for both, whose counts it lacks.
    g.raise(Flag::counted, 7, 1);
    g.raise(Flag::counted, 7, 0);
    g.sleep(0);
    g.sleep(1);
    EXPECT_EQ(
        g.text(),
        "0: waits in dispatch 7 for the counts of rank 2\n"
        "1: waits in dispatch 7 for the counts of rank 2\n"
        "2: has ended epoch 6, and not called dispatch since\n"
        "- ranks 0 and 1 wait in dispatch 7 for the counts of rank 2; the first of them called 12.3 s ago\n"
        "- it comes down to rank 2 (process 4702), which has ended epoch 6, and not called dispatch since -> see what it does: "
        "gdb -p 4702 -batch -ex 'thread apply all bt', or py-spy dump --pid 4702\n");
}

TEST(Inspect, SeesThatRanksWaitForEachOtherInDifferentCalls) {
    Crafted g(2);
    for (int r = 0; r < 2; ++r) g.raise(Flag::counted, 8, r), g.count(8, r, 1), g.raise(Flag::arrived, 8, r);
    g.raise(Flag::counted, 9, 0);   // calls dispatch again, with the batch of 8 open
    g.raise(Flag::returned, 8, 1);  // calls combine
    g.sleep(0);
    g.sleep(1);
    EXPECT_EQ(
        g.text(),
        "0: waits in dispatch 9 for the counts of rank 1\n"
        "1: waits in combine 8 for the experts' output of rank 0\n"
        "- rank 0 waits in dispatch 9 for the counts of rank 1, which waits in combine 8 for the experts' output of rank 0; it "
        "called 12.3 s ago\n"
        "- rank 1 waits in combine 8 for the experts' output of rank 0, which waits in dispatch 9 for the counts of rank 1; it "
        "called 12.3 s ago\n"
        "! every rank that is awaited waits itself: nobody will move before a deadline passes -> all ranks must make the same "
        "calls in the same order; after timed_out, shrink() brings them together again\n");
}

TEST(Inspect, TellsADeathFromAnEnd) {
    Crafted g(3);
    g.play(3);
    for (const int r : {0, 1}) g.raise(Flag::counted, 4, r);
    g.sleep(0);
    g.life(1, Life::ended);
    g.life(2, Life::ended);  // its process is gone too, but it had closed
    g.member(2, {.closed = 1, .regroup = 0, .reserved = {}});
    EXPECT_EQ(
        g.text(),
        "0: waits in dispatch 4 for the counts of rank 2\n"
        "1: has ended (its process is gone), in or after epoch 4\n"
        "2: has closed its session\n"
        "- rank 0 waits in dispatch 4 for the counts of rank 2, which has closed its session; it called 12.3 s ago\n"
        "! rank 1 (process 4701) has ended without closing its session, in or after epoch 4 -> look at its own output and exit "
        "code; the others get peer_lost: shrink() on them, or start the group again\n");
}

TEST(Inspect, ACombineThatNobodySleepsInMayHaveTimedOut) {
    Crafted g(2);
    for (int r = 0; r < 2; ++r) g.raise(Flag::counted, 8, r), g.count(8, r, 1), g.raise(Flag::arrived, 8, r);
    g.raise(Flag::returned, 8, 0);
    EXPECT_EQ(inspect::phase_text(g.look().members[0]),
              "waits (or waited, and gave up) in combine 8 for the experts' output of rank 1");
    g.sleep(0);
    EXPECT_EQ(inspect::phase_text(g.look().members[0]), "waits in combine 8 for the experts' output of rank 1");
}

TEST(Inspect, SaysSinceWhenARankWaits) {
    Crafted g(3);
    g.raise(Flag::counted, 1, 0);
    g.raise(Flag::counted, 1, 2);
    g.sleep(0, 5000);
    g.sleep(2, 90'000);
    const inspect::Group seen = g.look();
    EXPECT_GE(seen.members[0].waited_ms, 5000);
    EXPECT_EQ(seen.members[1].waited_ms, -1);
    EXPECT_GE(seen.members[2].waited_ms, 90'000);
    EXPECT_LT(seen.members[0].waited_ms, seen.members[2].waited_ms);
    g.sleep(0, -5000);  // another clock
    EXPECT_EQ(g.look().members[0].waited_ms, 0);
}

TEST(Inspect, ARankThatRunsDoesNotWaitForTheDead) {
    Crafted g(3);
    for (const int r : {0, 1, 2}) g.raise(Flag::counted, 4, r), g.count(4, r, 1);
    g.raise(Flag::arrived, 4, 0);
    g.raise(Flag::arrived, 4, 1);
    g.life(2, Life::ended);
    // With option partial it has got its batch without rank 2.
    EXPECT_EQ(g.look().members[0].phase, Phase::batch);
    g.life(0, Life::stopped);
    EXPECT_EQ(g.look().members[0].awaited, std::vector<int>{2});
}

TEST(Inspect, TellsWhyARankHasLeftAnEpoch) {
    Crafted g(2);
    g.play(4);
    g.raise(Flag::counted, 5, 0);
    layout::Reason reason{};
    reason.epoch = 5;
    const std::string why = "dispatch 5 timed out\nhere";
    reason.text_bytes = why.size();
    std::memcpy(reason.text, why.data(), why.size());
    for (int in = 0; in < 2; ++in) g.store(in, g.w.reason(5, 0), reason);
    g.raise(Flag::gone, 5, 0, static_cast<uint32_t>(Code::timed_out), 1);
    EXPECT_EQ(g.text(),
              "0: has left epoch 5 with timed_out because of rank 1, and not called dispatch since\n"
              "1: has ended epoch 4, and not called dispatch since\n"
              "- rank 0 has left epoch 5 with timed_out because of rank 1, and not called dispatch since: dispatch 5 timed out "
              "here\n");
}

TEST(Inspect, KnowsTheGateByASleepWithNothingMissing) {
    Crafted g(2, Landing::packed, 1);
    g.raise(Flag::counted, 1, 0), g.raise(Flag::counted, 1, 1);
    g.count(1, 0, 0), g.count(1, 1, 0);
    g.raise(Flag::returned, 1, 0, layout::returned_dropped);  // rank 0 has dropped its batch, and calls dispatch 2
    EXPECT_EQ(g.look().members[0].phase, Phase::between);
    g.sleep(0);
    EXPECT_EQ(inspect::phase_text(g.look().members[0]),
              "waits in dispatch 2 for rank 1 to end the epoch that used the slot before");
    EXPECT_EQ(g.look().members[1].phase, Phase::batch);
}

TEST(Inspect, KnowsTheGateAlsoBehindAnEpochThatWasLeft) {
    Crafted g(2, Landing::packed, 1);
    g.raise(Flag::counted, 1, 0), g.raise(Flag::counted, 1, 1);
    g.count(1, 0, 1), g.count(1, 1, 1);
    g.raise(Flag::gone, 1, 0, static_cast<uint32_t>(Code::timed_out), 1);
    EXPECT_EQ(g.look().members[0].phase, Phase::departed);
    g.sleep(0);  // in dispatch 2
    EXPECT_EQ(g.look().members[0].phase, Phase::gate);
    EXPECT_EQ(g.look().members[0].awaited, std::vector<int>{1});
}

TEST(Inspect, ReadsPaddedAndInPlaceLandingByTheirOneFlag) {
    for (const Landing landing : {Landing::padded, Landing::in_place}) {
        Crafted g(3, landing);
        EXPECT_EQ(g.look().members[0].phase, Phase::fresh);
        g.play(1);
        EXPECT_EQ(g.look().members[2].phase, Phase::between);
        g.raise(Flag::arrived, 2, 0);
        g.raise(Flag::arrived, 2, 2);
        EXPECT_EQ(inspect::phase_text(g.look().members[2]), "waits in dispatch 2 for the rows of rank 1");
        g.raise(Flag::arrived, 2, 1);
        EXPECT_EQ(g.look().members[2].phase, Phase::batch);
    }
}

TEST(Inspect, KnowsWhoShrinksAndWhoIsLeft) {
    Crafted g(3);
    g.play(5);
    g.life(2, Life::ended);
    g.member(0, {.closed = 0, .regroup = Turn::of(1, 7).bits, .reserved = {}});
    EXPECT_EQ(inspect::phase_text(g.look().members[0]), "waits in shrink (generation 1) for rank 1 to call it too");

    layout::Offer offer{};
    offer.generation = 1;
    offer.base = 7;
    offer.members[0] = 0b011;
    g.member(1, {.closed = 0, .regroup = Turn::of(1, 6).bits, .reserved = {}});
    g.store(1, g.w.offer(1), offer);
    g.store(0, g.w.decision, layout::Decision{.word = Word::of(1, 0, 1).bits, .reserved = {}});
    EXPECT_EQ(g.look().generation, 1U);
    EXPECT_EQ(inspect::phase_text(g.look().members[0]), "has ended epoch 6, and not called dispatch since");
    EXPECT_EQ(g.look().members[2].phase, Phase::left);
    g.raise(Flag::counted, 7, 0);  // the dead rank is not awaited any more
    EXPECT_EQ(g.look().members[0].awaited, std::vector<int>{1});
}

TEST(Inspect, AWindowThatCannotBeReadIsSaidToBeSo) {
    Crafted g(2);
    g.play(2);
    g.bytes[1].resize(0);
    EXPECT_EQ(inspect::phase_text(g.look().members[1]), "its window cannot be read");
    EXPECT_EQ(g.look().members[1].told.returned, 2U) << "what it raised lies in the windows of others";
}

TEST(Inspect, ReadsTheHeaderAndRefusesWhatIsNone) {
    Crafted g(3, Landing::in_place);
    inspect::Window window;
    const std::span<std::byte> header = std::span(g.bytes[2]).first(inspect::header_bytes);
    ASSERT_TRUE(inspect::read_window(header, &window).ok());
    EXPECT_EQ(window.rank, 2);
    EXPECT_EQ(window.ranks, 3);
    EXPECT_EQ(window.process, 4702);
    EXPECT_EQ(window.bytes, g.w.bytes);
    EXPECT_EQ(window.options.landing, Landing::in_place);
    EXPECT_EQ(window.options.experts, 6);
    const auto code_with = [&](size_t offset, auto value) {
        std::vector<std::byte> changed(header.begin(), header.end());
        std::memcpy(changed.data() + offset, &value, sizeof value);
        return inspect::read_window(changed, &window).code();
    };
    EXPECT_EQ(code_with(0, uint64_t{0}), Code::stale);
    EXPECT_EQ(code_with(0, uint64_t{1}), Code::corrupt);
    EXPECT_EQ(code_with(offsetof(layout::WindowHeader, version), uint32_t{1}), Code::mismatch);
    EXPECT_EQ(code_with(offsetof(layout::WindowHeader, rank), int32_t{3}), Code::corrupt);
    EXPECT_EQ(code_with(offsetof(layout::WindowHeader, ranks), int64_t{1} << 40), Code::corrupt);
    EXPECT_EQ(code_with(offsetof(layout::WindowHeader, depth), int64_t{0}), Code::corrupt);
    EXPECT_EQ(code_with(offsetof(layout::WindowHeader, hidden), INT64_MAX), Code::corrupt);
    EXPECT_EQ(code_with(offsetof(layout::WindowHeader, window_bytes), uint64_t{4096}), Code::corrupt);
    EXPECT_EQ(inspect::read_window(header.first(100), &window).code(), Code::corrupt);

    // What a shape that fits no address space gives for a size.
    layout::WindowHeader h;
    std::memcpy(&h, header.data(), sizeof h);
    h.hidden = h.tokens_max = int64_t{1} << 29;
    h.topk = 1;
    h.window_bytes = layout::Region::limit_exceeded;
    EXPECT_EQ(inspect::read_window(std::as_bytes(std::span(&h, 1)), &window).code(), Code::corrupt);
}

// Another process may write anything: something is said, and nothing outside the windows is read.
TEST(Inspect, SurvivesNonsense) {
    const uint64_t seed = std::random_device()();
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    std::mt19937_64 random(seed);
    for (int round = 0; round < 200; ++round) {
        Crafted g(1 + static_cast<int>(random() % 5), static_cast<Landing>(1 + random() % 3),
                  1 + static_cast<int64_t>(random() % 3));
        for (std::vector<std::byte>& window : g.bytes)
            for (uint64_t at = g.w.bell; at + 8 <= g.w.slots; at += 8) {
                const uint64_t word = random() % 3 == 0 ? random() : random() % 4 << 16 | random() % 16 << 12 | random() % 8;
                std::memcpy(window.data() + at, &word, 8);
            }
        const inspect::Group seen = g.look();
        ASSERT_EQ(seen.members.size(), static_cast<size_t>(g.ranks()));
        for (const inspect::Member& m : seen.members) {
            EXPECT_FALSE(inspect::phase_text(m).empty());
            for (const int p : m.awaited) EXPECT_TRUE(p >= 0 && p < g.ranks());
        }
        for (const inspect::Remark& r : inspect::remarks(seen)) EXPECT_FALSE(r.text.empty());
    }
}

TEST(Needs, AreThoseOfTheWindowThatASessionReserves) {
    Options o;
    o.hidden = 7168;
    o.topk = 8;
    o.experts = 16;
    o.tokens_max = 256;
    o.landing = Landing::packed;
    inspect::Needs needs;
    ASSERT_TRUE(inspect::needs_of(o, 2, &needs).ok());
    EXPECT_EQ(needs.window_bytes, Session::open_local(o, 2).front().window_bytes());
    EXPECT_EQ(needs.mapped_bytes, 2 * needs.window_bytes);
    // Two slots, 256 * 8 rows of x and of y, 14336 bytes each; source info and the plane are less than a hundredth.
    const int64_t rows = 2 * 256 * 8 * 2 * int64_t{14336};
    EXPECT_GE(needs.touched_bytes, rows);
    EXPECT_LT(needs.touched_bytes, rows + rows / 100);
    EXPECT_LT(needs.touched_bytes, needs.window_bytes);
    o.hidden = 0;
    EXPECT_EQ(inspect::needs_of(o, 2, &needs).code(), Code::bad_input);
    o.hidden = int64_t{1} << 30;
    o.tokens_max = int64_t{1} << 27;
    EXPECT_EQ(inspect::needs_of(o, 2, &needs).code(), Code::capacity);
}

TEST(Build, NamesTheKernelsBestFirst) {
    const inspect::Build build = inspect::build();
    ASSERT_FALSE(build.kernels.empty());
    EXPECT_EQ(build.kernels.back(), "scalar");
    Options o;
    o.hidden = o.topk = o.experts = o.tokens_max = 1;
    EXPECT_EQ(build.kernels.front(), Session::open_local(o, 1).front().simd_name());
    EXPECT_EQ(build.window_format, layout::window_version);
    EXPECT_NE(build.libraries.find("fmt "), std::string::npos);
    EXPECT_NE(build.libraries.find("hwloc "), std::string::npos);
}

}  // namespace
}  // namespace switchyard::test
