// Starts the ranks of a run as processes of this program, and hears what they report.
//
// The parent re-executes itself once per rank with the same arguments; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
// are set as torchrun sets them, SWITCHYARD_TOKEN keeps strangers out. Ranks die with their parent, however it ends.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace switchyard::tools {

/// How a rank's process ended.
struct RankEnd {
    int exit_code = 0;
    int signal = 0;              ///< that killed it, or 0
    bool stopped_by_us = false;  ///< killed because the launcher lost its patience
};

/// How long the others may go on when a rank has ended, before they are killed.
struct Patience {
    std::function<int64_t(int rank)> after_failure_ms;  ///< that rank failed
    int64_t after_end_ms = 0;                           ///< it ended well
};

/// Runs `ranks` copies and returns when all have ended. `heard(rank, message)` is called for every report, in order per rank.
std::vector<RankEnd> launch(int ranks, char** argv, const Patience& patience,
                            const std::function<void(int, const nlohmann::json&)>& heard);

/// `bytes` random bytes (at most 32) as hexadecimal digits: names and tokens that no other run has.
std::string random_hex(size_t bytes);

/// True in a process that launch() started.
bool is_rank();

/// Sends a message to the parent (in a rank).
void report(const nlohmann::json& message);

}  // namespace switchyard::tools
