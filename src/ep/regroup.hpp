// The ranks that are left agree on who that is, and on the epoch at which they go on. Steps that never wait.
//
// Each has left all its epochs before it asks; a rank that is dead or closed is not waited for. Whoever has seen every other
// ask or end lays an offer into its own window and tries to make it the decision: one compare-and-swap in the window of rank 0,
// which outlives its owner. All adopt the offer that stands. No flag is reset and no memory made: epochs below the new base
// count as closed.
#pragma once

#include "ep/flags.hpp"

namespace switchyard::ep {

class RegroupStep {
 public:
    void allocate(const Rank& rank) { waiting_.reserve(static_cast<size_t>(rank.ranks())); }

    /// Asks for the next generation. The caller has no epoch open, and its workers are idle.
    void start(Rank& rank, uint64_t next_epoch);

    /// One look. done: rank.is_member and rank.base_epoch are those of the new generation. failed: status() tells why.
    Progress poll(Rank& rank);

    /// Ranks that have neither asked nor ended: with a passed deadline, who is to blame.
    const std::vector<int>& awaited() const { return waiting_; }
    const Status& status() const { return status_; }

 private:
    Progress adopt(Rank& rank, layout::Word decision);

    uint64_t generation_ = 0;
    uint64_t base_ = 0;
    std::vector<int> waiting_;
    Status status_;
};

/// Whether a peer asks for a newer generation than this rank's.
bool asks_to_regroup(const Rank& rank, int peer);

}  // namespace switchyard::ep
