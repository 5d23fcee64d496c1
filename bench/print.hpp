// Results as text.
#pragma once

#include "results.hpp"

namespace switchyard::bench {

void print_machine(const nlohmann::json& machine);
/// In short form without the lines of first touch.
void print_results(const Results& results, bool short_form);

/// "4.0 us", "27.3 ms".
std::string time_text(double us);

}  // namespace switchyard::bench
