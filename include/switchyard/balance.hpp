// Load balance as arithmetic: how uneven loads are, and the helpers that routers use against it. Pure functions; none waits.
//
//   LoadStatistics even = load_statistics(session.loads().experts);
//   float loss = switch_auxiliary_loss(...);  update_bias(bias, loads, 0.001F);  apply_capacity(ids, ...);
//
// What to do about uneven loads with the placement of experts is in plan.hpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/status.hpp"

namespace switchyard {

/// How uneven a set of loads is.
struct LoadStatistics {
    uint64_t total = 0;
    double mean = 0;
    uint64_t max = 0;
    double imbalance = 1;  ///< max / mean: 1 is even, n is all in one place; the slowest of n workers sets the pace, so this
                           ///< is also what even loads would gain. 1 when there is no load
    double gini = 0;       ///< 0 is even, 1 - 1/n all in one place; 0 when there is no load
    std::vector<int32_t> hot;  ///< indices of loads >= hot_factor * mean, largest first, ties by index
};

/// Statistics of loads [n] (rows per expert, per rank, per slot: whatever carries load side by side).
///
///   imbalance = max / mean
///   gini = sum over i of (2i - n - 1) x_i / (n * sum of x), x ascending, i = 1..n     (Gini 1912, sorted form)
///
/// `hot_factor` > 0 says from which multiple of the mean on an index is called hot. Empty loads give the defaults. Allocates
/// the result. Throws bad_input for a hot_factor that is not above 0, or loads of 2^64 and more in all.
SY_API LoadStatistics load_statistics(std::span<const uint64_t> loads, double hot_factor = 2.0);

/// The auxiliary loss of the Switch Transformer (Fedus, Zoph, Shazeer 2021, arXiv 2101.03961, equations 4 to 6), for K experts
/// per token:
///
///   loss = alpha * E * sum over i of f_i * P_i
///   f_i  = (slots whose id is i) / (T * K)         P_i = (1/T) * sum over t of router_probs[t][i]
///
/// The paper's K is 1. Even routing with even probabilities gives alpha, all in one expert alpha * E. Slots with id -1 count in
/// T * K and in no f_i.
///
/// router_probs [T,E] f32, the router's softmax over all experts; topk_ids [T,K], -1..E-1; alpha the paper sets to 0.01. Sums
/// run in f64, in order. T = 0 gives 0. Allocates E numbers. Throws bad_input when a size is not a multiple of E or K, when the
/// two disagree about T, or when an id is out of range.
SY_API double switch_auxiliary_loss(std::span<const float> router_probs, std::span<const int32_t> topk_ids, int64_t experts,
                                    int64_t topk, double alpha);

/// One step of balancing without a loss (Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437,
/// section 2.1.2). The bias is added to an expert's score where the K best are chosen, not where they are weighed.
///
///   bias_i = bias_i + rate * sign(mean of loads - load_i)
///
/// bias [E] f32, changed in place; loads [E] rows of the last step; rate, DeepSeek-V3's is 0.001. A load that equals the mean
/// leaves its bias alone; the comparison is exact (load * E against the total). Allocates nothing. Throws bad_input when the
/// sizes differ.
SY_API void update_bias(std::span<float> bias, std::span<const uint64_t> loads, float rate);

/// What apply_capacity did.
struct CapacityResult {
    int64_t capacity = 0;          ///< rows that one source rank may send to one expert
    std::vector<int64_t> dropped;  ///< [E] slots that were made unused
    int64_t dropped_total = 0;
};

/// Drops what is above the capacity, before dispatch (GShard, arXiv 2006.16668, section 2.2; Switch Transformer, equation 3).
///
///   capacity = ceil(capacity_factor * T * K / E)       (a product within 1e-9 of a whole number is that number)
///
/// A capacity belongs to one source rank and one expert, so no rank needs to know another's ids. In (token, k) order the first
/// `capacity` slots of an expert stay as they are, where they are; later ones become -1, an unused slot that dispatch skips and
/// combine counts as nothing.
///
/// topk_ids [T,K], -1..E-1, changed in place; capacity_factor >= 0. Allocates the result. Throws bad_input, and changes
/// nothing, when an id is out of range, the size no multiple of K, or the factor negative or not finite.
SY_API CapacityResult apply_capacity(std::span<int32_t> topk_ids, int64_t topk, int64_t experts, double capacity_factor);

}  // namespace switchyard
