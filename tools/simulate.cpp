// switchyard verify --sim: plays seeds in one thread and virtual time, and says which one goes wrong, and how to see it again.
#include "simulate.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "case.hpp"
#include "switchyard/simulation.hpp"

namespace switchyard::tools {
namespace {

constexpr int failures_shown = 5;

simulation::Broken broken_of(const std::string& text) {
    std::string known;
    for (int i = 0; i < simulation::broken_count; ++i) {
        const auto broken = static_cast<simulation::Broken>(i);
        if (text == simulation::broken_name(broken)) return broken;
        known += fmt::format("{}{}", i ? ", " : "", simulation::broken_name(broken));
    }
    throw Mistake(fmt::format("--break is \"{}\"; allowed: {}", text, known));
}

std::string command_of(const SimulateFlags& flags, uint64_t seed) {
    return fmt::format("switchyard verify --sim --seed {}{}", seed,
                       flags.broken == "nothing" ? "" : fmt::format(" --break {}", flags.broken));
}

// "12 ok, 3 peer_lost"
std::string text_of(const std::array<int64_t, 12>& endings) {
    std::string text;
    for (size_t code = 0; code < endings.size(); ++code)
        if (endings[code] > 0)
            text += fmt::format("{}{} {}", text.empty() ? "" : ", ", endings[code], code_name(static_cast<Code>(code)));
    return text;
}

nlohmann::json json_of(const std::array<int64_t, 12>& endings) {
    nlohmann::json json = nlohmann::json::object();
    for (size_t code = 0; code < endings.size(); ++code)
        if (endings[code] > 0) json[code_name(static_cast<Code>(code))] = endings[code];
    return json;
}

}  // namespace

int simulate(const SimulateFlags& flags) {
    const simulation::Broken broken = broken_of(flags.broken);
    const bool one = flags.seeds == 1;
    const bool progress = !one && !flags.json && isatty(STDERR_FILENO);
    std::array<int64_t, 12> endings{};
    int64_t turns = 0, faults = 0, virtual_ns = 0;
    int failures = 0;
    uint64_t played = 0;
    for (; played < flags.seeds && failures < failures_shown; ++played) {
        const uint64_t seed = flags.seed + played;
        const simulation::Report r =
            simulation::play({.seed = seed, .trace = flags.trace, .simd = flags.simd, .broken = broken});
        for (size_t i = 0; i < endings.size(); ++i) endings[i] += r.endings[i];
        turns += r.turns;
        faults += r.faults;
        virtual_ns += r.virtual_ns;
        const bool right = r.failure.empty();
        failures += !right;
        if (progress && played % 1000 == 0) to_stderr("\r{} of {} seeds", played, flags.seeds);
        if (flags.json) {
            if (one || !right)
                fmt::print("{}\n", nlohmann::json({{"seed", seed},
                                                   {"right", right},
                                                   {"failure", r.failure},
                                                   {"scenario", r.scenario},
                                                   {"hash", fmt::format("{:016x}", r.hash)},
                                                   {"endings", json_of(r.endings)},
                                                   {"events", r.events}})
                                       .dump());
            continue;
        }
        if (!one && right && !flags.trace) continue;
        if (progress) to_stderr("\r");
        fmt::print("seed {}: {}\n", seed, r.scenario);
        for (const std::string& event : r.events) fmt::print("{}\n", event);
        fmt::print("{} turns in {:.3f} ms of virtual time; calls: {}; events {:016x}: {}\n", r.turns,
                   static_cast<double>(r.virtual_ns) / 1e6, text_of(r.endings), r.hash, right ? "right" : "WRONG");
        if (!right) fmt::print("  {}\n  again: {} --trace\n", r.failure, command_of(flags, seed));
    }
    if (progress) to_stderr("\r{:32}\r", "");
    if (flags.json)
        fmt::print("{}\n", nlohmann::json({{"seeds", played},
                                           {"failures", failures},
                                           {"faults", faults},
                                           {"turns", turns},
                                           {"virtual_ms", virtual_ns / 1'000'000},
                                           {"endings", json_of(endings)}})
                               .dump());
    else if (!one)
        fmt::print("{} seeds from {}, {} faults, {} turns, {:.1f} s of virtual time; calls: {}: {}\n", played, flags.seed,
                   faults, turns, static_cast<double>(virtual_ns) / 1e9, text_of(endings),
                   failures ? fmt::format("{}{} WRONG", failures, failures == failures_shown ? " or more" : "") : "right");
    return failures ? 1 : 0;
}

}  // namespace switchyard::tools
