// The bars: ratios that Switchyard must reach, each measured within one run. And the table of the first seed document.
#pragma once

#include "plan.hpp"
#include "results.hpp"

namespace switchyard::bench {

Plan bars_plan(const Flags& flags);

/// One bar with what was measured.
struct Bar {
    std::string text;  ///< what is compared
    std::string cell;
    double bound;
    bool at_most;          ///< measured <= bound, else >=
    double measured = 0;   ///< from medians of the time that all ranks share
    bool missing = false;  ///< a contestant is not in this build
    bool reached() const { return !missing && (at_most ? measured <= bound : measured >= bound); }
    // Beside it, not judged: from the best rounds (noise of other work on the machine left out), and from medians of the
    // slowest rank's time from its own start (waking up left out; on CPUs that ranks share also what others did before that).
    double of_best = 0, from_own_start = 0;
    nlohmann::json to_json() const;
};
std::vector<Bar> judge(const Results& results);
void print_bars(const std::vector<Bar>& bars);

Plan seed_table_plan(const Flags& flags);
void print_seed_table(const Results& results);
std::vector<nlohmann::json> seed_table_lines(const Results& results);

/// For both: the task of a number of ranks, tokens, formats. Throws Mistake.
tools::Case shape_of(const Flags& flags, int ranks, const std::vector<int64_t>& tokens, const std::string& quant);

}  // namespace switchyard::bench
