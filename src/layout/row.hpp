// How one row of H columns lies in memory in each number format: payload bytes and scale bytes.
//
// Constant arithmetic only, for host and device.
#pragma once

#include "switchyard/types.hpp"

#if defined(__CUDACC__)
#define SY_HD __host__ __device__
#else
#define SY_HD
#endif

namespace switchyard::layout {

/// Bytes of one element of a token.
SY_HD constexpr int64_t token_bytes(TokenType type) {
    return type == TokenType::f32 ? 4 : 2;
}

/// Sizes of one row. `payload` and `scales` are separate arrays: expand_x [N,H] and dynamic_scales [N,S].
struct RowLayout {
    int64_t payload_bytes;        ///< hidden elements
    int64_t scale_count;          ///< S; 0 without quantisation
    int64_t scale_element_bytes;  ///< of one scale
    SY_HD constexpr int64_t scale_bytes() const { return scale_count * scale_element_bytes; }
};

SY_HD constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/// Sizes of a row of `hidden` columns of `type` written in `format`.
SY_HD constexpr RowLayout row_layout(Format format, TokenType type, int64_t hidden) {
    switch (format) {
        case Format::none: return {hidden * token_bytes(type), 0, 0};
        case Format::int8_token: return {hidden, 1, 4};
        case Format::mxfp8_e5m2:
        case Format::mxfp8_e4m3: return {hidden, 2 * ceil_div(ceil_div(hidden, 32), 2), 1};
        case Format::fp8_e4m3_block128:
        case Format::int8_block128: return {hidden, ceil_div(hidden, 128), 4};
        case Format::int8_block8: return {hidden, ceil_div(hidden, 8), token_bytes(type)};
    }
    return {0, 0, 0};
}

}  // namespace switchyard::layout
