#include "ep/regroup.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace switchyard::ep {

using layout::Offer;
using layout::Turn;
using layout::Word;

namespace {

std::atomic_ref<uint64_t> word_at(std::byte* at) {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(at));
}

Turn turn_of(const Rank& rank, int peer) {
    // Pairs with the release store in Transport::raise(): that rank's last loads and stores of the old generation were before.
    std::byte* at = rank.own(rank.window.member(peer) + offsetof(layout::MemberLine, regroup));
    return {word_at(at).load(std::memory_order_acquire)};  // model: regroup_turn
}

void ask(Rank& rank, Turn turn) {
    const uint64_t word = rank.window.member(rank.me()) + offsetof(layout::MemberLine, regroup);
    for (int p = 0; p < rank.ranks(); ++p) rank.link.raise(p, word, turn.bits);  // model: ask
    rank.link.ring();                                                            // model: ask
}

}  // namespace

bool asks_to_regroup(const Rank& rank, int peer) {
    return turn_of(rank, peer).generation() > rank.generation;  // model: regroup_asked
}

void RegroupStep::start(Rank& rank, uint64_t next_epoch) {
    status_ = {};
    generation_ = rank.generation + 1;
    base_ = next_epoch;
    waiting_.clear();
    ask(rank, Turn::of(generation_, next_epoch));  // model: ask_first
}

Progress RegroupStep::poll(Rank& rank) {
    rank.link.poll();  // model: regroup_looks
    std::atomic_ref<uint64_t> decision = word_at(rank.base[0] + rank.window.decision);
    // Pairs with the exchange below, of whoever decided: its offer is there.
    Word stands{decision.load(std::memory_order_acquire)};  // model: regroup_stands
    if (stands.epoch() >= generation_) return adopt(rank, stands);

    Offer offer{};
    offer.generation = generation_;
    offer.base = base_;
    waiting_.clear();
    for (int p = 0; p < rank.ranks(); ++p) {
        if (!rank.is_member(p)) continue;
        // Its end first: who asked and then died is not taken along.
        if (rank.link.lost(p) || has_closed(rank, p)) continue;  // model: regroup_looks
        const Turn turn = turn_of(rank, p);                      // model: regroup_looks
        if (turn.generation() < generation_) {
            waiting_.push_back(p);
            continue;
        }
        offer.base = std::max(offer.base, turn.next_epoch());
        offer.members[p / 64] |= uint64_t{1} << (p % 64);
    }
    if (!waiting_.empty()) return Progress::pending;
    std::memcpy(rank.own(rank.window.offer(generation_)), &offer, sizeof offer);
    const Word mine = Word::of(generation_, 0, rank.me());
    // Release: my offer. Acquire, when another was first: its offer.
    uint64_t seen = stands.bits;
    // Once a look: whoever keeps changing the word keeps nobody here past his deadline.
    // model: decide
    if (!decision.compare_exchange_strong(seen, mine.bits, std::memory_order_acq_rel, std::memory_order_acquire))
        return Word{seen}.epoch() >= generation_ ? adopt(rank, {seen}) : Progress::pending;
    // Says nothing new, but wakes those that sleep.
    ask(rank, Turn::of(generation_, base_));  // model: wake_others
    return adopt(rank, mine);
}

Progress RegroupStep::adopt(Rank& rank, Word decision) {
    Offer offer{};
    const bool known = decision.rank() < rank.ranks();
    if (known)
        std::memcpy(&offer, rank.base[static_cast<size_t>(decision.rank())] + rank.window.offer(generation_), sizeof offer);
    const auto has = [&](int p) { return (offer.members[p / 64] >> (p % 64) & 1) != 0; };
    if (!known || decision.epoch() != generation_ || offer.generation != generation_ || offer.base < base_ ||
        offer.base > Word::epoch_max || !has(rank.me())) {
        status_ = {
            Code::corrupt,
            fmt::format("shrink: the decision on generation {} is generation {} by rank {}, from epoch {} on, {} rank {}; "
                        "this rank's next epoch is {}. A process of this group does not follow the protocol; open a new "
                        "session.",
                        generation_, decision.epoch(), decision.rank(), offer.base, has(rank.me()) ? "with" : "without",
                        rank.me(), base_)};
        return Progress::failed;
    }
    for (int p = 0; p < rank.ranks(); ++p) rank.left[static_cast<size_t>(p)] = rank.left[static_cast<size_t>(p)] || !has(p);
    rank.generation = generation_;
    rank.base_epoch = offer.base;
    return Progress::done;
}

}  // namespace switchyard::ep
