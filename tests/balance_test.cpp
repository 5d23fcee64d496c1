// Facts about load balance: statistics, router helpers, placement tables, the planner, and sessions with replicas.
//
// Values come from arithmetic by hand; what a session must give comes from the reference, which knows no placement.
#include "switchyard/balance.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "ep/routing.hpp"
#include "plan/placement.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/switchyard.h"
#include "switchyard/weights.hpp"
#include "testing.hpp"

namespace switchyard::test {
namespace {

using Loads = std::vector<uint64_t>;

// ------------------------------------------------------------------------------------------------------------- statistics

TEST(LoadStatistics, AreThoseOfArithmeticByHand) {
    const LoadStatistics s = load_statistics(Loads{1, 7, 0, 4}, 2.0);
    EXPECT_EQ(s.total, 12U);
    EXPECT_EQ(s.mean, 3.0);
    EXPECT_EQ(s.max, 7U);
    EXPECT_DOUBLE_EQ(s.imbalance, 7.0 / 3.0);
    // Mean absolute difference over all pairs: 2 * (1+7+4 + 6+3 + ... ) = 2*(6+1+3+7+3+4) = 48; / (2 n^2 mean) = 48 / 96.
    EXPECT_DOUBLE_EQ(s.gini, 0.5);
    EXPECT_EQ(s.hot, (std::vector<int32_t>{1}));
    EXPECT_EQ(load_statistics(Loads{1, 7, 0, 4}, 1.0).hot, (std::vector<int32_t>{1, 3}));
    EXPECT_EQ(load_statistics(Loads{5, 5, 5}, 1.0).hot, (std::vector<int32_t>{0, 1, 2}));  // ties by index
}

TEST(LoadStatistics, OfEvenAndOneSidedLoadsAreTheEndsOfTheirScales) {
    EXPECT_EQ(load_statistics(Loads{9, 9, 9}).imbalance, 1.0);
    EXPECT_EQ(load_statistics(Loads{9, 9, 9}).gini, 0.0);
    EXPECT_EQ(load_statistics(Loads{0, 0, 8, 0}).imbalance, 4.0);
    EXPECT_DOUBLE_EQ(load_statistics(Loads{0, 0, 8, 0}).gini, 0.75);
    EXPECT_EQ(load_statistics({}).imbalance, 1.0);
    EXPECT_EQ(load_statistics(Loads{0, 0}).imbalance, 1.0);
    EXPECT_TRUE(load_statistics(Loads{0, 0}).hot.empty());
    EXPECT_TRUE(is_error(outcome_of([] { load_statistics(Loads{1}, 0); }), Code::bad_input, {"hot_factor is 0"}));
    const uint64_t half = uint64_t{1} << 63;
    EXPECT_TRUE(is_error(outcome_of([&] { load_statistics(Loads{half, half}); }), Code::bad_input, {"2^64"}));
    EXPECT_EQ(load_statistics(Loads{half, half - 1}).total, ~uint64_t{0});
}

// -------------------------------------------------------------------------------------------------------- router's helpers

TEST(AuxiliaryLoss, IsTheFormulaOfTheSwitchTransformer) {
    // T 2, E 2, K 1. f = (1, 0), P = ((0.75 + 0.5) / 2, ...) = (0.625, 0.375): 0.01 * 2 * 0.625.
    const std::vector<float> probs = {0.75F, 0.25F, 0.5F, 0.5F};
    EXPECT_DOUBLE_EQ(switch_auxiliary_loss(probs, std::vector<int32_t>{0, 0}, 2, 1, 0.01), 0.0125);
    // K 2 with an unused slot: f = (2/4, 1/4): 1 * 2 * (0.5 * 0.625 + 0.25 * 0.375).
    EXPECT_DOUBLE_EQ(switch_auxiliary_loss(probs, std::vector<int32_t>{0, 1, 0, -1}, 2, 2, 1.0), 0.8125);
    // Even in both: alpha.
    EXPECT_DOUBLE_EQ(switch_auxiliary_loss(std::vector<float>(4, 0.5F), std::vector<int32_t>{0, 1}, 2, 1, 0.25), 0.25);
    EXPECT_EQ(switch_auxiliary_loss({}, {}, 4, 2, 1.0), 0.0);
}

TEST(AuxiliaryLoss, RefusesWhatDoesNotFit) {
    const std::vector<float> probs(4);
    const auto loss = [&](std::vector<int32_t> ids, int64_t e, int64_t k) {
        return outcome_of([&] { switch_auxiliary_loss(probs, ids, e, k, 1); });
    };
    EXPECT_TRUE(is_error(loss({0, 2}, 2, 1), Code::bad_input, {"topk_ids[1][0] is 2", "0..1"}));
    EXPECT_TRUE(is_error(loss({0, 1, 0}, 2, 2), Code::bad_input, {"3 slots", "topk 2"}));
    EXPECT_TRUE(is_error(loss({0}, 2, 1), Code::bad_input, {"4 numbers", "are 2"}));
}

TEST(BiasUpdate, RaisesWhatIsBelowTheMeanAndLowersWhatIsAbove) {
    std::vector<float> bias = {0.5F, 0.5F, 0.5F};
    update_bias(bias, Loads{1, 2, 3}, 0.125F);
    EXPECT_EQ(bias, (std::vector<float>{0.625F, 0.5F, 0.375F}));
    update_bias(bias, Loads{4, 4, 5}, 0.125F);  // the mean is no whole number
    EXPECT_EQ(bias, (std::vector<float>{0.75F, 0.625F, 0.25F}));
    EXPECT_TRUE(is_error(outcome_of([&] { update_bias(bias, Loads{1}, 1); }), Code::bad_input, {"3 experts", "1"}));
    const uint64_t half = uint64_t{1} << 63;
    bias = {0, 0};
    update_bias(bias, Loads{half, 0}, 1);  // load * E needs more than 64 bits
    EXPECT_EQ(bias, (std::vector<float>{-1, 1}));
    bias = {0, 0, 0};
    update_bias(bias, Loads{half, half, 0}, 1);  // and so does the total
    EXPECT_EQ(bias, (std::vector<float>{-1, -1, 1}));
}

TEST(Capacity, KeepsTheFirstOfEachExpertInOrderAndCountsTheRest) {
    // T 3, K 2, E 2, factor 0.5: ceil(0.5 * 6 / 2) = 2 rows of each expert.
    std::vector<int32_t> ids = {0, 1, 0, 0, -1, 0};
    const CapacityResult r = apply_capacity(ids, 2, 2, 0.5);
    EXPECT_EQ(r.capacity, 2);
    EXPECT_EQ(ids, (std::vector<int32_t>{0, 1, 0, -1, -1, -1}));
    EXPECT_EQ(r.dropped, (std::vector<int64_t>{2, 0}));
    EXPECT_EQ(r.dropped_total, 2);
}

TEST(Capacity, RoundsUpButNotTheNoiseOfAProduct) {
    std::vector<int32_t> ids(10, 0);
    EXPECT_EQ(apply_capacity(ids, 1, 1, 1.1).capacity, 11);  // 1.1 * 10 is 11.000000000000002
    EXPECT_EQ(apply_capacity(ids, 1, 3, 1.0).capacity, 4);   // 3.33
    EXPECT_EQ(std::count(ids.begin(), ids.end(), -1), 6);
    EXPECT_EQ(apply_capacity(ids, 1, 3, 0.0).dropped_total, 4);
    EXPECT_EQ(apply_capacity({}, 2, 3, 1e300).capacity, 0);
    std::vector<int32_t> bad = {0, 7};
    EXPECT_TRUE(is_error(outcome_of([&] { apply_capacity(bad, 1, 3, 0); }), Code::bad_input, {"topk_ids[1][0] is 7"}));
    EXPECT_EQ(bad, (std::vector<int32_t>{0, 7}));
    EXPECT_TRUE(is_error(outcome_of([&] { apply_capacity(ids, 1, 3, -1); }), Code::bad_input, {"capacity_factor is -1"}));
}

// ------------------------------------------------------------------------------------------------------------------ tables

PlacementTable table_of(int64_t ranks, int64_t experts, std::vector<int32_t> expert_of, std::vector<int32_t> parts = {}) {
    PlacementTable t;
    t.ranks = ranks;
    t.experts = experts;
    t.expert_of = std::move(expert_of);
    t.parts = std::move(parts);
    return t;
}

TEST(PlacementTable, NumbersThatCannotBeAreRefusedWhereverTheyComeFrom) {
    for (const auto& [ranks, experts] : {std::pair<int64_t, int64_t>{0, 1}, {4096, 1}, {2, -1}, {2, 0}, {2, (1 << 20) + 1}})
        EXPECT_TRUE(is_error(outcome_of([&] { PlacementTable::contiguous(ranks, experts); }), Code::bad_input, {"1..4095"}));
    for (const int32_t choice : {-1, 3, 1'000'000}) {
        PlacementTable t = table_of(2, 2, {0, 1});
        t.choice = static_cast<ReplicaChoice>(choice);
        EXPECT_TRUE(is_error(outcome_of([&] { static_cast<void>(t.to_text()); }), Code::bad_input,
                             {"choice is " + std::to_string(choice), "nearest"}));
    }
    EXPECT_TRUE(is_error(outcome_of([] { experts_of(0, 0, 4); }), Code::bad_input, {"rank 0 of 0"}));
    EXPECT_TRUE(is_error(outcome_of([] { experts_of(2, 2, 4); }), Code::bad_input, {"rank 2 of 2"}));
    EXPECT_TRUE(is_error(outcome_of([] { experts_of(0, 2, -1); }), Code::bad_input, {"-1 experts"}));
}

TEST(PlacementTable, SlotsThatItDoesNotHaveBelongToNobody) {
    EXPECT_TRUE(is_error(outcome_of([] { static_cast<void>(PlacementTable().rank_of(0)); }), Code::bad_input, {"slot 0"}));
    const PlacementTable t = table_of(2, 2, {0, 1});
    EXPECT_EQ(t.rank_of(1), 1);
    for (const int64_t slot : {int64_t{-1}, int64_t{2}})
        EXPECT_TRUE(
            is_error(outcome_of([&] { static_cast<void>(t.rank_of(slot)); }), Code::bad_input, {"2 slots and 2 ranks"}));
}

TEST(PlacementTable, GivesASlotToTheRankThatWouldOwnSuchAnExpert) {
    for (int64_t ranks = 1; ranks <= 9; ++ranks)
        for (int64_t slots = 1; slots <= 30; ++slots) {
            const PlacementTable t = table_of(ranks, slots, std::vector<int32_t>(static_cast<size_t>(slots)));
            for (int64_t r = 0; r < ranks; ++r)
                for (int64_t s = experts_of(r, ranks, slots).first; s < experts_of(r, ranks, slots).last; ++s)
                    ASSERT_EQ(t.rank_of(s), r) << s << " of " << slots << " on " << ranks;
        }
}

TEST(PlacementTable, RefusesWhatItMustNotHold) {
    const auto refused = [](const PlacementTable& t, std::initializer_list<std::string> words) {
        return is_error({t.check().code(), t.check().text()}, Code::bad_input, words);
    };
    EXPECT_TRUE(table_of(2, 3, {0, 1, 0, 2}).check().ok());
    EXPECT_TRUE(refused(table_of(2, 3, {0, 0, 1, 2}), {"slot 1", "rank 0", "expert 0 a second time"}));
    EXPECT_TRUE(refused(table_of(2, 3, {0, 1, 0, 1}), {"expert 2 lies in no slot"}));
    EXPECT_TRUE(refused(table_of(2, 3, {0, 1, 0, 3}), {"slot 3 holds expert 3", "0..2"}));
    EXPECT_TRUE(refused(table_of(2, 3, {0, 1}), {"2 slots for 3 experts"}));
    EXPECT_TRUE(refused(table_of(0, 3, {0, 1, 2}), {"0 ranks"}));
    EXPECT_TRUE(refused(table_of(2, 2, {0, 1}, {1}), {"2 slots and 1 parts"}));
    EXPECT_TRUE(refused(table_of(2, 2, {0, 1}, {1, 0}), {"slot 1 has 0 parts"}));
}

TEST(PlacementTable, TextComesBackAndTheHashTellsTablesApart) {
    PlacementTable t = table_of(2, 3, {0, 1, 0, 2});
    EXPECT_EQ(PlacementTable::from_text(t.to_text()), t);
    const uint64_t plain = t.hash();
    t.parts = {3, 1, 1, 1};
    t.choice = ReplicaChoice::least_loaded;
    EXPECT_EQ(PlacementTable::from_text(t.to_text()), t);
    EXPECT_NE(t.hash(), plain);
    EXPECT_EQ(PlacementTable::from_text(t.to_text()).hash(), t.hash());
    PlacementTable moved = t;
    std::swap(moved.expert_of[0], moved.expert_of[1]);
    EXPECT_NE(moved.hash(), t.hash());
    // FNV-1a by hand of (1, 1, 1, 0, 0, 0) as 48 bytes; a number in a file of today must be the number of tomorrow.
    uint64_t h = 0xCBF29CE484222325;
    for (const uint64_t word : {1U, 1U, 1U, 0U, 0U, 0U})
        for (int byte = 0; byte < 8; ++byte) h = (h ^ (word >> 8 * byte & 255)) * 0x100000001B3;
    EXPECT_EQ(PlacementTable::contiguous(1, 1).hash(), h);
}

TEST(PlacementTable, ReadsNoTextThatIsNoTable) {
    const auto refused = [](const char* text, const char* word) {
        return is_error(outcome_of([&] { PlacementTable::from_text(text); }), Code::bad_input, {"placement table", word});
    };
    EXPECT_TRUE(refused("", "\"{\" expected"));
    EXPECT_TRUE(refused("{}", "no key"));
    EXPECT_TRUE(refused(R"({"switchyard_placement": 2})", "version 2"));
    EXPECT_TRUE(refused(R"({"switchyard_placement": 1, "rank": 3})", "key \"rank\""));
    EXPECT_TRUE(refused("{\"switchyard_placement\": 1,\n \"ranks\": -3}", "line 2"));
    EXPECT_TRUE(refused(R"({"switchyard_placement": 1, "choice": "any"})", "choice \"any\""));
    EXPECT_TRUE(refused(R"({"switchyard_placement": 1, "expert_of": [0, 1})", "\"]\" expected"));
    EXPECT_TRUE(refused(R"({"switchyard_placement": 1, "ranks)", "without its end"));
    EXPECT_TRUE(refused(R"({"switchyard_placement": 1, "ranks": 1, "experts": 2, "expert_of": [0]})", "1 slots for 2"));
    EXPECT_TRUE(refused(R"({"switchyard_placement": 1, "ranks": 1, "experts": 1, "expert_of": [0]} x)", "behind"));
}

// ----------------------------------------------------------------------------------------------------------------- choice

TEST(ReplicaChoice, RoundRobinCountsARanksRowsForAnExpert) {
    // Expert 0 in slots 0 and 2, expert 1 in slot 1 and 3, expert 2 in slot 4. Rank r begins at replica r mod 2.
    const PlacementTable t = table_of(3, 3, {0, 1, 0, 1, 2});
    const std::vector<int32_t> ids = {0, 0, 1, 2, -1, 0, 1, 2};
    EXPECT_EQ(slots_of(t, 0, ids), (std::vector<int32_t>{0, 2, 1, 4, -1, 0, 3, 4}));
    EXPECT_EQ(slots_of(t, 1, ids), (std::vector<int32_t>{2, 0, 3, 4, -1, 2, 1, 4}));
    EXPECT_TRUE(is_error(outcome_of([&] { slots_of(t, 0, std::vector<int32_t>{3}); }), Code::bad_input, {"topk_ids[0] is 3"}));
}

TEST(ReplicaChoice, NearestStaysAtHomeWhereItCan) {
    PlacementTable t = table_of(3, 3, {0, 1, 0, 1, 2});  // ranks own slots 0-1, 2-3, 4
    t.choice = ReplicaChoice::nearest;
    const std::vector<int32_t> ids = {0, 0, 1, 1, 2};
    EXPECT_EQ(slots_of(t, 0, ids), (std::vector<int32_t>{0, 0, 1, 1, 4}));
    EXPECT_EQ(slots_of(t, 1, ids), (std::vector<int32_t>{2, 2, 3, 3, 4}));
    EXPECT_EQ(slots_of(t, 2, ids), (std::vector<int32_t>{0, 2, 1, 3, 4}));
}

TEST(ReplicaChoice, LeastLoadedKeepsToThePartsAtEveryLength) {
    PlacementTable t = table_of(2, 1, {0, 0}, {3, 1});
    t.choice = ReplicaChoice::least_loaded;
    const std::vector<int32_t> ids(8, 0);
    EXPECT_EQ(slots_of(t, 0, ids), (std::vector<int32_t>{0, 0, 1, 0, 0, 0, 1, 0}));
    EXPECT_EQ(slots_of(t, 1, ids), (std::vector<int32_t>{0, 1, 0, 0, 0, 1, 0, 0}));
}

TEST(ReplicaChoice, PassesOverOwnersThatHaveLeft) {
    const PlacementTable t = table_of(3, 2, {0, 1, 0, 1, 0});  // rank 0: 0 1, rank 1: 0 1, rank 2: 0
    const ep::Placement owners = ep::Placement::contiguous(3, 5);
    const ep::Turns turns = plan::turns_of(t, 0);
    std::vector<int32_t> ids = {0, 0, 0, 1, 1, -1}, next(5);
    const std::vector<uint8_t> one_left = {0, 1, 0};
    ep::take_turns(turns, owners, one_left, ids.data(), 6, next, ids.data());
    EXPECT_EQ(ids, (std::vector<int32_t>{0, 4, 0, 1, 1, -1}));
    ids = {0, 1, 0, 1, 0, 1};
    const std::vector<uint8_t> two_left = {1, 1, 0};
    ep::take_turns(turns, owners, two_left, ids.data(), 6, next, ids.data());
    EXPECT_EQ(ids, (std::vector<int32_t>{4, -1, 4, -1, 4, -1}));
    EXPECT_EQ(ep::living_owner(turns, owners, one_left, 1), 0);
    EXPECT_EQ(ep::living_owner(turns, owners, two_left, 1), -1);
    ids = {0, 2, 4, 1};
    ep::take_turns({}, owners, two_left, ids.data(), 4, next, ids.data());  // without a table an id is its slot
    EXPECT_EQ(ids, (std::vector<int32_t>{-1, -1, 4, -1}));
}

// ---------------------------------------------------------------------------------------------------------------- planner

Loads zipf(int64_t experts, double exponent, uint64_t seed) {
    Loads loads;
    for (int64_t i = 1; i <= experts; ++i)
        loads.push_back(static_cast<uint64_t>(1e7 * std::pow(static_cast<double>(i), -exponent)));
    std::mt19937_64 random(seed);
    for (size_t i = loads.size(); i > 1; --i) std::swap(loads[i - 1], loads[random() % i]);
    return loads;
}

double imbalance(const std::vector<double>& loads) {
    const double sum = std::accumulate(loads.begin(), loads.end(), 0.0);
    return sum > 0 ? *std::max_element(loads.begin(), loads.end()) * static_cast<double>(loads.size()) / sum : 1.0;
}

// No table with equal shares can do better: an expert whose replicas carry at most `most` each needs load / most of them, at
// most one per rank, and there are only so many slots. Nor can any be more even than even.
double bound_of(const Loads& loads, int64_t ranks, int64_t slots) {
    const double mean =
        static_cast<double>(std::accumulate(loads.begin(), loads.end(), uint64_t{0})) / static_cast<double>(ranks);
    double low = 0, high = 1e12;
    for (int step = 0; step < 200; ++step) {
        const double most = (low + high) / 2;
        double needed = 0;
        bool fits = true;
        for (const uint64_t load : loads) {
            const double replicas = std::max(1.0, std::ceil(static_cast<double>(load) / most));
            needed += replicas;
            fits = fits && replicas <= static_cast<double>(ranks);
        }
        (fits && needed <= static_cast<double>(slots) ? high : low) = most;
    }
    return std::max(1.0, high / mean);
}

struct Shape {
    int64_t ranks, experts;
};

TEST(Planner, BringsZipfWithAQuarterOfReplicasBelow115) {
    std::printf("%6s %8s %6s  %10s %8s %12s %13s\n", "ranks", "experts", "slots", "contiguous", "bound", "round_robin",
                "least_loaded");
    for (const Shape shape : {Shape{2, 8},
                              {2, 16},
                              {4, 32},
                              {4, 64},
                              {8, 64},
                              {8, 128},
                              {8, 256},
                              {16, 128},
                              {16, 256},
                              {32, 256},
                              {7, 100},
                              {12, 160},
                              {64, 256},
                              {128, 512}}) {
        const int64_t slots = shape.experts + shape.experts / 4;
        double worst_even = 0, worst_parts = 0, before = 0, bound = 0;
        for (uint64_t seed = 0; seed < 5; ++seed) {
            const Loads loads = zipf(shape.experts, 1.2, seed);
            PlacementTable t = plan_placement(loads, {.ranks = shape.ranks, .slots = slots});
            ASSERT_TRUE(t.check().ok()) << t.check().text();
            ASSERT_EQ(t.slots(), slots);
            worst_parts = std::max(worst_parts, imbalance(planned_rank_loads(t, loads)));
            t.choice = ReplicaChoice::round_robin;
            worst_even = std::max(worst_even, imbalance(planned_rank_loads(t, loads)));
            before =
                std::max(before, imbalance(planned_rank_loads(PlacementTable::contiguous(shape.ranks, shape.experts), loads)));
            bound = std::max(bound, bound_of(loads, shape.ranks, slots));
        }
        std::printf("%6lld %8lld %6lld  %10.3f %8.3f %12.3f %13.3f\n", static_cast<long long>(shape.ranks),
                    static_cast<long long>(shape.experts), static_cast<long long>(slots), before, bound, worst_even,
                    worst_parts);
        EXPECT_LE(worst_even, 1.15) << shape.ranks << " ranks, " << shape.experts << " experts";
        EXPECT_LE(worst_parts, 1.15) << shape.ranks << " ranks, " << shape.experts << " experts";
        EXPECT_GE(worst_even, bound - 1e-6) << "the bound is none";
    }
}

TEST(Planner, DoesWhatHandsWouldDo) {
    // Loads 4 1 1 2 on 2 ranks with 6 slots: the spare ones go to 4 (2+2), then, of 2 and 2 and 2, to the lowest that has no
    // replica on every rank: expert 3 (1+1). All replicas are then 1 or 2, and 4 4 is reached.
    const Loads loads = {4, 1, 1, 2};
    const PlacementTable t = plan_placement(loads, {.ranks = 2, .slots = 6, .choice = ReplicaChoice::round_robin});
    EXPECT_EQ(planned_rank_loads(t, loads), (std::vector<double>{4, 4}));
    EXPECT_EQ(std::count(t.expert_of.begin(), t.expert_of.end(), 0), 2);
    EXPECT_EQ(std::count(t.expert_of.begin(), t.expert_of.end(), 3), 2);
    EXPECT_TRUE(t.parts.empty());
    // Shares: 3 and 1 beside a hot 8 on both ranks come out even only when the hot expert's replicas take 5 and 3.
    PlacementTable uneven = plan_placement(Loads{8, 3, 1}, {.ranks = 2, .slots = 4});
    EXPECT_EQ(planned_rank_loads(uneven, Loads{8, 3, 1}), (std::vector<double>{6, 6}));
}

TEST(Planner, KeepsItsPromisesForAnyLoads) {
    Random random;
    for (int64_t round = 0; round < scaled(400); ++round) {
        PlanArgs args;
        args.ranks = 1 + random.below(12);
        const int64_t experts = 1 + random.below(40);
        const int64_t most = std::min(args.ranks * experts, experts + 30);
        args.slots = experts + random.below(most - experts + 1);
        args.ranks_per_group = random.below(5);
        args.expert_groups = random.one_in(2) ? 0 : 1 + random.below(8);
        args.choice = random.pick({ReplicaChoice::round_robin, ReplicaChoice::nearest, ReplicaChoice::least_loaded});
        Loads loads;
        for (int64_t e = 0; e < experts; ++e)
            loads.push_back(random.one_in(4) ? 0 : static_cast<uint64_t>(std::exp(static_cast<double>(random.below(20)))));
        const PlacementTable t = plan_placement(loads, args);
        ASSERT_TRUE(t.check().ok()) << t.check().text() << " in round " << round;
        ASSERT_EQ(t.slots(), args.slots);
        EXPECT_EQ(t, plan_placement(loads, args));
        const std::vector<double> planned = planned_rank_loads(t, loads);
        const double sum = static_cast<double>(std::accumulate(loads.begin(), loads.end(), uint64_t{0}));
        EXPECT_NEAR(std::accumulate(planned.begin(), planned.end(), 0.0), sum, 1e-9 * sum);
        if (!is_hierarchical(experts, args)) continue;
        // All replicas of an expert, and all experts of a group, on one host; as many groups on each.
        const int64_t groups = args.expert_groups ? args.expert_groups : experts;
        std::map<int64_t, std::set<int64_t>> hosts_of, groups_on;
        for (int64_t s = 0; s < t.slots(); ++s) {
            const int64_t group = t.expert_of[static_cast<size_t>(s)] / (experts / groups);
            hosts_of[group].insert(t.rank_of(s) / args.ranks_per_group);
            groups_on[t.rank_of(s) / args.ranks_per_group].insert(group);
        }
        for (const auto& [group, hosts] : hosts_of) EXPECT_EQ(hosts.size(), 1U) << "group " << group << " in round " << round;
        for (const auto& [host, on] : groups_on)
            EXPECT_EQ(on.size(), static_cast<size_t>(groups * args.ranks_per_group / args.ranks));
    }
}

TEST(Planner, IsHierarchicalOnlyWhereEverythingDivides) {
    EXPECT_TRUE(is_hierarchical(64, {.ranks = 8, .slots = 80, .ranks_per_group = 4, .expert_groups = 8}));
    EXPECT_TRUE(is_hierarchical(64, {.ranks = 8, .slots = 80, .ranks_per_group = 4}));
    EXPECT_FALSE(is_hierarchical(64, {.ranks = 8, .slots = 80}));
    EXPECT_FALSE(is_hierarchical(64, {.ranks = 8, .slots = 80, .ranks_per_group = 8}));
    EXPECT_FALSE(is_hierarchical(64, {.ranks = 8, .slots = 81, .ranks_per_group = 4}));
    EXPECT_FALSE(is_hierarchical(64, {.ranks = 8, .slots = 80, .ranks_per_group = 3}));
    EXPECT_FALSE(is_hierarchical(63, {.ranks = 8, .slots = 80, .ranks_per_group = 4}));
    EXPECT_FALSE(is_hierarchical(63, {.ranks = 8, .slots = 80, .ranks_per_group = 4, .expert_groups = 7}));
}

TEST(Planner, RefusesWhatCannotBe) {
    const auto refused = [](Loads loads, const PlanArgs& args, std::initializer_list<std::string> words) {
        return is_error(outcome_of([&] { plan_placement(loads, args); }), Code::bad_input, words);
    };
    EXPECT_TRUE(refused({1, 1}, {.ranks = 2, .slots = 1}, {"1 slots for 2 experts", "2 (one per expert) to 4"}));
    EXPECT_TRUE(refused({1, 1}, {.ranks = 2, .slots = 5}, {"5 slots"}));
    EXPECT_TRUE(refused({1, 1}, {.ranks = 0, .slots = 2}, {"0 ranks"}));
    EXPECT_TRUE(refused({}, {.ranks = 2, .slots = 2}, {"no loads"}));
}

TEST(Planner, GivesCoarserPartsWhereThereWouldBeTooMany) {
    const int64_t experts = 300'000;  // two replicas with 64 parts for each would be 19.2 million parts
    const PlacementTable t = plan_placement(Loads(static_cast<size_t>(experts), 2),
                                            {.ranks = 2, .slots = 2 * experts, .choice = ReplicaChoice::least_loaded});
    EXPECT_TRUE(t.check().ok()) << t.check().text();
}

TEST(WeightMoves, TakeFromTheHolderThatSendsLeast) {
    // Old: rank 0 holds 0 1, rank 1 holds 0 2, rank 2 holds 3. New: rank 0: 0 2, rank 1: 3 0, rank 2: 0 1.
    const PlacementTable from = table_of(3, 4, {0, 1, 0, 2, 3});
    PlacementTable to = table_of(3, 4, {0, 2, 3, 0, 0, 1});
    std::vector<std::vector<int32_t>> moves;
    for (const WeightMove& m : weight_moves(from, to)) moves.push_back({m.slot, m.expert, m.source, m.target});
    // Slot 4 wants expert 0 of rank 0 (sends nothing yet) or rank 1 (sends expert 2 already).
    EXPECT_EQ(moves, (std::vector<std::vector<int32_t>>{
                         {0, 0, 0, 0}, {1, 2, 1, 0}, {2, 3, 2, 1}, {3, 0, 1, 1}, {4, 0, 0, 2}, {5, 1, 0, 2}}));
    EXPECT_TRUE(is_error(outcome_of([&] {
                             weight_moves(from, table_of(2, 4, {0, 1, 2, 3}));
                         }),
                         Code::bad_input, {"3 ranks", "of 2"}));
}

// --------------------------------------------------------------------------------------------------------------- sessions

constexpr int64_t never_ms = 20000 * slowness;

Options options_of(int64_t experts, Landing landing = Landing::packed, CombinePath path = CombinePath::read) {
    Options o;
    o.hidden = 33;
    o.topk = 3;
    o.experts = experts;
    o.tokens_max = 20;
    o.landing = landing;
    o.combine_path = path;
    o.timeout_ms = never_ms;
    return o;
}

struct Way {
    Landing landing;
    CombinePath path;
};
constexpr Way every_way[] = {
    {Landing::packed, CombinePath::read},    {Landing::packed, CombinePath::push},    {Landing::padded, CombinePath::read},
    {Landing::padded, CombinePath::push},    {Landing::in_place, CombinePath::read},  {Landing::in_place, CombinePath::push},
    {Landing::allgather, CombinePath::read}, {Landing::two_level, CombinePath::push}, {Landing::alltoallv, CombinePath::read}};

TEST(SessionWithReplicas, EqualsTheReferenceForAnyTable) {
    Random random;
    for (int64_t round = 0; round < scaled(40); ++round)
        for (const auto& [landing, path] : every_way) {
            const int64_t ranks = 1 + random.below(6), experts = 1 + random.below(12);
            Options o = options_of(experts, landing, path);
            o.topk = 1 + random.below(4);
            o.expert_alignment = random.pick<int64_t>({1, 16});
            o.deliver_weights = random.one_in(2);
            o.dispatch_quant = random.pick({Format::none, Format::mxfp8_e5m2});
            o.combine_quant = random.pick({Format::none, Format::int8_block8});
            o.workers = 1 + random.below(2);
            o.partial = random.one_in(2);
            std::vector<int64_t> tokens;
            for (int64_t r = 0; r < ranks; ++r) tokens.push_back(random.below(o.tokens_max + 1));
            Problem p = make_problem(random, o, tokens, random.pick({Routing::uniform, Routing::skewed, Routing::sparse}));
            Loads loads(static_cast<size_t>(experts));
            for (const RankData& d : p.ranks)
                for (const int32_t id : d.ids)
                    if (id >= 0) ++loads[static_cast<size_t>(id)];
            const int64_t slots = experts + random.below(std::min<int64_t>(ranks * experts - experts, 8) + 1);
            const ReplicaChoice choice =
                random.pick({ReplicaChoice::round_robin, ReplicaChoice::nearest, ReplicaChoice::least_loaded});
            const std::vector<std::vector<std::byte>> combined = p.combined;
            p.table = plan_placement(loads, {.ranks = ranks, .slots = slots, .choice = choice});
            solve(p);
            ASSERT_EQ(p.combined, combined);  // replicas are the same expert
            SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(slots) + " slots: " + text_of(o));
            std::vector<Session> sessions = Session::open_local(o, *p.table);
            for (int i = 0; i < 3; ++i) expect_round_works(sessions, p);
            for (int r = 0; r < static_cast<int>(ranks); ++r) {
                const Session& session = sessions[static_cast<size_t>(r)];
                EXPECT_EQ(session.options().experts, experts);
                EXPECT_EQ(session.experts_local(), experts_of(r, ranks, slots).count());
                // Loads, from the ids and not from what the session counted.
                Loads sent(loads.size()), all = loads;
                for (const int32_t id : p.ranks[static_cast<size_t>(r)].ids)
                    if (id >= 0) sent[static_cast<size_t>(id)] += 3;
                for (uint64_t& l : all) l *= 3;
                const SessionLoads got = session.loads();
                EXPECT_EQ(got.dispatches, 3U);
                EXPECT_EQ(got.sent, sent);
                EXPECT_EQ(got.experts, all);
                Loads on_slots(static_cast<size_t>(slots)), on_ranks(static_cast<size_t>(ranks));
                for (int q = 0; q < static_cast<int>(ranks); ++q)
                    for (const int32_t s : slots_of(*p.table, q, p.ranks[static_cast<size_t>(q)].ids))
                        if (s >= 0)
                            on_slots[static_cast<size_t>(s)] += 3, on_ranks[static_cast<size_t>(p.table->rank_of(s))] += 3;
                EXPECT_EQ(got.slots, on_slots);
                EXPECT_EQ(got.ranks, on_ranks);
            }
            if (HasFailure()) return;
        }
}

TEST(SessionLoads, CountWithoutATableToo) {
    Random random(3);
    const Options o = options_of(5);
    const Problem p = make_problem(random, o, {20, 7, 0}, Routing::sparse);
    std::vector<Session> sessions = Session::open_local(o, 3);
    for (int i = 0; i < 2; ++i) expect_round_works(sessions, p);
    Loads experts(5), ranks(3);
    for (const RankData& d : p.ranks)
        for (const int32_t id : d.ids)
            if (id >= 0) experts[static_cast<size_t>(id)] += 2, ranks[id < 2 ? 0 : id < 4 ? 1 : 2] += 2;
    for (Session& session : sessions) {
        EXPECT_EQ(session.loads().experts, experts);
        EXPECT_EQ(session.loads().slots, experts);
        EXPECT_EQ(session.loads().ranks, ranks);
        session.reset_loads();
        EXPECT_EQ(session.loads().dispatches, 0U);
        EXPECT_EQ(session.loads().experts, Loads(5));
    }
    // A refused dispatch counts nothing.
    const std::vector<int32_t> bad = {0, 1, 99};
    on_ranks(3, [&](int r) {
        const std::vector<std::byte> x(66);
        EXPECT_EQ(outcome_of([&] {
                      sessions[static_cast<size_t>(r)].dispatch({.x = x.data(), .tokens = 1, .topk_ids = bad.data()});
                  }).code,
                  Code::bad_input);
    });
    EXPECT_EQ(sessions[0].loads().experts, Loads(5));
}

TEST(SessionWithReplicas, ErrorsSpeakOfExpertsNotOfSlots) {
    const Options o = options_of(3);
    std::vector<Session> sessions = Session::open_local(o, table_of(2, 3, {0, 1, 0, 2}));
    const std::vector<int32_t> ids = {0, 3, 1};  // a slot's number, no expert's
    on_ranks(2, [&](int r) {
        const std::vector<std::byte> x(66);
        EXPECT_TRUE(is_error(outcome_of([&] {
                                 sessions[static_cast<size_t>(r)].dispatch(
                                     {.x = x.data(), .tokens = 1, .topk_ids = ids.data()});
                             }),
                             Code::bad_input, {"topk_ids[0][1] is 3", "experts are 0..2"}));
    });
}

TEST(SessionWithReplicas, TablesMustBeEqualAndFit) {
    const Options o = options_of(3);
    const std::vector<Options> options(2, o);
    const PlacementTable one = table_of(2, 3, {0, 1, 0, 2}), other = table_of(2, 3, {0, 2, 0, 1});
    const auto opened = [&](const PlacementTable& a, const PlacementTable& b) {
        return outcome_of([&] { Session::open_local(options, std::vector<PlacementTable>{a, b}); });
    };
    char hashes[2][20];
    std::snprintf(hashes[0], sizeof hashes[0], "%016llx", static_cast<unsigned long long>(one.hash()));
    std::snprintf(hashes[1], sizeof hashes[1], "%016llx", static_cast<unsigned long long>(other.hash()));
    EXPECT_EQ(opened(one, one).code, Code::ok);
    EXPECT_TRUE(is_error(opened(one, other), Code::mismatch, {"placement table", "rank 0", "rank 1", hashes[0], hashes[1]}));
    EXPECT_TRUE(is_error(opened(one, table_of(2, 3, {0, 0, 1, 2})), Code::bad_input, {"rank 1", "a second time"}));
    EXPECT_TRUE(is_error(outcome_of([&] {
                             Session::open_local(o, table_of(2, 4, {0, 1, 2, 3}));
                         }),
                         Code::bad_input, {"2 ranks and 4 experts", "experts is 3"}));
    EXPECT_TRUE(is_error(outcome_of([&] { Session::open_local(options, std::vector<PlacementTable>{one}); }), Code::bad_input,
                         {"1 tables for 2 ranks"}));
}

TEST(SessionWithReplicas, ALivingReplicaTakesOverAfterShrink) {
    // Rank 2 leaves. Experts 0 and 1 have replicas elsewhere, expert 4 has none.
    const PlacementTable table = table_of(3, 5, {0, 2, 1, 3, 0, 4, 1});
    for (const auto& [landing, path] : every_way)
        for (const bool partial : {false, true}) {
            Options o = options_of(5, landing, path);
            o.partial = partial;
            SCOPED_TRACE(text_of(o));
            Random random(11);
            Problem p = make_problem(random, o, {20, 13, 0});
            for (RankData& d : p.ranks)
                for (int32_t& id : d.ids)
                    if (id == 4) id = 0;
            solve(p);
            std::vector<Session> sessions = Session::open_local(o, table);
            sessions[2].close();
            on_ranks(2, [&](int r) {
                Session& session = sessions[static_cast<size_t>(r)];
                EXPECT_EQ(session.shrink(), (std::vector<int>{0, 1}));
                for (int round = 0; round < 3; ++round) {
                    ExpertBatch batch = session.dispatch(dispatch_args(p, r));
                    Problem placed = p;
                    placed.table = table;
                    fill_y(batch, placed, r, batch.y());
                    Output out = output_of(p, r);
                    std::vector<int32_t> missing(static_cast<size_t>(p.ranks[static_cast<size_t>(r)].tokens), -1);
                    CombineArgs args = combine_args(p, r, out.data());
                    args.missing = missing.data();
                    session.combine(batch, args);
                    EXPECT_EQ(out.difference_from("x", p.combined[static_cast<size_t>(r)]), "");
                    EXPECT_EQ(missing, std::vector<int32_t>(missing.size()));
                }
                // Expert 4 is gone for good: refused, or unused and counted.
                const std::vector<int32_t> lost = {4, 0, 4};
                const std::vector<std::byte> x(66);
                const DispatchArgs args{.x = x.data(), .tokens = 1, .topk_ids = lost.data()};
                if (!partial) {
                    EXPECT_TRUE(is_error(outcome_of([&] { session.dispatch(args); }), Code::bad_input,
                                         {"topk_ids[0][0] is 4, an expert of rank 2"}));
                    return;
                }
                ExpertBatch batch = session.dispatch(args);
                std::vector<std::byte> out(66);
                int32_t missing = -1;
                session.combine(batch, {.out = out.data(), .missing = &missing});
                EXPECT_EQ(missing, 2);
            });
        }
}

// ---------------------------------------------------------------------------------------------------------------- weights

/// Byte i of an expert's weights.
std::byte weight_byte(int32_t expert, int64_t i) {
    return static_cast<std::byte>(mix(static_cast<uint64_t>(expert), static_cast<uint64_t>(i)) >> 11);
}

std::vector<std::byte> weights_of(const PlacementTable& t, int rank, int64_t expert_bytes) {
    std::vector<std::byte> all;
    for (int64_t s = 0; s < t.slots(); ++s)
        for (int64_t i = 0; t.rank_of(s) == rank && i < expert_bytes; ++i)
            all.push_back(weight_byte(t.expert_of[static_cast<size_t>(s)], i));
    return all;
}

TEST(MoveWeights, BringsEverySlotItsBytes) {
    Random random;
    for (int64_t round = 0; round < scaled(60); ++round) {
        const int64_t ranks = 1 + random.below(6), experts = 1 + random.below(10);
        const auto any_table = [&] {
            Loads loads;
            for (int64_t e = 0; e < experts; ++e) loads.push_back(static_cast<uint64_t>(random.below(100)));
            const int64_t slots = experts + random.below(std::min<int64_t>(ranks * experts - experts, 6) + 1);
            return plan_placement(loads, {.ranks = ranks, .slots = slots});
        };
        const PlacementTable from = random.one_in(3) ? PlacementTable::contiguous(ranks, experts) : any_table(),
                             to = any_table();
        const int64_t expert_bytes = 1 + random.below(5000), chunk_bytes = 1 + random.below(700), chunks = 1 + random.below(8);
        std::vector<Session> movers =
            Session::open_local(weight_session_options(to, expert_bytes, chunk_bytes, chunks), static_cast<int>(ranks));
        std::atomic<int64_t> sent{0}, received{0};
        on_ranks(ranks, [&](int r) {
            const std::vector<std::byte> old = weights_of(from, r, expert_bytes), right = weights_of(to, r, expert_bytes);
            std::vector<std::byte> got(right.size(), std::byte{0xEE});
            const WeightTransfer t =
                move_weights(movers[static_cast<size_t>(r)], from, to, expert_bytes, old.data(), got.data());
            EXPECT_EQ(difference("weights", got, right), "") << "rank " << r;
            EXPECT_EQ(t.received + t.kept, static_cast<int64_t>(right.size()));
            sent += t.sent, received += t.received;
        });
        EXPECT_EQ(sent, received);
        int64_t moved = 0;
        for (const WeightMove& m : weight_moves(from, to)) moved += m.source != m.target;
        EXPECT_EQ(sent, moved * expert_bytes);
        if (HasFailure()) return;
    }
}

TEST(Planner, LoadsUnderATableThatCannotBeAreRefused) {
    const std::vector<uint64_t> loads = {1, 2, 3};
    PlacementTable t = table_of(2, 3, {0, 1, 0, 2});
    for (const int32_t bad : {-1, 3, 99}) {
        t.expert_of[2] = bad;
        EXPECT_TRUE(is_error(outcome_of([&] { planned_rank_loads(t, loads); }), Code::bad_input, {"slot 2"}));
    }
    EXPECT_TRUE(is_error(outcome_of([&] { planned_rank_loads(PlacementTable{}, loads); }), Code::bad_input, {"0 ranks"}));
    EXPECT_TRUE(is_error(outcome_of([&] { planned_rank_loads(PlacementTable::contiguous(2, 3), std::vector<uint64_t>{1}); }),
                         Code::bad_input, {"1 numbers for 3 experts"}));
}

TEST(MoveWeights, WhatOneRankFindsWrongAllHearInTheSameCallAndTheSessionLivesOn) {
    const PlacementTable from = PlacementTable::contiguous(2, 3), to = table_of(2, 3, {0, 1, 0, 2});
    const PlacementTable other = table_of(2, 3, {0, 1, 1, 2}), longer = table_of(2, 3, {0, 1, 2, 0, 1});
    PlacementTable broken = to;
    broken.expert_of[3] = 7;
    std::vector<std::byte> old(64), fresh(64);
    std::vector<Session> movers = Session::open_local(weight_session_options(to, 8), 2);
    std::vector<Session> wrong = Session::open_local(options_of(4), 2);
    struct Case {
        std::vector<Session>& sessions;
        const PlacementTable& to_of_1;
        int64_t bytes_of_1;
        const void* old_of_1;
        Code code;
        const char* word;
    };
    const std::vector<Case> cases = {{wrong, to, 8, old.data(), Code::bad_input, "weight_session_options"},
                                     {movers, longer, 8, old.data(), Code::bad_input, "rank 1: the session is of"},
                                     {movers, broken, 8, old.data(), Code::bad_input, "rank 1: placement table"},
                                     {movers, to, 0, old.data(), Code::bad_input, "rank 1: expert_bytes is 0"},
                                     {movers, to, 8, nullptr, Code::bad_input, "rank 1: it has 1 slots before"},
                                     {movers, other, 8, old.data(), Code::mismatch, "tag"}};
    for (const Case& c : cases) {
        SCOPED_TRACE(c.word);
        on_ranks(2, [&](int r) {
            std::vector<std::byte> into(64);
            const auto call = [&] {
                move_weights(c.sessions[static_cast<size_t>(r)], from, r == 1 ? c.to_of_1 : to, r == 1 ? c.bytes_of_1 : 8,
                             r == 1 ? c.old_of_1 : old.data(), into.data());
            };
            EXPECT_TRUE(is_error(outcome_of(call), c.code, {c.word}));
            if (&c.sessions == &movers) {
                const auto again = [&] { move_weights(movers[static_cast<size_t>(r)], from, to, 8, old.data(), into.data()); };
                EXPECT_EQ(outcome_of(again).code, Code::ok);
            }
        });
    }
}

TEST(MoveWeights, ARefusalIsThatOfTheCallAndNotOfADispatchThatIsUnderWay) {
    const PlacementTable from = PlacementTable::contiguous(2, 3), to = table_of(2, 3, {0, 1, 0, 2});
    Options o = weight_session_options(to, 8);
    o.progress = ProgressBy::worker;  // it may not have come to the dispatch when move_weights is called
    std::vector<Session> movers = Session::open_local(o, 2);
    const std::vector<std::byte> old(64);
    on_ranks(2, [&](int r) {
        for (int round = 0; round < 50; ++round) {
            Session& session = movers[static_cast<size_t>(r)];
            PendingDispatch going = session.dispatch_async({.tag = 7});
            std::vector<std::byte> into(64);
            const auto call = [&] { move_weights(session, from, to, r == 0 ? 0 : 8, old.data(), into.data()); };
            ASSERT_TRUE(is_error(outcome_of(call), Code::bad_input, {"rank 0: expert_bytes is 0"}));
            const Outcome end = outcome_of([&] { going.get(); });  // and drops it, as the other rank does
            ASSERT_EQ(end.code, Code::ok) << end.text;
        }
    });
}

// ------------------------------------------------------------------------------------------------------------------ C ABI

TEST(CApi, OpensWithATableAndCountsLoads) {
    const uint64_t loads[3] = {6, 1, 1};
    int32_t expert_of[4], parts[4];
    ASSERT_EQ(sy_plan_placement(loads, 3, 2, 4, 0, 0, SY_CHOICE_ROUND_ROBIN, expert_of, parts), SY_OK) << sy_last_error();
    sy_placement placement{};
    placement.struct_size = sizeof placement;
    placement.ranks = 2, placement.experts = 3, placement.slots = 4, placement.expert_of = expert_of;
    uint64_t hash = 0;
    ASSERT_EQ(sy_placement_check(&placement), SY_OK) << sy_last_error();
    ASSERT_EQ(sy_placement_hash(&placement, &hash), SY_OK);
    EXPECT_EQ(hash, plan_placement(loads, {.ranks = 2, .slots = 4, .choice = ReplicaChoice::round_robin}).hash());

    sy_options options;
    ASSERT_EQ(sy_options_init(&options, sizeof options), SY_OK);
    options.hidden = 4, options.topk = 1, options.experts = 3, options.tokens_max = 4, options.dtype = SY_F32;
    sy_session* sessions[2];
    ASSERT_EQ(sy_open_local_placed(&options, &placement, sessions), SY_OK) << sy_last_error();
    const float x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    const int32_t ids[2] = {0, 0};
    on_ranks(2, [&](int r) {
        sy_batch batch;
        sy_dispatch_args out{};
        out.struct_size = sizeof out, out.x = x, out.tokens = 2, out.topk_ids = ids;
        ASSERT_EQ(sy_dispatch(sessions[r], &out, &batch), SY_OK) << sy_last_error();
        sy_batch_view view{};
        view.struct_size = sizeof view;
        ASSERT_EQ(sy_batch_get(&batch, &view), SY_OK);
        EXPECT_EQ(view.rows, 2);  // of four rows for expert 0, two on each rank
        const void* rows = nullptr;
        ASSERT_EQ(sy_batch_expand_x(&batch, &rows, nullptr), SY_OK);
        std::memcpy(view.y, rows, 32);
        float result[8] = {};
        sy_combine_args home{};
        home.struct_size = sizeof home, home.out = result;
        ASSERT_EQ(sy_combine(sessions[r], &batch, &home), SY_OK) << sy_last_error();
        EXPECT_EQ(std::memcmp(result, x, sizeof x), 0);
    });
    uint64_t got[4] = {};
    ASSERT_EQ(sy_session_loads(sessions[0], SY_LOADS_EXPERTS, got, 3), SY_OK);
    EXPECT_EQ(got[0], 4U);
    ASSERT_EQ(sy_session_loads(sessions[1], SY_LOADS_SENT, got, 3), SY_OK);
    EXPECT_EQ(got[0], 2U);
    ASSERT_EQ(sy_session_loads(sessions[1], SY_LOADS_RANKS, got, 2), SY_OK);
    EXPECT_EQ(got[0] * 10 + got[1], 22U);
    EXPECT_EQ(sy_session_loads(sessions[1], SY_LOADS_SLOTS, got, 3), SY_BAD_INPUT);
    EXPECT_NE(std::string(sy_last_error()).find("there are 4"), std::string::npos) << sy_last_error();
    EXPECT_EQ(sy_session_loads(sessions[1], 4, got, 3), SY_BAD_INPUT);
    ASSERT_EQ(sy_session_reset_loads(sessions[1]), SY_OK);
    ASSERT_EQ(sy_session_loads(sessions[1], SY_LOADS_SLOTS, got, 4), SY_OK);
    EXPECT_EQ(got[0] + got[1] + got[2] + got[3], 0U);
    for (sy_session*& session : sessions) EXPECT_EQ(sy_free(&session), SY_OK);

    expert_of[1] = expert_of[0];
    EXPECT_EQ(sy_placement_check(&placement), SY_BAD_INPUT);
    placement.choice = int64_t{1} << 32;  // no allowed number in its lower half
    EXPECT_EQ(sy_placement_check(&placement), SY_BAD_INPUT);
    placement.slots = -1;
    EXPECT_EQ(sy_open_local_placed(&options, &placement, sessions), SY_BAD_INPUT);
}

}  // namespace
}  // namespace switchyard::test
