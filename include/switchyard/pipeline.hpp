// Dispatch, experts and combine of one layer, overlapped by chunks of tokens: while the experts work on one chunk, the rows of
// the next travel, and the results of the one before travel home. Header only; made of dispatch_async and combine_async.
//
//   pipeline(session, {.x = x, .tokens = T, .topk_ids = ids, .topk_weights = weights, .out = out, .chunks = 4},
//            [&](ExpertBatch& batch, int64_t chunk) { ... read batch.row(i), write batch.y() ... });
//
// `out` has the same bytes for any number of chunks, because combine sums each token by itself. All ranks pass the same number.
// Or by experts, within one dispatch: each begins as soon as its own rows are here.
//
//   PendingDispatch coming = session.dispatch_async(...);
//   ExpertBatch batch = experts_as_they_come(session, coming, [&](int64_t expert) {
//       ... coming.rows_of(expert) rows: coming.gather_f32(expert, ...), write coming.y_of(expert) ... });
//   session.combine(batch, ...);
//
// What travels while the experts compute needs somebody to move it: option progress worker, or a call of session.progress()
// between two tiles.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/session.hpp"

namespace switchyard {

/// What dispatch and combine take, for all tokens of the layer; the first T mod chunks of them have one token more.
struct PipelineArgs {
    const void* x = nullptr;              ///< [T,H]
    int64_t tokens = 0;                   ///< T, 0..chunks*tokens_max; may differ between ranks
    int64_t row_stride = 0;               ///< elements from one row of x to the next; 0 = hidden
    const int32_t* topk_ids = nullptr;    ///< [T,K]
    const float* topk_weights = nullptr;  ///< [T,K]; null = weight 1
    const void* shared = nullptr;         ///< [T,H] or null
    void* out = nullptr;                  ///< [T,H], dense
    int32_t* missing = nullptr;           ///< [T] if set, see CombineArgs
    int64_t chunks = 1;                   ///< >= 1, equal on all ranks
    uint64_t tag = 0;
    int64_t timeout_ms = 0;  ///< deadline of each dispatch and combine; 0 = the session's
};

/// Calls run(expert) once for every local expert, 0..experts_local()-1, in the order in which their rows come: with landing
/// packed an expert need not wait for ranks that send it nothing (PendingDispatch::ready), otherwise all come together and run
/// by number. Returns the batch of the dispatch, which has ended then. Allocates a byte per expert. Waits until the dispatch's
/// deadline, and throws its errors, and what `run` throws; what was computed counts for nothing then.
template <class Run>
ExpertBatch experts_as_they_come(const Session& session, PendingDispatch& coming, Run&& run) {
    std::vector<uint8_t> done(static_cast<size_t>(session.experts_local()));
    for (size_t left = done.size(); left > 0;) {
        size_t first = done.size();  // that has not come
        for (size_t e = 0; e < done.size(); ++e) {
            if (done[e]) continue;
            if (!coming.ready(static_cast<int64_t>(e))) {
                first = std::min(first, e);
                continue;
            }
            run(static_cast<int64_t>(e));
            done[e] = 1;
            --left;
        }
        if (first < done.size()) coming.wait_expert(static_cast<int64_t>(first), 1);  // another may come before it
    }
    return coming.get();
}

/// Runs dispatch(c+1) | experts(batch of chunk c, c) | combine(c-1). With depth 3 both ways are hidden;
/// with depth 2 only the way out, because the slot of the next dispatch is that of the combine before, which is awaited first;
/// with depth 1 nothing overlaps. Allocates nothing. Waits for the other ranks as
/// dispatch and combine do, and throws their errors, and what `experts` throws; `out` is undefined then, and not written to any
/// more. Ranks may then have begun different numbers of chunks: shrink() brings them together. Throws bad_input for chunks < 1:
/// on this rank alone, before it begins.
template <class Experts>
void pipeline(Session& session, const PipelineArgs& args, Experts&& experts) {
    if (args.chunks < 1)
        throw Error(Status(Code::bad_input, "pipeline: chunks is " + std::to_string(args.chunks) + "; allowed: 1 and more."));
    const Options& options = session.options();
    const int64_t item = options.dtype == TokenType::f32 ? 4 : 2;
    const int64_t depth = options.depth;
    const int64_t stride = args.row_stride ? args.row_stride : options.hidden;
    const auto first = [&](int64_t chunk) {  // without the product T*chunk, which may not fit
        const int64_t tokens = std::max<int64_t>(args.tokens, 0);
        const int64_t each = tokens / args.chunks, rest = tokens % args.chunks;
        return each * chunk + std::min(chunk, rest);
    };
    const auto at = [](auto* base, int64_t offset) { return base ? base + offset : base; };
    const auto begin = [&](int64_t chunk) {
        const int64_t t = first(chunk);
        return session.dispatch_async({.x = at(static_cast<const std::byte*>(args.x), t * stride * item),
                                       .tokens = args.tokens < 0 ? args.tokens : first(chunk + 1) - t,
                                       .row_stride = args.row_stride,
                                       .topk_ids = at(args.topk_ids, t * options.topk),
                                       .topk_weights = at(args.topk_weights, t * options.topk),
                                       .tag = args.tag,
                                       .timeout_ms = args.timeout_ms});
    };

    std::array<PendingCombine, 64> home;  // of chunk c at c mod depth; 64 is the largest depth
    PendingDispatch next = begin(0);
    for (int64_t c = 0; c < args.chunks; ++c) {
        ExpertBatch batch = next.get();
        const auto begin_next = [&] {
            if (c + 1 == args.chunks) return;
            PendingCombine& before = home[static_cast<size_t>((c + 1) % depth)];
            if (before.valid()) before.wait();
            next = begin(c + 1);
        };
        if (depth > 1) begin_next();
        experts(batch, c);
        const int64_t t = first(c);
        home[static_cast<size_t>(c % depth)] =
            session.combine_async(batch, {.topk_weights = at(args.topk_weights, t * options.topk),
                                          .shared = at(static_cast<const std::byte*>(args.shared), t * options.hidden * item),
                                          .out = at(static_cast<std::byte*>(args.out), t * options.hidden * item),
                                          .timeout_ms = args.timeout_ms,
                                          .missing = at(args.missing, t)});
        if (depth == 1) begin_next();
    }
    for (int64_t c = std::max<int64_t>(0, args.chunks - depth); c < args.chunks; ++c)
        home[static_cast<size_t>(c % depth)].wait();
}

}  // namespace switchyard
