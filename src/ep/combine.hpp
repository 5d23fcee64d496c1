// Combine of one epoch as steps that never wait: start offers this rank's y, poll sums when every rank has offered.
#pragma once

#include "ep/flags.hpp"

namespace switchyard::ep {

class CombineStep {
 public:
    void allocate(const Rank& rank) { await_.allocate(rank); }

    /// Checks the input, offers y (or pushes it home) and raises `returned`. On bad input the epoch is left.
    void start(Rank& rank, Flight& flight, const CombineArgs& args);
    Progress poll(Rank& rank, Flight& flight, bool thorough);
    void give_up(Rank& rank, Flight& flight, int64_t waited_ms);

    /// Ends the epoch without a text, when an exception has broken it off. Does not allocate.
    void abandon(Rank& rank, Flight& flight);

    /// A rank that is still awaited, or -1.
    int awaited() const { return await_.first_awaited(); }
    const Status& status() const { return status_; }
    /// This rank alone failed (its deadline, or a death only it may have seen) after it had offered y: the others may have
    /// finished. They must hear of it in the next dispatch.
    bool untold() const { return untold_; }

 private:
    CombineArgs args_;
    Await await_;
    bool offered_ = false;  // `returned` was raised
    bool ended_ = false;
    bool untold_ = false;
    Status status_;
};

/// Gives a batch up: raises `returned` with the word that there is no y. Never waits.
void drop(Rank& rank, Flight& flight);

}  // namespace switchyard::ep
