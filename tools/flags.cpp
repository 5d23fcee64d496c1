// Command lines: what can be said, without doing anything yet.
#include <fmt/format.h>

#include <cerrno>
#include <cstdlib>
#include <string_view>

#include "commands.hpp"

namespace switchyard::tools {

int parse(CLI::App& app, int argc, char** argv) {
    app.failure_message(
        [](const CLI::App* a, const CLI::Error& e) { return fmt::format("{}: {}\n", a->get_name(), e.what()); });
    app.get_formatter()->column_width(48);
    for (CLI::Option* option : app.get_options()) {
        option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
        if (option->get_type_size() > 0)
            option->check([](const std::string& text) { return std::string(text.empty() ? "is empty; give a value" : ""); },
                          "");
    }
    try {
        app.parse(argc - 1, argv + 1);
        return -1;
    } catch (const CLI::ParseError& e) {
        return app.exit(e) == 0 ? 0 : 2;
    }
}

namespace {

// "3:5" is rank 3 and 5 ms.
void read_slow(const std::string& text, RunFlags* run) {
    const auto number = [](const char* at, const char** end, long high) {
        char* after = nullptr;
        errno = 0;
        const long value = std::strtol(at, &after, 10);
        *end = after;
        return after == at || errno != 0 || value < 0 || value > high ? -1 : value;
    };
    const char* end = nullptr;
    const long rank = number(text.c_str(), &end, ranks_max - 1);
    const long ms = rank >= 0 && *end == ':' ? number(end + 1, &end, 60'000) : -1;
    if (ms < 0 || end != text.c_str() + text.size())
        throw Mistake(fmt::format("--slow is \"{}\"; give a rank and 0..60000 ms, as in 3:5", text));
    run->slow_rank = static_cast<int>(rank);
    run->slow_ms = ms;
}

int parse_run_as(const char* name, const char* what, int argc, char** argv, RunFlags* run) {
    CLI::App app(what, name);
    std::string slow;
    bool jitter = false;
    app.add_option("DIR", run->folder,
                   "a case: case.json, input/, golden/; a case of the CANN sample's generator has no case.json: "
                   "give its options here");
    app.add_option("--output", run->output, "where outputs are written; default DIR/output")->type_name("OUT");
    app.add_option("--rounds", run->rounds, "rounds of dispatch + combine")
        ->check(CLI::Range(1, 1'000'000))
        ->type_name("ROUNDS");
    app.add_flag("--json", run->json, "one JSON object per line instead of the table");
    app.add_option("--trace", run->trace, "write the last events of every rank, for Perfetto")->type_name("FILE.json");
    app.add_flag("--waits", run->waits, "print who waited for whom");
    app.add_option("--slow", slow, "a rank that sleeps before each dispatch, and how many ms")->type_name("RANK:MS");
    app.add_flag("--jitter", jitter, "sleep up to 300 us, at random, wherever a phase ends (as --jitter-us 300)");
    app.add_option("--placement", run->placement, "place experts by a table of switchyard plan; made-up input only")
        ->type_name("TABLE.json");
    app.add_flag("--compare", run->compare, "with --placement: after each round one without, and what the table gains");
    app.add_option("--expert-us-per-row", run->expert_us_per_row,
                   "experts that take so long for each row they receive, as a device would: the rank sleeps")
        ->check(CLI::Range(0.0, 1e6))
        ->type_name("US");
    app.add_option("--loads", run->loads, "add a line with the rows of each expert and rank, for switchyard plan")
        ->type_name("FILE");
    run->flags.add_to(app);
    if (const int code = parse(app, argc, argv); code >= 0) return code;
    if (!(run->expert_us_per_row >= 0)) throw Mistake("--expert-us-per-row is no number; give 0..1000000");
    if (jitter) run->flags.options.emplace("jitter_us", "300");
    if (!slow.empty()) read_slow(slow, run);
    return -1;
}

}  // namespace

int parse_run(int argc, char** argv, RunFlags* run) {
    return parse_run_as("switchyard run",
                        "Dispatches and combines a case in N processes, checks every round, and prints a table. "
                        "Without DIR it makes its own input and checks against the reference.",
                        argc, argv, run);
}

int parse_trace(int argc, char** argv, RunFlags* run) {
    run->trace = "trace.json";
    run->waits = true;
    return parse_run_as(
        "switchyard trace",
        "A run that also writes the last events of every rank as a timeline (--trace), and prints who waited for "
        "whom and which rank holds the others up.",
        argc, argv, run);
}

int parse_verify(int argc, char** argv, VerifyFlags* verify) {
    for (int i = 2; i < argc; ++i)
        for (const std::string_view flag : {"--rounds", "--jitter"})
            if (std::string_view(argv[i]) == flag || std::string_view(argv[i]).starts_with(std::string(flag) + "="))
                return parse_run_as(
                    "switchyard verify",
                    "Plays many rounds in N processes without a barrier, with --jitter sleeping at random wherever a "
                    "phase ends, and compares every byte of every round.",
                    argc, argv, &verify->races.emplace());
    CLI::App app(
        "Compares golden data with a run's output, byte by byte. With --sim instead: plays seeds in one thread and virtual "
        "time, a group of ranks each over a transport that delays, reorders and repeats, with faults, and checks every result. "
        "With --local: the routing alone; with --landings: every landing. "
        "With --rounds N or --jitter: a run of so many rounds in processes, see switchyard verify --rounds 1 --help.",
        "switchyard verify");
    app.add_option("DIR", verify->folder, "the case");
    app.add_option("--output", verify->output, "where the run wrote; default DIR/output")->type_name("OUT");
    app.add_flag("--json", verify->json, "one JSON object per file, or per seed that went wrong");
    app.add_flag(
        "--local", verify->local,
        "check the routing of a case, or of one made up by these options, without communication; print who sends what");
    app.add_flag("--landings", verify->landings, "play the case once with every landing, on threads, against the reference");
    CLI::Option* with_sim =
        app.add_flag("--sim", verify->sim, "play seeds instead; of the options of a case it takes --seed and --simd only");
    SimulateFlags& simulated = verify->simulated;
    app.add_option("--seeds", simulated.seeds, "how many seeds are played, from --seed on")
        ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 40))
        ->needs(with_sim)
        ->type_name("NUMBER");
    app.add_flag("--trace", simulated.trace, "print every event of what is played")->needs(with_sim);
    app.add_option("--break", simulated.broken,
                   "break a promise of the transport, to see that it is noticed: flag_before_puts, flags_overtake, "
                   "puts_overtake, old_flag, lost_wake_up, misplaced_put")
        ->needs(with_sim)
        ->type_name("CHOICE");
    verify->flags.add_to(app);
    return parse(app, argc, argv);
}

}  // namespace switchyard::tools
