// Where experts live: a placement table with replicas, and the planner that makes one from loads.
//
//   PlacementTable table = plan_placement(session.loads().experts, {.ranks = 8, .slots = 320});
//   auto placed = Session::open(options, group, table);          // topk_ids stay those of the experts
//
// A rank's experts lie in slots. Slot s of S belongs to the rank that experts_of(rank, R, S) says, as expert s would without a
// table; the table says which expert lies in it. An expert may lie in several slots (its replicas), on as many ranks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/options.hpp"
#include "switchyard/status.hpp"

namespace switchyard {

/// Which replica a row goes to. Each is a function of table, source rank and the topk_ids before it alone: results do not
/// depend on time, and every rank could compute every other's choice.
enum class ReplicaChoice : int32_t {
    round_robin = 0,   ///< a rank's j-th row for an expert goes to replica (rank + j) mod n, in slot order: even shares
    nearest = 1,       ///< to the replica on the own rank when there is one; else round_robin
    least_loaded = 2,  ///< shares as `parts` say, which the planner chooses so that ranks are even
};

/// Which expert lies in which slot. Equal on all ranks; a session compares its hash when it opens.
struct SY_API PlacementTable {
    int64_t ranks = 0;               ///< R
    int64_t experts = 0;             ///< E
    std::vector<int32_t> expert_of;  ///< [S]
    std::vector<int32_t> parts;      ///< [S] 1..4096: shares of an expert's rows that its slots get with least_loaded;
                                     ///< empty = equal
    ReplicaChoice choice = ReplicaChoice::round_robin;

    int64_t slots() const { return static_cast<int64_t>(expert_of.size()); }
    /// Rank that owns a slot. Throws bad_input when it is none of 0..S-1, or the table is for no ranks.
    int64_t rank_of(int64_t slot) const;

    /// Whether every expert of 0..E-1 has a slot, no rank holds one twice, and parts are in range. bad_input names the slot.
    Status check() const;

    /// A number for everything above: FNV-1a, 64 bits, over little-endian 64-bit words.
    uint64_t hash() const;

    /// The table as one JSON object, with a final newline; and back. Reading checks the table. Throws bad_input naming what is
    /// wrong and where.
    std::string to_text() const;
    static PlacementTable from_text(std::string_view text);

    /// What a session does without a table: S = E, expert s in slot s. Throws bad_input outside 1..4095 ranks, 1..2^20 experts.
    static PlacementTable contiguous(int64_t ranks, int64_t experts);

    bool operator==(const PlacementTable&) const = default;
};

struct PlanArgs {
    int64_t ranks = 0;            ///< R
    int64_t slots = 0;            ///< S >= E; E + E/4 makes 25 % replicas. At most R * E
    int64_t ranks_per_group = 0;  ///< ranks on one host; 0 = no hosts: one group of all
    int64_t expert_groups = 0;    ///< consecutive experts that are routed together and stay on one host; 0 = each its own
    ReplicaChoice choice = ReplicaChoice::least_loaded;
};

/// A table for experts with these loads [E]. The same on every rank that asks with the same loads.
///
/// Each spare slot becomes one more replica of the expert with the largest load per replica; replicas are then packed, heaviest
/// first, each on the least loaded rank that has room and does not hold the expert (both steps as in DeepSeek's EPLB,
/// github.com/deepseek-ai/EPLB). Then, until nothing helps: two slots of the most loaded rank and another change experts, or a
/// replica of a light expert becomes one of an expert of that rank. With choice least_loaded the shares of replicas are chosen
/// last, so that ranks come out as even as the placement allows; equal shares stay where unequal ones are no better. Ties go to
/// the lower number.
///
/// Where R divides by ranks_per_group, S by R, E by expert_groups, and expert_groups by the number of hosts, and S is at most
/// ranks_per_group * E, the plan is hierarchical: expert groups are packed onto hosts, as many on each, and each host is
/// planned alone, so that all replicas of an expert lie on one host. Otherwise ranks_per_group and expert_groups are ignored;
/// `is_hierarchical` says which it will be.
///
/// Loads are planned as if the next batch had them; a load of 0 still gets its slot. Allocates. Throws bad_input when S or R
/// cannot be.
SY_API PlacementTable plan_placement(std::span<const uint64_t> loads, const PlanArgs& args);
SY_API bool is_hierarchical(int64_t experts, const PlanArgs& args);

/// Loads [R] that ranks would have under a table, from loads [E] of experts, when every expert's rows are shared by its slots
/// equally (round_robin) or as `parts` say (least_loaded). For nearest, which depends on who sends, as round_robin. Allocates
/// the result. Throws bad_input: a table that does not pass check(), loads that are not one per expert.
SY_API std::vector<double> planned_rank_loads(const PlacementTable& table, std::span<const uint64_t> loads);

/// The slots that a rank's topk_ids [T*K] go to: what dispatch does inside, for checks and simulations. Ids must be in -1..E-1
/// (bad_input). Allocates the result.
SY_API std::vector<int32_t> slots_of(const PlacementTable& table, int rank, std::span<const int32_t> topk_ids);

/// One expert's weights on their way to a slot.
struct WeightMove {
    int32_t slot;  ///< of the new table
    int32_t expert;
    int32_t source, target;  ///< ranks; equal when the rank has the expert already
};

/// What must move from one table to another, a line for every slot of the new one, in slot order. A rank that lacks an expert
/// gets it from the holder that sends least so far, ties to the lower rank. Throws bad_input when the tables are not of the
/// same ranks and experts.
SY_API std::vector<WeightMove> weight_moves(const PlacementTable& from, const PlacementTable& to);

}  // namespace switchyard
