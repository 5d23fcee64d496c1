// The steps of dispatch and combine without a session: over links whose windows cannot be loaded, and in windows that another
// process has written nonsense into. One thread plays all ranks, so that a test can stand between two steps.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <limits>
#include <random>
#include <thread>

#include "ep/combine.hpp"
#include "ep/dispatch.hpp"
#include "switchyard/reference.hpp"
#include "testing.hpp"

namespace switchyard {
namespace {

constexpr int ranks = 3;

struct Player {
    std::unique_ptr<Transport> link;
    std::unique_ptr<ep::Workers> workers = std::make_unique<ep::Workers>(1);
    std::unique_ptr<ep::Rank> rank;
    ep::Flight flight;
    ep::DispatchStep dispatch;
    ep::CombineStep combine;

    std::vector<uint16_t> x;
    std::vector<int32_t> ids;
    std::vector<float> weights;
    int64_t tokens = 0;

    DispatchArgs args() const { return {.x = x.data(), .tokens = tokens, .topk_ids = ids.data()}; }
    void start(uint64_t epoch) {
        flight.epoch = epoch;
        flight.slot = epoch % static_cast<uint64_t>(rank->window.shape.depth);
        dispatch.start(*rank, flight, args(), {});
    }
};

Options options_with(Landing landing, Format dispatch_quant, Format combine_quant) {
    Options o;
    o.hidden = 37;
    o.topk = 3;
    o.experts = 7;
    o.tokens_max = 6;
    o.rows_max = 60;
    o.cell_rows = 18;
    o.depth = 1;
    o.landing = landing;
    o.group_ranks = landing == Landing::in_place ? ranks : landing == Landing::two_level ? 2 : 1;
    o.dispatch_quant = dispatch_quant;
    o.combine_quant = combine_quant;
    return o;
}

std::vector<Player> players_over(const Options& o, bool reachable) {
    const layout::Window window = layout::window_of(ep::shape_of(o, ranks));
    std::vector<std::unique_ptr<Transport>> links = make_local_transports(ranks, reachable);
    std::vector<std::thread> threads;
    for (auto& link : links)
        threads.emplace_back([&link, &window] {
            std::vector<std::vector<std::byte>> cards;
            const Status s = link->attach({.card = {}, .window_bytes = window.bytes, .bell_offset = window.bell},
                                          Deadline::after_ms(60'000), &cards);
            if (!s.ok()) ADD_FAILURE() << s.text();
        });
    for (std::thread& t : threads) t.join();

    std::mt19937 random(7);
    std::vector<Player> players(ranks);
    for (int r = 0; r < ranks; ++r) {
        Player& p = players[static_cast<size_t>(r)];
        p.link = std::move(links[static_cast<size_t>(r)]);
        p.rank = std::make_unique<ep::Rank>(*p.link, window, quant::scalar_kernels(), *p.workers, o);
        p.flight.allocate(*p.rank);
        p.dispatch.allocate(*p.rank);
        p.combine.allocate(*p.rank);
        p.tokens = r == 1 ? 6 : 4;
        p.x.resize(static_cast<size_t>(p.tokens * o.hidden));
        p.ids.resize(static_cast<size_t>(p.tokens * o.topk));
        p.weights.resize(p.ids.size());
        for (uint16_t& v : p.x) v = static_cast<uint16_t>(0x3000 + random() % 0x1000);  // f16 from 0.125 to 2
        for (int32_t& id : p.ids) id = static_cast<int32_t>(random() % 8) - 1;
        for (float& w : p.weights) w = static_cast<float>(random() % 16) / 16;
    }
    return players;
}

std::vector<reference::RankInput> inputs_of(const std::vector<Player>& players) {
    std::vector<reference::RankInput> inputs;
    for (const Player& p : players) inputs.push_back({p.x.data(), p.tokens, p.ids.data(), p.weights.data()});
    return inputs;
}

/// Polls until the step ends; one that never does comes back pending, and fails the test instead of hanging it.
template <class Poll>
ep::Progress finish(Poll poll) {
    for (int looks = 0; looks < 100'000; ++looks)
        if (const ep::Progress p = poll(); p != ep::Progress::pending) return p;
    return ep::Progress::pending;
}
void dispatch_all(std::vector<Player>& players, std::vector<ep::Progress>& ends) {
    ends.assign(players.size(), ep::Progress::pending);
    for (int looks = 0; looks < 1000; ++looks)
        for (size_t r = 0; r < players.size(); ++r)
            if (ends[r] == ep::Progress::pending) ends[r] = players[r].dispatch.poll(*players[r].rank, players[r].flight, true);
}

/// The experts' output for slot k of a token: f16 patterns that differ with the token and with k.
std::vector<uint16_t> y_of(const Player& source, int64_t token, int64_t k, int64_t hidden) {
    std::vector<uint16_t> y(static_cast<size_t>(hidden));
    for (int64_t h = 0; h < hidden; ++h)
        y[static_cast<size_t>(h)] =
            static_cast<uint16_t>(0x3000 + (source.x[static_cast<size_t>(token * hidden + h)] + 31 * k) % 0x1000);
    return y;
}

TEST(Ends, ARankThatDroppedItsBatchAndClosedFailsNoDispatch) {
    Options o = options_with(Landing::packed, Format::none, Format::none);
    o.topk = 1;
    std::vector<Player> players = players_over(o, true);
    for (Player& p : players) {
        ASSERT_TRUE(p.rank->connect().ok());
        p.tokens = 1;
        p.ids.assign(1, 3);  // experts 0..2 on rank 0, 3..4 on rank 1, 5..6 on rank 2: all rows go to rank 1
        p.start(1);
    }
    const auto poll = [&](size_t r) { return players[r].dispatch.poll(*players[r].rank, players[r].flight, true); };
    EXPECT_EQ(poll(2), ep::Progress::pending);  // has counted
    EXPECT_EQ(poll(1), ep::Progress::pending);  // has counted
    ASSERT_EQ(poll(0), ep::Progress::done);     // has all counts, and no row to wait for
    ep::raise_closed(*players[0].rank);         // as the session does when it ends: here after the batch was dropped
    ep::drop(*players[0].rank, players[0].flight);
    EXPECT_EQ(poll(1), ep::Progress::pending) << players[1].dispatch.status().text();
    EXPECT_EQ(poll(2), ep::Progress::done) << players[2].dispatch.status().text();
    EXPECT_EQ(poll(1), ep::Progress::done) << players[1].dispatch.status().text();
}

TEST(Ends, WhyARankLeftCombineIsToldAlsoToThoseWhoGetNoRowOfIt) {
    Options o = options_with(Landing::packed, Format::none, Format::none);
    o.topk = 1;
    std::vector<Player> players = players_over(o, true);
    for (Player& p : players) {
        ASSERT_TRUE(p.rank->connect().ok());
        p.tokens = 1;
        p.ids.assign(1, 3);  // on rank 1
        p.start(1);
    }
    const auto poll = [&](size_t r) { return players[r].dispatch.poll(*players[r].rank, players[r].flight, true); };
    players[0].ids.assign(1, -1);  // rank 0 has no row for anybody
    EXPECT_EQ(poll(2), ep::Progress::pending);
    EXPECT_EQ(poll(1), ep::Progress::pending);
    ASSERT_EQ(poll(0), ep::Progress::done);
    players[0].combine.start(*players[0].rank, players[0].flight, {.out = nullptr, .timeout_ms = -1});
    ep::raise_closed(*players[0].rank);
    EXPECT_EQ(poll(1), ep::Progress::pending) << players[1].dispatch.status().text();
}

// One slot: rank 0 drops its batch and dispatches again before the others have looked at what it sent them for the first.
class Ahead : public testing::TestWithParam<Landing> {};

TEST_P(Ahead, ARankOverwritesNothingThatAnotherHasNotSeen) {
    Options o = options_with(GetParam(), Format::none, Format::none);
    o.topk = 1;
    std::vector<Player> players = players_over(o, true);
    for (Player& p : players) {
        ASSERT_TRUE(p.rank->connect().ok());
        p.ids.assign(static_cast<size_t>(p.tokens), 3);  // all rows go to rank 1: rank 0 waits for nobody's
    }
    const std::vector<reference::RankInput> inputs = inputs_of(players);
    const auto poll = [&](size_t r) { return players[r].dispatch.poll(*players[r].rank, players[r].flight, true); };
    for (Player& p : players) p.start(1);
    EXPECT_EQ(poll(2), ep::Progress::pending);  // what needs nobody is out
    EXPECT_EQ(poll(1), ep::Progress::pending);
    ASSERT_EQ(poll(0), ep::Progress::done);
    ep::drop(*players[0].rank, players[0].flight);
    std::vector<uint16_t> other(players[0].x.size(), 0x3C00);
    std::swap(players[0].x, other);
    players[0].start(2);
    EXPECT_EQ(poll(0), ep::Progress::pending);
    std::swap(players[0].x, other);

    EXPECT_NE(poll(2), ep::Progress::failed) << players[2].dispatch.status().text();
    ASSERT_NE(poll(1), ep::Progress::failed) << players[1].dispatch.status().text();
    ASSERT_EQ(poll(2), ep::Progress::done) << players[2].dispatch.status().text();
    ASSERT_EQ(poll(1), ep::Progress::done) << players[1].dispatch.status().text();
    Player& p = players[1];
    const reference::Received want = reference::dispatch(o, inputs, 1);
    ASSERT_EQ(p.flight.rows, want.rows);
    ASSERT_TRUE(ep::materialise(*p.rank, p.flight).ok());
    const layout::Window& w = p.rank->window;
    EXPECT_EQ(std::memcmp(p.rank->own(w.slot(0) + w.expand_x), want.expand_x.data(), want.expand_x.size()), 0);
    EXPECT_EQ(poll(0), ep::Progress::pending);
    for (const size_t r : {size_t{1}, size_t{2}}) ep::drop(*players[r].rank, players[r].flight);
    for (const size_t r : {size_t{1}, size_t{2}}) players[r].start(2);
    std::vector<ep::Progress> ends;
    dispatch_all(players, ends);
    for (size_t r = 0; r < players.size(); ++r) EXPECT_EQ(ends[r], ep::Progress::done) << players[r].dispatch.status().text();
}
INSTANTIATE_TEST_SUITE_P(Landings, Ahead, testing::ValuesIn(test::every_landing));

TEST(Reasons, ARefusalKeepsItsTextWhenTheDeadlineOfItsSenderStrikes) {
    for (const Landing landing : {Landing::packed, Landing::padded, Landing::allgather, Landing::alltoallv}) {
        std::vector<Player> players = players_over(options_with(landing, Format::none, Format::none), true);
        for (Player& p : players) ASSERT_TRUE(p.rank->connect().ok());
        players[0].ids[0] = 99;
        const auto poll = [&](size_t r) { return players[r].dispatch.poll(*players[r].rank, players[r].flight, true); };
        players[0].start(1);
        players[1].start(1);
        EXPECT_EQ(poll(0), ep::Progress::pending);
        EXPECT_EQ(poll(1), ep::Progress::pending);
        players[0].dispatch.give_up(*players[0].rank, players[0].flight, 5);  // rank 2 is slow
        players[2].start(1);
        EXPECT_EQ(poll(2), ep::Progress::failed);
        EXPECT_EQ(poll(1), ep::Progress::failed);
        for (size_t r : {size_t{1}, size_t{2}}) {
            EXPECT_EQ(players[r].dispatch.status().code(), Code::bad_input);
            EXPECT_NE(players[r].dispatch.status().text().find("topk_ids[0][0] is 99"), std::string::npos)
                << players[r].dispatch.status().text();
        }
    }
}

class Unreachable : public testing::TestWithParam<Landing> {};

TEST_P(Unreachable, RanksGetTheSameBytesByPut) {
    for (const auto& [out, home] :
         {std::pair{Format::none, Format::none}, std::pair{Format::mxfp8_e5m2, Format::int8_block8}}) {
        const Options o = options_with(GetParam(), out, home);
        std::vector<Player> players = players_over(o, false);
        const std::vector<reference::RankInput> inputs = inputs_of(players);
        for (Player& p : players) {
            ASSERT_TRUE(p.rank->connect().ok());
            EXPECT_EQ(p.rank->options.combine_path, CombinePath::push);
        }
        for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
            for (Player& p : players) p.start(epoch);
            std::vector<ep::Progress> ends;
            dispatch_all(players, ends);
            std::vector<std::vector<std::byte>> outs(ranks);
            for (int r = 0; r < ranks; ++r) {
                Player& p = players[static_cast<size_t>(r)];
                ASSERT_EQ(ends[static_cast<size_t>(r)], ep::Progress::done) << p.dispatch.status().text();
                const reference::Received want = reference::dispatch(o, inputs, r);
                const layout::Window& w = p.rank->window;
                const std::byte* slot = p.rank->own(w.slot(p.flight.slot));
                ASSERT_TRUE(ep::materialise(*p.rank, p.flight).ok());
                ASSERT_EQ(p.flight.rows, want.rows);
                EXPECT_EQ(std::memcmp(slot + w.expand_x, want.expand_x.data(), want.expand_x.size()), 0);
                EXPECT_TRUE(std::equal(want.dynamic_scales.begin(), want.dynamic_scales.end(), slot + w.scales));
                EXPECT_EQ(std::memcmp(slot + w.source_info, want.assist_info_for_combine.data(),
                                      4 * want.assist_info_for_combine.size()),
                          0);
                for (int64_t i = 0; i < want.rows; ++i) {
                    const int32_t* info = want.assist_info_for_combine.data() + 3 * i;
                    const auto y = y_of(players[static_cast<size_t>(info[0])], info[1], info[2], o.hidden);
                    std::memcpy(p.rank->own(w.slot(p.flight.slot) + w.y) + i * 2 * o.hidden, y.data(), 2 * y.size());
                }
                outs[static_cast<size_t>(r)].resize(static_cast<size_t>(p.tokens * 2 * o.hidden));
            }
            for (int r = 0; r < ranks; ++r) {
                Player& p = players[static_cast<size_t>(r)];
                p.combine.start(*p.rank, p.flight,
                                {.topk_weights = p.weights.data(), .out = outs[static_cast<size_t>(r)].data()});
            }
            for (int r = 0; r < ranks; ++r) {
                Player& p = players[static_cast<size_t>(r)];
                ASSERT_EQ(finish([&] { return p.combine.poll(*p.rank, p.flight, true); }), ep::Progress::done)
                    << p.combine.status().text();
                std::deque<std::vector<uint16_t>> rows;  // the reference keeps pointers to the rows of a token
                const auto want =
                    reference::combine(o, inputs[static_cast<size_t>(r)], r, [&](int source, int64_t t, int64_t k, int32_t) {
                        rows.push_back(y_of(players[static_cast<size_t>(source)], t, k, o.hidden));
                        return static_cast<const void*>(rows.back().data());
                    });
                EXPECT_EQ(outs[static_cast<size_t>(r)], want);
            }
        }
    }
}
INSTANTIATE_TEST_SUITE_P(Landings, Unreachable,
                         testing::Values(Landing::packed, Landing::padded, Landing::allgather, Landing::alltoallv));

TEST(Unreachable, WindowsAreRefusedByWhatMustLoadThem) {
    for (const bool in_place : {false, true}) {
        Options o = options_with(in_place ? Landing::in_place : Landing::packed, Format::none, Format::none);
        if (!in_place) o.combine_path = CombinePath::read;
        for (Player& p : players_over(o, false)) {
            const Status s = p.rank->connect();
            EXPECT_EQ(s.code(), Code::bad_input);
            EXPECT_NE(s.text().find(in_place ? "in_place" : "read"), std::string::npos) << s.text();
        }
    }
}

// Rank 0 refuses, and then its time is up before rank 1 has come: rank 1 still learns why.
class Refused : public testing::TestWithParam<Landing> {};

TEST_P(Refused, AReasonThatWasPublishedStands) {
    std::vector<Player> players = players_over(options_with(GetParam(), Format::none, Format::none), true);
    for (Player& p : players) ASSERT_TRUE(p.rank->connect().ok());
    players[0].ids[4] = 99;
    for (const size_t r : {size_t{0}, size_t{2}}) {
        players[r].start(1);
        EXPECT_EQ(players[r].dispatch.poll(*players[r].rank, players[r].flight, true), ep::Progress::pending);
    }
    players[0].dispatch.give_up(*players[0].rank, players[0].flight, 5);
    EXPECT_EQ(players[0].dispatch.status().code(), Code::timed_out);
    for (const size_t r : {size_t{1}, size_t{2}}) {
        Player& p = players[r];
        if (r == 1) p.start(1);
        EXPECT_EQ(finish([&] { return p.dispatch.poll(*p.rank, p.flight, true); }), ep::Progress::failed);
        EXPECT_EQ(p.dispatch.status().code(), Code::bad_input);
        EXPECT_NE(p.dispatch.status().text().find("rank 0: topk_ids[1][1] is 99"), std::string::npos)
            << p.dispatch.status().text();
    }
}

// A refusal that stands for an earlier error, here a death: nobody may take the refuser for the dead one.
TEST_P(Refused, WhoLeavesBecauseOfARefusalDoesNotPassItsCodeOn) {
    std::vector<Player> players = players_over(options_with(GetParam(), Format::none, Format::none), true);
    for (Player& p : players) ASSERT_TRUE(p.rank->connect().ok());
    for (size_t r = 0; r < 3; ++r) {
        Player& p = players[r];
        p.flight.epoch = 1;
        p.flight.slot = 0;
        p.dispatch.start(*p.rank, p.flight, p.args(), r == 2 ? Status(Code::peer_lost, "rank 2: rank 1 has died") : Status());
        static_cast<void>(p.dispatch.poll(*p.rank, p.flight, true));
    }
    Player& p = players[0];
    EXPECT_EQ(finish([&] { return p.dispatch.poll(*p.rank, p.flight, true); }), ep::Progress::failed);
    EXPECT_EQ(p.dispatch.status().code(), Code::peer_lost);
    const layout::Word gone = ep::see(*players[1].rank, layout::Flag::gone, 0, 0);
    EXPECT_EQ(gone.epoch(), 1U);
    EXPECT_EQ(static_cast<Code>(gone.code()), Code::bad_input);
    EXPECT_EQ(gone.rank(), 2);
}
INSTANTIATE_TEST_SUITE_P(Landings, Refused, testing::ValuesIn(test::every_landing));

// ------------------------------------------------------------------------------------------------------------------ partial

/// A link over which a rank can be seen to have died.
class Mortal final : public Transport {
 public:
    explicit Mortal(Transport& link) : Transport(link.rank(), link.size()), link_(link) {}
    int dead = -1;
    Status attach(const AttachRequest& r, Deadline d, std::vector<std::vector<std::byte>>* c) override {
        return link_.attach(r, d, c);
    }
    std::byte* window() override { return link_.window(); }
    const WindowMemory& memory() const override { return link_.memory(); }
    std::byte* reach(int peer) override { return link_.reach(peer); }
    void put(std::span<const Place> places, const void* data, size_t bytes) override { link_.put(places, data, bytes); }
    void raise(int peer, uint64_t offset, uint64_t value) override { link_.raise(peer, offset, value); }
    void ring() override { link_.ring(); }
    void poll() override { link_.poll(); }
    bool lost(int peer) override { return peer == dead; }
    uint32_t announce() override { return link_.announce(); }
    void sleep(uint32_t ticket, int64_t slice_ns) override { link_.sleep(ticket, slice_ns); }
    void awake() override { link_.awake(); }

 private:
    Transport& link_;
};

// Rank 2 counts, and dies before all its rows are out: its rows become rows of zeroes that nobody sent, the others get their
// batches, and combine leaves its experts out.
TEST(Partial, ADeathBetweenCountsAndRowsBlanksTheDeadRanksRows) {
    for (const bool partial : {true, false}) {
        Options o = options_with(Landing::packed, Format::mxfp8_e5m2, Format::none);
        o.combine_path = CombinePath::read;
        o.partial = partial;
        std::vector<Player> players = players_over(o, true);
        std::deque<Mortal> links;
        for (Player& p : players) {
            links.emplace_back(*p.link);
            p.rank = std::make_unique<ep::Rank>(links.back(), p.rank->window, quant::scalar_kernels(), *p.workers, o);
            p.flight.allocate(*p.rank);
            ASSERT_TRUE(p.rank->connect().ok());
            p.start(1);
        }
        const std::vector<reference::RankInput> inputs = inputs_of(players);
        for (Player& p : players) {  // garbage where rows will be: nothing of it may be left
            const layout::Window& w = p.rank->window;
            std::memset(p.rank->own(w.slot(p.flight.slot) + w.expand_x), 0x77, static_cast<size_t>(60 * w.row.payload_bytes));
            std::memset(p.rank->own(w.slot(p.flight.slot) + w.source_info), 0x77, 60 * 12);
        }
        players[2].dispatch.poll(*players[2].rank, players[2].flight,
                                 true);                           // its counts are out, and it makes no further step
        for (const size_t r : {size_t{0}, size_t{1}, size_t{0}})  // the others have all counts, and their rows are out
            EXPECT_EQ(players[r].dispatch.poll(*players[r].rank, players[r].flight, true), ep::Progress::pending);
        for (Mortal& link : links) link.dead = 2;
        const std::vector<ep::Progress> ends = [&] {
            std::vector<ep::Progress> all(2, ep::Progress::pending);
            for (int looks = 0; looks < 1000; ++looks)
                for (size_t r = 0; r < 2; ++r)
                    if (all[r] == ep::Progress::pending)
                        all[r] = players[r].dispatch.poll(*players[r].rank, players[r].flight, true);
            return all;
        }();
        if (!partial) {
            for (size_t r = 0; r < 2; ++r) {
                EXPECT_EQ(ends[r], ep::Progress::failed);
                EXPECT_EQ(players[r].dispatch.status().code(), Code::peer_lost);
            }
            continue;
        }
        for (int r = 0; r < 2; ++r) {
            Player& p = players[static_cast<size_t>(r)];
            ASSERT_EQ(ends[static_cast<size_t>(r)], ep::Progress::done) << p.dispatch.status().text();
            const reference::Received want = reference::dispatch(o, inputs, r);
            ASSERT_EQ(p.flight.rows, want.rows);
            const layout::Window& w = p.rank->window;
            const std::byte* slot = p.rank->own(w.slot(p.flight.slot));
            int blank = 0;
            for (int64_t i = 0; i < want.rows; ++i) {
                const int32_t* expected = want.assist_info_for_combine.data() + 3 * i;
                int32_t info[3];
                std::memcpy(info, slot + w.source_info + 12 * i, 12);
                const std::byte* row = slot + w.expand_x + i * w.row.payload_bytes;
                const std::byte* right = want.expand_x.data() + i * w.row.payload_bytes;
                if (expected[0] == 2) {
                    ++blank;
                    EXPECT_EQ(info[0], -1);
                    EXPECT_TRUE(std::all_of(row, row + w.row.payload_bytes, [](std::byte b) { return b == std::byte{0}; }));
                } else {
                    EXPECT_EQ(std::memcmp(info, expected, 12), 0);
                    EXPECT_EQ(std::memcmp(row, right, static_cast<size_t>(w.row.payload_bytes)), 0);
                    const auto y = y_of(players[static_cast<size_t>(info[0])], info[1], info[2], o.hidden);
                    std::memcpy(p.rank->own(w.slot(p.flight.slot) + w.y) + i * 2 * o.hidden, y.data(), 2 * y.size());
                }
            }
            EXPECT_GT(blank, 0) << "rank 2 has sent this rank nothing: the test shows nothing";
        }
        const ExpertRange lost = experts_of(2, ranks, o.experts);
        std::vector<std::vector<std::byte>> outs;
        std::vector<std::vector<int32_t>> missing;
        for (int r = 0; r < 2; ++r) {
            Player& p = players[static_cast<size_t>(r)];
            outs.emplace_back(static_cast<size_t>(p.tokens * 2 * o.hidden));
            missing.emplace_back(static_cast<size_t>(p.tokens), -1);
            p.combine.start(*p.rank, p.flight,
                            {.topk_weights = p.weights.data(), .out = outs.back().data(), .missing = missing.back().data()});
        }
        for (int r = 0; r < 2; ++r) {
            Player& p = players[static_cast<size_t>(r)];
            ASSERT_EQ(finish([&] { return p.combine.poll(*p.rank, p.flight, true); }), ep::Progress::done)
                << p.combine.status().text();
            std::vector<int32_t> used = p.ids, expected(static_cast<size_t>(p.tokens));
            for (size_t i = 0; i < used.size(); ++i)
                if (used[i] >= lost.first && used[i] < lost.last) used[i] = -1, ++expected[i / 3];
            EXPECT_EQ(missing[static_cast<size_t>(r)], expected);
            const reference::RankInput input{p.x.data(), p.tokens, used.data(), p.weights.data()};
            std::deque<std::vector<uint16_t>> rows;
            EXPECT_EQ(outs[static_cast<size_t>(r)],
                      reference::combine(o, input, r, [&](int source, int64_t t, int64_t k, int32_t) {
                          rows.push_back(y_of(players[static_cast<size_t>(source)], t, k, o.hidden));
                          return static_cast<const void*>(rows.back().data());
                      }));
        }
    }
}

// Rank 0 and rank 2 have counted; somebody writes into rank 0's window before it looks.
class Tampered : public testing::TestWithParam<Landing> {
 protected:
    std::vector<Player> players_after_counting() {
        std::vector<Player> players = players_over(options_with(GetParam(), Format::none, Format::none), true);
        for (Player& p : players) EXPECT_TRUE(p.rank->connect().ok());
        for (Player& p : players) p.start(1);
        // Each passes its gate and counts; the last one finds all counts there and goes on, which does not matter here.
        for (size_t r : {size_t{0}, size_t{2}, size_t{1}}) players[r].dispatch.poll(*players[r].rank, players[r].flight, true);
        return players;
    }
};

TEST_P(Tampered, CountsOfAnotherRankAreRefusedAsCorrupt) {
    for (const int32_t nonsense : {-1, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max(), 19}) {
        std::vector<Player> players = players_after_counting();
        Player& p = players[0];
        std::memcpy(p.rank->own(p.rank->window.count_row(p.flight.slot, 2)) + sizeof(layout::CountHead), &nonsense, 4);
        EXPECT_EQ(finish([&] { return p.dispatch.poll(*p.rank, p.flight, true); }), ep::Progress::failed);
        EXPECT_EQ(p.dispatch.status().code(), Code::corrupt) << p.dispatch.status().text();
        EXPECT_NE(p.dispatch.status().text().find("rank 2"), std::string::npos) << p.dispatch.status().text();
    }
}

TEST_P(Tampered, OwnCountsInTheWindowAreNeverReadBack) {
    std::vector<Player> players = players_after_counting();
    Player& p = players[0];
    const std::vector<int32_t> zeros(static_cast<size_t>(p.rank->window.shape.experts));
    std::memcpy(p.rank->own(p.rank->window.count_row(p.flight.slot, 0)) + sizeof(layout::CountHead), zeros.data(),
                4 * zeros.size());
    std::vector<ep::Progress> ends;
    dispatch_all(players, ends);
    ASSERT_EQ(ends[0], ep::Progress::done) << p.dispatch.status().text();
    EXPECT_EQ(p.flight.rows, reference::dispatch(p.rank->options, inputs_of(players), 0).rows);
}
INSTANTIATE_TEST_SUITE_P(Landings, Tampered, testing::ValuesIn(test::every_landing));

TEST(Tampered, IdsThatAreNotThoseCountedAreCorruptAndWriteNothing) {
    // An expert of rank 0 more, one less, one too many of another of its experts, and no expert at all.
    const Options o = options_with(Landing::in_place, Format::none, Format::none);
    const ExpertRange range = experts_of(0, 3, o.experts);
    ASSERT_GE(range.count(), 2);
    int tried = 0;
    for (const int32_t instead : {0, 1, static_cast<int32_t>(o.experts) - 1, -1, std::numeric_limits<int32_t>::min(),
                                  std::numeric_limits<int32_t>::max()}) {
        std::vector<Player> players = players_over(o, true);
        for (Player& p : players) ASSERT_TRUE(p.rank->connect().ok());
        for (Player& p : players) p.start(1);
        for (Player& p : players) p.dispatch.poll(*p.rank, p.flight, true);
        Player& p = players[0];
        const layout::Window& w = players[2].rank->window;
        std::byte* ids = players[2].rank->own(w.slot(players[2].flight.slot) + w.x_ids);
        for (int64_t i = 0; i < players[2].tokens * o.topk; ++i) {
            int32_t id;
            std::memcpy(&id, ids + 4 * i, 4);
            const bool to_rank_0 = id >= range.first && id < range.last, was = instead >= range.first && instead < range.last;
            if (id == instead || (!to_rank_0 && !was)) continue;
            std::memcpy(ids + 4 * i, &instead, 4);
            ++tried;
            break;
        }
        EXPECT_EQ(finish([&] { return p.dispatch.poll(*p.rank, p.flight, true); }), ep::Progress::failed) << instead;
        EXPECT_EQ(p.dispatch.status().code(), Code::corrupt) << p.dispatch.status().text();
        EXPECT_NE(p.dispatch.status().text().find("rank 2"), std::string::npos) << p.dispatch.status().text();
    }
    EXPECT_EQ(tried, 6);
}

TEST(Tampered, SourceInfoThatPointsNowhereIsCorruptAndWritesNothing) {
    for (const Landing landing : {Landing::packed, Landing::in_place, Landing::two_level, Landing::allgather})
        for (const auto& [field, value] : {std::pair{0, 3}, std::pair{0, -2}, std::pair{1, 6}, std::pair{1, -1},
                                           std::pair{0, std::numeric_limits<int32_t>::max()}}) {
            Options o = options_with(landing, Format::none, Format::none);
            o.combine_path = CombinePath::push;
            std::vector<Player> players = players_over(o, true);
            for (Player& p : players) ASSERT_TRUE(p.rank->connect().ok());
            for (Player& p : players) p.start(1);
            std::vector<ep::Progress> ends;
            dispatch_all(players, ends);
            Player& p = players[0];
            ASSERT_EQ(ends[0], ep::Progress::done);
            ASSERT_GT(p.flight.rows, 0);
            const layout::Window& w = p.rank->window;
            std::memcpy(p.rank->own(w.slot(p.flight.slot) + w.source_info) + 4 * field, &value, 4);
            if (ep::rows_lie_apart(landing)) {
                ExpertBatch::Row row;
                EXPECT_EQ(ep::find_row(p.flight, 0, &row).code(), Code::corrupt);
                EXPECT_EQ(ep::materialise(*p.rank, p.flight).code(), Code::corrupt);
            }
            std::vector<std::byte> out(static_cast<size_t>(p.tokens * 2 * o.hidden));
            p.combine.start(*p.rank, p.flight, {.out = out.data()});
            EXPECT_EQ(finish([&] { return p.combine.poll(*p.rank, p.flight, true); }), ep::Progress::failed);
            EXPECT_EQ(p.combine.status().code(), Code::corrupt);
        }
}

}  // namespace
}  // namespace switchyard
