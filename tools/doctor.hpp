// The parts of `switchyard doctor`: what was found, the probe, and the groups that are open on this host.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace switchyard::tools {

/// One thing that was looked at.
struct Finding {
    enum class Level { ok, note, finding };
    Level level = Level::ok;
    std::string check = {};  ///< "cpus", "open files", ...
    std::string seen = {};
    std::string why = {};   ///< it matters
    std::string cure = {};  ///< the command
    nlohmann::json facts = nlohmann::json::object();
};

/// "finding", "note", "ok".
const char* level_name(Finding::Level level);

/// One line of JSON; bytes that are no UTF-8 are replaced.
std::string json_line(const nlohmann::json& json);

/// The first line of a file, "" where there is none; the number it starts with.
std::string line_of_file(const std::string& path);
int64_t number_of_file(const std::string& path, int64_t otherwise);

/// What the probe expects of a machine where each of its ranks has a CPU.
inline constexpr double probe_latency_us_max = 50;
inline constexpr double probe_share_min = 0.6;
inline constexpr int probe_ranks_max = 8;

/// Memory that the probe touches in all of its `ranks` processes.
int64_t probe_bytes(int ranks);

/// Plays one rank of the probe, in a process that launch() started. Returns its exit code.
int probe_rank();

/// Starts `ranks` processes (2..probe_ranks_max) that open a session and measure, for at most two seconds; the result as a
/// finding. `cpus` of this process can run at the same time.
Finding probe(int ranks, double cpus, char** argv);

/// Prints the groups of this user (of everybody for root) on this host, and who waits for whom in them. Returns the exit code.
int show_groups(bool json);

}  // namespace switchyard::tools
