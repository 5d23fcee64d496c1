// The small numbers the formats are made of: token types, fp8 grids, and the scale of a block.
//
// Exact definitions on single values, used by quant_scalar.cpp for everything and by the vector kernels for what happens
// once per block. They rely on the mode that FloatMode sets.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "switchyard/types.hpp"

namespace switchyard::quant {

inline constexpr float kNan = std::bit_cast<float>(0x7FC00000U);  // the one NaN that is ever produced

inline float canonical(float value) {
    return value != value ? kNan : value;
}

/// Reads and writes a value where it lies; no alignment is assumed anywhere.
template <class T>
T load(const void* from, int64_t index) {
    T value;
    std::memcpy(&value, static_cast<const unsigned char*>(from) + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
}
template <class T>
void store(void* to, int64_t index, T value) {
    std::memcpy(static_cast<unsigned char*>(to) + index * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

/// 2^exponent for -149 ... 127, subnormals included.
inline float power_of_two(int exponent) {
    if (exponent >= -126) return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
    return std::bit_cast<float>(1U << (exponent + 149));
}

/// floor(log2 value) of a positive finite value, subnormals included.
inline int floor_log2(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if (bits >= 0x00800000U) return static_cast<int>(bits >> 23) - 127;
    return static_cast<int>(std::bit_width(bits)) - 150;
}

/// Nearest integer, ties to even, of |value| < 2^22: at 1.5 * 2^23 the distance of neighbouring floats is 1.
inline float round_to_integer(float value) {
    constexpr float kBig = 12582912.0F;
    return (value + kBig) - kBig;
}

// Token types. `infinity` and above, as magnitude bits, is Inf or NaN.

struct F16 {
    using Bits = uint16_t;
    static constexpr TokenType type = TokenType::f16;
    static constexpr Bits magnitude = 0x7FFF, infinity = 0x7C00, nan = 0x7E00;

    static float widen(Bits bits) {
        const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
        const uint32_t rest = bits & 0x7FFFU;
        if (rest > infinity) return kNan;
        if (rest == infinity) return std::bit_cast<float>(sign | 0x7F800000U);
        if (rest >= 0x0400U) return std::bit_cast<float>(sign | ((rest << 13) + (112U << 23)));
        const float value = static_cast<float>(rest) * power_of_two(-24);
        return sign != 0 ? -value : value;
    }

    static Bits narrow(float value) {
        const uint32_t bits = std::bit_cast<uint32_t>(value);
        const uint32_t sign = (bits >> 16) & 0x8000U;
        const uint32_t rest = bits & 0x7FFFFFFFU;
        if (rest > 0x7F800000U) return nan;
        if (rest >= 0x47800000U) return static_cast<Bits>(sign | infinity);  // 65536 and above
        if (rest < 0x38800000U) {
            // Below 2^-14 the step is 2^-24; the count of steps is the pattern, also when it rounds up to 0400.
            const float steps = round_to_integer(std::bit_cast<float>(rest) * power_of_two(24));
            return static_cast<Bits>(sign | static_cast<uint32_t>(steps));
        }
        const uint32_t tie = 0x0FFFU + ((rest >> 13) & 1U);
        return static_cast<Bits>(sign | ((rest - (112U << 23) + tie) >> 13));  // 65520 and above carry into infinity
    }
};

struct Bf16 {
    using Bits = uint16_t;
    static constexpr TokenType type = TokenType::bf16;
    static constexpr Bits magnitude = 0x7FFF, infinity = 0x7F80, nan = 0x7FC0;

    static float widen(Bits bits) { return canonical(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16)); }

    static Bits narrow(float value) {
        const uint32_t bits = std::bit_cast<uint32_t>(value);
        if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return nan;
        return static_cast<Bits>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
    }
};

struct F32 {
    using Bits = uint32_t;
    static constexpr TokenType type = TokenType::f32;
    static constexpr Bits magnitude = 0x7FFFFFFF, infinity = 0x7F800000, nan = 0x7FC00000;

    static float widen(Bits bits) { return canonical(std::bit_cast<float>(bits)); }
    static Bits narrow(float value) { return std::bit_cast<Bits>(canonical(value)); }
};

// fp8 grids. The largest finite value of both is 1.75 * 2^emax. Codes are without sign; the sign is bit 7.

struct E5M2 {
    static constexpr int mantissa_bits = 2, emax = 15, emin = -14;
    static constexpr uint8_t largest = 0x7B, infinity = 0x7C, nan = 0x7F;
    static float widen(uint8_t code) { return F16::widen(static_cast<uint16_t>(code << 8)); }
};

struct E4M3 {
    static constexpr int mantissa_bits = 3, emax = 8, emin = -6;
    static constexpr uint8_t largest = 0x7E, nan = 0x7F;
    static float widen(uint8_t code) {
        const int rest = code & 0x7F;
        if (rest == nan) return kNan;
        const int field = rest >> 3;
        const int significand = field != 0 ? 8 + (rest & 7) : rest;
        const float value = static_cast<float>(significand) * power_of_two((field != 0 ? field : 1) - 7 - 3);
        return (code & 0x80) != 0 ? -value : value;
    }
};

/// Rounds a finite value to the grid, ties to even, once; codes above `limit` become `limit`. The sign of zero is kept.
template <class Grid>
uint8_t round_to_grid(float value, uint8_t limit) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 24) & 0x80U;
    const float size = std::bit_cast<float>(bits & 0x7FFFFFFFU);
    if (size == 0) return static_cast<uint8_t>(sign);
    const int exponent = floor_log2(size) > Grid::emin ? floor_log2(size) : Grid::emin;
    if (exponent > Grid::emax) return static_cast<uint8_t>(sign | limit);
    // `steps` counts grid steps of this binade; a normal value has 2^mantissa_bits or more of them, so that adding one binade's
    // worth of codes per exponent gives the code: also for subnormals, and when rounding reaches the next binade.
    const float steps = round_to_integer(size * power_of_two(Grid::mantissa_bits - exponent));
    const int code = ((exponent - Grid::emin) << Grid::mantissa_bits) + static_cast<int>(steps);
    return static_cast<uint8_t>(sign | static_cast<uint32_t>(code < limit ? code : limit));
}

/// floor(log2 amax) - emax, or ceil(log2(amax / (1.75 * 2^emax))). amax > 0.
template <class Grid>
int shared_exponent(float amax, MxRule rule) {
    const int log2 = floor_log2(amax);
    const bool above = rule == MxRule::ceil && amax > 1.75F * power_of_two(log2);
    return log2 - Grid::emax + (above ? 1 : 0);
}

/// The e8m0 byte of an mx block.
template <class Grid>
uint8_t mx_scale(float amax, MxRule rule) {
    if (amax == 0) return 0;
    const int exponent = shared_exponent<Grid>(amax, rule);
    return static_cast<uint8_t>(exponent < -127 ? 0 : exponent + 127);  // at most 247: never above 127
}

/// The f32 scale of an fp8_e4m3_block128 block.
inline float fp8_scale(float amax, Fp8Scale kind) {
    if (kind == Fp8Scale::ue8m0 && amax != 0) {
        const int exponent = shared_exponent<E4M3>(amax, MxRule::ceil);
        return power_of_two(exponent < -149 ? -149 : exponent);
    }
    const float scale = amax / 448.0F;
    return scale == 0 ? 1.0F : scale;
}

/// The f32 scale of every int8 format.
inline float int8_scale(float amax) {
    const float scale = amax / 127.0F;
    return scale == 0 ? 1.0F : scale;
}

}  // namespace switchyard::quant
