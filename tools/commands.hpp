// The subcommands. Each takes its own arguments (argv[0] is the program, argv[1] the subcommand) and returns the exit code:
// 0 done and right, 1 wrong result or failed rank (doctor: a finding), 2 bad arguments.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "case.hpp"
#include "simulate.hpp"

namespace switchyard::tools {

int gen_command(int argc, char** argv);
int run_command(int argc, char** argv);
int verify_command(int argc, char** argv);
int trace_command(int argc, char** argv);
int doctor_command(int argc, char** argv);
int plan_command(int argc, char** argv);
/// Becomes the program switchyard-bench, or switchyard-kernels after --kernels; both lie beside this one.
int bench_command(int argc, char** argv);

/// What the command line of run says, and of trace.
struct RunFlags {
    CaseFlags flags;
    std::string folder, output;
    std::string trace;   ///< file of the events, or ""
    bool waits = false;  ///< print who waited for whom
    int slow_rank = -1;  ///< sleeps before each dispatch
    int64_t slow_ms = 0;
    int rounds = 20;
    bool json = false;
    std::string placement;  ///< file of a table, or ""
    bool compare = false;   ///< rounds without it in between
    double expert_us_per_row = 0;
    std::string loads;  ///< file that a line of loads is added to, or ""
};

/// What the command line of verify says.
struct VerifyFlags {
    std::optional<RunFlags> races;  ///< with --rounds or --jitter: a run, and nothing of what follows
    CaseFlags flags;
    std::string folder, output;
    bool json = false;
    bool local = false, landings = false;  ///< the routing without communication; every landing on threads
    bool sim = false;
    SimulateFlags simulated;
};

/// What verify --local and --landings do with a case, from a folder or made up. Return the exit code.
int verify_local(const Case& c, bool json);
int verify_landings(const Case& c, bool json);

/// Parse what follows the subcommand. Return -1 to go on, else the exit code: 0 after --help, 2 after a mistake, which has been
/// told in one line. Throw Mistake.
int parse(CLI::App& app, int argc, char** argv);
int parse_run(int argc, char** argv, RunFlags* run);
int parse_trace(int argc, char** argv, RunFlags* run);
int parse_verify(int argc, char** argv, VerifyFlags* verify);

}  // namespace switchyard::tools
