// A run, read back from the lines that --json prints: one JSON object each, the machine's first, then results, bars and the
// sample's table. Fields that are not known here are left alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace switchyard::bench::lines {

class Fields;

/// One call of one contestant in one cell. Times in us.
struct Row {
    explicit Row(const Fields& fields);

    bool same_tokens() const;  ///< all ranks have as many
    bool ours() const;         ///< packed, in_place, padded
    std::string ranks_text() const;
    std::string name() const;  ///< "prefill, 8 ranks"
    std::string tokens_text() const;
    std::string task() const;  ///< all of its shape but tokens and formats
    std::string shape() const;

    std::string scenario, cell, dtype, routing, contestant, label, call, settings;
    std::string formats;  ///< DISPATCH/COMBINE, without what is none
    int64_t ranks, hidden, topk, experts, rounds, allocations;
    std::vector<double> tokens;  ///< of each rank
    double p50, p99, min, max, bytes, gb_per_s;
    std::optional<double> own, wait, of_limit, rows_per_rank, cost_ns;
    std::vector<std::vector<double>> waits;  ///< [R][R], of a round, or empty: row waited with column as the one it lacked
    std::string curve, at_text;              ///< the axis and the place on it of a scaling curve, or ""
    std::optional<double> at;                ///< missing: at_text is a name
};

struct Bar {
    std::string text, cell;
    double bound, measured, of_best, from_own_start;
    bool at_most, missing, reached;
};

inline constexpr const char* seed_contestants[] = {"sample", "packed", "padded"};
struct SeedLine {
    std::string call, cell, format;
    double published, us[std::size(seed_contestants)];  ///< published: another machine's
};

struct Run {
    /// Throws Mistake that names the line and the field that is not as expected.
    explicit Run(const std::vector<nlohmann::json>& lines);

    nlohmann::json machine;
    std::vector<Row> rows;
    std::vector<Bar> bars;
    std::vector<SeedLine> seeds;
};

/// The lines of a file. Throws Mistake when it cannot be read or a line is not JSON.
std::vector<nlohmann::json> read(const std::string& path);

}  // namespace switchyard::bench::lines
