#include "print.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace switchyard::bench {

std::string time_text(double us) {
    if (us >= 99'950) return fmt::format("{:.0f} ms", us / 1000);
    if (us >= 9'995) return fmt::format("{:.1f} ms", us / 1000);
    if (us >= 1'000) return fmt::format("{:.0f} us", us);
    return fmt::format("{:.1f} us", us);
}

void print_machine(const nlohmann::json& m) {
    fmt::print("switchyard bench {}   {} {}   {}   {} CPUs: {}   {}   seed {}\n", m["switchyard"].get<std::string>(),
               m["compiler"].get<std::string>(), m["build"].get<std::string>(), m["kernels"].get<std::string>(),
               m["cpus"].get<int>(), m["processor"].get<std::string>(), m["system"].get<std::string>(),
               m["seed"].get<uint64_t>());
    for (const auto& start : m["start"])
        fmt::print("{} ranks started by {}\n", start["ranks"].get<int>(), start["by"].get<std::string>());
    fmt::print("load before: {}\n", m["load_before"].get<std::string>());
    std::fflush(stdout);
}

namespace {

void print_head(const Result& r) {
    const Options& o = r.entry->shape.options;
    const auto text = [&](const char* name) { return option_text(*find_option(name), o); };
    const auto& t = r.entry->shape.tokens;
    const bool same = std::all_of(t.begin(), t.end(), [&](int64_t n) { return n == t[0]; });
    fmt::print("\n{}   {} ranks   T {}  K {}  E {}  H {}  {}   routing {}   results equal to the reference: yes\n",
               r.cell->scenario, r.entry->shape.ranks, same ? fmt::format("{}", t[0]) : fmt::format("{}", fmt::join(t, ",")),
               o.topk, o.experts, o.hidden, text("dtype"), r.entry->shape.routing);
    fmt::print("{:40} {:>10} {:>10} {:>10} {:>10} {:>10} {:>9} {:>7} {:>8}\n", "", "median", "p99", "min", "max", "own work",
               "MB/rank", "GB/s", "of limit");
}

}  // namespace

void print_results(const Results& results, bool short_form) {
    const Cell* cell = nullptr;
    const std::vector<Result>& all = results.all();
    for (size_t i = 0; i < all.size();) {
        cell = all[i].cell;
        size_t end = i;
        while (end < all.size() && all[end].cell == cell) ++end;
        print_head(all[i]);
        for (const std::string call : {"dispatch", "first_touch", "first_touch_tiles", "combine"}) {
            if (short_form && call.starts_with("first_touch")) continue;
            // Each against Switchyard's default of the same cell.
            for (size_t j = i; j < end; ++j) {
                const Result& r = all[j];
                if (r.call != call) continue;
                const Result* ours = results.find(cell->name, "packed", call);
                const std::string name = fmt::format("{:18} {}", r.call, r.entry->label);
                fmt::print("{:40} {:>10} {:>10} {:>10} {:>10} {:>10} {:9.2f} {:7.1f} {:>8}{}\n", name,
                           time_text(r.group.median), time_text(r.group.p99), time_text(r.group.min), time_text(r.group.max),
                           r.own_us < 0 ? "" : time_text(r.own_us), r.bytes_per_rank / 1e6, r.gb_per_s(),
                           r.of_limit > 0 ? fmt::format("{:.0f} %", 100 * r.of_limit) : "",
                           ours && ours != &r ? fmt::format("   {:.2f} x packed", r.group.median / ours->group.median) : "");
            }
        }
        fmt::print("{} rounds", all[i].group.rounds);
        for (size_t j = i; j < end; ++j)
            if (all[j].call == "dispatch")
                fmt::print("{}{} {}", j == i ? "; allocations: " : ", ", all[j].entry->label, all[j].allocations);
        fmt::print("\n");
        for (size_t j = i; j < end; ++j)
            if (all[j].call == "dispatch") fmt::print("  {}: {}\n", all[j].entry->label, all[j].settings);
        i = end;
    }
    fmt::print(
        "\nA time is from the moment the last rank came to the start, which all ranks share, to the end of the slowest rank. "
        "own work: the "
        "slowest\nrank's median time that was not waiting. MB/rank: bytes the contestant's own code wrote (dispatch) or read "
        "or wrote "
        "(combine), every copy\ncounted. of limit: the limit's time / this time.\n");
    if (short_form) {
        fmt::print("More: switchyard bench decode prefill --ranks 2,8; --bars; --seed-table; --list\n");
        return;
    }
    fmt::print(
        "first_touch: dispatch, then every row read once where it lies; _tiles: gathered into a tile of 32 rows and read "
        "there.\n");
}

}  // namespace switchyard::bench
