// One rank's part: checks every contestant against the reference, then plays rounds and tells the parent its times.
#pragma once

#include "plan.hpp"

namespace switchyard::bench {

/// Returns the exit code of the rank's process.
int rank_main(const Flags& flags, const Tree& tree);

}  // namespace switchyard::bench
