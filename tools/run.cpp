// switchyard run: N processes dispatch and combine a case, round after round; outputs written, checked, a table printed.
#include <fmt/color.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <optional>
#include <thread>

#include "commands.hpp"
#include "launch.hpp"
#include "simulate.hpp"
#include "switchyard/accuracy.hpp"
#include "switchyard/balance.hpp"
#include "switchyard/session.hpp"
#include "verify.hpp"

namespace switchyard::tools {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// What one dispatch and its combine gave a rank: the six files, and the offsets where rows are aligned.
struct Outputs {
    std::vector<std::byte> expand_x, dynamic_scales, x;
    std::vector<int32_t> assist_info_for_combine, ep_recv_count;
    std::vector<int64_t> expert_token_nums, expert_offsets;

    // Name of the first part that differs, or "".
    std::string difference(const Outputs& o) const {
        if (expert_token_nums != o.expert_token_nums) return "expert_token_nums";
        if (ep_recv_count != o.ep_recv_count) return "ep_recv_count";
        if (expert_offsets != o.expert_offsets) return "expert_offsets";
        if (assist_info_for_combine != o.assist_info_for_combine) return "assist_info_for_combine";
        if (expand_x != o.expand_x) return "expand_x";
        if (dynamic_scales != o.dynamic_scales) return "dynamic_scales";
        if (x != o.x) return "x";
        return "";
    }
};

template <class T>
std::vector<T> copy_of(std::span<const T> s) {
    return {s.begin(), s.end()};
}

std::vector<std::byte> bytes_of(const void* data, int64_t bytes) {
    const auto* b = static_cast<const std::byte*>(data);
    return bytes == 0 ? std::vector<std::byte>() : std::vector<std::byte>(b, b + bytes);
}

// Expert of a row of the batch: one of this rank's range, or what the table has in that slot.
int32_t expert_of(const ExpertBatch& batch, const ExpertRange& range, const std::optional<PlacementTable>& table, int64_t row) {
    const auto offsets = batch.expert_offsets();
    const auto next = std::upper_bound(offsets.begin(), offsets.end(), row);
    const int64_t slot = range.first + (next - offsets.begin()) - 1;
    return table ? table->expert_of[static_cast<size_t>(slot)] : static_cast<int32_t>(slot);
}

// What a made-up case must give, from the reference.
Outputs expected_of(const Case& c, const std::vector<Input>& inputs, const MadeUpExperts& experts,
                    const std::optional<PlacementTable>& table, int rank) {
    std::vector<reference::RankInput> views;
    for (size_t r = 0; r < inputs.size(); ++r) views.push_back(inputs[r].view(c.tokens[r]));
    // Rows go to slots as they would to so many experts; combine does not know of them.
    Options placed = c.options;
    std::vector<reference::RankInput> placed_views = views;
    std::vector<std::vector<int32_t>> slots;
    if (table) placed.experts = table->slots();
    for (size_t r = 0; table && r < inputs.size(); ++r) {
        slots.push_back(slots_of(*table, static_cast<int>(r), inputs[r].topk_ids));
        placed_views[r].topk_ids = slots.back().data();
    }
    reference::Received got = reference::dispatch(placed, placed_views, rank);
    Outputs out{.expand_x = std::move(got.expand_x),
                .dynamic_scales = std::move(got.dynamic_scales),
                .x = reference::combine(c.options, views[static_cast<size_t>(rank)], rank,
                                        [&](int s, int64_t t, int64_t k, int32_t e) { return experts.row(s, t, k, e); }),
                .assist_info_for_combine = std::move(got.assist_info_for_combine),
                .ep_recv_count = std::move(got.ep_recv_count),
                .expert_token_nums = std::move(got.expert_token_nums),
                .expert_offsets = std::move(got.expert_offsets)};
    return out;
}

void write_outputs(const Case& c, const std::filesystem::path& folder, int rank, const Outputs& o) {
    const auto write = [&](const char* name, const auto& v, bool wanted) {
        const std::filesystem::path path = file_of(folder, rank, name);
        if (wanted)
            write_file(path, v.data(), v.size() * sizeof v[0]);
        else
            std::filesystem::remove(path);  // of an earlier run with other options
    };
    write("expand_x", o.expand_x, true);
    write("dynamic_scales", o.dynamic_scales, c.options.dispatch_quant != Format::none);
    write("assist_info_for_combine", o.assist_info_for_combine, true);
    write("expert_token_nums", o.expert_token_nums, true);
    write("ep_recv_count", o.ep_recv_count, true);
    write("expert_offsets", o.expert_offsets, c.options.expert_alignment > 1);
    write("x", o.x, true);
}

// ------------------------------------------------------------------------------------------------------------- one rank

// One session and what is known of it. A run has one, or with --compare two whose rounds take turns.
struct Lane {
    std::optional<PlacementTable> table;
    Session session;
    std::optional<Outputs> expected;
    Outputs got;
    std::vector<double> dispatch_us, combine_us, step_us;
    int64_t rows = 0;
};

std::optional<PlacementTable> read_table(const RunFlags& run) {
    if (run.placement.empty()) return std::nullopt;
    const std::vector<std::byte> bytes = read_file(run.placement);
    try {
        return PlacementTable::from_text({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    } catch (const Error& e) {
        throw Mistake(fmt::format("{}: {}", run.placement, e.what()));
    }
}

// Plays one rank: all rounds, every result compared; reports times and counts to the parent.
void play_rank(const Case& c, const RunFlags& run, bool& met) {
    const Group group = Group::from_environment("run");
    const auto rank = static_cast<size_t>(group.rank);
    const bool made_up = c.folder.empty();

    std::vector<Input> inputs(static_cast<size_t>(c.ranks));
    for (int r = 0; r < c.ranks; ++r)
        if (made_up || r == group.rank) inputs[static_cast<size_t>(r)] = made_up ? make_input(c, r) : read_input(c, r);
    const Input& in = inputs[rank];
    const MadeUpExperts experts(c);
    const int64_t tokens = c.tokens[rank];
    const int64_t row_bytes = c.token_bytes();

    std::vector<Lane> lanes;
    const auto open = [&](std::optional<PlacementTable> table) {
        std::optional<Outputs> expected;
        if (made_up) expected = expected_of(c, inputs, experts, table, group.rank);
        Session session = table ? Session::open(c.options, group, *table) : Session::open(c.options, group);
        lanes.push_back({std::move(table), std::move(session), std::move(expected), {}, {}, {}, {}, 0});
        lanes.back().got.x.resize(static_cast<size_t>(tokens * row_bytes));
    };
    if (run.compare) open(std::nullopt);
    open(read_table(run));
    met = true;
    report({{"met", true}});
    std::string wrong;

    const auto play = [&](Lane& lane, int round) {
        Session& session = lane.session;
        Outputs& got = lane.got;
        const int64_t slots = lane.table ? lane.table->slots() : c.options.experts;
        const ExpertRange range = experts_of(group.rank, c.ranks, slots);
        if (group.rank == run.slow_rank) std::this_thread::sleep_for(std::chrono::milliseconds(run.slow_ms));
        if (run.expert_us_per_row > 0) {  // a step begins when all are there, not when the last has checked its bytes
            ExpertBatch nothing = session.dispatch({});
            session.combine(nothing, {});
        }
        const auto step_start = Clock::now();
        ExpertBatch batch = session.dispatch(
            {.x = in.x.data(), .tokens = tokens, .topk_ids = in.topk_ids.data(), .topk_weights = in.topk_weights.data()});
        lane.dispatch_us.push_back(microseconds_since(step_start));
        const auto experts_start = Clock::now();

        const int64_t rows = lane.rows = batch.rows();
        got.expand_x = bytes_of(batch.expand_x(), rows * batch.payload_bytes());
        got.dynamic_scales = bytes_of(batch.dynamic_scales(), rows * batch.scale_bytes());
        got.assist_info_for_combine = copy_of(batch.assist_info_for_combine());
        got.expert_token_nums = copy_of(batch.expert_token_nums());
        got.ep_recv_count = copy_of(batch.ep_recv_count());
        got.expert_offsets = copy_of(batch.expert_offsets());
        // Poison what was received: a later round that delivered nothing would otherwise look right.
        const auto poison = [](const void* at, size_t bytes) {
            if (bytes > 0) std::memset(const_cast<void*>(at), 0xCD, bytes);
        };
        poison(batch.expand_x(), got.expand_x.size());
        poison(batch.dynamic_scales(), got.dynamic_scales.size());
        poison(got.x.data(), got.x.size());

        // The experts' output, written where combine reads it.
        auto* y = static_cast<std::byte*>(batch.y());
        if (!made_up && static_cast<int64_t>(in.y.size()) < rows * row_bytes)
            throw Mistake(fmt::format("{} has {} rows; this rank received {}",
                                      file_of(c.folder / "input", group.rank, "expand_x").string(),
                                      static_cast<int64_t>(in.y.size()) / row_bytes, rows));
        if (!made_up && rows > 0) std::memcpy(y, in.y.data(), static_cast<size_t>(rows * row_bytes));
        for (int64_t i = 0; made_up && i < rows; ++i) {
            const int32_t* info = got.assist_info_for_combine.data() + 3 * i;
            if (info[0] < 0) continue;
            std::memcpy(y + i * row_bytes, experts.row(info[0], info[1], info[2], expert_of(batch, range, lane.table, i)),
                        static_cast<size_t>(row_bytes));
        }
        // A device at work, which leaves this CPU alone. What was done above is done meanwhile.
        if (run.expert_us_per_row > 0)
            std::this_thread::sleep_until(experts_start +
                                          std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double, std::micro>(
                                              run.expert_us_per_row * static_cast<double>(rows))));

        const auto combine_start = Clock::now();
        session.combine(batch, {.topk_weights = in.topk_weights.data(), .out = got.x.data()});
        lane.combine_us.push_back(microseconds_since(combine_start));
        lane.step_us.push_back(microseconds_since(step_start));

        // A case on disk: every round must equal the first, and verify compares with golden
        if (!lane.expected) lane.expected = got;
        if (const std::string part = got.difference(*lane.expected); wrong.empty() && !part.empty())
            wrong = fmt::format("{} of round {} differs from {}", part, round + 1, made_up ? "the reference" : "round 1");
    };
    for (int round = 0; round < run.rounds; ++round) {
        for (Lane& lane : lanes) play(lane, round);
        report({{"round", round + 1}});
    }
    Lane& main = lanes.back();
    const Session& session = main.session;
    if (!run.output.empty()) write_outputs(c, run.output, group.rank, main.got);

    nlohmann::json events = nlohmann::json::array();
    if (!run.trace.empty())
        for (const TraceEvent& e : session.trace())
            events.push_back({e.at_ns, e.epoch, e.waited_ns, e.waited_for, static_cast<int>(e.edge)});
    std::vector<double> waits;  // us per round
    for (const int64_t ns : session.wait_ns_by_rank()) waits.push_back(static_cast<double>(ns) / 1000 / run.rounds);

    const SessionStats stats = session.stats();
    const SessionLoads loads = session.loads();
    const Options& used = session.options();
    const auto rounds = static_cast<uint64_t>(run.rounds);
    nlohmann::json message = {
        {"rank", group.rank},
        {"tokens", tokens},
        {"rows", main.rows},
        {"rows_sent", stats.rows_sent / rounds},
        {"bytes_sent", stats.bytes_sent / rounds},
        {"bytes_sent_peers", stats.bytes_sent_peers / rounds},
        {"bytes_home", stats.bytes_home / rounds},
        {"dispatch_us", main.dispatch_us},
        {"combine_us", main.combine_us},
        {"step_us", main.step_us},
        {"dispatch_wait_us", static_cast<double>(stats.wait_ns_counts + stats.wait_ns_rows) / 1000.0 / run.rounds},
        {"combine_wait_us", static_cast<double>(stats.wait_ns_returned) / 1000.0 / run.rounds},
        {"landing", option_text(*find_option("landing"), used)},
        {"combine_path", option_text(*find_option("combine_path"), used)},
        {"simd", session.simd_name()},
        {"workers", used.workers},
        {"window_bytes", session.window_bytes()},
        {"memory", session.memory_text()},
        {"wait_by_rank_us", waits},
        {"trace", events},
        {"wrong", wrong}};
    const auto accuracy = [&](const char* option, const std::vector<std::byte>& values, int64_t rows, const RowFormat& format) {
        if (format.format == Format::none || rows == 0) return;
        const Accuracy a = measure_accuracy(
            {.x = values.data(), .rows = rows, .hidden = c.options.hidden, .dtype = c.options.dtype, .format = format});
        message["accuracy"][option] = {
            {"snr_db", std::isinf(a.snr_db) ? 999.0 : a.snr_db}, {"text", a.text()}, {"poor", a.is_poor()}};
    };
    accuracy("dispatch_quant", in.x, tokens, c.options.dispatch_format());
    accuracy("combine_quant", in.y, static_cast<int64_t>(in.y.size()) / std::max<int64_t>(c.token_bytes(), 1),
             c.options.combine_format());
    if (group.rank == 0)
        message["loads"] = {{"dispatches", loads.dispatches}, {"experts", loads.experts}, {"ranks", loads.ranks}};
    if (run.compare) {
        message["step_us_without"] = lanes.front().step_us;
        if (group.rank == 0) message["rank_loads_without"] = lanes.front().session.loads().ranks;
    }
    report(message);
    for (Lane& lane : lanes) lane.session.close();
}

int rank_main(const RunFlags& run) {
    bool met = false;
    try {
        play_rank(read_case(run.folder, run.flags), run, met);
        return 0;
    } catch (const Mistake& e) {
        report({{"error", e.what()}, {"exit", 2}});
        return 2;
    } catch (const Error& e) {
        // Options that no session can be opened with (simd, say) are the user's mistake.
        const int exit = !met && e.code() == Code::bad_input ? 2 : 1;
        report({{"error", e.what()}, {"exit", exit}, {"code", code_name(e.code())}});
        return exit;
    } catch (const std::exception& e) {
        report({{"error", e.what()}, {"exit", 1}});
        return 1;
    }
}

// ------------------------------------------------------------------------------------------------------------ the parent

// One line of JSON; bytes that are no UTF-8 (file names) are replaced.
std::string line_of(const nlohmann::json& json) {
    return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

double median(std::vector<double> v) {
    if (v.empty()) return 0;
    std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
    return v[v.size() / 2];
}

// Median over rounds of the slowest rank of each round, the first round (cold memory) left out where there are more.
double slowest_rank(const std::vector<nlohmann::json>& ranks, const char* what) {
    std::vector<double> slowest;
    for (size_t round = ranks[0][what].size() > 1 ? 1 : 0; round < ranks[0][what].size(); ++round) {
        double worst = 0;
        for (const auto& r : ranks) worst = std::max(worst, r[what][round].get<double>());
        slowest.push_back(worst);
    }
    return median(slowest);
}

void print_table(const Case& c, const std::vector<nlohmann::json>& ranks, int rounds) {
    const auto& first = ranks[0];
    const auto name = [&](const char* option) { return option_text(*find_option(option), c.options); };
    fmt::print("{} ranks, {} rounds   H {}  K {}  E {}  {}   dispatch {}  combine {}\n", c.ranks, rounds, c.options.hidden,
               c.options.topk, c.options.experts, name("dtype"), name("dispatch_quant"), name("combine_quant"));
    fmt::print("landing {}  combine path {}  kernels {}  workers {}  depth {}  window {:.1f} MiB reserved per rank, {}\n\n",
               first["landing"].get<std::string>(), first["combine_path"].get<std::string>(), first["simd"].get<std::string>(),
               first["workers"].get<int>(), c.options.depth, first["window_bytes"].get<double>() / 0x1p20,
               first["memory"].get<std::string>());
    fmt::print("rank   tokens  rows sent  rows held   sent MiB  dispatch us   (waiting)  combine us   (waiting)  result\n");
    int64_t sent = 0;
    double mib = 0, home = 0;
    for (const auto& r : ranks) {
        const std::string wrong = r["wrong"];
        fmt::print("{:4} {:8} {:10} {:10} {:10.2f} {:12.1f} {:11.1f} {:11.1f} {:11.1f}  {}\n", r["rank"].get<int>(),
                   r["tokens"].get<int64_t>(), r["rows_sent"].get<int64_t>(), r["rows"].get<int64_t>(),
                   r["bytes_sent"].get<double>() / 0x1p20, median(r["dispatch_us"]), r["dispatch_wait_us"].get<double>(),
                   median(r["combine_us"]), r["combine_wait_us"].get<double>(), wrong.empty() ? "right" : "WRONG: " + wrong);
        sent += r["rows_sent"].get<int64_t>();
        mib += r["bytes_sent"].get<double>() / 0x1p20;
        home += r["bytes_home"].get<double>() / 0x1p20;
    }
    const double d = slowest_rank(ranks, "dispatch_us"), m = slowest_rank(ranks, "combine_us");
    fmt::print(
        "\nper round: {} rows, {:.2f} MiB out, {:.2f} MiB home; slowest rank, median: dispatch {:.1f} us, combine {:.1f} us\n",
        sent, mib, home, d, m);
}

// What the number formats do to the values that were sent: of the rank where it is worst.
void print_accuracy(const Case& c, const std::vector<nlohmann::json>& ranks) {
    for (const char* option : {"dispatch_quant", "combine_quant"}) {
        const nlohmann::json* worst = nullptr;
        for (const auto& r : ranks)
            if (r.contains("accuracy") && r["accuracy"].contains(option))
                if (const auto& a = r["accuracy"][option]; !worst || a["snr_db"] < (*worst)["snr_db"]) worst = &a;
        if (!worst) continue;
        fmt::print("{} {}: {}\n", option, option_text(*find_option(option), c.options), (*worst)["text"].get<std::string>());
        if ((*worst)["poor"].get<bool>())
            fmt::print("  careful: this format loses much of these values; compare with --{} none\n",
                       option == std::string_view("dispatch_quant") ? "dispatch-quant" : "combine-quant");
    }
}

// What the experts, ranks and steps had of it, and with --compare what they had without the table.
void print_balance(const RunFlags& run, const std::vector<nlohmann::json>& ranks) {
    const auto& loads = ranks[0]["loads"];
    const LoadStatistics experts = load_statistics(loads["experts"].get<std::vector<uint64_t>>());
    const LoadStatistics by_rank = load_statistics(loads["ranks"].get<std::vector<uint64_t>>());
    fmt::print("loads: experts max/mean {:.2f}, Gini {:.2f}, {} above twice the mean; ranks max/mean {:.3f}, Gini {:.3f}\n",
               experts.imbalance, experts.gini, experts.hot.size(), by_rank.imbalance, by_rank.gini);
    if (run.expert_us_per_row > 0 && !run.compare)
        fmt::print("step with experts of {} us per row, slowest rank, median: {:.1f} us\n", run.expert_us_per_row,
                   slowest_rank(ranks, "step_us"));
    if (!run.compare) return;
    const LoadStatistics without = load_statistics(ranks[0]["rank_loads_without"].get<std::vector<uint64_t>>());
    const double before = slowest_rank(ranks, "step_us_without"), after = slowest_rank(ranks, "step_us");
    fmt::print("without the table: ranks max/mean {:.3f}, Gini {:.3f}\n", without.imbalance, without.gini);
    fmt::print("step, slowest rank, median of rounds in turns: without {:.1f} us, with {:.1f} us: {:.2f} times as fast\n",
               before, after, before / after);
}

// A bar on a terminal, nothing on a pipe.
void show_progress(int done, int rounds) {
    if (!isatty(STDERR_FILENO)) return;
    constexpr int width = 40;
    const int full = rounds ? done * width / rounds : width;
    to_stderr("\r[{}{}] {}/{} rounds", std::string(static_cast<size_t>(full), '#'),
              std::string(static_cast<size_t>(width - full), '.'), done, rounds);
    if (done == rounds) to_stderr("\r{}\r", std::string(width + 24, ' '));
    std::fflush(stderr);
}

// ------------------------------------------------------------------------------------------------------- events and waits

// What a rank was at until this edge.
const char* phase_before(Edge edge) {
    switch (edge) {
        case Edge::dispatch_began: return "caller";
        case Edge::slot_free: return "wait for the slot";
        case Edge::counts_out: return "count";
        case Edge::counts_in: return "wait for counts";
        case Edge::rows_out: return "send rows";
        case Edge::rows_in: return "wait for rows";
        case Edge::dispatched: return "results";
        case Edge::combine_began: return "experts";
        case Edge::y_out: return "offer y";
        case Edge::y_in: return "wait for y";
        case Edge::combined: return "sum";
        case Edge::dispatch_failed:
        case Edge::combine_failed: return "failed";
        case Edge::shrunk: break;
    }
    return "shrink";
}

// The events of all ranks as chrome://tracing and Perfetto read them: a process per rank, time from the first event.
void write_trace(const std::string& path, std::vector<nlohmann::json>& ranks) {
    int64_t start = INT64_MAX;
    for (const auto& r : ranks)
        for (const auto& e : r["trace"]) start = std::min(start, e[0].get<int64_t>());
    const auto us = [](int64_t ns) { return static_cast<double>(ns) / 1000; };
    nlohmann::json all = nlohmann::json::array();
    for (auto& r : ranks) {
        const int rank = r["rank"];
        all.push_back(
            {{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"args", {{"name", fmt::format("rank {}", rank)}}}});
        int64_t before = -1;
        for (const auto& e : r["trace"]) {
            const int64_t at = e[0];
            const auto edge = static_cast<Edge>(e[4].get<int>());
            nlohmann::json args = {{"epoch", e[1]}, {"until", edge_name(edge)}, {"waited_us", us(e[2])}};
            if (e[3].get<int>() >= 0) args["waited_for_rank"] = e[3];
            if (before >= 0)
                all.push_back({{"ph", "X"},
                               {"name", phase_before(edge)},
                               {"cat", edge <= Edge::dispatch_failed ? "dispatch" : "combine"},
                               {"pid", rank},
                               {"tid", 0},
                               {"ts", us(before - start)},
                               {"dur", us(at - before)},
                               {"args", std::move(args)}});
            before = at;
        }
        r.erase("trace");
    }
    const std::string text = nlohmann::json({{"displayTimeUnit", "ms"}, {"traceEvents", std::move(all)}}).dump();
    write_file(path, text.data(), text.size());
}

// Who stood waiting for whom, and the rank that held the others up most.
void print_waits(const std::vector<nlohmann::json>& ranks) {
    const size_t n = ranks.size();
    fmt::print("\nus per round that the rank of a line stood waiting, by the rank it lacked\n     ");
    for (size_t q = 0; q < n; ++q) fmt::print("{:>10}", q);
    fmt::print("\n");
    std::vector<double> held_up(n);
    for (size_t r = 0; r < n; ++r) {
        fmt::print("{:>5}", r);
        for (size_t q = 0; q < n; ++q) {
            const double us = ranks[r]["wait_by_rank_us"][q];
            fmt::print("{:>10.1f}", us);
            held_up[q] += us;
        }
        fmt::print("\n");
    }
    const auto worst = static_cast<size_t>(std::max_element(held_up.begin(), held_up.end()) - held_up.begin());
    double rest = 0;
    for (size_t q = 0; q < n; ++q)
        if (q != worst) rest = std::max(rest, held_up[q]);
    if (n < 2) return;
    const double each = held_up[worst] / static_cast<double>(n - 1);
    if (held_up[worst] > 2 * rest && each > 50)
        fmt::print("rank {} holds the others up: {:.2f} ms per round each\n", worst, each / 1000);
    else
        fmt::print("no rank stands out\n");
}

// Whether the text, perhaps none, now stands at the end of the file.
bool append(const std::string& path, const std::string& text) {
    std::ofstream file(path, std::ios::app);
    file << text;
    file.close();
    return static_cast<bool>(file);
}

int parent_main(const RunFlags& run, const Case& c, char** argv) {
    std::vector<nlohmann::json> results(static_cast<size_t>(c.ranks));
    std::vector<int> done(results.size());
    std::vector<std::pair<std::string, std::vector<int>>> errors;  // text -> ranks
    int exit_code = 0;
    int shown = -1;
    const auto note_error = [&](const std::string& text, int rank) {
        for (auto& [known, ranks] : errors)
            if (known == text) return ranks.push_back(rank);
        errors.push_back({text, {rank}});
    };
    // Ranks that cannot meet any more are not waited for; those that have met end by themselves within a deadline.
    std::vector<bool> met(results.size());
    const Patience patience{
        .after_failure_ms = [&](int rank) { return met[static_cast<size_t>(rank)] ? c.options.timeout_ms + 5000 : 0; },
        .after_end_ms = c.options.timeout_ms + 60'000};
    const std::vector<RankEnd> ends = launch(c.ranks, argv, patience, [&](int rank, const nlohmann::json& m) {
        if (m.contains("met")) {
            met[static_cast<size_t>(rank)] = true;
        } else if (m.contains("round")) {
            done[static_cast<size_t>(rank)] = m["round"];
            if (const int least = *std::min_element(done.begin(), done.end()); least != shown)
                show_progress(shown = least, run.rounds);
        } else if (m.contains("error")) {
            note_error(m["error"], rank);
            exit_code = std::max(exit_code, m["exit"].get<int>());
        } else {
            results[static_cast<size_t>(rank)] = m;
        }
    });
    bool failed = false;
    for (int r = 0; r < c.ranks; ++r) {
        const RankEnd& end = ends[static_cast<size_t>(r)];
        failed = failed || end.exit_code != 0 || results[static_cast<size_t>(r)].is_null();
        if (end.signal && !end.stopped_by_us)
            note_error(fmt::format("process killed by signal {} ({})", end.signal,
                                   sigabbrev_np(end.signal) ? sigabbrev_np(end.signal) : "?"),
                       r);
        else if (end.stopped_by_us && met[static_cast<size_t>(r)])
            note_error("did not end in time after another rank had; stopped", r);
    }
    if (failed) {
        if (isatty(STDERR_FILENO)) to_stderr("\n");
        for (auto& [text, ranks] : errors) {
            std::sort(ranks.begin(), ranks.end());
            std::replace(text.begin(), text.end(), '\n', ' ');  // one line each
            if (run.json)
                fmt::print("{}\n", line_of({{"error", text}, {"ranks", ranks}}));
            else
                to_stderr("switchyard run: rank{} {}: {}\n", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "), text);
        }
        return std::max(exit_code, 1);
    }

    bool right = true;
    for (const auto& r : results) right = right && r["wrong"].get<std::string>().empty();
    std::vector<FileVerdict> verdicts;
    const bool golden = !c.folder.empty() && std::filesystem::is_directory(c.folder / "golden");
    if (golden) verdicts = compare_folders(c, c.folder / "golden", run.output);
    size_t equal = 0;
    for (const FileVerdict& v : verdicts) equal += v.equal;
    right = right && equal == verdicts.size();

    if (!run.trace.empty()) write_trace(run.trace, results);
    for (auto& r : results) r.erase("trace");
    if (!run.loads.empty()) {
        nlohmann::json line = results[0]["loads"];
        line["routing"] = c.routing;
        line["seed"] = c.seed;
        if (!append(run.loads, line_of(line) + "\n")) {  // as it could before the run: results are shown all the same
            to_stderr("switchyard run: {} cannot be written\n", run.loads);
            right = false;
        }
    }
    if (run.json) {
        for (const auto& r : results) fmt::print("{}\n", r.dump());
        for (const FileVerdict& v : verdicts)
            if (!v.equal) fmt::print("{}\n", line_of({{"file", v.name}, {"equal", false}, {"difference", v.text}}));
        nlohmann::json sum = {{"right", right},
                              {"ranks", c.ranks},
                              {"rounds", run.rounds},
                              {"golden_files", verdicts.size()},
                              {"golden_equal", equal},
                              {"dispatch_us_p50", slowest_rank(results, "dispatch_us")},
                              {"combine_us_p50", slowest_rank(results, "combine_us")},
                              {"step_us_p50", slowest_rank(results, "step_us")}};
        const auto imbalance = [&](const nlohmann::json& loads) {
            return load_statistics(loads.get<std::vector<uint64_t>>()).imbalance;
        };
        sum["rank_imbalance"] = imbalance(results[0]["loads"]["ranks"]);
        if (run.compare) {
            sum["step_us_p50_without"] = slowest_rank(results, "step_us_without");
            sum["rank_imbalance_without"] = imbalance(results[0]["rank_loads_without"]);
        }
        fmt::print("{}\n", sum.dump());
        return right ? 0 : 1;
    }
    print_table(c, results, run.rounds);
    print_accuracy(c, results);
    print_balance(run, results);
    if (run.waits) print_waits(results);
    if (!run.trace.empty()) fmt::print("{} can be opened in ui.perfetto.dev or chrome://tracing\n\n", run.trace);
    for (const FileVerdict& v : verdicts)
        if (!v.equal) fmt::print("golden: {}: {}\n", v.name, v.text);
    if (golden)
        fmt::print("golden: {} of {} files equal, every round the same: {}\n", equal, verdicts.size(),
                   right ? "right" : "WRONG");
    else
        fmt::print("{}: {}\n", c.folder.empty() ? "every byte of every round equals the reference" : "every round the same",
                   right ? "right" : "WRONG");
    return right ? 0 : 1;
}

}  // namespace

namespace {

// `run`, and the two commands that are a run with other defaults.
int run(RunFlags run, char** argv) {
    if (run.output.empty() && !run.folder.empty()) run.output = run.folder + "/output";
    if (is_rank()) return rank_main(run);
    const Case c = read_case(run.folder, run.flags);
    if (run.slow_rank >= c.ranks) throw Mistake(fmt::format("--slow {}: ranks are 0..{}", run.slow_rank, c.ranks - 1));
    if (!run.placement.empty() && !run.folder.empty())
        throw Mistake("--placement with a case on disk: its golden data is of experts without a table; leave DIR out");
    if (run.compare && run.placement.empty()) throw Mistake("--compare needs --placement TABLE.json");
    if (const std::optional<PlacementTable> table = read_table(run))
        if (table->ranks != c.ranks || table->experts != c.options.experts)
            throw Mistake(fmt::format("{} is for {} ranks and {} experts; the run has {} and {}: give --ranks and --experts",
                                      run.placement, table->ranks, table->experts, c.ranks, c.options.experts));

    if (!c.folder.empty()) check_input_files(c);
    if (!run.trace.empty()) write_file(run.trace, "", 0);  // now: not after all rounds
    if (!run.loads.empty() && !append(run.loads, "")) throw Mistake(fmt::format("{} cannot be written", run.loads));
    if (!run.output.empty()) {
        for (const char* part : {"input", "golden"})
            if (std::error_code none; std::filesystem::equivalent(run.output, c.folder / part, none))
                throw Mistake(fmt::format("--output {} is the case's {}; give another folder", run.output, part));
        for (int r = 0; r < c.ranks; ++r) make_folder(file_of(run.output, r, "x").parent_path());
    }
    return parent_main(run, c, argv);
}

}  // namespace

int run_command(int argc, char** argv) {
    RunFlags flags;
    const int code = parse_run(argc, argv, &flags);
    return code >= 0 ? code : run(flags, argv);
}

int trace_command(int argc, char** argv) {
    RunFlags flags;
    const int code = parse_trace(argc, argv, &flags);
    return code >= 0 ? code : run(flags, argv);
}

int verify_command(int argc, char** argv) {
    VerifyFlags verify;
    if (const int code = parse_verify(argc, argv, &verify); code >= 0) return code;
    if (verify.races) return run(*verify.races, argv);
    const CaseFlags& flags = verify.flags;
    const std::string &folder = verify.folder, &output = verify.output;
    const bool json = verify.json;
    if (verify.sim) {
        if (verify.local || verify.landings) throw Mistake("--sim plays seeds; leave --local and --landings out");
        const size_t others = flags.options.size() - flags.options.count("simd");
        if (!folder.empty() || !output.empty() || others > 0 || !flags.ranks.empty() || !flags.batch.empty() ||
            !flags.routing.empty() || !flags.timeout.empty())
            throw Mistake("--sim draws ranks, shape and input from the seed; leave all out but --seed, --seeds and --simd");
        const Case c = read_case({}, flags);
        SimulateFlags simulated = verify.simulated;
        simulated.seed = c.seed;
        simulated.simd = c.options.simd;
        simulated.json = json;
        return simulate(simulated);
    }
    if (verify.local || verify.landings) {
        const Case c = read_case(folder, flags);
        if (!c.folder.empty()) check_input_files(c);
        const int code = verify.local ? verify_local(c, json) : 0;
        return verify.landings ? std::max(code, verify_landings(c, json)) : code;
    }
    if (folder.empty()) throw Mistake("name a case: switchyard verify DIR; or play seeds: switchyard verify --sim");
    const Case c = read_case(folder, flags);
    const std::filesystem::path out = output.empty() ? std::filesystem::path(folder) / "output" : std::filesystem::path(output);
    const std::vector<FileVerdict> verdicts = compare_folders(c, std::filesystem::path(folder) / "golden", out);
    size_t equal = 0;
    for (const FileVerdict& v : verdicts) {
        equal += v.equal;
        if (json)
            fmt::print("{}\n", line_of({{"file", v.name}, {"equal", v.equal}, {"difference", v.text}}));
        else
            fmt::print("{:48} {}\n", v.name, v.equal ? "equal" : "DIFFERS: " + v.text);
    }
    if (!json) fmt::print("{} of {} files equal: {}\n", equal, verdicts.size(), equal == verdicts.size() ? "right" : "WRONG");
    return equal == verdicts.size() ? 0 : 1;
}

}  // namespace switchyard::tools
