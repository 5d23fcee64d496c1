// The grid of landings: tokens x skew x ranks, which is the fastest, and what landing auto loses by its choice.
#pragma once

#include "plan.hpp"
#include "results.hpp"

namespace switchyard::bench {

Plan strategies_plan(const Flags& flags);

/// One cell of the grid.
struct Choice {
    const Cell* cell;
    std::string best, chosen;  ///< landings: measured as the fastest, taken by auto
    double best_us = 0, chosen_us = 0;
    double expected_us = 0;  ///< what auto thought of its choice
    double loss() const { return best_us > 0 ? chosen_us / best_us - 1 : 0; }
    nlohmann::json to_json() const;
};
std::vector<Choice> choices(const Results& results);
void print_strategies(const Results& results, const std::vector<Choice>& choices);

}  // namespace switchyard::bench
