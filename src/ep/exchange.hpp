// The exchange: which rows go where, as plain data, and the loops that move them.
//
// Rank    what every step of this rank works with: its windows, kernels, workers.
// Flight  one dispatch/combine pair in its slot: the exchange, and the results handed to the caller. All memory at open.
//
// Dispatch moves rows out:   token --encode once--> row --write K times--> expand_x of the owners (packed), their landing
//                            cells (padded), or blocks that move as a whole (alltoallv); the latter two are put in order by
//                            place_cells, place_blocks.
//                            Or once per token, with the ids, to where the owners read it: this rank's own window (in_place),
//                            one window per group of ranks (two_level), every owner's (allgather).
// Combine brings them home:  sum_read reads y where the experts wrote it; push_home writes it to home rows, sum_home sums them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/clock.hpp"
#include "core/process.hpp"
#include "ep/routing.hpp"
#include "ep/workers.hpp"
#include "layout/window.hpp"
#include "quant/quant.hpp"
#include "switchyard/session.hpp"
#include "switchyard/trace.hpp"
#include "transport/transport.hpp"

namespace switchyard::ep {

/// The window that a session with these options needs. `landing`, `rows_max` and `cell_rows` are chosen; a combine_path
/// that is still automatic gets room for either.
layout::WindowShape shape_of(const Options& options, int64_t ranks);

/// Chooses what `options` leave open (landing, rows_max, cell_rows) and lays the window out. The options are good. capacity
/// when no address space could hold it.
Status plan_window(Options& options, int64_t ranks, layout::Window* window);

/// Bytes that travel with a row to its place, its source info and weight included; and with a slot (token, k) of tokens that
/// are offered as they are: its id and weight.
constexpr int64_t travelling_row_bytes(const layout::RowLayout& row, bool weights) {
    return row.payload_bytes + row.scale_bytes() + (weights ? 16 : 12);
}
constexpr int64_t travelling_slot_bytes(bool weights) {
    return weights ? 8 : 4;
}

/// Of a two-level dispatch on this machine: the ranks of one NUMA node, if they lie evenly; else such that there are about as
/// many groups as ranks in one. Equal on all ranks of a host.
int64_t ranks_of_a_group(int64_t ranks);

/// The last events of a session. One writer, no lock; noting one costs a look at the clock.
class Trace {
 public:
    static constexpr size_t capacity = 4096;

    Trace() : events_(capacity) {}
    void note(Edge edge, uint64_t epoch) {
        events_[count_++ % capacity] = {now_ns(), epoch, waited_ns_, waited_for_, edge};
        waited_ns_ = longest_ns_ = run_ns_ = 0;
        waited_for_ = run_of_ = -1;
    }
    void waited(int peer, int64_t ns) {
        waited_ns_ += ns;
        if (peer != run_of_) run_of_ = peer, run_ns_ = 0;
        run_ns_ += ns;
        if (run_ns_ > longest_ns_) longest_ns_ = run_ns_, waited_for_ = peer;
    }
    /// Oldest first.
    std::vector<TraceEvent> events() const {
        std::vector<TraceEvent> all;
        for (uint64_t i = count_ > capacity ? count_ - capacity : 0; i < count_; ++i) all.push_back(events_[i % capacity]);
        return all;
    }

 private:
    std::vector<TraceEvent> events_;
    uint64_t count_ = 0;
    int64_t waited_ns_ = 0, longest_ns_ = 0, run_ns_ = 0;
    int waited_for_ = -1, run_of_ = -1;
};

/// One member of the group, seen from inside. Lives as long as its session.
struct Rank {
    Transport& link;
    const layout::Window window;
    const quant::Kernels& kernels;
    Workers& workers;
    Options options;            ///< what is used: no `automatic` left once connected
    const Placement placement;  ///< of slots; without a table a slot is an expert
    const Turns turns;          ///< which slots experts lie in; empty without a table
    const Birthplace born;      ///< the process that opened the session; a forked child has no windows
    SessionStats stats;
    std::vector<uint64_t> sent, seen;  ///< [S] rows that this rank, and that all ranks, have sent to each slot
    uint64_t seen_dispatches = 0;      ///< in which they were

    std::vector<std::byte*> base;                        ///< [R] windows that can be loaded and stored; null = by put
    std::vector<std::vector<std::byte>> scratch;         ///< [workers] one encoded row each
    std::vector<std::vector<const void*>> row_pointers;  ///< [workers][2K] to the rows and scales of one token

    uint64_t generation = 0;    ///< of the group: grows when it shrinks
    uint64_t base_epoch = 1;    ///< first epoch of the generation; all before count as closed
    std::vector<uint8_t> left;  ///< [R] 1: no longer of the group

    bool is_member(int peer) const { return left[static_cast<size_t>(peer)] == 0; }

    /// Whose window holds the tokens of `source` that the ranks of `reader`'s group read, and as which of its copies. Landings
    /// in_place (all ranks are one group), two_level, allgather (each rank is one).
    struct Holder {
        int rank;
        int64_t copy;
    };
    int group_of(int peer) const { return peer / static_cast<int>(options.group_ranks); }
    Holder holder_of(int source, int reader) const;

    /// Allocates everything; the link need not be attached yet. The window is shaped for slots, `options` speak of experts; the
    /// same number without turns.
    Rank(Transport& link, const layout::Window& window, const quant::Kernels& kernels, Workers& workers, const Options& options,
         Turns turns = {});
    /// Takes the windows of the attached link, and chooses the path of combine. bad_input when an option asks for windows
    /// that can be loaded and some cannot.
    Status connect();

    Trace trace;
    uint64_t dice = 0;  ///< of option jitter_us

    /// Notes what has just been finished. With option jitter_us it then sleeps, so that tests meet the orders of events that a
    /// quiet machine never shows.
    void edge(Edge edge, uint64_t epoch) {
        trace.note(edge, epoch);
        if (options.jitter_us > 0) sleep_at_random();
    }
    void sleep_at_random();

    bool here() const { return born.here(); }
    int me() const { return link.rank(); }
    int ranks() const { return link.size(); }
    std::byte* own() const { return base[static_cast<size_t>(link.rank())]; }
    std::byte* own(uint64_t offset) const { return own() + offset; }
};

struct Flight {
    Rank* rank = nullptr;
    uint64_t epoch = 0;
    uint64_t slot = 0;
    bool materialised = false;  ///< rows that lie apart: expand_x and scales were copied out
    bool open = false;          ///< between a dispatch that succeeded and its combine or drop
    int64_t tokens = 0;
    int64_t rows = 0;  ///< received, pad rows included

    // The exchange
    std::vector<int32_t> counts;         ///< [R,E] rows from rank r to expert e, copied out of the slot and checked
    std::vector<int32_t> expected;       ///< [R,R] rows that rank r expects from rank q; -1 where it says nothing
    std::vector<int64_t> source_tokens;  ///< [R] T of each rank
    std::vector<int64_t> expert_first;   ///< [E] first row of each expert at its owner
    std::vector<int64_t> rows_of;        ///< [R] rows each rank receives, pad rows included
    std::vector<RowPlace> places;        ///< [tokens_max * K] of my rows
    std::vector<int32_t> next, ends;     ///< [E] scratch
    std::vector<int32_t> groups_seen;    ///< [workers][R] scratch: the last token that a group was sent, plus 1

    std::vector<int32_t> slot_ids;  ///< [tokens_max * K] slots of my topk_ids; empty when they can be no others
    // With option partial
    std::vector<uint8_t> lost;     ///< [R] 1: ended in this epoch; nothing of it is awaited or read
    std::vector<int32_t> missing;  ///< [tokens_max] used ids of each of my tokens that became unused

    // Results
    std::vector<int64_t> local_counts;       ///< [L] rows of each of my experts, pad rows not counted
    std::vector<int64_t> expert_token_nums;  ///< [L]
    std::vector<int64_t> expert_offsets;     ///< [L+1]
    std::vector<int32_t> ep_recv_count;      ///< [L*R]

    void allocate(Rank& of);
    int32_t count(int source, int64_t expert) const {
        return counts[static_cast<size_t>(source) * static_cast<size_t>(rank->window.shape.experts) +
                      static_cast<size_t>(expert)];
    }
    /// Rows of mine that go to `peer`, or that `peer` sends to me.
    int64_t rows_between(int source, int target) const;
};

/// Writes this rank's count row of the flight into every peer's slot. Ids are good; `ids` null stands for no rows.
void send_counts(Rank& rank, Flight& flight, const DispatchArgs& args);

/// Copies the other ranks' count rows out of the slot and checks each number: they come from other processes. My own is not
/// read back: my rows are placed by it, and must fit whatever others write here. corrupt names the rank. Then fills
/// expert_first and rows_of. Tags that differ and rows that are not expected are a mismatch, too many rows for a window
/// capacity.
Status take_counts(Rank& rank, Flight& flight, uint64_t tag);

/// Fills places from counts; fills the results: what this rank receives.
void fill_places(Rank& rank, Flight& flight, const int32_t* ids);
void fill_results(Rank& rank, Flight& flight);

/// Landings that place rows by the counts of all ranks, which are awaited first: packed, alltoallv.
inline bool waits_for_counts(Landing landing) {
    return landing == Landing::packed || landing == Landing::alltoallv;
}

/// packed: encodes each token once and writes it to the final places of its rows. Fenced when it returns.
void send_rows(Rank& rank, Flight& flight, const DispatchArgs& args);

/// padded: the same into the owners' landing cells; needs no counts of other ranks. Fills `places` with cell numbers.
void send_cells(Rank& rank, Flight& flight, const DispatchArgs& args);
/// padded: copies the cells that arrived to expand_x, scales, source info, weights, in order.
void place_cells(Rank& rank, Flight& flight);

/// alltoallv: encodes each token once, packs its rows by owner, and moves each owner's block to it. Fenced when it returns.
/// Uses `places`.
void send_blocks(Rank& rank, Flight& flight, const DispatchArgs& args);
/// alltoallv: copies the rows of the blocks that arrived to expand_x, scales, source info, weights, in order.
void place_blocks(Rank& rank, Flight& flight);

/// Landings whose rows are read where tokens lie, once for all the rows of a token: in_place, two_level, allgather.
inline bool rows_lie_apart(Landing landing) {
    return landing == Landing::in_place || landing == Landing::two_level || landing == Landing::allgather;
}
/// For these: encodes each token once and writes it to the window where each group with one of its experts reads it; lays the
/// topk_ids beside. Needs no counts of other ranks. in_place copies nothing when args.x is that place (Session::x). Fenced.
void offer_tokens(Rank& rank, Flight& flight, const DispatchArgs& args);
/// Reads every rank's topk_ids where they lie and fills source info and weights of the rows they send here. corrupt names a
/// rank whose ids are not those it counted.
Status find_sources(Rank& rank, Flight& flight);
/// The row's payload and scales where its token lies. corrupt when the source info, which another rank wrote, points nowhere.
Status find_row(const Flight& flight, int64_t row, ExpertBatch::Row* found);
/// Copies all rows to expand_x and scales, once.
Status materialise(Rank& rank, Flight& flight);

/// packed, alltoallv: the rows that `source`, which has ended, may have left half written become rows of zeroes that nobody
/// sent.
void blank_rows_of(Rank& rank, Flight& flight, int source);

/// The slots that the call's topk_ids go to: replicas are chosen here, and only here, and experts all of whose ranks have left
/// become unused, counted per token in flight.missing. The topk_ids themselves where there are neither.
const int32_t* slots_of_ids(const Rank& rank, Flight& flight, const DispatchArgs& args);

/// Zeroes the pad rows of expert_alignment and marks their source -1. Only this rank writes them.
void write_pad_rows(Rank& rank, const Flight& flight);

/// Copies the caller's y [rows,H] into the window, where other ranks read it.
void place_y(Rank& rank, Flight& flight, const void* y);
/// Writes every row of y to its home rank's slot (token, k), in combine's wire format. corrupt when a source info that
/// came from another rank points outside that rank's tokens. Fenced when it returns.
Status push_home(Rank& rank, Flight& flight, const void* y);

/// Sums the rows of my tokens: read where the experts wrote them, or from my home rows.
void sum_read(Rank& rank, Flight& flight, const CombineArgs& args);
void sum_home(Rank& rank, Flight& flight, const CombineArgs& args);
/// Copies the rows of my slots to args.rows, from the same places.
void bring_rows(Rank& rank, Flight& flight, const CombineArgs& args);

}  // namespace switchyard::ep
