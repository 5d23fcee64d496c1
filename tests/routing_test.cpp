// Facts about the pure parts: who gets which row (ep/routing.hpp), and where everything lies in a window (layout/window.hpp).
//
// Right values are worked out by hand, by definitions written here in their plainest form, or come from the dispatch vectors
// of format_vectors.json.
#include "ep/routing.hpp"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "layout/window.hpp"
#include "testing.hpp"

namespace switchyard::test {
namespace {

using ep::Placement;
using ep::RowPlace;
using nlohmann::json;

// --------------------------------------------------------------------------------------------------------------- placement

struct Owned {
    int64_t ranks, experts;
    std::vector<std::pair<int64_t, int64_t>> ranges;
};

const std::vector<Owned>& placements_by_hand() {
    static const std::vector<Owned> all = {
        {1, 1, {{0, 1}}},
        {1, 5, {{0, 5}}},
        {2, 4, {{0, 2}, {2, 4}}},
        {3, 5, {{0, 2}, {2, 4}, {4, 5}}},
        {3, 7, {{0, 3}, {3, 5}, {5, 7}}},
        {4, 2, {{0, 1}, {1, 2}, {2, 2}, {2, 2}}},
        {5, 1, {{0, 1}, {1, 1}, {1, 1}, {1, 1}, {1, 1}}},
        {6, 24, {{0, 4}, {4, 8}, {8, 12}, {12, 16}, {16, 20}, {20, 24}}},
        {4, 1023, {{0, 256}, {256, 512}, {512, 768}, {768, 1023}}},
    };
    return all;
}

TEST(Placement, IsContiguousAndTheFirstRanksOwnOneMore) {
    for (const Owned& hand : placements_by_hand()) {
        SCOPED_TRACE(std::to_string(hand.ranks) + " ranks, " + std::to_string(hand.experts) + " experts");
        const Placement p = Placement::contiguous(hand.ranks, hand.experts);
        EXPECT_EQ(p.ranks, hand.ranks);
        EXPECT_EQ(p.experts, hand.experts);
        ASSERT_EQ(p.owner.size(), static_cast<size_t>(hand.experts));
        ASSERT_EQ(p.of_rank.size(), static_cast<size_t>(hand.ranks));
        for (size_t r = 0; r < hand.ranges.size(); ++r) {
            const auto [first, last] = hand.ranges[r];
            EXPECT_EQ(p.of_rank[r].first, first);
            EXPECT_EQ(p.of_rank[r].last, last);
            const ExpertRange direct = experts_of(static_cast<int64_t>(r), hand.ranks, hand.experts);
            EXPECT_EQ(direct.first, first);
            EXPECT_EQ(direct.last, last);
            EXPECT_EQ(direct.count(), last - first);
            for (int64_t e = first; e < last; ++e) EXPECT_EQ(p.owner[static_cast<size_t>(e)], static_cast<int32_t>(r));
        }
    }
}

TEST(Placement, GivesEveryExpertToExactlyOneRankForAnyNumbers) {
    for (int64_t ranks = 1; ranks <= 24; ++ranks)
        for (int64_t experts = 1; experts <= 60; ++experts) {
            int64_t next = 0;
            for (int64_t r = 0; r < ranks; ++r) {
                const ExpertRange range = experts_of(r, ranks, experts);
                ASSERT_EQ(range.first, next);
                ASSERT_EQ(range.count(), experts / ranks + (r < experts % ranks ? 1 : 0));
                next = range.last;
            }
            ASSERT_EQ(next, experts);
        }
}

// --------------------------------------------------------------------------------------------------------------- ids, counts

TEST(Routing, FindsTheFirstBadIdWhereverItStands) {
    for (const int64_t experts : {int64_t{1}, int64_t{7}, int64_t{1} << 20})
        for (const size_t n : {size_t{1}, size_t{2}, size_t{255}, size_t{256}, size_t{257}, size_t{1000}}) {
            const auto largest = static_cast<int32_t>(experts - 1);
            std::vector<int32_t> ids(n);
            for (size_t i = 0; i < n; ++i) ids[i] = i % 3 == 0 ? -1 : i % 3 == 1 ? largest : 0;
            const auto size = static_cast<int64_t>(n);
            EXPECT_EQ(ep::find_bad_id(ids.data(), size, experts), size);
            for (const int32_t bad : {-2, largest + 1, largest + 2, INT32_MIN, INT32_MIN + 1, INT32_MAX, -1000})
                for (const size_t at : {size_t{0}, n / 2, n - 1}) {
                    std::vector<int32_t> spoilt = ids;
                    spoilt[at] = bad;
                    EXPECT_EQ(ep::find_bad_id(spoilt.data(), size, experts), static_cast<int64_t>(at)) << bad;
                    spoilt[n - 1] = bad;  // a later one does not hide it
                    EXPECT_EQ(ep::find_bad_id(spoilt.data(), size, experts), static_cast<int64_t>(at)) << bad;
                }
        }
    EXPECT_EQ(ep::find_bad_id(nullptr, 0, 4), 0);
}

TEST(Routing, CountsEveryUsedSlot) {
    const std::vector<int32_t> ids{2, -1, 2, 0, 4, 2, -1, 4};
    std::vector<int32_t> counts{9, 9, 9, 9, 9};  // old values do not matter
    ep::count_rows(ids.data(), 8, counts);
    EXPECT_EQ(counts, (std::vector<int32_t>{1, 0, 3, 0, 2}));
    ep::count_rows(nullptr, 0, counts);
    EXPECT_EQ(counts, (std::vector<int32_t>{0, 0, 0, 0, 0}));
}

// ------------------------------------------------------------------------------------------------------------------ places

// Three ranks, five experts: rank 0 owns {0,1}, rank 1 {2,3}, rank 2 {4}.
//
//   counts   e0 e1 e2 e3 e4        per expert  4 1 0 17 3
//   rank 0    3  0  0 16  0
//   rank 1    0  1  0  1  0
//   rank 2    1  0  0  0  3
const std::vector<int32_t> hand_counts{3, 0, 0, 16, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 3};

TEST(Routing, LaysExpertsOutOneBehindTheOther) {
    const Placement p = Placement::contiguous(3, 5);
    std::vector<int64_t> first(5, -7), rows(3, -7);
    ep::place_experts(p, hand_counts, 1, first, rows);
    EXPECT_EQ(first, (std::vector<int64_t>{0, 4, 0, 0, 0}));
    EXPECT_EQ(rows, (std::vector<int64_t>{5, 17, 3}));
}

TEST(Routing, StartsEveryExpertAtAMultipleOfTheAlignment) {
    const Placement p = Placement::contiguous(3, 5);
    std::vector<int64_t> first(5), rows(3);
    ep::place_experts(p, hand_counts, 16, first, rows);
    EXPECT_EQ(first, (std::vector<int64_t>{0, 16, 0, 0, 0}));  // an expert without rows takes no room
    EXPECT_EQ(rows, (std::vector<int64_t>{32, 32, 16}));
    ep::place_experts(p, hand_counts, 128, first, rows);
    EXPECT_EQ(first, (std::vector<int64_t>{0, 128, 0, 0, 0}));
    EXPECT_EQ(rows, (std::vector<int64_t>{256, 128, 128}));
}

TEST(Routing, PlacesRowsBehindThoseOfLowerRanksInOrderOfTokenAndSlot) {
    const Placement p = Placement::contiguous(3, 5);
    std::vector<int64_t> first(5), rows(3);
    ep::place_experts(p, hand_counts, 16, first, rows);
    std::vector<int32_t> next(5, 77);
    // Rank 2: one row for expert 0 (behind three of rank 0), three for expert 4.
    const std::vector<int32_t> ids{4, -1, 0, 4, -1, 4};
    std::vector<RowPlace> places(6);
    ep::place_rows(p, hand_counts, first, 2, ids.data(), 6, next, places.data());
    const std::vector<std::pair<int, int>> right{{2, 0}, {-1, 0}, {0, 3}, {2, 1}, {-1, 0}, {2, 2}};
    for (size_t i = 0; i < 6; ++i) {
        EXPECT_EQ(places[i].rank, right[i].first) << i;
        if (places[i].rank >= 0) {
            EXPECT_EQ(places[i].row, right[i].second) << i;
        }
    }
    // Rank 1: expert 1 starts at row 16 of rank 0; its row for expert 3 comes behind sixteen of rank 0.
    const std::vector<int32_t> of_1{3, 1};
    ep::place_rows(p, hand_counts, first, 1, of_1.data(), 2, next, places.data());
    EXPECT_EQ(places[0].rank, 1);
    EXPECT_EQ(places[0].row, 16);
    EXPECT_EQ(places[1].rank, 0);
    EXPECT_EQ(places[1].row, 16);
}

TEST(Routing, TotalsBeyond31BitsAreCountedRight) {
    // Two ranks send 2^31 - 1 rows each to both experts of one rank.
    const Placement p = Placement::contiguous(1, 2);
    const Placement two{2, 2, {0, 0}, {{0, 2}, {2, 2}}};
    const std::vector<int32_t> counts{INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};
    std::vector<int64_t> first(2), rows(2);
    ep::place_experts(two, counts, 128, first, rows);
    const int64_t each = int64_t{1} << 32;  // 2^32 - 2, rounded up to 128
    EXPECT_EQ(first, (std::vector<int64_t>{0, each}));
    EXPECT_EQ(rows, (std::vector<int64_t>{2 * each, 0}));
}

// Every place by the definition: sort all rows by (local expert, source, token, k).
TEST(Routing, PlacesEqualASortOfAllRows) {
    Random random;
    for (int64_t n = 0; n < scaled(300); ++n) {
        const int64_t ranks = 1 + random.below(7), experts = 1 + random.below(12),
                      alignment = random.pick<int64_t>({1, 16, 32});
        const Placement p = Placement::contiguous(ranks, experts);
        std::vector<std::vector<int32_t>> ids(static_cast<size_t>(ranks));
        std::vector<int32_t> counts(static_cast<size_t>(ranks * experts));
        for (size_t r = 0; r < ids.size(); ++r) {
            ids[r].resize(static_cast<size_t>(random.below(40)));
            for (int32_t& id : ids[r]) id = static_cast<int32_t>(random.below(experts + 1)) - 1;
            ep::count_rows(ids[r].data(), static_cast<int64_t>(ids[r].size()),
                           std::span(counts).subspan(r * static_cast<size_t>(experts), static_cast<size_t>(experts)));
        }
        std::vector<int64_t> first(static_cast<size_t>(experts)), rows(static_cast<size_t>(ranks));
        ep::place_experts(p, counts, alignment, first, rows);

        std::vector<std::vector<RowPlace>> places;
        std::vector<int32_t> next(static_cast<size_t>(experts));
        for (size_t r = 0; r < ids.size(); ++r) {
            places.emplace_back(ids[r].size());
            ep::place_rows(p, counts, first, static_cast<int64_t>(r), ids[r].data(), static_cast<int64_t>(ids[r].size()), next,
                           places.back().data());
        }
        for (int64_t target = 0; target < ranks; ++target) {
            int64_t at = 0;
            for (int64_t e = experts_of(target, ranks, experts).first; e < experts_of(target, ranks, experts).last; ++e) {
                ASSERT_EQ(first[static_cast<size_t>(e)], at);
                for (size_t r = 0; r < ids.size(); ++r)
                    for (size_t i = 0; i < ids[r].size(); ++i)
                        if (ids[r][i] == e) {
                            ASSERT_EQ(places[r][i].rank, target);
                            ASSERT_EQ(places[r][i].row, at);
                            ++at;
                        }
                while (at % alignment != 0) ++at;
            }
            ASSERT_EQ(rows[static_cast<size_t>(target)], at);
        }
        for (size_t r = 0; r < ids.size(); ++r)
            for (size_t i = 0; i < ids[r].size(); ++i) ASSERT_EQ(places[r][i].rank < 0, ids[r][i] < 0);
    }
}

// ------------------------------------------------------------------------------------------------------------------ vectors

struct Vector {
    std::string id;
    Options options;
    std::vector<std::vector<int32_t>> ids;  // [R]
    json expected;
};

std::vector<Vector> dispatch_vectors() {
    std::vector<Vector> all;
    const json file = json::parse(std::ifstream(SY_TEST_GOLDEN_DIR "/format_vectors.json"));
    for (const json& v : file.at("dispatch_vectors")) {
        Vector one;
        one.id = v.at("id");
        one.options.hidden = 1;
        one.options.topk = v.at("topk");
        one.options.experts = v.at("experts");
        one.options.expert_token_nums = v.at("cumsum").get<bool>() ? TokenNums::cumsum : TokenNums::count;
        for (const json& rank : v.at("topk_ids")) {
            one.ids.emplace_back();
            for (const json& token : rank)
                for (const json& id : token) one.ids.back().push_back(id);
            one.options.tokens_max = std::max(one.options.tokens_max, static_cast<int64_t>(rank.size()));
        }
        EXPECT_EQ(one.ids.size(), v.at("ranks").get<size_t>());
        one.expected = v.at("expected");
        all.push_back(std::move(one));
    }
    return all;
}

template <class T>
std::vector<T> flat(const json& lists) {
    std::vector<T> out;
    for (const json& item : lists)
        if (item.is_array())
            for (const json& value : item) out.push_back(value);
        else
            out.push_back(item);
    return out;
}

TEST(DispatchVectors, AreThere) {
    EXPECT_GE(dispatch_vectors().size(), 6U);
}

TEST(DispatchVectors, ReferenceAgrees) {
    for (const Vector& v : dispatch_vectors()) {
        SCOPED_TRACE(v.id);
        std::vector<uint16_t> x(static_cast<size_t>(v.options.tokens_max));
        std::vector<reference::RankInput> inputs;
        for (const auto& ids : v.ids)
            inputs.push_back({x.data(), static_cast<int64_t>(ids.size()) / v.options.topk, ids.data(), nullptr});
        for (size_t r = 0; r < v.ids.size(); ++r) {
            const json& right = v.expected.at(r);
            const ExpertRange range =
                experts_of(static_cast<int64_t>(r), static_cast<int64_t>(v.ids.size()), v.options.experts);
            std::vector<int64_t> owned(static_cast<size_t>(range.count()));
            std::iota(owned.begin(), owned.end(), range.first);
            EXPECT_EQ(owned, flat<int64_t>(right.at("experts")));
            const reference::Received got = reference::dispatch(v.options, inputs, static_cast<int>(r));
            EXPECT_EQ(got.assist_info_for_combine, flat<int32_t>(right.at("assist_info_for_combine")));
            EXPECT_EQ(got.expert_token_nums, flat<int64_t>(right.at("expert_token_nums")));
            EXPECT_EQ(got.ep_recv_count, flat<int32_t>(right.at("ep_recv_count")));
        }
    }
}

TEST(DispatchVectors, SessionAgreesOnEveryLanding) {
    for (const Vector& v : dispatch_vectors())
        for (const Landing landing : every_landing) {
            Options o = v.options;
            o.landing = landing;
            SCOPED_TRACE(v.id + ": " + text_of(o));
            std::vector<Session> sessions = Session::open_local(o, static_cast<int>(v.ids.size()));
            on_ranks(static_cast<int64_t>(v.ids.size()), [&](int rank) {
                const auto r = static_cast<size_t>(rank);
                const auto tokens = static_cast<int64_t>(v.ids[r].size()) / o.topk;
                const std::vector<uint16_t> x(static_cast<size_t>(tokens));
                ExpertBatch batch = sessions[r].dispatch(
                    {.x = tokens ? x.data() : nullptr, .tokens = tokens, .topk_ids = tokens ? v.ids[r].data() : nullptr});
                const json& right = v.expected.at(r);
                const auto list = [](auto span) { return std::vector(span.begin(), span.end()); };
                EXPECT_EQ(list(batch.assist_info_for_combine()), flat<int32_t>(right.at("assist_info_for_combine")));
                EXPECT_EQ(list(batch.expert_token_nums()), flat<int64_t>(right.at("expert_token_nums")));
                EXPECT_EQ(list(batch.ep_recv_count()), flat<int32_t>(right.at("ep_recv_count")));
                std::vector<uint16_t> out(static_cast<size_t>(tokens));
                sessions[r].combine(batch, {.out = out.data()});
            });
        }
}

TEST(Reference, RefusesBadIdsNamingWhereTheyStand) {
    Options o;
    o.hidden = o.topk = 1;
    o.experts = o.tokens_max = 3;
    const uint16_t x[3] = {};
    for (const int32_t bad : {-2, 3, INT32_MIN, INT32_MAX}) {
        const std::vector<int32_t> ids{0, bad, 1};
        const reference::RankInput input{x, 3, ids.data(), nullptr};
        EXPECT_TRUE(is_error(outcome_of([&] {
                                 reference::dispatch(o, {&input, 1}, 0);
                             }),
                             Code::bad_input, {"rank 0", "[1][0]", std::to_string(bad), "0..2"}));
    }
}

// ------------------------------------------------------------------------------------------------------------------- window

using layout::Window;
using layout::WindowShape;

WindowShape sample_shape() {
    return {.ranks = 3,
            .depth = 2,
            .experts = 7,
            .experts_per_rank = 3,
            .hidden = 100,
            .topk = 3,
            .tokens_max = 5,
            .rows_max = 45,
            .cell_rows = 4,
            .token = TokenType::bf16,
            .dispatch = Format::mxfp8_e4m3,
            .combine = Format::int8_block8,
            .weights = true,
            .landing = Landing::padded,
            .group_ranks = 1,
            .push = true};
}

WindowShape random_shape(Random& random) {
    WindowShape s = sample_shape();
    s.ranks = 1 + random.below(9);
    s.depth = 1 + random.below(4);
    s.experts = 1 + random.below(300);
    s.experts_per_rank = (s.experts + s.ranks - 1) / s.ranks;
    s.hidden = 1 + random.below(5000);
    s.topk = 1 + random.below(9);
    s.tokens_max = random.below(100);
    s.rows_max = random.below(5000);
    s.cell_rows = random.below(s.tokens_max * s.topk + 1);
    s.token = random.pick({TokenType::f16, TokenType::bf16, TokenType::f32});
    s.dispatch = s.token == TokenType::f32 ? Format::none
                                           : random.pick({Format::none, Format::int8_token, Format::mxfp8_e5m2,
                                                          Format::mxfp8_e4m3, Format::fp8_e4m3_block128});
    s.combine =
        s.token == TokenType::f32 ? Format::none : random.pick({Format::none, Format::int8_block8, Format::int8_block128});
    s.weights = random.one_in(2);
    s.landing = random.pick(
        {Landing::packed, Landing::padded, Landing::in_place, Landing::allgather, Landing::two_level, Landing::alltoallv});
    s.group_ranks = 1 + random.below(s.ranks);
    s.push = random.one_in(2);
    return s;
}

/// Ranks whose tokens a window holds.
int64_t sources_of(const WindowShape& s) {
    switch (s.landing) {
        case Landing::in_place: return 1;
        case Landing::allgather:
        case Landing::two_level: return s.ranks;
        default: return 0;
    }
}

struct Part {
    std::string name;
    uint64_t at, bytes;
};

void expect_apart(std::vector<Part> parts, uint64_t end) {
    std::sort(parts.begin(), parts.end(),
              [](const Part& a, const Part& b) { return std::tie(a.at, a.bytes) < std::tie(b.at, b.bytes); });
    for (size_t i = 1; i < parts.size(); ++i)
        EXPECT_LE(parts[i - 1].at + parts[i - 1].bytes, parts[i].at) << parts[i - 1].name << " reaches into " << parts[i].name;
    EXPECT_LE(parts.back().at + parts.back().bytes, end) << parts.back().name << " reaches beyond the end";
}

/// Bytes of a row, by semantics section 4.
struct RowBytes {
    uint64_t payload, scales;
};
RowBytes row_bytes(Format format, TokenType token, int64_t hidden) {
    const auto h = static_cast<uint64_t>(hidden), item = static_cast<uint64_t>(token_bytes(token));
    const auto blocks = [&](uint64_t n) { return (h + n - 1) / n; };
    switch (format) {
        case Format::none: return {h * item, 0};
        case Format::int8_token: return {h, 4};
        case Format::mxfp8_e5m2:
        case Format::mxfp8_e4m3: return {h, (blocks(32) + 1) / 2 * 2};
        case Format::fp8_e4m3_block128:
        case Format::int8_block128: return {h, 4 * blocks(128)};
        case Format::int8_block8: return {h, item * blocks(8)};
    }
    return {};
}

TEST(Window, PartsStartOnPagesAndDoNotOverlap) {
    Random random;
    for (int n = 0; n < 2000; ++n) {
        const WindowShape s = random_shape(random);
        const Window w = layout::window_of(s);
        const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
        ASSERT_NE(w.bytes, layout::Region::limit_exceeded);
        const RowBytes row = row_bytes(s.dispatch, s.token, s.hidden), home = row_bytes(s.combine, s.token, s.hidden);
        EXPECT_EQ(u(w.row.payload_bytes), row.payload);
        EXPECT_EQ(u(w.row.scale_bytes()), row.scales);
        EXPECT_EQ(u(w.wire.payload_bytes), home.payload);
        EXPECT_EQ(u(w.wire.scale_bytes()), home.scales);

        expect_apart({{"header", 0, sizeof(layout::WindowHeader)},
                      {"bell", w.bell, sizeof(layout::Bell)},
                      {"members", w.members, u(s.ranks) * sizeof(layout::MemberLine)},
                      {"flags", w.flags, u(s.depth * s.ranks) * sizeof(layout::FlagLine)},
                      {"reasons", w.reasons, 2 * u(s.depth * s.ranks) * sizeof(layout::Reason)},
                      {"slots", w.slots, u(s.depth) * w.slot_bytes}},
                     w.bytes);
        for (const uint64_t line : {w.bell, w.members, w.flags, w.reasons}) EXPECT_EQ(line % 64, 0U);
        EXPECT_EQ(w.slots % layout::page_bytes, 0U);
        EXPECT_EQ(w.slot_bytes % layout::page_bytes, 0U);

        EXPECT_GE(w.count_stride, sizeof(layout::CountHead) + 4 * u(s.experts));
        EXPECT_EQ(w.count_stride % 64, 0U);
        const uint64_t cells = s.landing == Landing::padded ? u(s.experts_per_rank * s.ranks * s.cell_rows) : 0;
        const uint64_t homes = s.push ? u(s.tokens_max * s.topk) : 0;
        EXPECT_GE(u(w.cell.stride), row.payload + row.scales + 16);
        EXPECT_EQ(w.cell.stride % 64, 0);
        EXPECT_GE(u(w.cell.scales_at), row.payload);
        EXPECT_GE(u(w.cell.info_at), u(w.cell.scales_at) + row.scales);
        EXPECT_GE(u(w.home_row.scales_at), home.payload);
        EXPECT_GE(u(w.home_row.stride), u(w.home_row.scales_at) + home.scales);
        EXPECT_EQ(w.home_row.stride % 64, 0);
        expect_apart(
            {{"counts", w.counts, u(s.ranks) * w.count_stride},
             {"expand_x", w.expand_x, u(s.rows_max) * row.payload},
             {"scales", w.scales, u(s.rows_max) * row.scales},
             {"source_info", w.source_info, u(s.rows_max) * 12},
             {"weights", w.weights, s.weights ? u(s.rows_max) * 4 : 0},
             {"y", w.y, u(s.rows_max) * u(s.hidden) * token_bytes(s.token)},
             {"home", w.home, homes * u(w.home_row.stride)},
             {"landing", w.landing, cells * u(w.cell.stride)},
             {"blocks_out", w.blocks_out, s.landing == Landing::alltoallv ? u(s.tokens_max * s.topk * w.cell.stride) : 0},
             {"blocks_in", w.blocks_in, s.landing == Landing::alltoallv ? u(s.rows_max * w.cell.stride) : 0},
             {"x", w.x, u(sources_of(s) * s.tokens_max) * row.payload},
             {"x_scales", w.x_scales, u(sources_of(s) * s.tokens_max) * row.scales},
             {"x_ids", w.x_ids, u(sources_of(s) * s.tokens_max * s.topk) * 4},
             {"x_weights", w.x_weights, s.weights ? u(sources_of(s) * s.tokens_max * s.topk) * 4 : 0}},
            w.slot_bytes);
        for (const uint64_t part : {w.counts, w.expand_x, w.scales, w.source_info, w.weights, w.y, w.home, w.landing,
                                    w.blocks_out, w.blocks_in, w.x, w.x_scales, w.x_ids, w.x_weights})
            EXPECT_EQ(part % layout::page_bytes, 0U);

        // The last of each kind, by the functions that compute addresses.
        const uint64_t last_slot = u(s.depth - 1);
        EXPECT_EQ(w.slot(last_slot) + w.slot_bytes, w.bytes);
        EXPECT_LE(w.flag_line(last_slot, s.ranks - 1) + sizeof(layout::FlagLine), w.reasons);
        for (uint64_t epoch = 0; epoch < 2 * u(s.depth); ++epoch) {
            EXPECT_GE(w.reason(epoch, 0), w.reasons);
            EXPECT_LE(w.reason(epoch, s.ranks - 1) + sizeof(layout::Reason), w.slots);
        }
        EXPECT_LE(w.member(s.ranks - 1) + sizeof(layout::MemberLine), w.flags);
        EXPECT_LE(w.count_row(0, s.ranks - 1) + w.count_stride, w.slot(0) + w.expand_x);
        if (cells) {
            EXPECT_EQ(w.cell_at(last_slot, 0, 0, 0), w.slot(last_slot) + w.landing);
            EXPECT_LE(w.cell_at(last_slot, s.experts_per_rank - 1, s.ranks - 1, s.cell_rows - 1) + u(w.cell.stride), w.bytes);
        }
        if (homes) {
            EXPECT_EQ(w.home_at(0, 0, 0), w.slot(0) + w.home);
            EXPECT_LE(w.home_at(last_slot, s.tokens_max - 1, s.topk - 1) + u(w.home_row.stride), w.bytes);
        }
        if (testing::Test::HasFailure()) return;
    }
}

// A rank may read the reason of an epoch late, when the slot's next epoch has one, too; the one after that waits for it.
TEST(Window, ReasonsOfTwoEpochsOfASlotAreKeptApart) {
    for (const int64_t depth : {1, 2, 3}) {
        WindowShape s = sample_shape();
        s.depth = depth;
        const Window w = layout::window_of(s);
        std::set<uint64_t> places;
        for (uint64_t epoch = 1; epoch <= 2 * static_cast<uint64_t>(depth); ++epoch)
            for (int64_t r = 0; r < s.ranks; ++r) {
                EXPECT_TRUE(places.insert(w.reason(epoch, r)).second) << "epoch " << epoch << ", rank " << r;
                EXPECT_EQ(w.reason(epoch + 2 * static_cast<uint64_t>(depth), r), w.reason(epoch, r));
            }
    }
}

TEST(Window, CellsAndHomeRowsAreDistinct) {
    const WindowShape s = sample_shape();
    const Window w = layout::window_of(s);
    std::vector<uint64_t> at;
    for (int64_t e = 0; e < 3; ++e)
        for (int64_t r = 0; r < 3; ++r)
            for (int64_t i = 0; i < 4; ++i) at.push_back(w.cell_at(1, e, r, i));
    for (size_t i = 1; i < at.size(); ++i) EXPECT_EQ(at[i] - at[i - 1], static_cast<uint64_t>(w.cell.stride));
    at.clear();
    for (int64_t t = 0; t < 5; ++t)
        for (int64_t k = 0; k < 3; ++k) at.push_back(w.home_at(1, t, k));
    for (size_t i = 1; i < at.size(); ++i) EXPECT_EQ(at[i] - at[i - 1], static_cast<uint64_t>(w.home_row.stride));
}

// A flag whose address depends on the hidden size is read from old rows when the shape changes.
TEST(Window, StatePlaneDependsOnRanksAndDepthOnly) {
    Random random;
    for (int n = 0; n < 500; ++n) {
        WindowShape a = random_shape(random), b = random_shape(random);
        b.ranks = a.ranks;
        b.depth = a.depth;
        const Window x = layout::window_of(a), y = layout::window_of(b);
        EXPECT_EQ(x.bell, y.bell);
        EXPECT_EQ(x.members, y.members);
        EXPECT_EQ(x.flags, y.flags);
        EXPECT_EQ(x.reasons, y.reasons);
        EXPECT_EQ(x.slots, y.slots);
    }
}

TEST(Window, SizeIsTheSumOrTheLimitIsSeenInEveryDimension) {
    // The sum of all parts in 128 bits; a window is refused exactly when it does not fit.
    __extension__ typedef unsigned __int128 Wide;
    Random random;
    int refused = 0, accepted = 0;
    for (int n = 0; n < 20000; ++n) {
        WindowShape s = random_shape(random);
        for (int64_t* field : {&s.ranks, &s.depth, &s.hidden, &s.topk, &s.tokens_max, &s.rows_max, &s.cell_rows, &s.experts})
            if (random.one_in(4)) *field = int64_t{1} << random.below(31);
        s.ranks = std::min<int64_t>(s.ranks, 4095);
        s.depth = std::min<int64_t>(s.depth, 64);
        s.experts = std::min<int64_t>(s.experts, 1 << 20);
        s.topk = std::min<int64_t>(s.topk, 4096);
        s.experts_per_rank = (s.experts + s.ranks - 1) / s.ranks;
        if (s.tokens_max * s.topk >= int64_t{1} << 31) s.tokens_max = ((int64_t{1} << 31) - 1) / s.topk;
        const Window w = layout::window_of(s);
        const auto pages = [](Wide bytes) { return (bytes + 4095) / 4096 * 4096; };
        const auto u = [](int64_t v) { return static_cast<Wide>(v); };
        const RowBytes row = row_bytes(s.dispatch, s.token, s.hidden);
        Wide slot = pages(u(s.ranks) * w.count_stride) + pages(u(s.rows_max) * row.payload) +
                    pages(u(s.rows_max) * row.scales) + pages(u(s.rows_max) * 12) + pages(s.weights ? u(s.rows_max) * 4 : 0) +
                    pages(u(s.rows_max) * u(s.hidden) * token_bytes(s.token));
        if (s.push) slot += pages(u(s.tokens_max * s.topk) * u(w.home_row.stride));
        if (s.landing == Landing::padded) slot += pages(u(s.experts_per_rank) * u(s.ranks) * u(s.cell_rows) * u(w.cell.stride));
        if (s.landing == Landing::alltoallv)
            slot += pages(u(s.tokens_max * s.topk) * u(w.cell.stride)) + pages(u(s.rows_max) * u(w.cell.stride));
        const Wide tokens = u(sources_of(s)) * u(s.tokens_max), words = pages(tokens * u(s.topk) * 4);
        slot += pages(tokens * row.payload) + pages(tokens * row.scales) + words;
        if (s.weights) slot += words;
        const Wide state = 4096 + 64 + u(s.ranks) * 64 + u(s.ranks) * u(s.depth) * (64 + 2 * 512) + 64 + 2 * 576;
        const Wide all = pages(state) + slot * u(s.depth);
        if (all > layout::Region::limit) {
            EXPECT_EQ(w.bytes, layout::Region::limit_exceeded);
            ++refused;
        } else {
            EXPECT_EQ(Wide{w.bytes}, all);
            ++accepted;
        }
        if (testing::Test::HasFailure()) return;
    }
    EXPECT_GT(refused, 1000);
    EXPECT_GT(accepted, 1000);
}

TEST(Region, TakesPlacesInOrderAndRemembersOverflow) {
    layout::Region r;
    EXPECT_EQ(r.take(3, 5, 1), 0U);
    EXPECT_EQ(r.take(1, 8, 8), 16U);
    EXPECT_EQ(r.take(0, 100, 64), 64U);
    EXPECT_EQ(r.bytes(), 64U);
    r.take(layout::Region::limit, 2, 1);
    EXPECT_EQ(r.bytes(), layout::Region::limit_exceeded);
    r.take(1, 1, 1);
    EXPECT_EQ(r.bytes(), layout::Region::limit_exceeded);
    layout::Region wrap;
    wrap.take(uint64_t{1} << 33, uint64_t{1} << 31, 1);  // 2^64
    EXPECT_EQ(wrap.bytes(), layout::Region::limit_exceeded);
    layout::Region full;
    full.take(1, layout::Region::limit, 1);
    EXPECT_EQ(full.bytes(), layout::Region::limit);
    full.take(1, 1, 1);
    EXPECT_EQ(full.bytes(), layout::Region::limit_exceeded);
}

TEST(FlagWord, HoldsEpochCodeAndRankApart) {
    using layout::Word;
    for (const uint64_t epoch : {uint64_t{0}, uint64_t{1}, Word::epoch_max})
        for (const uint32_t code : {0U, 11U, 15U})
            for (const int32_t rank : {0, 1, 4094, 4095}) {
                const Word w = Word::of(epoch, code, rank);
                EXPECT_EQ(w.epoch(), epoch);
                EXPECT_EQ(w.code(), code);
                EXPECT_EQ(w.rank(), rank);
            }
    EXPECT_EQ(Word{}.epoch(), 0U);                                  // fresh memory
    EXPECT_LT(Word::of(1, 15, 4095).bits, Word::of(2, 0, 0).bits);  // a later epoch is a larger word
}

}  // namespace
}  // namespace switchyard::test
