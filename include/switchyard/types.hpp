// The words of the library as types: token types, number formats, landings, and the few enums an option can take.
//
// Plain constants only: this header also compiles for a device (nvcc).
#pragma once

#include <cstdint>

namespace switchyard {

/// The most ranks of a group: a rank has 12 bits in a flag word, and one number stands for none.
inline constexpr int ranks_max = 4095;

/// Element type of a token, in memory and at combine.
enum class TokenType : int32_t { f16 = 0, bf16 = 1, f32 = 2 };

/// How a row is written on the wire. `none` copies the token bit for bit.
/// Dispatch: none, int8_token, mxfp8_e5m2, mxfp8_e4m3, fp8_e4m3_block128.
/// Combine:  none, int8_block8, int8_block128.
enum class Format : int32_t {
    none = 0,
    int8_token = 1,         ///< one f32 scale per row
    mxfp8_e5m2 = 2,         ///< OCP Microscaling, one e8m0 scale per 32 columns
    mxfp8_e4m3 = 3,         ///< OCP Microscaling, one e8m0 scale per 32 columns
    fp8_e4m3_block128 = 4,  ///< one f32 scale per 128 columns
    int8_block8 = 5,        ///< one scale in the token type per 8 columns
    int8_block128 = 6,      ///< one f32 scale per 128 columns
};

/// How the shared exponent of an mx block follows from its largest magnitude.
enum class MxRule : int32_t {
    floor = 0,  ///< floor(log2 amax) - emax: OCP's rule; the largest values of a block may overflow
    ceil = 1,   ///< ceil(log2(amax / largest)): never overflows
};

/// What an mx element becomes that is larger than the format can hold.
enum class MxOverflow : int32_t {
    saturate = 0,  ///< the largest finite value
    inf = 1,       ///< infinity (mxfp8_e5m2 only)
};

/// How the scale of fp8_e4m3_block128 is chosen.
enum class Fp8Scale : int32_t {
    f32 = 0,    ///< amax / 448
    ue8m0 = 1,  ///< the least power of two with 448 * scale >= amax
};

/// A number format with its rules; fields that a format does not use are ignored.
struct RowFormat {
    Format format = Format::none;
    MxRule mx_rule = MxRule::floor;
    MxOverflow mx_overflow = MxOverflow::saturate;
    Fp8Scale fp8_scale = Fp8Scale::f32;
};

/// How rows lie when they arrive. Same values in the same order whichever is chosen.
enum class Landing : int32_t {
    automatic = 0,
    packed = 1,     ///< counts first, then every row straight to its final place
    padded = 2,     ///< a fixed place per (expert, source), no counts needed first; gaps closed by a copy
    in_place = 3,   ///< only counts and topk_ids are told; rows stay at home, encoded once per token, and are read there
    allgather = 4,  ///< each token once to every rank that owns one of its experts, which picks its rows from there
    two_level = 5,  ///< each token once to every group of ranks (option group_ranks) with one of its experts; read there
    alltoallv = 6,  ///< rows packed by owner, one block to each, put in order there
};

/// How combine brings rows home.
enum class CombinePath : int32_t {
    automatic = 0,
    read = 1,  ///< the home rank reads the experts' rows where they lie
    push = 2,  ///< the experts' rank writes rows to a slot at home
};

/// Form of `expert_token_nums`.
enum class TokenNums : int32_t {
    cumsum = 0,  ///< running sum over local experts
    count = 1,   ///< rows of each local expert
};

/// Who moves operations in flight on: dispatch_async and combine_async.
enum class ProgressBy : int32_t {
    caller =
        0,  ///< the calls of this session: what can be sent is sent at once, the rest when something is polled or waited for
    worker = 1,  ///< a thread of the session, whatever the caller does meanwhile
};

/// Whether a window lies in huge pages that the administrator has reserved (vm.nr_hugepages).
enum class HugePages : int32_t {
    automatic = 0,  ///< if enough of them are free for the whole window
    no = 1,
    yes = 2,  ///< or the session does not open
};

/// Instruction set of the number kernels. `automatic` takes the best this processor has.
enum class Simd : int32_t { automatic = 0, scalar = 1, ssse3 = 2, sse4 = 3, avx2 = 4, avx512 = 5, avx512_dl = 6, neon = 7 };

}  // namespace switchyard
