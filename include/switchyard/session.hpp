// A session: one rank's membership in an expert-parallel group. Open it once, then dispatch and combine once per MoE layer.
//
//   auto session = Session::open(options, Group::from_environment());      // torchrun's variables, or `switchyard run`
//   ExpertBatch batch = session.dispatch({.x = x, .tokens = T, .topk_ids = ids});
//   ... the experts of this rank read batch.row(i) or batch.expand_x() and write batch.y() ...
//   session.combine(batch, {.topk_weights = weights, .out = out});
//
// Both exist as two halves as well: dispatch_async and combine_async begin, the handle they return ends.
//
// All ranks make the same calls in the same order. Calls of one session come from one thread at a time; different sessions
// are independent. dispatch and combine allocate nothing, wait at most until their deadline, and throw Error: every rank of
// the group then gets an error too, at the latest in its next dispatch, and the session goes on with the next dispatch; after
// peer_lost and peer_closed with shrink(). stale and depth are about this rank's call alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "switchyard/options.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/status.hpp"
#include "switchyard/trace.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

namespace ep {
struct Flight;
}
struct Operation;
class Pending;
class PendingDispatch;
class PendingCombine;
class Session;
struct WeightTransfer;  // weights.hpp
SY_API WeightTransfer move_weights(Session& mover, const PlacementTable& from, const PlacementTable& to, int64_t expert_bytes,
                                   const void* old_weights, void* new_weights);

/// Who belongs together: the ranks of one group are processes of one user on one host.
struct SY_API Group {
    int rank = 0;
    int size = 1;
    /// Equal on all ranks. Names a meeting place, not a session: sessions of one name may be open at the same time as long as
    /// all ranks open them in the same order. Groups that open at the same time on one host have different names.
    std::string name = "default";
    std::string token;  ///< equal on all ranks; a process without it is refused

    /// From RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as torchrun sets them, and SWITCHYARD_TOKEN (may be missing). `label`
    /// tells groups of one job apart. Throws bad_input when a variable is missing or not a number, or when
    /// LOCAL_WORLD_SIZE says that the job spans several hosts.
    static Group from_environment(const std::string& label = "");
};

/// Input of dispatch. Pointers may be null where there are no tokens.
struct DispatchArgs {
    const void* x = nullptr;               ///< [T,H] of options.dtype; rows are dense inside
    int64_t tokens = 0;                    ///< T, 0..tokens_max; may differ between ranks
    int64_t row_stride = 0;                ///< elements from one row of x to the next; 0 = hidden
    const int32_t* topk_ids = nullptr;     ///< [T,K], 0..experts-1, or -1 for an unused slot
    const float* topk_weights = nullptr;   ///< [T,K]; needed only with options.deliver_weights
    uint64_t tag = 0;                      ///< if set, must be equal on all ranks: (layer, step), say
    int64_t timeout_ms = 0;                ///< deadline of this call; 0 = the session's
    const int64_t* send_counts = nullptr;  ///< [E] if set: rows this rank sends to each expert; what topk_ids do not say is a
                                           ///< mismatch on all ranks
    const int64_t* recv_counts = nullptr;  ///< [R] if set: rows this rank expects from each rank; anything else is a mismatch
                                           ///< on all ranks that names the pair
};

/// Input of combine.
struct CombineArgs {
    const void* y = nullptr;              ///< [N,H] of options.dtype, rows in the batch's order; null = batch.y() was filled
    const float* topk_weights = nullptr;  ///< [T,K] of the tokens dispatched; null = weight 1
    const void* shared = nullptr;         ///< [T,H] output of shared experts, added unweighted; null = none
    void* out = nullptr;                  ///< [T,H] of options.dtype, dense, written whole; may be null when T = 0
    void* rows = nullptr;        ///< instead of out: [T,K,H] of options.dtype, each slot's row as its expert left it (as
                                 ///< combine_quant brings it), not summed: without topk_weights and shared. Unused
                                 ///< slots are left alone
    int64_t timeout_ms = 0;      ///< deadline of this call; 0 = the session's
    int32_t* missing = nullptr;  ///< [T] if set: slots of each token that contributed nothing because their expert's
                                 ///< rank has died (option partial)
};

/// Input of shrink.
struct ShrinkArgs {
    int64_t timeout_ms = 0;  ///< deadline of this call; 0 = the session's
    /// A member that has not come by the deadline is killed (SIGKILL), and its end is waited for, up to five seconds. Without
    /// it such a member ends the call with timed_out: it may only be stopped, and would go on storing into the windows it
    /// holds.
    bool kill_missing = false;
};

/// The rows this rank received in one dispatch. Views into the window, no copy: valid until combine or destruction; every
/// accessor but epoch() throws stale after that. Nothing here allocates or waits (for the progress worker's turn at most).
/// Destroying a batch that was not combined drops it: the other ranks' combine of it fails at once with peer_left.
class SY_API ExpertBatch {
 public:
    ExpertBatch() = default;
    ExpertBatch(ExpertBatch&& other) noexcept;
    ExpertBatch& operator=(ExpertBatch&& other) noexcept;
    ~ExpertBatch();

    /// One row in its wire format.
    struct Row {
        const std::byte* payload;  ///< [H] elements: of dtype, or one byte each when quantised
        const std::byte* scales;   ///< [S] scales, or null
    };

    int64_t rows() const;          ///< N, pad rows of expert_alignment included
    int64_t tokens() const;        ///< T of this rank's own dispatch
    uint64_t epoch() const;        ///< number of this dispatch
    const void* expand_x() const;  ///< [N,H], rows by (local expert, source rank, token, k); payload_bytes() each.
                                   ///< With rows that lie apart (in_place, allgather, two_level) the first call copies all here
    const void* dynamic_scales() const;  ///< [N,S], scale_bytes() each; null without quantisation. Copies as expand_x()
    int64_t payload_bytes() const;
    int64_t scale_bytes() const;
    std::span<const int32_t> assist_info_for_combine() const;  ///< [N,3] (source rank, token, k); -1 in pad rows
    std::span<const int64_t> expert_token_nums() const;        ///< [L] rows of each local expert, or their running sum
    std::span<const int32_t> ep_recv_count() const;            ///< [L*R] running sum over (local expert, source rank)
    std::span<const int64_t> expert_offsets() const;           ///< [L+1] first row of each local expert, pad rows counted
    const float* weights() const;                              ///< [N] topk weights; null unless options.deliver_weights
    void* y() const;  ///< [N,H] of dtype in the window: write the experts' output here and combine copies nothing.
                      ///< Streaming stores to it must be fenced by the thread that made them.

    /// Row i of 0..N-1, wherever the landing keeps it; valid as long as the batch. Throws bad_input outside 0..N-1, corrupt
    /// when another process wrote nonsense where the row's home stands (rows that lie apart).
    Row row(int64_t i) const;

    /// Copies rows first..first+count-1 of a local expert, in wire format, to `tile` [count, payload_bytes] and, when
    /// quantised and wanted, `tile_scales` [count, scale_bytes]. Throws bad_input outside the expert's rows.
    void gather(int64_t expert, int64_t first, int64_t count, void* tile, void* tile_scales = nullptr) const;

    /// The same decoded: `tile` [count,H] f32.
    void gather_f32(int64_t expert, int64_t first, int64_t count, float* tile) const;

 private:
    friend class Session;
    friend class Pending;
    friend class PendingDispatch;
    void copy_rows() const;  // of rows that lie apart: to expand_x, once
    ExpertBatch(std::shared_ptr<void> session, ep::Flight* flight, uint64_t epoch);
    const ep::Flight& flight() const;

    std::shared_ptr<void> session_;  // keeps the window mapped
    ep::Flight* flight_ = nullptr;
    uint64_t epoch_ = 0;
};

/// What a session has done since it opened, on this rank.
struct SessionStats {
    uint64_t dispatches = 0, combines = 0;
    uint64_t rows_sent = 0;      ///< (token, k) pairs sent by dispatch, own rank included
    uint64_t rows_received = 0;  ///< without pad rows
    /// Written by dispatch, own rank included: with packed and padded payload, scales, source info and weights of every row,
    /// with alltoallv whole places of its blocks, with in_place, allgather and two_level each token once per group that reads
    /// it, and its ids.
    uint64_t bytes_sent = 0;
    uint64_t bytes_sent_peers = 0;  ///< the part of it that went to other ranks
    uint64_t bytes_home = 0;        ///< bytes of experts' rows read (or pushed) by combine
    int64_t wait_ns_counts = 0;     ///< waiting for the peers' counts (and for a slot)
    int64_t wait_ns_rows = 0;       ///< waiting for the peers' rows (counts come with them, but with packed and alltoallv)
    int64_t wait_ns_returned = 0;   ///< waiting for the experts' output
};

/// Rows counted since the session opened or reset_loads(): (token, k) pairs of every dispatch that all ranks have agreed to.
/// Always on. `experts`, `slots` and `ranks` are of the whole group, and so equal on all ranks as long as their dispatches
/// ended alike; plan_placement(experts, ...) on each then gives one table.
struct SessionLoads {
    uint64_t dispatches = 0;
    std::vector<uint64_t> sent;     ///< [E] from this rank to each expert
    std::vector<uint64_t> experts;  ///< [E] from all ranks to each expert
    std::vector<uint64_t> slots;    ///< [S] from all ranks to each slot; experts again without a placement table
    std::vector<uint64_t> ranks;    ///< [R] from all ranks to each rank
};

class SY_API Session {
 public:
    /// Opens this rank's session: meets the others, compares every agreed option, maps the windows. Allocates everything;
    /// waits at most options.timeout_ms. Every rank of the group gets the same outcome. Throws Error: bad_input,
    /// mismatch (ranks disagree; names both and the option), capacity (a window beyond what can be addressed), timed_out,
    /// peer_lost, corrupt (a rank does not follow the format), system.
    static Session open(const Options& options, const Group& group);

    /// The same with experts placed by a table, for its number of ranks and options.experts experts. topk_ids go on naming
    /// experts; a row goes to the replica that table.choice says, and results are those of any other placement. What a batch
    /// calls an expert of this rank is one of its slots: L counts slots, slot s lies on the rank that
    /// experts_of(rank, R, S) says, and table.expert_of[s] is its expert. With option partial a row takes a replica that lives.
    /// Throws also: mismatch when ranks have tables of different hash (names both and the ranks), bad_input for one that does
    /// not pass check() or does not fit.
    static Session open(const Options& options, const Group& group, const PlacementTable& table);

    /// Ranks as threads of this process: session r belongs to the thread that plays rank r.
    static std::vector<Session> open_local(const Options& options, int ranks);
    static std::vector<Session> open_local(const Options& options, const PlacementTable& table);
    /// The same with each rank's own options, and table if any; they are compared as between processes.
    static std::vector<Session> open_local(std::span<const Options> options, std::span<const PlacementTable> tables = {});

    Session(Session&&) noexcept;
    Session& operator=(Session&&) noexcept;
    ~Session();  ///< close()

    /// Sends each token to the ranks of its experts and returns the rows this rank's experts received.
    /// Waits for the counts and rows of all ranks. No batch exists anywhere when the input of any rank was bad; with landing
    /// packed and alltoallv no row has moved either. Throws Error: on all ranks bad_input (names rank, token, slot, value,
    /// allowed), mismatch (tags, counts), capacity (rows_max, cell_rows); timed_out (who is awaited), peer_left (who gave up,
    /// and why), peer_lost, peer_closed, corrupt; and on this rank alone, without taking an epoch, depth and stale.
    ExpertBatch dispatch(const DispatchArgs& args);

    /// Where the next dispatch's tokens may be written, [tokens_max,H] of dtype: with landing in_place and no quantisation a
    /// dispatch whose x is this place copies nothing. Null otherwise. Waits until every rank has finished reading the epoch
    /// that used the slot before (at once after a combine); the place is good for the very next dispatch. timeout_ms: of this
    /// wait; 0 = the session's. Allocates nothing. Throws Error, and takes no epoch: depth, stale, timed_out, peer_lost,
    /// peer_closed; a dispatch after that is told the same.
    void* x(int64_t timeout_ms = 0);

    /// Sums each token's rows: out[t] = sum over k of weights[t,k] * y(row of t,k), in k order, in f32, rounded once.
    /// Waits for the experts' output of all ranks. Uses the batch up, whatever happens, unless it is refused as stale. Throws
    /// Error: stale (combined already, of another session), bad_input (the others get it too), timed_out, peer_left (a rank
    /// dropped its batch or failed), peer_lost, peer_closed, corrupt. `out` is undefined after an error.
    void combine(ExpertBatch& batch, const CombineArgs& args);
    void combine(ExpertBatch&& batch, const CombineArgs& args) { combine(batch, args); }

    /// The same two calls, begun only: the handle tells when they have ended. Never wait. Everything the arguments point to
    /// must stay until then. They fail at once only with what concerns this rank alone, depth and stale; all else comes from
    /// the handle. Handles of one session may be waited for in any order, on each rank in another: whoever waits for one moves
    /// the others, too. A slot is taken from dispatch_async until the handle of its combine has given its end out (or is
    /// destroyed), so which dispatch is refused with depth never depends on timing. The deadline runs from this call.
    PendingDispatch dispatch_async(const DispatchArgs& args);
    PendingCombine combine_async(ExpertBatch& batch, const CombineArgs& args);
    PendingCombine combine_async(ExpertBatch&& batch, const CombineArgs& args);

    /// Moves everything begun by the above as far as it goes without waiting: for expert code that wants the ranks to exchange
    /// rows while it computes, a call now and then. Never waits, throws nothing; with options.progress worker it does nothing,
    /// because the worker does it.
    void progress();

    /// Goes on with the ranks that are left: after peer_lost, peer_closed or timed_out, called on all of them. Ends all open
    /// batches (stale), agrees with the others on who is left and on the next epoch, and makes no memory. Ranks keep their
    /// numbers and experts. Experts of those that left are refused in topk_ids, or count as unused with option partial.
    /// With nobody dead it brings ranks together again that have lost count of their calls. Returns the members.
    /// Waits until every member has called it, or has ended. Throws Error: timed_out (who did not come; then only shrink and
    /// close are allowed), bad_input (windows that cannot be loaded), capacity (65,535 generations), corrupt.
    std::vector<int> shrink(const ShrinkArgs& args = {});

    /// Leaves the group; further calls throw. Never waits. The other ranks' calls that need this rank fail with peer_closed.
    void close();

    int rank() const;
    int size() const;
    const Options& options() const;  ///< with every `automatic` and 0 replaced by what is used
    const char* simd_name() const;   ///< instruction set of the kernels in use
    int64_t experts_local() const;   ///< L; slots of this rank where there is a placement table
    int64_t window_bytes() const;    ///< address space reserved per rank; only touched pages cost memory
    /// What the window lies in and where helpers run, in words: "pages of 2048 KiB on NUMA node 1, helpers on CPUs 5, 6".
    /// Nothing is bound or pinned that is not told here.
    std::string memory_text() const;
    SessionStats stats() const;
    /// Why this landing: with landing automatic what each was expected to cost, cheapest first. Lines of text.
    std::string explain() const;

    /// What each expert, slot and rank has had to do. Allocates the result.
    SessionLoads loads() const;
    void reset_loads();  ///< from 0 again; on all ranks, where they shall stay equal

    /// The last events, oldest first, at most 4096: the last few hundred calls. Allocates. They are always noted.
    std::vector<TraceEvent> trace() const;

    /// [R] nanoseconds this rank has stood waiting while that rank was the next one it lacked, since the session opened: row
    /// `rank()` of the group's wait matrix. The sum is that of the three wait_ns in stats(). Of several late ranks one at a
    /// time is counted, so a slow rank stands out in its column on all others. Allocates.
    std::vector<int64_t> wait_ns_by_rank() const;

 private:
    friend class ExpertBatch;
    friend class Pending;
    friend class PendingDispatch;
    friend class Exchange;
    friend WeightTransfer move_weights(Session& mover, const PlacementTable& from, const PlacementTable& to,
                                       int64_t expert_bytes, const void* old_weights, void* new_weights);
    /// Refuses the next dispatch on all ranks, with this reason. Throws it, or what dispatch throws.
    [[noreturn]] void refuse_dispatch(const Status& why, uint64_t tag, int64_t timeout_ms);
    // Before anything is made for each of them.
    static void check_ranks_of_open_local(int64_t ranks);
    // As x(), for who goes on to dispatch whatever becomes of it: null where there is no place, or it is not free in time.
    // Leaves in timeout_ms what is left of it.
    void* x_if_free(int64_t& timeout_ms);
    // `rows`: a number for what rows are made of, which is compared like an option. `refusal`: what the caller has found wrong
    // itself, for all ranks to hear.
    static Session open_rows(const Options& options, const Group& group, uint64_t rows, const Status& refusal);
    static std::vector<Session> open_local_rows(std::span<const Options> options, std::span<const PlacementTable> tables,
                                                std::span<const uint64_t> rows);

    struct Impl;
    explicit Session(std::shared_ptr<Impl> impl);
    Impl& impl() const;  // stale on a session that was moved away
    std::shared_ptr<Impl> impl_;
};

/// A dispatch or combine that was begun. To be used by the thread that calls its session. It gives its end out once: after that
/// poll and wait return true again when it was good, and throw stale when it was an error, or when shrink or close has ended
/// it.
///
/// Destroying one that has not ended never waits for another rank, and nothing the arguments pointed to is read or written
/// afterwards. A dispatch is given up: the other ranks' dispatch fails at once with peer_left, or, where the batch was out
/// already, the combine of it. Of a combine only this rank's result is given up: this rank's y is offered, so the others end as
/// if nothing had happened.
class SY_API Pending {
 public:
    Pending() = default;
    Pending(const Pending&) = delete;
    Pending& operator=(const Pending&) = delete;

    /// One look at everything under way on this rank, and the work that has become possible. Never waits. True when this has
    /// ended well; throws its Error, that of the blocking call, when it has not.
    bool poll();

    /// Waits until it has ended, at most timeout_ms (0: its own deadline ends it). False when that time has passed: it goes on.
    /// Throws as poll().
    bool wait(int64_t timeout_ms = 0);

    /// Whether it has ended, well or not, as far as is known without looking.
    bool done() const;
    /// Whether there is an end to be given out, or one was.
    bool valid() const { return operation_ || ended_well_; }
    uint64_t epoch() const { return epoch_; }  ///< number of the dispatch

 protected:
    friend class Session;
    Pending(std::shared_ptr<void> session, Operation* operation, uint64_t epoch, bool is_dispatch);
    Pending(Pending&& other) noexcept;
    void swap(Pending& other) noexcept;
    ~Pending();
    void take_end();  // gives the end out
    bool is_mine() const;
    Operation& operation(const char* call) const;

    std::shared_ptr<void> session_;  // keeps the window mapped
    Operation* operation_ = nullptr;
    uint64_t epoch_ = 0;
    bool is_dispatch_ = false;
    bool ended_well_ = false;
};

/// A combine that was begun.
class SY_API PendingCombine : public Pending {
 public:
    PendingCombine() = default;
    PendingCombine(PendingCombine&&) noexcept = default;
    PendingCombine& operator=(PendingCombine&& other) noexcept {
        PendingCombine taken(std::move(other));
        swap(taken);
        return *this;
    }

 private:
    friend class Session;
    using Pending::Pending;
};

/// A dispatch that was begun, and its batch once it has ended.
class SY_API PendingDispatch : public Pending {
 public:
    PendingDispatch() = default;
    PendingDispatch(PendingDispatch&&) noexcept = default;
    PendingDispatch& operator=(PendingDispatch&& other) noexcept {
        PendingDispatch taken(std::move(other));
        swap(taken);
        return *this;
    }

    /// Waits until it has ended well and hands the batch out, once.
    ExpertBatch get();

    /// Whether it is known how many rows every local expert gets. With landings packed and alltoallv that is before the rows of
    /// other ranks are here: once all counts are, and this rank's rows have gone out. With the others rows and counts come
    /// together, at the end. Looks, as poll(), and throws its errors.
    bool counted();
    /// Waits for that, at most timeout_ms (0: the dispatch's own deadline). False when that time has passed.
    bool wait_counted(int64_t timeout_ms = 0);
    /// [L] rows of each local expert, pad rows not counted, once counted(): what ExpertMemory::prefetch wants. A view, good as
    /// long as this handle, and then as the batch it gives. Throws bad_input before; what was read so counts for nothing if the
    /// dispatch then fails.
    std::span<const int64_t> counts() const;

    /// Whether all rows of a local expert are here. With landing packed an expert is ready as soon as the ranks that send it
    /// rows have sent theirs, whatever the others do; otherwise all become ready together. Looks, as poll(), and throws its
    /// errors. Throws bad_input for an expert that is none of this rank.
    bool ready(int64_t expert);
    /// Waits for that, at most timeout_ms (0: the dispatch's own deadline). False when that time has passed.
    bool wait_expert(int64_t expert, int64_t timeout_ms = 0);

    /// Of an expert that is ready, before or after the end: how many rows it has, and copies of them, as ExpertBatch::gather
    /// and gather_f32; and where its rows of y are, [rows,H] of dtype. Throw bad_input for one that is not. What was read or
    /// written so counts for nothing if the dispatch then fails.
    int64_t rows_of(int64_t expert) const;
    void gather(int64_t expert, int64_t first, int64_t count, void* tile, void* tile_scales = nullptr) const;
    void gather_f32(int64_t expert, int64_t first, int64_t count, float* tile) const;
    void* y_of(int64_t expert) const;

 private:
    friend class Session;
    using Pending::Pending;
    const ep::Flight& flight(const char* call) const;
    const ep::Flight& ready_flight(int64_t expert) const;
    bool has(int64_t part) const;
    bool wait_part(int64_t part, int64_t timeout_ms);
};

}  // namespace switchyard
