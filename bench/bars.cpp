#include "bars.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "contestant.hpp"
#include "print.hpp"

namespace switchyard::bench {
namespace {

constexpr const char* quantised = "mxfp8_e5m2";
constexpr std::array<int64_t, 4> flat_tokens = {64, 256, 1024, 4096};
constexpr std::array<int64_t, 6> flat_experts = {8, 16, 32, 64, 128, 256};

Entry entry(const Flags& flags, int ranks, const char* contestant, std::string label, int64_t tokens,
            const std::string& quant = "none") {
    Entry e{.label = std::move(label), .contestant = contestant, .shape = shape_of(flags, ranks, {tokens}, quant)};
    e.shape.routing = "uniform";
    return e;
}

// The field of a number of tokens: everything that a bar compares.
Cell field(const Flags& flags, const char* scenario, int ranks, int64_t tokens, double seconds) {
    Cell cell{.name = fmt::format("{}/{}", scenario, ranks),
              .scenario = scenario,
              .entries = {},
              .seconds = seconds,
              .curve = {},
              .at = {}};
    for (const char* name : {"limit", "packed", "in_place", "sample", "open_mpi", "gloo"})
        if (find_contestant(name)) cell.entries.push_back(entry(flags, ranks, name, name, tokens));
    cell.entries.push_back(entry(flags, ranks, "packed", "packed mxfp8", tokens, quantised));
    return cell;
}

// ---- what was measured

// The three ways in which a ratio of two times is taken; see Bar.
double median_of(const Result& r) {
    return r.group.median;
}
double best_of(const Result& r) {
    return r.group.min;
}
double own_of(const Result& r) {
    return r.slowest_rank.median;
}

class Judge {
 public:
    explicit Judge(const Results& results) : results_(results) {}

    struct Term {
        std::string cell, label, call;
        double divisor = 1;
    };
    /// Time of `over` / time of `under`.
    void ratio(const std::string& text, const std::string& where, const Term& over, const Term& under, double bound,
               bool at_most) {
        const Result* a = results_.find(over.cell, over.label, over.call);
        const Result* b = results_.find(under.cell, under.label, under.call);
        Bar bar{.text = text, .cell = where, .bound = bound, .at_most = at_most, .missing = !a || !b};
        if (!bar.missing) {
            const auto by = [&](double (*time)(const Result&)) { return time(*a) / over.divisor / (time(*b) / under.divisor); };
            bar.measured = by(median_of);
            bar.of_best = by(best_of);
            bar.from_own_start = by(own_of);
        }
        bars.push_back(std::move(bar));
    }
    void ratio(const std::string& text, const char* cell, const char* over, const char* under, const char* call, double bound,
               bool at_most) {
        ratio(text, cell, Term{cell, over, call}, Term{cell, under, call}, bound, at_most);
    }

    /// Largest over smallest cost per row in a cell; a row costs time, or time in units of the limit with as many tokens.
    void flat(const std::string& text, const std::string& cell, const char* call, bool by_limit = false) {
        Bar bar{.text = text, .cell = cell, .bound = 1.3, .at_most = true};
        const auto by = [&](double (*time)(const Result&)) {
            double least = 0, most = 0;
            for (const Result& r : results_.all()) {
                if (r.cell->name != cell || r.call != call || r.entry->contestant != "packed") continue;
                const auto tokens = static_cast<double>(r.entry->shape.tokens[0]);
                const double cost = by_limit ? time(r) / time(limit_of(r)) : time(r) / tokens;
                least = least == 0 ? cost : std::min(least, cost);
                most = std::max(most, cost);
            }
            return least > 0 ? most / least : 0;
        };
        bar.measured = by(median_of);
        bar.of_best = by(best_of);
        bar.from_own_start = by(own_of);
        bar.missing = bar.measured == 0;
        bars.push_back(std::move(bar));
    }
    bool played(const std::string& cell, const std::string& label) const { return results_.find(cell, label, "combine"); }

    std::vector<Bar> bars;

 private:
    const Result& limit_of(const Result& r) const {
        for (const Result& limit : results_.all())
            if (limit.cell == r.cell && limit.call == r.call && limit.entry->contestant == "limit" &&
                limit.entry->shape.tokens == r.entry->shape.tokens)
                return limit;
        return r;
    }
    const Results& results_;
};

}  // namespace

Plan bars_plan(const Flags& flags) {
    const double s = flags.seconds;
    Tree two{.ranks = 2, .cells = {}};
    two.cells.push_back(field(flags, "decode", 2, 8, s));
    two.cells.push_back(field(flags, "prefill", 2, 256, 4 * s));
    Cell experts{.name = "experts/2", .scenario = "experts", .entries = {}, .seconds = 2 * s, .curve = {}, .at = {}};
    for (const int64_t e : flat_experts) {
        experts.entries.push_back(entry(flags, 2, "packed", fmt::format("{} experts", e), 256));
        experts.entries.back().shape.options.experts = e;
    }
    two.cells.push_back(std::move(experts));
    Cell tokens{.name = "tokens/2", .scenario = "tokens", .entries = {}, .seconds = 3 * s, .curve = {}, .at = {}};
    for (const int64_t t : flat_tokens) {
        tokens.entries.push_back(entry(flags, 2, "packed", fmt::format("{} tokens", t), t));
        tokens.entries.push_back(entry(flags, 2, "limit", fmt::format("limit, {} tokens", t), t));
    }
    two.cells.push_back(std::move(tokens));

    Tree eight{.ranks = 8, .cells = {}};
    eight.cells.push_back(field(flags, "decode", 8, 8, 2 * s));
    eight.cells.push_back(field(flags, "prefill", 8, 256, 8 * s));

    Tree many{.ranks = 64, .cells = {}};
    many.cells.push_back({.name = "decode/64",
                          .scenario = "decode",
                          .entries = {entry(flags, 64, "packed", "packed", 8)},
                          .seconds = s,
                          .curve = {},
                          .at = {}});

    Tree one{.ranks = 1, .cells = {}};
    one.cells.push_back({.name = "encode/1", .scenario = "encode", .entries = {}, .seconds = s, .curve = {}, .at = {}});
    for (const char* name : {"memcpy_memory", "encode_memory", "memcpy_cache", "encode_cache"})
        one.cells[0].entries.push_back(entry(flags, 1, name, name, 64, quantised));

    return {{std::move(two), std::move(eight), std::move(many), std::move(one)}};
}

std::vector<Bar> judge(const Results& results) {
    Judge j(results);
    for (const char* cell : {"prefill/2", "prefill/8"}) {
        j.ratio("dispatch: packed / limit", cell, "packed", "limit", "dispatch", 1.15, true);
        j.ratio("dispatch: Open MPI / packed", cell, "open_mpi", "packed", "dispatch", 10, false);
        j.ratio("dispatch: gloo / packed", cell, "gloo", "packed", "dispatch", 80, false);
        j.ratio("dispatch call: in_place / packed", cell, "in_place", "packed", "dispatch", 0.05, true);
        j.ratio("combine: packed / limit", cell, "packed", "limit", "combine", 1.15, true);
        j.ratio("combine: Open MPI / packed", cell, "open_mpi", "packed", "combine", 5, false);
    }
    // Rows that nobody has copied are compared where they have been read: what in_place saves its consumer must do.
    for (const std::string cell : {"prefill/2", "prefill/8"})
        for (const auto& [name, text, bound] : {std::tuple{"open_mpi", "Open MPI", 10.0}, {"gloo", "gloo", 80.0}})
            j.ratio(fmt::format("dispatch + first touch: {} / in_place where they lie", text), cell,
                    {cell, name, "first_touch"}, {cell, "in_place", "first_touch"}, bound, false);
    j.ratio("dispatch: packed / limit of streaming stores", "decode/2", "packed", "limit", "dispatch", 1.0, true);
    j.ratio("dispatch: Open MPI / packed", "decode/2", "open_mpi", "packed", "dispatch", 6, false);
    // Dispatch and first touch of every row: packed where they lie, in_place gathered tile by tile or where they lie.
    for (const auto& [cell, bound] : {std::pair{"decode/2", 3.0}, {"decode/8", 3.0}, {"prefill/2", 2.0}, {"prefill/8", 2.0}})
        for (const auto& [call, text] :
             {std::pair{"first_touch_tiles", "in_place by tiles"}, {"first_touch", "in_place where they lie"}})
            j.ratio(fmt::format("dispatch + first touch: packed / {}", text), cell, {cell, "packed", "first_touch"},
                    {cell, "in_place", call}, bound, false);
    for (const char* cell : {"decode/2", "prefill/2", "decode/8", "prefill/8"})
        j.ratio("dispatch: MXFP8 / unquantised", cell, "packed mxfp8", "packed", "dispatch", 1.0, true);
    j.ratio("encode f16 to MXFP8 from memory: bytes read per second / memcpy", "encode/1", "memcpy_memory", "encode_memory",
            "dispatch", 0.8, false);
    j.ratio("the same from cache", "encode/1", "memcpy_cache", "encode_cache", "dispatch", 0.4, false);
    for (const std::string scenario : {"decode", "prefill"})
        for (const char* call : {"dispatch", "combine"})
            j.ratio(fmt::format("{} per token: 8 ranks / 2 ranks", call), scenario, {scenario + "/8", "packed", call, 8},
                    {scenario + "/2", "packed", call, 2}, 2, true);
    j.bars.push_back({.text = "64 ranks finish (1 = yes)",
                      .cell = "decode/64",
                      .bound = 1,
                      .at_most = false,
                      .measured = j.played("decode/64", "packed") ? 1.0 : 0.0});
    for (const char* call : {"dispatch", "combine"}) {
        j.flat(fmt::format("{} per row, 64 to 4096 tokens: most / least", call), "tokens/2", call);
        j.flat(fmt::format("the same in units of the limit"), "tokens/2", call, true);
        j.flat(fmt::format("{} per row, 8 to 256 experts: most / least", call), "experts/2", call);
    }
    double made = 0;
    for (const Result& r : results.all())
        if (r.entry->contestant == "packed" || r.entry->contestant == "in_place") made += static_cast<double>(r.allocations);
    j.bars.push_back({.text = "allocations of dispatch and combine, packed and in_place",
                      .cell = "all",
                      .bound = 0,
                      .at_most = true,
                      .measured = made});
    return std::move(j.bars);
}

nlohmann::json Bar::to_json() const {
    return {{"bar", text},
            {"cell", cell},
            {"bound", bound},
            {"at_most", at_most},
            {"measured", measured},
            {"of_best", of_best},
            {"from_own_start", from_own_start},
            {"missing", missing},
            {"reached", reached()}};
}

void print_bars(const std::vector<Bar>& bars) {
    fmt::print("\n{:68} {:10} {:>8} {:>9} {:7}   {:>10} {:>10}\n", "bar", "where", "bound", "measured", "", "best only",
               "own start");
    size_t reached = 0, known = 0;
    for (const Bar& b : bars) {
        reached += b.reached();
        known += !b.missing;
        const auto number = [](double v) { return v == 0 ? "" : fmt::format("{:.3g}", v); };
        fmt::print("{:68} {:10} {:>8} {:>9} {:7}   {:>10} {:>10}\n", b.text, b.cell,
                   fmt::format("{} {:g}", b.at_most ? "<=" : ">=", b.bound),
                   b.missing ? "-" : fmt::format("{:.3g}", b.measured),
                   b.missing     ? "absent"
                   : b.reached() ? "reached"
                                 : "MISSED",
                   number(b.of_best), number(b.from_own_start));
    }
    fmt::print(
        "{} of {} bars reached. measured: medians of the time that all ranks share. Not judged: best only, the quickest round "
        "of "
        "each;\nown start, medians of the slowest rank's time from its own start. Bars across hosts are not measured here.\n",
        reached, known);
}

// ------------------------------------------------------------------------------------------------------ the sample's table

namespace {

struct Published {
    const char* call;
    const char* cell;
    const char* quant;
    double us;
};
// "CANN MoE Dispatch/Combine", section on performance data: H 7168, K 8, 8 NPUs, 4 experts each.
constexpr Published published[] = {
    {"dispatch", "decode/8", "none", 17.1},  {"dispatch", "decode/8", "quantised", 16.6},
    {"dispatch", "prefill/8", "none", 170},  {"dispatch", "prefill/8", "quantised", 113},
    {"combine", "decode/8", "none", 19.4},   {"combine", "decode/8", "quantised", 18.8},
    {"combine", "prefill/8", "none", 150.7}, {"combine", "prefill/8", "quantised", 108},
};
// The sample's protocol, and Switchyard with its default path home and with the one that puts rows home.
constexpr const char* table_contestants[] = {"sample", "packed", "padded"};

double cell_us(const Results& results, const Published& p, const char* contestant) {
    const Result* r = results.find(p.cell, fmt::format("{} {}", contestant, p.quant), p.call);
    return r ? r->group.median : 0;
}

}  // namespace

Plan seed_table_plan(const Flags& flags) {
    Tree eight{.ranks = 8, .cells = {}};
    for (const auto& [scenario, tokens] : {std::pair{"decode", int64_t{8}}, {"prefill", int64_t{256}}}) {
        Cell cell{.name = fmt::format("{}/8", scenario),
                  .scenario = scenario,
                  .entries = {},
                  .seconds = 4 * flags.seconds,
                  .curve = {},
                  .at = {}};
        for (const char* contestant : table_contestants)
            for (const auto& [label, quant] : {std::pair{"none", "none"}, {"quantised", "mxfp8_e5m2/int8_block8"}})
                cell.entries.push_back(entry(flags, 8, contestant, fmt::format("{} {}", contestant, label), tokens, quant));
        eight.cells.push_back(std::move(cell));
    }
    return {{std::move(eight)}};
}

void print_seed_table(const Results& results) {
    fmt::print(
        "\nThe table of the CANN sample, H 7168, K 8, 8 ranks, 4 experts each. Published: 8 NPUs, another machine; its times "
        "do not "
        "compare with\nours, its gain does. Here: 8 ranks of this machine, medians.\n\n"
        "{:10} {:>5} {:16} {:>10} {:>6}   {:>10} {:>6}   {:>10} {:>6}   {:>10} {:>6}\n"
        "{:10} {:>5} {:16} {:>17}   {:>17}   {:>17}   {:>17}\n",
        "call", "T", "format", "us", "gain", "us", "gain", "us", "gain", "us", "gain", "", "", "", "published",
        "sample's protocol", "packed, read", "padded, push");
    for (size_t i = 0; i < std::size(published); ++i) {
        const Published& p = published[i];
        const Published& base = published[i / 2 * 2];
        const bool is_base = i % 2 == 0;
        const Result* r = results.find(p.cell, fmt::format("sample {}", p.quant), p.call);
        const std::string format = is_base                                  ? "unquantised"
                                   : std::string_view(p.call) == "dispatch" ? "MXFP8 E5M2"
                                                                            : "INT8 per 8";
        std::string line = fmt::format("{:10} {:>5} {:16} {:10.1f} {:>6}", p.call, r ? r->entry->shape.tokens[0] : 0, format,
                                       p.us, is_base ? "" : fmt::format("{:.2f}", base.us / p.us));
        for (const char* c : table_contestants) {
            const double us = cell_us(results, p, c), base_us = cell_us(results, base, c);
            line += fmt::format("   {:10.1f} {:>6}", us, is_base || us == 0 ? "" : fmt::format("{:.2f}", base_us / us));
        }
        fmt::print("{}\n", line);
    }
}

std::vector<nlohmann::json> seed_table_lines(const Results& results) {
    std::vector<nlohmann::json> lines;
    for (const Published& p : published) {
        nlohmann::json line = {
            {"seed_table", p.call}, {"cell", p.cell}, {"format", p.quant}, {"published_us_other_machine", p.us}};
        for (const char* c : table_contestants) line[fmt::format("{}_us", c)] = cell_us(results, p, c);
        lines.push_back(std::move(line));
    }
    return lines;
}

}  // namespace switchyard::bench
