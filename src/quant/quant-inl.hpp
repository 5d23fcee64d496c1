// The vector kernels: one source, compiled by quant.cpp once per instruction set. Byte-equal to quant_scalar.cpp.
//
// A row is worked on in chunks of a few blocks; the tail is padded with zeros in a small buffer on the stack, so that a chunk
// never reads or writes outside the row. A format is one chunk struct: `prepare` finds and writes the scales of a chunk,
// `encode` its elements (`encode_again`, where a chunk has it, those that `encode` could not), `decode` reads it back. Scales
// take a long chain of dependent steps, elements a short one; so a few chunks are prepared before the first is encoded, and the
// processor works on all of them at once.
// A wire format of combine is one row struct, in the same two steps: built, then asked for the values of its columns.
// What a set lacks goes to the scalar set: see `is_vectorised` and `combine_tokens`.
//
// Relied on: no contraction of a * b + c (-ffp-contract=off), and the mode that FloatMode sets.
#if defined(SY_QUANT_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef SY_QUANT_INL
#undef SY_QUANT_INL
#else
#define SY_QUANT_INL
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "quant/float_mode.hpp"
#include "quant/numbers.hpp"
#include "quant/quant.hpp"

// Highway's own scalar target stands in for no processor of ours: the scalar set does.
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace switchyard::quant::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU32 = hn::RebindToUnsigned<DF>;
using DI32 = hn::RebindToSigned<DF>;
using DHalf = hn::Rebind<uint16_t, DF>;  // as many u16 as a vector has f32: half a vector
using DCodes = hn::Rebind<uint8_t, DF>;  // as many u8: a quarter
using DInts = hn::Rebind<int8_t, DF>;
using DU16 = hn::ScalableTag<uint16_t>;
using DI16 = hn::ScalableTag<int16_t>;
using DU8 = hn::ScalableTag<uint8_t>;
using DI8 = hn::ScalableTag<int8_t>;
using DU64 = hn::ScalableTag<uint64_t>;
using VF = hn::Vec<DF>;
using VU32 = hn::Vec<DU32>;
using VHalf = hn::Vec<DHalf>;
using VU16 = hn::Vec<DU16>;
using VU8 = hn::Vec<DU8>;

constexpr size_t kLanes = hn::MaxLanes(DF());  // f32 per vector: 4, 8 or 16
constexpr size_t kChunk = 128;

#if HWY_TARGET == HWY_SSSE3 || HWY_TARGET == HWY_SSE4
constexpr bool kHasF16C = false;
#else
constexpr bool kHasF16C = true;
#endif

#if defined(__clang__)
#define SY_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SY_UNROLL _Pragma("GCC unroll 32")
#endif

// ---- Loads and stores. Bytes, so that nothing claims an alignment.

HWY_INLINE VU16 load16(const uint8_t* from) {
    return hn::BitCast(DU16(), hn::LoadU(DU8(), from));
}
HWY_INLINE VHalf load_half(const uint8_t* from) {
    return hn::BitCast(DHalf(), hn::LoadU(hn::Repartition<uint8_t, DHalf>(), from));
}
HWY_INLINE void store_half(VHalf value, uint8_t* to) {
    const hn::Repartition<uint8_t, DHalf> d;
    hn::StoreU(hn::BitCast(d, value), d, to);
}
HWY_INLINE VF load_f32(const uint8_t* from) {
    return hn::BitCast(DF(), hn::LoadU(DU8(), from));
}
HWY_INLINE void store_f32(VF value, uint8_t* to) {
    hn::StoreU(hn::BitCast(DU8(), value), DU8(), to);
}

// ---- Token types

HWY_INLINE VF canonical_nan(VF v) {
    return hn::IfThenElse(hn::IsNaN(v), hn::Set(DF(), kNan), v);
}

HWY_INLINE VU32 bits_of(VF v) {
    return hn::BitCast(DU32(), v);
}
HWY_INLINE VF float_of(VU32 v) {
    return hn::BitCast(DF(), v);
}
HWY_INLINE hn::Mask<DU32> above(VU32 a, uint32_t b) {  // both below 2^31, where signed order will do
    return hn::MaskFromVec(
        hn::BitCast(DU32(), hn::VecFromMask(DI32(), hn::Gt(hn::BitCast(DI32(), a), hn::Set(DI32(), static_cast<int32_t>(b))))));
}

HWY_INLINE VF widen(F16, VHalf v) {
    if constexpr (kHasF16C) {
        return hn::PromoteTo(DF(), hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), v));
    } else {
        // The pattern, moved to where f32 has its exponent, is the value times 2^-112, subnormals too. Inf and NaN come out as
        // large numbers and get their exponent back.
        const VU32 all = hn::PromoteTo(DU32(), v);
        const VU32 size = hn::And(all, hn::Set(DU32(), 0x7FFFU));
        const VF scaled = hn::Mul(float_of(hn::ShiftLeft<13>(size)), hn::Set(DF(), power_of_two(112)));
        const VU32 special = hn::IfThenElseZero(above(size, 0x7BFF), hn::Set(DU32(), 0x7F800000U));
        const VU32 sign = hn::ShiftLeft<16>(hn::Xor(all, size));
        return float_of(hn::Or(hn::Or(bits_of(scaled), special), sign));
    }
}
HWY_INLINE VF widen(Bf16, VHalf v) {
    return float_of(hn::ShiftLeft<16>(hn::PromoteTo(DU32(), v)));
}

/// Rounds to the token type and stays in f32. A NaN stays a NaN; for bf16 it must have its low 16 bits clear.
HWY_INLINE VF round_to(F16, VF v) {
    if constexpr (kHasF16C) {
        const hn::Rebind<hwy::float16_t, DF> d;
        return hn::PromoteTo(DF(), hn::DemoteTo(d, v));
    } else {
        // Adding 2^13 times the power of two below v leaves only bits that f16 has; its step never gets below 2^-24.
        const VU32 bits = bits_of(v);
        const VU32 size = hn::And(bits, hn::Set(DU32(), 0x7FFFFFFFU));
        const VU32 exponent = hn::Max(hn::And(bits, hn::Set(DU32(), 0x7F800000U)), hn::Set(DU32(), 0x38800000U));
        const VF big = float_of(hn::Add(exponent, hn::Set(DU32(), 13U << 23)));
        VU32 rounded = bits_of(hn::Sub(hn::Add(float_of(size), big), big));
        rounded = hn::IfThenElse(above(size, 0x477FEFFF), hn::Set(DU32(), 0x7F800000U), rounded);  // 65520 and above
        rounded = hn::IfThenElse(above(size, 0x7F800000), size, rounded);
        return float_of(hn::Or(rounded, hn::Xor(bits, size)));
    }
}
HWY_INLINE VU32 rounded_high_half(VF v) {
    const VU32 bits = bits_of(v);
    const VU32 odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(DU32(), 1U));
    return hn::Add(hn::Add(bits, hn::Set(DU32(), 0x7FFFU)), odd);
}
HWY_INLINE VF round_to(Bf16, VF v) {
    return float_of(hn::And(rounded_high_half(v), hn::Set(DU32(), 0xFFFF0000U)));
}

/// Rounds to the token type; every NaN becomes the canonical one.
HWY_INLINE VHalf narrow(F16, VF v) {
    v = canonical_nan(v);
    if constexpr (kHasF16C) {
        return hn::BitCast(DHalf(), hn::DemoteTo(hn::Rebind<hwy::float16_t, DF>(), v));
    } else {
        const VU32 bits = bits_of(v);
        const VU32 size = hn::And(bits, hn::Set(DU32(), 0x7FFFFFFFU));
        const VU32 odd = hn::And(hn::ShiftRight<13>(size), hn::Set(DU32(), 1U));
        const VU32 moved = hn::Add(hn::Add(size, hn::Set(DU32(), 0x0FFFU - (112U << 23))), odd);
        const VU32 normal = hn::Min(hn::ShiftRight<13>(moved), hn::Set(DU32(), 0x7C00U));
        const VU32 small = hn::Sub(bits_of(hn::Add(float_of(size), hn::Set(DF(), 0.5F))), hn::Set(DU32(), 0x3F000000U));
        VU32 result = hn::IfThenElse(above(size, 0x387FFFFF), normal, small);
        result = hn::IfThenElse(above(size, 0x7F800000), hn::Set(DU32(), uint32_t{F16::nan}), result);
        result = hn::Or(result, hn::ShiftRight<16>(hn::Xor(bits, size)));
        return hn::DemoteTo(DHalf(), hn::BitCast(DI32(), result));
    }
}
HWY_INLINE VHalf narrow(Bf16, VF v) {
    return hn::DemoteTo(DHalf(), hn::BitCast(DI32(), hn::ShiftRight<16>(rounded_high_half(canonical_nan(v)))));
}

/// kLanes tokens in memory as f32, and back.
template <class Token>
HWY_INLINE VF load_tokens(Token token, const uint8_t* from) {
    return widen(token, load_half(from));
}
HWY_INLINE VF load_tokens(F32, const uint8_t* from) {
    return load_f32(from);
}
template <class Token>
HWY_INLINE void store_tokens(Token token, VF v, uint8_t* to) {
    store_half(narrow(token, v), to);
}
HWY_INLINE void store_tokens(F32, VF v, uint8_t* to) {
    store_f32(canonical_nan(v), to);
}

// ---- Largest magnitudes. Integer order of the patterns, which no NaN gets lost in.

HWY_INLINE VU16 magnitudes(const uint8_t* x) {
    return hn::And(load16(x), hn::Set(DU16(), uint16_t{0x7FFF}));
}
HWY_INLINE VU16 max_magnitude(VU16 a, VU16 b) {  // as i16: SSSE3 has no other
    return hn::BitCast(DU16(), hn::Max(hn::BitCast(DI16(), a), hn::BitCast(DI16(), b)));
}

HWY_INLINE uint16_t largest_lane(VU16 v) {
    return static_cast<uint16_t>(hn::GetLane(hn::MaxOfLanes(DI16(), hn::BitCast(DI16(), v))));
}

/// Largest magnitude of `columns` tokens; a multiple of a vector.
template <size_t columns>
HWY_INLINE uint16_t largest_magnitude(const uint8_t* x) {
    VU16 largest = magnitudes(x);
    SY_UNROLL
    for (size_t c = 2 * kLanes; c < columns; c += 2 * kLanes) largest = max_magnitude(largest, magnitudes(x + 2 * c));
    return largest_lane(largest);
}

/// Four vectors at once: u32 number j of each 128-bit part holds, twice, the largest magnitude of that part of vector j.
HWY_INLINE VU16 part_maxima(VU16 v0, VU16 v1, VU16 v2, VU16 v3) {
    const VU32 a = hn::BitCast(DU32(), v0), b = hn::BitCast(DU32(), v1);
    const VU32 c = hn::BitCast(DU32(), v2), d = hn::BitCast(DU32(), v3);
    const VU16 ab = max_magnitude(hn::BitCast(DU16(), hn::InterleaveLower(DU32(), a, b)),
                                  hn::BitCast(DU16(), hn::InterleaveUpper(DU32(), a, b)));
    const VU16 cd = max_magnitude(hn::BitCast(DU16(), hn::InterleaveLower(DU32(), c, d)),
                                  hn::BitCast(DU16(), hn::InterleaveUpper(DU32(), c, d)));
    const auto ab64 = hn::BitCast(DU64(), ab), cd64 = hn::BitCast(DU64(), cd);
    const VU16 pairs = max_magnitude(hn::BitCast(DU16(), hn::InterleaveLower(DU64(), ab64, cd64)),
                                     hn::BitCast(DU16(), hn::InterleaveUpper(DU64(), ab64, cd64)));
    return max_magnitude(pairs, hn::BitCast(DU16(), hn::RotateRight<16>(hn::BitCast(DU32(), pairs))));
}

// ---- Elements

/// Codes of finite values on an fp8 grid, limited, with sign: one per f32. See round_to_grid in numbers.hpp.
template <class Grid>
HWY_INLINE void store_grid_codes(VF v, uint32_t limit, uint8_t* to) {
    constexpr uint32_t kLeast = static_cast<uint32_t>(Grid::emin + 127) << 23;
    constexpr int kDropped = 23 - Grid::mantissa_bits;
    const VU32 bits = bits_of(v);
    const VU32 size = hn::And(bits, hn::Set(DU32(), 0x7FFFFFFFU));
    const VU32 exponent = hn::Max(hn::And(bits, hn::Set(DU32(), 0x7F800000U)), hn::Set(DU32(), kLeast));
    // At this number the distance of neighbouring floats is the grid's step, so the sum counts steps in its low bits.
    const VU32 big = hn::Add(exponent, hn::Set(DU32(), static_cast<uint32_t>(kDropped) << 23));
    const VU32 steps = hn::Sub(bits_of(hn::Add(float_of(size), float_of(big))), big);
    const VU32 code = hn::Add(hn::ShiftRight<kDropped>(hn::Sub(exponent, hn::Set(DU32(), kLeast))), steps);
    const VU32 sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(DU32(), 0x80U));
    const VU32 all = hn::Or(hn::Min(code, hn::Set(DU32(), limit)), sign);
    hn::StoreU(hn::DemoteTo(DCodes(), hn::BitCast(DI32(), all)), DCodes(), to);
}

/// Values of fp8 codes, NaN and Inf included.
HWY_INLINE VF load_grid_values(E5M2, const uint8_t* from) {
    return widen(F16(), hn::ShiftLeft<8>(hn::PromoteTo(DHalf(), hn::LoadU(DCodes(), from))));
}
HWY_INLINE VF load_grid_values(E4M3, const uint8_t* from) {
    // Moved up one bit short of E5M2's place the code is an f16 of 2^-8 times the value.
    const VHalf code = hn::PromoteTo(DHalf(), hn::LoadU(DCodes(), from));
    const VHalf size = hn::And(code, hn::Set(DHalf(), uint16_t{0x7F}));
    const VHalf half = hn::Or(hn::ShiftLeft<7>(size), hn::ShiftLeft<8>(hn::Xor(code, size)));
    const VHalf whole = hn::IfThenElse(hn::Eq(size, hn::Set(DHalf(), uint16_t{0x7F})), hn::Set(DHalf(), F16::nan), half);
    return hn::Mul(widen(F16(), whole), hn::Set(DF(), 256.0F));
}

HWY_INLINE void store_ints(VF v, uint8_t* to) {
    const DInts d;
    hn::StoreU(hn::BitCast(DCodes(), hn::DemoteTo(d, hn::NearestInt(v))), DCodes(), to);
}
HWY_INLINE VF load_ints(const uint8_t* from) {
    return hn::ConvertTo(DF(), hn::PromoteTo(DI32(), hn::BitCast(DInts(), hn::LoadU(DCodes(), from))));
}

/// f16(v) as far as rint(f16(v)) can tell, |v| < 128: 11 significant bits. f16's subnormals round to 0 either way.
HWY_INLINE VF to_11_bits(VF v) {
    const VU32 bits = bits_of(v);
    const VU32 odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(DU32(), 1U));
    const VU32 sum = hn::Add(hn::Add(bits, hn::Set(DU32(), 0x0FFFU)), odd);
    return float_of(hn::And(sum, hn::Set(DU32(), 0xFFFFE000U)));
}

/// One magnitude per 128-bit quarter, as part_maxima gives them: as f32, in the order of its u32.
HWY_INLINE VF widen_maxima(F16 token, VU16 maxima) {
    const VU32 low = hn::And(hn::BitCast(DU32(), maxima), hn::Set(DU32(), 0xFFFFU));
    return widen(token, hn::DemoteTo(DHalf(), hn::BitCast(DI32(), low)));
}
HWY_INLINE VF widen_maxima(Bf16, VU16 maxima) {
    return float_of(hn::ShiftLeft<16>(hn::BitCast(DU32(), maxima)));
}

// ---- mxfp8: kLanes blocks at a time, one byte per column
//
// What becomes a code lies in the upper byte of a token, or of twice a token: the upper byte of an f16 is an E5M2; that of
// twice an f16 has the exponent and three bits of mantissa, as an E4M3; that of twice a bf16 is its exponent. So the bytes of
// tokens are sorted into upper and lower ones, and from there on a vector holds twice as many columns: the largest exponent of
// a block, the new exponent (an addition), and the rounding (by the lower byte).
//
// This cannot read or write subnormals, and it would give 0 an exponent. So there are three ways: `encode` for blocks without
// any of them; then, of what it could not do, vectors in which nothing but 0 is in the way; and the rest by f32, block by
// block.

template <class Token, class Grid>
struct Mx {
    static constexpr size_t columns = 32 * kLanes, scale_bytes = kLanes;
    static constexpr size_t kPart = 4 * kLanes, kParts = columns / kPart;  // columns of a vector of bytes; 8 of them
    RowFormat rules;

    /// What `encode` needs to know of kLanes blocks.
    struct Prepared {
        VU8 upper[kParts];  // bytes of tokens, with sign (f16), or of twice the tokens (bf16)
        VU8 move;           // of each block: what to add to the exponent there (f16), or to subtract from it (bf16)
        uint8_t* scales;
        bool fits;    // no block has Inf, NaN, or a scale near the end of its range
        bool normal;  // nothing is 0 or subnormal
    };

    HWY_INLINE void prepare(const uint8_t* x, uint8_t* scales, Prepared& prepared) const {
        if (rules.mx_rule == MxRule::ceil)
            prepare_by_rule<true>(x, scales, prepared);
        else
            prepare_by_rule<false>(x, scales, prepared);
    }

    /// False where encode_again must follow.
    HWY_INLINE bool encode(const Prepared& prepared, const uint8_t* x, uint8_t* payload) const {
        return encode_parts(std::make_index_sequence<kParts>(), prepared, x, payload) && prepared.fits && prepared.normal;
    }

    SY_NOINLINE void encode_again(const Prepared& prepared, const uint8_t* x, uint8_t* payload) const {
        uint32_t wrong = (1U << kParts) - 1;  // a bit per part
        if (prepared.fits) wrong = encode_parts_with_zeros(std::make_index_sequence<kParts>(), prepared, x, payload);
        for (size_t p = 0; p < kParts; ++p) {
            if ((wrong >> p & 1) == 0) continue;
            for (size_t b = kPart * p / 32; 32 * b < kPart * (p + 1); ++b) encode_by_f32(prepared, b, x, payload);
        }
    }

    HWY_INLINE void decode(const uint8_t* payload, const uint8_t* scales, uint8_t* out) const {
        for (size_t b = 0; b < kLanes; ++b) {
            // Byte 255 is NaN, and NaN times anything is.
            const VF scale = hn::Set(DF(), scales[b] == 255 ? kNan : power_of_two(scales[b] - 127));
            for (size_t c = 32 * b; c < 32 * (b + 1); c += kLanes) {
                store_f32(canonical_nan(hn::Mul(load_grid_values(Grid(), payload + c), scale)), out + 4 * c);
            }
        }
    }

 private:
    static constexpr bool kIsBf16 = Token::type == TokenType::bf16, kIsE4M3 = Grid::emax == E4M3::emax;
    static constexpr int kBits = Grid::mantissa_bits;
    static constexpr int kBelow = kIsBf16 ? 0 : 2;                             // bits below the exponent in an upper byte
    static constexpr int kInfinity = kIsBf16 ? 255 : 31;                       // exponent field of Inf and NaN
    static constexpr uint8_t kDoubtful = kIsBf16 ? 0 : 128 - 15 - Grid::emax;  // scale that a block of subnormals may have got
    static constexpr int kLargest = 2 * Grid::emax + (kIsE4M3 ? -1 : 0);       // exponent field of the largest code: 30, 15

    static HWY_INLINE VU8 bytes(uint32_t value) { return hn::Set(DU8(), static_cast<uint8_t>(value)); }
    static HWY_INLINE VU8 as_bytes(VU16 value) { return hn::BitCast(DU8(), value); }
    static HWY_INLINE VU8 upper_bytes(VU16 a, VU16 b) { return hn::ConcatOdd(DU8(), as_bytes(b), as_bytes(a)); }
    static HWY_INLINE VU8 lower_bytes(VU16 a, VU16 b) { return hn::ConcatEven(DU8(), as_bytes(b), as_bytes(a)); }

    /// The upper byte without sign, carried into the next exponent where the magnitude is above 1.75 * 2^e.
    static HWY_INLINE VU8 carried(VU8 upper, VU8 lower) {
        if constexpr (kIsBf16) lower = hn::SaturatedSub(lower, bytes(0xC0));
        return hn::SaturatedAdd(upper, hn::Min(lower, bytes(1)));
    }

    /// u32 number j of each 128-bit quarter: the largest bytes of that quarter of vector j.
    static HWY_INLINE VU8 quarters(VU8 v0, VU8 v1, VU8 v2, VU8 v3) {
        const DU8 d;
        const DU32 d32;
        const DU64 d64;
        const VU32 a = hn::BitCast(d32, v0), b = hn::BitCast(d32, v1), c = hn::BitCast(d32, v2), e = hn::BitCast(d32, v3);
        const auto ab = hn::BitCast(
            d64, hn::Max(hn::BitCast(d, hn::InterleaveLower(d32, a, b)), hn::BitCast(d, hn::InterleaveUpper(d32, a, b))));
        const auto ce = hn::BitCast(
            d64, hn::Max(hn::BitCast(d, hn::InterleaveLower(d32, c, e)), hn::BitCast(d, hn::InterleaveUpper(d32, c, e))));
        return hn::Max(hn::BitCast(d, hn::InterleaveLower(d64, ab, ce)), hn::BitCast(d, hn::InterleaveUpper(d64, ab, ce)));
    }
    /// The largest byte of each block, four times in a u32, which is number lane_of(block).
    static HWY_INLINE VU8 block_maxima(const VU8* v) {
        const DU8 d;
        const DU32 d32;
        VU8 most;
        if constexpr (kLanes == 4) {
            most = quarters(hn::Max(v[0], v[1]), hn::Max(v[2], v[3]), hn::Max(v[4], v[5]), hn::Max(v[6], v[7]));
        } else {
            const VU8 a = quarters(v[0], v[1], v[2], v[3]), b = quarters(v[4], v[5], v[6], v[7]);
            if constexpr (kLanes == 8) {
                most = hn::Max(hn::ConcatLowerLower(d, b, a), hn::ConcatUpperUpper(d, b, a));
            } else {
                most = hn::Max(hn::OddEvenBlocks(b, a), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(a, b)));
            }
        }
        most = hn::Max(most, hn::BitCast(d, hn::RotateRight<16>(hn::BitCast(d32, most))));
        return hn::Max(most, hn::BitCast(d, hn::RotateRight<8>(hn::BitCast(d32, most))));
    }
    static constexpr int32_t lane_of(size_t block) {
        return static_cast<int32_t>(kLanes == 16 ? block / 2 + block % 2 * 8 : block);
    }
    struct BlockOrder {
        int32_t of[kLanes];
        constexpr BlockOrder() : of() {
            for (size_t b = 0; b < kLanes; ++b) of[b] = lane_of(b);
        }
    };
    template <size_t P>
    struct PartOrder {
        int32_t of[kLanes];
        constexpr PartOrder() : of() {
            for (size_t i = 0; i < kLanes; ++i) of[i] = lane_of((P * kPart + 4 * i) / 32);
        }
    };
    /// Bytes of blocks, as block_maxima gives them, to the columns of part P.
    template <size_t P>
    static HWY_INLINE VU8 spread(VU8 of_blocks) {
        static constexpr PartOrder<P> order;
        const VU32 lanes = hn::BitCast(DU32(), of_blocks);
        if constexpr (kLanes == 4)
            return hn::BitCast(DU8(), hn::Broadcast<P / 2>(lanes));
        else
            return hn::BitCast(DU8(), hn::TableLookupLanes(lanes, hn::SetTableIndices(DU32(), order.of)));
    }

    /// Writes the scales of blocks with these maxima. True where they are right unless a block holds nothing but subnormals.
    static HWY_INLINE bool store_scales(VU8 most, uint8_t* scales) {
        static constexpr BlockOrder order;
        const DI32 d;
        const auto exponent = hn::BitCast(d, hn::ShiftRight<24 + kBelow>(hn::BitCast(DU32(), most)));
        const auto none = hn::Eq(exponent, hn::Zero(d));
        auto fits = hn::Lt(exponent, hn::Set(d, kInfinity));
        auto scale = hn::IfThenZeroElse(none, hn::Add(exponent, hn::Set(d, 127 - 15 - Grid::emax)));
        if constexpr (kIsBf16) {
            scale = hn::Max(hn::Sub(exponent, hn::Set(d, Grid::emax)), hn::Zero(d));
            fits = hn::And(fits, hn::Or(none, hn::Gt(exponent, hn::Set(d, kLargest - 1))));
        }
        if constexpr (kLanes != 4) scale = hn::TableLookupLanes(scale, hn::SetTableIndices(d, order.of));
        hn::StoreU(hn::DemoteTo(DCodes(), scale), DCodes(), scales);  // not TruncateTo: Highway 1.0.3 has it wrong for AVX3_DL
        return hn::AllTrue(d, fits);
    }

    uint8_t limit() const {
        if constexpr (!kIsE4M3) {
            if (rules.mx_overflow == MxOverflow::inf) return E5M2::infinity;
        }
        return Grid::largest;
    }

    template <bool ceil>
    HWY_INLINE void prepare_by_rule(const uint8_t* x, uint8_t* scales, Prepared& prepared) const {
        VU8 top[kParts];
        VU8 least = bytes(0xFF);
        SY_UNROLL
        for (size_t p = 0; p < kParts; ++p) {
            VU16 a = load16(x + 2 * kPart * p), b = load16(x + 2 * kPart * p + kPart);
            if constexpr (kIsBf16) {
                a = hn::Add(a, a);
                b = hn::Add(b, b);
            }
            prepared.upper[p] = upper_bytes(a, b);
            top[p] = kIsBf16 ? prepared.upper[p] : hn::And(prepared.upper[p], bytes(0x7F));
            least = hn::Min(least, top[p]);
            if constexpr (ceil) top[p] = carried(top[p], lower_bytes(a, b));
        }
        const VU8 most = block_maxima(top);
        prepared.scales = scales;
        prepared.fits = store_scales(most, scales);
        prepared.normal = hn::AllTrue(DU8(), hn::Gt(least, bytes((1 << kBelow) - 1)));
        if constexpr (kIsBf16) {
            prepared.move = hn::SaturatedSub(most, bytes(kLargest));
        } else {
            const VU8 exponent = hn::And(most, bytes(0x7C));  // of these 5 bits; an E4M3 has them one place further up
            prepared.move = hn::Sub(bytes(kLargest << kBits), kIsE4M3 ? hn::Add(exponent, exponent) : exponent);
        }
    }

    /// One part: the codes before they are rounded, and what is rounded away, of magnitudes.
    struct Part {
        VU8 upper, lower;  // as in memory (f16) or of twice the tokens (bf16)
        VU8 exponent;      // what decides whether a code is normal: f16 with mantissa, and signed; bf16 without
        VU8 code, rest, signs;
    };
    static HWY_INLINE Part part_of(VU8 upper, VU8 move, const uint8_t* x) {
        const DU16 d16;
        const VU16 a = load16(x), b = load16(x + kPart);
        Part part;
        part.lower = lower_bytes(a, b);
        if constexpr (kIsBf16) {
            part.signs = upper_bytes(a, b);
            part.upper = upper;
            part.lower = hn::Add(part.lower, part.lower);
            part.exponent = hn::SaturatedSub(upper, move);
            const VU8 mantissa = as_bytes(hn::ShiftRight<8 - kBits>(hn::BitCast(d16, part.lower)));
            part.code = as_bytes(hn::ShiftLeft<kBits>(hn::BitCast(d16, part.exponent)));
            part.code = hn::OrAnd(part.code, mantissa, bytes((1 << kBits) - 1));
            part.rest = hn::And(as_bytes(hn::ShiftLeft<kBits>(hn::BitCast(d16, part.lower))), bytes(0x100 - (1 << kBits)));
        } else {
            part.signs = upper;
            part.upper = hn::And(upper, bytes(0x7F));
            part.code = hn::Add(kIsE4M3 ? upper_bytes(hn::Add(a, a), hn::Add(b, b)) : part.upper, move);
            part.rest = kIsE4M3 ? hn::Add(part.lower, part.lower) : part.lower;
            part.exponent = part.code;
        }
        return part;
    }
    static HWY_INLINE void store_part(const Part& part, VU8 limit, uint8_t* payload) {
        const VU8 sum = hn::SaturatedAdd(part.rest, hn::And(part.code, bytes(1)));
        const auto up = hn::Gt(sum, bytes(0x80));  // above the tie, or at it and odd
        const VU8 code = hn::IfThenElse(up, hn::Add(part.code, bytes(1)), part.code);
        hn::StoreU(hn::OrAnd(hn::Min(code, limit), part.signs, bytes(0x80)), DU8(), payload);
    }
    static HWY_INLINE bool all_normal(VU8 exponent) {
        const DI8 d;
        return hn::AllTrue(d, hn::Gt(hn::BitCast(d, exponent), hn::Set(d, int8_t{kIsBf16 ? 0 : (1 << kBits) - 1})));
    }

    /// False where a code is subnormal.
    template <size_t... P>
    HWY_INLINE bool encode_parts(std::index_sequence<P...>, const Prepared& prepared, const uint8_t* x,
                                 uint8_t* payload) const {
        const VU8 most = bytes(limit());
        VU8 least = bytes(0x7F);
        (encode_part(prepared.upper[P], spread<P>(prepared.move), x + 2 * kPart * P, most, payload + kPart * P, least), ...);
        return all_normal(least);
    }
    static HWY_INLINE void encode_part(VU8 upper, VU8 move, const uint8_t* x, VU8 limit, uint8_t* payload, VU8& least) {
        const DI8 d;
        const Part part = part_of(upper, move, x);
        // An f16 becomes no subnormal E5M2: in a block that fits no exponent is lowered.
        if constexpr (kIsBf16 || kIsE4M3) {
            least = hn::BitCast(DU8(), hn::Min(hn::BitCast(d, least), hn::BitCast(d, part.exponent)));
        }
        store_part(part, limit, payload);
    }

    /// A bit for each part in which a token or its code is subnormal. The others are right, those without 0 since encode_parts.
    template <size_t... P>
    HWY_INLINE uint32_t encode_parts_with_zeros(std::index_sequence<P...>, const Prepared& prepared, const uint8_t* x,
                                                uint8_t* payload) const {
        const VU8 most = bytes(limit());
        uint32_t wrong = 0;
        ((wrong |=
          encode_part_with_zeros(prepared.upper[P], spread<P>(prepared.move), x + 2 * kPart * P, most, payload + kPart * P)
              ? 0
              : 1U << P),
         ...);
        return wrong;
    }
    static HWY_INLINE bool encode_part_with_zeros(VU8 upper, VU8 move, const uint8_t* x, VU8 limit, uint8_t* payload) {
        const DU8 d;
        const VU8 below = bytes((1 << kBelow) - 1);
        Part part = part_of(upper, move, x);
        if (all_normal(part.exponent) && (kIsBf16 || hn::AllTrue(d, hn::Gt(part.upper, below)))) return true;
        const auto zero = hn::Eq(hn::Or(part.upper, part.lower), hn::Zero(d));
        part.code = hn::IfThenZeroElse(zero, part.code);
        store_part(part, limit, payload);
        if (!all_normal(hn::IfThenElse(zero, bytes(0x7F), part.exponent))) return false;
        return kIsBf16 || hn::AllTrue(d, hn::Gt(hn::IfThenElse(zero, bytes(0x7F), part.upper), below));
    }

    void encode_by_f32(const Prepared& prepared, size_t b, const uint8_t* x, uint8_t* payload) const {
        uint8_t& scale = prepared.scales[b];
        bool finite = true;
        if (!prepared.fits || scale <= kDoubtful) {
            const uint16_t largest = largest_magnitude<32>(x + 64 * b);
            finite = largest < Token::infinity;
            scale = finite ? mx_scale<Grid>(Token::widen(largest), rules.mx_rule) : uint8_t{255};
        }
        encode_block(finite ? power_of_two(127 - scale) : kNan, limit(), x + 64 * b, payload + 32 * b);
    }

    static HWY_INLINE void encode_block(float factor, uint8_t limit, const uint8_t* x, uint8_t* payload) {
        if (factor != factor) {
            std::memset(payload, Grid::nan, 32);
            return;
        }
        for (size_t c = 0; c < 32; c += kLanes) {
            store_grid_codes<Grid>(hn::Mul(load_tokens(Token(), x + 2 * c), hn::Set(DF(), factor)), limit, payload + c);
        }
    }
};

// ---- Formats with one f32 scale per 128 columns

/// The scale of a block by its `scale_of(amax)`, NaN where the block holds NaN or Inf.
template <class Token, class Format>
HWY_INLINE float prepare_block128(const Format& format, const uint8_t* x, uint8_t* scales) {
    const uint16_t largest = largest_magnitude<kChunk>(x);
    const float scale = largest >= Token::infinity ? kNan : format.scale_of(Token::widen(largest));
    store(scales, 0, scale);
    return scale;
}

template <class Token>
struct Fp8Block128 {
    static constexpr size_t columns = 128, scale_bytes = 4;
    using Prepared = float;
    RowFormat rules;

    float scale_of(float amax) const { return fp8_scale(amax, rules.fp8_scale); }
    HWY_INLINE void prepare(const uint8_t* x, uint8_t* scales, float& scale) const {
        scale = prepare_block128<Token>(*this, x, scales);
    }
    HWY_INLINE void encode(float scale, const uint8_t* x, uint8_t* payload) const {
        if (scale != scale) {
            std::memset(payload, E4M3::nan, columns);
            return;
        }
        SY_UNROLL
        for (size_t c = 0; c < columns; c += kLanes) {
            const VF quotient = hn::Div(load_tokens(Token(), x + 2 * c), hn::Set(DF(), scale));
            store_grid_codes<E4M3>(quotient, E4M3::largest, payload + c);
        }
    }
    HWY_INLINE void decode(const uint8_t* payload, const uint8_t* scales, uint8_t* out) const {
        const VF scale = hn::Set(DF(), load<float>(scales, 0));
        for (size_t c = 0; c < columns; c += kLanes) {
            store_f32(canonical_nan(hn::Mul(load_grid_values(E4M3(), payload + c), scale)), out + 4 * c);
        }
    }
};

/// value = token(q * s). A NaN scale must be canonical: see round_to.
template <class Token>
HWY_INLINE VF int8_value(Token token, VF q, VF s) {
    return round_to(token, hn::Mul(q, s));
}

template <class Token>
struct Int8Block128 {
    static constexpr size_t columns = 128, scale_bytes = 4;
    using Prepared = float;

    float scale_of(float amax) const { return int8_scale(amax); }
    HWY_INLINE void prepare(const uint8_t* x, uint8_t* scales, float& scale) const {
        scale = prepare_block128<Token>(*this, x, scales);
    }
    HWY_INLINE void encode(float scale, const uint8_t* x, uint8_t* payload) const {
        if (scale != scale) {
            std::memset(payload, 0, columns);
            return;
        }
        SY_UNROLL
        for (size_t c = 0; c < columns; c += kLanes) {
            store_ints(to_11_bits(hn::Div(load_tokens(Token(), x + 2 * c), hn::Set(DF(), scale))), payload + c);
        }
    }
    HWY_INLINE void decode(const uint8_t* payload, const uint8_t* scales, uint8_t* out) const {
        const VF scale = hn::Set(DF(), canonical(load<float>(scales, 0)));
        for (size_t c = 0; c < columns; c += kLanes) {
            store_f32(canonical_nan(int8_value(Token(), load_ints(payload + c), scale)), out + 4 * c);
        }
    }
};

// ---- int8_token: the scale is the row's, so it is found before the first chunk

template <class Token>
struct Int8Token {
    static constexpr size_t columns = 128, scale_bytes = 0;
    struct Prepared {};
    float scale;  // NaN where the row holds NaN or Inf

    /// The scale of a row; its tail is looked at in a padded copy.
    static HWY_INLINE float scale_of(const uint8_t* x, size_t hidden) {
        const size_t whole = hidden - hidden % columns;
        uint8_t padded[2 * columns] = {};
        if (whole != hidden) std::memcpy(padded, x + 2 * whole, 2 * (hidden - whole));
        VU16 largest[2] = {hn::Zero(DU16()), hn::Zero(DU16())};
        for (size_t c = 0; c < whole + columns; c += columns) {
            const uint8_t* from = c == whole ? padded : x + 2 * c;
            SY_UNROLL
            for (size_t v = 0; v < columns / (2 * kLanes); ++v) {
                largest[v % 2] = max_magnitude(largest[v % 2], magnitudes(from + 4 * kLanes * v));
            }
        }
        const uint16_t all = largest_lane(max_magnitude(largest[0], largest[1]));
        return all >= Token::infinity ? kNan : int8_scale(Token::widen(all));
    }

    HWY_INLINE void prepare(const uint8_t*, uint8_t*, Prepared&) const {}
    HWY_INLINE void encode(Prepared, const uint8_t* x, uint8_t* payload) const {
        if (scale != scale) {
            std::memset(payload, 0, columns);
            return;
        }
        SY_UNROLL
        for (size_t c = 0; c < columns; c += kLanes) {
            store_ints(hn::Div(load_tokens(Token(), x + 2 * c), hn::Set(DF(), scale)), payload + c);
        }
    }
    HWY_INLINE void decode(const uint8_t* payload, const uint8_t*, uint8_t* out) const {
        for (size_t c = 0; c < columns; c += kLanes) {
            store_f32(canonical_nan(hn::Mul(load_ints(payload + c), hn::Set(DF(), scale))), out + 4 * c);
        }
    }
};

// ---- int8_block8: kLanes blocks at a time, their scales in one vector

/// Where the scale of each column of f32 vector V of 8 lies: `parts` in the order of part_maxima, else by column.
template <size_t V>
struct ScaleIndex {
    int32_t parts[kLanes], columns[kLanes];
    constexpr ScaleIndex() : parts(), columns() {
        for (size_t i = 0; i < kLanes; ++i) {
            parts[i] = static_cast<int32_t>((V % 2 * kLanes + i) / 8 * 4 + V / 2);
            columns[i] = static_cast<int32_t>((V * kLanes + i) / 8);
        }
    }
};
template <size_t V>
HWY_INLINE VF spread_parts(VF scales) {
    static constexpr ScaleIndex<V> index;
    if constexpr (kLanes == 4)
        return hn::Broadcast<V / 2>(scales);
    else
        return hn::TableLookupLanes(scales, hn::SetTableIndices(DF(), index.parts));
}
template <size_t V>
HWY_INLINE VF spread_columns(VF scales) {
    static constexpr ScaleIndex<V> index;
    if constexpr (kLanes == 4)
        return hn::Broadcast<V / 2>(scales);
    else
        return hn::TableLookupLanes(scales, hn::SetTableIndices(DF(), index.columns));
}

/// Scales from the order of part_maxima to that of columns.
struct ColumnOrder {
    int32_t of[kLanes];
    constexpr ColumnOrder() : of() {
        for (size_t b = 0; b < kLanes; ++b) of[b] = static_cast<int32_t>(b % (kLanes / 4) * 4 + b / (kLanes / 4));
    }
};
HWY_INLINE VF parts_to_columns(VF scales) {
    static constexpr ColumnOrder order;
    if constexpr (kLanes == 4)
        return scales;
    else
        return hn::TableLookupLanes(scales, hn::SetTableIndices(DF(), order.of));
}

/// amax / 127 of kLanes blocks, 1 where that is 0, in the order of part_maxima; not finite where the block is not.
template <class Token>
HWY_INLINE VF block8_scales(Token token, const uint8_t* x) {
    constexpr size_t kBytes = 4 * kLanes;
    const VF amax = widen_maxima(
        token, part_maxima(magnitudes(x), magnitudes(x + kBytes), magnitudes(x + 2 * kBytes), magnitudes(x + 3 * kBytes)));
    const VF scale = hn::Div(amax, hn::Set(DF(), 127.0F));
    return hn::IfThenElse(hn::Eq(scale, hn::Zero(DF())), hn::Set(DF(), 1.0F), scale);
}

template <class Token>
struct Int8Block8 {
    static constexpr size_t columns = 8 * kLanes, scale_bytes = 2 * kLanes;
    using Prepared = VF;

    HWY_INLINE void prepare(const uint8_t* x, uint8_t* scales, VF& scale) const {
        scale = block8_scales(Token(), x);
        const VF finite_or_nan = hn::IfThenElse(hn::Lt(scale, hn::Inf(DF())), scale, hn::Set(DF(), kNan));
        store_half(narrow(Token(), parts_to_columns(finite_or_nan)), scales);
    }
    HWY_INLINE void encode(VF scale, const uint8_t* x, uint8_t* payload) const {
        encode_vectors(std::make_index_sequence<8>(), x, scale, payload);
    }
    HWY_INLINE void decode(const uint8_t* payload, const uint8_t* scales, uint8_t* out) const {
        decode_vectors(std::make_index_sequence<8>(), payload, widen(Token(), load_half(scales)), out);
    }

 private:
    template <size_t... V>
    static HWY_INLINE void encode_vectors(std::index_sequence<V...>, const uint8_t* x, VF scale, uint8_t* payload) {
        (encode_vector(x + 2 * kLanes * V, spread_parts<V>(scale), payload + kLanes * V), ...);
    }
    static HWY_INLINE void encode_vector(const uint8_t* x, VF scale, uint8_t* payload) {
        const VF quotient = hn::Div(load_tokens(Token(), x), scale);
        store_ints(to_11_bits(hn::IfThenZeroElse(hn::IsNaN(quotient), quotient)), payload);  // finite / Inf is 0 as well
    }
    template <size_t... V>
    static HWY_INLINE void decode_vectors(std::index_sequence<V...>, const uint8_t* payload, VF scale, uint8_t* out) {
        (store_f32(canonical_nan(int8_value(Token(), load_ints(payload + kLanes * V), spread_columns<V>(scale))),
                   out + 4 * kLanes * V),
         ...);
    }
};

// ---- Rows of combine: the values of a few vectors of columns, `vectors` of them

template <class Token>
struct PlainRow {
    static constexpr size_t vectors = 8, element_bytes = sizeof(typename Token::Bits), block = 1, scale_bytes = 0;
    const uint8_t* x;

    PlainRow() = default;
    HWY_INLINE PlainRow(const uint8_t* elements, const uint8_t*) : x(elements) {}
    template <size_t V>
    HWY_INLINE VF value() const {
        return load_tokens(Token(), x + element_bytes * kLanes * V);
    }
};

/// int8_block8 on the way there and back, in registers. A block that is not finite has a scale that makes every value NaN.
template <class Token>
struct Block8RoundTrip {
    static constexpr size_t vectors = 8, element_bytes = 2, block = 8, scale_bytes = 0;
    const uint8_t* x;
    VF scale, wire_scale;

    Block8RoundTrip() = default;
    HWY_INLINE Block8RoundTrip(const uint8_t* elements, const uint8_t*)
        : x(elements), scale(block8_scales(Token(), elements)), wire_scale(round_to(Token(), scale)) {}
    template <size_t V>
    HWY_INLINE VF value() const {
        const VF quotient = hn::Div(load_tokens(Token(), x + 2 * kLanes * V), spread_parts<V>(scale));
        return int8_value(Token(), nearest(to_11_bits(quotient)), spread_parts<V>(wire_scale));
    }
    /// round_to_integer of numbers.hpp. It may give -0 where the integer is 0: a sum that began at +0 cannot tell.
    static HWY_INLINE VF nearest(VF v) {
        const VF big = hn::Set(DF(), 12582912.0F);
        return hn::Sub(hn::Add(v, big), big);
    }
};

template <class Token>
struct Block8Row {
    static constexpr size_t vectors = 8, element_bytes = 1, block = 8, scale_bytes = 2;
    const uint8_t* payload;
    VF scale;

    Block8Row() = default;
    HWY_INLINE Block8Row(const uint8_t* elements, const uint8_t* scales)
        : payload(elements), scale(widen(Token(), load_half(scales))) {}
    template <size_t V>
    HWY_INLINE VF value() const {
        return int8_value(Token(), load_ints(payload + kLanes * V), spread_columns<V>(scale));
    }
};

template <class Token>
struct Block128RoundTrip {
    static constexpr size_t vectors = kChunk / kLanes, element_bytes = 2, block = 128, scale_bytes = 0;
    const uint8_t* x;
    VF scale;

    Block128RoundTrip() = default;
    HWY_INLINE Block128RoundTrip(const uint8_t* elements, const uint8_t*) : x(elements), scale(scale_of(elements)) {}
    template <size_t V>
    HWY_INLINE VF value() const {
        const VF quotient = hn::Div(load_tokens(Token(), x + 2 * kLanes * V), scale);
        return int8_value(Token(), Block8RoundTrip<Token>::nearest(to_11_bits(quotient)), scale);
    }
    static HWY_INLINE VF scale_of(const uint8_t* x) {
        const uint16_t largest = largest_magnitude<kChunk>(x);
        return hn::Set(DF(), largest >= Token::infinity ? kNan : int8_scale(Token::widen(largest)));
    }
};

template <class Token>
struct Block128Row {
    static constexpr size_t vectors = kChunk / kLanes, element_bytes = 1, block = 128, scale_bytes = 4;
    const uint8_t* payload;
    VF scale;

    Block128Row() = default;
    HWY_INLINE Block128Row(const uint8_t* elements, const uint8_t* scales)
        : payload(elements), scale(hn::Set(DF(), canonical(load<float>(scales, 0)))) {}
    template <size_t V>
    HWY_INLINE VF value() const {
        return int8_value(Token(), load_ints(payload + kLanes * V), scale);
    }
};

template <class Row, size_t... V>
HWY_INLINE void add_row(std::index_sequence<V...>, const Row& row, VF weight, VF* acc) {
    ((acc[V] = hn::Add(acc[V], hn::Mul(weight, row.template value<V>()))), ...);
}

/// acc += weight * row, row after row.
template <class Row>
SY_NOINLINE void add_rows(const Row* rows, const float* weights, size_t count, VF* acc) {
    VF sum[Row::vectors];
    SY_UNROLL
    for (size_t v = 0; v < Row::vectors; ++v) sum[v] = acc[v];
    for (size_t i = 0; i < count; ++i) {
        add_row(std::make_index_sequence<Row::vectors>(), rows[i], hn::Set(DF(), weights[i]), sum);
    }
    SY_UNROLL
    for (size_t v = 0; v < Row::vectors; ++v) acc[v] = sum[v];
}

/// Adds every used row to columns [first, first + count); count < columns only in the last group, which is padded.
template <class Row, bool full>
HWY_INLINE void add_slots(const CombineInput& input, size_t first, size_t count, VF* acc) {
    constexpr size_t kColumns = Row::vectors * kLanes;
    constexpr size_t kScales = Row::scale_bytes == 0 ? 0 : kColumns / Row::block * Row::scale_bytes;
    constexpr size_t kBatch = full ? 8 : 1;  // rows that are built before the first is added; a padded one has one buffer
    uint8_t padded[full ? 1 : kColumns * Row::element_bytes];
    uint8_t padded_scales[full || kScales == 0 ? 1 : kScales];
    Row rows[kBatch];
    float weights[kBatch];
    size_t built = 0;
    for (int64_t k = 0; k < input.topk; ++k) {
        if (input.rows[k] == nullptr) continue;
        const uint8_t* elements = static_cast<const uint8_t*>(input.rows[k]) + Row::element_bytes * first;
        const uint8_t* scales = nullptr;
        if constexpr (kScales != 0) {
            scales = static_cast<const uint8_t*>(input.scales[k]) + first / Row::block * Row::scale_bytes;
        }
        // K rows are more streams than the processor follows by itself.
        if constexpr (full) {
            constexpr size_t ahead = 2048;
            for (size_t line = 0; line < kColumns * Row::element_bytes; line += 64) hwy::Prefetch(elements + ahead + line);
        }
        if constexpr (!full) {
            std::memset(padded, 0, sizeof padded);
            std::memcpy(padded, elements, count * Row::element_bytes);
            elements = padded;
            if constexpr (kScales != 0) {
                std::memset(padded_scales, 0, sizeof padded_scales);
                std::memcpy(padded_scales, scales, (count + Row::block - 1) / Row::block * Row::scale_bytes);
                scales = padded_scales;
            }
        }
        rows[built] = Row(elements, scales);
        weights[built] = input.weights != nullptr ? load<float>(input.weights, k) : 1.0F;
        if (++built == kBatch) {
            add_rows(rows, weights, built, acc);
            built = 0;
        }
    }
    if (built != 0) add_rows(rows, weights, built, acc);
}

/// Adds `shared`, rounds, and writes a group of whole vectors.
template <class Token, size_t vectors>
HWY_INLINE void finish(const VF* acc, const uint8_t* shared, uint8_t* out) {
    constexpr size_t kBytes = sizeof(typename Token::Bits) * kLanes;
    SY_UNROLL
    for (size_t v = 0; v < vectors; ++v) {
        const VF sum = shared != nullptr ? hn::Add(acc[v], load_tokens(Token(), shared + kBytes * v)) : acc[v];
        store_tokens(Token(), sum, out + kBytes * v);
    }
}

template <class Token, class Row>
SY_NOINLINE void combine_rows(const CombineInput& input, size_t hidden, uint8_t* out) {
    constexpr size_t kColumns = Row::vectors * kLanes, kBytes = sizeof(typename Token::Bits);
    const auto* shared = static_cast<const uint8_t*>(input.shared);
    size_t first = 0;
    for (; first + kColumns <= hidden; first += kColumns) {
        VF acc[Row::vectors];
        SY_UNROLL
        for (size_t v = 0; v < Row::vectors; ++v) acc[v] = hn::Zero(DF());
        add_slots<Row, true>(input, first, kColumns, acc);
        finish<Token, Row::vectors>(acc, shared != nullptr ? shared + kBytes * first : nullptr, out + kBytes * first);
    }
    if (first == hidden) return;
    const size_t count = hidden - first;
    VF acc[Row::vectors];
    for (size_t v = 0; v < Row::vectors; ++v) acc[v] = hn::Zero(DF());
    add_slots<Row, false>(input, first, count, acc);
    uint8_t padded_shared[kColumns * kBytes] = {}, padded_out[kColumns * kBytes];
    if (shared != nullptr) std::memcpy(padded_shared, shared + kBytes * first, kBytes * count);
    finish<Token, Row::vectors>(acc, shared != nullptr ? padded_shared : nullptr, padded_out);
    std::memcpy(out + kBytes * first, padded_out, kBytes * count);
}

// ---- Rows

/// `count` chunks that are prepared. A bit for each that has to be encoded again, in another way. A function of its own, with
/// no call in it, so that every constant stays in a register.
template <class Chunk>
SY_NOINLINE uint32_t encode_batch(const Chunk& chunk, const typename Chunk::Prepared* prepared, size_t count, const uint8_t* x,
                                  uint8_t* payload) {
    uint32_t again = 0;
    for (size_t i = 0; i < count; ++i, x += 2 * Chunk::columns, payload += Chunk::columns) {
        if constexpr (requires { chunk.encode_again(prepared[i], x, payload); }) {
            again |= static_cast<uint32_t>(!chunk.encode(prepared[i], x, payload)) << i;
        } else {
            chunk.encode(prepared[i], x, payload);
        }
    }
    return again;
}

/// `count` whole chunks.
template <class Chunk>
SY_NOINLINE void encode_chunks(const Chunk& chunk, const uint8_t* x, size_t count, uint8_t* payload, uint8_t* scales) {
    constexpr size_t kBytes = 2 * Chunk::columns, kBatch = Chunk::columns > kChunk ? 2 : 4;
    typename Chunk::Prepared prepared[kBatch];
    for (size_t done = 0; done < count; done += kBatch) {
        const size_t batch = std::min(kBatch, count - done);
        for (size_t i = 0; i < batch; ++i) {
            const size_t n = done + i;
            // The processor's own prefetch loses the row at every batch; twice, so that one is always on its way. Behind the
            // end of the row it reads nothing: a prefetch never faults.
            for (size_t line = 0; line < kBytes; line += 64) {
                hwy::Prefetch(x + kBytes * (n + 4) + line);
                hwy::Prefetch(x + kBytes * (n + 8) + line);
            }
            chunk.prepare(x + kBytes * n, scales + Chunk::scale_bytes * n, prepared[i]);
        }
        uint32_t again = encode_batch(chunk, prepared, batch, x + kBytes * done, payload + Chunk::columns * done);
        if constexpr (requires { chunk.encode_again(prepared[0], x, payload); }) {
            for (size_t n = done; again != 0; ++n, again >>= 1) {
                if ((again & 1) != 0) chunk.encode_again(prepared[n - done], x + kBytes * n, payload + Chunk::columns * n);
            }
        }
    }
}
template <class Chunk>
SY_NOINLINE void decode_chunks(const Chunk& chunk, const uint8_t* payload, const uint8_t* scales, size_t count, uint8_t* out) {
    for (size_t n = 0; n < count; ++n) {
        chunk.decode(payload + Chunk::columns * n, scales + Chunk::scale_bytes * n, out + 4 * Chunk::columns * n);
    }
}

/// A row: whole chunks, then the tail as one chunk padded with zeros. `scale_bytes` is the row's.
template <class Chunk>
void encode_row(const Chunk& chunk, const uint8_t* x, size_t hidden, uint8_t* payload, uint8_t* scales, size_t scale_bytes) {
    constexpr size_t kColumns = Chunk::columns;
    const size_t whole = hidden / kColumns, c = whole * kColumns;
    encode_chunks(chunk, x, whole, payload, scales);
    if (c == hidden) return;
    uint8_t padded[2 * kColumns] = {}, padded_payload[kColumns], padded_scales[Chunk::scale_bytes + 1];
    std::memcpy(padded, x + 2 * c, 2 * (hidden - c));
    encode_chunks(chunk, padded, 1, padded_payload, padded_scales);
    std::memcpy(payload + c, padded_payload, hidden - c);
    // mx: together with the byte that makes their count even, which is a 0 like those of every block of padding.
    const size_t written = whole * Chunk::scale_bytes;
    if constexpr (Chunk::scale_bytes != 0) std::memcpy(scales + written, padded_scales, scale_bytes - written);
}
template <class Chunk>
void decode_row(const Chunk& chunk, const uint8_t* payload, const uint8_t* scales, size_t scale_bytes, size_t hidden,
                uint8_t* out) {
    constexpr size_t kColumns = Chunk::columns;
    const size_t whole = hidden / kColumns, c = whole * kColumns;
    decode_chunks(chunk, payload, scales, whole, out);
    if (c == hidden) return;
    uint8_t padded_payload[kColumns] = {}, padded_scales[Chunk::scale_bytes + 1] = {}, padded_out[4 * kColumns];
    std::memcpy(padded_payload, payload + c, hidden - c);
    const size_t read = whole * Chunk::scale_bytes;
    if constexpr (Chunk::scale_bytes != 0) std::memcpy(padded_scales, scales + read, scale_bytes - read);
    decode_chunks(chunk, padded_payload, padded_scales, 1, padded_out);
    std::memcpy(out + 4 * c, padded_out, 4 * (hidden - c));
}

/// A row of tokens as f32; its tail is read as one padded vector.
template <class Token>
void decode_plain(const uint8_t* x, size_t hidden, uint8_t* out) {
    constexpr size_t kBytes = sizeof(typename Token::Bits);
    size_t c = 0;
    for (; c + kLanes <= hidden; c += kLanes) store_f32(canonical_nan(load_tokens(Token(), x + kBytes * c)), out + 4 * c);
    if (c == hidden) return;
    uint8_t padded[kBytes * kLanes] = {}, padded_out[4 * kLanes];
    std::memcpy(padded, x + kBytes * c, kBytes * (hidden - c));
    store_f32(canonical_nan(load_tokens(Token(), padded)), padded_out);
    std::memcpy(out + 4 * c, padded_out, 4 * (hidden - c));
}

/// Formats and tokens encode and decode below; the rest is the scalar set's.
inline bool is_vectorised(const RowFormat& format, TokenType token) {
    if (token == TokenType::f32) return false;
    switch (format.format) {
        case Format::int8_token:
        case Format::mxfp8_e5m2:
        case Format::mxfp8_e4m3:
        case Format::fp8_e4m3_block128:
        case Format::int8_block8:
        case Format::int8_block128: return true;
        default: return false;  // none, which needs no encoder, and every format that has only its definition so far
    }
}

template <class Token>
void encode_tokens(const RowFormat& format, const uint8_t* x, size_t hidden, uint8_t* payload, uint8_t* scales) {
    const auto scale_bytes =
        static_cast<size_t>(layout::row_layout(format.format, Token::type, static_cast<int64_t>(hidden)).scale_bytes());
    switch (format.format) {
        case Format::none: return;
        case Format::int8_token: {
            const Int8Token<Token> chunk{Int8Token<Token>::scale_of(x, hidden)};
            store(scales, 0, chunk.scale);
            return encode_row(chunk, x, hidden, payload, scales, 0);
        }
        case Format::mxfp8_e5m2: return encode_row(Mx<Token, E5M2>{format}, x, hidden, payload, scales, scale_bytes);
        case Format::mxfp8_e4m3: return encode_row(Mx<Token, E4M3>{format}, x, hidden, payload, scales, scale_bytes);
        case Format::fp8_e4m3_block128: return encode_row(Fp8Block128<Token>{format}, x, hidden, payload, scales, scale_bytes);
        case Format::int8_block8: return encode_row(Int8Block8<Token>{}, x, hidden, payload, scales, scale_bytes);
        case Format::int8_block128: return encode_row(Int8Block128<Token>{}, x, hidden, payload, scales, scale_bytes);
    }
}

template <class Token>
void decode_tokens(const RowFormat& format, const uint8_t* payload, const uint8_t* scales, size_t hidden, uint8_t* out) {
    const auto scale_bytes =
        static_cast<size_t>(layout::row_layout(format.format, Token::type, static_cast<int64_t>(hidden)).scale_bytes());
    switch (format.format) {
        case Format::none: return decode_plain<Token>(payload, hidden, out);
        case Format::int8_token: return decode_row(Int8Token<Token>{load<float>(scales, 0)}, payload, scales, 0, hidden, out);
        case Format::mxfp8_e5m2: return decode_row(Mx<Token, E5M2>{format}, payload, scales, scale_bytes, hidden, out);
        case Format::mxfp8_e4m3: return decode_row(Mx<Token, E4M3>{format}, payload, scales, scale_bytes, hidden, out);
        case Format::fp8_e4m3_block128:
            return decode_row(Fp8Block128<Token>{format}, payload, scales, scale_bytes, hidden, out);
        case Format::int8_block8: return decode_row(Int8Block8<Token>{}, payload, scales, scale_bytes, hidden, out);
        case Format::int8_block128: return decode_row(Int8Block128<Token>{}, payload, scales, scale_bytes, hidden, out);
    }
}

template <class Token>
bool combine_tokens(const CombineInput& input, size_t hidden, uint8_t* out) {
    switch (input.wire.format) {
        case Format::none: combine_rows<Token, PlainRow<Token>>(input, hidden, out); return true;
        case Format::int8_block8:
            if (input.encoded)
                combine_rows<Token, Block8Row<Token>>(input, hidden, out);
            else
                combine_rows<Token, Block8RoundTrip<Token>>(input, hidden, out);
            return true;
        case Format::int8_block128:
            if (input.encoded)
                combine_rows<Token, Block128Row<Token>>(input, hidden, out);
            else
                combine_rows<Token, Block128RoundTrip<Token>>(input, hidden, out);
            return true;
        default: return false;
    }
}

// ---- The table

SY_NOINLINE void encode_in_mode(const RowFormat& format, TokenType token, const void* x, int64_t hidden, void* payload,
                                void* scales) {
    const auto* from = static_cast<const uint8_t*>(x);
    auto* to = static_cast<uint8_t*>(payload);
    auto* to_scales = static_cast<uint8_t*>(scales);
    const auto columns = static_cast<size_t>(hidden);
    if (token == TokenType::f16)
        encode_tokens<F16>(format, from, columns, to, to_scales);
    else
        encode_tokens<Bf16>(format, from, columns, to, to_scales);
}

SY_NOINLINE void decode_in_mode(const RowFormat& format, TokenType token, const void* payload, const void* scales,
                                int64_t hidden, float* out) {
    const auto* from = static_cast<const uint8_t*>(payload);
    const auto* from_scales = static_cast<const uint8_t*>(scales);
    auto* to = reinterpret_cast<uint8_t*>(out);
    const auto columns = static_cast<size_t>(hidden);
    if (token == TokenType::f16)
        decode_tokens<F16>(format, from, from_scales, columns, to);
    else if (token == TokenType::f32)
        decode_plain<F32>(from, columns, to);
    else
        decode_tokens<Bf16>(format, from, from_scales, columns, to);
}

/// False where the wire format has no vector version.
SY_NOINLINE bool combine_in_mode(const CombineInput& input, int64_t hidden, void* out) {
    auto* to = static_cast<uint8_t*>(out);
    const auto columns = static_cast<size_t>(hidden);
    switch (input.token) {
        case TokenType::f16: return combine_tokens<F16>(input, columns, to);
        case TokenType::bf16: return combine_tokens<Bf16>(input, columns, to);
        case TokenType::f32:
            if (input.wire.format != Format::none) return false;
            combine_rows<F32, PlainRow<F32>>(input, columns, to);
            return true;
    }
    return false;
}

inline void encode(const RowFormat& format, TokenType token, const void* x, int64_t hidden, void* payload, void* scales) {
    if (!is_vectorised(format, token)) return scalar_kernels().encode(format, token, x, hidden, payload, scales);
    const FloatMode mode;
    encode_in_mode(format, token, x, hidden, payload, scales);
}

inline void decode(const RowFormat& format, TokenType token, const void* payload, const void* scales, int64_t hidden,
                   float* out) {
    if (format.format != Format::none && !is_vectorised(format, token))
        return scalar_kernels().decode(format, token, payload, scales, hidden, out);
    const FloatMode mode;
    decode_in_mode(format, token, payload, scales, hidden, out);
}

inline void combine(const CombineInput& input, int64_t hidden, void* out) {
    const FloatMode mode;
    if (!combine_in_mode(input, hidden, out)) scalar_kernels().combine(input, hidden, out);
}

/// Whole 64-byte lines go past the caches; a line that holds a byte of anybody else's is written with ordinary stores.
inline void stream(void* to, const void* from, size_t bytes) {
    constexpr size_t kLine = 64;
    auto* target = static_cast<uint8_t*>(to);
    const auto* source = static_cast<const uint8_t*>(from);
    const size_t head = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
    if (head != 0) std::memcpy(target, source, head);
    size_t done = head;
    for (; done + kLine <= bytes; done += kLine) {
        SY_UNROLL
        for (size_t part = 0; part < kLine; part += 4 * kLanes) {
            hn::Stream(hn::LoadU(DU8(), source + done + part), DU8(), target + done + part);
        }
    }
    if (done != bytes) std::memcpy(target + done, source + done, bytes - done);
}

inline void fence() {
    hwy::FlushStream();
}

/// This instruction set's kernels under the name it has in the options.
template <Simd simd>
const Kernels& kernels(const char* name) {
    static const Kernels table{simd, name, encode, decode, combine, scalar_kernels().copy, stream, fence};
    return table;
}

}  // namespace switchyard::quant::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET
#endif  // include guard
