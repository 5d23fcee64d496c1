// The exchange by itself: its building blocks by hand, and whole exchanges against a sort of all rows.
#include "switchyard/exchange.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>

#include "testing.hpp"

namespace switchyard {
namespace {

using namespace test;

// ------------------------------------------------------------------------------------------------------- building blocks

TEST(BuildingBlocks, CountOffsetsPermutationReorderByHand) {
    const std::vector<int32_t> indices = {2, 0, -1, 2, 1, 0};
    std::vector<int64_t> counts(3), offsets(4), permutation(5);
    count_experts(indices, counts);
    EXPECT_EQ(counts, (std::vector<int64_t>{2, 1, 2}));
    offsets_of(counts, offsets);
    EXPECT_EQ(offsets, (std::vector<int64_t>{0, 2, 3, 5}));
    permutation_of(indices, offsets, permutation);
    EXPECT_EQ(permutation, (std::vector<int64_t>{1, 5, 4, 0, 3})) << "by expert, and as they stood within one";
    const std::string items = "abcdef";  // one byte each
    std::string packed(5, ' ');
    reorder(items.data(), 6, 1, permutation, 1, packed.data());
    EXPECT_EQ(packed, "bfead");
    const std::string tokens = "AaBbCc";  // three items of two bytes, two indices each
    std::string rows(10, ' ');
    reorder(tokens.data(), 3, 2, permutation, 2, rows.data());
    EXPECT_EQ(rows, "AaCcCcAaBb");
}

TEST(BuildingBlocks, NothingIsRouted) {
    std::vector<int64_t> counts(2, 7), offsets(3);
    count_experts({}, counts);
    EXPECT_EQ(counts, (std::vector<int64_t>{0, 0}));
    offsets_of(counts, offsets);
    permutation_of({}, offsets, {});
    reorder(nullptr, 0, 4, {}, 1, nullptr);
}

TEST(BuildingBlocks, WhatDoesNotFitIsRefusedWithItsPlace) {
    std::vector<int64_t> counts(2), offsets(3), permutation(2);
    for (const int32_t bad : {2, -2, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
        const std::vector<int32_t> indices = {0, bad};
        EXPECT_TRUE(is_error(outcome_of([&] { count_experts(indices, counts); }), Code::bad_input,
                             {"indices[1]", std::to_string(bad)}));
        offsets = {0, 1, 2};
        EXPECT_TRUE(
            is_error(outcome_of([&] { permutation_of(indices, offsets, permutation); }), Code::bad_input, {"indices[1]"}));
    }
    EXPECT_TRUE(is_error(outcome_of([&] {
                             offsets_of(std::vector<int64_t>{1, -1}, offsets);
                         }),
                         Code::bad_input, {"counts[1]"}));
    EXPECT_TRUE(is_error(outcome_of([&] { offsets_of(std::vector<int64_t>{1}, offsets); }), Code::bad_input));
    offsets = {0, 2, 2};
    EXPECT_TRUE(is_error(outcome_of([&] {
                             permutation_of(std::vector<int32_t>{0, 1}, offsets, permutation);
                         }),
                         Code::bad_input, {"indices[1]"}));
    EXPECT_TRUE(is_error(outcome_of([&] {
                             permutation_of(std::vector<int32_t>{0, -1}, offsets, permutation);
                         }),
                         Code::bad_input, {"expert 0"}));
    for (const auto& [bad, place] : {std::pair<std::vector<int64_t>, const char*>{{0, 100, 2}, "offsets[2] is 2"},
                                     {{-5, 1, 2}, "offsets[0] is -5"},
                                     {{1, 1, 2}, "offsets[0] is 1"}})
        EXPECT_TRUE(is_error(outcome_of([&] {
                                 permutation_of(std::vector<int32_t>{0, 0}, bad, permutation);
                             }),
                             Code::bad_input, {place}));
    char to[2];
    EXPECT_TRUE(is_error(outcome_of([&] { reorder(nullptr, 2, 1, std::vector<int64_t>{0}, 1, to); }), Code::bad_input,
                         {"from is null"}));
    EXPECT_TRUE(is_error(outcome_of([&] { reorder("ab", 2, 1, std::vector<int64_t>{0}, 1, nullptr); }), Code::bad_input,
                         {"to is null"}));
    EXPECT_TRUE(is_error(outcome_of([&] {
                             reorder("ab", 2, 1, std::vector<int64_t>{0, 2}, 1, to);
                         }),
                         Code::bad_input, {"permutation[1]"}));
}

// -------------------------------------------------------------------------------------------------------------- exchanges

/// One round of a group: items, indices, what every rank must receive.
struct Round {
    struct Row {
        int64_t expert;
        int source;
        int64_t item, k;
        auto key() const { return std::tuple(expert, source, item, k); }
    };
    std::vector<int64_t> items;                                 // [R]
    std::vector<std::vector<int32_t>> indices;                  // [R][n,K]
    std::vector<std::vector<std::vector<std::byte>>> payloads;  // [R][p][n, bytes]
    std::vector<std::vector<Row>> received;                     // [R]
};

std::byte byte_of(uint64_t seed, int source, int64_t item, int64_t k, int p, int64_t b) {
    return static_cast<std::byte>(mix(mix(seed, static_cast<uint64_t>(source), static_cast<uint64_t>(item)),
                                      mix(static_cast<uint64_t>(k), static_cast<uint64_t>(p), static_cast<uint64_t>(b))));
}

/// Ragged, skewed, partly unused, sometimes empty.
Round make_round(Random& random, const ExchangeOptions& o, int ranks, uint64_t seed) {
    Round round;
    round.received.resize(static_cast<size_t>(ranks));
    const int64_t kind = random.below(5);
    for (int r = 0; r < ranks; ++r) {
        const int64_t items = kind == 0 && random.one_in(2) ? 0 : random.below(o.items_max + 1);
        round.items.push_back(items);
        std::vector<int32_t> indices;
        for (int64_t i = 0; i < items * o.topk; ++i) {
            int64_t e = random.below(o.experts);
            if (kind == 1) e = e * random.below(o.experts) / o.experts;  // skewed to low experts
            if (kind == 2) e = o.experts - 1;                            // everybody to one
            if (kind == 3 && random.one_in(2)) e = -1;
            if (kind == 4) e = random.one_in(9) ? e : -1;  // nearly nothing
            indices.push_back(static_cast<int32_t>(e));
            if (e >= 0)
                for (int owner = 0; owner < ranks; ++owner)
                    if (e >= experts_of(owner, ranks, o.experts).first && e < experts_of(owner, ranks, o.experts).last)
                        round.received[static_cast<size_t>(owner)].push_back({e, r, i / o.topk, i % o.topk});
        }
        round.indices.push_back(indices);
        round.payloads.emplace_back();
        for (size_t p = 0; p < o.payload_bytes.size(); ++p) {
            std::vector<std::byte> bytes;
            for (int64_t i = 0; i < items; ++i)
                for (int64_t b = 0; b < o.payload_bytes[p]; ++b)
                    bytes.push_back(byte_of(seed, r, i, -1, static_cast<int>(p), b));
            round.payloads.back().push_back(bytes);
        }
    }
    for (auto& rows : round.received)
        std::sort(rows.begin(), rows.end(), [](const Round::Row& a, const Round::Row& b) { return a.key() < b.key(); });
    return round;
}

/// "" when rank `r` has received what it must.
std::string wrong_rows(const Round& round, const ExchangeOptions& o, uint64_t seed, int r, const Received& got) {
    const auto& want = round.received[static_cast<size_t>(r)];
    if (got.rows() != static_cast<int64_t>(want.size())) return fmt::format("{} rows, expected {}", got.rows(), want.size());
    const auto ranks = static_cast<int>(round.items.size());
    const ExpertRange mine = experts_of(r, ranks, o.experts);
    std::vector<int64_t> counts(static_cast<size_t>(mine.count() * ranks)), offsets(static_cast<size_t>(mine.count() + 1));
    for (size_t i = 0; i < want.size(); ++i) {
        const Round::Row& row = want[i];
        ++counts[static_cast<size_t>((row.expert - mine.first) * ranks + row.source)];
        for (int64_t e = row.expert - mine.first; e < mine.count(); ++e) ++offsets[static_cast<size_t>(e + 1)];
        if (got.source_info()[i * 3] != row.source || got.source_info()[i * 3 + 1] != row.item ||
            got.source_info()[i * 3 + 2] != row.k)
            return fmt::format("row {} comes from ({}, {}, {}), expected ({}, {}, {})", i, got.source_info()[i * 3],
                               got.source_info()[i * 3 + 1], got.source_info()[i * 3 + 2], row.source, row.item, row.k);
        for (size_t p = 0; p < o.payload_bytes.size(); ++p)
            for (int64_t b = 0; b < o.payload_bytes[p]; ++b) {
                const std::byte right = byte_of(seed, row.source, row.item, -1, static_cast<int>(p), b);
                const auto payload = got.payload(static_cast<int>(p));
                if (payload.data[static_cast<int64_t>(i) * payload.stride + b] != right ||
                    got.row(static_cast<int>(p), static_cast<int64_t>(i))[b] != right)
                    return fmt::format("row {}, payload {}, byte {} is wrong", i, p, b);
            }
    }
    if (!std::ranges::equal(got.recv_counts(), counts)) return "recv_counts";
    if (!std::ranges::equal(got.recv_offsets(), offsets)) return "recv_offsets";
    const std::vector<int32_t>& indices = round.indices[static_cast<size_t>(r)];
    std::vector<int64_t> order;
    for (size_t i = 0; i < indices.size(); ++i)
        if (indices[i] >= 0) order.push_back(static_cast<int64_t>(i));
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return indices[static_cast<size_t>(a)] < indices[static_cast<size_t>(b)]; });
    if (!std::ranges::equal(got.permutation(), order)) return "permutation";
    for (int64_t e = 0; e < o.experts; ++e)
        if (got.send_counts()[static_cast<size_t>(e)] != std::count(indices.begin(), indices.end(), e) ||
            got.send_offsets()[static_cast<size_t>(e) + 1] - got.send_offsets()[static_cast<size_t>(e)] !=
                got.send_counts()[static_cast<size_t>(e)])
            return fmt::format("send counts or offsets of expert {}", e);
    return {};
}

SendArgs args_of(const Round& round, int r) {
    SendArgs args{.items = round.items[static_cast<size_t>(r)], .expert_indices = round.indices[static_cast<size_t>(r)].data()};
    for (size_t p = 0; p < round.payloads[static_cast<size_t>(r)].size(); ++p)
        args.payloads[p] = round.payloads[static_cast<size_t>(r)][p].data();
    return args;
}

/// Sends a round, checks it, answers every row with bytes of its own, and checks what comes back.
void play(Exchange& x, const Round& round, uint64_t seed) {
    const ExchangeOptions& o = x.options();
    const int r = x.rank();
    Received got = x.send(args_of(round, r));
    ASSERT_EQ(wrong_rows(round, o, seed, r, got), "") << "rank " << r;
    for (int64_t i = 0; i < got.rows(); ++i)
        for (size_t p = 0; p < o.payload_bytes.size(); ++p) {
            const Received::Answers to = got.answer(static_cast<int>(p));
            const auto info = got.source_info().subspan(static_cast<size_t>(i) * 3, 3);
            for (int64_t b = 0; b < o.payload_bytes[p]; ++b)
                to.data[i * to.stride + b] = byte_of(seed + 1, info[0], info[1], info[2], static_cast<int>(p), b);
        }
    const auto slots = round.indices[static_cast<size_t>(r)].size();
    std::vector<std::vector<std::byte>> home;
    SendBackArgs back;
    for (size_t p = 0; p < o.payload_bytes.size(); ++p)
        home.emplace_back(slots * static_cast<size_t>(o.payload_bytes[p]), std::byte{0xCD});
    for (size_t p = 0; p < home.size(); ++p) back.payloads[p] = home[p].data();
    x.send_back(got, back);
    for (size_t i = 0; i < slots; ++i)
        for (size_t p = 0; p < home.size(); ++p)
            for (int64_t b = 0; b < o.payload_bytes[p]; ++b) {
                const auto k = static_cast<int64_t>(i) % o.topk;
                const std::byte right = round.indices[static_cast<size_t>(r)][i] < 0
                                            ? std::byte{0xCD}
                                            : byte_of(seed + 1, r, static_cast<int64_t>(i) / o.topk, k, static_cast<int>(p), b);
                ASSERT_EQ(home[p][i * static_cast<size_t>(o.payload_bytes[p]) + static_cast<size_t>(b)], right)
                    << "rank " << r << ", slot " << i << ", payload " << p << ", byte " << b;
            }
    EXPECT_TRUE(is_error(outcome_of([&] { got.rows(); }), Code::stale));
}

TEST(Exchange, EveryStrategyGivesTheSameBytesOnRandomRoutings) {
    Random random;
    int64_t rounds = 0;
    for (int shape = 0; shape < scaled(70); ++shape) {
        ExchangeOptions o;
        const int ranks = 1 + static_cast<int>(random.below(6));
        for (int64_t p = 1 + random.below(random.one_in(3) ? 8 : 2); p > 0; --p)
            o.payload_bytes.push_back(1 + random.below(70));
        o.experts = 1 + random.below(12);
        o.topk = 1 + random.below(4);
        o.items_max = random.below(13);
        o.depth = 1 + random.below(3);
        o.workers = 1 + random.below(2);
        std::vector<Round> all;
        const uint64_t seed = random();
        for (int i = 0; i < 8; ++i) all.push_back(make_round(random, o, ranks, seed + static_cast<uint64_t>(i) * 2));
        for (const Landing strategy : every_landing) {
            o.strategy = strategy;
            o.group_ranks = strategy == Landing::two_level ? 1 + random.below(ranks) : 0;
            SCOPED_TRACE(fmt::format("strategy {}, {} ranks, {} experts, topk {}, {} payloads", static_cast<int>(strategy),
                                     ranks, o.experts, o.topk, o.payload_bytes.size()));
            std::vector<Exchange> group = Exchange::open_local(o, ranks);
            on_ranks(ranks, [&](int r) {
                for (size_t i = 0; i < all.size(); ++i) play(group[static_cast<size_t>(r)], all[i], seed + i * 2);
            });
            rounds += static_cast<int64_t>(all.size());
            if (testing::Test::HasFailure()) return;
        }
    }
    std::printf("%lld routings\n", static_cast<long long>(rounds));
}

TEST(Exchange, AlltoallvSendsItemsInTheOrderOfTheirRanks) {
    constexpr int ranks = 3;
    // rows[from][to]
    constexpr int64_t rows[ranks][ranks] = {{2, 0, 3}, {0, 0, 0}, {1, 4, 0}};
    for (const Landing strategy : every_landing) {
        std::vector<Exchange> group = Exchange::open_local({.payload_bytes = {8}, .items_max = 5, .strategy = strategy}, ranks);
        on_ranks(ranks, [&](int r) {
            std::vector<int64_t> items, expected;
            for (int to = 0; to < ranks; ++to)
                for (int64_t i = 0; i < rows[r][to]; ++i) items.push_back(100 * r + 10 * to + i);
            for (int from = 0; from < ranks; ++from) expected.push_back(rows[from][r]);
            Received got = group[static_cast<size_t>(r)].alltoallv(
                {.payloads = {items.data()}, .send_counts = rows[r], .recv_counts = expected.data()});
            std::vector<int64_t> want, have;
            for (int from = 0; from < ranks; ++from)
                for (int64_t i = 0; i < rows[from][r]; ++i) want.push_back(100 * from + 10 * r + i);
            for (int64_t i = 0; i < got.rows(); ++i) {
                int64_t value;
                std::memcpy(&value, got.row(0, i), 8);
                have.push_back(value);
                value = -value;
                std::memcpy(got.answer(0).data + i * got.answer(0).stride, &value, 8);
            }
            EXPECT_EQ(have, want);
            EXPECT_TRUE(std::ranges::equal(got.recv_counts(), expected));
            std::vector<int64_t> home(items.size());
            group[static_cast<size_t>(r)].send_back(got, {.payloads = {home.data()}});
            for (int64_t& value : home) value = -value;
            EXPECT_EQ(home, items);
        });
    }
}

TEST(Exchange, CountsThatDoNotMatchAreAnErrorOnAllRanksThatNamesThePair) {
    std::vector<Exchange> group = Exchange::open_local({.payload_bytes = {4}, .items_max = 8}, 3);
    std::atomic<int> told{0};
    on_ranks(3, [&](int r) {
        const std::vector<int32_t> items(3);
        const int64_t one_each[] = {1, 1, 1};
        const int64_t wrong[] = {1, 2, 1};  // rank 2 expects two items of rank 1
        Exchange& x = group[static_cast<size_t>(r)];
        const Outcome o = outcome_of([&] {
            x.alltoallv({.payloads = {items.data()}, .send_counts = one_each, .recv_counts = r == 2 ? wrong : one_each});
        });
        EXPECT_TRUE(is_error(o, Code::mismatch, {"rank 1 sends 1 rows to rank 2", "expects 2"}));
        told += o.code == Code::mismatch;
        Received got = x.alltoallv({.payloads = {items.data()}, .send_counts = one_each});  // and the exchange lives on
        EXPECT_EQ(got.rows(), 3);
    });
    EXPECT_EQ(told, 3);
}

TEST(Exchange, BadInputOfOneRankIsAnErrorOnAllOfThem) {
    std::vector<Exchange> group = Exchange::open_local({.payload_bytes = {4, 3}, .experts = 4, .items_max = 4}, 2);
    const std::vector<std::byte> bytes(16);
    const std::vector<int32_t> good = {0, 3}, bad = {0, 4};
    const std::vector<int64_t> right_counts = {1, 0, 0, 1}, wrong_counts = {1, 0, 1, 0};
    const SendArgs fine{.payloads = {bytes.data(), bytes.data()},
                        .items = 2,
                        .expert_indices = good.data(),
                        .send_counts = right_counts.data()};
    struct Case {
        SendArgs args;
        Code code;
        std::string word;
    };
    SendArgs index = fine, no_payload = fine, counts = fine, many = fine, expects = fine;
    index.expert_indices = bad.data();
    no_payload.payloads[1] = nullptr;
    counts.send_counts = wrong_counts.data();
    many.items = 5;
    const int64_t impossible[] = {0, 99};
    expects.recv_counts = impossible;
    const std::vector<Case> cases = {{index, Code::bad_input, "expert_indices[1][0] is 4"},
                                     {no_payload, Code::bad_input, "payloads[1] is null"},
                                     {counts, Code::mismatch, "send_counts[2]"},
                                     {many, Code::bad_input, "items is 5"},
                                     {expects, Code::bad_input, "recv_counts[1]"}};
    on_ranks(2, [&](int r) {
        Exchange& x = group[static_cast<size_t>(r)];
        for (const Case& c : cases) {
            EXPECT_TRUE(is_error(outcome_of([&] { x.send(r == 1 ? c.args : fine); }), c.code, {"rank 1", c.word}));
            EXPECT_EQ(x.send(fine).rows(), 2) << "and it lives on";
        }
    });
}

// A refusal that nobody could hear, because the call did not begin, leaves alone what nobody has heard yet.
TEST(Exchange, ARefusalThatDoesNotBeginKeepsTheErrorOfAnEarlierSendBack) {
    std::vector<Exchange> group = Exchange::open_local({.payload_bytes = {4}, .items_max = 1, .depth = 2}, 2);
    const int32_t value = 5, index = 1;
    const SendArgs fine{.payloads = {&value}, .items = 1, .expert_indices = &index};
    Signal timed_out;
    on_ranks(2, [&](int r) {
        Exchange& x = group[static_cast<size_t>(r)];
        int32_t home = 0;
        Received a = x.send(fine), b = x.send(fine);
        if (r == 0) {
            EXPECT_TRUE(is_error(outcome_of([&] { x.send_back(b, {.payloads = {&home}, .timeout_ms = 50 * slowness}); }),
                                 Code::timed_out));
            SendArgs bad = fine;
            bad.items = 9;
            EXPECT_EQ(outcome_of([&] { x.send(bad); }).code, Code::depth) << "`a` is open in its slot";
            timed_out.raise();
        } else {
            timed_out.wait();
            EXPECT_EQ(outcome_of([&] { x.send_back(b, {.payloads = {&home}}); }).code, Code::ok);
        }
        EXPECT_EQ(outcome_of([&] { x.send_back(a, {.payloads = {&home}}); }).code, Code::ok);
        EXPECT_TRUE(is_error(outcome_of([&] { x.send(fine); }), Code::timed_out, {"rank 0: its combine of epoch 2"}));
        EXPECT_EQ(outcome_of([&] { x.send(fine); }).code, Code::ok);
    });
}

// What lies between payloads in a row travels with them: it must not be what was in that memory before.
TEST(Exchange, GapsBetweenPayloadsAreZero) {
    std::vector<Exchange> group =
        Exchange::open_local({.payload_bytes = {3, 5}, .items_max = 1, .strategy = Landing::in_place, .depth = 1}, 2);
    const char three[] = "abc", five[] = "defgh";
    const int32_t index = 1;
    on_ranks(2, [&](int r) {
        Exchange& x = group[static_cast<size_t>(r)];
        std::memset(x.session().x(), 0xA5, static_cast<size_t>(x.session().options().hidden) * 2);  // where rows are made
        Received got = x.send({.payloads = {three, five}, .items = 1, .expert_indices = &index});
        EXPECT_EQ(got.rows(), r == 1 ? 2 : 0);
        for (int64_t i = 0; i < got.rows(); ++i) {
            const std::byte *first = got.row(0, i), *second = got.row(1, i);
            ASSERT_LT(first + 3, second);
            EXPECT_EQ(std::memcmp(first, three, 3), 0);
            EXPECT_EQ(std::memcmp(second, five, 5), 0);
            EXPECT_TRUE(std::all_of(first + 3, second, [](std::byte byte) { return byte == std::byte{0}; }));
        }
    });
}

TEST(Exchange, ANullAnswerIsRefusedOnAllRanksWhateverTheSizeOfTheItem) {
    for (const int64_t bytes : {3, 4}) {
        std::vector<Exchange> group = Exchange::open_local({.payload_bytes = {bytes}, .items_max = 1}, 2);
        const int32_t value = 5, index = 1;
        on_ranks(2, [&](int r) {
            Exchange& x = group[static_cast<size_t>(r)];
            Received got = x.send({.payloads = {&value}, .items = 1, .expert_indices = &index});
            int32_t home = 0;
            EXPECT_TRUE(is_error(outcome_of([&] { x.send_back(got, {.payloads = {r == 0 ? &home : nullptr}}); }),
                                 Code::bad_input, {"rank 1"}));
        });
    }
}

TEST(Exchange, ANegativeTimeoutIsRefusedWhateverTheItemsAre) {
    for (const auto& [payloads, strategy] : {std::pair<std::vector<int64_t>, Landing>{{4}, Landing::in_place},
                                             {{4, 4}, Landing::in_place},
                                             {{3}, Landing::in_place},
                                             {{3}, Landing::packed}})
        for (const int64_t items : {0, 1}) {
            std::vector<Exchange> group =
                Exchange::open_local({.payload_bytes = payloads, .items_max = 1, .strategy = strategy}, 2);
            const int64_t value = 5;
            const int32_t index = 1;
            on_ranks(2, [&](int r) {
                const auto call = [&] {
                    group[static_cast<size_t>(r)].send({.payloads = {&value, &value},
                                                        .items = items,
                                                        .expert_indices = &index,
                                                        .timeout_ms = r == 0 ? -5 : 0});
                };
                EXPECT_TRUE(is_error(outcome_of(call), Code::bad_input, {"rank 0: timeout_ms is -5"}));
            });
        }
}

TEST(Exchange, MoreRanksThanThereCanBeAreRefusedBeforeMemoryIsMade) {
    for (const int ranks : {0, -1, 4096, std::numeric_limits<int>::max()}) {
        EXPECT_TRUE(is_error(outcome_of([&] { Exchange::open_local({.payload_bytes = {4}, .items_max = 1}, ranks); }),
                             Code::bad_input, {"1..4095"}));
        EXPECT_TRUE(is_error(outcome_of([&] { Session::open_local({.hidden = 1, .topk = 1, .experts = 1}, ranks); }),
                             Code::bad_input, {"1..4095"}));
    }
}

TEST(Exchange, CountsThatCannotBeAreNamedOnAllRanks) {
    std::vector<Exchange> group = Exchange::open_local({.payload_bytes = {4}, .items_max = 6}, 2);
    const int64_t negative[] = {-1, 2}, many[] = {5, 5}, one_each[] = {1, 1};
    on_ranks(2, [&](int r) {
        Exchange& x = group[static_cast<size_t>(r)];
        const std::vector<int32_t> items(6);
        for (const auto& [counts, word] : {std::pair<const int64_t*, const char*>{nullptr, "send_counts is null"},
                                           {negative, "send_counts[0] is -1"},
                                           {many, "send_counts[1] is 5, with 5 items before it"}}) {
            const auto call = [&] { x.alltoallv({.payloads = {items.data()}, .send_counts = r == 0 ? counts : one_each}); };
            EXPECT_TRUE(is_error(outcome_of(call), Code::bad_input, {"rank 0", word}));
        }
        EXPECT_EQ(x.alltoallv({.payloads = {items.data()}, .send_counts = one_each}).rows(), 2);
    });
}

TEST(Exchange, OptionsThatCannotBeAreRefused) {
    const auto open = [](const ExchangeOptions& o) { return outcome_of([&] { Exchange::open_local(o, 2); }); };
    EXPECT_TRUE(is_error(open({.payload_bytes = {}, .items_max = 1}), Code::bad_input, {"0 payloads", "1..8"}));
    EXPECT_TRUE(is_error(open({.payload_bytes = std::vector<int64_t>(9, 1), .items_max = 1}), Code::bad_input, {"9 payloads"}));
    EXPECT_TRUE(is_error(open({.payload_bytes = {4, 0}, .items_max = 1}), Code::bad_input, {"payload_bytes[1]"}));
    EXPECT_TRUE(is_error(open({.payload_bytes = {4}, .experts = -1}), Code::bad_input, {"experts"}));
    EXPECT_TRUE(is_error(open({.payload_bytes = {4}, .topk = 0}), Code::bad_input, {"exchange: topk is 0", "1..4096"}));
    constexpr int64_t most = std::numeric_limits<int64_t>::max();
    EXPECT_TRUE(
        is_error(open({.payload_bytes = {4, 4}, .topk = most, .items_max = 1}), Code::bad_input, {"exchange: topk is 9"}));
    EXPECT_TRUE(
        is_error(open({.payload_bytes = {4}, .items_max = -1}), Code::bad_input, {"exchange: items_max is -1; allowed: 0"}));
    EXPECT_TRUE(is_error(open({.payload_bytes = {4}, .items_max = most}), Code::bad_input, {"exchange: items_max"}));
    EXPECT_TRUE(is_error(open({.payload_bytes = {4}, .topk = 2, .items_max = int64_t{1} << 30}), Code::bad_input,
                         {"items_max 1073741824 * topk 2 = 2147483648 rows"}));
    EXPECT_TRUE(is_error(open({.payload_bytes = {4}, .rows_max = -1}), Code::bad_input, {"exchange: rows_max is -1"}));
    EXPECT_TRUE(
        is_error(open({.payload_bytes = {4}, .depth = 65}), Code::bad_input, {"exchange: depth is 65; allowed: 1..64"}));
    EXPECT_TRUE(is_error(open({.payload_bytes = {4}, .workers = 0}), Code::bad_input, {"exchange: workers is 0"}));
    EXPECT_TRUE(is_error(open({.payload_bytes = {4}, .timeout_ms = 0}), Code::bad_input, {"exchange: timeout_ms is 0"}));
    const ExchangeOptions four{.payload_bytes = {4}, .items_max = 1}, eight{.payload_bytes = {8}, .items_max = 1};
    EXPECT_TRUE(is_error(outcome_of([&] { Exchange::open_local(std::vector{four, eight}); }), Code::mismatch, {"rank 1"}));
    // The same bytes in all, cut differently: nothing but their own names tells them apart.
    const ExchangeOptions a{.payload_bytes = {16, 32}, .items_max = 1}, b{.payload_bytes = {32, 16}, .items_max = 1};
    EXPECT_TRUE(is_error(outcome_of([&] {
                             Exchange::open_local(std::vector{a, b});
                         }),
                         Code::mismatch, {"payload_bytes", "rank 1"}));
    const ExchangeOptions endless{.payload_bytes = {500'000'000, 5}, .items_max = (int64_t{1} << 31) - 1};
    if (slowness == 1) {  // a sanitizer ends the process instead
        EXPECT_TRUE(is_error(open(endless), Code::system, {"items_max"}));
    }
    std::vector<Exchange> group = Exchange::open_local({.payload_bytes = {4}, .experts = 3, .items_max = 1}, 2);
    EXPECT_TRUE(is_error(outcome_of([&] { group[0].alltoallv({}); }), Code::bad_input, {"3 experts on 2 ranks"}));
}

TEST(Exchange, ASendThatTimesOutTakesItsTurnSoThatRanksStayInStep) {
    // Several payloads in place: send waits for the slot before it can put them together.
    std::vector<Exchange> group =
        Exchange::open_local({.payload_bytes = {4, 4}, .items_max = 1, .strategy = Landing::in_place, .depth = 1}, 2);
    const int32_t value[] = {0, 1}, index = 1;
    Signal timed_out;
    on_ranks(2, [&](int r) {
        Exchange& x = group[static_cast<size_t>(r)];
        const SendArgs args{.payloads = {value, value}, .items = 1, .expert_indices = &index, .tag = 1};
        std::array<int32_t, 2> home{};
        Received first = x.send(args);
        if (r == 0) {
            // Rank 1 has not sent back yet: rank 0 gets neither its answers nor the slot.
            EXPECT_TRUE(is_error(outcome_of([&] {
                                     x.send_back(first, {.payloads = {&home[0], &home[1]}, .timeout_ms = 50 * slowness});
                                 }),
                                 Code::timed_out));
            SendArgs second = args;
            second.tag = 2;
            second.timeout_ms = 50 * slowness;
            EXPECT_TRUE(is_error(outcome_of([&] { x.send(second); }), Code::timed_out, {"rank 1"}));
            timed_out.raise();
        } else {
            timed_out.wait();
            std::memcpy(first.answer(0).data, value, 4);
            std::memcpy(first.answer(1).data, value, 4);
            const Outcome back = outcome_of([&] { x.send_back(first, {.payloads = {&home[0], &home[1]}}); });
            EXPECT_TRUE(back.code == Code::ok || back.code == Code::peer_left) << back.text;
            SendArgs second = args;
            second.tag = 2;
            EXPECT_NE(outcome_of([&] { x.send(second); }).code, Code::ok) << "rank 0 has given this one up";
        }
        SendArgs third = args;
        third.tag = 3;
        // The first call after an error of a combine tells of it; then both are in step again.
        const Outcome told = outcome_of([&] { x.send(third); });
        if (told.code != Code::ok) {
            EXPECT_EQ(x.send(third).rows(), r == 1 ? 2 : 0);
        }
    });
}

TEST(Exchange, RowsOfAnotherExchangeAndRowsSentBackAreStale) {
    std::vector<Exchange> a = Exchange::open_local({.payload_bytes = {4}, .items_max = 1}, 1);
    std::vector<Exchange> b = Exchange::open_local({.payload_bytes = {4}, .items_max = 1}, 1);
    const int32_t item = 7, index = 0;
    int32_t home = 0;
    Received got = a[0].send({.payloads = {&item}, .items = 1, .expert_indices = &index});
    EXPECT_TRUE(is_error(outcome_of([&] { b[0].send_back(got, {.payloads = {&home}}); }), Code::stale));
    std::memcpy(got.answer(0).data, &item, 4);
    a[0].send_back(got, {.payloads = {&home}});
    EXPECT_EQ(home, 7);
    EXPECT_TRUE(is_error(outcome_of([&] { got.payload(0); }), Code::stale));
    EXPECT_TRUE(is_error(outcome_of([&] { got.recv_counts(); }), Code::stale));
    EXPECT_TRUE(is_error(outcome_of([&] { got.send_counts(); }), Code::stale));
    EXPECT_TRUE(is_error(outcome_of([&] { got.send_offsets(); }), Code::stale));
    EXPECT_TRUE(is_error(outcome_of([&] { got.permutation(); }), Code::stale));
    EXPECT_TRUE(is_error(outcome_of([&] { a[0].send_back(got, {.payloads = {&home}}); }), Code::stale));
    EXPECT_TRUE(is_error(outcome_of([&] { Received().rows(); }), Code::stale));
}

}  // namespace
}  // namespace switchyard
