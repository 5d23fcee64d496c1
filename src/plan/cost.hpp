// What a dispatch does, counted: the amounts that a calibration has prices for.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "switchyard/options.hpp"
#include "switchyard/strategy.hpp"

namespace switchyard::plan {

/// A way to dispatch that is worth considering.
struct Way {
    Landing landing;
    int64_t group_ranks;
};
std::vector<Way> ways(int64_t ranks, int64_t group_ranks, bool loadable);

/// The prices of a calibration in order, and how much of each a dispatch and one read of every row takes on the slowest rank,
/// with even routing. Their product is nanoseconds.
inline constexpr size_t prices = 9;
using Amounts = std::array<double, prices>;
Amounts prices_of(const Calibration& calibration);
void set_prices(Calibration& calibration, const Amounts& prices);
Amounts amounts_of(const Options& options, int64_t ranks, int64_t tokens, Way way, const Calibration& calibration);

}  // namespace switchyard::plan
