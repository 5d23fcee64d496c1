// Placement tables as the engine uses them.
#pragma once

#include "ep/routing.hpp"
#include "switchyard/plan.hpp"

namespace switchyard::plan {

/// The turns that a rank takes under a table that was checked. A pure function; allocates the result.
ep::Turns turns_of(const PlacementTable& table, int64_t rank);

}  // namespace switchyard::plan
