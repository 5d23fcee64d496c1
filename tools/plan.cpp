// switchyard plan --balance: loads, recorded or drawn, become a placement table; what it gains and what it costs is printed.
// switchyard plan --landings: what each landing would cost on this machine. --calibrate: measures the machine for that.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "case.hpp"
#include "commands.hpp"
#include "switchyard/balance.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/strategy.hpp"

namespace switchyard::tools {
namespace {

using Loads = std::vector<uint64_t>;

// A line of each batch that was seen, [lines][E].
std::vector<Loads> read_loads(const std::string& path) {
    std::ifstream in(path);
    if (!in) throw Mistake(fmt::format("{} cannot be read", path));
    std::vector<Loads> lines;
    uint64_t in_all = 0;
    std::string text;
    for (int number = 1; std::getline(in, text); ++number) {
        if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
        try {
            const nlohmann::json line = nlohmann::json::parse(text);
            const nlohmann::json& experts = line.is_array() ? line : line.at("experts");
            Loads loads;
            for (const nlohmann::json& load : experts) {
                constexpr uint64_t most = uint64_t{1} << 48;
                if (!load.is_number_unsigned() || load.get<uint64_t>() > most) {
                    // What holds others is not printed: that recurs as deep as the file likes.
                    const std::string seen = load.is_structured() ? "a list or an object" : load.dump();
                    throw Mistake(fmt::format("{}, line {}: the load of expert {} is {}; allowed: whole numbers 0..{}", path,
                                              number, loads.size(), seen, most));
                }
                loads.push_back(load.get<uint64_t>());
                in_all += loads.back();
                if (in_all > uint64_t{1} << 62)
                    throw Mistake(
                        fmt::format("{}, line {}: more than 2^62 rows up to here; scale the loads down", path, number));
            }
            lines.push_back(std::move(loads));
        } catch (const nlohmann::json::exception&) {
            throw Mistake(
                fmt::format("{}, line {}: neither [rows of each expert] nor {{\"experts\": [...]}} as "
                            "switchyard run --loads writes it",
                            path, number));
        }
        if (lines.back().size() != lines.front().size() || lines.back().empty())
            throw Mistake(fmt::format("{}, line {}: {} experts, the first line has {}", path, number, lines.back().size(),
                                      lines.front().size()));
    }
    if (lines.empty()) throw Mistake(fmt::format("{} has no loads", path));
    return lines;
}

// What the ranks of a made-up case would send, a line per rank.
std::vector<Loads> draw_loads(Case c) {
    c.options.hidden = 1;  // only ids matter
    std::vector<Loads> lines;
    for (int r = 0; r < c.ranks; ++r) {
        lines.emplace_back(static_cast<size_t>(c.options.experts));
        for (const int32_t id : make_input(c, r).topk_ids)
            if (id >= 0) ++lines.back()[static_cast<size_t>(id)];
    }
    return lines;
}

Loads sum_of(const std::vector<Loads>& lines, size_t first, size_t last) {
    Loads sum(lines[0].size());
    for (size_t i = first; i < last; ++i)
        for (size_t e = 0; e < sum.size(); ++e) sum[e] += lines[i][e];
    return sum;
}

LoadStatistics ranks_of(const PlacementTable& table, const Loads& loads) {
    Loads whole;
    for (const double l : planned_rank_loads(table, loads)) whole.push_back(static_cast<uint64_t>(l + 0.5));
    return load_statistics(whole);
}

PlacementTable read_table(const std::string& path) {
    const std::vector<std::byte> bytes = read_file(path);
    try {
        return PlacementTable::from_text({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    } catch (const Error& e) {
        throw Mistake(fmt::format("{}: {}", path, e.what()));
    }
}

}  // namespace

namespace {

int calibrate_machine(bool json) {
    const std::string path = calibration_path();
    if (path.empty()) throw Mistake("no place for the calibration: set HOME or XDG_CACHE_HOME");
    if (!json) fmt::print("plays groups of threads with every landing, some seconds ...\n");
    // What cannot be written is told before anything is measured.
    if (std::filesystem::is_directory(path)) throw Mistake(fmt::format("{} is a folder; the calibration is a file", path));
    const std::string trial = path + ".trial";
    save_calibration({}, trial);
    std::filesystem::remove(trial);
    const Calibration c = calibrate();
    save_calibration(c, path);
    if (c.write_memory == 0 || c.read_memory == 0)
        to_stderr(
            "switchyard plan: memory seems to cost nothing, so other work has disturbed the measurement; calibrate again on a "
            "quiet machine\n");
    if (json) {
        fmt::print("{}\n", nlohmann::json{{"calibration", path}, {"cpus", c.cpus}, {"cache_bytes", c.cache_bytes}}.dump());
        return 0;
    }
    fmt::print(
        "a call {:.0f} ns, a peer {:.0f} ns, a row {:.0f} ns, one that lies apart {:.0f} ns, an id looked at {:.2f} ns\n"
        "a KiB written in the cache {:.0f} ns, to memory {:.0f} ns; read from the cache {:.0f} ns, from memory {:.0f} ns\n"
        "{}: sessions with landing auto of this user choose by it from now on\n",
        c.call, c.peer, c.row, c.row_apart, c.look, c.write_cache, c.write_memory, c.read_cache, c.read_memory, path);
    return 0;
}

// One line per landing, cheapest first.
int estimate_shape(const Case& c, bool json) {
    const Calibration calibration = load_calibration(calibration_path());
    const int64_t tokens = *std::max_element(c.tokens.begin(), c.tokens.end());
    for (const Estimate& e : estimate_landings(c.options, c.ranks, tokens, calibration)) {
        Options o;
        o.landing = e.landing;
        const std::string name = option_text(*find_option("landing"), o);
        if (json)
            fmt::print("{}\n", nlohmann::json{{"landing", name}, {"us", e.us}, {"bytes", e.bytes}, {"why", e.why}}.dump());
        else
            fmt::print("{:<10} {:>12.1f} us {:>14} bytes a rank   {}\n", name, e.us, e.bytes, e.why);
    }
    if (!json) fmt::print("dispatch and one read of every row, slowest rank, even routing; figures: {}\n", calibration.source);
    return 0;
}

}  // namespace

int plan_command(int argc, char** argv) {
    CaseFlags flags;
    std::string loads_path, from_path, write_path, choice = "least_loaded";
    double replicas = 25, hot = 2;
    int64_t slots = 0, ranks_per_group = 0, expert_groups = 0, expert_bytes = 0;
    bool balance = false, landings = false, calibrates = false, json = false;
    CLI::App app(
        "--landings: what each way to dispatch would cost here; --calibrate measures the machine for that and for landing "
        "auto. "
        "--balance: plans where experts lie, with replicas, from loads that switchyard run --loads has recorded, or from a "
        "routing preset "
        "(--routing, --seed, --bs, 4096 tokens of each rank unless given). Prints loads before and after, and what must move.",
        "switchyard plan");
    app.add_flag("--balance", balance, "plan the placement of experts");
    app.add_flag("--landings", landings, "estimate every landing for a shape, cheapest first");
    app.add_flag("--calibrate", calibrates, "measure this machine, once; kept in the cache folder of the user");
    app.add_option("--loads", loads_path, "recorded loads: a line of JSON for each batch")->type_name("FILE");
    app.add_option("--replicas", replicas, "spare slots in percent of the experts")
        ->check(CLI::Range(0.0, 1e5))
        ->type_name("PERCENT");
    app.add_option("--slots", slots, "slots of all ranks together, instead of --replicas")->type_name("SLOTS");
    app.add_option("--ranks-per-group", ranks_per_group, "ranks on one host: replicas of an expert stay on one")
        ->type_name("RANKS");
    app.add_option("--expert-groups", expert_groups, "consecutive experts that are routed together")->type_name("GROUPS");
    app.add_option("--choice", choice, "how rows choose among replicas")
        ->check(CLI::IsMember({"round_robin", "nearest", "least_loaded"}))
        ->type_name("CHOICE");
    app.add_option("--hot", hot, "loads from so many times the mean on are called hot")
        ->check(CLI::Range(1e-9, 1e9))
        ->type_name("FACTOR");
    app.add_option("--from", from_path, "the table in use; default: none, experts lie in order")->type_name("TABLE.json");
    app.add_option("--expert-bytes", expert_bytes, "weights of one expert; default: 3 x hidden x 2048 bytes")
        ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
        ->type_name("BYTES");
    app.add_option("--write", write_path, "where the table is written")->type_name("TABLE.json");
    app.add_flag("--json", json, "one JSON object instead of the table");
    flags.add_to(app);
    if (const int code = parse(app, argc, argv); code >= 0) return code;
    if (std::isnan(replicas) || std::isnan(hot)) throw Mistake("--replicas and --hot are numbers");
    if (balance + landings + calibrates != 1) throw Mistake("say what to plan: --balance, --landings or --calibrate");
    try {
        if (calibrates) return calibrate_machine(json);
        if (landings) return estimate_shape(read_case({}, flags), json);
    } catch (const Error& e) {
        if (e.code() == Code::bad_input) throw Mistake(e.what());
        throw;
    }

    if (flags.batch.empty()) flags.batch = "4096";
    std::vector<Loads> lines;
    if (!loads_path.empty()) {
        lines = read_loads(loads_path);
        const std::string experts = fmt::format("{}", lines[0].size());
        const auto [given, is_new] = flags.options.emplace("experts", experts);
        if (!is_new && given->second != experts)
            throw Mistake(
                fmt::format("--experts {}, but {} has loads of {}; leave --experts out", given->second, loads_path, experts));
    }
    // topk has no part in a recorded load
    if (!loads_path.empty()) flags.options.emplace("topk", "1");
    const Case c = read_case({}, flags);
    if (loads_path.empty()) lines = draw_loads(c);
    const int64_t experts = c.options.experts;
    if (slots == 0) slots = experts + static_cast<int64_t>(static_cast<double>(experts) * replicas / 100 + 1e-9);
    if (expert_bytes == 0) expert_bytes = 3 * c.options.hidden * 2048;
    PlanArgs args{.ranks = c.ranks, .slots = slots, .ranks_per_group = ranks_per_group, .expert_groups = expert_groups};
    args.choice = choice == "nearest"       ? ReplicaChoice::nearest
                  : choice == "round_robin" ? ReplicaChoice::round_robin
                                            : ReplicaChoice::least_loaded;
    const PlacementTable from = from_path.empty() ? PlacementTable::contiguous(c.ranks, experts) : read_table(from_path);
    if (from.ranks != c.ranks || from.experts != experts)
        throw Mistake(fmt::format("{} is for {} ranks and {} experts; planned are {} and {}", from_path, from.ranks,
                                  from.experts, c.ranks, experts));

    const Loads all = sum_of(lines, 0, lines.size());
    PlacementTable to;
    std::vector<WeightMove> moves;
    LoadStatistics held_before, held_after;
    const bool held_out = lines.size() > 1;
    try {
        to = plan_placement(all, args);
        moves = weight_moves(from, to);
        if (held_out) {
            const size_t half = lines.size() / 2;
            const PlacementTable early = plan_placement(sum_of(lines, 0, half), args);
            const Loads late = sum_of(lines, half, lines.size());
            held_before = ranks_of(from, late), held_after = ranks_of(early, late);
        }
    } catch (const Error& e) {
        throw Mistake(e.what());
    }
    const LoadStatistics of_experts = load_statistics(all, hot), before = ranks_of(from, all), after = ranks_of(to, all);
    const int64_t moving = std::count_if(moves.begin(), moves.end(), [](const WeightMove& m) { return m.source != m.target; });
    if (!write_path.empty()) {
        const std::string text = to.to_text();
        write_file(write_path, text.data(), text.size());
    }
    const std::string hash = fmt::format("{:016x}", to.hash());
    if (json) {
        nlohmann::json line = {{"ranks", c.ranks},
                               {"experts", experts},
                               {"slots", slots},
                               {"hierarchical", is_hierarchical(experts, args)},
                               {"expert_imbalance", of_experts.imbalance},
                               {"expert_gini", of_experts.gini},
                               {"hot", of_experts.hot},
                               {"rank_imbalance_before", before.imbalance},
                               {"rank_imbalance", after.imbalance},
                               {"rank_gini_before", before.gini},
                               {"rank_gini", after.gini},
                               {"moves", moving},
                               {"bytes_to_move", moving * expert_bytes},
                               {"hash", hash}};
        if (held_out) {
            line["held_out_imbalance_before"] = held_before.imbalance;
            line["held_out_imbalance"] = held_after.imbalance;
        }
        fmt::print("{}\n", line.dump());
        return 0;
    }
    fmt::print(
        "{} experts on {} ranks, {} slots ({} of replicas), {}, choice {}; loads of {} rows, {} line{}\n\n", experts, c.ranks,
        slots, slots - experts,
        is_hierarchical(experts, args) ? fmt::format("hierarchical, {} ranks a host", ranks_per_group) : "all ranks alike",
        choice, of_experts.total, lines.size(), lines.size() == 1 ? "" : "s");
    fmt::print("                      before     after\n");
    fmt::print("ranks, max / mean  {:9.3f} {:9.3f}\n", before.imbalance, after.imbalance);
    fmt::print("ranks, Gini        {:9.3f} {:9.3f}\n", before.gini, after.gini);
    fmt::print("most rows of a rank {:8} {:9}\n", before.max, after.max);
    if (held_out)
        fmt::print("planned from the first half of the lines, seen by the second: max / mean {:.3f} before, {:.3f} after\n",
                   held_before.imbalance, held_after.imbalance);
    fmt::print("\nexperts: max / mean {:.2f}, Gini {:.2f}; {} hot (load >= {} x mean)", of_experts.imbalance, of_experts.gini,
               of_experts.hot.size(), hot);
    for (size_t i = 0; i < std::min<size_t>(of_experts.hot.size(), 8); ++i) {
        const auto e = static_cast<size_t>(of_experts.hot[i]);
        fmt::print("{} {} ({:.1f} %, {} replicas)", i == 0 ? ":" : ",", e,
                   100 * static_cast<double>(all[e]) / static_cast<double>(of_experts.total),
                   std::count(to.expert_of.begin(), to.expert_of.end(), of_experts.hot[i]));
    }
    fmt::print("{}\n", of_experts.hot.size() > 8 ? ", ..." : "");
    fmt::print("to move: {} of {} slots, {:.2f} GiB at {} bytes an expert\n", moving, slots,
               static_cast<double>(moving * expert_bytes) / 0x1p30, expert_bytes);
    fmt::print("table {}{}\n", hash, write_path.empty() ? "" : ", written to " + write_path);
    return 0;
}

}  // namespace switchyard::tools
