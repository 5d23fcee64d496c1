// The flags of an epoch: raising them, and waiting for those of all ranks, one look at a time.
//
// docs/memory_order.md lists what each flag promises, which store pairs with which load, and the proof.
#pragma once

#include <algorithm>
#include <string>

#include "ep/exchange.hpp"

namespace switchyard::ep {

/// Result of one look.
enum class Progress { pending, done, failed };

/// Raises a flag of mine in every rank's window, my own included, and wakes sleepers. Everything this rank stored before is
/// visible to whoever sees it (its workers were joined, and fenced their streaming stores). Ranks in `skip` [R] are left out.
void raise_all(Rank& rank, layout::Flag flag, uint64_t slot, layout::Word word, const uint8_t* skip = nullptr);

/// The flag of `writer` in my window. Acquire: what the writer stored before raising it is visible.
layout::Word see(const Rank& rank, layout::Flag flag, uint64_t slot, int writer);

/// Writes why this rank refuses or leaves an epoch into every window; a flag raised afterwards publishes it.
void send_reason(Rank& rank, const Flight& flight, const Status& why);

/// Leaves an epoch with an error: raises `gone` with its code and whose fault it is (no_culprit: nobody's or unknown). Does
/// not allocate.
inline constexpr int no_culprit = ranks_max;
void leave(Rank& rank, Flight& flight, Code code, int culprit);

/// Says that this rank's session is closed; whether another's is.
void raise_closed(Rank& rank);
bool has_closed(const Rank& rank, int peer);

/// One wait for a flag of all ranks.
class Await {
 public:
    void allocate(const Rank& rank) { waiting_.reserve(static_cast<size_t>(rank.ranks())); }

    /// From every member, `flag` of `epoch`; ranks in `skip` [R] are not awaited. With `lost` [R] a rank that has ended without
    /// it is no error: it is marked there and not awaited any longer.
    void begin(const Rank& rank, const Flight& flight, layout::Flag flag, const uint8_t* skip = nullptr,
               uint8_t* lost = nullptr);

    /// From every rank, that it has closed the epoch that used this slot before (`returned` of it, or `gone`).
    void begin_gate(const Rank& rank, const Flight& flight);

    /// A look at the ranks still awaited. A thorough one, every 64th, and the one that finds all flags there also look
    /// whether any rank has left the epoch; the former also whether an awaited one has closed or died. failed fills failure()
    /// and culprit().
    Progress poll(Rank& rank, bool thorough);

    /// Lowest rank whose flag carried a code other than 0, or -1; with that code.
    int refuser() const { return refuser_; }
    uint32_t refusal() const { return refusal_; }

    const Status& failure() const { return failure_; }
    int culprit() const { return culprit_; }

    /// A rank whose flag is there has left the epoch, and a later one since, so that nobody can tell whether it was by a
    /// verdict that is common: the error to end with when this rank reaches none, or ok.
    const Status& later() const { return later_; }
    int later_culprit() const { return later_culprit_; }

    /// "the counts of rank 3 and 2 others": who is still awaited, for texts.
    std::string awaited() const;
    int first_awaited() const { return waiting_.empty() ? -1 : waiting_.front(); }
    bool is_awaited(int peer) const { return std::find(waiting_.begin(), waiting_.end(), peer) != waiting_.end(); }

 private:
    bool is_there(const Rank& rank, int peer) const;
    bool take_flags(const Rank& rank);     // takes the ranks off whose flag is there; true when none is left
    bool somebody_left(const Rank& rank);  // these two fill failure_ and culprit_
    bool somebody_ended(const Rank& rank);
    Progress failed_unless_refused(const Rank& rank);
    bool fail(Code code, int culprit, std::string text);
    Status left_by(const Rank& rank, int peer, layout::Word gone) const;

    layout::Flag flag_{};
    bool gate_ = false;
    uint64_t epoch_ = 0;  // awaited
    uint64_t own_ = 0;    // of the flight
    uint64_t slot_ = 0;
    std::vector<int> waiting_;
    uint8_t* lost_ = nullptr;  // [R], or null: an end is an error
    int looks_ = 0;
    int refuser_ = -1;
    uint32_t refusal_ = 0;
    int culprit_ = no_culprit;
    Status failure_;
    int later_culprit_ = no_culprit;
    Status later_;
};

/// The reason a rank has published for an epoch with a flag of that epoch, or "" when there is none. Bounded and
/// printable: it comes from another process.
std::string reason_text(const Rank& rank, uint64_t slot, int writer, uint64_t epoch);

}  // namespace switchyard::ep
