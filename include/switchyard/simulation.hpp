// A whole group of ranks on one thread, in virtual time, with whatever trouble a seed chooses; checked against the reference.
//
// The engine's own steps run, over a transport that uses every freedom its contract leaves (src/transport/sim.hpp): what is
// put travels late, in pieces, twice and out of order, ranks get their turns in any order and lose them in the middle of a
// call, fall asleep, stop for longer than a deadline, and die. The same seed plays the same, on every machine and with every
// instruction set, so that what a seed has found can be looked at again.
//
//   simulation::Report r = simulation::play({.seed = 7});
//   if (!r.failure.empty()) ...
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard::simulation {

/// A promise of the transport that is broken on purpose, now and then, to show that its absence is noticed.
enum class Broken : int32_t {
    nothing = 0,
    flag_before_puts = 1,  ///< a flag does not wait for the puts before it
    flags_overtake = 2,    ///< two flags of one rank for the same peer change places
    puts_overtake = 3,     ///< two puts of one rank to the same place change places
    old_flag = 4,          ///< a flag that was overwritten is stored once more
    lost_wake_up = 5,      ///< a ring that should wake a sleeper does not
    misplaced_put = 6,     ///< a put lands in another slot
};
inline constexpr int broken_count = 7;

/// "nothing", "flag_before_puts", ...
SY_API const char* broken_name(Broken broken);

struct Play {
    uint64_t seed = 0;
    bool trace = false;           ///< keep a line for every event
    Simd simd = Simd::automatic;  ///< of the number kernels; never changes what is played
    Broken broken = Broken::nothing;
};

struct Report {
    std::string scenario;  ///< shape, timing and faults that the seed plays, a few lines
    std::string failure;   ///< the first thing that must not happen; empty: everything was right
    std::vector<std::string> events;
    uint64_t hash = 0;  ///< over every event, byte moved and result
    int64_t turns = 0;  ///< of all ranks together
    int64_t virtual_ns = 0;
    int64_t faults = 0;                    ///< that the seed plays
    std::array<int64_t, 12> endings = {};  ///< calls that ended with each Code
};

/// Plays one seed: up to 8 ranks, up to 5 rounds of dispatch and combine. Checks that
///   - every result of every call that succeeds is the reference's, byte for byte, and stays so as long as it may be used; with
///     option partial that of a routing without the ranks which have died, and every slot of theirs is counted;
///   - a call fails only for a reason that is true, and names it: the rank that died, closed, gave up or has refused;
///   - what has failed on one rank after the others may have finished is told in its next dispatch;
///   - where all ranks make the same call in time, all get the same verdict, and a refused round does not hurt the next one;
///   - no combine succeeds of an epoch that failed on any rank before its rows were offered;
///   - every call ends by its deadline, and within 200 ms of virtual time unless a rank is stopped meanwhile: the end of a rank
///     is noticed at once, nobody waits for one that has left, nobody sleeps through what would wake him;
///   - nothing is written outside the parts of a window that are meant for it.
/// Allocates; waits for nothing but the processor. Throws bad_input when this build has no such kernels.
SY_API Report play(const Play& play);

}  // namespace switchyard::simulation
