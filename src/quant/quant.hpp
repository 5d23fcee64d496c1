// Number kernels: encode a row, decode it, sum the K rows of a token, copy bytes. Plain functions of pointers and counts.
//
// quant_scalar.cpp is the meaning of every format; quant-inl.hpp has the vector versions, byte-equal to it on every input.
// A kernel does not know whose memory it reads or writes, allocates nothing, waits for nothing, and never fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "layout/row.hpp"
#include "switchyard/types.hpp"

namespace switchyard::quant {

/// The rows that are summed for one token. See Kernels::combine.
struct CombineInput {
    TokenType token;            ///< type of the result, of `shared`, and of rows that are not encoded
    RowFormat wire;             ///< combine's number format
    bool encoded;               ///< rows are payloads in `wire`, with scales; otherwise rows of `token`
    const void* const* rows;    ///< [topk]; null = unused slot, never read
    const void* const* scales;  ///< [topk] beside `rows` where encoded and the format has scales; else ignored
    const float* weights;       ///< [topk], or null for weight 1
    int64_t topk;
    const void* shared;  ///< [hidden] of `token`, or null
};

/// One set of kernels, all compiled for one instruction set. No pointer needs any alignment.
struct Kernels {
    Simd simd;
    const char* name;  ///< as on the command line: "scalar", "avx2", "avx512", ...

    /// Writes one row of `hidden` tokens in `format`: payload and scales as layout::row_layout() sizes them, no byte more.
    /// Format::none copies (f32 allowed only there).
    void (*encode)(const RowFormat& format, TokenType token, const void* x, int64_t hidden, void* payload, void* scales);

    /// Reads one row back: out [hidden] f32. int8_block8/128 give the value in the token type, widened.
    void (*decode)(const RowFormat& format, TokenType token, const void* payload, const void* scales, int64_t hidden,
                   float* out);

    /// out[h] = round(sum over used k, ascending, of weights[k] * value_k[h], then + shared[h]), in f32 from +0;
    /// product and sum rounded apart, one rounding to the token type at the end, NaN canonical. semantics: combine.
    /// value = the row's element after the wire format: a row that is not encoded is encoded and decoded on the way
    /// (block by block, in registers), so both forms give the same bits. out [hidden] of `token`, written whole.
    void (*combine)(const CombineInput& input, int64_t hidden, void* out);

    /// memcpy, with ordinary stores.
    void (*copy)(void* to, const void* from, size_t bytes);

    /// memcpy with streaming stores where `to` allows them; the rest, and the ragged ends, with ordinary ones. Never
    /// writes a byte outside [to, to + bytes). The caller fences before it publishes: see fence().
    void (*stream)(void* to, const void* from, size_t bytes);

    /// Orders this thread's streaming stores before its later stores (sfence). Every thread that streamed calls it itself.
    void (*fence)();
};

/// The definition: exact, slow, on every processor.
const Kernels& scalar_kernels();

/// Kernel sets this build has and this processor can run, best first, scalar last.
std::span<const Kernels* const> available_kernels();

/// Version of Highway that compiled the vector kernels, or null without them.
const char* highway_version();

/// The set for a choice; automatic = the best. Null when this build or processor lacks it.
const Kernels* find_kernels(Simd simd);

}  // namespace switchyard::quant
