// What instructions_test.py counts under callgrind: each number kernel on one fixed row, and dispatch and combine of one rank.
//
// A case runs once to warm up (symbols are bound, pages touched) and once counted. callgrind writes a dump with the name of
// each case; this program prints, as one line of JSON each, what it was built with and by how much a case's count is to be
// divided. Inputs are made of integer arithmetic, so that the same instructions run everywhere.
#include <gnu/libc-version.h>
#include <valgrind/callgrind.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "quant/numbers.hpp"
#include "quant/quant.hpp"
#include "switchyard/session.hpp"

#ifdef SY_TEST_VECTORS
#include <hwy/targets.h>

// In place of Highway's own: its library runs RDTSCP when it is loaded, which valgrind refuses where the processor does not
// announce it. So this program leaves the library out, and only says what callgrind can run.
int64_t hwy::SupportedTargets() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return HWY_AVX2;
#endif
    return 0;
}
#endif

namespace switchyard::test {
namespace {

using nlohmann::json;

constexpr int64_t hidden = 7168, topk = 8;

void print(const json& line) {
    std::puts(line.dump().c_str());
}

template <class Run>
void count(const std::string& name, int64_t divisor, const char* unit, const Run& run) {
    run();
    CALLGRIND_ZERO_STATS;
    CALLGRIND_TOGGLE_COLLECT;
    run();
    CALLGRIND_TOGGLE_COLLECT;
    CALLGRIND_DUMP_STATS_AT(name.c_str());
    print({{"case", name}, {"divisor", divisor}, {"unit", unit}});
}

/// Tokens between -4 and 4, mostly near 0, as from a normal distribution; now and then a 0 and a subnormal.
std::vector<uint8_t> tokens(TokenType type, int64_t columns, uint64_t seed) {
    std::vector<uint8_t> row(static_cast<size_t>(columns * layout::token_bytes(type)));
    for (int64_t c = 0; c < columns; ++c) {
        int64_t sum = 0;
        for (int i = 0; i < 8; ++i) {
            seed = seed * 6364136223846793005U + 1442695040888963407U;
            sum += static_cast<int64_t>(seed >> 44) - (1 << 19);
        }
        float value = static_cast<float>(sum) * 0x1p-20F;
        if (c % 2048 == 2000) value = 0;
        if (c % 4096 == 4000) value = 0x1p-20F;
        switch (type) {
            case TokenType::f16: quant::store(row.data(), c, quant::F16::narrow(value)); break;
            case TokenType::bf16: quant::store(row.data(), c, quant::Bf16::narrow(value)); break;
            case TokenType::f32: quant::store(row.data(), c, value); break;
        }
    }
    return row;
}

std::string text(const char* option, Format format) {
    Options o;
    o.dispatch_quant = o.combine_quant = format;
    return option_text(*find_option(option), o);
}
std::string text(TokenType type) {
    Options o;
    o.dtype = type;
    return option_text(*find_option("dtype"), o);
}

/// Encode, decode and sum of every format on rows of one type, by one set.
void count_kernels(const quant::Kernels& kernels, TokenType type) {
    const std::string end = " " + text(type) + " " + kernels.name;
    std::array<std::vector<uint8_t>, topk> x;
    for (size_t k = 0; k < x.size(); ++k) x[k] = tokens(type, hidden, k + 1);
    std::vector<float> decoded(hidden);
    std::vector<uint8_t> sum(x[0].size());
    constexpr std::array<float, topk> weights = {0.31F, 0.23F, 0.14F, 0.11F, 0.08F, 0.06F, 0.04F, 0.03F};

    for (Format format : {Format::none, Format::int8_token, Format::mxfp8_e5m2, Format::mxfp8_e4m3, Format::fp8_e4m3_block128,
                          Format::int8_block8, Format::int8_block128}) {
        if (type == TokenType::f32 && format != Format::none) continue;  // f32 tokens travel as they are
        const RowFormat rules{.format = format};
        const bool of_combine = format == Format::int8_block8 || format == Format::int8_block128;
        const std::string name = text(of_combine ? "combine_quant" : "dispatch_quant", format);
        const layout::RowLayout size = layout::row_layout(format, type, hidden);
        std::array<std::vector<uint8_t>, topk> payload, scales;
        std::array<const void*, topk> plain_rows, wire_rows, wire_scales;
        for (size_t k = 0; k < topk; ++k) {
            payload[k].resize(static_cast<size_t>(size.payload_bytes));
            scales[k].resize(static_cast<size_t>(size.scale_bytes()) + 1);
            kernels.encode(rules, type, x[k].data(), hidden, payload[k].data(), scales[k].data());
            plain_rows[k] = x[k].data();
            wire_rows[k] = payload[k].data();
            wire_scales[k] = scales[k].data();
        }
        if (format != Format::none)  // that is memcpy, which is not ours to count
            count("encode " + name + end, hidden, "column",
                  [&] { kernels.encode(rules, type, x[0].data(), hidden, payload[0].data(), scales[0].data()); });
        count("decode " + name + end, hidden, "column",
              [&] { kernels.decode(rules, type, payload[0].data(), scales[0].data(), hidden, decoded.data()); });
        if (format != Format::none && !of_combine) continue;
        for (bool encoded : {false, true}) {
            if (encoded && !of_combine) continue;
            const quant::CombineInput input{
                type,           rules, encoded, encoded ? wire_rows.data() : plain_rows.data(), wire_scales.data(),
                weights.data(), topk,  nullptr};
            count(std::string(encoded ? "combine encoded " : "combine ") + name + end, topk * hidden, "column",
                  [&] { kernels.combine(input, hidden, sum.data()); });
        }
    }
    if (type == TokenType::f16 && &kernels != &quant::scalar_kernels())
        count("stream" + end, hidden, "column", [&] { kernels.stream(sum.data(), x[0].data(), sum.size()); });
}

/// One rank alone: nobody to wait for, so that what is counted is the bookkeeping, and the rows of a small H.
void count_session(Landing landing, const quant::Kernels& kernels) {
    Options options;
    options.hidden = 512;
    options.topk = 4;
    options.experts = 16;
    options.tokens_max = 64;
    options.landing = landing;
    options.simd = kernels.simd;
    const int64_t rows = options.tokens_max * options.topk;
    const std::vector<uint8_t> x = tokens(options.dtype, options.tokens_max * options.hidden, 9);
    std::vector<uint8_t> out(x.size());
    std::vector<int32_t> ids;
    for (int32_t t = 0; t < 64; ++t)
        for (int32_t k = 0; k < 4; ++k) ids.push_back((t * 7 + k * 5) % 16);
    const std::vector<float> weights(static_cast<size_t>(rows), 0.25F);
    Session session = std::move(Session::open_local(options, 1).front());
    const DispatchArgs input{.x = x.data(), .tokens = options.tokens_max, .topk_ids = ids.data()};
    const CombineArgs output{.topk_weights = weights.data(), .out = out.data()};

    const std::string name = option_text(*find_option("landing"), options) + " " + kernels.name;
    // count() calls twice, and two batches may be in flight.
    std::array<ExpertBatch, 2> batches;
    size_t turn = 0;
    count("session dispatch " + name, rows, "row", [&] { batches[turn++ % 2] = session.dispatch(input); });
    for (ExpertBatch& batch : batches) std::memset(batch.y(), 0, static_cast<size_t>(rows * options.hidden * 2));
    count("session combine " + name, rows, "row", [&] { session.combine(batches[turn++ % 2], output); });
}

int main() {
    Options options;
#ifdef __clang__
    const std::string compiler = __VERSION__;
#else
    const std::string compiler = "gcc " __VERSION__;
#endif
    print({{"compiler", compiler}, {"build", SY_TEST_BUILD}, {"libc", gnu_get_libc_version()}});
    for (Simd simd : {Simd::scalar, Simd::avx2}) {  // callgrind knows nothing above AVX2
        const quant::Kernels* kernels = quant::find_kernels(simd);
        options.simd = simd;
        print({{"set", option_text(*find_option("simd"), options)}, {"present", kernels != nullptr}});
        if (kernels == nullptr) continue;
        for (TokenType type : {TokenType::f16, TokenType::bf16, TokenType::f32}) count_kernels(*kernels, type);
        for (Landing landing : {Landing::packed, Landing::in_place}) count_session(landing, *kernels);
    }
    return 0;
}

}  // namespace
}  // namespace switchyard::test

int main() {
    return switchyard::test::main();
}
