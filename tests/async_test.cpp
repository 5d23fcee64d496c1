// Facts about calls in two halves: dispatch_async and combine_async, their handles, option progress, and the pipeline made of
// them.
#include <algorithm>
#include <map>
#include <optional>

#include "switchyard/pipeline.hpp"
#include "testing.hpp"

namespace switchyard::test {
namespace {

constexpr int64_t never_ms = 20000 * slowness;         // a deadline that a sound session does not reach
constexpr int64_t short_ms = slowness > 1 ? 200 : 60;  // a deadline that a test waits for

struct Way {
    ProgressBy progress;
    Landing landing;
    CombinePath path = CombinePath::read;
};
constexpr Way every_way[] = {
    {ProgressBy::caller, Landing::packed},   {ProgressBy::caller, Landing::padded, CombinePath::push},
    {ProgressBy::caller, Landing::in_place}, {ProgressBy::worker, Landing::packed},
    {ProgressBy::worker, Landing::padded},   {ProgressBy::worker, Landing::in_place, CombinePath::push}};

class Async : public testing::TestWithParam<Way> {
 protected:
    Options options(int64_t depth) const {
        Options o;
        o.hidden = 33;
        o.topk = 2;
        o.experts = 7;
        o.tokens_max = 5;
        o.depth = depth;
        o.landing = GetParam().landing;
        o.combine_path = GetParam().path;
        o.progress = GetParam().progress;
        o.timeout_ms = never_ms;
        return o;
    }
    void open(int ranks, int64_t depth = 2) {
        const Options o = options(depth);
        sessions.clear();
        sessions = Session::open_local(o, ranks);
        Random random(7 + static_cast<uint64_t>(ranks));
        std::vector<int64_t> tokens;
        for (int r = 0; r < ranks; ++r) tokens.push_back(o.tokens_max - r % 3);
        problem = make_problem(random, o, tokens);
    }
    Session& at(int rank) { return sessions[static_cast<size_t>(rank)]; }
    DispatchArgs args(int rank) const { return dispatch_args(problem, rank); }
    void round_works() { expect_round_works(sessions, problem); }
    ExpertBatch dispatched(int rank) {
        ExpertBatch batch = at(rank).dispatch_async(args(rank)).get();
        EXPECT_EQ(difference_of_batch(batch, problem, rank), "");
        fill_y(batch, problem, rank, batch.y());
        return batch;
    }

    std::vector<Session> sessions;
    Problem problem;
};

std::string name_of(Way way) {
    const char* landing = way.landing == Landing::packed ? "Packed" : way.landing == Landing::padded ? "Padded" : "InPlace";
    return std::string(way.progress == ProgressBy::caller ? "Caller" : "Worker") + landing +
           (way.path == CombinePath::read ? "Read" : "Push");
}
INSTANTIATE_TEST_SUITE_P(Session, Async, testing::ValuesIn(every_way), [](const auto& named) { return name_of(named.param); });

// ----------------------------------------------------------------------------------------------------------------- results

// One dispatch with its combine on one rank, at whatever point it is.
struct Flow {
    const Problem* problem;
    PendingDispatch going;
    PendingCombine coming;
    Output out;
    std::vector<std::byte> y;
};

/// `rounds` dispatches with as many in flight as the depth allows. All ranks begin them in the same order; each waits in an
/// order of its own, by wait, by poll, or by a wait that runs out. Returns the first difference.
std::string play(Session& session, const std::vector<Problem>& problems, int rounds, uint64_t seed) {
    const int rank = session.rank();
    const auto depth = session.options().depth;
    Random own(mix(seed, static_cast<uint64_t>(rank)));
    std::string first;
    const auto note = [&](std::string found) {
        if (first.empty()) first = std::move(found);
    };
    const auto finish = [&](Pending& handle) {
        switch (own.below(3)) {
            case 0: handle.wait(); break;
            case 1:
                while (!handle.wait(1)) {
                }
                break;
            default:
                while (!handle.poll()) std::this_thread::yield();
        }
    };
    for (int done = 0; done < rounds;) {
        std::vector<Flow> flows(static_cast<size_t>(depth));
        std::vector<size_t> order;
        for (Flow& flow : flows) {
            flow.problem = &problems[static_cast<size_t>(done++) % problems.size()];
            flow.out = output_of(*flow.problem, rank);
            flow.going = session.dispatch_async(dispatch_args(*flow.problem, rank));
            order.push_back(order.size());
        }
        std::shuffle(order.begin(), order.end(), own);
        for (const size_t i : order) finish(flows[i].going);
        for (Flow& flow : flows) {  // combines begin in one order everywhere
            const Problem& p = *flow.problem;
            ExpertBatch batch = flow.going.get();
            note(difference_of_batch(batch, p, rank));
            CombineArgs args = combine_args(p, rank, flow.out.data());
            flow.y.resize(static_cast<size_t>(batch.rows() * p.options.hidden) * token_bytes(p.options.dtype));
            const bool in_window = own.one_in(2);
            fill_y(batch, p, rank, in_window ? batch.y() : flow.y.data());
            if (!in_window) args.y = flow.y.data();
            flow.coming = session.combine_async(batch, args);
        }
        std::shuffle(order.begin(), order.end(), own);
        for (const size_t i : order) {
            finish(flows[i].coming);
            note(flows[i].out.difference_from("x", flows[i].problem->combined[static_cast<size_t>(rank)]));
        }
    }
    return first;
}

TEST(AsyncSession, RandomShapesGiveTheBytesOfTheReference) {
    Random random;
    for (int64_t n = 0; n < scaled(40); ++n) {
        const auto ranks = static_cast<int>(1 + random.below(5));
        Options o;
        o.hidden = random.pick<int64_t>({1, 7, 33, 100});
        o.topk = random.pick<int64_t>({1, 2, 5});
        o.experts = random.pick<int64_t>({1, 3, ranks + 1, 13});
        o.tokens_max = random.pick<int64_t>({0, 1, 5, 9});
        o.dispatch_quant = random.pick({Format::none, Format::int8_token, Format::mxfp8_e5m2});
        o.combine_quant = random.pick({Format::none, Format::int8_block8});
        o.expert_alignment = random.pick<int64_t>({1, 16});
        o.deliver_weights = random.one_in(2);
        o.depth = random.pick<int64_t>({1, 2, 4, 4});
        o.landing = random.pick(
            {Landing::packed, Landing::padded, Landing::in_place, Landing::allgather, Landing::two_level, Landing::alltoallv});
        o.group_ranks = o.landing == Landing::two_level ? 1 + random.below(ranks) : 0;
        o.combine_path = random.pick({CombinePath::read, CombinePath::push});
        o.jitter_us = random.one_in(3) ? 200 : 0;
        o.timeout_ms = never_ms;
        SCOPED_TRACE(std::to_string(ranks) + " ranks: " + text_of(o));
        std::vector<Problem> problems;
        for (int i = 0; i < 3; ++i) {
            std::vector<int64_t> tokens;
            for (int r = 0; r < ranks; ++r) tokens.push_back(random.below(o.tokens_max + 1));
            problems.push_back(
                make_problem(random, o, tokens, random.pick({Routing::uniform, Routing::skewed, Routing::sparse})));
        }
        std::vector<Options> all(static_cast<size_t>(ranks), o);  // who moves concerns each rank alone
        for (Options& mine : all) {
            mine.progress = random.pick({ProgressBy::caller, ProgressBy::worker});
            mine.workers = random.pick<int64_t>({1, 1, 2});
        }
        std::vector<Session> sessions = Session::open_local(all);
        const uint64_t seed = random();
        on_ranks(ranks, [&](int r) { EXPECT_EQ(play(sessions[static_cast<size_t>(r)], problems, 12, seed), "") << r; });
        if (HasFailure()) return;
    }
}

TEST_P(Async, PipelineGivesTheSameBytesForAnyNumberOfChunks) {
    for (const int64_t depth : {1, 2, 4}) {
        open(3, depth);
        on_ranks(3, [&](int r) {
            const RankData& d = problem.ranks[static_cast<size_t>(r)];
            for (const int64_t chunks : {1, 2, 3, 7}) {
                Output out = output_of(problem, r);
                std::map<int64_t, int64_t> seen;
                pipeline(at(r),
                         {.x = d.x.data(),
                          .tokens = d.tokens,
                          .row_stride = d.stride,
                          .topk_ids = d.ids.data(),
                          .topk_weights = problem.weighted ? d.weights.data() : nullptr,
                          .shared = problem.with_shared ? d.shared.data() : nullptr,
                          .out = out.data(),
                          .chunks = chunks},
                         [&](ExpertBatch& batch, int64_t chunk) {
                             ++seen[chunk];
                             // Token t of a chunk is a later one of the problem.
                             const auto info = batch.assist_info_for_combine();
                             const auto offsets = batch.expert_offsets();
                             const auto first = static_cast<int32_t>(experts_of(r, 3, problem.options.experts).first);
                             for (size_t e = 0; e + 1 < offsets.size(); ++e)
                                 for (auto i = static_cast<size_t>(offsets[e]); i < static_cast<size_t>(offsets[e + 1]); ++i) {
                                     const int64_t all = problem.ranks[static_cast<size_t>(info[3 * i])].tokens;
                                     const int64_t start = all / chunks * chunk + std::min(chunk, all % chunks);
                                     expert_row(problem, first + static_cast<int32_t>(e), info[3 * i], start + info[3 * i + 1],
                                                info[3 * i + 2], static_cast<std::byte*>(batch.y()) + i * 33 * 2);
                                     at(r).progress();
                                 }
                         });
                EXPECT_EQ(out.difference_from("x", problem.combined[static_cast<size_t>(r)]), "")
                    << "rank " << r << ", " << chunks << " chunks, depth " << depth;
                EXPECT_EQ(static_cast<int64_t>(seen.size()), chunks);
            }
            EXPECT_TRUE(is_error(outcome_of([&] { pipeline(at(r), {.chunks = 0}, [](ExpertBatch&, int64_t) {}); }),
                                 Code::bad_input, {"chunks is 0"}));
        });
        round_works();
    }
}

TEST_P(Async, RankThatOnlyPollsGetsThere) {
    open(2);
    on_ranks(2, [&](int r) {
        PendingDispatch going = at(r).dispatch_async(args(r));
        while (!going.poll()) std::this_thread::yield();
        EXPECT_TRUE(going.done() && going.valid());
        ExpertBatch batch = going.get();
        fill_y(batch, problem, r, batch.y());
        Output out = output_of(problem, r);
        PendingCombine coming = at(r).combine_async(batch, combine_args(problem, r, out.data()));
        EXPECT_EQ(coming.epoch(), 1U);
        while (!coming.poll()) std::this_thread::yield();
        EXPECT_TRUE(coming.poll() && coming.wait()) << "a good end is told again";
        EXPECT_EQ(out.difference_from("x", problem.combined[static_cast<size_t>(r)]), "");
        EXPECT_TRUE(is_error(outcome_of([&] { going.get(); }), Code::stale, {"taken already"}));
    });
    round_works();
}

TEST_P(Async, WhatNeedsNobodyIsSentAtOnceAndAWorkerSendsTheRest) {
    // Rank 0 begins a dispatch and makes no call until rank 1 has its batch: with packed landing a caller would have to send
    // rows after the counts of rank 1 have come.
    open(2);
    if (GetParam().progress == ProgressBy::caller && GetParam().landing == Landing::packed) GTEST_SKIP();
    Signal received;
    on_ranks(2, [&](int r) {
        PendingDispatch going = at(r).dispatch_async(args(r));
        if (r == 0) received.wait();
        ExpertBatch batch = going.get();
        EXPECT_EQ(difference_of_batch(batch, problem, r), "");
        if (r == 1) received.raise();
        fill_y(batch, problem, r, batch.y());
        Output out = output_of(problem, r);
        at(r).combine(batch, combine_args(problem, r, out.data()));
        EXPECT_EQ(out.difference_from("x", problem.combined[static_cast<size_t>(r)]), "");
    });
}

TEST_P(Async, WorkerEndsADispatchAndACombineWithoutTheCaller) {
    if (GetParam().progress == ProgressBy::caller) GTEST_SKIP();
    open(2);
    on_ranks(2, [&](int r) {
        PendingDispatch going = at(r).dispatch_async(args(r));
        while (!going.done()) sleep_ms(1);  // done() looks at nothing
        ExpertBatch batch = going.get();
        fill_y(batch, problem, r, batch.y());
        Output out = output_of(problem, r);
        PendingCombine coming = at(r).combine_async(batch, combine_args(problem, r, out.data()));
        while (!coming.done()) sleep_ms(1);
        EXPECT_EQ(out.difference_from("x", problem.combined[static_cast<size_t>(r)]), "");
        EXPECT_TRUE(coming.poll());
    });
}

// ------------------------------------------------------------------------------------------------------------------- depth

TEST_P(Async, SlotIsTakenUntilItsEndWasGivenOut) {
    open(2, 2);
    on_ranks(2, [&](int r) {
        const auto full = [&](const char* what) {
            EXPECT_TRUE(is_error(outcome_of([&] { at(r).dispatch_async(args(r)); }), Code::depth, {what}));
        };
        PendingDispatch a = at(r).dispatch_async(args(r));
        PendingDispatch b = at(r).dispatch_async(args(r));
        full("the dispatch of epoch 1");
        b.wait();
        a.wait();
        full("epoch 1 is still open");
        ExpertBatch batch = a.get();
        fill_y(batch, problem, r, batch.y());
        Output out = output_of(problem, r);
        PendingCombine home = at(r).combine_async(std::move(batch), combine_args(problem, r, out.data()));
        full("the combine of epoch 1");
        while (!home.done()) at(r).progress();
        full("the combine of epoch 1");  // ended, but not told: whether it has ended is a matter of time
        EXPECT_TRUE(home.poll());
        PendingDispatch c = at(r).dispatch_async(args(r));
        EXPECT_EQ(c.epoch(), 3U) << "a refusal takes no epoch";
        c.wait();
    });
    round_works();
}

// ------------------------------------------------------------------------------------------------------------------ errors

TEST_P(Async, BadInputOfOneRankReachesAllThroughTheirHandles) {
    open(3);
    on_ranks(3, [&](int r) {
        DispatchArgs a = args(r);
        if (r == 1) a.tokens = 6;
        PendingDispatch going = at(r).dispatch_async(a);
        EXPECT_TRUE(is_error(outcome_of([&] { going.wait(); }), Code::bad_input, {"rank 1", "tokens is 6"}));
        EXPECT_FALSE(going.valid());
        EXPECT_TRUE(is_error(outcome_of([&] { going.poll(); }), Code::stale));
    });
    round_works();
    on_ranks(3, [&](int r) {
        ExpertBatch batch = dispatched(r);
        Output out = output_of(problem, r);
        CombineArgs a = combine_args(problem, r, out.data());
        if (r == 2) a.out = nullptr;
        PendingCombine coming = at(r).combine_async(batch, a);
        EXPECT_TRUE(is_error(outcome_of([&] { coming.wait(); }), Code::bad_input, {"out is null"}));
        EXPECT_TRUE(is_error(outcome_of([&] { batch.rows(); }), Code::stale));
    });
    round_works();
}

TEST_P(Async, DeadlineEndsWhatNobodyAnswers) {
    open(2);
    DispatchArgs a = args(0);
    a.timeout_ms = short_ms;
    PendingDispatch going = at(0).dispatch_async(a);
    EXPECT_FALSE(going.wait(1));
    EXPECT_TRUE(is_error(outcome_of([&] { going.wait(); }), Code::timed_out, {"dispatch 1", "rank 1"}));
    EXPECT_TRUE(is_error(outcome_of([&] { at(1).dispatch_async(args(1)).get(); }), Code::peer_left, {"rank 0"}));
    // Found by polling, too, and by whoever waits for another.
    a.timeout_ms = short_ms;
    going = at(0).dispatch_async(a);
    const Outcome end = outcome_of([&] {
        while (!going.poll()) sleep_ms(1);
    });
    EXPECT_TRUE(is_error(end, Code::timed_out));
    EXPECT_EQ(outcome_of([&] { at(1).dispatch(args(1)); }).code, Code::peer_left);
    round_works();
}

TEST_P(Async, DestroyedDispatchIsGivenUpForAll) {
    open(2);
    on_ranks(2, [&](int r) {
        if (r == 0) {
            at(0).dispatch_async(args(0));  // destroyed at once, with its rows out or not
            return;
        }
        const Outcome end = outcome_of([&] {
            ExpertBatch batch = at(1).dispatch(args(1));
            Output out = output_of(problem, 1);
            at(1).combine(batch, combine_args(problem, 1, out.data()));
        });
        EXPECT_TRUE(is_error(end, Code::peer_left, {"rank 0"}));
        // Its dispatch may have ended by then; otherwise it says why it gave up, whoever moves it.
        EXPECT_TRUE(end.text.find("its handle was destroyed") != std::string::npos ||
                    end.text.find("dropped its batch") != std::string::npos)
            << end.text;
    });
    round_works();
    // One that has ended, but was not taken, is a batch dropped.
    on_ranks(2, [&](int r) {
        PendingDispatch going = at(r).dispatch_async(args(r));
        going.wait();
        if (r == 0) return;
        ExpertBatch batch = going.get();
        fill_y(batch, problem, r, batch.y());
        Output out = output_of(problem, r);
        EXPECT_TRUE(is_error(outcome_of([&] { at(1).combine(batch, combine_args(problem, r, out.data())); }), Code::peer_left,
                             {"rank 0 dropped"}));
    });
    round_works();
}

TEST_P(Async, DestroyedCombineWritesNothingAndTheOthersGetTheirs) {
    open(2);
    Signal given_up;
    on_ranks(2, [&](int r) {
        ExpertBatch batch = dispatched(r);
        Output out = output_of(problem, r);
        if (r == 0) {
            at(0).combine_async(batch, combine_args(problem, 0, out.data()));
            given_up.raise();
            return;
        }
        given_up.wait();
        at(1).combine(batch, combine_args(problem, 1, out.data()));
        EXPECT_EQ(out.difference_from("x", problem.combined[1]), "");
    });
    round_works();
}

TEST_P(Async, CloseEndsWhatWasBegun) {
    open(2, 3);
    ExpertBatch batch;
    std::optional<ExpertBatch> other;
    on_ranks(2, [&](int r) { r == 0 ? void(batch = dispatched(0)) : void(other = dispatched(1)); });
    Output out = output_of(problem, 0);
    PendingCombine coming = at(0).combine_async(batch, combine_args(problem, 0, out.data()));
    PendingDispatch going = at(0).dispatch_async(args(0));
    at(0).close();
    EXPECT_TRUE(going.done() && coming.done());
    EXPECT_TRUE(is_error(outcome_of([&] { going.wait(); }), Code::stale, {"closed"}));
    EXPECT_TRUE(is_error(outcome_of([&] { coming.poll(); }), Code::stale, {"closed"}));
    EXPECT_TRUE(is_error(outcome_of([&] { at(0).dispatch_async(args(0)); }), Code::stale, {"closed"}));
    EXPECT_TRUE(is_error(outcome_of([&] { at(1).dispatch(args(1)); }), Code::peer_closed, {"rank 0"}));
}

TEST_P(Async, ShrinkEndsWhatWasBegunAndBringsRanksTogether) {
    open(2, 3);
    PendingDispatch a = at(0).dispatch_async(args(0));
    PendingDispatch b = at(0).dispatch_async(args(0));
    on_ranks(2, [&](int r) { EXPECT_EQ(at(r).shrink().size(), 2U); });
    EXPECT_TRUE(is_error(outcome_of([&] { a.wait(); }), Code::stale, {"shrink"}));
    EXPECT_TRUE(b.done());
    b = PendingDispatch();
    for (int i = 0; i < 4; ++i) round_works();
}

TEST_P(Async, RowsOfAHandleEndWithItsEpoch) {
    std::vector<Session> alone = Session::open_local(options(1), 1);
    Session& session = alone[0];
    const std::vector<std::byte> x(33 * 2);
    const int32_t ids[] = {0, 1};
    PendingDispatch going = session.dispatch_async({.x = x.data(), .tokens = 1, .topk_ids = ids});
    going.wait();
    EXPECT_EQ(going.rows_of(0), 1);
    EXPECT_EQ(session.shrink(), std::vector<int>{0});
    EXPECT_TRUE(is_error(outcome_of([&] { going.rows_of(0); }), Code::stale));
    EXPECT_TRUE(is_error(outcome_of([&] { going.y_of(0); }), Code::stale));
}

TEST_P(Async, HandleMayOutliveItsSessionAndMove) {
    open(2);
    PendingDispatch going = at(0).dispatch_async(args(0));
    PendingDispatch moved = std::move(going);
    EXPECT_FALSE(going.valid());
    EXPECT_TRUE(moved.valid());
    EXPECT_TRUE(is_error(outcome_of([&] { going.wait(); }), Code::stale));
    sessions.clear();
    EXPECT_TRUE(is_error(outcome_of([&] { moved.wait(); }), Code::stale));
    EXPECT_FALSE(PendingCombine().valid());
}

// ------------------------------------------------------------------------------------------------------------------- ready

class AsyncReady : public Async {
 protected:
    // Three ranks with a token each, to ids[rank]. Rank 2 is moved by its own calls alone, so that its rows stay away while it
    // makes none.
    void open_with_a_late_rank(int64_t experts) {
        Options o = options(2);
        o.experts = experts;
        o.topk = 1;
        o.tokens_max = 1;
        std::vector<Options> all(3, o);
        all[2].progress = ProgressBy::caller;
        sessions = Session::open_local(all);
        Random random(5);
        for (auto& row : x) fill_values(o.dtype, random(), false, 33, row.data());
    }
    // Rank 2 first, with its counts; it goes on when `go_on` was raised, where its rows are waited for by themselves.
    PendingDispatch dispatch_of(int r, const int32_t* ids, Signal& go_on) {
        if (r != 2) counted.wait();
        PendingDispatch going = at(r).dispatch_async({.x = x[static_cast<size_t>(r)].data(), .tokens = 1, .topk_ids = &ids[r]});
        if (r == 2) {
            counted.raise(2);
            if (early) go_on.wait();
        }
        return going;
    }
    void expect_own_token(int r, ExpertBatch& batch) {
        std::vector<std::byte> out(33 * 2);
        at(r).combine(batch, {.out = out.data()});
        EXPECT_EQ(difference("out", out, x[static_cast<size_t>(r)]), "") << r;
    }

    const bool early = GetParam().landing == Landing::packed;
    std::vector<std::vector<std::byte>> x = std::vector<std::vector<std::byte>>(3, std::vector<std::byte>(33 * 2));
    Signal counted;
};
INSTANTIATE_TEST_SUITE_P(Session, AsyncReady, testing::ValuesIn(every_way),
                         [](const auto& named) { return name_of(named.param); });

TEST_P(AsyncReady, ExpertIsReadyWhenItsSourcesHaveSent) {
    // An expert on each. Expert 0 gets rows of ranks 0 and 1 only; rank 2 sends its counts and no rows for long.
    open_with_a_late_rank(3);
    const int32_t ids[] = {0, 0, 1};
    Signal computed;
    on_ranks(3, [&](int r) {
        PendingDispatch going = dispatch_of(r, ids, computed);
        if (r == 0) {
            EXPECT_TRUE(is_error(outcome_of([&] { going.ready(1); }), Code::bad_input, {"1 experts"}));
            EXPECT_TRUE(going.wait_expert(0));
            EXPECT_TRUE(early || going.done());
            EXPECT_TRUE(going.ready(0));
            ASSERT_EQ(going.rows_of(0), 2);
            std::vector<std::byte> tile(2 * 33 * 2), plain;
            going.gather(0, 0, 2, tile.data());
            plain = x[0];
            plain.insert(plain.end(), x[1].begin(), x[1].end());
            EXPECT_EQ(difference("rows", tile, plain), "");
            std::memcpy(going.y_of(0), tile.data(), tile.size());
            computed.raise(2);
        }
        if (r == 1 && early) {  // its expert lacks rank 2, so nothing of it can be read
            // Moved by its own calls, it must go on: its rows leave when all counts are there.
            for (; !computed.is_raised(2); sleep_ms(1)) at(1).progress();
            EXPECT_FALSE(going.ready(0));
            EXPECT_FALSE(going.wait_expert(0, 1));
            EXPECT_TRUE(going.counted()) << "but how many there will be is known";
            EXPECT_EQ(going.counts()[0], 1);
            EXPECT_TRUE(is_error(outcome_of([&] { going.rows_of(0); }), Code::bad_input, {"not here yet"}));
            computed.raise(2);
        }
        if (r == 2 && early) computed.wait(4);
        ExpertBatch batch = going.get();
        if (r == 1) std::memcpy(batch.y(), batch.row(0).payload, 33 * 2);
        expect_own_token(r, batch);
    });
}

TEST_P(AsyncReady, ExpertsRunInTheOrderInWhichTheirRowsCome) {
    // Rank 0 has experts 0 and 1. Expert 0 gets a row of rank 2, which sends its counts and no rows until expert 1 has run.
    open_with_a_late_rank(6);
    const int32_t ids[] = {1, 1, 0};
    Signal computed;
    on_ranks(3, [&](int r) {
        PendingDispatch coming = dispatch_of(r, ids, computed);
        if (r == 1 && early)  // moved by its own calls, it must go on
            for (; !computed.is_raised(); sleep_ms(1)) at(1).progress();
        std::vector<int64_t> order;
        ExpertBatch batch = experts_as_they_come(at(r), coming, [&](int64_t e) {
            order.push_back(e);
            const int64_t rows = coming.rows_of(e);
            EXPECT_EQ(rows, r != 0 ? 0 : e == 0 ? 1 : 2);
            if (rows > 0) coming.gather(e, 0, rows, coming.y_of(e));
            if (r == 0 && e == 1) computed.raise(2);
        });
        EXPECT_EQ(order, r == 0 && early ? (std::vector<int64_t>{1, 0}) : (std::vector<int64_t>{0, 1})) << r;
        expect_own_token(r, batch);
    });
}

// ------------------------------------------------------------------------------------------------------------------ counts

TEST(AsyncSession, CountsAreThereBeforeRowsWhereALandingWaitsForThem) {
    for (const Landing landing : every_landing)
        for (const ProgressBy progress : {ProgressBy::caller, ProgressBy::worker}) {
            Options o;
            o.hidden = 33;
            o.topk = 2;
            o.experts = 7;
            o.tokens_max = 5;
            o.landing = landing;
            o.expert_alignment = 16;
            o.expert_token_nums = TokenNums::cumsum;
            o.timeout_ms = never_ms;
            SCOPED_TRACE(text_of(o) + (progress == ProgressBy::worker ? ", worker" : ""));
            std::vector<Options> all(2, o);
            all[0].progress = progress;
            std::vector<Session> sessions = Session::open_local(all);
            Random random(3);
            const Problem problem = make_problem(random, o, {5, 4});
            std::vector<int64_t> want;  // of rank 0
            int64_t before = 0;
            for (const int64_t n : problem.received[0].expert_token_nums) want.push_back(n - std::exchange(before, n));
            const auto is_early = landing == Landing::packed || landing == Landing::alltoallv;

            // Rank 1 sends its counts, and then makes no call, which its rows would need, until rank 0 has looked.
            PendingDispatch late = sessions[1].dispatch_async(dispatch_args(problem, 1));
            PendingDispatch going = sessions[0].dispatch_async(dispatch_args(problem, 0));
            EXPECT_TRUE(going.wait_counted());
            EXPECT_TRUE(going.counted());
            EXPECT_EQ(going.done(), !is_early);
            const std::span<const int64_t> counts = going.counts();
            EXPECT_EQ(std::vector<int64_t>(counts.begin(), counts.end()), want);
            on_ranks(2, [&](int r) {
                ExpertBatch batch = (r == 0 ? going : late).get();
                EXPECT_EQ(difference_of_batch(batch, problem, r), "");
                EXPECT_EQ(std::vector<int64_t>(counts.begin(), counts.end()), want) << "as long as the batch of rank 0";
                fill_y(batch, problem, r, batch.y());
                Output out = output_of(problem, r);
                sessions[static_cast<size_t>(r)].combine(batch, combine_args(problem, r, out.data()));
            });
            EXPECT_TRUE(is_error(outcome_of([&] { going.counts(); }), Code::stale, {"counts"}));
            EXPECT_TRUE(is_error(outcome_of([&] { going.counted(); }), Code::stale, {"counted"}));
        }
}

TEST_P(Async, CountsAreNotThereBeforeAllRanksHaveSentTheirs) {
    open(2);
    PendingDispatch going = at(0).dispatch_async(args(0));
    EXPECT_FALSE(going.counted());
    EXPECT_FALSE(going.wait_counted(1));
    EXPECT_TRUE(is_error(outcome_of([&] { going.counts(); }), Code::bad_input, {"dispatch 1", "wait_counted()"}));
    DispatchArgs bad = args(1);
    bad.tokens = 6;
    EXPECT_EQ(outcome_of([&] { at(1).dispatch(bad); }).code, Code::bad_input);
    EXPECT_TRUE(is_error(outcome_of([&] { going.wait_counted(); }), Code::bad_input, {"rank 1", "tokens is 6"}));
    EXPECT_TRUE(is_error(outcome_of([&] { going.counts(); }), Code::stale));
    round_works();
}

}  // namespace
}  // namespace switchyard::test
