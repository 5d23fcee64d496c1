#include "switchyard/options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>

namespace switchyard {
namespace {

constexpr int64_t kMany = int64_t{1} << 31;  // of one dimension; products are checked where they are formed

#define SY_FIELD(field)                                  \
    [](const Options& o) -> int64_t { return o.field; }, \
        [](Options& o, int64_t v) { o.field = static_cast<decltype(o.field)>(v); }
#define SY_CHOICE(field)                                                       \
    [](const Options& o) -> int64_t { return static_cast<int64_t>(o.field); }, \
        [](Options& o, int64_t v) { o.field = static_cast<decltype(o.field)>(v); }

// The CANN sample's own flags and numbers (--quant-mode 4, --token-dtype-choice 1, ...) are the command line's business:
// tools/case.cpp.
constexpr OptionInfo table[] = {
    {"hidden", "--hidden,--h", "columns", true, 1, kMany, "width of a token", SY_FIELD(hidden), ""},
    {"topk", "--topk,--k", "experts", true, 1, 4096, "experts per token", SY_FIELD(topk), ""},
    {"experts", "--experts,--moe-expert-num", "experts", true, 1, 1 << 20, "routed experts of the whole group",
     SY_FIELD(experts), ""},
    {"dtype", "--dtype", "", true, 0, 2, "element type of a token", SY_CHOICE(dtype), "f16=0 bf16=1 f32=2"},
    {"dispatch_quant", "--dispatch-quant", "", true, 0, 4, "number format of rows on their way out", SY_CHOICE(dispatch_quant),
     "none=0 int8_token=1 mxfp8_e5m2=2 mxfp8_e4m3=3 fp8_e4m3_block128=4"},
    {"combine_quant", "--combine-quant", "", true, 0, 6, "number format of rows on their way home", SY_CHOICE(combine_quant),
     "none=0 int8_block8=5 int8_block128=6"},
    {"mx_rule", "--mx-rule", "", true, 0, 1, "exponent of an mx block", SY_CHOICE(mx_rule), "floor=0 ceil=1"},
    {"mx_overflow", "--mx-overflow", "", true, 0, 1, "an mx element that is too large", SY_CHOICE(mx_overflow),
     "saturate=0 sat=0 inf=1"},
    {"fp8_scale", "--fp8-scale", "", true, 0, 1, "scale of fp8_e4m3_block128", SY_CHOICE(fp8_scale), "f32=0 ue8m0=1"},
    {"expert_token_nums", "--expert-token-nums", "", true, 0, 1, "form of expert_token_nums", SY_CHOICE(expert_token_nums),
     "cumsum=0 count=1"},
    {"expert_alignment", "--expert-alignment", "rows", true, 1, 128, "rows of each expert start at a multiple of this",
     SY_FIELD(expert_alignment), "1=1 16=16 32=32 128=128"},
    {"deliver_weights", "--deliver-weights", "", true, 0, 1, "topk_weights travel with the rows", SY_CHOICE(deliver_weights),
     "no=0 yes=1 false=0 true=1"},
    {"landing", "--landing", "", true, 0, 6, "how rows travel, and lie when they arrive", SY_CHOICE(landing),
     "auto=0 packed=1 padded=2 in_place=3 allgather=4 two_level=5 alltoallv=6"},
    {"group_ranks", "--group-ranks", "ranks", true, 0, ranks_max,
     "landing two_level: ranks of a group; 0 = as the machine is built", SY_FIELD(group_ranks), ""},
    {"combine_path", "--combine-path", "", true, 0, 2, "how combine brings rows home", SY_CHOICE(combine_path),
     "auto=0 read=1 push=2"},
    {"tokens_max", "--tokens-max", "tokens", true, 0, kMany, "the most tokens of one rank in one dispatch",
     SY_FIELD(tokens_max), ""},
    {"rows_max", "--rows-max", "rows", true, 0, kMany - 1, "rows a rank can receive in one dispatch; 0 = the worst case",
     SY_FIELD(rows_max), ""},
    {"cell_rows", "--cell-rows", "rows", true, 0, kMany - 1,
     "landing padded: rows a rank can send to one expert in one dispatch; 0 = the worst case", SY_FIELD(cell_rows), ""},
    {"depth", "--depth", "dispatches", true, 1, 64, "dispatches in flight", SY_FIELD(depth), ""},
    {"partial", "--partial", "", true, 0, 1, "go on without the experts of ranks that have died", SY_CHOICE(partial),
     "no=0 yes=1"},
    {"workers", "--workers", "threads", false, 1, 64, "threads of a rank that move rows", SY_FIELD(workers), ""},
    {"simd", "--simd", "", false, 0, 7, "instruction set of the number kernels", SY_CHOICE(simd),
     "auto=0 scalar=1 ssse3=2 sse4=3 avx2=4 avx512=5 avx512_dl=6 neon=7"},
    {"huge_pages", "--huge-pages", "", false, 0, 2, "window in reserved huge pages", SY_CHOICE(huge_pages),
     "auto=0 no=1 yes=2"},
    {"pin", "--pin", "", false, 0, 1, "helper threads stay on one CPU each", SY_CHOICE(pin), "no=0 yes=1"},
    {"jitter_us", "--jitter-us", "us", false, 0, 1'000'000, "for tests: random sleeps where phases end", SY_FIELD(jitter_us),
     ""},
    {"timeout_ms", "--timeout-ms", "ms", false, 1, int64_t{1} << 40, "deadline of one call", SY_FIELD(timeout_ms), ""},
    {"progress", "--progress", "", false, 0, 1, "who moves operations in flight on", SY_CHOICE(progress), "caller=0 worker=1"},
};
#undef SY_FIELD
#undef SY_CHOICE

struct Name {
    std::string_view name;
    int64_t value;
};

// Calls f for each "name=value" of a list of names.
template <class F>
void each_name(const OptionInfo& info, F f) {
    std::string_view rest = info.values;
    while (!rest.empty()) {
        const size_t space = std::min(rest.find(' '), rest.size());
        const std::string_view item = rest.substr(0, space);
        const size_t equals = item.find('=');
        int64_t value = 0;
        std::from_chars(item.data() + equals + 1, item.data() + item.size(), value);
        f(Name{item.substr(0, equals), value});
        rest.remove_prefix(std::min(space + 1, rest.size()));
    }
}

bool is_choice(const OptionInfo& info) {
    return info.values[0] != 0;
}

std::string allowed_text(const OptionInfo& info) {
    if (!is_choice(info)) return fmt::format("{}..{}", info.low, info.high);
    std::string text;
    each_name(info, [&](Name n) { text += (text.empty() ? "" : ", ") + std::string(n.name); });
    return text;
}

Status check_value(const OptionInfo& info, const Options& options) {
    const int64_t value = info.get(options);
    bool known = !is_choice(info);
    each_name(info, [&](Name n) { known = known || n.value == value; });
    if (known && value >= info.low && value <= info.high) return {};
    return {Code::bad_input, fmt::format("option {} is {}; allowed: {}{}{}.", info.name, value, allowed_text(info),
                                         info.unit[0] ? " " : "", info.unit)};
}

}  // namespace

std::span<const OptionInfo> option_table() {
    return table;
}

const OptionInfo* find_option(std::string_view name) {
    for (const OptionInfo& info : table)
        if (name == info.name) return &info;
    return nullptr;
}

std::string option_text(const OptionInfo& info, const Options& options) {
    const int64_t value = info.get(options);
    std::string text;
    each_name(info, [&](Name n) {
        if (text.empty() && n.value == value) text = n.name;
    });
    return text.empty() ? fmt::format("{}", value) : text;
}

Status set_option(Options& options, const OptionInfo& info, std::string_view text) {
    bool found = false;
    each_name(info, [&](Name n) {
        if (n.name == text) info.set(options, n.value), found = true;
    });
    if (found) return {};
    if (!is_choice(info)) {
        int64_t value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (error == std::errc() && end == text.data() + text.size() && value >= info.low && value <= info.high) {
            info.set(options, value);
            return {};
        }
    }
    return {Code::bad_input, fmt::format("option {} is \"{}\"; allowed: {}{}{}.", info.name, text, allowed_text(info),
                                         info.unit[0] ? " " : "", info.unit)};
}

Status set_options_from_environment(Options& options) {
    for (const OptionInfo& info : table) {
        std::string variable = "SWITCHYARD_";
        for (const char* c = info.name; *c; ++c) variable += static_cast<char>(*c >= 'a' && *c <= 'z' ? *c - 'a' + 'A' : *c);
        const char* text = std::getenv(variable.c_str());
        if (!text) continue;
        if (Status s = set_option(options, info, text); !s.ok())
            return {Code::bad_input, fmt::format("environment variable {}: {}", variable, s.text())};
    }
    return {};
}

Status check_options(const Options& o, int64_t ranks) {
    for (const OptionInfo& info : table)
        if (Status s = check_value(info, o); !s.ok()) return s;
    const auto name = [&](const char* option) { return option_text(*find_option(option), o); };
    if (ranks < 1 || ranks > ranks_max)
        return {Code::bad_input, fmt::format("the group has {} ranks; allowed: 1..{}.", ranks, ranks_max)};
    if (o.dtype == TokenType::f32 && (o.dispatch_quant != Format::none || o.combine_quant != Format::none))
        return {Code::bad_input,
                fmt::format("dtype f32 with dispatch_quant {} and combine_quant {}: f32 tokens travel only unquantised; "
                            "use f16 or bf16, or none for both.",
                            name("dispatch_quant"), name("combine_quant"))};
    if (o.mx_overflow == MxOverflow::inf && o.dispatch_quant == Format::mxfp8_e4m3)
        return {Code::bad_input, "mx_overflow inf with dispatch_quant mxfp8_e4m3: E4M3 has no infinity; use saturate."};
    // tokens_max * topk rows leave a rank at most, and topk * hidden * 4 bytes is a row of y per token: both fit 64 bits
    // by the limits of the table. Counts travel as 32-bit numbers.
    if (o.tokens_max * o.topk >= kMany)
        return {Code::bad_input, fmt::format("tokens_max {} * topk {} = {} rows from one rank; allowed: fewer than 2^31.",
                                             o.tokens_max, o.topk, o.tokens_max * o.topk)};
    return {};
}

ExpertRange experts_of(int64_t rank, int64_t ranks, int64_t experts) {
    if (ranks < 1 || rank < 0 || rank >= ranks || experts < 0)
        throw Error(
            Status(Code::bad_input, fmt::format("experts_of: rank {} of {} with {} experts; allowed: rank 0..ranks-1 and 0 or "
                                                "more experts.",
                                                rank, ranks, experts)));
    const int64_t each = experts / ranks;
    const int64_t extra = experts % ranks;  // the first `extra` ranks own one more
    const int64_t first = rank * each + std::min(rank, extra);
    return {first, first + each + (rank < extra ? 1 : 0)};
}

}  // namespace switchyard
