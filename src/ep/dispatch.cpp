#include "ep/dispatch.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace switchyard::ep {

using layout::Flag;
using layout::Word;

Status check_dispatch(const Rank& rank, Flight& flight, const DispatchArgs& args) {
    const layout::WindowShape& s = rank.window.shape;
    const auto bad = [&](std::string text) { return Status(Code::bad_input, fmt::format("rank {}: {}", rank.me(), text)); };
    if (args.tokens < 0 || args.tokens > s.tokens_max)
        return bad(fmt::format("tokens is {}; allowed: 0..{} (option tokens_max).", args.tokens, s.tokens_max));
    if (args.timeout_ms < 0)
        return bad(fmt::format("timeout_ms is {}; allowed: 0 (the session's) or milliseconds.", args.timeout_ms));
    const int64_t stride_max = (int64_t{1} << 60) / std::max<int64_t>(args.tokens, 1);  // tokens of 4 bytes: it fits 63 bits
    if (args.row_stride != 0 && (args.row_stride < s.hidden || args.row_stride > stride_max))
        return bad(fmt::format("row_stride is {} elements; allowed: 0 (dense), or {} (hidden) to {}.", args.row_stride,
                               s.hidden, stride_max));
    for (int p = 0; args.recv_counts && p < rank.ranks(); ++p)
        if (args.recv_counts[p] < 0 || args.recv_counts[p] > s.tokens_max * s.topk)
            return bad(fmt::format("recv_counts[{}] is {}; a rank can send 0..{} rows (tokens_max * topk).", p,
                                   args.recv_counts[p], s.tokens_max * s.topk));
    if (args.tokens == 0 && !args.send_counts) return {};
    if (args.tokens > 0 && !args.x) return bad(fmt::format("x is null with {} tokens.", args.tokens));
    if (args.tokens > 0 && !args.topk_ids) return bad(fmt::format("topk_ids is null with {} tokens.", args.tokens));
    if (args.tokens > 0 && s.weights && !args.topk_weights)
        return bad(fmt::format("topk_weights is null with {} tokens; option deliver_weights needs it.", args.tokens));
    if (args.tokens > 0 && rank.options.landing == Landing::in_place && s.dispatch == Format::none) {
        // Workers copy tokens into the x place at the same time; from inside it they would overtake each other.
        const auto* x = static_cast<const std::byte*>(args.x);
        const std::byte* place = rank.own(rank.window.slot(flight.slot) + rank.window.x);
        const std::byte* place_end = place + s.tokens_max * rank.window.row.payload_bytes;
        const bool dense = args.row_stride == 0 || args.row_stride == s.hidden;
        const int64_t stride = (dense ? s.hidden : args.row_stride) * layout::token_bytes(s.token);
        const std::byte* x_end = x + (args.tokens - 1) * stride + rank.window.row.payload_bytes;
        if (x < place_end && x_end > place && !(x == place && dense))
            return bad("x lies in Session::x() but is not dense from its start.");
    }
    const int64_t n = args.tokens * s.topk;
    if (const int64_t i = find_bad_id(args.topk_ids, n, rank.options.experts); i < n)
        return bad(fmt::format("topk_ids[{}][{}] is {}; experts are 0..{}, or -1 for an unused slot.", i / s.topk, i % s.topk,
                               args.topk_ids[i], rank.options.experts - 1));
    if (args.send_counts) {
        count_rows(args.topk_ids, n, flight.next);
        for (int64_t e = 0; e < rank.options.experts; ++e)
            if (args.send_counts[e] != flight.next[static_cast<size_t>(e)])
                return {Code::mismatch, fmt::format("rank {}: send_counts[{}] is {}, but topk_ids name that expert {} times.",
                                                    rank.me(), e, args.send_counts[e], flight.next[static_cast<size_t>(e)])};
    }
    if (rank.generation == 0 || rank.options.partial) return {};
    for (int64_t i = 0; i < n; ++i) {
        const int32_t e = args.topk_ids[i];
        if (e < 0 || living_owner(rank.turns, rank.placement, rank.left, e) >= 0) continue;
        const int32_t slot =
            rank.turns.empty() ? e : rank.turns.slots[static_cast<size_t>(rank.turns.first[static_cast<size_t>(e)])];
        return bad(
            fmt::format("topk_ids[{}][{}] is {}, an expert of rank {}, which has left the group. Route to experts of its "
                        "members, or open the session with option partial.",
                        i / s.topk, i % s.topk, e, rank.placement.owner[static_cast<size_t>(slot)]));
    }
    return {};
}

namespace {

// Whether what this rank sends to any one expert fits its cell there. `args` name slots by now: those have cells.
Status check_cells(const Rank& rank, Flight& flight, const DispatchArgs& args) {
    const layout::WindowShape& s = rank.window.shape;
    const int64_t n = args.tokens * s.topk;
    if (!s.padded() || n <= s.cell_rows) return {};
    count_rows(args.topk_ids, n, flight.next);
    for (int64_t e = 0; e < s.experts; ++e) {
        const int32_t rows = flight.next[static_cast<size_t>(e)];
        if (rows <= s.cell_rows) continue;
        return {Code::capacity,
                fmt::format("rank {}: it sends {} rows to {} {}, whose cells hold {} of a rank (option cell_rows). Let "
                            "apply_capacity drop those above, raise cell_rows, or leave it 0 for the worst case.",
                            rank.me(), rows, rank.turns.empty() ? "expert" : "slot", e, s.cell_rows)};
    }
    return {};
}

}  // namespace

void DispatchStep::allocate(const Rank& rank) {
    await_.allocate(rank);
    nothing_to_.resize(static_cast<size_t>(rank.ranks()));
    nothing_from_.resize(static_cast<size_t>(rank.ranks()));
}

void DispatchStep::start(Rank& rank, Flight& flight, const DispatchArgs& args, const Status& prior) {
    phase_ = Phase::gate;  // first: an exception below finds an epoch to leave
    args_ = args;
    status_ = {};
    rank.edge(Edge::dispatch_began, flight.epoch);
    verdict_ = prior.ok() ? check_dispatch(rank, flight, args) : prior;
    flight.materialised = false;
    std::fill(flight.lost.begin(), flight.lost.end(), 0);
    std::fill(flight.missing.begin(), flight.missing.end(), 0);
    if (verdict_.ok()) {
        args_.topk_ids = slots_of_ids(rank, flight, args_);
        verdict_ = check_cells(rank, flight, args_);
    }
    // A refused batch has no rows: nothing of it is read any more.
    if (!verdict_.ok()) args_ = {.tag = args.tag};
    flight.tokens = args_.tokens;
    await_.begin_gate(rank, flight);  // model: dispatch_gate
}

Progress DispatchStep::poll(Rank& rank, Flight& flight, bool thorough) {
    for (;;) {
        switch (await_.poll(rank, thorough)) {
            case Progress::pending: return Progress::pending;
            case Progress::failed: return end(rank, flight, await_.failure(), await_.culprit());
            case Progress::done: break;
        }
        switch (phase_) {
            case Phase::gate: after_gate(rank, flight); break;
            case Phase::counts:
                if (after_counts(rank, flight) == Progress::failed) return Progress::failed;
                break;
            case Phase::rows: return after_rows(rank, flight);
            case Phase::ended: return status_.ok() ? Progress::done : Progress::failed;
        }
    }
}

// My counts, or my refusal. With most landings the rows need no counts of others, and go out with mine.
void DispatchStep::after_gate(Rank& rank, Flight& flight) {
    const Landing landing = rank.options.landing;
    rank.edge(Edge::slot_free, flight.epoch);
    send_counts(rank, flight, args_);
    if (!verdict_.ok())
        send_reason(rank, flight, verdict_);  // model: refuse_reason
    else if (landing == Landing::padded)
        send_cells(rank, flight, args_);
    else if (rows_lie_apart(landing))
        offer_tokens(rank, flight, args_);
    const bool counts_first = waits_for_counts(landing);
    const Flag flag = counts_first ? Flag::counted : Flag::arrived;
    // model: raise_counted
    raise_all(rank, flag, flight.slot, Word::of(flight.epoch, static_cast<uint32_t>(verdict_.code()), rank.me()));
    rank.edge(counts_first ? Edge::counts_out : Edge::rows_out, flight.epoch);
    await_.begin(rank, flight, flag);  // model: await_counted
    phase_ = counts_first ? Phase::counts : Phase::rows;
}

// All counts are there: any refusal or excess ends the epoch on every rank, for the same reason. Then, what only this rank may
// have seen: somebody who left it and a later epoch since.
Progress DispatchStep::judge_counts(Rank& rank, Flight& flight) {
    if (await_.refuser() >= 0) return refused(rank, flight);
    if (Status s = take_counts(rank, flight, args_.tag); !s.ok()) return end(rank, flight, std::move(s), no_culprit);
    return judge_later(rank, flight);
}

Progress DispatchStep::judge_later(Rank& rank, Flight& flight) {
    // model: left_later
    return await_.later().ok() ? Progress::done : end(rank, flight, await_.later(), await_.later_culprit());
}

Progress DispatchStep::after_counts(Rank& rank, Flight& flight) {
    rank.edge(Edge::counts_in, flight.epoch);
    if (judge_counts(rank, flight) == Progress::failed) return Progress::failed;  // before a row has moved
    if (rank.options.landing == Landing::alltoallv) send_blocks(rank, flight, args_);
    fill_places(rank, flight, args_.topk_ids);
    if (rank.options.landing == Landing::packed) send_rows(rank, flight, args_);
    for (int p = 0; p < rank.ranks(); ++p) {
        nothing_to_[static_cast<size_t>(p)] = flight.rows_between(rank.me(), p) == 0;
        nothing_from_[static_cast<size_t>(p)] = flight.rows_between(p, rank.me()) == 0;
    }
    // model: raise_arrived
    raise_all(rank, Flag::arrived, flight.slot, Word::of(flight.epoch, 0, rank.me()), nothing_to_.data());
    rank.edge(Edge::rows_out, flight.epoch);
    fill_results(rank, flight);
    write_pad_rows(rank, flight);  // before packed rows of others are awaited: nobody else writes these
    // model: await_arrived
    await_.begin(rank, flight, Flag::arrived, nothing_from_.data(), rank.options.partial ? flight.lost.data() : nullptr);
    phase_ = Phase::rows;
    return Progress::pending;
}

Progress DispatchStep::after_rows(Rank& rank, Flight& flight) {
    rank.edge(Edge::rows_in, flight.epoch);
    const Landing landing = rank.options.landing;
    const bool counts_first = waits_for_counts(landing);
    if ((counts_first ? judge_later(rank, flight) : judge_counts(rank, flight)) == Progress::failed) return Progress::failed;
    if (!counts_first) {
        fill_places(rank, flight, args_.topk_ids);
        fill_results(rank, flight);
        if (landing == Landing::padded)
            place_cells(rank, flight);
        else if (Status s = find_sources(rank, flight); !s.ok())
            return end(rank, flight, std::move(s), no_culprit);
        write_pad_rows(rank, flight);
    } else if (landing == Landing::alltoallv) {
        place_blocks(rank, flight);
    }
    for (int p = 0; p < rank.ranks(); ++p)
        if (flight.lost[static_cast<size_t>(p)]) blank_rows_of(rank, flight, p);
    phase_ = Phase::ended;
    flight.open = true;
    rank.edge(Edge::dispatched, flight.epoch);
    return Progress::done;
}

// Another rank, or this one, has refused. `gone` tells it as bad input whatever the code is, that is, as a verdict that every
// rank reaches by itself: the code may be that of an earlier error of the refuser, of a death say, and the culprit of that is
// not known here.
Progress DispatchStep::refused(Rank& rank, Flight& flight) {
    const uint32_t code = await_.refusal();
    // model: refusal_reason
    status_ = code <= static_cast<uint32_t>(Code::corrupt)
                  ? Status(static_cast<Code>(code), fmt::format("dispatch {} refused: {}", flight.epoch,
                                                                reason_text(rank, flight.slot, await_.refuser(), flight.epoch)))
                  : Status(Code::corrupt, fmt::format("dispatch {}: rank {} refuses it with the unknown code {}.", flight.epoch,
                                                      await_.refuser(), code));
    phase_ = Phase::ended;                                   // not before: an exception above finds an epoch to leave
    leave(rank, flight, Code::bad_input, await_.refuser());  // model: leave_refused
    rank.edge(Edge::dispatch_failed, flight.epoch);
    return Progress::failed;
}

Progress DispatchStep::end(Rank& rank, Flight& flight, Status why, int culprit) {
    phase_ = Phase::ended;
    status_ = std::move(why);
    leave(rank, flight, status_.code(), culprit);  // model: leave_dispatch
    rank.edge(Edge::dispatch_failed, flight.epoch);
    return Progress::failed;
}

void DispatchStep::abandon(Rank& rank, Flight& flight, Code code) {
    if (phase_ == Phase::ended) return;
    phase_ = Phase::ended;
    leave(rank, flight, code, rank.me());  // model: abandon_dispatch
}

void DispatchStep::withdraw(Rank& rank, Flight& flight) {
    if (phase_ == Phase::ended) return;
    end_with_reason(rank, flight,
                    Status(Code::peer_left, fmt::format("dispatch {} was given up on rank {}: its handle was destroyed before "
                                                        "it had ended.",
                                                        flight.epoch, rank.me())));
}

bool DispatchStep::has_rows_of(const Rank& rank, const Flight& flight, int64_t expert) const {
    if (phase_ == Phase::ended) return status_.ok();
    if (phase_ != Phase::rows || rank.options.landing != Landing::packed) return false;
    const int64_t e = rank.placement.of_rank[static_cast<size_t>(rank.me())].first + expert;
    for (int p = 0; p < rank.ranks(); ++p)
        if (flight.count(p, e) > 0 && (await_.is_awaited(p) || flight.lost[static_cast<size_t>(p)])) return false;
    return true;
}

bool DispatchStep::has_counts(const Rank& rank) const {
    return phase_ == Phase::ended ? status_.ok() : phase_ == Phase::rows && waits_for_counts(rank.options.landing);
}

void DispatchStep::give_up(Rank& rank, Flight& flight, int64_t waited_ms) {
    std::string owed;
    const int first = await_.first_awaited();
    if (phase_ == Phase::rows && waits_for_counts(rank.options.landing) && first >= 0)
        owed = fmt::format(" Rank {} owes {} rows.", first, flight.rows_between(first, rank.me()));
    const Status why(Code::timed_out,
                     fmt::format("dispatch {} timed out on rank {} after {} ms waiting for {}.{} Raise timeout_ms if that rank "
                                 "is slow; otherwise see what it does: all ranks must make the same calls in the same order.",
                                 flight.epoch, rank.me(), waited_ms, await_.awaited(), owed));
    end_with_reason(rank, flight, why);
}

// Before the gate a rank may still read what I wrote for an earlier epoch; the code in the flag must do. And a refusal that I
// have published stands: a rank that is late may be reading why.
void DispatchStep::end_with_reason(Rank& rank, Flight& flight, const Status& why) {
    if (phase_ != Phase::gate && verdict_.ok()) send_reason(rank, flight, why);  // model: give_up
    end(rank, flight, why, rank.me());
}

}  // namespace switchyard::ep
