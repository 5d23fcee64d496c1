// Playing seeds of the simulation from the command line.
#pragma once

#include <cstdint>
#include <string>

#include "switchyard/types.hpp"

namespace switchyard::tools {

struct SimulateFlags {
    uint64_t seed = 0;
    uint64_t seeds = 1;  ///< how many, from `seed` on
    bool trace = false;
    bool json = false;
    Simd simd = Simd::automatic;
    std::string broken = "nothing";  ///< a promise of the transport to break
};

/// Plays the seeds and prints what they play and how it ended. Returns the exit code: 1 when a seed went wrong.
int simulate(const SimulateFlags& flags);

}  // namespace switchyard::tools
