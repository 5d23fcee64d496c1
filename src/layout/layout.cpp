// The layout is header-only; this file makes sure that its headers stand alone and that the walk is constant arithmetic.
#include "layout/window.hpp"

namespace switchyard::layout {

constexpr Window sample = window_of({.ranks = 2,
                                     .depth = 2,
                                     .experts = 8,
                                     .experts_per_rank = 4,
                                     .hidden = 7168,
                                     .topk = 8,
                                     .tokens_max = 256,
                                     .rows_max = 4096,
                                     .cell_rows = 2048,
                                     .token = TokenType::f16,
                                     .dispatch = Format::mxfp8_e5m2,
                                     .combine = Format::int8_block8,
                                     .weights = false,
                                     .landing = Landing::packed,
                                     .group_ranks = 1,
                                     .push = false});
static_assert(sample.row.payload_bytes == 7168 && sample.row.scale_count == 224);
static_assert(sample.bytes == sample.slots + 2 * sample.slot_bytes && sample.slots % page_bytes == 0);

// More than an address space: seen, not wrapped.
constexpr Window huge = window_of({.ranks = ranks_max,
                                   .depth = 64,
                                   .experts = 1 << 20,
                                   .experts_per_rank = 257,
                                   .hidden = int64_t{1} << 31,
                                   .topk = 8,
                                   .tokens_max = (int64_t{1} << 28) - 1,
                                   .rows_max = (int64_t{1} << 31) - 1,
                                   .cell_rows = (int64_t{1} << 31) - 8,
                                   .token = TokenType::f32,
                                   .dispatch = Format::none,
                                   .combine = Format::none,
                                   .weights = true,
                                   .landing = Landing::padded,
                                   .group_ranks = 1,
                                   .push = true});
static_assert(huge.bytes == Region::limit_exceeded);

}  // namespace switchyard::layout
