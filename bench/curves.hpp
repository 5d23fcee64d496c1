// Scaling curves: what a row costs along one axis at a time, and where that cost takes a step.
#pragma once

#include "plan.hpp"
#include "results.hpp"

namespace switchyard::bench {

Plan curves_plan(const Flags& flags);

/// What a row of a curve's cell costs: ns per row (axis hidden: per row and KiB); where ranks share CPUs, of a rank's share of
/// one.
double cost_ns(const Result& result);

/// One move along a curve: from the value before to `at`.
struct Step {
    const Cell* cell;
    std::string label, call;
    double cost = 0;         ///< ns per row (axis hidden: per row and KiB), on CPUs that ranks share per rank's share of one
    double ratio = 0;        ///< of cost to the one before; 0 at the first value
    double limit_ratio = 0;  ///< the same of the limit of this machine
    /// A cliff: the cost rises above 1.3 times where the machine's own limit does not rise as much (within the same 1.3).
    bool is_cliff() const { return ratio > bound && ratio > bound * limit_ratio; }
    static constexpr double bound = 1.3;
    nlohmann::json to_json() const;
};
std::vector<Step> steps(const Results& results);
void print_curves(const Results& results, const std::vector<Step>& steps);

}  // namespace switchyard::bench
