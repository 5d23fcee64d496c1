#include "strategies.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "bars.hpp"
#include "contestant.hpp"
#include "switchyard/strategy.hpp"

namespace switchyard::bench {
namespace {

constexpr int64_t tokens_of_grid[] = {1, 8, 64, 256, 1024};
constexpr const char* skews[] = {"uniform", "zipf", "onehot"};
constexpr int ranks_of_grid[] = {2, 4, 8};
constexpr int64_t hidden_of_grid = 2048;
constexpr Landing landings[] = {Landing::packed,    Landing::padded,    Landing::in_place,
                                Landing::allgather, Landing::two_level, Landing::alltoallv};

std::string name_of(Landing landing) {
    Options o;
    o.landing = landing;
    return option_text(*find_option("landing"), o);
}

// What is compared: dispatch and one read of every row where it lies.
constexpr const char* call = "first_touch";

}  // namespace

Plan strategies_plan(const Flags& flags) {
    Plan plan;
    for (const int ranks : ranks_of_grid) {
        Tree tree{.ranks = ranks, .cells = {}};
        for (const char* skew : skews)
            for (const int64_t tokens : tokens_of_grid) {
                Cell cell{.name = fmt::format("{}/{}/{}", ranks, skew, tokens),
                          .scenario = "strategies",
                          .entries = {},
                          .seconds = flags.seconds,
                          .curve = fmt::format("{} ranks, {}", ranks, skew),
                          .at = fmt::format("{}", tokens)};
                for (const Landing landing : landings) {
                    Entry e{
                        .label = name_of(landing), .contestant = "landing", .shape = shape_of(flags, ranks, {tokens}, "none")};
                    e.shape.routing = skew;
                    e.shape.options.landing = landing;
                    if (flags.hidden_is_default) e.shape.options.hidden = hidden_of_grid;
                    cell.entries.push_back(std::move(e));
                }
                tree.cells.push_back(std::move(cell));
            }
        plan.trees.push_back(std::move(tree));
    }
    return plan;
}

std::vector<Choice> choices(const Results& results) {
    const Calibration calibration = load_calibration(calibration_path());
    std::vector<Choice> all;
    for (const Result& r : results.all()) {
        if (r.call != call || (!all.empty() && all.back().cell == r.cell)) continue;
        Choice c{.cell = r.cell, .best = {}, .chosen = {}};
        for (const Landing landing : landings) {
            const Result* of = results.find(r.cell->name, name_of(landing), call);
            if (!of || (c.best_us > 0 && of->group.median >= c.best_us)) continue;
            c.best = name_of(landing);
            c.best_us = of->group.median;
        }
        const tools::Case& shape = r.entry->shape;
        const Estimate first = estimate_landings(shape.options, shape.ranks, shape.options.tokens_max, calibration).front();
        c.chosen = name_of(first.landing);
        c.expected_us = first.us;
        if (const Result* of = results.find(r.cell->name, c.chosen, call)) c.chosen_us = of->group.median;
        all.push_back(std::move(c));
    }
    return all;
}

nlohmann::json Choice::to_json() const {
    return {{"strategies", cell->curve}, {"tokens", cell->at},         {"best", best},  {"best_us", best_us}, {"auto", chosen},
            {"auto_us", chosen_us},      {"expected_us", expected_us}, {"loss", loss()}};
}

void print_strategies(const Results& results, const std::vector<Choice>& choices) {
    std::string curve;
    for (const Choice& c : choices) {
        if (c.cell->curve != curve) {
            curve = c.cell->curve;
            fmt::print("\n{}: us for dispatch and one read of every row\n{:>8}", curve, "tokens");
            for (const Landing landing : landings) fmt::print(" {:>11}", name_of(landing));
            fmt::print("   auto takes    expected    loses\n");
        }
        fmt::print("{:>8}", c.cell->at);
        for (const Landing landing : landings) {
            const Result* r = results.find(c.cell->name, name_of(landing), call);
            fmt::print(" {:>11}", r ? fmt::format("{:.1f}{}", r->group.median, c.best == name_of(landing) ? "*" : " ") : "");
        }
        fmt::print("   {:<10} {:>11.1f} {:>7.0f} %\n", c.chosen, c.expected_us, 100 * c.loss());
    }
    const auto over = std::count_if(choices.begin(), choices.end(), [](const Choice& c) { return c.loss() > 0.1; });
    double worst = 0, sum = 0;
    for (const Choice& c : choices) worst = std::max(worst, c.loss()), sum += c.loss();
    fmt::print(
        "\n* is the fastest. auto loses more than 10 % in {} of {} cells, {:.0f} % at most, {:.1f} % on average; its figures: "
        "{}.\n",
        over, choices.size(), 100 * worst, choices.empty() ? 0 : 100 * sum / static_cast<double>(choices.size()),
        load_calibration(calibration_path()).source);
}

}  // namespace switchyard::bench
