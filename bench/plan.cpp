#include "plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "bars.hpp"
#include "contestant.hpp"
#include "curves.hpp"
#include "strategies.hpp"

namespace switchyard::bench {

using tools::Mistake;

bool Tree::by_mpirun() const {
    for (const Cell& cell : cells)
        for (const Entry& e : cell.entries)
            if (find_contestant(e.contestant)->starts_by_mpirun) return true;
    return false;
}

const std::vector<Scenario>& scenarios() {
    static const std::vector<Scenario> all = {
        {"decode", "8 tokens per rank", {8}, "uniform", {}},
        {"prefill", "256 tokens per rank", {256}, "uniform", {}},
        {"large", "4096 tokens per rank", {4096}, "uniform", {"limit", "packed", "in_place", "open_mpi"}},
        {"hot", "256 tokens per rank, every token's first choice is one expert", {256}, "onehot", {}},
        {"one", "1 token per rank", {1}, "uniform", {}},
        {"ragged",
         "200, 24, 0, 256, 1, 96, 8, 64 tokens, one slot in four unused",
         {200, 24, 0, 256, 1, 96, 8, 64},
         "drop",
         {}},
    };
    return all;
}

const Scenario* find_scenario(const std::string& name) {
    for (const Scenario& s : scenarios())
        if (name == s.name) return &s;
    return nullptr;
}

namespace {

std::string names_of(const auto& all) {
    std::string text;
    for (const auto& a : all) text += fmt::format("{}{}", text.empty() ? "" : ", ", a.name);
    return text;
}

// "mxfp8_e5m2" or "mxfp8_e5m2/int8_block8": dispatch, and combine.
void set_quant(Options& options, const std::string& text) {
    const size_t slash = text.find('/');
    const std::string combine = slash == std::string::npos ? "none" : text.substr(slash + 1);
    if (Status s = set_option(options, *find_option("dispatch_quant"), text.substr(0, slash)); !s.ok()) throw Mistake(s.text());
    if (Status s = set_option(options, *find_option("combine_quant"), combine); !s.ok()) throw Mistake(s.text());
}

int to_ranks(const std::string& text) {
    char* end = nullptr;
    const long n = std::strtol(text.c_str(), &end, 10);
    if (end == text.c_str() || *end || n < 1 || n > 1024)
        throw Mistake(fmt::format("--ranks has \"{}\"; give numbers from 1 to 1024, as in 2,8", text));
    return static_cast<int>(n);
}

std::vector<std::string> contestants_of(const Flags& flags, const Scenario& scenario) {
    std::vector<std::string> names = flags.contestants;
    if (names.empty())
        for (const ContestantInfo& c : contestants()) {
            const auto& some = scenario.contestants;
            const bool named =
                std::any_of(some.begin(), some.end(), [&](const char* n) { return std::string_view(n) == c.name; });
            if (!c.is_part && (some.empty() || named)) names.push_back(c.name);
        }
    if (!flags.sabotage.empty() && std::find(names.begin(), names.end(), flags.sabotage) == names.end())
        throw Mistake(fmt::format("--sabotage {}: that contestant does not take part", flags.sabotage));
    return names;
}

}  // namespace

int64_t memory_of(const Plan& plan) {
    int64_t most = 0;
    for (const Tree& tree : plan.trees)
        for (const Cell& cell : tree.cells) {
            int64_t bytes = 0;
            for (const Entry& e : cell.entries) {
                int64_t rows = 0;
                for (const int64_t tokens : e.shape.tokens) rows += tokens * e.shape.options.topk;
                bytes += rows * e.shape.token_bytes() * find_contestant(e.contestant)->copies;
            }
            most = std::max(most, bytes);
        }
    return most;
}

tools::Case shape_of(const Flags& flags, int ranks, const std::vector<int64_t>& tokens, const std::string& quant) {
    tools::Case c = flags.base;
    c.ranks = ranks;
    c.options.experts = flags.experts_per_rank * ranks;
    c.tokens.clear();
    for (int r = 0; r < ranks; ++r) c.tokens.push_back(tokens[static_cast<size_t>(r) % tokens.size()]);
    c.options.tokens_max = std::max<int64_t>(1, *std::max_element(c.tokens.begin(), c.tokens.end()));
    set_quant(c.options, quant);
    if (Status s = check_options(c.options, ranks); !s.ok()) throw Mistake(s.text());
    return c;
}

Plan make_plan(const Flags& flags) {
    if (flags.bars) return bars_plan(flags);
    if (flags.seed_table) return seed_table_plan(flags);
    if (flags.curves) return curves_plan(flags);
    if (flags.strategies) return strategies_plan(flags);

    for (const std::string& name : flags.contestants)
        if (!find_contestant(name))
            throw Mistake(fmt::format("there is no contestant \"{}\" in this build; see switchyard bench --list", name));

    Plan plan;
    for (const std::string& text : flags.ranks) {
        Tree tree{.ranks = to_ranks(text), .cells = {}};
        for (const std::string& scenario : flags.scenarios) {
            const Scenario* s = find_scenario(scenario);
            if (!s) throw Mistake(fmt::format("there is no scenario \"{}\"; choose from {}", scenario, names_of(scenarios())));
            const std::vector<std::string> names = contestants_of(flags, *s);
            Cell cell{.name = fmt::format("{}/{}", scenario, tree.ranks),
                      .scenario = scenario,
                      .entries = {},
                      .seconds = flags.seconds,
                      .curve = {},
                      .at = {}};
            for (const std::string& quant : flags.quants)
                for (const std::string& name : names) {
                    Entry e{.label = flags.quants.size() > 1 ? fmt::format("{} {}", name, quant) : name,
                            .contestant = name,
                            .shape = {}};
                    e.shape = shape_of(flags, tree.ranks, s->tokens, quant);
                    e.shape.routing = flags.base.routing.empty() ? s->routing : flags.base.routing;
                    cell.entries.push_back(std::move(e));
                }
            tree.cells.push_back(std::move(cell));
        }
        plan.trees.push_back(std::move(tree));
    }
    return plan;
}

}  // namespace switchyard::bench
