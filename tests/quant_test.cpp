// Facts about the number kernels, for every kernel set this build and this processor have.
//
// Right values come from three places, none of them the code under test: the golden vectors and digests (SY_TEST_GOLDEN_DIR),
// a reference in long double below, and, for the other sets only, the scalar set that those two have judged.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "quant/numbers.hpp"
#include "quant/quant.hpp"
#include "switchyard/accuracy.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace switchyard::quant {
namespace {

using nlohmann::json;
using Bytes = std::vector<uint8_t>;
using layout::row_layout;
using layout::RowLayout;

// ---------------------------------------------------------------------------------------------------------------------
// Helpers: memory with guards, seeds, names

/// `bytes` of memory at a chosen misalignment between two guards that nobody may touch.
class Guarded {
 public:
    explicit Guarded(int64_t bytes, int64_t misalignment = 0)
        : bytes_(bytes), start_(kGuard + misalignment), all_(static_cast<size_t>(start_ + bytes + kGuard)) {
        for (size_t i = 0; i < all_.size(); ++i) all_[i] = pattern(i);
    }
    uint8_t* data() { return all_.data() + start_; }
    const uint8_t* data() const { return all_.data() + start_; }
    int64_t size() const { return bytes_; }
    Bytes bytes() const { return Bytes(data(), data() + bytes_); }
    bool guards_intact() const {
        for (size_t i = 0; i < all_.size(); ++i) {
            const bool inside = i >= static_cast<size_t>(start_) && i < static_cast<size_t>(start_ + bytes_);
            if (!inside && all_[i] != pattern(i)) return false;
        }
        return true;
    }

 private:
    static constexpr int64_t kGuard = 192;
    static uint8_t pattern(size_t i) { return static_cast<uint8_t>(0xA5U ^ (i * 29U)); }
    int64_t bytes_;
    int64_t start_;
    Bytes all_;
};

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitised = true;
#elif defined(__has_feature)
constexpr bool kSanitised = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
constexpr bool kSanitised = false;
#endif

/// A seeded generator. The seed is printed; SWITCHYARD_TEST_SEED=n runs with another.
class Random : public std::mt19937_64 {
 public:
    Random() : Random(chosen_seed()) {}
    uint64_t below(uint64_t n) { return (*this)() % n; }
    double normal() { return std::normal_distribution<double>()(*this); }

 private:
    explicit Random(uint64_t seed) : std::mt19937_64(seed) {
        std::printf("seed %llu; again: SWITCHYARD_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed),
                    static_cast<unsigned long long>(seed));
    }
    static uint64_t chosen_seed() {
        const char* text = std::getenv("SWITCHYARD_TEST_SEED");
        return text != nullptr ? std::strtoull(text, nullptr, 10) : 81442;
    }
};

struct NamedFormat {
    const char* name;
    RowFormat format;
};

/// Every format with every rule that changes its bytes.
const std::vector<NamedFormat>& every_format() {
    static const std::vector<NamedFormat> all = {
        {"none", {}},
        {"int8_token", {.format = Format::int8_token}},
        {"mxfp8_e5m2 floor saturate", {.format = Format::mxfp8_e5m2}},
        {"mxfp8_e5m2 floor inf", {.format = Format::mxfp8_e5m2, .mx_overflow = MxOverflow::inf}},
        {"mxfp8_e5m2 ceil saturate", {.format = Format::mxfp8_e5m2, .mx_rule = MxRule::ceil}},
        {"mxfp8_e5m2 ceil inf", {Format::mxfp8_e5m2, MxRule::ceil, MxOverflow::inf, Fp8Scale::f32}},
        {"mxfp8_e4m3 floor", {.format = Format::mxfp8_e4m3}},
        {"mxfp8_e4m3 ceil", {.format = Format::mxfp8_e4m3, .mx_rule = MxRule::ceil}},
        {"fp8_e4m3_block128 f32", {.format = Format::fp8_e4m3_block128}},
        {"fp8_e4m3_block128 ue8m0", {.format = Format::fp8_e4m3_block128, .fp8_scale = Fp8Scale::ue8m0}},
        {"int8_block8", {.format = Format::int8_block8}},
        {"int8_block128", {.format = Format::int8_block128}},
    };
    return all;
}

const char* name_of(TokenType token) {
    return token == TokenType::f16 ? "f16" : token == TokenType::bf16 ? "bf16" : "f32";
}

constexpr TokenType kHalfTokens[] = {TokenType::f16, TokenType::bf16};

/// A row in its wire form.
struct Wire {
    Bytes payload, scales;
    bool operator==(const Wire&) const = default;
};

Wire encoded(const Kernels& kernels, const RowFormat& format, TokenType token, const void* x, int64_t hidden) {
    const RowLayout size = row_layout(format.format, token, hidden);
    Wire wire{Bytes(static_cast<size_t>(size.payload_bytes)), Bytes(static_cast<size_t>(size.scale_bytes()))};
    kernels.encode(format, token, x, hidden, wire.payload.data(), wire.scales.data());
    return wire;
}

std::vector<uint32_t> decoded(const Kernels& kernels, const RowFormat& format, TokenType token, const Wire& wire,
                              int64_t hidden) {
    std::vector<float> out(static_cast<size_t>(hidden));
    kernels.decode(format, token, wire.payload.data(), wire.scales.data(), hidden, out.data());
    std::vector<uint32_t> bits(out.size());
    std::memcpy(bits.data(), out.data(), out.size() * sizeof(float));
    return bits;
}

/// "first difference at 17: 3c, expected 3d", or nothing.
template <class T>
std::string difference(const std::vector<T>& found, const std::vector<T>& expected) {
    if (found.size() != expected.size()) return "sizes differ";
    for (size_t i = 0; i < found.size(); ++i) {
        if (found[i] == expected[i]) continue;
        std::ostringstream text;
        text << "first difference at " << i << ": " << std::hex << +found[i] << ", expected " << +expected[i];
        return text.str();
    }
    return "";
}

std::string difference(const Wire& found, const Wire& expected) {
    const std::string scales = difference(found.scales, expected.scales);
    if (!scales.empty()) return "scales: " + scales;
    const std::string payload = difference(found.payload, expected.payload);
    return payload.empty() ? "" : "payload: " + payload;
}

// ---------------------------------------------------------------------------------------------------------------------
// Golden vectors

const json& golden() {
    static const json file = json::parse(std::ifstream(SY_TEST_GOLDEN_DIR "/format_vectors.json"));
    return file;
}

/// "3c00*2 7e00" as numbers.
std::vector<uint32_t> patterns(const std::string& text) {
    std::vector<uint32_t> all;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        const size_t star = word.find('*');
        const size_t count = star == std::string::npos ? 1 : std::stoul(word.substr(star + 1));
        all.insert(all.end(), count, static_cast<uint32_t>(std::stoul(word.substr(0, star), nullptr, 16)));
    }
    return all;
}

/// "0000803f 3c*2" as bytes in the order written.
Bytes byte_string(const std::string& text) {
    Bytes all;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        const size_t star = word.find('*');
        const size_t count = star == std::string::npos ? 1 : std::stoul(word.substr(star + 1));
        const std::string digits = word.substr(0, star);
        for (size_t n = 0; n < count; ++n) {
            for (size_t i = 0; i < digits.size(); i += 2) {
                all.push_back(static_cast<uint8_t>(std::stoul(digits.substr(i, 2), nullptr, 16)));
            }
        }
    }
    return all;
}

/// Token patterns as they lie in memory.
Bytes row_of(const std::vector<uint32_t>& bits, TokenType token) {
    const size_t width = static_cast<size_t>(layout::token_bytes(token));
    Bytes row(bits.size() * width);
    for (size_t i = 0; i < bits.size(); ++i) std::memcpy(row.data() + i * width, &bits[i], width);
    return row;
}

TokenType token_named(const std::string& name) {
    return name == "f16" ? TokenType::f16 : name == "bf16" ? TokenType::bf16 : TokenType::f32;
}

RowFormat format_named(const std::string& name, const json& options) {
    RowFormat format;
    if (name == "int8_token")
        format.format = Format::int8_token;
    else if (name == "mxfp8_e5m2")
        format.format = Format::mxfp8_e5m2;
    else if (name == "mxfp8_e4m3")
        format.format = Format::mxfp8_e4m3;
    else if (name == "fp8_e4m3_block128")
        format.format = Format::fp8_e4m3_block128;
    else if (name == "int8_block8")
        format.format = Format::int8_block8;
    else if (name == "int8_block128")
        format.format = Format::int8_block128;
    else
        ADD_FAILURE() << "unknown format " << name;
    if (options.value("rule", "floor") == "ceil") format.mx_rule = MxRule::ceil;
    if (options.value("overflow", "saturate") == "inf") format.mx_overflow = MxOverflow::inf;
    if (options.value("scale", "f32") == "ue8m0") format.fp8_scale = Fp8Scale::ue8m0;
    return format;
}

/// f32 patterns of token patterns, by shifting bits only (exact; used to compare a decode with patterns of the token type).
uint32_t widened(uint32_t bits, TokenType token) {
    if (token == TokenType::f32) return bits;
    if (token == TokenType::bf16) return bits << 16;
    const uint32_t sign = (bits & 0x8000U) << 16;
    const uint32_t rest = bits & 0x7FFFU;
    if (rest == 0) return sign;
    if (rest >= 0x7C00U) return sign | 0x7F800000U | (rest & 0x3FFU) << 13;
    if (rest >= 0x0400U) return sign | ((rest << 13) + 0x38000000U);
    const uint32_t top = static_cast<uint32_t>(std::bit_width(rest)) - 1;  // subnormal: rest * 2^-24
    return sign | (top + 103) << 23 | ((rest << (23 - top)) & 0x7FFFFFU);
}

// ---------------------------------------------------------------------------------------------------------------------
// SHA-256 (FIPS 180-4), for the digests

class Sha256 {
 public:
    void add(const Bytes& bytes) {
        for (uint8_t b : bytes) {
            block_[used_++] = b;
            if (used_ == 64) compress();
        }
        length_ += bytes.size();
    }
    std::string hex() {
        const uint64_t bits = length_ * 8;
        block_[used_++] = 0x80;
        if (used_ == 64) compress();
        while (used_ != 56) {
            block_[used_++] = 0;
            if (used_ == 64) compress();
        }
        for (unsigned i = 0; i < 8; ++i) block_[used_++] = static_cast<uint8_t>(bits >> (56 - 8 * i));
        compress();
        std::string text;
        for (uint32_t word : state_) {
            char digits[9];
            std::snprintf(digits, sizeof digits, "%08x", word);
            text += digits;
        }
        return text;
    }

 private:
    /// The first 32 bits of the fractional part of the root-th root of the n-th prime: the constants of the standard.
    static uint32_t constant(unsigned n, bool cube) {
        unsigned prime = 1;
        for (unsigned found = 0; found <= n;) {
            ++prime;
            bool composite = false;
            for (unsigned d = 2; d * d <= prime; ++d) composite = composite || prime % d == 0;
            if (!composite) ++found;
        }
        // long double has 64 bits of significand; the whole part takes 5 at most.
        const long double root = cube ? std::cbrt(static_cast<long double>(prime)) : std::sqrt(static_cast<long double>(prime));
        return static_cast<uint32_t>((root - std::floor(root)) * 4294967296.0L);
    }
    void compress() {
        static const std::array<uint32_t, 64> k = [] {
            std::array<uint32_t, 64> all{};
            for (unsigned i = 0; i < 64; ++i) all[i] = constant(i, true);
            return all;
        }();
        std::array<uint32_t, 64> w{};
        for (size_t i = 0; i < 16; ++i) {
            w[i] = static_cast<uint32_t>(block_[4 * i]) << 24 | static_cast<uint32_t>(block_[4 * i + 1]) << 16 |
                   static_cast<uint32_t>(block_[4 * i + 2]) << 8 | block_[4 * i + 3];
        }
        for (size_t i = 16; i < 64; ++i) {
            const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
            const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16] + s0 + w[i - 7] + s1;
        }
        std::array<uint32_t, 8> v = state_;
        for (size_t i = 0; i < 64; ++i) {
            const uint32_t s1 = std::rotr(v[4], 6) ^ std::rotr(v[4], 11) ^ std::rotr(v[4], 25);
            const uint32_t t1 = v[7] + s1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
            const uint32_t s0 = std::rotr(v[0], 2) ^ std::rotr(v[0], 13) ^ std::rotr(v[0], 22);
            const uint32_t t2 = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
            v = {t1 + t2, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6]};
        }
        for (size_t i = 0; i < 8; ++i) state_[i] += v[i];
        used_ = 0;
    }
    std::array<uint32_t, 8> state_ = {constant(0, false), constant(1, false), constant(2, false), constant(3, false),
                                      constant(4, false), constant(5, false), constant(6, false), constant(7, false)};
    std::array<uint8_t, 64> block_{};
    size_t used_ = 0;
    uint64_t length_ = 0;
};

TEST(Sha256, MatchesTheExampleOfItsStandard) {
    Sha256 hash;
    hash.add({'a', 'b', 'c'});
    EXPECT_EQ(hash.hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

// ---------------------------------------------------------------------------------------------------------------------
// The reference: the text of the number formats in long double, with one rounding function for every grid

/// Nearest number of `digits` significant bits and no finer step than 2^least, ties to even.
long double rounded(long double value, int digits, int least) {
    if (value == 0) return value;
    int exponent = 0;
    std::frexp(value, &exponent);  // value = 0.5..1 * 2^exponent
    const int step = std::max(exponent - digits, least);
    return std::ldexp(std::nearbyint(std::ldexp(value, -step)), step);
}
long double to_f32(long double v) {
    return rounded(v, 24, -149);
}
long double to_f16(long double v) {
    return rounded(v, 11, -24);
}
long double to_bf16(long double v) {
    return rounded(v, 8, -133);
}
long double to_token(long double v, TokenType t) {
    return t == TokenType::f16 ? to_f16(v) : t == TokenType::bf16 ? to_bf16(v) : to_f32(v);
}

/// Value of a finite token pattern.
long double token_value(uint32_t bits, TokenType token) {
    return std::bit_cast<float>(widened(bits, token));
}

/// What a finite row must become: element values as the wire holds them, scales, and decoded values.
struct Expected {
    std::vector<long double> element, scale, value;
};

Expected reference_row(const RowFormat& format, TokenType token, const std::vector<uint32_t>& bits) {
    Expected expected;
    const int64_t hidden = static_cast<int64_t>(bits.size());
    const bool e5m2 = format.format == Format::mxfp8_e5m2;
    const bool mx = e5m2 || format.format == Format::mxfp8_e4m3;
    const bool fp8 = mx || format.format == Format::fp8_e4m3_block128;
    const bool wire_int8 = format.format == Format::int8_block8 || format.format == Format::int8_block128;
    const int64_t block = mx                                     ? 32
                          : format.format == Format::int8_block8 ? 8
                          : format.format == Format::int8_token  ? hidden
                                                                 : 128;
    const long double largest = e5m2 ? 57344 : fp8 ? 448 : 127;
    for (int64_t first = 0; first < hidden; first += block) {
        const int64_t last = std::min(hidden, first + block);
        long double amax = 0;
        for (int64_t c = first; c < last; ++c) {
            amax = std::max(amax, std::fabs(token_value(bits[static_cast<size_t>(c)], token)));
        }
        long double scale = 1;
        if (mx) {
            scale = std::ldexp(1.0L, -127);
            const int emax = e5m2 ? 15 : 8;
            int exponent = -127;
            if (amax != 0 && format.mx_rule == MxRule::floor) exponent = std::ilogb(amax) - emax;
            if (amax != 0 && format.mx_rule == MxRule::ceil) {
                while (std::ldexp(largest, exponent) < amax) ++exponent;
            }
            scale = std::ldexp(1.0L, std::clamp(exponent, -127, 127));
        } else if (format.format == Format::fp8_e4m3_block128 && format.fp8_scale == Fp8Scale::ue8m0) {
            if (amax != 0) {
                scale = std::ldexp(1.0L, -149);
                while (448 * scale < amax) scale *= 2;
            }
        } else {
            scale = to_f32(amax / largest);
            if (scale == 0) scale = 1;
        }
        const long double wire_scale = format.format == Format::int8_block8 ? to_token(scale, token) : scale;
        expected.scale.push_back(wire_scale);
        for (int64_t c = first; c < last; ++c) {
            const long double x = token_value(bits[static_cast<size_t>(c)], token);
            const long double quotient = mx ? x / scale : to_f32(x / scale);
            long double element = 0;
            if (e5m2)
                element = rounded(quotient, 3, -16);
            else if (fp8)
                element = rounded(quotient, 4, -9);
            else
                element = std::nearbyint(wire_int8 ? to_f16(quotient) : quotient);
            if (std::fabs(element) > largest) {
                element = std::copysign(format.mx_overflow == MxOverflow::inf && e5m2 ? HUGE_VALL : largest, element);
            }
            const long double value = to_f32(element * wire_scale);
            expected.element.push_back(element);
            expected.value.push_back(wire_int8 ? to_token(value, token) : value);
        }
    }
    return expected;
}

/// Value of a payload byte, from the fields of the code.
long double element_value(Format format, uint8_t code) {
    if (format == Format::int8_token || format == Format::int8_block8 || format == Format::int8_block128) {
        return code < 128 ? code : code - 256;
    }
    const int digits = format == Format::mxfp8_e5m2 ? 2 : 3;
    const int bias = format == Format::mxfp8_e5m2 ? 15 : 7;
    const int field = (code & 0x7F) >> digits;
    const int fraction = code & ((1 << digits) - 1);
    long double value = field == 0 ? std::ldexp(static_cast<long double>(fraction), 1 - bias - digits)
                                   : std::ldexp(static_cast<long double>(fraction + (1 << digits)), field - bias - digits);
    if (format == Format::mxfp8_e5m2 && field == 31) value = fraction == 0 ? HUGE_VALL : NAN;
    if (format != Format::mxfp8_e5m2 && (code & 0x7F) == 0x7F) value = NAN;
    return code < 128 ? value : -value;
}

long double scale_value(Format format, TokenType token, const Bytes& scales, size_t index) {
    if (format == Format::mxfp8_e5m2 || format == Format::mxfp8_e4m3) return std::ldexp(1.0L, scales[index] - 127);
    uint32_t bits = 0;
    const size_t width = format == Format::int8_block8 ? static_cast<size_t>(layout::token_bytes(token)) : 4;
    std::memcpy(&bits, scales.data() + index * width, width);
    return token_value(bits, width == 2 ? token : TokenType::f32);
}

bool same_number(long double a, long double b) {
    return a == b && std::signbit(a) == std::signbit(b);
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows to try

enum class Filling { wild, finite, activations, small, sparse, spiked };

/// Token patterns: any bits at all; any finite ones; normally distributed around a random scale; subnormals and their
/// neighbours; mostly zeros of both signs; normally distributed with a wild one here and there.
uint32_t random_pattern(Random& random, TokenType token, Filling filling, double scale) {
    if (token == TokenType::f32) {
        const auto bits = static_cast<uint32_t>(random());
        const bool special = (bits & 0x7F800000U) == 0x7F800000U;
        switch (filling) {
            case Filling::wild: return bits;
            case Filling::finite: return special ? bits & 0xFF7FFFFFU : bits;
            case Filling::activations: return std::bit_cast<uint32_t>(static_cast<float>(random.normal() * scale));
            case Filling::small: return bits & 0x81FFFFFFU;
            case Filling::sparse:
                return random.below(8) != 0 ? bits & 0x80000000U : std::bit_cast<uint32_t>(static_cast<float>(scale));
            case Filling::spiked:
                return random.below(256) == 0 ? bits : std::bit_cast<uint32_t>(static_cast<float>(random.normal() * scale));
        }
    }
    const uint32_t exponent = token == TokenType::f16 ? 0x7C00U : 0x7F80U;
    const auto bits = static_cast<uint32_t>(random() & 0xFFFFU);
    switch (filling) {
        case Filling::wild: return bits;
        case Filling::finite: return (bits & exponent) == exponent ? bits & 0xBFFFU : bits;
        case Filling::activations: break;
        case Filling::small: return bits & (token == TokenType::f16 ? 0x87FFU : 0x83FFU);
        case Filling::sparse:
            if (random.below(8) != 0) return bits & 0x8000U;
            break;
        case Filling::spiked:
            if (random.below(256) == 0) return bits;
            break;
    }
    // Cut to the token type rather than rounded: the distribution is all that matters here.
    const uint32_t single = std::bit_cast<uint32_t>(static_cast<float>(random.normal() * scale));
    if (token == TokenType::bf16) return single >> 16;
    const int field = static_cast<int>((single >> 23) & 0xFFU) - 112;
    if (field <= 0) return (single >> 16) & 0x8000U;
    return ((single >> 16) & 0x8000U) | static_cast<uint32_t>(std::min(field, 30)) << 10 | ((single >> 13) & 0x3FFU);
}

std::vector<uint32_t> random_row(Random& random, TokenType token, Filling filling, int64_t hidden) {
    const double scale = std::ldexp(1.0, static_cast<int>(random.below(24)) - 14);
    std::vector<uint32_t> bits(static_cast<size_t>(hidden));
    for (uint32_t& b : bits) b = random_pattern(random, token, filling, scale);
    return bits;
}

constexpr Filling kFillings[] = {Filling::wild,  Filling::finite, Filling::activations,
                                 Filling::small, Filling::sparse, Filling::spiked};
constexpr Filling kFiniteFillings[] = {Filling::finite, Filling::activations, Filling::small, Filling::sparse};

// ---------------------------------------------------------------------------------------------------------------------
// Facts about every set

class Quant : public testing::TestWithParam<const Kernels*> {
 protected:
    const Kernels& kernels() const { return *GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Sets, Quant, testing::ValuesIn(available_kernels().begin(), available_kernels().end()),
                         [](const auto& set) { return std::string(set.param->name); });

TEST(KernelSets, EndWithTheScalarOneAndAreFoundByName) {
    const auto sets = available_kernels();
    ASSERT_FALSE(sets.empty());
    EXPECT_EQ(sets.back(), &scalar_kernels());
    EXPECT_EQ(find_kernels(Simd::automatic), sets.front());
    EXPECT_EQ(find_kernels(Simd::scalar), &scalar_kernels());
    for (const Kernels* set : sets) {
        EXPECT_EQ(find_kernels(set->simd), set);
        EXPECT_EQ(std::count_if(sets.begin(), sets.end(), [&](const Kernels* other) { return other->simd == set->simd; }), 1);
    }
#if defined(__x86_64__)
    EXPECT_EQ(find_kernels(Simd::neon), nullptr);
#endif
}

TEST_P(Quant, EncodesEveryVector) {
    int count = 0;
    for (const json& v : golden().at("encode_vectors")) {
        const TokenType token = token_named(v.at("token_type"));
        const RowFormat format = format_named(v.at("format"), v.at("options"));
        const int64_t hidden = v.at("hidden");
        const Bytes x = row_of(patterns(v.at("input")), token);
        const Wire expected{byte_string(v.at("expected_element_bytes")), byte_string(v.at("expected_scale_bytes"))};
        EXPECT_EQ(difference(encoded(kernels(), format, token, x.data(), hidden), expected), "") << v.at("id") << v.at("note");
        ++count;
    }
    EXPECT_GE(count, 118);
}

TEST_P(Quant, DecodesEveryEncodedVector) {
    for (const json& v : golden().at("encode_vectors")) {
        const TokenType token = token_named(v.at("token_type"));
        const RowFormat format = format_named(v.at("format"), v.at("options"));
        const Wire wire{byte_string(v.at("expected_element_bytes")), byte_string(v.at("expected_scale_bytes"))};
        std::vector<uint32_t> expected = patterns(v.at("decoded"));
        for (uint32_t& bits : expected) bits = widened(bits, token_named(v.at("decoded_as")));
        EXPECT_EQ(difference(decoded(kernels(), format, token, wire, v.at("hidden")), expected), "")
            << v.at("id") << v.at("note");
    }
}

TEST_P(Quant, DecodesEveryVector) {
    for (const json& v : golden().at("decode_vectors")) {
        const RowFormat format = format_named(v.at("format"), json::object());
        const Wire wire{byte_string(v.at("element_bytes")), byte_string(v.at("scale_bytes"))};
        EXPECT_EQ(difference(decoded(kernels(), format, TokenType::f16, wire, v.at("hidden")), patterns(v.at("expected_f32"))),
                  "")
            << v.at("id") << v.at("note");
    }
}

TEST_P(Quant, DecodesEveryCodeAsTheTablesSay) {
    Wire wire{Bytes(256), Bytes(8, 127)};  // scale 1
    for (size_t i = 0; i < 256; ++i) wire.payload[i] = static_cast<uint8_t>(i);
    for (const char* grid : {"e5m2", "e4m3"}) {
        const RowFormat format = format_named(std::string("mxfp8_") + grid, json::object());
        const auto expected = patterns(golden().at("decode_tables").at(grid));
        ASSERT_EQ(expected.size(), 256U);
        EXPECT_EQ(difference(decoded(kernels(), format, TokenType::bf16, wire, 256), expected), "") << grid;
    }
}

TEST_P(Quant, CombinesEveryVector) {
    for (const json& v : golden().at("combine_vectors")) {
        const TokenType token = token_named(v.at("token_type"));
        std::vector<uint16_t> values;
        std::vector<float> weights;
        bool has_weights = false;
        for (const json& slot : v.at("slots")) {
            const bool used = !slot.is_null();
            const bool weighted = used && !slot.at("weight").is_null();
            values.push_back(used ? static_cast<uint16_t>(patterns(slot.at("value"))[0]) : uint16_t{0});
            weights.push_back(weighted ? std::bit_cast<float>(patterns(slot.at("weight"))[0]) : 0.0F);
            has_weights = has_weights || weighted;
        }
        // Every column of a wide row and the one column of the narrowest.
        for (size_t hidden : {size_t{1}, size_t{7}, size_t{200}}) {
            std::vector<std::vector<uint16_t>> rows;
            std::vector<const void*> pointers;
            for (uint16_t value : values) rows.emplace_back(hidden, value);
            for (size_t k = 0; k < rows.size(); ++k) pointers.push_back(v.at("slots")[k].is_null() ? nullptr : rows[k].data());
            std::vector<uint16_t> shared;
            if (!v.at("shared").is_null()) shared.assign(hidden, static_cast<uint16_t>(patterns(v.at("shared"))[0]));
            const bool none_used = std::count(pointers.begin(), pointers.end(), nullptr) == std::ssize(pointers);
            const CombineInput input{token,
                                     {},
                                     false,
                                     pointers.data(),
                                     nullptr,
                                     has_weights || none_used ? weights.data() : nullptr,
                                     std::ssize(pointers),
                                     shared.empty() ? nullptr : shared.data()};
            std::vector<uint16_t> out(hidden, 0xDEAD);
            kernels().combine(input, static_cast<int64_t>(hidden), out.data());
            const auto expected = static_cast<uint16_t>(patterns(v.at("expected_out"))[0]);
            EXPECT_EQ(difference(out, std::vector<uint16_t>(hidden, expected)), "") << v.at("id") << v.at("note");
        }
    }
}

TEST_P(Quant, MatchesTheExhaustiveDigests) {
    for (const json& v : golden().at("exhaustive_digests").at("digests")) {
        const TokenType token = token_named(v.at("token_type"));
        const RowFormat format = format_named(v.at("format"), v.at("options"));
        const bool with_one = v.at("set") == "with_one";
        const bool every_pattern = v.at("rows") == 65536;
        const uint32_t infinity = token == TokenType::f16 ? 0x7C00U : 0x7F80U;
        const uint16_t one = token == TokenType::f16 ? 0x3C00 : 0x3F80;
        Sha256 elements, scales;
        int rows = 0;
        for (uint32_t p = 0; p < 65536; ++p) {
            if (!every_pattern && (p & 0x7FFFU) >= infinity) continue;
            const uint16_t x[2] = {static_cast<uint16_t>(p), one};
            const Wire wire = encoded(kernels(), format, token, x, with_one ? 2 : 1);
            elements.add(wire.payload);
            scales.add(wire.scales);
            ++rows;
        }
        EXPECT_EQ(rows, v.at("rows").get<int>());
        EXPECT_EQ(elements.hex(), v.at("elements_sha256")) << v.at("format") << v.at("options") << name_of(token);
        EXPECT_EQ(scales.hex(), v.at("scales_sha256")) << v.at("format") << v.at("options") << name_of(token);
    }
}

TEST_P(Quant, AgreesWithLongDoubleArithmetic) {
    Random random;
    for (const auto& [name, format] : every_format()) {
        if (format.format == Format::none) continue;
        for (TokenType token : kHalfTokens) {
            for (int round = 0; round < 60; ++round) {
                const auto hidden = static_cast<int64_t>(1 + random.below(400));
                const auto bits = random_row(random, token, kFiniteFillings[random.below(4)], hidden);
                const Bytes x = row_of(bits, token);
                const Expected expected = reference_row(format, token, bits);
                const Wire wire = encoded(kernels(), format, token, x.data(), hidden);
                for (size_t i = 0; i < expected.scale.size(); ++i) {
                    ASSERT_EQ(scale_value(format.format, token, wire.scales, i), expected.scale[i]) << name << " scale " << i;
                }
                const auto values = decoded(kernels(), format, token, wire, hidden);
                for (size_t c = 0; c < bits.size(); ++c) {
                    const long double element = element_value(format.format, wire.payload[c]);
                    const bool is_integer = format.format == Format::int8_token || format.format == Format::int8_block8 ||
                                            format.format == Format::int8_block128;
                    // Integers have one zero; everywhere else its sign must be right.
                    if (is_integer)
                        ASSERT_EQ(element, expected.element[c]) << name << ' ' << name_of(token) << " column " << c;
                    else
                        ASSERT_TRUE(same_number(element, expected.element[c]))
                            << name << ' ' << name_of(token) << " column " << c;
                    // Past the largest finite number of its type a value is Inf.
                    const long double limit = format.format == Format::int8_block8 || format.format == Format::int8_block128
                                                  ? (token == TokenType::f16 ? 65519.9L : std::ldexp(0.998L, 128))
                                                  : std::ldexp(1.0L, 128) * 0.99999999L;
                    const long double value = std::bit_cast<float>(values[c]);
                    if (std::fabs(expected.value[c]) > limit)
                        ASSERT_TRUE(std::isinf(value) && (value < 0) == (expected.value[c] < 0));
                    else
                        ASSERT_EQ(value, expected.value[c]) << name << ' ' << name_of(token) << " column " << c;
                }
            }
        }
    }
}

TEST_P(Quant, CombineAgreesWithLongDoubleArithmetic) {
    Random random;
    for (TokenType token : {TokenType::f16, TokenType::bf16, TokenType::f32}) {
        for (int round = 0; round < 60; ++round) {
            const auto hidden = static_cast<int64_t>(1 + random.below(300));
            const size_t topk = 1 + random.below(9);
            std::vector<std::vector<uint32_t>> bits;
            std::vector<Bytes> rows;
            std::vector<const void*> pointers;
            std::vector<float> weights;
            for (size_t k = 0; k < topk; ++k) {
                bits.push_back(random_row(random, token, Filling::activations, hidden));
                rows.push_back(row_of(bits.back(), token));
                weights.push_back(static_cast<float>(random.normal()));
            }
            for (const Bytes& row : rows) pointers.push_back(row.data());
            const auto shared_bits = random_row(random, token, Filling::activations, hidden);
            const Bytes shared = row_of(shared_bits, token);
            const CombineInput input{token,        {}, false, pointers.data(), nullptr, weights.data(), std::ssize(rows),
                                     shared.data()};
            Bytes out(shared.size());
            kernels().combine(input, hidden, out.data());
            for (size_t c = 0; c < shared_bits.size(); ++c) {
                long double sum = 0;
                for (size_t k = 0; k < topk; ++k) {
                    sum = to_f32(sum + to_f32(static_cast<long double>(weights[k]) * token_value(bits[k][c], token)));
                }
                sum = to_token(to_f32(sum + token_value(shared_bits[c], token)), token);
                uint32_t found = 0;
                std::memcpy(&found, out.data() + c * static_cast<size_t>(layout::token_bytes(token)),
                            static_cast<size_t>(layout::token_bytes(token)));
                if (token == TokenType::f16 && std::fabs(sum) > 65519) continue;
                ASSERT_EQ(token_value(found, token), sum) << name_of(token) << " column " << c << " of " << hidden;
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Equality with the scalar set

// A row of 128 columns (mxfp8: 512, as many as the widest set takes at once) made of equal blocks of ordinary values, in which
// one column holds the pattern. Swapping two columns of
// a block swaps their bytes and changes nothing else, so one scalar block per pattern judges every position. 32 positions,
// moved through the row by 32 from pattern to pattern, are every lane of every vector.
TEST_P(Quant, EqualsScalarOnEveryPatternInEveryLane) {
    Random random;
    // Scalar against itself, only the swap is in question; under a sanitiser only the addresses are, which are always the same.
    const uint32_t stride = &kernels() == &scalar_kernels() || kSanitised ? 61 : 1;
    for (const auto& [name, format] : every_format()) {
        if (format.format == Format::none) continue;
        const bool mx = format.format == Format::mxfp8_e5m2 || format.format == Format::mxfp8_e4m3;
        const size_t columns = mx ? 512 : 128;
        const auto hidden = static_cast<int64_t>(columns);
        const size_t block = mx ? 32 : format.format == Format::int8_block8 ? 8 : 128;
        for (TokenType token : kHalfTokens) {
            const auto ordinary = random_row(random, token, Filling::activations, static_cast<int64_t>(block));
            std::array<uint16_t, 512> x{};
            for (size_t c = 0; c < columns; ++c) x[c] = static_cast<uint16_t>(ordinary[c % block]);
            const auto clean = x;
            const Wire usual = encoded(scalar_kernels(), format, token, x.data(), hidden);
            const size_t scale_bytes = usual.scales.size() * block / columns;  // of one block
            std::array<uint8_t, 512> payload{};
            std::array<uint8_t, 64> scales{};
            for (uint32_t p = 0; p < 65536; p += stride) {
                x[0] = static_cast<uint16_t>(p);
                const Wire alone = encoded(scalar_kernels(), format, token, x.data(), static_cast<int64_t>(block));
                x[0] = clean[0];
                for (size_t lane = 0; lane < 32; ++lane) {
                    const size_t position = lane + 32 * ((p + lane) % (columns / 32));
                    const size_t first = position - position % block;
                    x[first] = static_cast<uint16_t>(p);
                    std::swap(x[first], x[position]);
                    kernels().encode(format, token, x.data(), hidden, payload.data(), scales.data());
                    x[first] = clean[first];
                    x[position] = clean[position];

                    std::swap(payload[first], payload[position]);
                    const size_t scale = first / block * scale_bytes;
                    bool equal = std::memcmp(payload.data(), usual.payload.data(), first) == 0;
                    equal = equal && std::memcmp(payload.data() + first, alone.payload.data(), block) == 0;
                    equal = equal &&
                            std::memcmp(payload.data() + first + block, usual.payload.data(), columns - first - block) == 0;
                    equal = equal && std::memcmp(scales.data(), usual.scales.data(), scale) == 0;
                    equal = equal && std::memcmp(scales.data() + scale, alone.scales.data(), scale_bytes) == 0;
                    const size_t next = scale + scale_bytes;
                    equal =
                        equal && std::memcmp(scales.data() + next, usual.scales.data() + next, usual.scales.size() - next) == 0;
                    ASSERT_TRUE(equal) << name << ' ' << name_of(token) << " pattern " << std::hex << p << std::dec
                                       << " in column " << position;
                }
            }
        }
    }
}

TEST_P(Quant, EqualsScalarOnRandomRowsOfEveryWidth) {
    Random random;
    std::vector<int64_t> widths(300);
    for (size_t i = 0; i < widths.size(); ++i) widths[i] = static_cast<int64_t>(i + 1);
    widths.insert(widths.end(), {1009, 4093, 7168, 7919});
    for (const auto& [name, format] : every_format()) {
        for (TokenType token : {TokenType::f16, TokenType::bf16, TokenType::f32}) {
            for (int64_t hidden : widths) {
                const auto filling = kFillings[random.below(std::size(kFillings))];
                const Bytes row = row_of(random_row(random, token, filling, hidden), token);
                Guarded x(std::ssize(row), static_cast<int64_t>(random.below(64)));
                std::memcpy(x.data(), row.data(), row.size());
                const Wire expected = encoded(scalar_kernels(), format, token, row.data(), hidden);
                Guarded payload(std::ssize(expected.payload), static_cast<int64_t>(random.below(64)));
                Guarded scales(std::ssize(expected.scales), static_cast<int64_t>(random.below(64)));
                kernels().encode(format, token, x.data(), hidden, payload.data(), scales.data());
                ASSERT_EQ(difference(Wire{payload.bytes(), scales.bytes()}, expected), "")
                    << name << ' ' << name_of(token) << " hidden " << hidden << " filling " << static_cast<int>(filling);
                Guarded values(hidden * 4, static_cast<int64_t>(random.below(64)));
                // The interface takes float*, which C++ wants aligned; bytes with any alignment are what is promised.
                kernels().decode(format, token, payload.data(), scales.data(), hidden,
                                 static_cast<float*>(static_cast<void*>(values.data())));
                std::vector<uint32_t> bits(static_cast<size_t>(hidden));
                std::memcpy(bits.data(), values.data(), bits.size() * 4);
                ASSERT_EQ(difference(bits, decoded(scalar_kernels(), format, token, expected, hidden)), "")
                    << name << ' ' << name_of(token) << " decode, hidden " << hidden;
                ASSERT_TRUE(payload.guards_intact() && scales.guards_intact() && values.guards_intact() && x.guards_intact())
                    << name << ' ' << name_of(token) << " wrote outside, hidden " << hidden;
            }
        }
    }
}

TEST_P(Quant, DecodesEveryByteWithEveryScaleAsScalarDoes) {
    Bytes codes(256);
    for (size_t i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
    Random random;
    for (const auto& [name, format] : every_format()) {
        if (format.format == Format::none) continue;
        for (TokenType token : kHalfTokens) {
            const RowLayout size = row_layout(format.format, token, 256);
            const auto width = static_cast<size_t>(size.scale_element_bytes);
            std::vector<uint32_t> scale_patterns;
            if (width < 4) {
                for (uint32_t s = 0; s < (1U << (8 * width)); ++s) scale_patterns.push_back(s);
            } else {
                for (uint32_t exponent = 0; exponent < 512; ++exponent) {
                    for (uint32_t rest : {0U, 1U, 0x200000U, 0x600001U, 0x7FFFFFU})
                        scale_patterns.push_back(exponent << 23 | rest);
                }
                for (int i = 0; i < 3000; ++i) scale_patterns.push_back(static_cast<uint32_t>(random()));
            }
            for (uint32_t s : scale_patterns) {
                Wire wire{codes, Bytes(static_cast<size_t>(size.scale_bytes()))};
                for (size_t i = 0; i < wire.scales.size(); i += width) std::memcpy(wire.scales.data() + i, &s, width);
                ASSERT_EQ(difference(decoded(kernels(), format, token, wire, 256),
                                     decoded(scalar_kernels(), format, token, wire, 256)),
                          "")
                    << name << ' ' << name_of(token) << " scale " << std::hex << s;
            }
        }
    }
}

/// The operands of one combine, with everything random: slots, widths, weights, NaNs, alignment.
struct RandomCombine {
    std::vector<Bytes> rows;
    std::vector<Guarded> tokens, payloads, scales;
    std::vector<const void*> row_pointers, payload_pointers, scale_pointers;
    std::vector<float> weights;
    Bytes shared;
    TokenType token;
    RowFormat wire;
    int64_t hidden;

    RandomCombine(Random& random, TokenType token_type, const RowFormat& format, int64_t width)
        : token(token_type), wire(format), hidden(width) {
        const size_t topk = random.below(4) == 0 ? random.below(70) : random.below(10);
        const RowLayout size = row_layout(format.format, token, hidden);
        for (size_t k = 0; k < topk; ++k) {
            const Filling filling = random.below(4) == 0 ? Filling::wild : kFillings[random.below(std::size(kFillings))];
            rows.push_back(row_of(random_row(random, token, filling, hidden), token));
            tokens.emplace_back(std::ssize(rows[k]), static_cast<int64_t>(random.below(64)));
            std::memcpy(tokens[k].data(), rows[k].data(), rows[k].size());
            payloads.emplace_back(size.payload_bytes, static_cast<int64_t>(random.below(64)));
            scales.emplace_back(size.scale_bytes(), static_cast<int64_t>(random.below(64)));
            scalar_kernels().encode(format, token, rows[k].data(), hidden, payloads[k].data(), scales[k].data());
            weights.push_back(random.below(20) == 0 ? std::bit_cast<float>(static_cast<uint32_t>(random()))
                                                    : static_cast<float>(random.normal()));
        }
        for (size_t k = 0; k < topk; ++k) {
            const bool used = random.below(5) != 0;
            row_pointers.push_back(used ? tokens[k].data() : nullptr);
            payload_pointers.push_back(used ? payloads[k].data() : nullptr);
            scale_pointers.push_back(used ? scales[k].data() : nullptr);
        }
        shared = row_of(random_row(random, token, kFillings[random.below(std::size(kFillings))], hidden), token);
    }

    Bytes run(const Kernels& kernels, bool encoded_rows, bool weighted, bool with_shared) const {
        const CombineInput input{token,
                                 wire,
                                 encoded_rows,
                                 encoded_rows ? payload_pointers.data() : row_pointers.data(),
                                 encoded_rows ? scale_pointers.data() : nullptr,
                                 weighted ? weights.data() : nullptr,
                                 std::ssize(row_pointers),
                                 with_shared ? shared.data() : nullptr};
        Guarded out(hidden * layout::token_bytes(token), std::ssize(shared) % 61);
        kernels.combine(input, hidden, out.data());
        EXPECT_TRUE(out.guards_intact()) << "combine wrote outside, hidden " << hidden;
        return out.bytes();
    }
};

TEST_P(Quant, CombineEqualsScalarForEverySlotPatternAndWireForm) {
    Random random;
    for (const auto& [name, format] : every_format()) {
        for (TokenType token : {TokenType::f16, TokenType::bf16, TokenType::f32}) {
            for (int round = 0; round < 70; ++round) {
                const int64_t hidden = round < 4 ? 1 + round : round < 6 ? 1009 : static_cast<int64_t>(1 + random.below(300));
                const RandomCombine combine(random, token, format, hidden);
                const bool weighted = random.below(4) != 0;
                const bool with_shared = random.below(2) != 0;
                const Bytes expected = combine.run(scalar_kernels(), false, weighted, with_shared);
                for (bool encoded_rows : {false, true}) {
                    ASSERT_EQ(difference(combine.run(kernels(), encoded_rows, weighted, with_shared), expected), "")
                        << name << ' ' << name_of(token) << " hidden " << hidden << " slots " << combine.rows.size()
                        << (encoded_rows ? " encoded" : "");
                }
            }
        }
    }
}

// One slot of weight 1: the result is the value. Each pattern comes by in each of the 8 places of a block of 8, and in the
// first block of 128, with ordinary values around it.
TEST_P(Quant, CombineEqualsScalarOnEveryPattern) {
    Random random;
    for (Format wire : {Format::none, Format::int8_block8, Format::int8_block128}) {
        const size_t distance = wire == Format::int8_block128 ? 128 : 8;
        const size_t places = wire == Format::int8_block128 ? 2 : 8;
        for (TokenType token : kHalfTokens) {
            const auto ordinary = random_row(random, token, Filling::activations, 65536);
            for (size_t place = 0; place < places; ++place) {
                for (size_t turn = 0; turn < distance; ++turn) {
                    auto row = ordinary;
                    for (size_t b = 0; b < row.size(); b += distance) row[b + place] = static_cast<uint32_t>(b + turn);
                    const Bytes x = row_of(row, token);
                    const void* rows[] = {x.data()};
                    const CombineInput input{token, {.format = wire}, false, rows, nullptr, nullptr, 1, nullptr};
                    Bytes found(x.size()), expected(x.size());
                    kernels().combine(input, std::ssize(row), found.data());
                    scalar_kernels().combine(input, std::ssize(row), expected.data());
                    ASSERT_EQ(difference(found, expected), "") << static_cast<int>(wire) << ' ' << name_of(token);
                }
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Moving bytes

TEST_P(Quant, CopyAndStreamWriteTheirBytesAndNoOthers) {
    Bytes source(600);
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(i * 7 + i / 256);
    for (auto move : {kernels().copy, kernels().stream}) {
        for (int64_t misalignment = 0; misalignment < 64; ++misalignment) {
            for (int64_t bytes = 0; bytes <= 300; ++bytes) {
                Guarded to(bytes, misalignment);
                const uint8_t* from = source.data() + (misalignment * 3 + bytes) % 67;
                move(to.data(), from, static_cast<size_t>(bytes));
                kernels().fence();
                ASSERT_TRUE(std::equal(from, from + bytes, to.data())) << bytes << " bytes at " << misalignment;
                ASSERT_TRUE(to.guards_intact()) << bytes << " bytes at " << misalignment;
            }
        }
    }
}

TEST_P(Quant, CopyAndStreamMoveLongRows) {
    Random random;
    for (auto move : {kernels().copy, kernels().stream}) {
        for (int64_t bytes : {4095, 14336, 100003, 3000001}) {
            Bytes source(static_cast<size_t>(bytes) + 64);
            for (uint8_t& b : source) b = static_cast<uint8_t>(random());
            const auto from = random.below(64);
            Guarded to(bytes, static_cast<int64_t>(random.below(64)));
            move(to.data(), source.data() + from, static_cast<size_t>(bytes));
            kernels().fence();
            EXPECT_EQ(std::memcmp(to.data(), source.data() + from, static_cast<size_t>(bytes)), 0) << bytes;
            EXPECT_TRUE(to.guards_intact()) << bytes;
        }
    }
}

// Two threads write neighbouring rows that share cache lines: a kernel that reads a neighbour's byte and writes it back loses
// it.
TEST_P(Quant, StreamLeavesANeighbourInTheSameLineAlone) {
    constexpr size_t kRow = 100, kRows = 64;
    for (uint8_t round = 1; round <= 200; ++round) {
        Bytes to(kRow * kRows);
        const Bytes from(kRow, round);
        const auto write = [&](size_t parity) {
            for (size_t r = parity; r < kRows; r += 2) kernels().stream(to.data() + r * kRow, from.data(), kRow);
            kernels().fence();
        };
        std::thread other(write, 1);
        write(0);
        other.join();
        ASSERT_EQ(std::count(to.begin(), to.end(), round), std::ssize(to)) << "round " << +round;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The caller's floating point mode

#if defined(__x86_64__)
TEST_P(Quant, GivesTheSameBytesInAnyFloatingPointModeAndRestoresIt) {
    Random random;
    constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040, kRoundUp = 0x4000, kRoundToZero = 0x6000;
    constexpr unsigned kFlags = 0x3F;
    const unsigned usual = _mm_getcsr();
    for (unsigned mode : {kFlushToZero | kDenormalsAreZero, kFlushToZero, kDenormalsAreZero, kRoundUp, kRoundToZero}) {
        for (const auto& [name, format] : every_format()) {
            for (TokenType token : {TokenType::f16, TokenType::bf16, TokenType::f32}) {
                for (int round = 0; round < 6; ++round) {
                    const Filling filling = round % 2 == 0 ? Filling::small : Filling::finite;
                    const auto hidden = static_cast<int64_t>(1 + random.below(280));
                    const Bytes x = row_of(random_row(random, token, filling, hidden), token);
                    const RandomCombine combine(random, token, format, hidden);
                    const Wire wire = encoded(kernels(), format, token, x.data(), hidden);
                    const auto values = decoded(kernels(), format, token, wire, hidden);
                    const Bytes sums[] = {combine.run(kernels(), false, true, true), combine.run(kernels(), true, true, true)};

                    _mm_setcsr((usual & ~0xE040U) | mode);
                    const Wire wire_in_mode = encoded(kernels(), format, token, x.data(), hidden);
                    const auto values_in_mode = decoded(kernels(), format, token, wire, hidden);
                    const Bytes sums_in_mode[] = {combine.run(kernels(), false, true, true),
                                                  combine.run(kernels(), true, true, true)};
                    const unsigned after = _mm_getcsr();
                    _mm_setcsr(usual);

                    EXPECT_EQ(after & ~kFlags, ((usual & ~0xE040U) | mode) & ~kFlags) << name;
                    ASSERT_EQ(difference(wire_in_mode, wire), "") << name << ' ' << name_of(token) << " mode " << mode;
                    ASSERT_EQ(difference(values_in_mode, values), "") << name << ' ' << name_of(token) << " mode " << mode;
                    ASSERT_EQ(difference(sums_in_mode[0], sums[0]), "") << name << ' ' << name_of(token) << " mode " << mode;
                    ASSERT_EQ(difference(sums_in_mode[1], sums[1]), "") << name << ' ' << name_of(token) << " mode " << mode;
                }
            }
        }
    }
}
#endif

// -------------------------------------------------------------------------------------------------------------- accuracy

TEST(Accuracy, IsThatOfFourValuesByHand) {
    // One block of 32, largest 4: mxfp8_e4m3 floor exponent 2 - 8 = -6, so the step at 4 is 32 * 2^-6 = 0.5 and 4.25 rounds to
    // even 4.
    std::vector<float> values(32, 0.0F);
    values[0] = 4, values[1] = 4.25F, values[2] = -1, values[3] = 0.3125F;
    std::vector<uint16_t> x;
    for (const float v : values) x.push_back(quant::F16::narrow(v));
    const Accuracy a =
        measure_accuracy({.x = x.data(), .rows = 1, .hidden = 32, .dtype = TokenType::f16, .format = {Format::mxfp8_e4m3}});
    EXPECT_EQ(a.values, 32);
    EXPECT_DOUBLE_EQ(a.max_error, 0.25);
    EXPECT_DOUBLE_EQ(a.mean_error, 0.25 / 32);
    EXPECT_EQ(a.worst_row, 0);
    EXPECT_EQ(a.worst_column, 1);
    EXPECT_NEAR(a.snr_db, 10 * std::log10((16 + 18.0625 + 1 + 0.09765625) / 0.0625), 1e-9);
    EXPECT_FALSE(a.is_poor());
}

TEST(Accuracy, SeesWhatTheSamplesRecipeLosesAndWhatBecomesZero) {
    // E5M2 with floor and inf: a block maximum of 1.9 * 2^n rounds beyond the largest finite value.
    std::vector<uint16_t> x(64, quant::F16::narrow(1.0F));
    x[40] = quant::F16::narrow(1.9F);
    RowFormat recipe{.format = Format::mxfp8_e5m2, .mx_overflow = MxOverflow::inf};
    const Accuracy lost = measure_accuracy({.x = x.data(), .rows = 1, .hidden = 64, .dtype = TokenType::f16, .format = recipe});
    EXPECT_EQ(lost.lost, 1);
    EXPECT_EQ(lost.worst_column, 40);
    EXPECT_TRUE(lost.is_poor());
    EXPECT_NE(lost.text().find("1 finite values came back"), std::string::npos) << lost.text();
    recipe.mx_overflow = MxOverflow::saturate;
    EXPECT_EQ(measure_accuracy({.x = x.data(), .rows = 1, .hidden = 64, .dtype = TokenType::f16, .format = recipe}).lost, 0);
    // int8_token: beside 1000 a 1 is below half a step of 1000/127.
    std::vector<uint16_t> skewed = {quant::F16::narrow(1000.0F), quant::F16::narrow(1.0F), quant::F16::narrow(0.0F)};
    const Accuracy flushed =
        measure_accuracy({.x = skewed.data(), .rows = 1, .hidden = 3, .dtype = TokenType::f16, .format = {Format::int8_token}});
    EXPECT_EQ(flushed.flushed, 1);
}

TEST(Accuracy, UnquantisedRowsAreExactAndNaNIsNotCompared) {
    const std::vector<uint16_t> x = {0x3C00, 0x7E00, 0x3C00, 0xFFFF};  // 1, NaN | 1 and padding of the stride
    const Accuracy a =
        measure_accuracy({.x = x.data(), .rows = 2, .hidden = 1, .row_stride = 2, .dtype = TokenType::f16, .format = {}});
    EXPECT_EQ(a.values, 2);
    EXPECT_EQ(a.not_finite, 0);
    EXPECT_TRUE(std::isinf(a.snr_db));
    const Accuracy b = measure_accuracy({.x = x.data(), .rows = 1, .hidden = 2, .dtype = TokenType::f16, .format = {}});
    EXPECT_EQ(b.values, 1);
    EXPECT_EQ(b.not_finite, 1);
}

TEST(Accuracy, WhatCannotBeMeasuredIsRefused) {
    const auto code = [](const AccuracyArgs& args) {
        try {
            measure_accuracy(args);
            return Code::ok;
        } catch (const Error& e) {
            return e.code();
        }
    };
    const float x = 1;
    EXPECT_EQ(code({.x = &x, .rows = 1, .hidden = 0, .format = {}}), Code::bad_input);
    EXPECT_EQ(code({.x = nullptr, .rows = 1, .hidden = 1, .format = {}}), Code::bad_input);
    EXPECT_EQ(code({.x = &x, .rows = 1, .hidden = 1, .dtype = TokenType::f32, .format = {Format::int8_token}}),
              Code::bad_input);
    EXPECT_EQ(code({.x = &x, .rows = 1, .hidden = 2, .row_stride = 1, .format = {}}), Code::bad_input);
}

}  // namespace
}  // namespace switchyard::quant
