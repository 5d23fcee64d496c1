#include "ep/combine.hpp"

#include <fmt/format.h>

namespace switchyard::ep {

using layout::Flag;
using layout::Word;

namespace {

Status check_combine(const Rank& rank, const Flight& flight, const CombineArgs& args) {
    if (args.timeout_ms < 0)
        return {Code::bad_input,
                fmt::format("combine {}: rank {}: timeout_ms is {}; allowed: 0 (the session's) or milliseconds.", flight.epoch,
                            rank.me(), args.timeout_ms)};
    if (args.rows && (args.out || args.topk_weights || args.shared))
        return {
            Code::bad_input,
            fmt::format("combine {}: rank {}: rows is set, and so is {}; rows are brought home as they are, or summed to out.",
                        flight.epoch, rank.me(),
                        args.out            ? "out"
                        : args.topk_weights ? "topk_weights"
                                            : "shared")};
    if (flight.tokens > 0 && !args.out && !args.rows)
        return {Code::bad_input,
                fmt::format("combine {}: rank {}: out is null with {} tokens.", flight.epoch, rank.me(), flight.tokens)};
    return {};
}

// Slots of each token whose row never comes: their expert's rank has left the group, or has died in this epoch.
void count_missing(const Flight& flight, int32_t* missing) {
    const int64_t topk = flight.rank->window.shape.topk;
    for (int64_t t = 0; t < flight.tokens; ++t) {
        missing[t] = flight.missing.empty() ? 0 : flight.missing[static_cast<size_t>(t)];
        for (int64_t k = 0; k < topk; ++k) {
            const int32_t owner = flight.places[static_cast<size_t>(t * topk + k)].rank;
            missing[t] += owner >= 0 && flight.lost[static_cast<size_t>(owner)] != 0;
        }
    }
}

}  // namespace

void CombineStep::start(Rank& rank, Flight& flight, const CombineArgs& args) {
    offered_ = ended_ = untold_ = false;  // first: an exception below finds an epoch to leave
    flight.open = false;
    args_ = args;
    rank.edge(Edge::combine_began, flight.epoch);
    status_ = check_combine(rank, flight, args);
    if (status_.ok()) {
        const void* y = args.y ? args.y : rank.own(rank.window.slot(flight.slot) + rank.window.y);
        if (rank.options.combine_path == CombinePath::push)
            status_ = push_home(rank, flight, y);
        else
            place_y(rank, flight, y);
    }
    if (!status_.ok()) {
        ended_ = true;
        send_reason(rank, flight, status_);                     // model: combine_reason
        return leave(rank, flight, status_.code(), rank.me());  // model: leave_combine
    }
    rank.kernels.fence();  // for the caller's own streaming stores to y
    // model: raise_returned
    raise_all(rank, Flag::returned, flight.slot, Word::of(flight.epoch, layout::returned_ok, rank.me()));
    offered_ = true;
    rank.edge(Edge::y_out, flight.epoch);
    // model: await_returned
    await_.begin(rank, flight, Flag::returned, nullptr, rank.options.partial ? flight.lost.data() : nullptr);
}

Progress CombineStep::poll(Rank& rank, Flight& flight, bool thorough) {
    if (ended_) return status_.ok() ? Progress::done : Progress::failed;
    switch (await_.poll(rank, thorough)) {
        case Progress::pending: return Progress::pending;
        case Progress::failed:
            ended_ = true;
            status_ = await_.failure();
            untold_ = status_.code() == Code::peer_lost || status_.code() == Code::peer_closed;
            return Progress::failed;
        case Progress::done: break;
    }
    ended_ = true;
    rank.edge(Edge::y_in, flight.epoch);
    if (await_.refuser() >= 0 && has_closed(rank, await_.refuser())) {  // model: combine_closed
        status_ = {Code::peer_closed,
                   fmt::format("combine {}: rank {} closed its session with this batch open. Open a new session "
                               "with the ranks that are left.",
                               flight.epoch, await_.refuser())};
        return Progress::failed;
    }
    if (await_.refuser() >= 0) {
        status_ = {Code::peer_left,
                   fmt::format("combine {}: rank {} dropped its batch of this epoch; there is no output of its "
                               "experts. Combine the batch on all ranks, or drop it on all.",
                               flight.epoch, await_.refuser())};
        return Progress::failed;
    }
    if (args_.missing) count_missing(flight, args_.missing);
    if (args_.rows)
        bring_rows(rank, flight, args_);
    else if (rank.options.combine_path == CombinePath::push)
        sum_home(rank, flight, args_);
    else
        sum_read(rank, flight, args_);
    return Progress::done;
}

void CombineStep::give_up(Rank& rank, Flight& flight, int64_t waited_ms) {
    ended_ = true;
    untold_ = true;
    status_ = {Code::timed_out,
               fmt::format("combine {} timed out on rank {} after {} ms waiting for {}. Raise timeout_ms if their experts are "
                           "slow; otherwise see what they do: all ranks must make the same calls in the same order.",
                           flight.epoch, rank.me(), waited_ms, await_.awaited())};
}

void CombineStep::abandon(Rank& rank, Flight& flight) {
    if (ended_) return;
    ended_ = true;
    if (!offered_) leave(rank, flight, Code::system, rank.me());  // model: abandon_combine
}

void drop(Rank& rank, Flight& flight) {
    flight.open = false;
    // model: raise_dropped
    raise_all(rank, Flag::returned, flight.slot, Word::of(flight.epoch, layout::returned_dropped, rank.me()));
}

}  // namespace switchyard::ep
