// Which landing is the fastest for a shape on this machine, by a cost model that is calibrated once per machine.
//
//   Calibration c = calibrate();  save_calibration(c, calibration_path());      // what `switchyard plan --calibrate` does
//   for (const Estimate& e : estimate_landings(options, ranks, tokens, c)) ...  // the cheapest first
//
// A session with landing = automatic takes the first of these for tokens_max tokens, with the calibration of the user's cache
// folder, or built-in figures when there is none. What is estimated is dispatch and one read of every row where it lies, which
// is where the landings differ; combine costs the same with all of them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "switchyard/options.hpp"
#include "switchyard/status.hpp"

namespace switchyard {

/// What the pieces of a dispatch cost, in nanoseconds; `cpus` is how many ranks can work at the same time.
struct Calibration {
    double call = 1500;        ///< per call and hop
    double peer = 400;         ///< per peer and hop: flag, count row, waking it
    double row = 60;           ///< per row that is written or put in order
    double row_apart = 20;     ///< per row that is found where its token lies
    double look = 1.2;         ///< per id that an owner looks at where rows lie apart
    double write_cache = 12;   ///< per KiB written, in all fitting the cache
    double write_memory = 90;  ///< per KiB written beyond it
    double read_cache = 12;    ///< per KiB read
    double read_memory = 60;
    int64_t cpus = 1;
    int64_t cache_bytes = 2 << 20;    ///< of one rank
    std::string source = "built in";  ///< where it comes from, for explain()
};

/// What one landing is expected to cost.
struct Estimate {
    Landing landing;
    int64_t group_ranks;  ///< of two_level
    double us;            ///< dispatch and one read of every row, slowest rank, with even routing
    int64_t bytes;        ///< written by one rank
    std::string why;      ///< "T tokens once to 1.9 of 4 ranks, ..."
};

/// One line per landing, cheapest first; ties go to the lower number of the landing. `tokens` per rank; `loadable`: whether all
/// windows can be loaded (one host). Pure. Throws bad_input as check_options.
SY_API std::vector<Estimate> estimate_landings(const Options& options, int64_t ranks, int64_t tokens,
                                               const Calibration& calibration, bool loadable = true);

/// Replaces landing automatic by the first of these for tokens_max tokens, with load_calibration(calibration_path()); leaves
/// any other landing alone. Returns the estimates, empty then, and where the figures come from. Throws bad_input.
struct Chosen {
    std::vector<Estimate> estimates;
    std::string figures;
};
SY_API Chosen choose_landing(Options& options, int64_t ranks);

/// Bytes that dispatch of these topk_ids [tokens,K] writes on `rank`: what SessionStats::bytes_sent grows by. Exact, for every
/// landing but automatic; the x place (Session::x) is not used. Throws bad_input.
SY_API int64_t predicted_bytes(const Options& options, int64_t ranks, int rank, std::span<const int32_t> topk_ids);

/// Measures this machine: plays small groups of threads with every landing, a few seconds, and fits the figures above to the
/// times. Throws as Session::open.
SY_API Calibration calibrate();

/// $XDG_CACHE_HOME/switchyard/calibration, or ~/.cache/...; "" when neither is set.
SY_API std::string calibration_path();
/// The file of that path; built-in figures when there is none. Throws bad_input: a file that is none, naming what is wrong.
SY_API Calibration load_calibration(const std::string& path);
/// Writes it whole or not at all; makes the folder. Throws system.
SY_API void save_calibration(const Calibration& calibration, const std::string& path);

}  // namespace switchyard
