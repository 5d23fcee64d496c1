// switchyard bench: contestants take turns, every result is checked, times are compared within one run.
#include <fmt/format.h>
#include <sched.h>
#include <sys/utsname.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>

#include "bars.hpp"
#include "contestant.hpp"
#include "curves.hpp"
#include "lines.hpp"
#include "print.hpp"
#include "processes.hpp"
#include "rank.hpp"
#include "report.hpp"
#include "results.hpp"
#include "strategies.hpp"

namespace switchyard::bench {
namespace {

using nlohmann::json;
using tools::Mistake;

std::string first_line(const char* path) {
    std::ifstream in(path);
    std::string line;
    std::getline(in, line);
    return line;
}

std::string processor() {
    std::ifstream in("/proc/cpuinfo");
    for (std::string line; std::getline(in, line);)
        if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
    return "unknown";
}

// Bytes that can be taken without pushing anything out; 0 when the system does not tell.
int64_t free_memory() {
    std::ifstream in("/proc/meminfo");
    for (std::string line; std::getline(in, line);)
        if (line.starts_with("MemAvailable:")) return std::strtoll(line.c_str() + 13, nullptr, 10) * 1024;
    return 0;
}

std::string now_text() {
    const std::time_t now = std::time(nullptr);
    char text[32];
    std::tm utc{};
    return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", gmtime_r(&now, &utc))};
}

// The command line for a shell, without where the output goes.
std::string command_text(int argc, char** argv) {
    std::string text = "switchyard bench";
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word == "--report") ++i;
        if (word == "--report" || word.starts_with("--report=") || word == "--json") continue;
        const bool plain = !word.empty() && word.find_first_not_of(
                                                "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                                "_-./,:=+") == word.npos;
        text += ' ';
        if (plain) {
            text += word;
            continue;
        }
        text += '\'';
        for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
        text += '\'';
    }
    return text;
}

json machine(const Flags& flags, const Plan& plan, const std::string& command) {
    utsname system{};
    uname(&system);
    cpu_set_t set;
    const quant::Kernels* kernels = quant::find_kernels(flags.base.options.simd);
    json line = {{"switchyard", SWITCHYARD_VERSION},
                 {"command", command},
                 {"begun", now_text()},
                 {"compiler", fmt::format("gcc {}", __VERSION__)},
                 {"build", SY_BENCH_BUILD},
                 {"kernels", kernels ? kernels->name : ""},
                 {"processor", processor()},
                 {"cpus", sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1},
                 {"system", fmt::format("{} {}", system.sysname, system.release)},
                 {"huge_pages_shared", first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled")},
                 {"load_before", first_line("/proc/loadavg")},
                 {"seed", flags.base.seed},
                 {"hidden", flags.base.options.hidden},
                 {"topk", flags.base.options.topk}};
    for (const Tree& tree : plan.trees)
        line["start"].push_back({{"ranks", tree.ranks}, {"by", tree.by_mpirun() ? mpirun_text(tree.ranks) : "fork"}});
    return line;
}

void add_flags(CLI::App& app, Flags& flags, std::string& dtype, std::string& simd) {
    app.add_option("SCENARIO", flags.scenarios, "decode, prefill, large, hot, one, ragged; default: decode prefill");
    app.add_option("--ranks", flags.ranks, "numbers of ranks, as in 2,8; default 2")->delimiter(',')->type_name("RANKS");
    app.add_option("--quant", flags.quants,
                   "formats DISPATCH or DISPATCH/COMBINE, as in none,mxfp8_e5m2/int8_block8; default none")
        ->delimiter(',')
        ->type_name("FORMATS");
    app.add_option("--contestants", flags.contestants, "which take part; default: all of this build (see --list)")
        ->delimiter(',')
        ->type_name("NAMES");
    app.add_flag("--bars", flags.bars, "play what the bars need; say of each bar whether it is reached");
    app.add_flag("--seed-table", flags.seed_table, "the CANN sample's published table beside ours");
    app.add_flag("--curves", flags.curves, "what a row costs along tokens, ranks, topk, experts, hidden, skew");
    app.add_flag("--strategies", flags.strategies, "every landing on a grid of tokens, skew and ranks; what auto loses");
    app.add_option("--rounds", flags.rounds,
                   "exactly so many, at least 4, which hold every kind of call; default: as many as fit into "
                   "--seconds")
        ->check(CLI::Range(4, 1'000'000))
        ->type_name("ROUNDS");
    app.add_option("--seconds", flags.seconds,
                   "about how long a scenario's timed rounds take; default 4, with --bars 8, with --curves and --strategies 1")
        ->check(CLI::PositiveNumber)
        ->type_name("SECONDS");
    app.add_option("--hidden,--h", flags.base.options.hidden, "width of a token")
        ->check(CLI::Range(1, 1 << 20))
        ->type_name("COLUMNS");
    app.add_option("--topk,--k", flags.base.options.topk, "experts per token")
        ->check(CLI::Range(1, 1024))
        ->type_name("EXPERTS");
    app.add_option("--experts-per-rank", flags.experts_per_rank, "routed experts of each rank")
        ->check(CLI::Range(1, 4096))
        ->type_name("EXPERTS");
    app.add_option("--dtype", dtype, "f16, bf16, f32")->type_name("CHOICE");
    app.add_option("--workers", flags.base.options.workers, "threads per rank that move Switchyard's rows")
        ->check(CLI::Range(1, 64))
        ->type_name("THREADS");
    app.add_option("--simd", simd, "instruction set of the kernels")->type_name("CHOICE");
    app.add_option("--routing", flags.base.routing,
                   "instead of the scenario's: balanced, uniform, zipf, lognormal, onehot, drop")
        ->check(CLI::IsMember({"balanced", "uniform", "zipf", "lognormal", "onehot", "drop"}))
        ->type_name("CHOICE");
    app.add_option("--seed", flags.base.seed, "of made-up input")->type_name("NUMBER");
    app.add_flag("--json", flags.json, "one JSON object per line instead of tables");
    app.add_option("--report", flags.report, "also the results as a page: one HTML file with plots, readable without network")
        ->type_name("FILE.html");
    app.add_option("--from", flags.from, "measure nothing: the page of --report from lines that --json printed earlier")
        ->type_name("LINES.json");
    app.add_option("--sabotage", flags.sabotage, "flip one bit of what this contestant delivers: shows that the check sees it")
        ->type_name("NAME");
}

void print_list() {
    fmt::print("scenarios\n");
    for (const Scenario& s : scenarios()) fmt::print("  {:10} {}\n", s.name, s.text);
    fmt::print("\ncontestants of this build\n");
    for (const ContestantInfo& c : contestants())
        if (!c.is_part) fmt::print("  {:14} {}\n", c.name, c.text);
    fmt::print("\nonly when named\n");
    for (const ContestantInfo& c : contestants())
        if (c.is_part) fmt::print("  {:14} {}\n", c.name, c.text);
}

int bench_main(int argc, char** argv) {
    Flags flags;
    flags.base.options.hidden = 7168;
    flags.base.options.topk = 8;
    flags.base.routing.clear();
    flags.base.seed = 42;
    std::string dtype = "f16", simd = "auto";
    bool list = false;
    CLI::App app(
        "Times dispatch and combine against other ways, within one run. Results are checked against the reference first.",
        "switchyard bench");
    add_flags(app, flags, dtype, simd);
    app.add_flag("--list", list, "scenarios and contestants of this build");
    app.footer(
        "Programs of their own, each with a --help:\n"
        "  switchyard bench --kernels   the number kernels beside memcpy\n"
        "  switchyard bench overlap     how much communication hides behind experts with a real GEMM");
    app.failure_message(
        [](const CLI::App* a, const CLI::Error& e) { return fmt::format("{}: {}\n", a->get_name(), e.what()); });
    app.get_formatter()->column_width(48);
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
        return app.exit(e) == 0 ? 0 : 2;
    }
    if (list) return print_list(), 0;
    if (app.count("--report") && flags.report.empty()) throw Mistake("--report is empty; name a file");
    if (app.count("--from")) {
        if (flags.report.empty()) throw Mistake("--from needs --report FILE.html, which says where the page goes");
        for (const CLI::Option* option : app.get_options())
            if (option->count() > 0 && option->get_name() != "--from" && option->get_name() != "--report")
                throw Mistake(fmt::format("--from measures nothing; leave {} out", option->get_name()));
        std::error_code ignored;
        if (std::filesystem::equivalent(flags.from, flags.report, ignored))
            throw Mistake(fmt::format("--report {}: these are the lines themselves; name another file", flags.report));
        ReportFile(flags.report).write(report_page(lines::read(flags.from)));
        return 0;
    }
    if (Status s = set_option(flags.base.options, *find_option("dtype"), dtype); !s.ok()) throw Mistake(s.text());
    if (Status s = set_option(flags.base.options, *find_option("simd"), simd); !s.ok()) throw Mistake(s.text());
    const bool short_form = flags.scenarios.empty() && !flags.bars;
    flags.hidden_is_default = app.count("--hidden") == 0;
    if (flags.scenarios.empty()) flags.scenarios = {"decode", "prefill"};
    if (flags.ranks.empty()) flags.ranks = {"2"};
    if (flags.quants.empty()) flags.quants = {"none"};
    if (flags.seconds == 0) flags.seconds = flags.bars ? 8 : flags.curves || flags.strategies ? 1 : 4;
    if (flags.bars + flags.seed_table + flags.curves + flags.strategies > 1)
        throw Mistake("--bars, --seed-table, --curves, --strategies: choose one");

    const Plan plan = make_plan(flags);
    if (const int tree = tree_of_rank(); tree >= 0) return rank_main(flags, plan.trees.at(static_cast<size_t>(tree)));
    if (const int64_t needs = memory_of(plan), has = free_memory(); has > 0 && needs > has / 10 * 9)
        throw Mistake(
            fmt::format("these contestants need about {:.1f} GiB, {:.1f} GiB are free; name fewer --contestants or --ranks",
                        static_cast<double>(needs) / 0x1p30, static_cast<double>(has) / 0x1p30));

    std::optional<ReportFile> report;
    if (!flags.report.empty()) report.emplace(flags.report);

    std::vector<json> lines = {machine(flags, plan, command_text(argc, argv))};
    if (!flags.json) print_machine(lines[0]);
    const Results results(plan, argv);
    for (const Result& r : results.all()) lines.push_back(r.to_json());
    std::vector<Bar> bars;
    if (flags.bars) {
        bars = judge(results);
        for (const Bar& b : bars) lines.push_back(b.to_json());
    }
    std::vector<Step> moves;
    if (flags.curves) {
        moves = steps(results);
        for (const Step& s : moves) lines.push_back(s.to_json());
    }
    std::vector<Choice> taken;
    if (flags.strategies) {
        taken = choices(results);
        for (const Choice& c : taken) lines.push_back(c.to_json());
    }
    if (flags.seed_table)
        for (json& line : seed_table_lines(results)) lines.push_back(std::move(line));

    if (flags.json) {
        for (const json& line : lines) fmt::print("{}\n", line.dump());
    } else {
        if (!flags.seed_table && !flags.curves && !flags.strategies) print_results(results, short_form);
        if (flags.bars) print_bars(bars);
        if (flags.curves) print_curves(results, moves);
        if (flags.strategies) print_strategies(results, taken);
        if (flags.seed_table) print_seed_table(results);
    }
    if (report) {
        std::fflush(stdout);  // whatever happens to the page, the results are out
        report->write(report_page(lines));
        if (!flags.json) fmt::print("\npage: {}\n", flags.report);
    }
    return 0;
}

}  // namespace
}  // namespace switchyard::bench

int main(int argc, char** argv) {
    try {
        const int code = switchyard::bench::bench_main(argc, argv);
        if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return code;
        switchyard::tools::to_stderr("switchyard bench: the output could not be written\n");
        return 1;
    } catch (const switchyard::tools::Mistake& e) {
        switchyard::tools::to_stderr("switchyard bench: {}\n", e.what());
        return 2;
    } catch (const std::exception& e) {
        switchyard::tools::to_stderr("switchyard bench: {}\n", e.what());
        return 1;
    }
}
