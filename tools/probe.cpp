// The probe of `switchyard doctor`: a few processes open a session and measure what a flag costs, and what moving rows costs
// beside streaming the same rows into own memory. A glance, not a benchmark: `switchyard bench` is that.
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "doctor.hpp"
#include "launch.hpp"
#include "switchyard/session.hpp"

namespace switchyard::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t hidden = 7168, topk = 8, tokens = 256;
constexpr int64_t row_bytes = 2 * hidden, rows = tokens * topk;
constexpr double latency_s = 0.3, bandwidth_s = 0.8;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

double quantile(std::vector<double> v, double q) {
    if (v.empty()) return 0;
    std::sort(v.begin(), v.end());
    return v[static_cast<size_t>(q * static_cast<double>(v.size() - 1))];
}

// memcpy of a row past the caches where the processor can do so; both addresses are multiples of 16.
void stream_row(std::byte* to, const std::byte* from) {
#if defined(__SSE2__)
    auto* t = reinterpret_cast<__m128i*>(to);
    const auto* f = reinterpret_cast<const __m128i*>(from);
    for (int64_t i = 0; i < row_bytes / 16; ++i) _mm_stream_si128(t + i, _mm_load_si128(f + i));
#else
    std::memcpy(to, from, static_cast<size_t>(row_bytes));
#endif
}
void fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

struct AlignedRows {
    explicit AlignedRows(int64_t n) : memory(static_cast<size_t>(n * row_bytes + 64), std::byte{1}) {
        void* p = memory.data();
        size_t space = memory.size();
        start = static_cast<std::byte*>(std::align(64, static_cast<size_t>(n * row_bytes), p, space));
    }
    std::vector<std::byte> memory;
    std::byte* start;
};

void measure() {
    const Group group = Group::from_environment("doctor");
    Options options;
    options.hidden = hidden;
    options.topk = topk;
    options.experts = topk;  // every token goes to all of them: the ranks, at most as many, get equal shares
    options.tokens_max = tokens;
    options.rows_max = tokens * topk * group.size;
    options.landing = Landing::packed;  // K rows of every token move: that is what is set against streaming
    options.depth = 1;
    options.timeout_ms = 2000;
    const auto start = Clock::now();
    Session session = Session::open(options, group);
    const double open_ms = 1e3 * seconds_since(start);

    const AlignedRows x(tokens);
    std::vector<int32_t> ids(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) ids[static_cast<size_t>(i)] = static_cast<int32_t>(i % topk);
    std::vector<std::byte> out(static_cast<size_t>(row_bytes));
    const auto dispatch = [&](int64_t n) { return session.dispatch({.x = x.start, .tokens = n, .topk_ids = ids.data()}); };

    // All ranks make the same number of calls; when enough is enough, rank 0 says so by what it sends.
    std::vector<double> latency_us;
    for (const auto phase = Clock::now();;) {
        const bool last = group.rank == 0 && (seconds_since(phase) > latency_s || latency_us.size() == 5000);
        const auto call = Clock::now();
        ExpertBatch batch = dispatch(last ? 1 : 0);
        const bool over = batch.rows() > 0;
        session.combine(batch, {.out = out.data()});
        if (over) break;
        latency_us.push_back(1e6 * seconds_since(call));
    }

    // Each rank streams the rows it would send into its own memory, then sends them: the same bytes at the same time.
    const AlignedRows own(rows);
    std::vector<double> stream_us, dispatch_us;
    for (const auto phase = Clock::now();;) {
        const bool last =
            group.rank == 0 && dispatch_us.size() >= 5 && (seconds_since(phase) > bandwidth_s || dispatch_us.size() == 60);
        dispatch(0);  // brings the ranks together, and is dropped
        auto call = Clock::now();
        for (int64_t i = 0; i < rows; ++i) stream_row(own.start + i * row_bytes, x.start + i / topk * row_bytes);
        fence();
        stream_us.push_back(1e6 * seconds_since(call));
        dispatch(0);
        call = Clock::now();
        const ExpertBatch batch = dispatch(last ? 0 : tokens);
        const double us = 1e6 * seconds_since(call);
        const int64_t mine = topk / group.size + (group.rank < topk % group.size ? 1 : 0);
        if (batch.rows() < mine * tokens * group.size) break;
        dispatch_us.push_back(us);
    }
    stream_us.resize(dispatch_us.size());
    // The first rounds touch fresh memory.
    const auto warm = [](std::vector<double> v) { return std::vector<double>(v.begin() + 2, v.end()); };
    report({{"rank", group.rank},
            {"open_ms", open_ms},
            {"latency_us", quantile(latency_us, 0.5)},
            {"latency_us_p99", quantile(latency_us, 0.99)},
            {"round_trips", latency_us.size()},
            {"stream_us", quantile(warm(stream_us), 0.5)},
            {"dispatch_us", quantile(warm(dispatch_us), 0.5)},
            {"rounds", dispatch_us.size()},
            {"memory", session.memory_text()}});
    session.close();
}

// What the machine did meanwhile: seconds of CPU.
struct Meter {
    double busy = 0, steal = 0, own = 0;
    Clock::time_point at = Clock::now();

    static Meter read() {
        Meter m;
        std::ifstream in("/proc/stat");
        std::string word;
        double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
        in >> word >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal;
        const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
        m.busy = (user + nice + system + irq + softirq) / ticks;
        m.steal = steal / ticks;
        rusage used = {};
        getrusage(RUSAGE_CHILDREN, &used);
        const auto seconds = [](const timeval& t) {
            return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
        };
        m.own = seconds(used.ru_utime) + seconds(used.ru_stime);
        return m;
    }
};

// Cores among the CPUs this process may run on; CPUs of one core share it.
size_t cores() {
    cpu_set_t set;
    std::set<std::string> siblings;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 0;
    for (size_t i = 0; i < CPU_SETSIZE; ++i)
        if (CPU_ISSET(i, &set))
            siblings.insert(line_of_file(fmt::format("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", i)));
    siblings.erase("");
    return siblings.size();
}

std::string reasons(int ranks, const Meter& before, const Meter& after) {
    std::vector<std::string> found;
    const double wall = std::chrono::duration<double>(after.at - before.at).count();
    if (const double others = (after.busy - before.busy - (after.own - before.own)) / wall; others > 0.2)
        found.push_back(fmt::format("other processes used {:.1f} CPUs meanwhile", others));
    if (const double steal = (after.steal - before.steal) / wall; steal > 0.02)
        found.push_back(fmt::format("the host took {:.0f} % of a CPU from this virtual machine", 100 * steal));
    if (const size_t n = cores(); n > 0 && n < static_cast<size_t>(ranks))
        found.push_back(fmt::format("the CPUs of this process are threads of {} core{}", n, n > 1 ? "s" : ""));
    const std::string governor = line_of_file("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
    if (governor == "powersave") found.push_back("the frequency governor is powersave");
    return found.empty() ? "no cause is in sight from here" : fmt::format("{}", fmt::join(found, "; "));
}

}  // namespace

int64_t probe_bytes(int ranks) {
    return int64_t{ranks} * (2 * rows + 2 * tokens) * row_bytes;
}

int probe_rank() {
    try {
        measure();
        return 0;
    } catch (const std::exception& e) {
        report({{"error", e.what()}});
        return 1;
    }
}

Finding probe(int ranks, double cpus, char** argv) {
    Finding f{.check = "probe"};
    std::vector<nlohmann::json> results(static_cast<size_t>(ranks));
    std::string error;
    const Meter before = Meter::read();
    try {
        const std::vector<RankEnd> ends =
            launch(ranks, argv, {.after_failure_ms = [](int) { return 2500; }, .after_end_ms = 2500},
                   [&](int rank, const nlohmann::json& m) {
                       if (!m.contains("error")) results[static_cast<size_t>(rank)] = m;
                       // That of the rank that failed first: the others tell of it.
                       else if (error.empty())
                           error = m["error"];
                   });
        for (const RankEnd& end : ends)
            if (error.empty() && end.exit_code != 0)
                error = end.signal ? fmt::format("a rank was killed by signal {}", end.signal)
                                   : fmt::format("a rank ended with exit code {}", end.exit_code);
    } catch (const std::exception& e) {
        error = e.what();
    }
    if (!error.empty()) {
        std::replace(error.begin(), error.end(), '\n', ' ');
        f.level = Finding::Level::finding;
        f.seen = fmt::format("{} processes could not play a round: {}", ranks, error);
        f.why = "a group of yours would end the same way";
        f.cure = "see the text, and the findings above";
        f.facts["error"] = error;
        return f;
    }
    const Meter after = Meter::read();
    double latency = 0, latency_p99 = 0, dispatch_us = 0, stream_us = 0, open_ms = 0;
    for (const auto& r : results) {
        latency = std::max(latency, r["latency_us"].get<double>());
        latency_p99 = std::max(latency_p99, r["latency_us_p99"].get<double>());
        dispatch_us = std::max(dispatch_us, r["dispatch_us"].get<double>());
        stream_us = std::max(stream_us, r["stream_us"].get<double>());
        open_ms = std::max(open_ms, r["open_ms"].get<double>());
    }
    const double bytes = static_cast<double>(rows * row_bytes);
    const double share = dispatch_us > 0 ? stream_us / dispatch_us : 0;
    const auto gbs = [&](double us) { return us > 0 ? bytes / us / 1e3 : 0.0; };
    const bool each_has_a_cpu = cpus >= ranks;
    f.seen = fmt::format(
        "{} processes: empty dispatch + combine {:.1f} us; dispatch of 256 x 7168 f16 {:.2f} GB/s per rank, {:.2f} "
        "of streaming to own memory ({:.2f} GB/s)",
        ranks, latency, gbs(dispatch_us), share, gbs(stream_us));
    f.facts = {{"ranks", ranks},
               {"open_ms", open_ms},
               {"latency_us", latency},
               {"latency_us_p99", latency_p99},
               {"round_trips", results[0]["round_trips"]},
               {"dispatch_gb_s", gbs(dispatch_us)},
               {"stream_gb_s", gbs(stream_us)},
               {"dispatch_share_of_stream", share},
               {"rounds", results[0]["rounds"]},
               {"each_rank_has_a_cpu", each_has_a_cpu}};
    if (!each_has_a_cpu) {
        f.level = Finding::Level::note;
        f.why = "the ranks of the probe share CPUs, so these numbers are the scheduler's, and no bar is held against them";
        return f;
    }
    std::vector<std::string> worse;
    if (latency >= probe_latency_us_max)
        worse.push_back(
            fmt::format("a round trip of {:.0f} us where less than {:.0f} are usual", latency, probe_latency_us_max));
    if (share < probe_share_min)
        worse.push_back(fmt::format("dispatch at {:.2f} of streaming where {:.1f} and more are usual", share, probe_share_min));
    if (worse.empty()) return f;
    f.level = Finding::Level::finding;
    const std::string cause = reasons(ranks, before, after);
    f.why = fmt::format("{}: {}", fmt::join(worse, ", and "), cause);
    f.facts["cause"] = cause;
    f.cure =
        "end what else runs here (top -o %CPU), pin the ranks (taskset -c, one CPU each), then: switchyard doctor; for the "
        "whole picture: switchyard bench --bars";
    return f;
}

}  // namespace switchyard::tools
