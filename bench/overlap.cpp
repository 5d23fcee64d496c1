// `switchyard bench overlap`: how much of a layer's communication hides behind its experts. The same layer one step after the
// other, and as a pipeline, in turn; medians.
//
//   serial     dispatch | experts | combine                                  blocking calls
//   pipeline   dispatch(c+1) | experts(c) | combine(c-1), chunks of tokens   switchyard/pipeline.hpp
//
// Ranks are processes, each on one CPU of its own; experts are SwiGLU with OpenBLAS GEMMs. Prints, per landing and per who
// moves what travels (option progress; `tiles`: the expert code itself, by Session::progress() between two tiles):
//
//   hidden share = (serial - pipeline) / (serial - experts alone)
//
// `waiting` is the part of the serial communication in which the rank stood still. The rest is copying and adding by its own
// CPU, which cannot do the experts' work at the same time, whoever calls it.
//
// A pipeline of one chunk, too, in which nothing can overlap: what it wins or loses against blocking calls is noise. The
// results must be equal but for the order in which a GEMM adds when its tiles are others.
#include <cblas.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
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
#include <iostream>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "case.hpp"
#include "switchyard/pipeline.hpp"

using namespace switchyard;

namespace {

struct Settings {
    int64_t hidden = 1024, ffn = 16, experts = 8, topk = 8, tokens = 2048;
    int ranks = 2, rounds = 15;
    std::vector<int64_t> chunks = {1, 2, 4, 8};
    bool trace = false;
    bool spare = false;
};

struct Expert {
    std::vector<float> gate, up, down;  // [H,F], [H,F], [F,H]
};

double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double>& values) {
    const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

double waited_ms(const Session& session) {
    const SessionStats stats = session.stats();
    return static_cast<double>(stats.wait_ns_counts + stats.wait_ns_rows + stats.wait_ns_returned) / 1e6;
}

std::vector<float> noise(uint32_t seed, int64_t n, float scale) {
    std::minstd_rand random(seed);
    std::vector<float> values(static_cast<size_t>(n));
    for (float& v : values) v = scale * (static_cast<float>(random()) / 1073741824.0F - 1.0F);
    return values;
}

template <class... A>
void complain(fmt::format_string<A...> text, A&&... arguments) {
    tools::to_stderr("switchyard bench overlap: {}\n", fmt::vformat(text, fmt::make_format_args(arguments...)));
}

// 0, or 1 when what was printed could not be written.
int output_code() {
    if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return 0;
    return complain("the output could not be written"), 1;
}

class Layer {
 public:
    Layer(const Settings& s, int rank) : s_(s) {
        for (int64_t e = 0; e < s.experts / s.ranks; ++e) {
            const auto seed = static_cast<uint32_t>(1 + 10 * (rank * s.experts + e));
            experts_.push_back({noise(seed, s.hidden * s.ffn, 0.02F), noise(seed + 1, s.hidden * s.ffn, 0.02F),
                                noise(seed + 2, s.ffn * s.hidden, 0.1F)});
        }
        x = noise(static_cast<uint32_t>(1'000'000 + rank), s.tokens * s.hidden, 1.0F);
        std::minstd_rand random(static_cast<uint32_t>(77 + rank));
        for (int64_t i = 0; i < s.tokens * s.topk; ++i)
            ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(s.experts)));
        weights.assign(ids.size(), 1.0F / static_cast<float>(s.topk));
        out.resize(x.size());
        a_.resize(static_cast<size_t>(tile_rows * s.hidden));
        gate_.resize(static_cast<size_t>(tile_rows * s.ffn));
        up_.resize(gate_.size());
    }

    // y of one batch; `between` is called after every tile.
    template <class Between>
    void run(ExpertBatch& batch, Between between) {
        auto* y = static_cast<float*>(batch.y());
        for (size_t e = 0; e < experts_.size(); ++e) {
            const int64_t start = batch.expert_offsets()[e], rows = batch.expert_offsets()[e + 1] - start;
            for (int64_t first = 0; first < rows; first += tile_rows) {
                const int64_t n = std::min(tile_rows, rows - first);
                batch.gather_f32(static_cast<int64_t>(e), first, n, a_.data());
                gemm(n, s_.ffn, s_.hidden, a_.data(), experts_[e].gate.data(), gate_.data());
                gemm(n, s_.ffn, s_.hidden, a_.data(), experts_[e].up.data(), up_.data());
                for (size_t i = 0; i < static_cast<size_t>(n * s_.ffn); ++i)
                    gate_[i] = gate_[i] / (1 + std::exp(-gate_[i])) * up_[i];
                gemm(n, s_.hidden, s_.ffn, gate_.data(), experts_[e].down.data(), y + (start + first) * s_.hidden);
                between();
            }
        }
    }

    std::vector<float> x, weights, out;
    std::vector<int32_t> ids;

 private:
    static constexpr int64_t tile_rows = 64;
    static void gemm(int64_t rows, int64_t columns, int64_t inner, const float* a, const float* b, float* out) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(rows), static_cast<int>(columns),
                    static_cast<int>(inner), 1.0F, a, static_cast<int>(inner), b, static_cast<int>(columns), 0.0F, out,
                    static_cast<int>(columns));
    }
    const Settings& s_;
    std::vector<Expert> experts_;
    std::vector<float> a_, gate_, up_;
};

void barrier(Session& session) {
    ExpertBatch nothing = session.dispatch({});
    session.combine(nothing, {});
}

enum class Mover { caller, tiles, worker };
constexpr const char* mover_name[] = {"caller", "tiles", "worker"};

// Keeps this thread, and those that it starts, on the nth of the CPUs that it may use, or on `count` of them from there on.
void stay_on(const cpu_set_t& all, int nth, int count) {
    cpu_set_t some;
    CPU_ZERO(&some);
    int i = 0;
    for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &all)) continue;
        if (i >= nth && i < nth + count) CPU_SET(cpu, &some);
        ++i;
    }
    sched_setaffinity(0, sizeof some, &some);
}

void play_rank(const Settings& s, int rank, const std::string& job) {
    const int cpus_each = s.spare ? 2 : 1;
    cpu_set_t all;
    sched_getaffinity(0, sizeof all, &all);
    Layer layer(s, rank);
    if (rank == 0)
        std::printf(
            "%ld tokens x %ld columns (f32) per rank, top %ld of %ld experts of width %ld, %d ranks on one CPU each%s; "
            "medians of %d rounds in ms, rank 0\n\nlanding   mover   chunks  experts  communication  waiting  serial  pipeline "
            " hidden share\n",
            s.tokens, s.hidden, s.topk, s.experts, s.ffn, s.ranks, s.spare ? ", their workers on another" : "", s.rounds);
    for (const char* landing : {"packed", "in_place"})
        for (const Mover mover : {Mover::caller, Mover::tiles, Mover::worker}) {
            Options o;
            o.hidden = s.hidden;
            o.topk = s.topk;
            o.experts = s.experts;
            o.tokens_max = s.tokens;
            o.dtype = TokenType::f32;
            o.depth = 3;
            o.progress = mover == Mover::worker ? ProgressBy::worker : ProgressBy::caller;
            if (const Status status = set_option(o, *find_option("landing"), landing); !status.ok()) throw Error(status);
            stay_on(all, rank * cpus_each + cpus_each - 1, 1);  // of the session's threads
            Session session =
                Session::open(o, {.rank = rank, .size = s.ranks, .name = job + landing + mover_name[int(mover)], .token = job});
            stay_on(all, rank * cpus_each, 1);  // of the experts
            const auto between = [&] {
                if (mover == Mover::tiles) session.progress();
            };
            std::vector<float> first;
            for (const int64_t chunks : s.chunks) {
                std::vector<double> serial, alone, piped, waits;
                for (int round = -2; round < s.rounds; ++round) {  // two to warm up
                    barrier(session);
                    const double waited = waited_ms(session);
                    const double a = now_ms();
                    ExpertBatch batch =
                        session.dispatch({.x = layer.x.data(), .tokens = s.tokens, .topk_ids = layer.ids.data()});
                    layer.run(batch, [] {});

                    session.combine(batch, {.topk_weights = layer.weights.data(), .out = layer.out.data()});
                    const double c = now_ms();
                    const double waiting = waited_ms(session) - waited;
                    if (first.empty()) first = layer.out;

                    batch = session.dispatch({.x = layer.x.data(), .tokens = s.tokens, .topk_ids = layer.ids.data()});
                    const double d = now_ms();
                    layer.run(batch, [] {});
                    const double e = now_ms();
                    session.combine(batch, {.topk_weights = layer.weights.data(), .out = layer.out.data()});

                    barrier(session);
                    std::fill(layer.out.begin(), layer.out.end(), 0.0F);
                    const double f = now_ms();
                    pipeline(session,
                             {.x = layer.x.data(),
                              .tokens = s.tokens,
                              .topk_ids = layer.ids.data(),
                              .topk_weights = layer.weights.data(),
                              .out = layer.out.data(),
                              .chunks = chunks},
                             [&](ExpertBatch& part, int64_t) { layer.run(part, between); });
                    const double g = now_ms();
                    if (round < 0) continue;
                    serial.push_back(c - a);
                    alone.push_back(e - d);
                    piped.push_back(g - f);
                    waits.push_back(waiting);
                }
                float apart = 0;
                for (size_t i = 0; i < first.size(); ++i) apart = std::max(apart, std::abs(first[i] - layer.out[i]));
                if (!(apart < 1e-4F)) throw std::runtime_error("the pipeline's result differs by " + std::to_string(apart));
                const double all_of = median(serial), experts = median(alone), pipe = median(piped);
                if (rank == 0)
                    std::printf("%-8s  %-6s  %6ld  %7.2f  %13.2f  %7.2f  %6.2f  %8.2f  %11.0f%%\n", landing,
                                mover_name[int(mover)], chunks, experts, all_of - experts, median(waits), all_of, pipe,
                                100 * (all_of - pipe) / (all_of - experts));
                std::fflush(stdout);
            }
            if (s.trace && rank == 0) {
                const std::vector<TraceEvent> events = session.trace();
                std::vector<TraceEvent> last;  // of the last pipeline
                for (const TraceEvent& event : events)
                    if (event.epoch + static_cast<uint64_t>(s.chunks.back()) > events.back().epoch) last.push_back(event);
                for (const TraceEvent& event : last)
                    std::printf("    %9.3f ms  epoch %lu  %s\n", static_cast<double>(event.at_ns - last[0].at_ns) / 1e6,
                                event.epoch, edge_name(event.edge));
            }
        }
}

}  // namespace

int main(int argc, char** argv) {
    // OpenBLAS starts its threads when it is loaded, and joins them in every fork: without any, from the start.
    if (const char* threads = std::getenv("OPENBLAS_NUM_THREADS"); !threads || std::string_view(threads) != "1") {
        setenv("OPENBLAS_NUM_THREADS", "1", 1);
        execv("/proc/self/exe", argv);
    }
    Settings s;
    CLI::App app("Times a Mixture-of-Experts layer step by step and as a pipeline.", "switchyard bench overlap");
    app.option_defaults()->always_capture_default();
    app.add_option("--hidden", s.hidden, "width of a token")->check(CLI::Range(1, 1 << 16));
    app.add_option("--ffn", s.ffn, "width inside an expert: how much compute there is")->check(CLI::Range(1, 1 << 16));
    app.add_option("--experts", s.experts, "experts of the whole group; each rank has its share")->check(CLI::Range(1, 4096));
    app.add_option("--topk", s.topk, "experts per token")->check(CLI::Range(1, 4096));
    app.add_option("--tokens", s.tokens, "tokens of each rank")->check(CLI::Range(1, 1 << 20));
    app.add_option("--ranks", s.ranks, "ranks")->check(CLI::Range(1, 256));
    app.add_option("--rounds", s.rounds, "timed rounds")->check(CLI::Range(1, 1'000'000));
    app.add_option("--chunks", s.chunks, "chunks of tokens in the pipeline")->delimiter(',')->check(CLI::Range(1, 1 << 20));
    app.add_flag("--spare", s.spare, "a second CPU for each rank, on which its progress worker runs");
    app.add_flag("--trace", s.trace, "also the events of the last pipeline of each kind");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        if (error.get_exit_code() != 0) return complain("{}", error.what()), 2;
        app.exit(error);  // --help
        std::cout.flush();
        return std::cout ? 0 : (complain("the output could not be written"), 1);
    }
    cpu_set_t all;
    sched_getaffinity(0, sizeof all, &all);
    if (const int needs = s.ranks * (s.spare ? 2 : 1); needs > CPU_COUNT(&all))
        return complain("that needs {} CPUs, this process may use {}", needs, CPU_COUNT(&all)), 2;
    if (s.experts % s.ranks != 0) return complain("--experts must be a multiple of --ranks"), 2;
    // Weights; tokens, results and the rows of both landings' windows. Anything larger than the machine would only be killed.
    const double bytes = 4.0 * static_cast<double>(s.hidden) *
                         (3.0 * static_cast<double>(s.ffn * s.experts) +
                          static_cast<double>(s.ranks * s.tokens) * (3.0 + 6.0 * static_cast<double>(s.topk)));
    const double has = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
    if (bytes > 0.9 * has)
        return complain(
                   "that needs about {:.1f} GiB, the machine has {:.1f}; choose smaller --tokens, --hidden, --ffn or --experts",
                   bytes / 0x1p30, has / 0x1p30),
               2;

    const std::string job = "overlap-" + std::to_string(getpid());
    const pid_t parent = getpid();
    std::vector<pid_t> ranks;
    for (int r = 0; r < s.ranks; ++r) {
        const pid_t child = fork();
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) _exit(1);  // it died before the line above
            try {
                play_rank(s, r, job);
                _exit(output_code());
            } catch (const std::exception& error) {
                complain("rank {}: {}", r, error.what());
                _exit(1);
            }
        }
        ranks.push_back(child);
    }
    int code = 0;
    for (size_t r = 0; r < ranks.size(); ++r) {
        int status = 0;
        if (ranks[r] < 0 || waitpid(ranks[r], &status, 0) != ranks[r]) status = 1;
        if (WIFSIGNALED(status)) complain("rank {} was ended by a signal: {}", r, strsignal(WTERMSIG(status)));
        if (status != 0) code = 1;
    }
    return code;
}
