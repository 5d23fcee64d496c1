#include "ep/flags.hpp"

#include "core/text.hpp"
#include "ep/regroup.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace switchyard::ep {

static_assert(static_cast<uint32_t>(Code::corrupt) < 16, "a code has 4 bits in a flag word");

namespace {

using layout::Flag;
using layout::Word;

uint64_t load_acquire(const std::byte* at) {
    // Pairs with the release store in Transport::raise(). model: load_acquire
    auto* word = reinterpret_cast<uint64_t*>(const_cast<std::byte*>(at));
    return std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
}

const char* flag_name(Flag flag) {
    switch (flag) {
        case Flag::counted: return "the counts";
        case Flag::arrived: return "the rows";
        case Flag::returned: return "the experts' output";
        case Flag::gone: break;
    }
    return "the end";
}

// A verdict that every rank reaches by itself from the counts, in the same words.
bool is_common_verdict(uint32_t code) {
    const auto c = static_cast<Code>(code);
    return c == Code::bad_input || c == Code::mismatch || c == Code::capacity;
}

// Every error of an epoch travels with its code. A death or an end is one for everybody; what speaks of the sender's own
// view becomes "peer left".
Code seen_from_outside(uint32_t code) {
    const auto c = static_cast<Code>(code);
    return is_common_verdict(code) || c == Code::peer_lost || c == Code::peer_closed ? c : Code::peer_left;
}

}  // namespace

void raise_all(Rank& rank, Flag flag, uint64_t slot, Word word, const uint8_t* skip) {
    const uint64_t offset = rank.window.flag_line(slot, rank.me()) + layout::flag_offset(flag);
    for (int i = 0; i < rank.ranks(); ++i) {
        const int p = (rank.me() + i) % rank.ranks();  // each rank starts elsewhere: no rank is everybody's last
        if (!skip || !skip[p]) rank.link.raise(p, offset, word.bits);  // model: raise_all, raise_all_await
    }
    rank.link.ring();  // model: ring_after_raises
}

Word see(const Rank& rank, Flag flag, uint64_t slot, int writer) {
    // model: see
    return {load_acquire(rank.own(rank.window.flag_line(slot, writer) + layout::flag_offset(flag)))};
}

void send_reason(Rank& rank, const Flight& flight, const Status& why) {
    layout::Reason reason{};  // model: send_reason
    reason.epoch = flight.epoch;
    reason.text_bytes = std::min(why.text().size(), sizeof reason.text);
    std::memcpy(reason.text, why.text().data(), reason.text_bytes);
    for (int p = 0; p < rank.ranks(); ++p) {
        const Place place{p, rank.window.reason(flight.epoch, rank.me())};
        rank.link.put({&place, 1}, &reason, sizeof reason);
    }
}

void leave(Rank& rank, Flight& flight, Code code, int culprit) {
    flight.open = false;
    // model: raise_gone
    raise_all(rank, Flag::gone, flight.slot, Word::of(flight.epoch, static_cast<uint32_t>(code), culprit));
}

bool has_closed(const Rank& rank, int peer) {
    // Pairs with the release in raise_closed(): every flag of that session was raised before. model: closed_load
    return load_acquire(rank.own(rank.window.member(peer))) != 0;
}

void raise_closed(Rank& rank) {
    // model: raise_closed
    for (int p = 0; p < rank.ranks(); ++p) rank.link.raise(p, rank.window.member(rank.me()), 1);
    rank.link.ring();  // model: ring_after_closed
}

std::string reason_text(const Rank& rank, uint64_t slot, int writer, uint64_t epoch) {
    if (writer < 0 || writer >= rank.ranks()) return {};
    const auto published = [&](Flag flag) {
        const Word word = see(rank, flag, slot, writer);  // model: read_reason
        return word.epoch() == epoch && word.code() != 0;
    };
    if (!published(Flag::gone) && !published(Flag::counted) && !published(Flag::arrived)) return {};
    layout::Reason reason;
    std::memcpy(&reason, rank.own(rank.window.reason(epoch, writer)), sizeof reason);
    if (reason.epoch != epoch) return {};
    return printable(std::string(reason.text, std::min<uint64_t>(reason.text_bytes, sizeof reason.text)));
}

void Await::begin(const Rank& rank, const Flight& flight, Flag flag, const uint8_t* skip, uint8_t* lost) {
    lost_ = lost;
    flag_ = flag;  // model: begin
    gate_ = false;
    epoch_ = own_ = flight.epoch;
    slot_ = flight.slot;
    refuser_ = -1;
    culprit_ = no_culprit;
    refusal_ = 0;
    looks_ = 0;
    failure_ = {};
    waiting_.clear();
    for (int i = 0; i < rank.ranks(); ++i) {
        const int p = (rank.me() + i) % rank.ranks();
        if (rank.is_member(p) && (!skip || !skip[p])) waiting_.push_back(p);
    }
}

void Await::begin_gate(const Rank& rank, const Flight& flight) {
    begin(rank, flight, Flag::returned);
    gate_ = true;  // model: gate
    const auto depth = static_cast<uint64_t>(rank.window.shape.depth);
    if (flight.epoch < rank.base_epoch + depth) waiting_.clear();  // nobody has used the slot in this generation
    epoch_ = flight.epoch - depth;
}

bool Await::is_there(const Rank& rank, int peer) const {
    if (see(rank, flag_, slot_, peer).epoch() == epoch_) return true;  // model: await_flag
    // model: gate_flag
    return gate_ && see(rank, Flag::gone, slot_, peer).epoch() >= epoch_;
}

bool Await::take_flags(const Rank& rank) {
    std::erase_if(waiting_, [&](int peer) {
        if (!is_there(rank, peer)) return false;
        const Word word = see(rank, flag_, slot_, peer);  // model: take_flags
        if (!gate_ && word.code() != 0 && (refuser_ < 0 || peer < refuser_)) refuser_ = peer, refusal_ = word.code();
        return true;
    });
    return waiting_.empty();
}

bool Await::fail(Code code, int culprit, std::string text) {
    culprit_ = culprit;
    failure_ = Status(code, std::move(text));
    return true;
}

// Left: `gone` of this epoch (or a later one in this slot) and then no `returned` of it, read in this order; in the other
// order an error of a later epoch would pass for an error of this one.
bool Await::somebody_left(const Rank& rank) {
    for (int peer = 0; peer < rank.ranks(); ++peer) {
        if (!rank.is_member(peer)) continue;
        const Word gone = see(rank, Flag::gone, slot_, peer);  // model: left_gone
        // model: left_returned
        if (gone.epoch() < own_ || see(rank, Flag::returned, slot_, peer).epoch() == own_) continue;
        // Once a refusal is known, only those count that will never raise the awaited flag: the reason to tell is the refusal.
        if (refuser_ >= 0 && is_there(rank, peer)) continue;
        // In dispatch this rank will reach the same verdict, in better words, as soon as it sees the counts.
        if (flag_ != Flag::returned && is_common_verdict(gone.code())) continue;
        // It has left a later epoch of this slot, at its gate, which overwrote why it left this one. It has done its part of
        // this wait, so a common verdict will be reached here, too; if it was none, the next wait tells.
        if (flag_ != Flag::returned && gone.epoch() > own_ && is_there(rank, peer)) continue;
        const int culprit = gone.rank();
        const Code code = seen_from_outside(gone.code());
        if (code == Code::peer_lost || code == Code::peer_closed)
            return fail(code, culprit,
                        fmt::format("rank {} {}{}. Call shrink() on the ranks that are left.", culprit,
                                    code == Code::peer_lost ? "has died (its process ended)" : "closed its session",
                                    culprit == peer ? fmt::format(" in epoch {}", gone.epoch())
                                                    : fmt::format(", as rank {} has seen in epoch {}", peer, gone.epoch())));
        // model: left_reason
        std::string reason = gone.epoch() == own_ ? reason_text(rank, slot_, culprit, own_) : "";
        if (reason.empty() && culprit != no_culprit && culprit != peer) reason = fmt::format("because of rank {}.", culprit);
        return fail(code, culprit,
                    fmt::format("rank {} gave up epoch {} ({}){}{}", peer, own_, code_name(static_cast<Code>(gone.code())),
                                reason.empty() ? "." : ": ", reason));
    }
    return false;
}

// The end of a rank: closed, or dead. In dispatch the end of any rank ends it, awaited or not, unless a refusal or a common
// verdict is on its way, after which everybody may do as he likes, or it has finished this epoch: then it owes nothing. At the
// gate and in combine only the awaited ranks matter: a fast one may have finished and closed.
bool Await::somebody_ended(const Rank& rank) {
    const bool any_end_counts = !gate_ && flag_ != Flag::returned && refuser_ < 0 && !lost_;
    for (int peer = 0; peer < rank.ranks(); ++peer) {
        if (!rank.is_member(peer)) continue;
        const bool awaited_still = std::find(waiting_.begin(), waiting_.end(), peer) != waiting_.end();
        if (!awaited_still && !any_end_counts) continue;
        // In the order opposite to that in which a rank raises them: flags, `gone`, `closed`, its process's end. So what it
        // said before it ended is seen with its end.
        const bool is_lost = rank.link.lost(peer);             // model: ended_lost
        const bool is_closed = has_closed(rank, peer);         // model: ended_closed
        const Word gone = see(rank, Flag::gone, slot_, peer);  // model: ended_gone
        // Or perhaps: of why it left this epoch a later word tells nothing (see somebody_left).
        const bool verdict_on_its_way = gone.epoch() > own_ || (gone.epoch() == own_ && is_common_verdict(gone.code()));
        const bool is_finished = see(rank, Flag::returned, slot_, peer).epoch() == own_;  // model: ended_returned
        const bool owes = awaited_still && !is_there(rank, peer);
        if (!owes && (!any_end_counts || verdict_on_its_way || is_finished)) continue;
        if (see(rank, flag_, slot_, peer).epoch() > own_)  // model: ended_flag
            return fail(Code::corrupt, peer,
                        fmt::format("epoch {}: rank {} shows epoch {}. That process does not follow the protocol.", own_, peer,
                                    see(rank, flag_, slot_, peer).epoch()));
        if (is_lost && lost_) {
            lost_[peer] = 1;
            std::erase(waiting_, peer);
            continue;
        }
        if (asks_to_regroup(rank, peer) && !is_lost && !is_closed)
            return fail(Code::peer_left, peer,
                        fmt::format("rank {} asks to regroup while epoch {} waited for {}. Call shrink() here too.", peer, own_,
                                    awaited()));
        if (is_lost || is_closed)
            return fail(is_closed ? Code::peer_closed : Code::peer_lost, peer,
                        fmt::format("rank {} {} while epoch {} waited for {}. Call shrink() on the ranks that are left.", peer,
                                    is_closed ? "closed its session" : "has died (its process ended)", own_, awaited()));
    }
    return false;
}

Progress Await::poll(Rank& rank, bool thorough) {
    rank.link.poll();  // model: poll
    const bool all_there = take_flags(rank);
    if (!all_there && !thorough && ++looks_ % 64 != 0) return Progress::pending;
    if (!gate_ && somebody_left(rank)) return failed_unless_refused(rank);
    if (all_there) return Progress::done;
    if (!somebody_ended(rank)) return waiting_.empty() ? Progress::done : Progress::pending;
    // Why that rank left, or that it refused, tells more than its end; it may have come since the looks above.
    if (!gate_ && somebody_left(rank)) return failed_unless_refused(rank);
    const int refuser_before = refuser_;
    take_flags(rank);
    return refuser_ == refuser_before ? Progress::failed : Progress::pending;
}

// A rank has left. It may have raised the awaited flag just before; a refusal is then the reason to tell.
Progress Await::failed_unless_refused(const Rank& rank) {
    if (!take_flags(rank) || refuser_ < 0) return Progress::failed;  // model: failed_unless_refused
    failure_ = {};
    return Progress::done;
}

std::string Await::awaited() const {
    std::string who;
    for (size_t i = 0; i < waiting_.size() && i < 8; ++i) who += fmt::format("{}{}", i ? ", " : "", waiting_[i]);
    if (waiting_.size() > 8) who += fmt::format(" and {} more", waiting_.size() - 8);
    return fmt::format("{} of rank{} {}", gate_ ? "the end of the slot's last epoch" : flag_name(flag_),
                       waiting_.size() == 1 ? "" : "s", who);
}

}  // namespace switchyard::ep
