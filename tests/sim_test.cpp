// The simulation: thousands of seeds that must be right, proof that it notices what it is there for, and the contract of its
// transport. `switchyard verify --sim --seed N --trace` shows what a seed plays.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <vector>

#include "quant/quant.hpp"
#include "switchyard/simulation.hpp"
#include "testing.hpp"
#include "transport/sim.hpp"

namespace switchyard {
namespace {

using simulation::Broken;

// --------------------------------------------------------------------------------------------------------------- whole games

TEST(Simulation, EverySeedIsRight) {
    const uint64_t first = test::Random().seed();
    const int64_t seeds = test::scaled(12'000);
    std::array<int64_t, 12> endings{};
    int64_t faults = 0;
    for (int64_t i = 0; i < seeds; ++i) {
        const uint64_t seed = first + static_cast<uint64_t>(i);
        const simulation::Report r = simulation::play({.seed = seed});
        ASSERT_EQ(r.failure, "") << r.scenario << "\nagain: switchyard verify --sim --trace --seed " << seed;
        for (size_t code = 0; code < endings.size(); ++code) endings[code] += r.endings[code];
        faults += r.faults;
    }
    // All that can happen has happened, many times; what must not is refused above.
    EXPECT_GT(faults, seeds);
    for (const Code code : {Code::ok, Code::bad_input, Code::mismatch, Code::capacity, Code::peer_lost, Code::peer_closed,
                            Code::peer_left, Code::timed_out})
        EXPECT_GT(endings[static_cast<size_t>(code)], seeds / 10) << code_name(code);
}

TEST(Simulation, ASeedPlaysTheSameWithEveryInstructionSet) {
    int64_t events = 0;
    for (uint64_t seed = 1; seed <= 300; ++seed) {
        const simulation::Report first = simulation::play({.seed = seed, .simd = Simd::scalar});
        for (const quant::Kernels* kernels : quant::available_kernels()) {
            const simulation::Report again = simulation::play({.seed = seed, .trace = true, .simd = kernels->simd});
            ASSERT_EQ(again.hash, first.hash) << "seed " << seed << " with " << kernels->name;
            ASSERT_EQ(again.turns, first.turns);
            ASSERT_EQ(again.scenario, first.scenario);
            events += static_cast<int64_t>(again.events.size());
        }
        ASSERT_TRUE(first.events.empty());
        ASSERT_NE(first.hash, simulation::play({.seed = seed + 1}).hash);
    }
    EXPECT_GT(events, 300 * 50);
}

// Each promise of the transport that the engine lives on, broken now and then, and within how many seeds from 1 on it shows.
struct Promise {
    Broken broken;
    uint64_t seeds;
};
class BrokenPromise : public testing::TestWithParam<Promise> {};

TEST_P(BrokenPromise, IsNoticed) {
    for (uint64_t seed = 1; seed <= GetParam().seeds; ++seed) {
        const simulation::Report r = simulation::play({.seed = seed, .broken = GetParam().broken});
        if (r.failure.empty()) continue;
        std::printf("seed %d: %s\n", static_cast<int>(seed), r.failure.c_str());
        return;
    }
    ADD_FAILURE() << "nothing has noticed it in " << GetParam().seeds << " seeds";
}
INSTANTIATE_TEST_SUITE_P(Every, BrokenPromise,
                         testing::Values(Promise{Broken::flag_before_puts, 20}, Promise{Broken::flags_overtake, 40},
                                         Promise{Broken::puts_overtake, 2000}, Promise{Broken::old_flag, 20},
                                         Promise{Broken::lost_wake_up, 60}, Promise{Broken::misplaced_put, 20}),
                         [](const auto& promise) { return std::string(simulation::broken_name(promise.param.broken)); });

// ------------------------------------------------------------------------------------------------------------------ the world

constexpr size_t window_bytes = 8192;
constexpr uint64_t bell_at = 64;
constexpr uint64_t flag_at = 128;
constexpr uint64_t data_at = 1024;

struct Worlds {
    sim::Log log{false};
    sim::World world;

    explicit Worlds(uint64_t seed, bool reachable = false, int ranks = 3)
        : world(seed,
                {.ranks = ranks,
                 .reachable = reachable,
                 .window_bytes = window_bytes,
                 .bell_offset = bell_at,
                 .delay_ns = 1000,
                 .late_ns = 20'000,
                 .late_one_in = 4},
                log) {
        std::vector<std::vector<std::byte>> cards;
        for (int r = 0; r < ranks; ++r) {
            const Status s =
                world.link(r).attach({.card = {}, .window_bytes = window_bytes, .bell_offset = bell_at}, {}, &cards);
            if (!s.ok()) ADD_FAILURE() << s.text();
        }
    }
    void put(int from, int to, uint64_t offset, uint64_t value) {
        const Place place{to, offset};
        world.link(from).put({&place, 1}, &value, sizeof value);
    }
    uint64_t at(int rank, uint64_t offset) const {
        uint64_t value;
        std::memcpy(&value, world.window(rank) + offset, sizeof value);
        return value;
    }
    /// Lets time pass to the next thing that happens; false when nothing will.
    bool go_on() {
        if (world.next_ns() == INT64_MAX) return false;
        world.pass(std::max<int64_t>(world.next_ns() - world.now(), 0));
        return true;
    }
};

constexpr uint64_t number = 0x0101010101010101;  // every byte of it tells whether it has arrived

TEST(SimTransport, AttachGivesFreshWindowsOnceAndOnlyOfTheRightSize) {
    Worlds w(1);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(w.world.window(1)) % 4096, 0U);
    EXPECT_TRUE(
        std::all_of(w.world.window(1), w.world.window(1) + window_bytes, [](std::byte b) { return b == std::byte{0}; }));
    EXPECT_EQ(w.world.link(1).window(), w.world.window(1));
    EXPECT_EQ(w.world.link(1).reach(1), w.world.window(1));
    EXPECT_EQ(w.world.link(1).reach(0), nullptr);
    EXPECT_EQ(Worlds(1, true).world.link(1).reach(3), nullptr);
    Worlds reachable(1, true);
    EXPECT_EQ(reachable.world.link(1).reach(0), reachable.world.window(0));

    std::vector<std::vector<std::byte>> cards;
    const AttachRequest request{.card = {}, .window_bytes = window_bytes, .bell_offset = bell_at};
    EXPECT_EQ(w.world.link(0).attach(request, {}, &cards).code(), Code::bad_input);
    sim::World fresh(1, {.ranks = 2, .window_bytes = 4096, .bell_offset = bell_at}, w.log);
    EXPECT_EQ(fresh.link(0).window(), nullptr);
    EXPECT_EQ(fresh.link(0).attach(request, {}, &cards).code(), Code::bad_input);
    EXPECT_THROW(fresh.link(0).raise(1, flag_at, 1), sim::CallerBug);
}

TEST(SimTransport, AFlagArrivesAfterAllBeforeItAndEveryOtherOrderOccurs) {
    int torn = 0, second_first = 0, later_put_first = 0, other_peer_first = 0, at_once = 0;
    for (uint64_t seed = 1; seed <= 400; ++seed) {
        Worlds w(seed);
        w.put(0, 1, data_at, number);
        w.put(0, 1, data_at + 8, number);
        w.world.link(0).raise(1, flag_at, 5);
        w.put(0, 1, data_at + 16, number);
        w.world.link(0).raise(1, flag_at + 8, 6);
        w.put(0, 2, data_at, number);
        w.world.link(0).raise(2, flag_at, 7);
        at_once += w.at(1, data_at) == number;
        do {
            const uint64_t first = w.at(1, data_at), second = w.at(1, data_at + 8), third = w.at(1, data_at + 16);
            ASSERT_TRUE(w.at(1, flag_at) == 0 || (first == number && second == number)) << "seed " << seed;
            ASSERT_TRUE(w.at(1, flag_at + 8) == 0 || (third == number && w.at(1, flag_at) == 5)) << "seed " << seed;
            ASSERT_TRUE(w.at(2, flag_at) == 0 || w.at(2, data_at) == number) << "seed " << seed;
            torn += first != 0 && first != number;
            second_first += second == number && first == 0;
            later_put_first += third == number && w.at(1, flag_at) == 0;
            other_peer_first += w.at(2, flag_at) == 7 && w.at(1, flag_at) == 0;
        } while (w.go_on());
        ASSERT_EQ(w.at(1, flag_at + 8), 6U);
        ASSERT_EQ(w.at(2, flag_at), 7U);
    }
    for (const int seen : {torn, second_first, later_put_first, other_peer_first}) EXPECT_GT(seen, 20);
    EXPECT_LT(at_once, 100);
}

TEST(SimTransport, PutsToOnePlaceArriveInTheirOrder) {
    for (uint64_t seed = 1; seed <= 400; ++seed) {
        Worlds w(seed);
        for (uint64_t i = 1; i <= 4; ++i) w.put(0, 1, data_at, i * number);
        uint8_t before = 0;
        while (w.go_on()) {
            const auto now = std::to_integer<uint8_t>(w.world.window(1)[data_at]);
            ASSERT_GE(now, before) << "seed " << seed;
            before = now;
        }
        ASSERT_EQ(w.at(1, data_at), 4 * number);
    }
}

TEST(SimTransport, ADeathCutsEveryStreamSomewhereAndIsKnownAfterwards) {
    int cut = 0, whole = 0, half = 0, known_apart = 0;
    for (uint64_t seed = 1; seed <= 400; ++seed) {
        Worlds w(seed);
        for (int to = 1; to <= 2; ++to)
            for (uint64_t i = 0; i < 4; ++i) {
                w.put(0, to, data_at + 8 * i, number);
                w.world.link(0).raise(to, flag_at + 8 * i, 5);
            }
        w.world.kill(0);
        std::array<bool, 3> known{};
        while (w.go_on())
            for (int to = 1; to <= 2; ++to) {
                if (known[static_cast<size_t>(to)]) continue;
                known[static_cast<size_t>(to)] = w.world.link(to).lost(0);
                known_apart += w.world.link(1).lost(0) != w.world.link(2).lost(0);
            }
        for (int to = 1; to <= 2; ++to) {
            ASSERT_TRUE(w.world.link(to).lost(0)) << "seed " << seed;
            EXPECT_FALSE(w.world.link(to).lost(3 - to));
            bool gap = false;
            for (uint64_t i = 0; i < 4; ++i) {
                const bool flag = w.at(to, flag_at + 8 * i) == 5, data = w.at(to, data_at + 8 * i) == number;
                ASSERT_TRUE(data || !flag) << "seed " << seed;
                ASSERT_FALSE(gap && flag) << "seed " << seed;
                gap = gap || !flag;
                half += data && !flag;
            }
            ++(gap ? cut : whole);
        }
    }
    for (const int seen : {cut, whole, half, known_apart}) EXPECT_GT(seen, 20);
}

TEST(SimTransport, NothingOfADeadRankArrivesOnceItIsKnownToBeLost) {
    for (uint64_t seed = 1; seed <= 400; ++seed) {
        Worlds w(seed);
        for (uint64_t i = 0; i < 8; ++i) {
            w.put(0, 1, data_at + 8 * i, number);
            w.world.link(0).raise(1, flag_at, i + 1);
        }
        w.world.kill(0);
        while (!w.world.link(1).lost(0)) ASSERT_TRUE(w.go_on());
        const std::vector<std::byte> then(w.world.window(1), w.world.window(1) + window_bytes);
        while (w.go_on()) {
        }
        ASSERT_EQ(std::memcmp(w.world.window(1), then.data(), window_bytes), 0) << "seed " << seed;
    }
}

TEST(SimTransport, ARingWakesWhoHasAnnouncedAndASleepEndsByItself) {
    int by_ring = 0, early = 0;
    for (uint64_t seed = 1; seed <= 400; ++seed) {
        constexpr int64_t slice = 1'000'000'000;
        Worlds w(seed);
        Transport& sleeper = w.world.link(1);
        const uint32_t ticket = sleeper.announce();
        sleeper.sleep(ticket, slice);
        ASSERT_TRUE(w.world.asleep(1) || w.world.next_ns() <= w.world.now());
        w.world.link(0).raise(1, flag_at, 5);
        w.world.link(0).ring();
        while (w.world.asleep(1)) {
            ASSERT_TRUE(w.go_on());
            if (w.at(1, flag_at) != 5 && !w.world.asleep(1)) ++early;
        }
        by_ring += w.at(1, flag_at) == 5 && w.world.now() < slice / 2;
        sleeper.awake();
        // Rung before the announcement: nobody is woken, and the flag is there to be seen.
        while (w.go_on()) {
        }
        w.world.link(0).raise(1, flag_at, 6);
        w.world.link(0).ring();
        while (w.go_on()) {
        }
        const uint32_t later = sleeper.announce();
        EXPECT_EQ(w.at(1, flag_at), 6U);
        // Rung between the look and the sleep: no sleep.
        w.world.link(0).raise(1, flag_at, 7);
        w.world.link(0).ring();
        while (w.go_on()) {
        }
        sleeper.sleep(later, slice);
        EXPECT_FALSE(w.world.asleep(1));
        sleeper.awake();
    }
    EXPECT_GT(by_ring, 300);
    EXPECT_LT(early, 100);

    Worlds w(1);
    w.world.link(2).sleep(w.world.link(2).announce(), 5000);
    while (w.go_on()) {
    }
    EXPECT_FALSE(w.world.asleep(2));
    EXPECT_LE(w.world.now(), 5000);
}

TEST(SimTransport, StoresThroughReachAreThereBeforeTheFlag) {
    Worlds w(3, true);
    std::memcpy(w.world.link(0).reach(1) + data_at, &number, sizeof number);
    EXPECT_EQ(w.at(1, data_at), number);
    w.world.link(0).raise(1, flag_at, 5);
    w.world.link(0).raise(0, flag_at, 5);
    EXPECT_EQ(w.at(0, flag_at), 5U) << "a rank's own window is at hand";
}

TEST(SimTransport, ABugOfTheCallerIsToldAndWritesNothing) {
    Worlds w(1);
    const uint64_t value = number;
    const auto put = [&](int to, uint64_t offset, size_t bytes) {
        const std::array<Place, 2> places{Place{1, data_at}, Place{to, offset}};
        std::vector<std::byte> data(bytes, std::byte{1});
        w.world.link(0).put(places, data.data(), bytes);
    };
    EXPECT_THROW(put(1, window_bytes - 7, 8), sim::CallerBug);
    EXPECT_THROW(put(1, UINT64_MAX - 3, 8), sim::CallerBug);
    EXPECT_THROW(put(3, 0, 8), sim::CallerBug);
    EXPECT_THROW(w.world.link(0).raise(-1, flag_at, value), sim::CallerBug);
    EXPECT_THROW(w.world.link(0).raise(1, flag_at + 4, value), sim::CallerBug);
    EXPECT_THROW(w.world.link(0).raise(1, window_bytes, value), sim::CallerBug);
    EXPECT_TRUE(w.world.idle());
    EXPECT_TRUE(w.world.guards_are_whole(1));
    w.world.window(1)[window_bytes] = std::byte{0};
    EXPECT_FALSE(w.world.guards_are_whole(1));
    w.world.window(2)[-1] = std::byte{0};
    EXPECT_FALSE(w.world.guards_are_whole(2));
}

TEST(SimTransport, EveryCallMayBeInterrupted) {
    Worlds w(1);
    std::vector<int> calls;
    w.world.between = [&](int rank) {
        calls.push_back(rank);
        EXPECT_TRUE(calls.size() != 2 || w.at(1, data_at) == 0) << "before the call has any effect";
    };
    w.world.link(2).poll();
    w.put(0, 1, data_at, number);
    w.world.link(0).raise(1, flag_at, 1);
    w.world.link(0).ring();
    static_cast<void>(w.world.link(1).lost(0));
    const uint32_t ticket = w.world.link(1).announce();
    w.world.link(1).sleep(ticket, 10);
    w.world.link(1).awake();
    EXPECT_EQ(calls, (std::vector<int>{2, 0, 0, 0, 1, 1, 1, 1}));
}

}  // namespace
}  // namespace switchyard
