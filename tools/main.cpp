// The command line: picks the subcommand.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "case.hpp"
#include "commands.hpp"

namespace switchyard::tools {
namespace {

struct Command {
    const char* name;
    int (*run)(int, char**);
    const char* help;
};
constexpr Command commands[] = {
    {"gen", gen_command, "make a case with golden data:  switchyard gen DIR --ranks 2 --bs 8"},
    {"run", run_command, "dispatch and combine in N processes:  switchyard run [DIR]"},
    {"verify", verify_command,
     "compare golden data with a run's output:  switchyard verify DIR; or play seeds: switchyard verify --sim"},
    {"plan", plan_command, "where experts should lie:  switchyard plan --balance --routing zipf --ranks 8 --write table.json"},
    {"trace", trace_command, "a run as a timeline, and who waits for whom:  switchyard trace --ranks 4 --slow 2:5"},
    {"doctor", doctor_command,
     "can this machine run a group well, and what do open groups wait for:  switchyard doctor [--group]"},
    {"bench", bench_command, "time it against other ways, in one run:  switchyard bench [SCENARIO...]"},
};

void print_help() {
    fmt::print("switchyard {}: Mixture-of-Experts token dispatch and combine\n\n", SWITCHYARD_VERSION);
    for (const Command& c : commands) fmt::print("  {:8} {}\n", c.name, c.help);
    fmt::print("\nswitchyard COMMAND --help lists the options of a command.\n");
}

}  // namespace

int bench_command(int argc, char** argv) {
    struct Part {
        std::string_view word;  // the first argument
        const char *program, *target;
    };
    static constexpr Part parts[] = {
        {"--kernels", "switchyard-kernels",
         "switchyard_kernels, for which CMake must find Google Benchmark (libbenchmark-dev)"},
        {"overlap", "switchyard-overlap", "switchyard_overlap, for which CMake must find OpenBLAS (libopenblas-dev)"},
        {"", "switchyard-bench", "switchyard_bench"}};
    const Part* part = parts;
    while (!part->word.empty() && (argc < 3 || argv[2] != part->word)) ++part;
    const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / part->program;
    execv(program.c_str(), argv + (part->word.empty() ? 1 : 2));
    throw Mistake(
        fmt::format("{} cannot be started: {}; build the target {}", program.string(), std::strerror(errno), part->target));
}

int main(int argc, char** argv) {
    const std::string_view name = argc > 1 ? argv[1] : "";
    const Command* const command =
        std::find_if(std::begin(commands), std::end(commands), [&](const Command& c) { return name == c.name; });
    std::string who = "switchyard";
    if (command != std::end(commands)) who += fmt::format(" {}", command->name);
    try {
        int code = 2;
        if (command != std::end(commands))
            code = command->run(argc, argv);
        else if (name.empty() || name == "--help" || name == "-h" || name == "help")
            code = name.empty() ? 2 : 0, print_help();
        else if (name == "--version")
            code = 0, fmt::print("switchyard {}\n", SWITCHYARD_VERSION);
        else
            to_stderr("switchyard: there is no command \"{}\"; see switchyard --help\n", name);
        if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return code;
        to_stderr("{}: the output could not be written\n", who);
        return std::max(code, 1);
    } catch (const Mistake& e) {
        to_stderr("{}: {}\n", who, e.what());
        return 2;
    } catch (const std::exception& e) {
        to_stderr("{}: {}\n", who, e.what());
        return 1;
    }
}

}  // namespace switchyard::tools

int main(int argc, char** argv) {
    return switchyard::tools::main(argc, argv);
}
