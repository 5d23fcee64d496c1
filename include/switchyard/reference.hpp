// What dispatch and combine must compute, in the plainest form: one thread, no window, no exchange, every rank's input at hand.
//
// Uses the scalar number definitions and a sort of all rows; shares no routing code with the engine. Slow; for checking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "switchyard/options.hpp"

namespace switchyard::reference {

/// What one rank passes to dispatch.
struct RankInput {
    const void* x = nullptr;  ///< [T,H] dense
    int64_t tokens = 0;
    const int32_t* topk_ids = nullptr;    ///< [T,K]
    const float* topk_weights = nullptr;  ///< [T,K], or null for 1
};

/// What one rank gets from dispatch; the names and forms of ExpertBatch.
struct Received {
    int64_t rows = 0;
    std::vector<std::byte> expand_x, dynamic_scales;
    std::vector<int32_t> assist_info_for_combine;
    std::vector<int64_t> expert_token_nums, expert_offsets;
    std::vector<int32_t> ep_recv_count;
    std::vector<float> weights;
};

/// Rows that `rank` receives. Ids must be in -1..experts-1 (Error otherwise). Allocates the result.
SY_API Received dispatch(const Options& options, std::span<const RankInput> inputs, int rank);

/// One row of the experts' output, [H] of options.dtype: for slot k of a token of `source`, computed by `expert`.
using RowOf = std::function<const void*(int source, int64_t token, int64_t k, int32_t expert)>;

/// out [T,H] of `rank`. `shared` [T,H] or null.
SY_API std::vector<std::byte> combine(const Options& options, const RankInput& input, int rank, const RowOf& y,
                                      const void* shared = nullptr);

}  // namespace switchyard::reference
