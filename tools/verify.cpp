#include "verify.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace switchyard::tools {
namespace {

// How the elements of a file are read: size, and value for people.
struct Elements {
    enum class Kind { f16, bf16, f32, e5m2, e4m3, e8m0, i8, i32, i64 } kind;
    int64_t columns;

    size_t bytes() const {
        switch (kind) {
            case Kind::f16:
            case Kind::bf16: return 2;
            case Kind::f32:
            case Kind::i32: return 4;
            case Kind::i64: return 8;
            default: return 1;
        }
    }
};
using Kind = Elements::Kind;

// Value of a small float: `mantissa` bits below `exponent` bits, as IEEE has it. E4M3 has no infinity.
double small_float(uint32_t bits, int exponent, int mantissa) {
    const double sign = bits >> (exponent + mantissa) & 1 ? -1.0 : 1.0;
    const int e = static_cast<int>(bits >> mantissa) & ((1 << exponent) - 1);
    const double m = bits & ((1U << mantissa) - 1);
    const int bias = (1 << (exponent - 1)) - 1;
    const bool top = e == (1 << exponent) - 1;
    if (top && !(exponent == 4 && m != 7)) return m == 0 ? sign * HUGE_VAL : std::nan("");
    if (e == 0) return sign * std::ldexp(m, 1 - bias - mantissa);
    return sign * std::ldexp(1 + std::ldexp(m, -mantissa), e - bias);
}

int64_t bits_at(const Elements& e, const std::byte* at) {
    switch (e.bytes()) {
        case 1: return static_cast<uint8_t>(*at);
        case 2: {
            uint16_t v;
            std::memcpy(&v, at, 2);
            return v;
        }
        case 4: {
            uint32_t v;
            std::memcpy(&v, at, 4);
            return v;
        }
        default: {
            int64_t v;
            std::memcpy(&v, at, 8);
            return v;
        }
    }
}

std::string value_text(const Elements& e, int64_t bits) {
    const auto b = static_cast<uint32_t>(bits);
    switch (e.kind) {
        case Kind::f16: return fmt::format("{:.6g} (0x{:04x})", small_float(b, 5, 10), b);
        case Kind::bf16: return fmt::format("{:.6g} (0x{:04x})", std::bit_cast<float>(b << 16), b);
        case Kind::f32: return fmt::format("{:.9g} (0x{:08x})", std::bit_cast<float>(b), b);
        case Kind::e5m2: return fmt::format("{:.6g} (0x{:02x})", small_float(b, 5, 2), b);
        case Kind::e4m3: return fmt::format("{:.6g} (0x{:02x})", small_float(b, 4, 3), b);
        case Kind::e8m0: return fmt::format("2^{} (0x{:02x})", static_cast<int>(b) - 127, b);
        case Kind::i8: return fmt::format("{}", static_cast<int8_t>(b));
        case Kind::i32: return fmt::format("{}", static_cast<int32_t>(b));
        case Kind::i64: return fmt::format("{}", bits);
    }
    return "";
}

// Position on the number line, so that neighbours differ by 1: the distance of two values in ulp is their difference.
int64_t rank_of(const Elements& e, int64_t bits) {
    switch (e.kind) {
        case Kind::i8: return static_cast<int8_t>(bits);
        case Kind::i32: return static_cast<int32_t>(bits);
        case Kind::e8m0:
        case Kind::i64: return bits;
        default: break;
    }
    const int64_t sign = int64_t{1} << (e.bytes() * 8 - 1);
    return bits & sign ? -(bits & (sign - 1)) : bits;
}

Kind kind_of(TokenType type) {
    return type == TokenType::f16 ? Kind::f16 : type == TokenType::bf16 ? Kind::bf16 : Kind::f32;
}

Elements elements_of(const Case& c, const std::string& file) {
    const Options& o = c.options;
    const auto is = [&](const char* name) { return file.rfind(name, 0) == 0; };
    if (is("assist_info_for_combine")) return {Kind::i32, 3};
    if (is("ep_recv_count")) return {Kind::i32, c.ranks};
    if (is("expert_")) return {Kind::i64, 1};
    if (is("x_")) return {kind_of(o.dtype), o.hidden};
    switch (o.dispatch_quant) {
        case Format::mxfp8_e5m2:
            return is("expand_x") ? Elements{Kind::e5m2, o.hidden} : Elements{Kind::e8m0, ((o.hidden + 31) / 32 + 1) / 2 * 2};
        case Format::mxfp8_e4m3:
            return is("expand_x") ? Elements{Kind::e4m3, o.hidden} : Elements{Kind::e8m0, ((o.hidden + 31) / 32 + 1) / 2 * 2};
        case Format::fp8_e4m3_block128:
            return is("expand_x") ? Elements{Kind::e4m3, o.hidden} : Elements{Kind::f32, (o.hidden + 127) / 128};
        case Format::int8_token: return is("expand_x") ? Elements{Kind::i8, o.hidden} : Elements{Kind::f32, 1};
        default: return {kind_of(o.dtype), o.hidden};
    }
}

std::string compare(const Elements& e, const std::vector<std::byte>& golden, const std::vector<std::byte>& output) {
    if (golden.size() != output.size())
        return fmt::format("{} bytes, golden has {} ({} and {} rows)", output.size(), golden.size(),
                           output.size() / (e.bytes() * static_cast<size_t>(e.columns)),
                           golden.size() / (e.bytes() * static_cast<size_t>(e.columns)));
    if (golden == output) return {};
    const size_t n = golden.size() / e.bytes();
    std::string first;
    size_t differ = 0;
    int64_t farthest = 0;
    for (size_t i = 0; i < n; ++i) {
        const int64_t want = bits_at(e, golden.data() + i * e.bytes());
        const int64_t have = bits_at(e, output.data() + i * e.bytes());
        if (want == have) continue;
        ++differ;
        farthest = std::max(farthest, std::abs(rank_of(e, want) - rank_of(e, have)));
        if (first.empty())
            first = fmt::format("row {}, column {}: {}, golden has {}", i / static_cast<size_t>(e.columns),
                                i % static_cast<size_t>(e.columns), value_text(e, have), value_text(e, want));
    }
    return fmt::format("{}; {} of {} elements differ, by at most {} ulp", first, differ, n, farthest);
}

}  // namespace

std::vector<FileVerdict> compare_folders(const Case& c, const std::filesystem::path& golden,
                                         const std::filesystem::path& output) {
    namespace fs = std::filesystem;
    if (!fs::is_directory(golden)) throw Mistake(fmt::format("{} is not a folder; verify needs golden data", golden.string()));
    std::vector<FileVerdict> verdicts;
    for (const auto& entry : fs::recursive_directory_iterator(golden)) {
        if (!entry.is_regular_file() || entry.path().extension() != ".bin") continue;
        const fs::path name = fs::relative(entry.path(), golden);
        FileVerdict v{name.string(), false, {}};
        if (!fs::exists(output / name))
            v.text = fmt::format("{} is missing; run the case first", (output / name).string());
        else
            v.text =
                compare(elements_of(c, entry.path().filename().string()), read_file(entry.path()), read_file(output / name));
        v.equal = v.text.empty();
        verdicts.push_back(std::move(v));
    }
    if (verdicts.empty()) throw Mistake(fmt::format("{} holds no .bin file; verify needs golden data", golden.string()));
    std::sort(verdicts.begin(), verdicts.end(), [](const FileVerdict& a, const FileVerdict& b) { return a.name < b.name; });
    return verdicts;
}

}  // namespace switchyard::tools
