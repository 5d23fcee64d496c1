// A layer whose experts do not fit into memory: what reading them costs a step, and what knowing the counts in time is worth.
//
//   on demand    an expert is read when its turn comes, 0 to L-1; a least recently used list says who stays
//   in order     the same in the order of order(): experts in memory first
//   after rows   prefetch() once the rows are here, experts in order()
//   at counts    the same as soon as the counts are here, before the rows       switchyard/expert_memory.hpp
//
// each with room for a share of the experts, against all of them in memory. Ranks are processes with a file of experts each;
// experts are SwiGLU with OpenBLAS GEMMs, or sleep for a time per row, as while a device computes; routing is drawn anew every
// round, experts in demand staying the same ones. The ways take turns within a round, on the same tokens, and must give the
// same bytes. Printed are medians over rounds of rank 0:
//
//   x resident   step / step of the same round with all experts in memory
//   hits         experts that were in memory when their turn came
//   hidden       1 - time waited for reads / time in which something was read
#include <cblas.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "switchyard/expert_memory.hpp"
#include "switchyard/session.hpp"

using namespace switchyard;

namespace {

struct Settings {
    int64_t hidden = 1024, ffn = 1280, experts = 64, topk = 4;
    std::vector<int64_t> tokens = {16, 256}, limits = {25, 50};
    int64_t readers = 2, us_per_row = 0;
    double skew = 1.0;
    int ranks = 2, rounds = 7;
    bool cached = false;
    std::string folder;

    int64_t experts_local() const { return experts / ranks; }
    int64_t expert_bytes() const { return 3 * hidden * ffn * 4; }
    int64_t file_bytes() const { return experts_local() * expert_bytes(); }
};

enum class How { on_demand, in_order, after_rows, at_counts };

struct Way {
    const char* name;
    int64_t limit;  // percent of the experts that fit
    How how;
    ExpertMemory memory;
    std::vector<double> steps, ratios;
    ExpertMemoryStats before;
};

double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

void fill_noise(uint32_t seed, float scale, float* to, int64_t n) {
    std::minstd_rand random(seed);
    for (int64_t i = 0; i < n; ++i) to[i] = scale * (static_cast<float>(random()) / 1073741824.0F - 1.0F);
}

class Layer {
 public:
    Layer(const Settings& s, int rank) : s_(s), random_(static_cast<uint32_t>(77 + rank)) {
        const int64_t tokens = *std::max_element(s.tokens.begin(), s.tokens.end());
        x_.resize(static_cast<size_t>(tokens * s.hidden));
        fill_noise(static_cast<uint32_t>(1'000'000 + rank), 1.0F, x_.data(), tokens * s.hidden);
        out.resize(x_.size());
        a_.resize(static_cast<size_t>(tile_rows * s.hidden));
        gate_.resize(static_cast<size_t>(tile_rows * s.ffn));
        up_.resize(gate_.size());
        // Which experts are in demand is the same on all ranks.
        std::vector<double> demand;
        for (int64_t e = 0; e < s.experts; ++e) demand.push_back(std::pow(static_cast<double>(e + 1), -s.skew));
        std::shuffle(demand.begin(), demand.end(), std::minstd_rand(5));
        router_ = std::discrete_distribution<int32_t>(demand.begin(), demand.end());
    }

    // Tokens of the next round: topk distinct experts for each.
    void draw(int64_t tokens) {
        tokens_ = tokens;
        ids_.clear();
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t k = 0; k < s_.topk;) {
                const int32_t e = router_(random_);
                if (std::find(ids_.end() - k, ids_.end(), e) != ids_.end()) continue;
                ids_.push_back(e);
                ++k;
            }
        weights_.assign(ids_.size(), 1.0F / static_cast<float>(s_.topk));
    }

    void step(Session& session, ExpertMemory& memory, How how) {
        PendingDispatch going = session.dispatch_async({.x = x_.data(), .tokens = tokens_, .topk_ids = ids_.data()});
        const bool counted = how == How::at_counts && going.wait_counted();
        const double at = now_ms();
        if (counted) memory.prefetch(going.counts());
        going.wait();
        if (counted) gaps.push_back(now_ms() - at);
        const std::span<const int64_t> counts = going.counts();  // good as long as the batch
        ExpertBatch batch = going.get();
        if (how == How::after_rows) memory.prefetch(counts);
        if (how == How::on_demand) {
            for (int64_t e = 0; e < s_.experts_local(); ++e)
                if (counts[static_cast<size_t>(e)] > 0) run_expert(batch, memory, e);
        } else {
            for (const int64_t e : memory.order(counts)) run_expert(batch, memory, e);
        }
        session.combine(batch, {.topk_weights = weights_.data(), .out = out.data()});
    }

    std::vector<float> out;
    std::vector<double> gaps;  // ms from counts to rows

 private:
    static constexpr int64_t tile_rows = 64;

    void run_expert(ExpertBatch& batch, ExpertMemory& memory, int64_t e) {
        const ExpertMemory::Lease lease = memory.acquire(e);
        const auto* gate = reinterpret_cast<const float*>(lease.data());  // [H,F], then up [H,F], then down [F,H]
        const float *up = gate + s_.hidden * s_.ffn, *down = up + s_.hidden * s_.ffn;
        auto* y = static_cast<float*>(batch.y());
        const auto at = static_cast<size_t>(e);
        const int64_t start = batch.expert_offsets()[at], rows = batch.expert_offsets()[at + 1] - start;
        if (s_.us_per_row > 0) {  // a device computes; what it would give is a row and weights added, which shows wrong ones
            std::this_thread::sleep_for(std::chrono::microseconds(s_.us_per_row * rows));
            if (rows > 0) batch.gather_f32(e, 0, rows, y + start * s_.hidden);
            for (int64_t i = 0; i < rows * s_.hidden; ++i) y[start * s_.hidden + i] += down[i % s_.hidden];
            return;
        }
        for (int64_t first = 0; first < rows; first += tile_rows) {
            const int64_t n = std::min(tile_rows, rows - first);
            batch.gather_f32(e, first, n, a_.data());
            gemm(n, s_.ffn, s_.hidden, a_.data(), gate, gate_.data());
            gemm(n, s_.ffn, s_.hidden, a_.data(), up, up_.data());
            for (size_t i = 0; i < static_cast<size_t>(n * s_.ffn); ++i)
                gate_[i] = gate_[i] / (1 + std::exp(-gate_[i])) * up_[i];
            gemm(n, s_.hidden, s_.ffn, gate_.data(), down, y + (start + first) * s_.hidden);
        }
    }
    static void gemm(int64_t rows, int64_t columns, int64_t inner, const float* a, const float* b, float* out) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(rows), static_cast<int>(columns),
                    static_cast<int>(inner), 1.0F, a, static_cast<int>(inner), b, static_cast<int>(columns), 0.0F, out,
                    static_cast<int>(columns));
    }

    const Settings& s_;
    std::minstd_rand random_;
    std::discrete_distribution<int32_t> router_;
    int64_t tokens_ = 0;
    std::vector<float> x_, weights_, a_, gate_, up_;
    std::vector<int32_t> ids_;
};

void barrier(Session& session) {
    ExpertBatch nothing = session.dispatch({});
    session.combine(nothing, {});
}

void print_way(const Settings& s, const Way& way, int64_t tokens) {
    const ExpertMemoryStats now = way.memory.stats();
    const double acquires = static_cast<double>(now.hits + now.misses - way.before.hits - way.before.misses);
    const double read_ms = static_cast<double>(now.read_ns - way.before.read_ns) / 1e6;
    const double wait_ms = static_cast<double>(now.wait_ns - way.before.wait_ns) / 1e6;
    std::printf("%6ld  %4ld %%  %-10s  %8.1f  %10.2f  %4.0f %%  %8.0f", tokens, way.limit, way.name, median(way.steps),
                median(way.ratios), 100 * static_cast<double>(now.hits - way.before.hits) / acquires,
                static_cast<double>(now.bytes_read - way.before.bytes_read) / 0x1p20 / s.rounds);
    if (read_ms > 0 && way.how >= How::after_rows)
        std::printf("  %6.1f  %5.0f %%\n", wait_ms / s.rounds, 100 * (1 - wait_ms / read_ms));
    else
        std::printf("  %6.1f  %7s\n", wait_ms / s.rounds, "-");
    std::fflush(stdout);
}

void play_rank(const Settings& s, int rank, const std::string& job) {
    openblas_set_num_threads(1);
    const std::string path = s.folder + "/" + job + "-" + std::to_string(rank) + ".experts";
    ExpertMemory::create(path, s.experts_local(), s.expert_bytes(), [&](int64_t e, std::byte* to) {
        const auto seed = static_cast<uint32_t>(1 + rank * s.experts_local() + e);
        fill_noise(seed, 0.05F, reinterpret_cast<float*>(to), s.expert_bytes() / 4);
    });
    std::vector<Way> ways;
    try {
        const auto add = [&](const char* name, int64_t limit, How how) {
            ways.push_back({.name = name,
                            .limit = limit,
                            .how = how,
                            .memory = ExpertMemory::open(path, {.memory_bytes = s.experts_local() * limit / 100 *
                                                                                ((s.expert_bytes() + 4095) / 4096 * 4096),
                                                                .readers = s.readers,
                                                                .direct = !s.cached}),
                            .steps = {},
                            .ratios = {},
                            .before = {}});
        };
        add("resident", 100, How::on_demand);
        for (const int64_t limit : s.limits) {
            add("on demand", limit, How::on_demand);
            add("in order", limit, How::in_order);
            add("after rows", limit, How::after_rows);
            add("at counts", limit, How::at_counts);
        }
    } catch (...) {
        std::filesystem::remove(path);
        throw;
    }
    std::filesystem::remove(path);  // it stays until the last reader closes it, however this process ends

    Options o;
    o.hidden = s.hidden;
    o.topk = s.topk;
    o.experts = s.experts;
    o.tokens_max = *std::max_element(s.tokens.begin(), s.tokens.end());
    o.dtype = TokenType::f32;
    o.landing = Landing::packed;  // counts before rows
    Session session = Session::open(o, {.rank = rank, .size = s.ranks, .name = job, .token = job});
    for (int64_t e = 0; e < s.experts_local(); ++e) ways[0].memory.acquire(e);
    if (rank == 0) {
        const ExpertMemoryStats all = ways[0].memory.stats();
        std::printf(
            "%d ranks with %ld experts of %.1f MiB each (H %ld, F %ld, f32), top %ld, Zipf %.1f; %d rounds\n"
            "reading: %.0f MiB/s per rank while all read, %ld readers, %s\n\n"
            "tokens   limit  way          step ms  x resident    hits  MiB read  waited   hidden\n",
            s.ranks, s.experts_local(), static_cast<double>(s.expert_bytes()) / 0x1p20, s.hidden, s.ffn, s.topk, s.skew,
            s.rounds, static_cast<double>(all.bytes_read) / 0x1p20 / (static_cast<double>(all.read_ns) / 1e9), s.readers,
            ways[0].memory.direct() ? "past the page cache" : "through the page cache");
    }
    Layer layer(s, rank);
    for (const int64_t tokens : s.tokens) {
        layer.gaps.clear();
        std::vector<double> took(ways.size());
        for (int round = -1; round < s.rounds; ++round) {  // one to warm up
            layer.draw(tokens);
            std::vector<float> first;
            for (size_t i = 0; i < ways.size(); ++i) {
                const size_t n = (i + static_cast<size_t>(round + 1)) % ways.size();
                if (round == 0) ways[n].before = ways[n].memory.stats(), ways[n].steps.clear(), ways[n].ratios.clear();
                barrier(session);
                const double start = now_ms();
                layer.step(session, ways[n].memory, ways[n].how);
                took[n] = now_ms() - start;
                if (first.empty()) first.assign(layer.out.begin(), layer.out.begin() + tokens * s.hidden);
                if (std::memcmp(first.data(), layer.out.data(), first.size() * sizeof(float)) != 0)
                    throw std::runtime_error(std::string("the result of ") + ways[n].name + " has other bytes");
            }
            for (size_t n = 0; round >= 0 && n < ways.size(); ++n) {
                ways[n].steps.push_back(took[n]);
                ways[n].ratios.push_back(took[n] / took[0]);
            }
        }
        for (const Way& way : ways)
            if (rank == 0) print_way(s, way, tokens);
        if (rank == 0) std::printf("        rows are here %.2f ms after the counts\n", median(layer.gaps));
    }
}

int64_t free_memory() {
    std::ifstream in("/proc/meminfo");
    for (std::string line; std::getline(in, line);)
        if (line.rfind("MemAvailable:", 0) == 0) return std::strtoll(line.c_str() + 13, nullptr, 10) * 1024;
    return INT64_MAX;
}

}  // namespace

int main(int argc, char** argv) {
    Settings s;
    const char* temporary = std::getenv("TMPDIR");
    s.folder = temporary ? temporary : ".";
    CLI::App app("Times a Mixture-of-Experts layer whose experts lie in a file and fit into memory in part.");
    app.option_defaults()->always_capture_default();
    app.add_option("--folder", s.folder, "where the files of experts lie while it runs");
    app.add_option("--hidden", s.hidden, "width of a token")->check(CLI::Range(1, 1 << 16));
    app.add_option("--ffn", s.ffn, "width inside an expert")->check(CLI::Range(1, 1 << 16));
    app.add_option("--experts", s.experts, "experts of the whole group; each rank has as many")->check(CLI::Range(1, 4096));
    app.add_option("--topk", s.topk, "experts per token")->check(CLI::Range(1, 4096));
    app.add_option("--tokens", s.tokens, "tokens of each rank")->delimiter(',')->check(CLI::Range(1, 1 << 20));
    app.add_option("--limits", s.limits, "percent of the experts that fit into memory")
        ->delimiter(',')
        ->check(CLI::Range(1, 100));
    app.add_option("--skew", s.skew, "of routing: expert n is in demand as n^-skew")->check(CLI::Range(0.0, 4.0));
    app.add_option("--readers", s.readers, "threads that read, per memory")->check(CLI::Range(1, 64));
    app.add_option("--us-per-row", s.us_per_row, "let experts take so long, asleep as while a device computes; 0: GEMMs")
        ->check(CLI::Range(0, 1'000'000));
    app.add_option("--ranks", s.ranks, "ranks")->check(CLI::Range(1, 256));
    app.add_option("--rounds", s.rounds, "timed rounds")->check(CLI::Range(1, 1'000'000));
    app.add_flag("--cached", s.cached, "read through the page cache, which holds what fits into the machine's memory");
    CLI11_PARSE(app, argc, argv);
    const auto mistake = [](const std::string& text) { return std::fprintf(stderr, "expert_memory: %s\n", text.c_str()), 2; };
    if (s.experts % s.ranks != 0) return mistake("--experts must be a multiple of --ranks");
    if (s.topk > s.experts) return mistake("--topk is more than --experts");
    for (const int64_t limit : s.limits)
        if (s.experts_local() * limit < 100)
            return mistake("--limits: not one expert fits into " + std::to_string(limit) + " %");
    std::error_code error;
    const auto room = std::filesystem::space(s.folder, error);
    if (error) return mistake("--folder " + s.folder + ": " + error.message());
    const auto in_mib = [](int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; };
    const int64_t on_disk = s.ranks * s.file_bytes();
    if (static_cast<int64_t>(room.available) < on_disk)
        return mistake("--folder " + s.folder + " has " + in_mib(static_cast<int64_t>(room.available)) +
                       " free; the files take " + in_mib(on_disk) + ": name another, or fewer or smaller experts");
    int64_t in_memory = on_disk;
    for (const int64_t limit : s.limits) in_memory += 4 * (on_disk / 100 * limit);
    if (free_memory() < in_memory)
        return mistake(in_mib(free_memory()) + " of memory are free; the ways take " + in_mib(in_memory) +
                       ": give fewer or smaller experts, or fewer --limits");

    const std::string job = "expert-memory-" + std::to_string(getpid());
    std::vector<pid_t> ranks;
    for (int r = 0; r < s.ranks; ++r) {
        const pid_t child = fork();
        if (child == 0) {
            try {
                play_rank(s, r, job);
                std::fflush(stdout);
                _exit(0);
            } catch (const std::exception& failure) {
                std::fprintf(stderr, "expert_memory: rank %d: %s\n", r, failure.what());
                _exit(1);
            }
        }
        ranks.push_back(child);
    }
    int code = 0;
    for (const pid_t child : ranks) {
        int status = 0;
        if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) code = 1;
    }
    return code;
}
