// The hook for a page that shows a benchmark: the same lines that --json prints.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

namespace switchyard::bench {

/// Writes one self-contained HTML file from the lines of one run, each an object:
///
///   lines[0]              the machine: switchyard, compiler, build, kernels, processor, cpus, system, load_before, start, ...
///   with "call"           one call of one contestant in one cell: Result::to_json(). Lines of one "cell" were played in turns
///                         and compare; cells do not, except where a bar says so
///   with "bar"            a bar and what was measured: Bar::to_json()
///   with "seed_table"     a line of the published table with ours beside it
void render_report(const std::vector<nlohmann::json>& lines, const std::filesystem::path& path);

}  // namespace switchyard::bench
