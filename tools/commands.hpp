// The subcommands. Each takes its own arguments (argv[0] is the program, argv[1] the subcommand) and returns the exit code:
// 0 done and right, 1 wrong result or failed rank (doctor: a finding), 2 bad arguments.
#pragma once

#include <CLI/CLI.hpp>

namespace switchyard::tools {

int gen_command(int argc, char** argv);
int run_command(int argc, char** argv);
int verify_command(int argc, char** argv);
int trace_command(int argc, char** argv);
int doctor_command(int argc, char** argv);
/// Becomes the program switchyard-bench, or switchyard-kernels after --kernels; both lie beside this one.
int bench_command(int argc, char** argv);

/// Parses what follows the subcommand. Returns -1 to go on, else the exit code (0 after --help, 2 after a mistake told in one
/// line).
int parse(CLI::App& app, int argc, char** argv);

}  // namespace switchyard::tools
