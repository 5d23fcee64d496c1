// Dispatch of one epoch as steps that never wait: start, then poll until done or failed.
//
//   gate     every rank has closed the epoch that used this slot before
//   counts   packed, alltoallv: my count row is out; the rows follow when all count rows are there
//   rows     my rows are out (other landings: with my counts, at once); the batch is ready when all rows are there
//
// Any failure leaves the epoch: `gone` is raised, so that no other rank waits for this one.
#pragma once

#include "ep/flags.hpp"

namespace switchyard::ep {

class DispatchStep {
 public:
    enum class Phase { gate, counts, rows, ended };

    void allocate(const Rank& rank);

    /// Begins the flight's epoch. `prior` is an error of an earlier epoch that the other ranks have not heard of: it is
    /// sent as this rank's refusal.
    void start(Rank& rank, Flight& flight, const DispatchArgs& args, const Status& prior);

    /// One look, and the work that has become possible. After failed, status() tells why, on every rank.
    Progress poll(Rank& rank, Flight& flight, bool thorough);

    /// The caller's deadline has passed: leaves the epoch. `waited_ms` goes into the text.
    void give_up(Rank& rank, Flight& flight, int64_t waited_ms);

    /// The caller wants it no longer: leaves the epoch.
    void withdraw(Rank& rank, Flight& flight);

    /// Leaves the epoch without a text, when an exception has broken it off or the session closes. Does not allocate.
    void abandon(Rank& rank, Flight& flight, Code code = Code::system);

    /// Whether all rows of a local expert are here. With landing packed that may be so before the dispatch is done, once the
    /// counts are known: a source's rows are whole when its `arrived` is seen.
    bool has_rows_of(const Rank& rank, const Flight& flight, int64_t expert) const;

    /// Whether the counts of all ranks are known, and with them Flight::local_counts: before rows of others are here where a
    /// landing waits for counts, else when the dispatch is done.
    bool has_counts(const Rank& rank) const;

    Phase phase() const { return phase_; }
    /// A rank that is still awaited, or -1.
    int awaited() const { return await_.first_awaited(); }
    const Status& status() const { return status_; }

 private:
    void after_gate(Rank& rank, Flight& flight);
    Progress judge_counts(Rank& rank, Flight& flight);
    Progress judge_later(Rank& rank, Flight& flight);
    Progress after_counts(Rank& rank, Flight& flight);
    Progress after_rows(Rank& rank, Flight& flight);
    Progress end(Rank& rank, Flight& flight, Status why, int culprit);
    Progress refused(Rank& rank, Flight& flight);
    void end_with_reason(Rank& rank, Flight& flight, const Status& why);

    DispatchArgs args_;
    Status verdict_;  // of this rank's own input
    Phase phase_ = Phase::ended;
    Await await_;
    std::vector<uint8_t> nothing_to_, nothing_from_;  // [R] pairs without a row: no `arrived` between them (packed)
    Status status_;
};

/// What is wrong with this rank's input, naming token, slot, value found and allowed.
Status check_dispatch(const Rank& rank, Flight& flight, const DispatchArgs& args);

}  // namespace switchyard::ep
