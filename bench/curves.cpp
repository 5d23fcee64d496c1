#include "curves.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <functional>

#include "bars.hpp"
#include "contestant.hpp"

namespace switchyard::bench {
namespace {

// Where the other axes stand while one moves. 2048 columns: 4,096 tokens of 8 experts still fit every machine.
constexpr int64_t tokens_mid = 256, hidden_mid = 2048;

constexpr const char* labels[] = {"limit", "packed", "in_place"};
constexpr const char* calls[] = {"dispatch", "first_touch", "combine"};

struct Axis {
    const char* name;
    const char* text;
    std::vector<int64_t> values;
    void (*set)(tools::Case&, int64_t);
};

const std::vector<Axis>& axes() {
    static const std::vector<Axis> all = {
        {"tokens",
         "tokens per rank",
         {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096},
         [](tools::Case& c, int64_t v) {
             std::fill(c.tokens.begin(), c.tokens.end(), v);
             c.options.tokens_max = v;
         }},
        {"ranks",
         "ranks of 64 tokens",
         {1, 2, 4, 8, 16, 32, 64},
         [](tools::Case& c, int64_t) {
             std::fill(c.tokens.begin(), c.tokens.end(), 64);
             c.options.tokens_max = 64;
         }},
        {"topk",
         "experts per token",
         {1, 2, 4, 8, 16},
         [](tools::Case& c, int64_t v) {
             c.options.topk = v;
             c.options.experts = std::max(c.options.experts, 2 * v);
         }},
        {"experts",
         "experts of 2 ranks",
         {8, 16, 32, 64, 128, 256, 512, 1024},
         [](tools::Case& c, int64_t v) { c.options.experts = v; }},
        {"hidden", "columns", {512, 1024, 2048, 4096, 7168, 16384}, [](tools::Case& c, int64_t v) { c.options.hidden = v; }},
    };
    return all;
}

// From even to one expert that every token wants.
constexpr const char* skews[] = {"balanced", "uniform", "lognormal", "zipf", "onehot"};

Cell cell_at(const Flags& flags, const char* curve, const std::string& at, int ranks,
             const std::function<void(tools::Case&)>& set) {
    Cell cell{.name = fmt::format("{}/{}", curve, at),
              .scenario = "curve",
              .entries = {},
              .seconds = flags.seconds,
              .curve = curve,
              .at = at};
    for (const char* label : labels) {
        Entry e{.label = label, .contestant = label, .shape = shape_of(flags, ranks, {tokens_mid}, "none")};
        e.shape.routing = "uniform";
        if (flags.hidden_is_default) e.shape.options.hidden = hidden_mid;
        set(e.shape);
        cell.entries.push_back(std::move(e));
    }
    return cell;
}

int usable_cpus() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

// Rows of one rank, and how much of a CPU that rank had to move them with.
double cost_ns(const Result& r) {
    static const int cpus = usable_cpus();
    const double share = std::min(1.0, static_cast<double>(cpus) / r.entry->shape.ranks);
    const double units = r.cell->curve == "hidden" ? static_cast<double>(r.entry->shape.token_bytes()) / 1024 : 1;
    return r.rows_per_rank > 0 ? 1000 * r.group.median * share / r.rows_per_rank / units : 0;
}

Plan curves_plan(const Flags& flags) {
    std::vector<Tree> trees;
    const auto tree = [&](int ranks) -> Tree& {
        for (Tree& t : trees)
            if (t.ranks == ranks) return t;
        trees.push_back({.ranks = ranks, .cells = {}});
        return trees.back();
    };
    for (const Axis& axis : axes())
        for (const int64_t v : axis.values) {
            const int ranks = axis.name == std::string_view("ranks") ? static_cast<int>(v) : 2;
            tree(ranks).cells.push_back(
                cell_at(flags, axis.name, fmt::format("{}", v), ranks, [&](tools::Case& c) { axis.set(c, v); }));
        }
    for (const char* skew : skews)
        tree(2).cells.push_back(cell_at(flags, "skew", skew, 2, [&](tools::Case& c) { c.routing = skew; }));
    return {std::move(trees)};
}

std::vector<Step> steps(const Results& results) {
    std::vector<Step> all;
    const auto walk = [&](const std::string& curve, const std::vector<std::string>& values) {
        for (const char* label : labels)
            for (const char* call : calls) {
                const Result* before = nullptr;
                for (const std::string& at : values) {
                    const std::string cell = fmt::format("{}/{}", curve, at);
                    const Result* r = results.find(cell, label, call);
                    if (!r) continue;
                    Step s{.cell = r->cell, .label = label, .call = call, .cost = cost_ns(*r)};
                    if (before) {
                        s.ratio = s.cost / cost_ns(*before);
                        // A first touch reads what dispatch has moved: its limit is that of the move.
                        const char* of = s.call == "combine" ? "combine" : "dispatch";
                        const Result* a = results.find(before->cell->name, "limit", of);
                        const Result* b = results.find(cell, "limit", of);
                        if (a && b) s.limit_ratio = cost_ns(*b) / cost_ns(*a);
                    }
                    all.push_back(std::move(s));
                    before = r;
                }
            }
    };
    for (const Axis& axis : axes()) {
        std::vector<std::string> values;
        for (const int64_t v : axis.values) values.push_back(fmt::format("{}", v));
        walk(axis.name, values);
    }
    walk("skew", {std::begin(skews), std::end(skews)});
    return all;
}

nlohmann::json Step::to_json() const {
    return {
        {"curve", cell->curve},      {"at", cell->at},     {"label", label}, {"call", call}, {"cost_ns", cost}, {"step", ratio},
        {"limit_step", limit_ratio}, {"cliff", is_cliff()}};
}

void print_curves(const Results&, const std::vector<Step>& steps) {
    const auto column = [&](const Cell* cell, const char* label, const char* call) {
        for (const Step& s : steps)
            if (s.cell == cell && s.label == label && s.call == call)
                return fmt::format("{:8.1f} {:>6}", s.cost,
                                   s.ratio == 0 ? "" : fmt::format("{:.2f}{}", s.ratio, s.is_cliff() ? "!" : " "));
        return fmt::format("{:15}", "");
    };
    const auto table = [&](const std::string& curve, const std::string& text, const char* unit) {
        fmt::print(
            "\n{} ({}), and its ratio to the line above\n{:>10}  {:^31}  {:^31}  {:^15}  {:^15}\n{:>10}  {:^15} {:^15}  {:^15} "
            "{:^15}  {:^15}  {:^15}\n",
            text, unit, "", "limit", "packed", "in_place", "in_place", "", "dispatch", "combine", "dispatch", "combine",
            "dispatch", "first touch");
        std::vector<const Cell*> cells;
        for (const Step& s : steps)
            if (s.cell->curve == curve && std::find(cells.begin(), cells.end(), s.cell) == cells.end()) cells.push_back(s.cell);
        for (const Cell* c : cells)
            fmt::print("{:>10}  {} {}  {} {}  {}  {}\n", c->at, column(c, "limit", "dispatch"), column(c, "limit", "combine"),
                       column(c, "packed", "dispatch"), column(c, "packed", "combine"), column(c, "in_place", "dispatch"),
                       column(c, "in_place", "first_touch"));
    };
    for (const Axis& axis : axes())
        table(axis.name, axis.text, axis.name == std::string_view("hidden") ? "ns per row and KiB" : "ns per row");
    table("skew", "routing, from even to one expert", "ns per row");

    int cliffs = 0;
    for (const Step& s : steps) cliffs += s.is_cliff() && s.label != "limit";
    fmt::print(
        "\nWhere ranks share CPUs a row costs its share of one. ! marks a cliff: a step above {:.1f} that is also {:.1f} times "
        "that of the machine's own limit.\n{} of {} steps are cliffs.\n",
        Step::bound, Step::bound, cliffs,
        std::count_if(steps.begin(), steps.end(), [](const Step& s) { return s.ratio > 0 && s.label != "limit"; }));
}

}  // namespace switchyard::bench
