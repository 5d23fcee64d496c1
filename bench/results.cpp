#include "results.hpp"

#include "curves.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "processes.hpp"

namespace switchyard::bench {

using nlohmann::json;

Times times_of(std::vector<double> us) {
    if (us.empty()) return {};
    std::sort(us.begin(), us.end());
    const auto at = [&](double share) {
        return us[static_cast<size_t>(std::ceil(share * static_cast<double>(us.size()))) - 1];
    };
    const size_t half = us.size() / 2;
    const double median = us.size() % 2 ? us[half] : (us[half - 1] + us[half]) / 2;
    return {median, at(0.99), us.front(), us.back(), us.size()};
}

namespace {

// Per round the slowest of all ranks.
std::vector<double> slowest(const std::vector<json>& ranks, const char* what) {
    std::vector<double> us;
    for (const json& r : ranks) {
        const auto& ns = r.at(what);
        us.resize(std::max(us.size(), ns.size()));
        for (size_t i = 0; i < ns.size(); ++i) us[i] = std::max(us[i], ns[i].get<double>() / 1000);
    }
    return us;
}

// Rank by rank the median of what(round), and of those the largest; -1 when there are no rounds.
template <class What>
double largest_median(const std::vector<json>& ranks, const char* counted, What what) {
    double most = -1;
    for (const json& r : ranks) {
        std::vector<double> us;
        for (size_t i = 0; i < r.at(counted).size(); ++i) us.push_back(what(r, i) / 1000);
        if (const Times t = times_of(std::move(us))) most = std::max(most, t.median);
    }
    return most;
}

double mean(const std::vector<json>& ranks, const char* what) {
    double sum = 0;
    for (const json& r : ranks) sum += r.at(what).get<double>();
    return sum / static_cast<double>(ranks.size());
}

void show(const std::string& text) {
    if (!isatty(STDERR_FILENO)) return;
    tools::to_stderr("\r\x1b[K{}", text);
    std::fflush(stderr);
}

}  // namespace

json Result::to_json() const {
    const Options& o = entry->shape.options;
    const auto text = [&](const char* name) { return option_text(*find_option(name), o); };
    json line = {{"scenario", cell->scenario},
                 {"cell", cell->name},
                 {"ranks", entry->shape.ranks},
                 {"tokens", entry->shape.tokens},
                 {"hidden", o.hidden},
                 {"topk", o.topk},
                 {"experts", o.experts},
                 {"dtype", text("dtype")},
                 {"dispatch_quant", text("dispatch_quant")},
                 {"combine_quant", text("combine_quant")},
                 {"routing", entry->shape.routing},
                 {"seed", entry->shape.seed},
                 {"contestant", entry->contestant},
                 {"label", entry->label},
                 {"call", call},
                 {"settings", settings},
                 {"checked", true},
                 {"rounds", group.rounds},
                 {"p50_us", group.median},
                 {"p99_us", group.p99},
                 {"min_us", group.min},
                 {"max_us", group.max},
                 {"slowest_rank_p50_us", slowest_rank.median},
                 {"bytes_per_rank", bytes_per_rank},
                 {"gb_per_s", gb_per_s()},
                 {"allocations", allocations}};
    if (!cell->curve.empty()) {
        line["curve"] = cell->curve;
        const bool is_number = cell->at.find_first_not_of("0123456789") == std::string::npos;
        line["at"] = is_number ? json(std::stoll(cell->at)) : json(cell->at);
        line["cost_ns"] = cost_ns(*this);
    }
    line["rows_per_rank"] = rows_per_rank;
    if (!wait_by_rank_us.empty() && cell->curve.empty()) line["wait_by_rank_us"] = wait_by_rank_us;
    line["own_us"] = own_us < 0 ? json() : json(own_us);
    line["wait_us"] = wait_us < 0 ? json() : json(wait_us);
    line["of_limit"] = of_limit > 0 ? json(of_limit) : json();
    return line;
}

const Result* Results::find(const std::string& cell, const std::string& label, const std::string& call) const {
    for (const Result& r : results_)
        if (r.cell->name == cell && r.entry->label == label && r.call == call) return &r;
    return nullptr;
}

void Results::take(const Cell& cell, const std::vector<std::vector<json>>& told) {
    const size_t first = results_.size();
    for (size_t e = 0; e < cell.entries.size(); ++e) {
        const std::vector<json>& ranks = told[e];
        const auto add = [&](const char* call, const char* alone, const char* wait, double bytes) {
            const Times group = times_of(slowest(ranks, call));
            if (!group) return;
            Result r{.cell = &cell,
                     .entry = &cell.entries[e],
                     .call = call,
                     .settings = ranks[0].at("settings"),
                     .group = group,
                     .slowest_rank = alone ? times_of(slowest(ranks, alone)) : group,
                     .wait_by_rank_us = {}};
            r.bytes_per_rank = bytes;
            r.rows_per_rank = mean(ranks, "rows");  // what leaves all ranks arrives: the mean is the same both ways
            for (const json& rank : ranks) {
                std::vector<double> row;
                for (const json& ns : rank.at("waited_by_rank"))
                    row.push_back(ns.get<double>() / 1000 / std::max(1.0, rank.at("rounds").get<double>()));
                if (!row.empty()) r.wait_by_rank_us.push_back(std::move(row));
            }
            r.allocations = 0;
            for (const json& rank : ranks) r.allocations += rank.at("allocations").get<int64_t>();
            if (alone && wait) {
                r.wait_us =
                    largest_median(ranks, wait, [&](const json& rank, size_t i) { return rank.at(wait)[i].get<double>(); });
                r.own_us = largest_median(ranks, wait, [&](const json& rank, size_t i) {
                    return rank.at(alone)[i].get<double>() - rank.at(wait)[i].get<double>();
                });
            }
            results_.push_back(std::move(r));
        };
        const double out = mean(ranks, "dispatch_bytes");
        const Options& o = cell.entries[e].shape.options;
        const double read =
            mean(ranks, "rows") *
            static_cast<double>(o.dispatch_quant == Format::none ? cell.entries[e].shape.token_bytes() : o.hidden);
        add("dispatch", "dispatch_alone", "dispatch_wait", out);
        add("first_touch", nullptr, nullptr, out + read);
        add("first_touch_tiles", nullptr, nullptr, out + 2 * read);
        add("combine", "combine_alone", "combine_wait", mean(ranks, "combine_bytes"));
    }
    // The limit of the same shape and formats.
    for (size_t i = first; i < results_.size(); ++i)
        for (size_t j = first; j < results_.size(); ++j) {
            const Result& limit = results_[j];
            const tools::Case &a = results_[i].entry->shape, &b = limit.entry->shape;
            if (limit.entry->contestant == "limit" && limit.call == results_[i].call && a.tokens == b.tokens &&
                a.options.experts == b.options.experts && a.options.dispatch_quant == b.options.dispatch_quant &&
                a.options.combine_quant == b.options.combine_quant)
                results_[i].of_limit = limit.group.median / results_[i].group.median;
        }
}

Results::Results(const Plan& plan, char** argv) {
    for (size_t t = 0; t < plan.trees.size(); ++t) {
        const Tree& tree = plan.trees[t];
        std::vector<std::vector<std::vector<json>>> told(tree.cells.size());  // [cell][entry][rank]
        for (size_t c = 0; c < told.size(); ++c)
            told[c].assign(tree.cells[c].entries.size(), std::vector<json>(static_cast<size_t>(tree.ranks)));
        // Text -> ranks that told it; of the first three texts, because the others follow from them.
        std::vector<std::pair<std::string, std::vector<int>>> wrong;
        const auto note = [&](const std::string& text, int rank) {
            for (auto& [known, ranks] : wrong)
                if (known == text) return ranks.push_back(rank);
            if (wrong.size() < 3) wrong.push_back({text, {rank}});
        };
        const std::string ended =
            play_tree(static_cast<int>(t), tree.ranks, tree.by_mpirun(), argv, [&](int rank, const json& m) {
                if (m.contains("error")) return note(m["error"].get<std::string>(), rank);
                const auto c = m.at("cell").get<size_t>();
                if (m.contains("wrong"))
                    return note(fmt::format("{}: {}", tree.cells[c].name, m["wrong"].get<std::string>()), rank);
                if (m.contains("entry"))
                    told[c][m["entry"].get<size_t>()][static_cast<size_t>(rank)] = m;
                else if (rank == 0)
                    show(fmt::format("[{} of {}] {}: {}", c + 1, tree.cells.size(), tree.cells[c].name,
                                     m.contains("round") ? fmt::format("round {}", m["round"].get<int>())
                                                         : "checking against the reference"));
            });
        show("");
        std::string errors;
        for (const auto& [text, ranks] : wrong)
            errors += fmt::format("{}rank{} {}: {}", errors.empty() ? "" : "\n", ranks.size() > 1 ? "s" : "",
                                  fmt::join(ranks, ", "), text);
        if (!errors.empty() || !ended.empty()) throw std::runtime_error(errors.empty() ? ended : errors);
        for (size_t c = 0; c < told.size(); ++c) {
            for (const auto& ranks : told[c])
                for (const json& r : ranks)
                    if (r.is_null()) throw std::runtime_error(fmt::format("{}: a rank told no times", tree.cells[c].name));
            take(tree.cells[c], told[c]);
        }
    }
}

}  // namespace switchyard::bench
