// Who: which rows go to which rank and to which place there. Pure functions of router output and counts.
//
//   topk_ids [T,K] --count_rows--> my count row [E] --(exchanged)--> counts [R,E] --place_experts--> first row of every expert
//                                                                                  --place_rows----> place of each of my rows
//
// The order of rows at the owner is (local expert, source rank, token, k), so a rank's rows for one expert are consecutive.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/options.hpp"

namespace switchyard::ep {

/// Which rank owns an expert, and as which of its local experts. The default: contiguous, the first E mod R own one more.
struct Placement {
    int64_t ranks = 0;
    int64_t experts = 0;
    std::vector<int32_t> owner;        ///< [E]
    std::vector<ExpertRange> of_rank;  ///< [R]

    static Placement contiguous(int64_t ranks, int64_t experts);
};

/// Where experts have replicas: the slots that one rank's rows for an expert go to, in turn. A slot is what the rest of this
/// file calls an expert: something with one owner. Empty: every expert is its own slot.
struct Turns {
    std::vector<int32_t> first;      ///< [E+1] into slots: the turn of expert e is slots[first[e]..first[e+1])
    std::vector<int32_t> slots;      ///< a slot may stand in a turn several times
    std::vector<int32_t> expert_of;  ///< [S]
    int64_t start = 0;               ///< the rank's j-th row for an expert takes place (start + j) mod length of its turn

    bool empty() const { return first.empty(); }
    int64_t experts() const { return static_cast<int64_t>(first.size()) - 1; }
};

/// Where the row of one slot (token, k) goes.
struct RowPlace {
    int32_t rank;  ///< owner of the expert; -1 for an unused slot
    int32_t row;   ///< in its expand_x
};

/// First index of an id outside -1..experts-1, or n when all are good.
int64_t find_bad_id(const int32_t* ids, int64_t n, int64_t experts);

/// The slot of each id, by turns; one whose owner has `left` [R] is passed over. -1 for an unused id, and for an expert all of
/// whose owners have left. With empty turns the id itself. `next` [E] is scratch. Ids are good. May be done in place.
void take_turns(const Turns& turns, const Placement& placement, std::span<const uint8_t> left, const int32_t* ids, int64_t n,
                std::span<int32_t> next, int32_t* slots);

/// An owner of the expert that has not `left` [R], or -1. With empty turns there is one owner to ask for.
int32_t living_owner(const Turns& turns, const Placement& placement, std::span<const uint8_t> left, int32_t expert);

/// counts [E] = how often each expert occurs in ids [n]; -1 is skipped. Ids are good.
void count_rows(const int32_t* ids, int64_t n, std::span<int32_t> counts);

/// Lays every expert's rows out at its owner.
///
///   expert_first[e] = start of e in its owner's expand_x; rows of all sources, start a multiple of `alignment`
///   rows_of[p]      = rows of rank p, pad rows included
///
/// counts [R,E] row-major, non-negative.
void place_experts(const Placement& placement, std::span<const int32_t> counts, int64_t alignment,
                   std::span<int64_t> expert_first, std::span<int64_t> rows_of);

/// places[i] = the owner of ids[i] and the next number of that expert: next[e]++, in order of i; {-1, 0} for an unused slot.
void number_rows(const Placement& placement, const int32_t* ids, int64_t n, std::span<int32_t> next, RowPlace* places);

/// Places of the rows of rank `me`: places[t*K+k], the rows of one expert behind those of lower ranks, in (token, k) order.
/// `next` [E] is scratch. Every row number fits 31 bits (place_experts' rows_of was checked).
void place_rows(const Placement& placement, std::span<const int32_t> counts, std::span<const int64_t> expert_first, int64_t me,
                const int32_t* ids, int64_t n, std::span<int32_t> next, RowPlace* places);

}  // namespace switchyard::ep
