// Facts about a session whose ranks are threads: results, refusals, lost deadlines, endings.
//
// Right results come from the scalar reference, which golden_test judges. What an error must be comes from the documents
// (semantics: bad input; protocol: who learns what): in the same call, on every rank, and the next round works.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>

#include "quant/quant.hpp"
#include "switchyard/balance.hpp"
#include "testing.hpp"

namespace switchyard::test {
namespace {

constexpr int64_t never_ms = 20000 * slowness;         // a deadline that a sound session does not reach
constexpr int64_t short_ms = slowness > 1 ? 200 : 60;  // a deadline that a test waits for

// Landing and combine path: everything must hold for each pair.
struct Way {
    Landing landing;
    CombinePath path;
};
constexpr Way every_way[] = {{Landing::packed, CombinePath::read},    {Landing::packed, CombinePath::push},
                             {Landing::padded, CombinePath::read},    {Landing::padded, CombinePath::push},
                             {Landing::in_place, CombinePath::read},  {Landing::in_place, CombinePath::push},
                             {Landing::allgather, CombinePath::read}, {Landing::two_level, CombinePath::read},
                             {Landing::alltoallv, CombinePath::read}, {Landing::alltoallv, CombinePath::push}};

std::string name_of(Way way) {
    constexpr const char* names[] = {"", "Packed", "Padded", "InPlace", "Allgather", "TwoLevel", "Alltoallv"};
    return names[static_cast<size_t>(way.landing)] + std::string(way.path == CombinePath::read ? "Read" : "Push");
}

/// A fact that must hold in every way.
class EveryWay : public testing::TestWithParam<Way> {
 protected:
    /// Three experts more than ranks, so that 3 does not divide them for most rank counts.
    Options options(int64_t depth = 2) const {
        Options o;
        o.hidden = 33;
        o.topk = 2;
        o.experts = 7;
        o.tokens_max = 5;
        o.depth = depth;
        o.landing = GetParam().landing;
        o.combine_path = GetParam().path;
        o.timeout_ms = never_ms;
        return o;
    }
    /// Sessions of `ranks` and a problem that sends rows between all of them.
    void open(int ranks, const Options& o) {
        sessions.clear();
        sessions = Session::open_local(o, ranks);
        Random random(7 + static_cast<uint64_t>(ranks));
        std::vector<int64_t> tokens;
        for (int r = 0; r < ranks; ++r) tokens.push_back(std::max<int64_t>(0, o.tokens_max - r % 3));
        problem = make_problem(random, o, tokens);
        quiet = make_problem(random, o, std::vector<int64_t>(static_cast<size_t>(ranks), 0));
    }
    void open(int ranks, int64_t depth = 2) { open(ranks, options(depth)); }

    Session& at(int rank) { return sessions[static_cast<size_t>(rank)]; }
    DispatchArgs args(int rank, int64_t timeout_ms = 0) const {
        DispatchArgs a = dispatch_args(problem, rank);
        a.timeout_ms = timeout_ms;
        return a;
    }
    ExpertBatch dispatched(int rank) {
        ExpertBatch batch = at(rank).dispatch(args(rank));
        EXPECT_EQ(difference_of_batch(batch, problem, rank), "") << "rank " << rank;
        fill_y(batch, problem, rank, batch.y());
        return batch;
    }
    Outcome dispatch_outcome(int rank, const DispatchArgs& a) {
        return outcome_of([&] { at(rank).dispatch(a); });
    }
    /// Combine of a batch of `problem` whose y is filled; right bytes when it succeeds.
    Outcome combine_outcome(int rank, ExpertBatch& batch, int64_t timeout_ms = 0) {
        Output out = output_of(problem, rank);
        CombineArgs a = combine_args(problem, rank, out.data());
        a.timeout_ms = timeout_ms;
        Outcome end = outcome_of([&] { at(rank).combine(batch, a); });
        if (end.code == Code::ok) {
            EXPECT_EQ(out.difference_from("x", problem.combined[static_cast<size_t>(rank)]), "") << "rank " << rank;
        }
        return end;
    }
    void round_works() { expect_round_works(sessions, problem); }

    std::vector<Session> sessions;
    Problem problem;
    Problem quiet;  ///< nobody sends anything
};

INSTANTIATE_TEST_SUITE_P(Session, EveryWay, testing::ValuesIn(every_way),
                         [](const auto& named) { return name_of(named.param); });

// ----------------------------------------------------------------------------------------------------------------- results

// The calls of a session in order, the same on all ranks: dispatch of a problem, or combine of an open batch.
struct Call {
    bool dispatch;
    int which;  // problem, or index among the open batches
};

std::vector<Call> random_calls(Random& random, int64_t depth, int problems, int dispatches) {
    std::vector<Call> calls;
    std::deque<int64_t> open;  // epochs
    int64_t epoch = 0;
    while (epoch < dispatches || !open.empty()) {
        const bool slot_free =
            std::none_of(open.begin(), open.end(), [&](int64_t e) { return e % depth == (epoch + 1) % depth; });
        if (epoch < dispatches && slot_free && (open.empty() || !random.one_in(3))) {
            open.push_back(++epoch);
            calls.push_back({true, static_cast<int>(random.below(problems))});
        } else {
            const int64_t i = random.below(static_cast<int64_t>(open.size()));
            calls.push_back({false, static_cast<int>(i)});
            open.erase(open.begin() + i);
        }
    }
    return calls;
}

/// Plays the calls on one rank; every result is checked. Returns the first difference.
std::string play(Session& session, const std::vector<Problem>& problems, const std::vector<Call>& calls, uint64_t seed) {
    struct Open {
        const Problem* problem;
        ExpertBatch batch;
    };
    std::deque<Open> open;
    std::string first;
    const auto note = [&](std::string found) {
        if (first.empty()) first = std::move(found);
    };
    const int rank = session.rank();
    for (size_t i = 0; i < calls.size(); ++i) {
        const uint64_t dice = mix(seed, i, static_cast<uint64_t>(rank));
        if (dice % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(dice / 5 % 200));
        const auto which = static_cast<size_t>(calls[i].which);
        if (calls[i].dispatch) {
            const Problem& p = problems[which];
            ExpertBatch batch = session.dispatch(dispatch_args(p, rank));
            note(difference_of_batch(batch, p, rank));
            open.push_back({&p, std::move(batch)});
            continue;
        }
        const Problem& p = *open[which].problem;
        ExpertBatch batch = std::move(open[which].batch);
        open.erase(open.begin() + calls[i].which);
        Output out = output_of(p, rank);
        CombineArgs args = combine_args(p, rank, out.data());
        std::vector<std::byte> y;
        if (dice / 7 % 2 == 0) {
            fill_y(batch, p, rank, batch.y());
        } else {
            y.resize(static_cast<size_t>(batch.rows() * p.options.hidden) * token_bytes(p.options.dtype));
            fill_y(batch, p, rank, y.data());
            args.y = y.data();
        }
        session.combine(batch, args);
        note(out.difference_from("x", p.combined[static_cast<size_t>(rank)]));
    }
    return first;
}

/// Opens sessions with these options, in that way, and plays the problems in random order.
void expect_right(Random& random, Options o, int ranks, const std::vector<Problem>& problems, Way way, int dispatches) {
    o.landing = way.landing;
    o.combine_path = way.path;
    o.timeout_ms = never_ms;
    SCOPED_TRACE(name_of(way) + ", " + std::to_string(ranks) + " ranks: " + text_of(o));
    const std::vector<Call> calls = random_calls(random, o.depth, static_cast<int>(problems.size()), dispatches);
    std::vector<Options> all(static_cast<size_t>(ranks), o);
    for (Options& mine : all) mine.workers = random.pick<int64_t>({1, 1, 2, 3});
    const uint64_t seed = random();
    std::vector<Session> sessions = Session::open_local(all);
    on_ranks(ranks,
             [&](int r) { EXPECT_EQ(play(sessions[static_cast<size_t>(r)], problems, calls, seed), "") << "rank " << r; });
}

void set_dispatch_format(Options& o, Random& random) {
    o.dispatch_quant =
        random.pick({Format::none, Format::int8_token, Format::mxfp8_e5m2, Format::mxfp8_e4m3, Format::fp8_e4m3_block128});
    o.mx_rule = random.pick({MxRule::floor, MxRule::ceil});
    o.mx_overflow =
        o.dispatch_quant == Format::mxfp8_e4m3 ? MxOverflow::saturate : random.pick({MxOverflow::saturate, MxOverflow::inf});
    o.fp8_scale = random.pick({Fp8Scale::f32, Fp8Scale::ue8m0});
}

TEST(Session, RandomShapesGiveTheBytesOfTheReferenceInEveryWay) {
    Random random;
    for (int64_t n = 0; n < scaled(300); ++n) {
        const auto ranks = static_cast<int>(1 + random.below(9));
        Options o;
        o.hidden = random.pick<int64_t>({1, 2, 7, 31, 33, 100, 257});
        o.topk = random.pick<int64_t>({1, 2, 3, 5, 8});
        o.experts = random.pick<int64_t>({1, 2, 3, ranks, ranks + 1, 2 * ranks - 1, 3 * ranks, 13});
        o.tokens_max = random.pick<int64_t>({0, 1, 2, 5, 9});
        o.dtype = random.pick({TokenType::f16, TokenType::bf16, TokenType::f32});
        if (o.dtype != TokenType::f32) {
            set_dispatch_format(o, random);
            o.combine_quant = random.pick({Format::none, Format::int8_block8, Format::int8_block128});
        }
        o.expert_token_nums = random.pick({TokenNums::count, TokenNums::cumsum});
        o.expert_alignment = random.pick<int64_t>({1, 1, 1, 16, 32, 128});
        o.deliver_weights = random.one_in(2);
        o.depth = 1 + random.below(3);
        std::vector<Problem> problems;
        for (int i = 0; i < 3; ++i) {
            std::vector<int64_t> tokens;
            for (int r = 0; r < ranks; ++r)
                tokens.push_back(i == 2 && random.one_in(2) ? 0 : random.one_in(4) ? 0 : random.below(o.tokens_max + 1));
            if (i == 0) tokens[0] = o.tokens_max;
            problems.push_back(make_problem(
                random, o, tokens, random.pick({Routing::uniform, Routing::skewed, Routing::sparse, Routing::repeated})));
        }
        for (const Way way : every_way) expect_right(random, o, ranks, problems, way, 8);
        if (testing::Test::HasFailure()) return;
    }
}

TEST(Session, EveryPairOfFormatsGivesTheBytesOfTheReferenceAtEveryWidth) {
    Random random;
    for (const int64_t hidden : {1, 2, 7, 31, 33, 100, 257})
        for (const TokenType dtype : {TokenType::f16, TokenType::bf16})
            for (const Format out :
                 {Format::none, Format::int8_token, Format::mxfp8_e5m2, Format::mxfp8_e4m3, Format::fp8_e4m3_block128})
                for (const Format home : {Format::none, Format::int8_block8, Format::int8_block128}) {
                    if (!random.one_in(slowness)) continue;
                    Options o;
                    o.hidden = hidden;
                    o.topk = 3;
                    o.experts = 5;
                    o.tokens_max = 4;
                    o.dtype = dtype;
                    o.dispatch_quant = out;
                    o.combine_quant = home;
                    o.mx_rule = random.pick({MxRule::floor, MxRule::ceil});
                    if (out == Format::mxfp8_e5m2) o.mx_overflow = random.pick({MxOverflow::saturate, MxOverflow::inf});
                    o.fp8_scale = random.pick({Fp8Scale::f32, Fp8Scale::ue8m0});
                    const std::vector<Problem> problems{make_problem(random, o, {4, 3}, Routing::sparse),
                                                        make_problem(random, o, {2, 4}, Routing::repeated)};
                    for (const Way way : every_way) expect_right(random, o, 2, problems, way, 3);
                    if (testing::Test::HasFailure()) return;
                }
}

TEST_P(EveryWay, NobodySendsAnythingManyTimes) {
    open(4);
    on_ranks(4, [&](int r) {
        for (int i = 0; i < 20; ++i) EXPECT_EQ(difference_of_round(at(r), quiet), "");
    });
    EXPECT_EQ(quiet.received[0].rows, 0);
}

TEST_P(EveryWay, ResultsAreKeptApartWhenBatchesOverlapWithoutABarrier) {
    // Every rank keeps all its outputs; they are compared only when all rounds are over. Ranks sleep at random wherever a phase
    // ends, so that one that is fast meets others that have not drained what it wants to overwrite.
    Options o = options(3);
    o.jitter_us = 300;
    open(3, o);
    Random random(11);
    std::vector<Problem> problems;
    for (int i = 0; i < 4; ++i) problems.push_back(make_problem(random, problem.options, {5, 4, 3}));
    constexpr int rounds = 40;
    std::vector<std::vector<Output>> kept(3);
    on_ranks(3, [&](int r) {
        std::deque<std::pair<const Problem*, ExpertBatch>> open_batches;
        auto& mine = kept[static_cast<size_t>(r)];
        for (int i = 0; i < rounds; ++i) mine.push_back(output_of(problems[static_cast<size_t>(i % 4)], r));
        size_t next_out = 0;
        const auto finish_oldest = [&] {
            auto [p, batch] = std::move(open_batches.front());
            open_batches.pop_front();
            fill_y(batch, *p, r, batch.y());
            at(r).combine(batch, combine_args(*p, r, mine[next_out++].data()));
        };
        for (int i = 0; i < rounds; ++i) {
            if (open_batches.size() == 3) finish_oldest();
            const Problem& p = problems[static_cast<size_t>(i % 4)];
            open_batches.emplace_back(&p, at(r).dispatch(dispatch_args(p, r)));
        }
        while (!open_batches.empty()) finish_oldest();
    });
    for (size_t r = 0; r < 3; ++r)
        for (size_t i = 0; i < rounds; ++i)
            EXPECT_EQ(kept[r][i].difference_from("x", problems[i % 4].combined[r]), "") << "rank " << r << ", round " << i;
}

TEST_P(EveryWay, BatchKnowsItsNumbers) {
    open(2);
    on_ranks(2, [&](int r) {
        for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
            ExpertBatch batch = dispatched(r);
            EXPECT_EQ(batch.epoch(), epoch);
            EXPECT_EQ(batch.tokens(), problem.ranks[static_cast<size_t>(r)].tokens);
            EXPECT_EQ(combine_outcome(r, batch).code, Code::ok);
        }
    });
}

TEST_P(EveryWay, NaNInWhatNobodyRoutesDoesNotReachResults) {
    // x of tokens without a used slot, weights of unused slots, y of pad rows are NaN; nothing else is.
    Options o = options();
    o.expert_alignment = 16;
    Random random(3);
    Problem p;
    do p = make_problem(random, o, {5, 5, 5}, Routing::sparse);
    while (p.wild || !p.weighted || p.received[0].rows == 0);
    sessions = Session::open_local(o, 3);
    on_ranks(3, [&](int r) {
        const RankData& d = p.ranks[static_cast<size_t>(r)];
        ExpertBatch batch = at(r).dispatch(dispatch_args(p, r));
        const auto* x = static_cast<const uint16_t*>(batch.expand_x());
        for (int64_t i = 0; i < batch.rows() * o.hidden; ++i) ASSERT_LT(x[i] & 0x7FFF, 0x7C01) << "expand_x element " << i;
        fill_y(batch, p, r, batch.y());
        std::vector<uint16_t> out(static_cast<size_t>(d.tokens * o.hidden));
        at(r).combine(batch, combine_args(p, r, out.data()));
        for (size_t i = 0; i < out.size(); ++i) EXPECT_LT(out[i] & 0x7FFF, 0x7C01) << "rank " << r << " element " << i;
    });
}

TEST_P(EveryWay, TokenWithoutAUsedSlotIsZeroOrItsShared) {
    open(2);
    const std::vector<int32_t> ids(4, -1);
    std::vector<std::byte> x(2 * 33 * 2), shared(2 * 33 * 2);
    fill_nan(TokenType::f16, 66, x.data());
    fill_values(TokenType::f16, 5, false, 66, shared.data());
    on_ranks(2, [&](int r) {
        for (const bool with_shared : {false, true}) {
            ExpertBatch batch = at(r).dispatch({.x = x.data(), .tokens = 2, .topk_ids = ids.data()});
            EXPECT_EQ(batch.rows(), 0);
            Output out(x.size());
            at(r).combine(batch, {.shared = with_shared ? shared.data() : nullptr, .out = out.data()});
            EXPECT_EQ(out.difference_from("x", with_shared ? shared : std::vector<std::byte>(x.size())), "");
        }
    });
}

TEST_P(EveryWay, SumIsInOrderOfSlotsAndRoundedOnce) {
    // By hand, f16: 2048 + 1 is a tie and rounds to 2048, so (2048 + 1) + 1 rounded each time gives 2048; the f32 sum is 2050.
    // And order: 1 + 2^24 + -2^24 in f32 is 0, in another order 1.
    Options o = options();
    o.hidden = 1;
    o.topk = 3;
    o.experts = 3;
    o.tokens_max = 2;
    sessions = Session::open_local(o, 2);
    const std::vector<int32_t> ids{0, 1, 2, 0, 1, 2};
    const std::vector<uint16_t> x{0x3C00, 0x3C00};                         // 1
    const std::vector<float> weights{2048, 1, 1, 1, 16777216, -16777216};  // y is 1 everywhere
    on_ranks(2, [&](int r) {
        ExpertBatch batch = at(r).dispatch({.x = x.data(), .tokens = 2, .topk_ids = ids.data()});
        std::vector<uint16_t> y(static_cast<size_t>(batch.rows()), 0x3C00), out(2);
        at(r).combine(batch, {.y = y.data(), .topk_weights = weights.data(), .out = out.data()});
        EXPECT_EQ(out[0], 0x6801);  // 2050
        EXPECT_EQ(out[1], 0x0000);
    });
}

TEST_P(EveryWay, PointersNeedNoAlignment) {
    open(2);
    const size_t row_bytes = 33 * 2;
    on_ranks(2, [&](int r) {
        const RankData& d = problem.ranks[static_cast<size_t>(r)];
        const auto odd = [](std::span<const std::byte> from) {
            std::vector<std::byte> v(from.size() + 1);
            std::copy(from.begin(), from.end(), v.begin() + 1);
            return v;
        };
        const std::vector<std::byte> x = odd(d.x), shared = odd(d.shared);
        DispatchArgs a = args(r);
        a.x = x.data() + 1;
        ExpertBatch batch = at(r).dispatch(a);
        EXPECT_EQ(difference_of_batch(batch, problem, r), "");
        std::vector<std::byte> y(static_cast<size_t>(batch.rows()) * row_bytes + 1);
        fill_y(batch, problem, r, y.data() + 1);
        Output out(static_cast<size_t>(d.tokens) * row_bytes + 1);
        CombineArgs c = combine_args(problem, r, static_cast<std::byte*>(out.data()) + 1);
        c.y = y.data() + 1;
        if (c.shared) c.shared = shared.data() + 1;
        at(r).combine(batch, c);
        const std::vector<std::byte>& combined = problem.combined[static_cast<size_t>(r)];
        std::vector<std::byte> right(combined.size() + 1, std::byte{0xA5});
        std::copy(combined.begin(), combined.end(), right.begin() + 1);
        EXPECT_EQ(out.difference_from("x", right), "");
    });
}

TEST_P(EveryWay, TokenHasTheSameBitsAloneAndAmongOthersAndForEveryRankCount) {
    // An expert's row depends on the expert and on the row it received, nothing else.
    constexpr int64_t hidden = 100, topk = 4, experts = 6;
    const auto apply_experts = [](const ExpertBatch& batch, int rank, int ranks, const Options& o) {
        const int64_t first = experts_of(rank, ranks, experts).first;
        std::vector<float> row(hidden);
        for (size_t e = 0; e + 1 < batch.expert_offsets().size(); ++e)
            for (int64_t i = 0; i < batch.expert_offsets()[e + 1] - batch.expert_offsets()[e]; ++i) {
                batch.gather_f32(static_cast<int64_t>(e), i, 1, row.data());
                uint64_t hash = static_cast<uint64_t>(first) + e;
                for (const float v : row) hash = mix(hash, std::bit_cast<uint32_t>(v));
                const auto at = static_cast<size_t>((batch.expert_offsets()[e] + i) * hidden);
                fill_values(o.dtype, hash, false, hidden, static_cast<std::byte*>(batch.y()) + at * token_bytes(o.dtype));
            }
    };
    constexpr int64_t mates = 1000;
    Random random(19);
    struct Formats {
        TokenType token;
        Format out, home;
    };
    // f32 because a narrow result hides in which order it was summed.
    for (const Formats formats : {Formats{TokenType::f32, Format::none, Format::none},
                                  {TokenType::bf16, Format::none, Format::int8_block8},
                                  {TokenType::bf16, Format::int8_token, Format::int8_block8},
                                  {TokenType::bf16, Format::mxfp8_e5m2, Format::int8_block8},
                                  {TokenType::bf16, Format::fp8_e4m3_block128, Format::int8_block8}}) {
        Options o = options();
        o.hidden = hidden;
        o.topk = topk;
        o.experts = experts;
        o.tokens_max = mates;
        o.dtype = formats.token;
        o.dispatch_quant = formats.out;
        o.combine_quant = formats.home;
        const size_t row_bytes = hidden * token_bytes(o.dtype);
        std::vector<std::byte> x(mates * row_bytes);
        fill_values(o.dtype, random(), false, mates * hidden, x.data());
        std::vector<int32_t> ids(mates * topk);
        for (int32_t& id : ids) id = static_cast<int32_t>(random.below(experts + 1)) - 1;
        std::vector<float> weights(ids.size());
        for (float& w : weights) w = static_cast<float>(random.below(1000)) / 1000.0F;
        // What rank 0 gets for tokens first..first+n-1 of the list; the other ranks bring 11 others.
        const auto run = [&](std::vector<Session>& group, int64_t first, int64_t n) {
            const auto ranks = static_cast<int>(group.size());
            std::vector<std::byte> result(static_cast<size_t>(n) * row_bytes);
            on_ranks(ranks, [&](int r) {
                const int64_t from = r == 0 ? first : 0, tokens = r == 0 ? n : 11;
                ExpertBatch batch =
                    group[static_cast<size_t>(r)].dispatch({.x = x.data() + static_cast<size_t>(from) * row_bytes,
                                                            .tokens = tokens,
                                                            .topk_ids = ids.data() + from * topk});
                apply_experts(batch, r, ranks, o);
                std::vector<std::byte> out(static_cast<size_t>(tokens) * row_bytes);
                group[static_cast<size_t>(r)].combine(batch, {.topk_weights = weights.data() + from * topk, .out = out.data()});
                if (r == 0) result = out;
            });
            return result;
        };
        std::map<size_t, std::vector<std::byte>> alone;  // of the first number of ranks
        for (const int ranks : {1, 2, 4}) {
            std::vector<Session> group = Session::open_local(o, ranks);
            const std::vector<std::byte> all = run(group, 0, mates);
            for (const size_t t : {0U, 17U, 499U, 999U}) {
                const std::span<const std::byte> row = std::span(all).subspan(t * row_bytes, row_bytes);
                const std::vector<std::byte> among(row.begin(), row.end());
                const std::vector<std::byte> single = run(group, static_cast<int64_t>(t), 1);
                EXPECT_EQ(single, alone.try_emplace(t, single).first->second) << ranks << " ranks, token " << t << " alone";
                EXPECT_EQ(among, alone[t]) << ranks << " ranks, token " << t << " among " << mates;
            }
        }
    }
}

TEST_P(EveryWay, OffsetsBeyond32BitsAreRight) {
    // Windows of some 30 GB, of which a few pages are touched: all of the second slot lies above 2^32, and in it the rows of
    // the second expert's cells once more.
    Options o = options();
    o.hidden = 4096;
    o.experts = 4;
    o.tokens_max = 1 << 17;
    Random random(23);
    sessions = Session::open_local(o, 2);
    EXPECT_GT(at(0).window_bytes(), int64_t{1} << 34);
    for (int i = 0; i < 2; ++i) {
        problem = make_problem(random, o, {5, 4});
        round_works();
        round_works();
    }
}

TEST_P(EveryWay, RowAndGatherShowTheRowsOfTheBatch) {
    for (const Format format : {Format::none, Format::int8_token, Format::mxfp8_e4m3}) {
        Options o = options();
        o.dispatch_quant = format;
        o.expert_alignment = 16;
        open(3, o);
        on_ranks(3, [&](int r) {
            ExpertBatch batch = at(r).dispatch(args(r));
            const reference::Received& right = problem.received[static_cast<size_t>(r)];
            const auto payload = static_cast<size_t>(batch.payload_bytes()), scale = static_cast<size_t>(batch.scale_bytes());
            const std::span<const int64_t> offsets = batch.expert_offsets();
            ASSERT_EQ(offsets.size(), static_cast<size_t>(at(r).experts_local()) + 1);
            EXPECT_EQ(batch.row(0).scales == nullptr, format == Format::none);
            for (int64_t i = 0; i < batch.rows(); ++i) {
                const ExpertBatch::Row row = batch.row(i);
                EXPECT_EQ(difference("row", {row.payload, payload},
                                     std::span(right.expand_x).subspan(static_cast<size_t>(i) * payload, payload)),
                          "");
                if (scale) {
                    EXPECT_EQ(difference("scales", {row.scales, scale},
                                         std::span(right.dynamic_scales).subspan(static_cast<size_t>(i) * scale, scale)),
                              "");
                }
            }
            for (int64_t e = 0; e < at(r).experts_local(); ++e) {
                const int64_t start = offsets[static_cast<size_t>(e)], n = offsets[static_cast<size_t>(e) + 1] - start;
                for (int64_t first = 0; first <= n; first += 7) {
                    const int64_t count = std::min<int64_t>(9, n - first);
                    Output tile(static_cast<size_t>(count) * payload), scales(static_cast<size_t>(count) * scale);
                    batch.gather(e, first, count, tile.data(), scales.data());
                    const auto from = static_cast<size_t>(start + first), rows = static_cast<size_t>(count);
                    EXPECT_EQ(tile.difference_from("tile", std::span(right.expand_x).subspan(from * payload, rows * payload)),
                              "");
                    EXPECT_EQ(scales.difference_from("tile_scales",
                                                     std::span(right.dynamic_scales).subspan(from * scale, rows * scale)),
                              "");
                    batch.gather(e, first, count, tile.data());  // scales not wanted

                    std::vector<float> decoded(rows * 33), expected(rows * 33);
                    batch.gather_f32(e, first, count, decoded.data());
                    for (size_t i = 0; i < rows; ++i)
                        quant::scalar_kernels().decode(
                            o.dispatch_format(), o.dtype, right.expand_x.data() + (from + i) * payload,
                            scale ? right.dynamic_scales.data() + (from + i) * scale : nullptr, 33, expected.data() + i * 33);
                    EXPECT_EQ(difference("gather_f32", bytes_of(decoded), bytes_of(expected)), "");
                }
            }
            EXPECT_EQ(outcome_of([&] { at(r).combine(batch, combine_args(problem, r, Output(400).data())); }).code, Code::ok);
        });
    }
}

TEST_P(EveryWay, RowAndGatherRefuseWhatIsOutside) {
    open(2);
    on_ranks(2, [&](int r) {
        ExpertBatch batch = dispatched(r);
        const int64_t n = batch.rows(), experts = at(r).experts_local();
        const int64_t of_first = batch.expert_offsets()[1];
        std::vector<std::byte> tile(4096);
        std::vector<float> wide(4096);
        for (const int64_t i : {int64_t{-1}, n, INT64_MAX, INT64_MIN})
            EXPECT_TRUE(is_error(outcome_of([&] { batch.row(i); }), Code::bad_input, {std::to_string(i)}));
        struct Bad {
            int64_t expert, first, count;
        };
        for (const Bad b : {Bad{-1, 0, 0}, Bad{experts, 0, 0}, Bad{0, -1, 1}, Bad{0, 0, of_first + 1}, Bad{0, of_first + 1, 0},
                            Bad{0, 0, -1}, Bad{0, of_first, 1}, Bad{0, 1, INT64_MAX}, Bad{0, INT64_MAX, INT64_MAX},
                            Bad{INT64_MIN, 0, 1}, Bad{0, INT64_MIN, INT64_MIN}}) {
            EXPECT_TRUE(is_error(outcome_of([&] { batch.gather(b.expert, b.first, b.count, tile.data()); }), Code::bad_input));
            EXPECT_TRUE(
                is_error(outcome_of([&] { batch.gather_f32(b.expert, b.first, b.count, wide.data()); }), Code::bad_input));
        }
        // The batch has not suffered.
        EXPECT_EQ(combine_outcome(r, batch).code, Code::ok);
    });
}

TEST_P(EveryWay, RankWithoutExpertsHasAnEmptyBatchThatRefusesRows) {
    Options o = options();
    o.experts = 2;
    open(3, o);
    on_ranks(3, [&](int r) {
        ExpertBatch batch = dispatched(r);
        if (r == 2) {
            EXPECT_EQ(at(r).experts_local(), 0);
            EXPECT_EQ(batch.rows(), 0);
            EXPECT_TRUE(batch.ep_recv_count().empty());
            EXPECT_TRUE(batch.expert_token_nums().empty());
            EXPECT_EQ(batch.expert_offsets().size(), 1U);
            float tile;
            EXPECT_TRUE(is_error(outcome_of([&] { batch.row(0); }), Code::bad_input));
            EXPECT_TRUE(is_error(outcome_of([&] { batch.gather_f32(0, 0, 0, &tile); }), Code::bad_input));
        }
        EXPECT_EQ(combine_outcome(r, batch).code, Code::ok);
    });
}

// --------------------------------------------------------------------------------------------------------------- capacity

TEST_P(EveryWay, WindowOfExactlyTheRowsIsEnoughAndOneLessIsRefusedOnEveryRank) {
    Random random;
    for (int64_t n = 0; n < scaled(12); ++n) {
        const int ranks = 1 + static_cast<int>(random.below(5));
        Options o = options();
        o.topk = 3;
        o.expert_alignment = random.pick<int64_t>({1, 16});
        o.dispatch_quant = random.pick({Format::none, Format::mxfp8_e5m2});
        Problem p;
        int64_t most = 0;
        do {
            p = make_problem(random, o, std::vector<int64_t>(static_cast<size_t>(ranks), 5), Routing::skewed);
            most = 0;
            for (const reference::Received& r : p.received) most = std::max(most, r.rows);
        } while (most < 2);
        int fullest = 0;
        while (p.received[static_cast<size_t>(fullest)].rows != most) ++fullest;
        const Problem nothing = make_problem(random, o, std::vector<int64_t>(static_cast<size_t>(ranks), 0));

        o.rows_max = most;
        sessions = Session::open_local(o, ranks);
        expect_round_works(sessions, p);

        o.rows_max = most - 1;
        SCOPED_TRACE(std::to_string(ranks) + " ranks: " + text_of(o));
        sessions = Session::open_local(o, ranks);
        for (int again = 0; again < 3; ++again) {
            on_ranks(ranks, [&](int r) {
                EXPECT_TRUE(
                    is_error(dispatch_outcome(r, dispatch_args(p, r)), Code::capacity,
                             {"rank " + std::to_string(fullest), std::to_string(most), std::to_string(most - 1), "rows_max"}));
            });
            expect_round_works(sessions, nothing);
        }
    }
}

// The classic capacity: cells below the worst case, and tokens above them dropped by their rank before they are sent.
TEST(CellRows, HoldWhatACapacityLeavesAndOneMoreIsRefusedOnEveryRank) {
    Random random;
    int refused = 0;
    for (int64_t n = 0; n < scaled(40); ++n) {
        const int ranks = 1 + static_cast<int>(random.below(4));
        Options o;
        o.hidden = 1 + random.below(40);
        o.landing = Landing::padded;
        o.timeout_ms = never_ms;
        o.topk = 1 + random.below(3);
        o.experts = 1 + random.below(6);
        o.tokens_max = 7;
        o.combine_path = random.pick({CombinePath::read, CombinePath::push});
        Problem whole = make_problem(random, o, std::vector<int64_t>(static_cast<size_t>(ranks), 7), Routing::skewed);
        const double factor = random.pick({0.5, 1.0, 1.25});
        std::vector<int64_t> fullest;  // rows that each rank has for one expert
        Problem fits = whole;
        for (RankData& rank : fits.ranks) {
            std::vector<int64_t> counts(static_cast<size_t>(o.experts));
            for (const int32_t id : rank.ids)
                if (id >= 0) ++counts[static_cast<size_t>(id)];
            fullest.push_back(*std::max_element(counts.begin(), counts.end()));
            o.cell_rows = apply_capacity(rank.ids, o.topk, o.experts, factor).capacity;
        }
        SCOPED_TRACE("seed " + std::to_string(random.seed()) + ", round " + std::to_string(n) + ": " + text_of(o));
        solve(fits);
        std::vector<Session> sessions = Session::open_local(o, ranks);
        expect_round_works(sessions, fits);
        const auto over = std::find_if(fullest.begin(), fullest.end(), [&](int64_t rows) { return rows > o.cell_rows; });
        if (over == fullest.end()) continue;
        ++refused;
        on_ranks(ranks, [&](int r) {
            const Outcome outcome = outcome_of([&] { sessions[static_cast<size_t>(r)].dispatch(dispatch_args(whole, r)); });
            EXPECT_TRUE(is_error(outcome, Code::capacity,
                                 {"rank " + std::to_string(over - fullest.begin()) + ": it sends",
                                  "hold " + std::to_string(o.cell_rows), "cell_rows", "apply_capacity"}));
        });
        expect_round_works(sessions, fits);
    }
    EXPECT_GT(refused, 0);
}

// --------------------------------------------------------------------------------------------------- bad input of dispatch

TEST_P(EveryWay, BadInputOfDispatchIsRefusedOnEveryRankInTheSameCall) {
    Options o = options();
    o.deliver_weights = true;
    for (const int ranks : {1, 2, 4}) {
        open(ranks, o);
        const int bad = ranks - 1;
        const std::string who = "rank " + std::to_string(bad);
        const int64_t tokens = problem.ranks[static_cast<size_t>(bad)].tokens;
        std::vector<int32_t> ids = problem.ranks[static_cast<size_t>(bad)].ids;
        const auto refused = [&](const DispatchArgs& a, std::initializer_list<std::string> words) {
            std::vector<std::string> texts(static_cast<size_t>(ranks));
            on_ranks(ranks, [&](int r) {
                const Outcome end = dispatch_outcome(r, r == bad ? a : args(r));
                EXPECT_TRUE(is_error(end, Code::bad_input, {who})) << "on rank " << r;
                EXPECT_TRUE(is_error(end, Code::bad_input, words)) << "on rank " << r;
                texts[static_cast<size_t>(r)] = end.text;
            });
            for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
            round_works();
        };
        for (const int32_t id : {-2, 7, 8, INT32_MIN, INT32_MAX, INT32_MIN + 1}) {
            std::vector<int32_t> spoilt = ids;
            const auto where = static_cast<size_t>(tokens * 2 - 1);  // the last slot
            spoilt[where] = id;
            DispatchArgs a = args(bad);
            a.topk_ids = spoilt.data();
            refused(a, {"topk_ids[" + std::to_string(tokens - 1) + "][1]", std::to_string(id), "0..6"});
        }
        DispatchArgs a = args(bad);
        a.x = nullptr;
        refused(a, {"x is null"});
        a = args(bad);
        a.topk_ids = nullptr;
        refused(a, {"topk_ids"});
        a = args(bad);
        a.topk_weights = nullptr;
        refused(a, {"topk_weights"});
        for (const int64_t n : {int64_t{-1}, int64_t{6}, INT64_MAX, INT64_MIN}) {
            a = args(bad);
            a.tokens = n;
            refused(a, {"tokens", std::to_string(n), "0..5"});
        }
        for (const int64_t stride : {int64_t{32}, int64_t{1}, int64_t{-33}, INT64_MIN, INT64_MAX}) {
            a = args(bad);
            a.row_stride = stride;
            refused(a, {"row_stride", std::to_string(stride), "33"});
        }
        for (const int64_t ms : {int64_t{-1}, INT64_MIN}) {
            a = args(bad);
            a.timeout_ms = ms;
            refused(a, {"timeout_ms", std::to_string(ms)});
        }
    }
}

TEST_P(EveryWay, FirstBadIdIsNamedAmongMany) {
    open(2);
    std::vector<int32_t> ids = problem.ranks[1].ids;
    for (int32_t& id : ids) id = 99;
    ids[0] = 3;
    DispatchArgs a = args(1);
    a.topk_ids = ids.data();
    on_ranks(2, [&](int r) {
        EXPECT_TRUE(is_error(dispatch_outcome(r, r == 1 ? a : args(r)), Code::bad_input, {"rank 1", "topk_ids[0][1]", "99"}));
    });
    round_works();
}

TEST_P(EveryWay, AllRanksHearTheSameReasonWhenSeveralAreBad) {
    open(4);
    std::vector<std::string> texts(4);
    on_ranks(4, [&](int r) {
        DispatchArgs a = args(r);
        if (r == 1) a.tokens = 77;
        if (r == 3) a.x = nullptr;
        const Outcome end = dispatch_outcome(r, a);
        EXPECT_TRUE(is_error(end, Code::bad_input));
        texts[static_cast<size_t>(r)] = end.text;
    });
    for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
    round_works();
}

TEST_P(EveryWay, DifferentTagsAreRefusedNamingBoth) {
    open(3);
    for (int again = 0; again < 2; ++again) {
        on_ranks(3, [&](int r) {
            DispatchArgs a = args(r);
            a.tag = r == 2 ? 4711 : 1234;
            EXPECT_TRUE(is_error(dispatch_outcome(r, a), Code::mismatch, {"4711", "1234", "rank 2"}));
        });
        on_ranks(3, [&](int r) {
            DispatchArgs a = args(r);
            a.tag = 99;
            ExpertBatch batch = at(r).dispatch(a);
            fill_y(batch, problem, r, batch.y());
            EXPECT_EQ(combine_outcome(r, batch).code, Code::ok);
        });
    }
}

TEST_P(EveryWay, RefusedDispatchLeavesOpenBatchesAlone) {
    open(2, 3);
    on_ranks(2, [&](int r) {
        ExpertBatch before = dispatched(r);
        DispatchArgs a = args(r);
        if (r == 0) a.tokens = -1;
        EXPECT_TRUE(is_error(dispatch_outcome(r, a), Code::bad_input, {"rank 0"}));
        ExpertBatch after = dispatched(r);
        EXPECT_EQ(difference_of_batch(before, problem, r), "");
        EXPECT_EQ(combine_outcome(r, before).code, Code::ok);
        EXPECT_EQ(combine_outcome(r, after).code, Code::ok);
    });
}

// ---------------------------------------------------------------------------------------------------- bad input of combine

TEST_P(EveryWay, CombineWithoutOutIsRefusedOnEveryRank) {
    open(3);
    for (int again = 0; again < 3; ++again) {
        on_ranks(3, [&](int r) {
            ExpertBatch batch = dispatched(r);
            Output out = output_of(problem, r);
            const CombineArgs a = combine_args(problem, r, r == 1 ? nullptr : out.data());
            EXPECT_TRUE(is_error(outcome_of([&] { at(r).combine(batch, a); }), Code::bad_input, {"rank 1", "out"}))
                << "on rank " << r;
            EXPECT_TRUE(is_error(outcome_of([&] { at(r).combine(batch, a); }), Code::stale)) << "it is used up";
        });
        round_works();
    }
}

TEST_P(EveryWay, CombineWithANegativeDeadlineIsRefusedOnEveryRank) {
    open(2);
    on_ranks(2, [&](int r) {
        ExpertBatch batch = dispatched(r);
        EXPECT_TRUE(is_error(combine_outcome(r, batch, r == 0 ? -5 : 0), Code::bad_input, {"rank 0", "timeout_ms", "-5"}));
    });
    round_works();
}

TEST_P(EveryWay, LongestDeadlineIsNoDeadline) {
    open(2);
    on_ranks(2, [&](int r) {
        sleep_ms(20 * r);
        ExpertBatch batch = at(r).dispatch(args(r, INT64_MAX));
        fill_y(batch, problem, r, batch.y());
        sleep_ms(20 * (1 - r));
        EXPECT_EQ(combine_outcome(r, batch, INT64_MAX).code, Code::ok);
    });
}

// --------------------------------------------------------------------------------------------------- stale batches, depth

TEST_P(EveryWay, StaleBatchesAreRefusedWithoutEffect) {
    open(2, 2);
    std::vector<Session> others = Session::open_local(options(), 2);
    on_ranks(2, [&](int r) {
        Output out = output_of(problem, r);
        const CombineArgs a = combine_args(problem, r, out.data());
        ExpertBatch empty;
        EXPECT_TRUE(is_error(outcome_of([&] { at(r).combine(empty, a); }), Code::stale));
        EXPECT_TRUE(is_error(outcome_of([&] { static_cast<void>(empty.rows()); }), Code::stale));
        EXPECT_TRUE(is_error(outcome_of([&] { empty.row(0); }), Code::stale));

        ExpertBatch batch = dispatched(r);
        // Another session of the same shape, with an open batch of the same epoch.
        ExpertBatch foreign = others[static_cast<size_t>(r)].dispatch(args(r));
        EXPECT_TRUE(is_error(outcome_of([&] { at(r).combine(foreign, a); }), Code::stale));
        EXPECT_TRUE(is_error(outcome_of([&] { others[static_cast<size_t>(r)].combine(batch, a); }), Code::stale));

        ExpertBatch moved = std::move(batch);
        EXPECT_TRUE(is_error(outcome_of([&] { at(r).combine(batch, a); }), Code::stale));  // NOLINT: moved from
        EXPECT_EQ(combine_outcome(r, moved).code, Code::ok);
        EXPECT_TRUE(is_error(outcome_of([&] { at(r).combine(moved, a); }), Code::stale));
        EXPECT_TRUE(is_error(outcome_of([&] { static_cast<void>(moved.rows()); }), Code::stale));
        EXPECT_TRUE(is_error(outcome_of([&] { static_cast<void>(moved.expand_x()); }), Code::stale));
        EXPECT_TRUE(is_error(outcome_of([&] { static_cast<void>(moved.y()); }), Code::stale));
        EXPECT_TRUE(is_error(outcome_of([&] { static_cast<void>(moved.expert_token_nums()); }), Code::stale));

        fill_y(foreign, problem, r, foreign.y());
        others[static_cast<size_t>(r)].combine(foreign, a);
        EXPECT_EQ(out.difference_from("x", problem.combined[static_cast<size_t>(r)]), "");
    });
    round_works();
}

TEST_P(EveryWay, AnotherRanksBatchIsRefusedNamingBoth) {
    open(2);
    std::vector<ExpertBatch> batches(2);
    on_ranks(2, [&](int r) { batches[static_cast<size_t>(r)] = dispatched(r); });
    Output out = output_of(problem, 0);
    EXPECT_TRUE(is_error(outcome_of([&] { at(0).combine(batches[1], combine_args(problem, 0, out.data())); }), Code::stale,
                         {"rank 0", "rank 1", "epoch 1"}));
    on_ranks(2, [&](int r) { EXPECT_EQ(combine_outcome(r, batches[static_cast<size_t>(r)]).code, Code::ok); });
    round_works();
}

TEST_P(EveryWay, OneDispatchTooManyIsRefusedWithoutTakingAnEpoch) {
    for (const int64_t depth : {1, 2, 3}) {
        open(3, depth);
        on_ranks(3, [&](int r) {
            std::deque<ExpertBatch> open_batches;
            for (int64_t i = 0; i < depth; ++i) open_batches.push_back(dispatched(r));
            // Only this rank's view decides: no other rank hears of it, so rank 0 may ask three times.
            for (int i = 0; i < (r == 0 ? 3 : 1); ++i)
                EXPECT_TRUE(is_error(dispatch_outcome(r, args(r)), Code::depth, {std::to_string(depth), "epoch 1"}));
            for (ExpertBatch& batch : open_batches) EXPECT_EQ(difference_of_batch(batch, problem, r), "");
            EXPECT_EQ(combine_outcome(r, open_batches.front()).code, Code::ok);
            open_batches.pop_front();
            ExpertBatch next = dispatched(r);
            EXPECT_EQ(next.epoch(), static_cast<uint64_t>(depth) + 1);
            open_batches.push_back(std::move(next));
            while (!open_batches.empty()) {  // the youngest first
                EXPECT_EQ(combine_outcome(r, open_batches.back()).code, Code::ok);
                open_batches.pop_back();
            }
        });
        round_works();
    }
}

// ---------------------------------------------------------------------------------------------------------- dropped batches

TEST_P(EveryWay, DroppedBatchFailsTheOthersCombineAtOnceNamingTheRank) {
    for (const int64_t depth : {1, 2}) {
        open(3, depth);
        for (int again = 0; again < 4; ++again) {
            on_ranks(3, [&](int r) {
                ExpertBatch batch = dispatched(r);
                if (r == again % 3) return;  // drops it
                EXPECT_TRUE(is_error(combine_outcome(r, batch), Code::peer_left, {"rank " + std::to_string(again % 3)}));
            });
            round_works();
        }
    }
}

TEST_P(EveryWay, AllRanksMayDrop) {
    for (const int64_t depth : {1, 3}) {
        open(3, depth);
        on_ranks(3, [&](int r) {
            for (int i = 0; i < 10; ++i) dispatched(r);
            EXPECT_EQ(difference_of_round(at(r), problem), "");
            for (int i = 0; i < 3; ++i) {
                ExpertBatch batch = dispatched(r);
                batch = ExpertBatch();  // assignment drops as well
            }
            EXPECT_EQ(difference_of_round(at(r), problem), "");
        });
    }
}

TEST_P(EveryWay, DroppedBatchLeavesTheOtherOpenOnesAlone) {
    open(2, 2);
    on_ranks(2, [&](int r) {
        ExpertBatch keep = dispatched(r);
        {
            ExpertBatch lost = dispatched(r);
            if (r == 1) {
                EXPECT_TRUE(is_error(combine_outcome(r, lost), Code::peer_left, {"rank 0"}));
            }
        }
        EXPECT_EQ(combine_outcome(r, keep).code, Code::ok);
    });
    round_works();
}

// --------------------------------------------------------------------------------------------------------------- closing

TEST_P(EveryWay, ClosedRankEndsTheOthersDispatchAtOnce) {
    for (const bool warm : {false, true}) {
        open(3, 1);
        if (warm) round_works();
        on_ranks(3, [&](int r) {
            if (r == 1) {
                sleep_ms(20);  // the others are waiting by now
                at(r).close();
                at(r).close();
                EXPECT_NE(dispatch_outcome(r, args(r)).code, Code::ok);
                return;
            }
            for (int again = 0; again < 3; ++again)
                EXPECT_TRUE(is_error(dispatch_outcome(r, args(r)), Code::peer_closed, {"rank 1"})) << "on rank " << r;
        });
    }
}

TEST_P(EveryWay, ClosedRankEndsTheOthersCombineAtOnce) {
    open(3);
    on_ranks(3, [&](int r) {
        ExpertBatch batch = dispatched(r);
        if (r == 1) {
            sleep_ms(20);
            at(r).close();
            EXPECT_TRUE(is_error(combine_outcome(r, batch), Code::stale));
            EXPECT_TRUE(is_error(outcome_of([&] { static_cast<void>(batch.rows()); }), Code::stale));
            return;
        }
        EXPECT_TRUE(is_error(combine_outcome(r, batch), Code::peer_closed, {"rank 1"})) << "on rank " << r;
        EXPECT_TRUE(is_error(dispatch_outcome(r, args(r)), Code::peer_closed, {"rank 1"})) << "on rank " << r;
    });
}

TEST_P(EveryWay, FastRankMayCloseWhileTheOthersFinishTheSameRound) {
    // A rank that has finished its combine is not missed by those who are still in theirs.
    for (int64_t again = 0; again < scaled(40); ++again) {
        open(3);
        on_ranks(3, [&](int r) {
            if (r != 0) std::this_thread::sleep_for(std::chrono::microseconds(50 * (again % 5)));
            EXPECT_EQ(difference_of_round(at(r), problem), "") << "on rank " << r;
            at(r).close();
        });
    }
}

TEST_P(EveryWay, RankMayCloseRightAfterARefusalWithoutHidingItFromTheOthers) {
    for (int64_t again = 0; again < scaled(60); ++again) {
        open(5);
        on_ranks(5, [&](int r) {
            DispatchArgs a = args(r);
            if (r == again % 5) a.tokens = -1;
            EXPECT_TRUE(is_error(dispatch_outcome(r, a), Code::bad_input, {"rank " + std::to_string(again % 5)}))
                << "on rank " << r;
            at(r).close();
        });
    }
}

// A fast rank that closes after its combine, drawn out: rank 0 offers its rows, gives its combine up, and closes, while rank 1
// waits for rank 2 alone. Rank 0's rows are there, so what ranks 1 and 2 wait for still comes; only the next dispatch needs
// rank 0.
TEST_P(EveryWay, ClosedRankDoesNotSpoilACombineThatHasItsRows) {
    open(3, 1);
    Signal closed;
    on_ranks(3, [&](int r) {
        ExpertBatch batch = dispatched(r);
        if (r == 0) {
            EXPECT_TRUE(is_error(combine_outcome(r, batch, short_ms), Code::timed_out));
            at(r).close();
            closed.raise();
            return;
        }
        if (r == 2) {
            closed.wait();
            sleep_ms(30);  // rank 1 has seen it by now
        }
        const Outcome end = combine_outcome(r, batch);
        EXPECT_EQ(end.code, Code::ok) << "on rank " << r << ": " << end.text;
        EXPECT_TRUE(is_error(dispatch_outcome(r, args(r)), Code::peer_closed, {"rank 0"})) << "on rank " << r;
    });
}

TEST_P(EveryWay, SessionsAndBatchesDieInAnyOrder) {
    for (int order = 0; order < 6; ++order) {
        Options o = options();
        o.workers = 2;
        open(2, o);
        std::vector<ExpertBatch> first(2), second(2);
        on_ranks(2, [&](int r) {
            first[static_cast<size_t>(r)] = dispatched(r);
            second[static_cast<size_t>(r)] = dispatched(r);
        });
        const auto end_sessions = [&] { sessions.clear(); };
        switch (order) {
            case 0:
                end_sessions();
                for (ExpertBatch& batch : first) EXPECT_TRUE(is_error(outcome_of([&] { batch.row(0); }), Code::stale));
                break;
            case 1: first.clear(), end_sessions(); break;
            case 2: second.clear(), end_sessions(), first.clear(); break;
            case 3: sessions.pop_back(), second.clear(), end_sessions(); break;
            case 4: sessions.erase(sessions.begin()), first.erase(first.begin()), end_sessions(); break;
            default: {
                Session moved = std::move(sessions[0]);
                sessions[0] = std::move(sessions[1]);
                end_sessions();
                break;
            }
        }
    }
}

TEST_P(EveryWay, MovedSessionGoesOnAndItsBatchesWithIt) {
    open(2);
    on_ranks(2, [&](int r) {
        ExpertBatch batch = dispatched(r);
        Session moved = std::move(at(r));
        Output out = output_of(problem, r);
        moved.combine(std::move(batch), combine_args(problem, r, out.data()));
        EXPECT_EQ(out.difference_from("x", problem.combined[static_cast<size_t>(r)]), "");
        at(r) = std::move(moved);
    });
    round_works();
}

TEST(SessionOpen, SessionThatWasMovedAwayRefusesEveryCall) {
    Options o;
    o.hidden = o.topk = o.experts = o.tokens_max = 1;
    std::vector<Session> sessions = Session::open_local(o, 1);
    Session here = std::move(sessions[0]);
    EXPECT_TRUE(is_error(outcome_of([&] { sessions[0].dispatch({}); }), Code::stale));
    ExpertBatch batch = here.dispatch({});
    EXPECT_TRUE(is_error(outcome_of([&] { sessions[0].combine(batch, {}); }), Code::stale));
    EXPECT_TRUE(is_error(outcome_of([&] { static_cast<void>(sessions[0].rank()); }), Code::stale));
    here.combine(batch, {});
}

// -------------------------------------------------------------------------------------------------------------- deadlines

// Who calls too late is waited for until the deadline; the text says who, in which epoch, on which rank.
TEST_P(EveryWay, RankThatDoesNotDispatchIsNamedWhenTheDeadlinePasses) {
    for (const bool warm : {false, true}) {
        open(3, 1);
        if (warm) round_works();
        const std::string epoch = warm ? "dispatch 2" : "dispatch 1";
        Signal lost;
        std::atomic<int> timed_out{0};
        on_ranks(3, [&](int r) {
            if (r == 2) {
                lost.wait(2);
                // Late: what the others gave up ends at once, and says who gave up and why.
                const Outcome end = dispatch_outcome(r, args(r));
                EXPECT_TRUE(is_error(end, Code::peer_left, {"gave up", "epoch"}));
                EXPECT_TRUE(names_rank(end.text, 0) || names_rank(end.text, 1)) << end.text;
                return;
            }
            const Outcome end = dispatch_outcome(r, args(r, short_ms));
            if (end.code == Code::timed_out) {
                ++timed_out;
                EXPECT_TRUE(is_error(end, Code::timed_out, {epoch, "on rank " + std::to_string(r), "ms"}));
                EXPECT_TRUE(names_rank(end.text, 2)) << end.text;
            } else {  // the other one gave up first
                EXPECT_TRUE(is_error(end, Code::peer_left, {"rank " + std::to_string(1 - r), "gave up"}));
            }
            lost.raise();
        });
        EXPECT_GE(timed_out, 1);
        round_works();
    }
}

// The same where nobody sends anything: no row is awaited, the error is due all the same.
TEST_P(EveryWay, LateRankHearsThatTheOthersGaveUpAlsoWhenItExpectsNoRows) {
    open(2, 1);
    Signal lost;
    on_ranks(2, [&](int r) {
        if (r == 1) lost.wait();
        const Outcome end = outcome_of([&] { at(r).dispatch({.timeout_ms = r == 0 ? short_ms : never_ms}); });
        if (r == 0)
            EXPECT_TRUE(is_error(end, Code::timed_out, {"rank 1"}));
        else
            EXPECT_TRUE(is_error(end, Code::peer_left, {"rank 0", "gave up"}));
        lost.raise();
    });
    round_works();
}

TEST_P(EveryWay, LateRankFallsThroughTheEpochsTheOthersGaveUpUntilTheNumbersMeet) {
    for (const int64_t depth : {1, 2}) {
        for (const bool silent : {false, true}) {
            SCOPED_TRACE("depth " + std::to_string(depth) + (silent ? ", nobody sends" : ""));
            open(3, depth);
            constexpr int given_up = 4;
            Signal lost;
            on_ranks(3, [&](int r) {
                const auto call = [&](int64_t timeout_ms) {
                    DispatchArgs a = silent ? DispatchArgs{} : args(r);
                    a.timeout_ms = timeout_ms;
                    return outcome_of([&] { at(r).dispatch(a); });
                };
                if (r == 2) {
                    lost.wait(2);
                    for (int i = 0; i < given_up; ++i)
                        EXPECT_TRUE(is_error(call(never_ms), Code::peer_left, {"gave up", "epoch " + std::to_string(i + 1)}));
                } else {
                    for (int i = 0; i < given_up; ++i) {
                        const Outcome end = call(short_ms);
                        EXPECT_TRUE(end.code == Code::timed_out || end.code == Code::peer_left) << end.text;
                    }
                    lost.raise();
                }
                // The numbers meet without any further step.
                for (int i = 0; i < 3; ++i) EXPECT_EQ(difference_of_round(at(r), problem), "") << "on rank " << r;
            });
        }
    }
}

TEST_P(EveryWay, RankThatWaitsForAnotherHearsAtOnceThatAThirdGaveUp) {
    // Rank 0 gives up early. Rank 1, which has all of rank 0's flags already, waits for rank 2 and has a long deadline.
    open(3, 1);
    Signal lost;
    on_ranks(3, [&](int r) {
        if (r == 2) {
            lost.wait(2);
            EXPECT_EQ(dispatch_outcome(r, args(r)).code, Code::peer_left);
            return;
        }
        const Outcome end = dispatch_outcome(r, args(r, r == 0 ? short_ms : 20 * short_ms));
        EXPECT_TRUE(is_error(end, r == 0 ? Code::timed_out : Code::peer_left)) << "on rank " << r;
        EXPECT_TRUE(names_rank(end.text, r == 0 ? 2 : 0)) << end.text;
        lost.raise();
    });
    round_works();
}

TEST_P(EveryWay, RankThatDoesNotCombineIsNamedAndTheNextDispatchTellsEverybody) {
    open(3);
    Signal lost;
    std::atomic<int> succeeded{0};
    on_ranks(3, [&](int r) {
        ExpertBatch batch = dispatched(r);
        if (r == 2) {
            lost.wait(2);
            // The others' rows lie ready, so this may succeed (with the right bytes), or fail; it ends at once either way.
            succeeded += combine_outcome(r, batch).code == Code::ok;
        } else {
            const Outcome end = combine_outcome(r, batch, short_ms);
            EXPECT_TRUE(is_error(end, Code::timed_out, {"combine 1", "on rank " + std::to_string(r), "ms"}));
            EXPECT_TRUE(names_rank(end.text, 2)) << end.text;
            EXPECT_TRUE(is_error(outcome_of([&] { static_cast<void>(batch.rows()); }), Code::stale)) << "it is used up";
            lost.raise();
        }
        // Nobody computes on with a step that one rank has lost.
        const Outcome told = dispatch_outcome(r, args(r));
        EXPECT_NE(told.code, Code::ok) << "on rank " << r;
        EXPECT_NE(told.text.find("combine"), std::string::npos) << told.text;
        EXPECT_NE(told.text.find("epoch 1"), std::string::npos) << told.text;
        EXPECT_TRUE(names_rank(told.text, 0) || names_rank(told.text, 1)) << told.text;
        EXPECT_EQ(difference_of_round(at(r), problem), "") << "on rank " << r;
    });
    round_works();
}

TEST_P(EveryWay, LostCombineLeavesTheOtherOpenBatchAlone) {
    open(2, 2);
    Signal lost;
    on_ranks(2, [&](int r) {
        ExpertBatch a = dispatched(r), b = dispatched(r);
        if (r == 1) {
            lost.wait();
            combine_outcome(r, a);
        } else {
            EXPECT_TRUE(is_error(combine_outcome(r, a, short_ms), Code::timed_out, {"rank 1"}));
            lost.raise();
        }
        EXPECT_EQ(combine_outcome(r, b).code, Code::ok) << "on rank " << r;
        EXPECT_NE(dispatch_outcome(r, args(r)).code, Code::ok) << "on rank " << r;
        EXPECT_EQ(difference_of_round(at(r), problem), "") << "on rank " << r;
    });
}

TEST_P(EveryWay, RankThatHoldsItsBatchIsNamedWhenASlotIsAwaited) {
    // Depth 1: rank 0 drops its batch and dispatches again, while rank 1 keeps its own.
    open(2, 1);
    Signal lost;
    on_ranks(2, [&](int r) {
        {
            ExpertBatch batch = dispatched(r);
            if (r == 1) {
                lost.wait();
                EXPECT_TRUE(is_error(combine_outcome(r, batch), Code::peer_left, {"rank 0"}));
            }
        }
        if (r == 0) {
            EXPECT_TRUE(
                is_error(dispatch_outcome(r, args(r, short_ms)), Code::timed_out, {"dispatch 2", "on rank 0", "rank 1"}));
            lost.raise();
        } else {
            EXPECT_TRUE(is_error(dispatch_outcome(r, args(r)), Code::peer_left, {"rank 0", "epoch 2"}));
        }
        EXPECT_EQ(difference_of_round(at(r), problem), "") << "on rank " << r;
    });
}

TEST_P(EveryWay, DeadlineOfASessionHoldsForItsCalls) {
    Options o = options();
    o.timeout_ms = 5 * short_ms;  // opening has to fit in, too
    open(2, o);
    EXPECT_TRUE(is_error(dispatch_outcome(0, args(0)), Code::timed_out, {"rank 1"}));
}

// ----------------------------------------------------------------------------------------------------------- many faults

// Ranks misbehave at random, without a barrier anywhere. Dispatch succeeds on all ranks or on none; combine succeeds on no
// rank when one of them was bad, and on all when none was; every round without a fault gives the right bytes.
TEST_P(EveryWay, RandomFaultsNeverHangNorSpoilALaterRound) {
    Random random;
    for (int64_t n = 0; n < scaled(15); ++n) {
        const int ranks = 1 + static_cast<int>(random.below(5));
        const int64_t depth = 1 + random.below(3);
        open(ranks, depth);
        const uint64_t seed = random();
        const int rounds = static_cast<int>(scaled(60)) + 5;
        enum class Fault { none, dispatch, combine, drop };
        const auto fault_of = [&](int round, int rank) {
            if (round >= rounds - 3) return Fault::none;
            const uint64_t dice = mix(seed, static_cast<uint64_t>(round), static_cast<uint64_t>(rank)) % 24;
            return dice == 0 ? Fault::dispatch : dice == 1 ? Fault::combine : dice == 2 ? Fault::drop : Fault::none;
        };
        const auto any = [&](int round, std::initializer_list<Fault> kinds) {
            for (int r = 0; r < ranks; ++r)
                for (const Fault f : kinds)
                    if (fault_of(round, r) == f) return true;
            return false;
        };
        on_ranks(ranks, [&](int r) {
            struct Open {
                int round;
                ExpertBatch batch;
            };
            std::deque<Open> open_batches;
            const auto finish_oldest = [&] {
                Open o = std::move(open_batches.front());
                open_batches.pop_front();
                const Fault mine = fault_of(o.round, r);
                if (mine == Fault::drop) return;
                Outcome end;
                if (mine == Fault::combine)
                    end = outcome_of([&] { at(r).combine(o.batch, combine_args(problem, r, nullptr)); });
                else
                    end = combine_outcome(r, o.batch);
                EXPECT_EQ(end.code == Code::ok, !any(o.round, {Fault::combine, Fault::drop}))
                    << "round " << o.round << ", rank " << r << ": " << end.text;
            };
            for (int round = 0; round < rounds; ++round) {
                const uint64_t dice = mix(seed + 1, static_cast<uint64_t>(round), static_cast<uint64_t>(r));
                if (dice % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(dice % 300));
                if (static_cast<int64_t>(open_batches.size()) == depth ||
                    (!open_batches.empty() && open_batches.front().round + depth <= round))
                    finish_oldest();
                DispatchArgs a = args(r);
                if (fault_of(round, r) == Fault::dispatch) a.tokens = 1000;
                ExpertBatch batch;
                const Outcome end = outcome_of([&] { batch = at(r).dispatch(a); });
                EXPECT_EQ(end.code, any(round, {Fault::dispatch}) ? Code::bad_input : Code::ok)
                    << "round " << round << ", rank " << r << ": " << end.text;
                if (end.code != Code::ok) continue;
                EXPECT_EQ(difference_of_batch(batch, problem, r), "") << "round " << round << ", rank " << r;
                fill_y(batch, problem, r, batch.y());
                open_batches.push_back({round, std::move(batch)});
            }
            while (!open_batches.empty()) finish_oldest();
        });
        if (HasFailure()) return;
    }
}

// Ranks are late at random and have short deadlines. Whatever happens, it happens within the rules of who learns what: where a
// rank lost the dispatch of an epoch, or its batch, no rank's combine of it succeeds; where one rank alone lost a combine, the
// next dispatch fails on every rank. Bytes are right wherever a call succeeds, and when the ranks are punctual again all is
// well.
TEST_P(EveryWay, RandomDeadlinesNeverHangNorBreakTheAgreement) {
    Random random;
    int64_t lost = 0, agreed = 0;
    for (int64_t n = 0; n < std::max<int64_t>(scaled(8), 2); ++n) {
        const int ranks = 2 + static_cast<int>(random.below(3));
        const auto depth = static_cast<size_t>(1 + random.below(2));
        open(ranks, static_cast<int64_t>(depth));
        const uint64_t seed = random();
        constexpr size_t rounds = 40;
        const int64_t deadline_ms = slowness > 1 ? 20 : 4;
        struct Ends {
            Outcome dispatch{Code::ok, ""}, combine{Code::stale, "not called"};
        };
        std::vector<std::vector<Ends>> ends(static_cast<size_t>(ranks), std::vector<Ends>(rounds));
        on_ranks(ranks, [&](int r) {
            std::vector<Ends>& mine = ends[static_cast<size_t>(r)];
            std::deque<std::pair<size_t, ExpertBatch>> open_batches;
            const auto dawdle = [&](size_t round, uint64_t phase) {
                const uint64_t dice = mix(seed + phase, round, static_cast<uint64_t>(r));
                if (dice % 9 == 0) sleep_ms(static_cast<int64_t>(dice >> 8) % (3 * deadline_ms));
            };
            const auto finish_oldest = [&] {
                auto [round, batch] = std::move(open_batches.front());
                open_batches.pop_front();
                dawdle(round, 1);
                mine[round].combine = combine_outcome(r, batch, deadline_ms);
            };
            for (size_t round = 0; round < rounds; ++round) {
                // The same order of calls on all ranks, whatever failed.
                if (!open_batches.empty() && open_batches.front().first + depth <= round) finish_oldest();
                dawdle(round, 2);
                ExpertBatch batch;
                mine[round].dispatch = outcome_of([&] { batch = at(r).dispatch(args(r, deadline_ms)); });
                if (mine[round].dispatch.code != Code::ok) continue;
                EXPECT_EQ(difference_of_batch(batch, problem, r), "") << "round " << round << ", rank " << r;
                fill_y(batch, problem, r, batch.y());
                open_batches.emplace_back(round, std::move(batch));
            }
            while (!open_batches.empty()) finish_oldest();
            // Punctual again. The first dispatch may still tell of a combine that was lost at the end.
            const Outcome first = dispatch_outcome(r, args(r));
            for (int i = 0; i < 3; ++i)
                EXPECT_EQ(difference_of_round(at(r), problem), "") << "rank " << r << " after: " << first.text;
        });
        for (size_t round = 0; round < rounds; ++round) {
            int failed_dispatch = 0, failed_combine = 0, good = 0;
            for (const auto& of_rank : ends) {
                failed_dispatch += of_rank[round].dispatch.code != Code::ok;
                failed_combine += of_rank[round].dispatch.code == Code::ok && of_rank[round].combine.code != Code::ok;
                good += of_rank[round].combine.code == Code::ok;
            }
            lost += failed_dispatch > 0 || failed_combine > 0;
            agreed += good == ranks;
            if (failed_dispatch > 0) {
                EXPECT_EQ(good, 0) << "round " << round << ": combine succeeded although a rank had lost the dispatch";
            }
            // With depth 1 the next dispatch after a combine is the next round's.
            if (depth > 1 || good == 0 || failed_combine == 0 || round + 1 == rounds) continue;
            for (const auto& of_rank : ends)
                EXPECT_NE(of_rank[round + 1].dispatch.code, Code::ok) << "round " << round << ": nobody told the others";
        }
        if (HasFailure()) return;
    }
    EXPECT_GT(lost, 0) << "nobody was ever late: the test tests nothing";
    EXPECT_GT(agreed + lost, 0);
}

// ----------------------------------------------------------------------------------------------------------------- opening

Options small_options() {
    Options o;
    o.hidden = 4;
    o.topk = 1;
    o.experts = 4;
    o.tokens_max = 2;
    o.timeout_ms = never_ms;
    return o;
}

TEST(SessionOpen, RanksMustAgreeAboutEveryAgreedOption) {
    const std::map<std::string, std::pair<std::string, std::string>> values = {
        {"hidden", {"4", "5"}},
        {"topk", {"1", "3"}},
        {"experts", {"4", "6"}},
        {"dtype", {"f16", "bf16"}},
        {"dispatch_quant", {"none", "mxfp8_e5m2"}},
        {"combine_quant", {"none", "int8_block128"}},
        {"mx_rule", {"floor", "ceil"}},
        {"mx_overflow", {"saturate", "inf"}},
        {"fp8_scale", {"f32", "ue8m0"}},
        {"expert_token_nums", {"count", "cumsum"}},
        {"expert_alignment", {"1", "16"}},
        {"deliver_weights", {"no", "yes"}},
        {"landing", {"packed", "padded"}},
        {"group_ranks", {"1", "2"}},
        {"combine_path", {"read", "push"}},
        {"tokens_max", {"2", "9"}},
        {"rows_max", {"100", "101"}},
        {"cell_rows", {"2", "3"}},
        {"depth", {"2", "3"}},
        {"partial", {"no", "yes"}},
    };
    for (const OptionInfo& info : option_table()) {
        if (!info.agreed) continue;
        SCOPED_TRACE(info.name);
        ASSERT_TRUE(values.contains(info.name)) << "a new agreed option: give this test two values for it";
        const auto& [usual, other] = values.at(info.name);
        std::vector<Options> all(4, small_options());
        for (Options& o : all) ASSERT_TRUE(set_option(o, info, usual).ok());
        if (info.name == std::string_view("group_ranks"))  // of this landing only
            for (Options& o : all) o.landing = Landing::two_level;
        ASSERT_TRUE(set_option(all[2], info, other).ok());
        EXPECT_TRUE(is_error(outcome_of([&] { Session::open_local(all); }), Code::mismatch,
                             {info.name, "rank 0", "rank 2", usual, other}));
    }
}

TEST(SessionOpen, OtherOptionsMayDiffer) {
    Random random(5);
    Options o = small_options();
    o.dispatch_quant = Format::mxfp8_e4m3;
    o.combine_quant = Format::int8_block8;
    o.hidden = 257;
    std::vector<Options> all(3, o);
    all[0].workers = 3;
    all[1].simd = Simd::scalar;
    all[2].timeout_ms = 2 * never_ms;
    const Problem p = make_problem(random, o, {2, 1, 2});
    std::vector<Session> sessions = Session::open_local(all);
    for (int i = 0; i < 5; ++i) expect_round_works(sessions, p);
}

TEST(SessionOpen, OneRanksInvalidOptionsFailForAllNamingIt) {
    struct Bad {
        const char* name;
        std::function<void(Options&)> spoil;
    };
    const Bad all_bad[] = {
        {"hidden", [](Options& o) { o.hidden = 0; }},
        {"topk", [](Options& o) { o.topk = -1; }},
        {"experts", [](Options& o) { o.experts = 0; }},
        {"tokens_max", [](Options& o) { o.tokens_max = -1; }},
        {"dispatch_quant", [](Options& o) { o.dispatch_quant = Format::int8_block8; }},
        {"combine_quant", [](Options& o) { o.combine_quant = Format::mxfp8_e5m2; }},
        {"expert_alignment", [](Options& o) { o.expert_alignment = 8; }},
        {"depth", [](Options& o) { o.depth = 0; }},
        {"rows_max", [](Options& o) { o.rows_max = -5; }},
        {"workers", [](Options& o) { o.workers = 0; }},
        {"timeout_ms", [](Options& o) { o.timeout_ms = 0; }},
        {"dtype", [](Options& o) { o.dtype = TokenType::f32, o.dispatch_quant = Format::int8_token; }},
        {"mx_overflow", [](Options& o) { o.mx_overflow = MxOverflow::inf, o.dispatch_quant = Format::mxfp8_e4m3; }},
        {"tokens_max", [](Options& o) { o.tokens_max = int64_t{1} << 30, o.topk = 4; }},
    };
    for (const Bad& bad : all_bad) {
        SCOPED_TRACE(bad.name);
        std::vector<Options> all(3, small_options());
        bad.spoil(all[1]);
        EXPECT_TRUE(is_error(outcome_of([&] { Session::open_local(all); }), Code::bad_input, {bad.name, "rank 1"}));
        for (Options& o : all) o = all[1];
        EXPECT_TRUE(is_error(outcome_of([&] { Session::open_local(all); }), Code::bad_input, {bad.name, "rank 0"}));
    }
}

TEST(SessionOpen, MissingInstructionSetIsRefusedNamingWhatThereIs) {
    for (const Simd simd : {Simd::neon, Simd::avx512_dl, Simd::avx2, Simd::ssse3}) {
        if (quant::find_kernels(simd)) continue;
        std::vector<Options> all(2, small_options());
        all[1].simd = simd;
        EXPECT_TRUE(is_error(outcome_of([&] { Session::open_local(all); }), Code::bad_input,
                             {"rank 1", "simd", option_text(*find_option("simd"), all[1]), "scalar"}));
        return;
    }
    GTEST_SKIP() << "this build on this processor has every kernel set";
}

TEST(SessionOpen, WindowLargerThanAnAddressSpaceIsRefused) {
    Options o = small_options();
    o.hidden = int64_t{1} << 31;
    o.tokens_max = int64_t{1} << 20;
    o.topk = 1024;
    EXPECT_TRUE(is_error(outcome_of([&] { Session::open_local(o, 2); }), Code::capacity));
}

TEST(SessionOpen, NoRanksAreRefused) {
    EXPECT_TRUE(is_error(outcome_of([&] { Session::open_local(small_options(), 0); }), Code::bad_input));
    EXPECT_TRUE(is_error(outcome_of([&] { Session::open_local(small_options(), -3); }), Code::bad_input));
    EXPECT_TRUE(is_error(outcome_of([&] { Session::open_local(std::span<const Options>()); }), Code::bad_input));
}

int64_t entries_of(const char* folder) {
    const std::filesystem::directory_iterator all(folder);
    return std::distance(begin(all), end(all));
}

TEST(SessionOpen, FailureLeavesNothingBehind) {
    std::vector<Options> all(3, small_options());
    all[2].hidden = 5;
    const auto fail = [&] { EXPECT_EQ(outcome_of([&] { Session::open_local(all); }).code, Code::mismatch); };
    fail();
    const int64_t files = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
    for (int i = 0; i < 20; ++i) fail();
    EXPECT_EQ(entries_of("/proc/self/fd"), files);
    EXPECT_EQ(entries_of("/proc/self/task"), threads);
}

TEST(SessionOpen, ClosingLeavesNothingBehind) {
    Options o = small_options();
    o.workers = 3;
    Random random(1);
    const Problem p = make_problem(random, o, {2, 2});
    const auto play = [&] {
        std::vector<Session> sessions = Session::open_local(o, 2);
        expect_round_works(sessions, p);
    };
    play();
    const int64_t files = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
    for (int i = 0; i < 20; ++i) play();
    EXPECT_EQ(entries_of("/proc/self/fd"), files);
    EXPECT_EQ(entries_of("/proc/self/task"), threads);
}

TEST(SessionOpen, OptionsTellWhatIsUsed) {
    Options o = small_options();
    o.experts = 5;
    const std::vector<Session> sessions = Session::open_local(o, 3);
    for (int r = 0; r < 3; ++r) {
        const Session& s = sessions[static_cast<size_t>(r)];
        EXPECT_EQ(s.rank(), r);
        EXPECT_EQ(s.size(), 3);
        EXPECT_EQ(s.experts_local(), r < 2 ? 2 : 1);
        EXPECT_NE(s.options().landing, Landing::automatic);
        EXPECT_NE(s.options().combine_path, CombinePath::automatic);
        EXPECT_NE(s.options().simd, Simd::automatic);
        EXPECT_EQ(s.options().rows_max, 2 * 1 * 3);  // tokens_max * topk * ranks
        EXPECT_GT(s.window_bytes(), 0);
        EXPECT_EQ(s.window_bytes(), sessions[0].window_bytes());
    }
}

TEST(SessionOpen, SessionsOfDifferentShapesLiveSideBySide) {
    Random random(9);
    Options a = small_options(), b = small_options();
    b.hidden = 100;
    b.dispatch_quant = Format::fp8_e4m3_block128;
    b.landing = Landing::padded;
    b.depth = 1;
    const Problem pa = make_problem(random, a, {2, 1}), pb = make_problem(random, b, {1, 2});
    std::vector<Session> sa = Session::open_local(a, 2), sb = Session::open_local(b, 2);
    on_ranks(2, [&](int rank) {
        const auto r = static_cast<size_t>(rank);
        for (int i = 0; i < 20; ++i) {
            ExpertBatch in_a = sa[r].dispatch(dispatch_args(pa, rank));
            EXPECT_EQ(difference_of_round(sb[r], pb), "");
            EXPECT_EQ(difference_of_batch(in_a, pa, rank), "");
            fill_y(in_a, pa, rank, in_a.y());
            Output out = output_of(pa, rank);
            sa[r].combine(in_a, combine_args(pa, rank, out.data()));
            EXPECT_EQ(out.difference_from("x", pa.combined[r]), "");
        }
    });
}

// ------------------------------------------------------------------------------------------------------------------ shrink

TEST_P(EveryWay, RanksThatAreLeftGoOnWithoutOneThatHasClosed) {
    open(4);
    const Problem rest = without(problem, {1});
    on_ranks(4, [&](int r) {
        EXPECT_EQ(difference_of_round(at(r), problem), "");
        if (r == 1) return at(r).close();
        EXPECT_TRUE(is_error(outcome_of([&] { at(r).dispatch(args(r)); }), Code::peer_closed));
        EXPECT_EQ(at(r).shrink(), others(4, {1}));
        for (int i = 0; i < 5; ++i) EXPECT_EQ(difference_of_round(at(r), rest), "");
        EXPECT_EQ(at(r).shrink(), others(4, {1})) << "again, with nobody gone";
        for (int i = 0; i < 5; ++i) EXPECT_EQ(difference_of_round(at(r), rest), "");
    });
    EXPECT_TRUE(is_error(outcome_of([&] { at(1).shrink(); }), Code::stale));
}

TEST(Shrink, OpenBatchesEndAndBadArgumentsAreRefused) {
    Options o;
    o.hidden = 8;
    o.topk = 1;
    o.experts = 2;
    o.tokens_max = 2;
    o.timeout_ms = never_ms;
    std::vector<Session> sessions = Session::open_local(o, 2);
    Random random(3);
    const Problem p = make_problem(random, o, {2, 1});
    on_ranks(2, [&](int r) {
        Session& s = sessions[static_cast<size_t>(r)];
        ExpertBatch open = s.dispatch(dispatch_args(p, r));
        EXPECT_TRUE(is_error(outcome_of([&] { s.shrink({.timeout_ms = -1}); }), Code::bad_input));
        EXPECT_EQ(open.epoch(), 1U) << "a refused call has ended nothing";
        EXPECT_EQ(s.shrink(), (std::vector<int>{0, 1}));
        EXPECT_TRUE(is_error(outcome_of([&] { open.rows(); }), Code::stale));
        EXPECT_EQ(difference_of_round(s, p), "");
    });
    // Nobody comes: the deadline names who; then only shrink and close are allowed.
    const Outcome late = outcome_of([&] { sessions[0].shrink({.timeout_ms = short_ms}); });
    EXPECT_EQ(late.code, Code::timed_out);
    EXPECT_TRUE(names_rank(late.text, 1)) << late.text;
    EXPECT_TRUE(is_error(outcome_of([&] { sessions[0].dispatch({}); }), Code::stale));
    EXPECT_TRUE(is_error(outcome_of([&] { sessions[0].x(); }), Code::stale));
    EXPECT_EQ(outcome_of([&] { sessions[0].shrink({.timeout_ms = short_ms, .kill_missing = true}); }).code, Code::timed_out)
        << "a thread cannot be killed";
    EXPECT_TRUE(is_error(outcome_of([&] { sessions[0].shrink({.timeout_ms = -1}); }), Code::bad_input));
    EXPECT_TRUE(is_error(outcome_of([&] { sessions[0].dispatch({}); }), Code::stale)) << "bad arguments end nothing";
    on_ranks(2, [&](int r) {
        Session& s = sessions[static_cast<size_t>(r)];
        EXPECT_EQ(s.shrink(), (std::vector<int>{0, 1}));
        EXPECT_EQ(difference_of_round(s, p), "");
    });
}

// -------------------------------------------------------------------------------------------------------------- statistics

TEST_P(EveryWay, StatisticsCountRowsAndBytes) {
    Options o = options();
    o.dispatch_quant = Format::mxfp8_e5m2;
    o.combine_quant = Format::int8_block8;
    o.expert_alignment = 16;
    open(3, o);
    Random random(23);
    problem = make_problem(random, o, {5, 4, 3}, Routing::sparse);
    constexpr uint64_t rounds = 3, row = 33 + 2, info = 12;  // elements and scales; source info
    on_ranks(3, [&](int r) {
        for (uint64_t i = 0; i < rounds; ++i) EXPECT_EQ(difference_of_round(at(r), problem), "");
    });
    uint64_t sent = 0, received = 0, home = 0;
    for (int r = 0; r < 3; ++r) {
        SCOPED_TRACE("rank " + std::to_string(r));
        const SessionStats s = at(r).stats();
        const RankData& d = problem.ranks[static_cast<size_t>(r)];
        const ExpertRange mine = experts_of(r, 3, o.experts);
        uint64_t used = 0, to_peers = 0, tokens_used = 0;
        // What a token's row goes to, once: allgather every rank, two_level a group, {0, 1} or {2}.
        const int group_ranks = GetParam().landing == Landing::two_level ? 2 : 1;
        uint64_t copies = 0, copies_to_peers = 0;
        for (size_t i = 0; i < d.ids.size(); i += 2) {
            for (const int32_t id : {d.ids[i], d.ids[i + 1]}) {
                used += id >= 0;
                to_peers += id >= 0 && (id < mine.first || id >= mine.last);
            }
            tokens_used += d.ids[i] >= 0 || d.ids[i + 1] >= 0;
            for (int group = 0; group * group_ranks < 3; ++group) {
                bool goes_there = false;
                for (int owner = group * group_ranks; owner < std::min(3, (group + 1) * group_ranks); ++owner)
                    for (const int32_t id : {d.ids[i], d.ids[i + 1]})
                        goes_there |= id >= experts_of(owner, 3, o.experts).first && id < experts_of(owner, 3, o.experts).last;
                copies += goes_there;
                copies_to_peers += goes_there && group != r / group_ranks;
            }
        }
        EXPECT_EQ(s.dispatches, rounds);
        EXPECT_EQ(s.combines, rounds);
        EXPECT_EQ(s.rows_sent, rounds * used);
        if (GetParam().landing == Landing::in_place) {
            EXPECT_EQ(s.bytes_sent, rounds * (tokens_used * row + d.ids.size() * 4)) << "a token is written once, at home";
            EXPECT_EQ(s.bytes_sent_peers, 0U) << "its readers come for it";
        } else if (GetParam().landing == Landing::allgather || GetParam().landing == Landing::two_level) {
            const uint64_t groups = GetParam().landing == Landing::allgather ? 3 : 2, ids = d.ids.size() * 4;
            EXPECT_EQ(s.bytes_sent, rounds * (copies * row + groups * ids));
            EXPECT_EQ(s.bytes_sent_peers, rounds * (copies_to_peers * row + (groups - 1) * ids));
        } else if (GetParam().landing == Landing::alltoallv) {
            constexpr uint64_t stride = 128;  // elements to a multiple of 16, scales likewise, 16 of source info: 48 + 16 + 16
            EXPECT_EQ(s.bytes_sent, rounds * used * stride);
            EXPECT_EQ(s.bytes_sent_peers, rounds * to_peers * stride);
        } else {
            EXPECT_EQ(s.bytes_sent, rounds * used * (row + info));
            EXPECT_EQ(s.bytes_sent_peers, rounds * to_peers * (row + info));
        }
        const std::vector<int32_t>& counts = problem.received[static_cast<size_t>(r)].ep_recv_count;
        EXPECT_EQ(s.rows_received, rounds * static_cast<uint64_t>(counts.empty() ? 0 : counts.back()))
            << "pad rows do not count";
        EXPECT_GE(s.wait_ns_counts, 0);
        EXPECT_GE(s.wait_ns_rows, 0);
        EXPECT_GE(s.wait_ns_returned, 0);
        sent += s.rows_sent;
        received += s.rows_received;
        home += s.bytes_home;
    }
    EXPECT_EQ(sent, received);
    // Read: rows of f16 where they lie. Pushed: 33 bytes and 5 scales of 2 bytes; pad rows do not travel.
    EXPECT_EQ(home, received * (GetParam().path == CombinePath::read ? 66 : 33 + 10));
}

TEST_P(EveryWay, WaitsAreCountedForTheRankThatWasLate) {
    open(3);
    constexpr int late = 1, rounds = 5;
    constexpr auto pause = std::chrono::milliseconds(20);
    on_ranks(3, [&](int r) {
        for (int i = 0; i < rounds; ++i) {
            if (r == late) std::this_thread::sleep_for(pause);
            EXPECT_EQ(difference_of_round(at(r), problem), "");
        }
    });
    for (int r = 0; r < 3; ++r) {
        SCOPED_TRACE("rank " + std::to_string(r));
        const std::vector<int64_t> waits = at(r).wait_ns_by_rank();
        ASSERT_EQ(waits.size(), 3U);
        const SessionStats s = at(r).stats();
        EXPECT_EQ(waits[0] + waits[1] + waits[2], s.wait_ns_counts + s.wait_ns_rows + s.wait_ns_returned);
        if (r == late) continue;
        // While it sleeps the others can do nothing but wait for it; half of that must show even on a busy machine.
        EXPECT_GE(waits[late], rounds * std::chrono::nanoseconds(pause).count() / 2);
        EXPECT_GT(waits[late], waits[static_cast<size_t>(2 - r)]) << "the other punctual rank";
    }
}

// ------------------------------------------------------------------------------------------------------------ tokens in place

TEST(SessionX, PlaceForTokensIsThereOnlyInPlaceAndUnquantised) {
    for (const Landing landing : every_landing)
        for (const Format format : {Format::none, Format::int8_token}) {
            Options o = small_options();
            o.landing = landing;
            o.dispatch_quant = format;
            std::vector<Session> sessions = Session::open_local(o, 1);
            EXPECT_EQ(sessions[0].x() != nullptr, landing == Landing::in_place && format == Format::none);
        }
}

TEST(SessionX, TokensWrittenInPlaceGiveTheSameBytesAndAreNotCopied) {
    Random random;
    for (const int64_t depth : {1, 2, 3}) {
        Options o = small_options();
        o.hidden = 31;
        o.tokens_max = 6;
        o.topk = 3;
        o.experts = 5;
        o.landing = Landing::in_place;
        o.depth = depth;
        std::vector<Problem> problems;
        for (int i = 0; i < 4; ++i) problems.push_back(make_problem(random, o, {6, 2, 5}, Routing::repeated));
        std::vector<Session> sessions = Session::open_local(o, 3);
        on_ranks(3, [&](int rank) {
            const auto r = static_cast<size_t>(rank);
            uint64_t rows = 0;
            std::deque<std::pair<const Problem*, ExpertBatch>> open;
            const auto finish_oldest = [&] {
                auto [p, batch] = std::move(open.front());
                open.pop_front();
                EXPECT_EQ(difference_of_batch(batch, *p, rank), "");
                fill_y(batch, *p, rank, batch.y());
                Output out = output_of(*p, rank);
                sessions[r].combine(batch, combine_args(*p, rank, out.data()));
                EXPECT_EQ(out.difference_from("x", p->combined[r]), "");
            };
            for (size_t i = 0; i < 24; ++i) {
                if (static_cast<int64_t>(open.size()) == depth) {
                    EXPECT_TRUE(is_error(outcome_of([&] { sessions[r].x(); }), Code::depth));
                    finish_oldest();
                }
                const Problem& p = problems[i % 4];
                const RankData& d = p.ranks[r];
                void* x = sessions[r].x();
                EXPECT_EQ(sessions[r].x(), x) << "asking again moves nothing";
                std::memcpy(x, d.dense_x.data(), d.dense_x.size());
                DispatchArgs a = dispatch_args(p, rank);
                a.x = x;
                a.row_stride = 0;
                open.emplace_back(&p, sessions[r].dispatch(a));
                rows += d.ids.size();
            }
            while (!open.empty()) finish_oldest();
            EXPECT_EQ(sessions[r].stats().bytes_sent, rows * 4) << "topk_ids only";
        });
    }
}

TEST(SessionX, TokensInsideThePlaceButNotFromItsStartAreRefused) {
    // Workers would copy them over each other.
    Options o = small_options();
    o.landing = Landing::in_place;
    o.workers = 2;
    Random random(4);
    const Problem p = make_problem(random, o, {2, 2});
    std::vector<Session> sessions = Session::open_local(o, 2);
    for (const bool strided : {false, true})
        on_ranks(2, [&](int rank) {
            Session& session = sessions[static_cast<size_t>(rank)];
            auto* x = static_cast<std::byte*>(session.x());
            const DispatchArgs a{.x = strided ? x : x + 8,
                                 .tokens = 1 + strided,
                                 .row_stride = strided ? 5 : 0,
                                 .topk_ids = p.ranks[0].ids.data()};
            EXPECT_TRUE(is_error(outcome_of([&] { session.dispatch(rank == 1 ? a : dispatch_args(p, rank)); }), Code::bad_input,
                                 {"rank 1"}));
        });
    expect_round_works(sessions, p);
}

TEST(SessionX, PlaceIsFreeOnlyWhenEveryRankHasReadTheLastRows) {
    Options o = small_options();
    o.landing = Landing::in_place;
    o.depth = 1;
    o.timeout_ms = 5 * short_ms;
    Random random(2);
    const Problem p = make_problem(random, o, {2, 2});
    std::vector<Session> sessions = Session::open_local(o, 2);
    Signal refused;
    on_ranks(2, [&](int rank) {
        Session& session = sessions[static_cast<size_t>(rank)];
        DispatchArgs a = dispatch_args(p, rank);
        a.timeout_ms = never_ms;
        if (rank == 0) {
            { ExpertBatch dropped = session.dispatch(a); }
            EXPECT_TRUE(is_error(outcome_of([&] { session.x(); }), Code::timed_out, {"rank 1"}));
            refused.raise();
        } else {
            ExpertBatch held = session.dispatch(a);
            refused.wait();
            EXPECT_EQ(difference_of_batch(held, p, rank), "");
        }
    });
    // Asking in vain has cost no epoch.
    on_ranks(2, [&](int rank) {
        EXPECT_NE(sessions[static_cast<size_t>(rank)].x(), nullptr);
        EXPECT_EQ(difference_of_round(sessions[static_cast<size_t>(rank)], p), "");
    });
}

}  // namespace
}  // namespace switchyard::test
