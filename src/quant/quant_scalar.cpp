// The meaning of every number format, one value at a time. Where another kernel set differs from this, that set is wrong.
//
// A format is one struct (a codec): its block, the type of its scale, and three functions, `scale`, `element` and `value`.
// The rows below are the same three loops for all of them.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "quant/float_mode.hpp"
#include "quant/numbers.hpp"
#include "quant/quant.hpp"

namespace switchyard::quant {
namespace {

/// mxfp8_e5m2, mxfp8_e4m3: OCP Microscaling v1.0. The scale is an e8m0 byte.
template <class Grid>
struct Mx {
    using Scale = uint8_t;
    static constexpr int64_t block = 32;
    static constexpr Scale nan_scale = 255;
    static constexpr uint8_t nan_element = Grid::nan;
    RowFormat rules;

    Scale scale(float amax) const { return mx_scale<Grid>(amax, rules.mx_rule); }
    uint8_t element(float x, Scale s) const {
        // Exact, except where the result is below 2^-126 and rounds to 0 in any case.
        return round_to_grid<Grid>(x * power_of_two(127 - s), limit());
    }
    float value(uint8_t code, Scale s) const {
        return s == nan_scale ? kNan : canonical(Grid::widen(code) * power_of_two(s - 127));
    }

 private:
    uint8_t limit() const {
        if constexpr (requires { Grid::infinity; })
            return rules.mx_overflow == MxOverflow::inf ? Grid::infinity : Grid::largest;
        return Grid::largest;
    }
};

struct Fp8Block128 {
    using Scale = float;
    static constexpr int64_t block = 128;
    static constexpr Scale nan_scale = kNan;
    static constexpr uint8_t nan_element = E4M3::nan;
    RowFormat rules;

    Scale scale(float amax) const { return fp8_scale(amax, rules.fp8_scale); }
    uint8_t element(float x, Scale s) const { return round_to_grid<E4M3>(x / s, E4M3::largest); }
    float value(uint8_t code, Scale s) const { return canonical(E4M3::widen(code) * s); }
};

struct Int8Token {
    using Scale = float;
    static constexpr int64_t block = INT64_MAX;  // the whole row
    static constexpr Scale nan_scale = kNan;
    static constexpr uint8_t nan_element = 0;
    RowFormat rules;

    Scale scale(float amax) const { return int8_scale(amax); }
    // |x/s| is below 127.13, even where s is subnormal, so that no clamp is needed.
    uint8_t element(float x, Scale s) const { return static_cast<uint8_t>(static_cast<int8_t>(round_to_integer(x / s))); }
    float value(uint8_t code, Scale s) const { return canonical(static_cast<float>(static_cast<int8_t>(code)) * s); }
};

/// int8_block8 (Wire = Token) and int8_block128 (Wire = F32): the scale travels as a Wire, the value is a Token.
template <class Token, class Wire, int64_t Block>
struct Int8Block {
    using Scale = typename Wire::Bits;
    static constexpr int64_t block = Block;
    static constexpr Scale nan_scale = Wire::nan;
    static constexpr uint8_t nan_element = 0;
    RowFormat rules;

    // Elements are divided by the scale before it is narrowed for the wire, so the scale in use is the f32 one.
    float full_scale(float amax) const { return int8_scale(amax); }
    Scale wire_scale(float s) const { return Wire::narrow(s); }
    uint8_t element(float x, float s) const {
        const float half = F16::widen(F16::narrow(x / s));
        return static_cast<uint8_t>(static_cast<int8_t>(round_to_integer(half)));
    }
    float value(uint8_t code, Scale s) const {
        return Token::widen(Token::narrow(static_cast<float>(static_cast<int8_t>(code)) * Wire::widen(s)));
    }
};

/// A block's scale in the two forms it has: as elements are divided by it, and as it travels. One form for most formats.
template <class Codec>
struct BlockScale {
    bool nan;  // the block holds NaN or Inf
    typename Codec::Scale wire;
    float full;
};

template <class Token>
float element_of(const void* x, int64_t column) {
    return Token::widen(load<typename Token::Bits>(x, column));
}

/// The scale of columns [first, last) of a row of tokens. Columns past the end of the row count as 0: they change nothing.
template <class Token, class Codec>
BlockScale<Codec> scale_of(const Codec& codec, const void* x, int64_t first, int64_t last) {
    // Magnitudes order as integers, NaN above Inf above finite; a float maximum could lose a NaN.
    typename Token::Bits largest = 0;
    for (int64_t c = first; c < last; ++c) {
        const auto bits = load<typename Token::Bits>(x, c);
        largest = std::max<typename Token::Bits>(largest, bits & Token::magnitude);
    }
    if (largest >= Token::infinity) return {true, Codec::nan_scale, 0};
    const float amax = Token::widen(largest);
    if constexpr (requires { codec.full_scale(amax); }) {
        const float full = codec.full_scale(amax);
        return {false, codec.wire_scale(full), full};
    } else {
        return {false, codec.scale(amax), 0};
    }
}

template <class Codec>
uint8_t element_in(const Codec& codec, float x, const BlockScale<Codec>& scale) {
    if (scale.nan) return Codec::nan_element;
    if constexpr (requires { codec.full_scale(x); })
        return codec.element(x, scale.full);
    else
        return codec.element(x, scale.wire);
}

/// The columns of block `index`.
struct Columns {
    int64_t first, last;
};
Columns columns_of(int64_t index, int64_t block, int64_t hidden) {
    const int64_t first = index * block;  // block INT64_MAX comes with index 0 only
    return {first, hidden - first > block ? first + block : hidden};
}

template <class Token, class Codec>
void encode_row(const Codec& codec, const void* x, int64_t hidden, void* payload, void* scales) {
    const int64_t scale_count = layout::row_layout(codec.rules.format, Token::type, hidden).scale_count;
    for (int64_t b = 0; b < scale_count; ++b) {
        const auto [first, last] = columns_of(b, Codec::block, hidden);
        if (first >= hidden && b != 0) {  // mx only: the byte that makes the count even
            store(scales, b, typename Codec::Scale{0});
            continue;
        }
        const auto scale = scale_of<Token>(codec, x, first, last);
        store(scales, b, scale.wire);
        for (int64_t c = first; c < last; ++c) store(payload, c, element_in(codec, element_of<Token>(x, c), scale));
    }
}

template <class Codec>
void decode_row(const Codec& codec, const void* payload, const void* scales, int64_t hidden, float* out) {
    for (int64_t c = 0; c < hidden; ++c) {
        const auto scale = load<typename Codec::Scale>(scales, c / Codec::block);
        store(out, c, codec.value(load<uint8_t>(payload, c), scale));
    }
}

constexpr int64_t kCombineColumns = 128;  // summed together; every block but the whole row divides it

/// Sums one token. `add(k, first, last, acc)` adds weight * value of row k for columns [first, last), at most kCombineColumns.
template <class Token, class AddRow>
void combine_columns(const CombineInput& input, int64_t hidden, void* out, const AddRow& add) {
    for (int64_t first = 0; first < hidden; first += kCombineColumns) {
        const int64_t last = std::min(hidden, first + kCombineColumns);
        float acc[kCombineColumns] = {};
        for (int64_t k = 0; k < input.topk; ++k) {
            if (input.rows[k] != nullptr) add(k, first, last, acc);
        }
        for (int64_t c = first; c < last; ++c) {
            float sum = acc[c - first];
            if (input.shared != nullptr) sum = sum + element_of<Token>(input.shared, c);
            store(out, c, Token::narrow(sum));
        }
    }
}

float weight_of(const CombineInput& input, int64_t k) {
    return input.weights != nullptr ? load<float>(input.weights, k) : 1.0F;
}

template <class Token>
void combine_tokens(const CombineInput& input, int64_t hidden, void* out) {
    combine_columns<Token>(input, hidden, out, [&](int64_t k, int64_t first, int64_t last, float* acc) {
        for (int64_t c = first; c < last; ++c) {
            const float product = weight_of(input, k) * element_of<Token>(input.rows[k], c);
            acc[c - first] = acc[c - first] + product;
        }
    });
}

template <class Token, class Codec>
void combine_wire(const Codec& codec, const CombineInput& input, int64_t hidden, void* out) {
    combine_columns<Token>(input, hidden, out, [&](int64_t k, int64_t first, int64_t last, float* acc) {
        BlockScale<Codec> scale{};
        int64_t scale_end = first;
        for (int64_t c = first; c < last; ++c) {
            uint8_t code = 0;
            if (c == scale_end) {
                const auto [block_first, block_last] = columns_of(c / Codec::block, Codec::block, hidden);
                if (input.encoded)
                    scale.wire = load<typename Codec::Scale>(input.scales[k], c / Codec::block);
                else
                    scale = scale_of<Token>(codec, input.rows[k], block_first, block_last);
                scale_end = block_last;
            }
            if (input.encoded)
                code = load<uint8_t>(input.rows[k], c);
            else
                code = element_in(codec, element_of<Token>(input.rows[k], c), scale);
            const float product = weight_of(input, k) * codec.value(code, scale.wire);
            acc[c - first] = acc[c - first] + product;
        }
    });
}

/// Calls `use(codec)` with the codec of a format. Format::none has none and is not passed here.
template <class Token, class Use>
void with_codec(const RowFormat& format, const Use& use) {
    switch (format.format) {
        case Format::none: return;
        case Format::int8_token: return use(Int8Token{format});
        case Format::mxfp8_e5m2: return use(Mx<E5M2>{format});
        case Format::mxfp8_e4m3: return use(Mx<E4M3>{format});
        case Format::fp8_e4m3_block128: return use(Fp8Block128{format});
        case Format::int8_block8: return use(Int8Block<Token, Token, 8>{format});
        case Format::int8_block128: return use(Int8Block<Token, F32, 128>{format});
    }
}

/// Calls `use(token)` with the struct of a token type.
template <class Use>
void with_token(TokenType token, const Use& use) {
    switch (token) {
        case TokenType::f16: return use(F16{});
        case TokenType::bf16: return use(Bf16{});
        case TokenType::f32: return use(F32{});
    }
}

SY_NOINLINE void encode_in_mode(const RowFormat& format, TokenType token, const void* x, int64_t hidden, void* payload,
                                void* scales) {
    with_token(token, [&]<class Token>(Token) {
        with_codec<Token>(format, [&](const auto& codec) { encode_row<Token>(codec, x, hidden, payload, scales); });
    });
}

SY_NOINLINE void decode_in_mode(const RowFormat& format, TokenType token, const void* payload, const void* scales,
                                int64_t hidden, float* out) {
    with_token(token, [&]<class Token>(Token) {
        if (format.format == Format::none) {
            for (int64_t c = 0; c < hidden; ++c) store(out, c, element_of<Token>(payload, c));
        }
        with_codec<Token>(format, [&](const auto& codec) { decode_row(codec, payload, scales, hidden, out); });
    });
}

SY_NOINLINE void combine_in_mode(const CombineInput& input, int64_t hidden, void* out) {
    with_token(input.token, [&]<class Token>(Token) {
        if (input.wire.format == Format::none) combine_tokens<Token>(input, hidden, out);
        with_codec<Token>(input.wire, [&](const auto& codec) { combine_wire<Token>(codec, input, hidden, out); });
    });
}

/// In pieces, because a C library turns to streaming stores by itself in a long memcpy.
void copy(void* to, const void* from, size_t bytes) {
    constexpr size_t kPiece = size_t{1} << 18;
    for (size_t done = 0; done < bytes; done += kPiece) {
        std::memcpy(static_cast<unsigned char*>(to) + done, static_cast<const unsigned char*>(from) + done,
                    std::min(kPiece, bytes - done));
    }
}

void encode(const RowFormat& format, TokenType token, const void* x, int64_t hidden, void* payload, void* scales) {
    if (format.format == Format::none) {
        copy(payload, x, static_cast<size_t>(hidden * layout::token_bytes(token)));
        return;
    }
    const FloatMode mode;
    encode_in_mode(format, token, x, hidden, payload, scales);
}

void decode(const RowFormat& format, TokenType token, const void* payload, const void* scales, int64_t hidden, float* out) {
    const FloatMode mode;
    decode_in_mode(format, token, payload, scales, hidden, out);
}

void combine(const CombineInput& input, int64_t hidden, void* out) {
    const FloatMode mode;
    combine_in_mode(input, hidden, out);
}

// This set's stream is an ordinary memcpy, but the caller of a kernel may have streamed by himself.
void fence() {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

}  // namespace

const Kernels& scalar_kernels() {
    static constexpr Kernels kernels{Simd::scalar, "scalar", encode, decode, combine, copy, copy, fence};
    return kernels;
}

}  // namespace switchyard::quant
