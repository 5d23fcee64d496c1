// A Mixture-of-Experts layer on Switchyard, from router to result. The first file to read.
//
//   router     logits = x Wg; softmax; the K best experts of each token; their weights scaled to sum to 1
//   dispatch   every token goes to the ranks that own its experts                       Switchyard
//   experts    y = (silu(a Wgate) * (a Wup)) Wdown for the rows of each expert          SwiGLU, GEMM by OpenBLAS
//   combine    out[t] = sum over k of weight[t,k] * y(row of t,k)                       Switchyard
//
// Started plainly it plays 4 ranks, as processes that it starts itself (or as threads: --threads), and prints where the time
// went, for landing packed and landing in_place in turn. Started by torchrun, or whatever else sets RANK and WORLD_SIZE, it is
// one rank of that group.
//
// It also checks itself, and exits with 1 when anything is wrong:
//   - the rows that arrive, and combine's sums of given rows, equal switchyard::reference bit for bit;
//   - the layer over R ranks equals the layer on one rank that holds all experts, but for the rounding of the GEMM, which
//     may add in another order when an expert's rows are tiled differently: see allowed_difference().
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
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "switchyard/reference.hpp"
#include "switchyard/session.hpp"

using namespace switchyard;

namespace {

struct Settings {
    int64_t hidden = 512;   // H
    int64_t ffn = 1024;     // F, width inside an expert
    int64_t experts = 16;   // E, of the whole group
    int64_t topk = 4;       // K
    int64_t tokens = 64;    // T of each rank
    int ranks = 4;          // when it starts them itself
    int rounds = 10;        // timed; the median is printed
    bool threads = false;   // ranks as threads instead of processes
    bool residual = false;  // out = x + layer(x)
    std::string dtype = "bf16";
    std::string dispatch_quant = "none";
    std::vector<std::string> landings = {"packed", "in_place"};  // played in turn, round by round
};

struct Expert {
    std::vector<float> gate, up;  // [H,F]
    std::vector<float> down;      // [F,H]
};

// Every process makes all experts, because it checks itself against one rank that holds them all. A real one loads its own.
struct Model {
    std::vector<float> router;    // [H,E]
    std::vector<Expert> experts;  // [E]
};

struct Routing {
    std::vector<int32_t> ids;    // [T,K]
    std::vector<float> weights;  // [T,K]
};

using Tokens = std::vector<std::byte>;  // [T,H] of the token type

// What one pass through the layer took, in milliseconds, and saw.
struct Pass {
    double router = 0, dispatch = 0, experts = 0, combine = 0;
    double moved = 0;     // dispatch + experts + combine: what a landing can change
    int64_t rows = 0;     // received
    float y_largest = 0;  // |y| of this rank's experts
};

class Clock {
 public:
    // Milliseconds since the last call.
    double lap() {
        const auto before = std::exchange(at_, std::chrono::steady_clock::now());
        return std::chrono::duration<double, std::milli>(at_ - before).count();
    }

 private:
    std::chrono::steady_clock::time_point at_ = std::chrono::steady_clock::now();
};

// -------------------------------------------------------------------------------------------------------------- the layer

Routing route(const Settings& s, const Model& model, TokenType dtype, const std::byte* x);
void run_experts(const Settings& s, const Model& model, const Session& session, const ExpertBatch& batch, Pass& pass);

// One pass over this rank's tokens. The same for any number of ranks: only the session knows how many there are.
Pass moe_layer(const Settings& s, const Model& model, Session& session, const Tokens& x, Tokens& out) {
    // With landing in_place the layer before writes its result to session.x(), and dispatch moves no token at all. A copy
    // outside the clock stands for that write.
    const std::byte* tokens = x.data();
    if (void* place = session.x()) {
        std::memcpy(place, x.data(), x.size());
        tokens = static_cast<const std::byte*>(place);
    }

    Pass pass;
    Clock clock;
    const Routing routing = route(s, model, session.options().dtype, tokens);
    pass.router = clock.lap();

    ExpertBatch batch = session.dispatch({.x = tokens, .tokens = s.tokens, .topk_ids = routing.ids.data()});
    pass.dispatch = clock.lap();

    run_experts(s, model, session, batch, pass);
    pass.experts = clock.lap();

    // `shared` is added unweighted: made for the output of shared experts, it serves a residual connection just as well.
    session.combine(batch,
                    {.topk_weights = routing.weights.data(), .shared = s.residual ? x.data() : nullptr, .out = out.data()});
    pass.combine = clock.lap();
    pass.moved = pass.dispatch + pass.experts + pass.combine;
    return pass;
}

// ---------------------------------------------------------------------------------------------------------------- numbers

// out [rows,columns] = a [rows,inner] * b [inner,columns]
void gemm(int64_t rows, int64_t columns, int64_t inner, const float* a, const float* b, float* out) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(rows), static_cast<int>(columns),
                static_cast<int>(inner), 1.0F, a, static_cast<int>(inner), b, static_cast<int>(columns), 0.0F, out,
                static_cast<int>(columns));
}

int64_t token_bytes(TokenType dtype) {
    return dtype == TokenType::f32 ? 4 : 2;
}

// bf16 is the upper half of f32, rounded to nearest even.
uint16_t bf16_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float f32_of(uint16_t bf16) {
    const uint32_t bits = uint32_t{bf16} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// n elements of the token type from f32, and back.
void store_tokens(TokenType dtype, const float* from, int64_t n, std::byte* to) {
    for (int64_t i = 0; i < n; ++i) {
        const uint16_t bf16 = bf16_of(from[i]);
        const auto f16 = static_cast<_Float16>(from[i]);
        switch (dtype) {
            case TokenType::f16: std::memcpy(to + 2 * i, &f16, 2); break;
            case TokenType::bf16: std::memcpy(to + 2 * i, &bf16, 2); break;
            case TokenType::f32: std::memcpy(to + 4 * i, from + i, 4); break;
        }
    }
}

std::vector<float> load_tokens(TokenType dtype, const std::byte* from, int64_t n) {
    std::vector<float> to(static_cast<size_t>(n));
    for (size_t i = 0; i < to.size(); ++i) {
        uint16_t bf16;
        _Float16 f16;
        switch (dtype) {
            case TokenType::f16: std::memcpy(&f16, from + 2 * i, 2), to[i] = static_cast<float>(f16); break;
            case TokenType::bf16: std::memcpy(&bf16, from + 2 * i, 2), to[i] = f32_of(bf16); break;
            case TokenType::f32: std::memcpy(&to[i], from + 4 * i, 4); break;
        }
    }
    return to;
}

// Numbers in -1..1 that every process draws alike.
std::vector<float> noise(uint32_t seed, int64_t n, float scale) {
    std::minstd_rand random(seed);
    std::vector<float> values(static_cast<size_t>(n));
    for (float& v : values) v = scale * (static_cast<float>(random()) / 1073741824.0F - 1.0F);
    return values;
}

// The largest magnitude; NaN if there is one.
float largest(const float* values, int64_t n) {
    float most = 0;
    for (int64_t i = 0; i < n; ++i)
        if (std::isnan(values[i]) || std::abs(values[i]) > most) most = std::abs(values[i]);
    return most;
}

// ----------------------------------------------------------------------------------------------------------------- router

Routing route(const Settings& s, const Model& model, TokenType dtype, const std::byte* x) {
    const std::vector<float> input = load_tokens(dtype, x, s.tokens * s.hidden);
    std::vector<float> logits(static_cast<size_t>(s.tokens * s.experts));
    gemm(s.tokens, s.experts, s.hidden, input.data(), model.router.data(), logits.data());

    Routing routing;
    std::vector<int32_t> order(static_cast<size_t>(s.experts));
    for (int64_t t = 0; t < s.tokens; ++t) {
        const float* logit = logits.data() + t * s.experts;
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + s.topk, order.end(), [&](int32_t a, int32_t b) {
            return logit[a] != logit[b] ? logit[a] > logit[b] : a < b;  // equal logits: the lower expert, on every rank
        });
        // Softmax over all experts, then scaled over the K chosen: its denominator cancels.
        float sum = 0;
        for (int64_t k = 0; k < s.topk; ++k) sum += std::exp(logit[order[static_cast<size_t>(k)]] - logit[order[0]]);
        for (int64_t k = 0; k < s.topk; ++k) {
            const int32_t id = order[static_cast<size_t>(k)];
            routing.ids.push_back(id);
            routing.weights.push_back(std::exp(logit[id] - logit[order[0]]) / sum);
        }
    }
    return routing;
}

// ---------------------------------------------------------------------------------------------------------------- experts

// Expert by expert and tile by tile, so that a tile stays in cache from gather to result. Results go straight to batch.y(),
// where combine reads them.
void run_experts(const Settings& s, const Model& model, const Session& session, const ExpertBatch& batch, Pass& pass) {
    constexpr int64_t tile_rows = 64;
    std::vector<float> a(static_cast<size_t>(tile_rows * s.hidden)), y(a.size());
    std::vector<float> gate(static_cast<size_t>(tile_rows * s.ffn)), up(gate.size());
    const TokenType dtype = session.options().dtype;
    const int64_t first_expert = experts_of(session.rank(), session.size(), s.experts).first;

    for (int64_t e = 0; e < session.experts_local(); ++e) {
        const Expert& expert = model.experts[static_cast<size_t>(first_expert + e)];
        const int64_t start = batch.expert_offsets()[static_cast<size_t>(e)];
        const int64_t rows = batch.expert_offsets()[static_cast<size_t>(e) + 1] - start;
        for (int64_t first = 0; first < rows; first += tile_rows) {
            const int64_t count = std::min(tile_rows, rows - first);
            batch.gather_f32(e, first, count, a.data());  // decodes, whatever format the rows travelled in
            gemm(count, s.ffn, s.hidden, a.data(), expert.gate.data(), gate.data());
            gemm(count, s.ffn, s.hidden, a.data(), expert.up.data(), up.data());
            for (size_t i = 0; i < static_cast<size_t>(count * s.ffn); ++i)
                gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
            gemm(count, s.hidden, s.ffn, gate.data(), expert.down.data(), y.data());
            store_tokens(dtype, y.data(), count * s.hidden,
                         static_cast<std::byte*>(batch.y()) + (start + first) * s.hidden * token_bytes(dtype));
            pass.y_largest = std::max(pass.y_largest, largest(y.data(), count * s.hidden));
        }
    }
    pass.rows = batch.rows();
}

// ----------------------------------------------------------------------------------------------------------------- inputs

Model make_model(const Settings& s) {
    const float in = std::sqrt(3.0F / static_cast<float>(s.hidden)), inside = std::sqrt(3.0F / static_cast<float>(s.ffn));
    Model model;
    model.router = noise(1, s.hidden * s.experts, in);
    for (int64_t e = 0; e < s.experts; ++e) {
        const auto seed = static_cast<uint32_t>(100 + 3 * e);
        model.experts.push_back({noise(seed, s.hidden * s.ffn, in), noise(seed + 1, s.hidden * s.ffn, in),
                                 noise(seed + 2, s.ffn * s.hidden, inside)});
    }
    return model;
}

Tokens make_tokens(const Settings& s, TokenType dtype, int rank) {
    const std::vector<float> values = noise(static_cast<uint32_t>(1'000'000 + rank), s.tokens * s.hidden, 2.0F);
    Tokens tokens(values.size() * static_cast<size_t>(token_bytes(dtype)));
    store_tokens(dtype, values.data(), static_cast<int64_t>(values.size()), tokens.data());
    return tokens;
}

Options make_options(const Settings& s, const std::string& landing) {
    Options options;
    options.hidden = s.hidden;
    options.topk = s.topk;
    options.experts = s.experts;
    options.tokens_max = s.tokens;
    // By name, with a text that says what is allowed.
    for (const auto& [name, text] :
         {std::pair{"dtype", s.dtype}, std::pair{"dispatch_quant", s.dispatch_quant}, {"landing", landing}})
        if (const Status status = set_option(options, *find_option(name), text); !status.ok()) throw Error(status);
    return options;
}

// ------------------------------------------------------------------------------------------------------------------ checks

void require(bool good, const std::string& text) {
    if (!good) throw std::runtime_error(text);
}

// A stand-in for the experts' output that every rank can tell: the row for slot k of a token of `source`.
Tokens answer(const Settings& s, TokenType dtype, int source, int64_t token, int64_t k) {
    const auto seed = static_cast<uint32_t>(7 + (source * s.tokens + token) * s.topk + k);
    Tokens row(static_cast<size_t>(s.hidden * token_bytes(dtype)));
    store_tokens(dtype, noise(seed, s.hidden, 4.0F).data(), s.hidden, row.data());
    return row;
}

// Dispatch and combine against the reference, bit for bit.
void check_exactly(const Settings& s, const Model& model, Session& session) {
    const Options& options = session.options();
    std::vector<Tokens> x;
    std::vector<Routing> routing;
    std::vector<reference::RankInput> inputs;
    for (int r = 0; r < session.size(); ++r) {
        x.push_back(make_tokens(s, options.dtype, r));
        routing.push_back(route(s, model, options.dtype, x.back().data()));
    }
    for (size_t r = 0; r < x.size(); ++r)
        inputs.push_back({x[r].data(), s.tokens, routing[r].ids.data(), routing[r].weights.data()});
    const auto me = static_cast<size_t>(session.rank());

    ExpertBatch batch = session.dispatch({.x = x[me].data(), .tokens = s.tokens, .topk_ids = routing[me].ids.data()});
    const reference::Received want = reference::dispatch(options, inputs, session.rank());
    const auto same = [](const void* got, const auto& expected) {
        return expected.empty() || std::memcmp(got, expected.data(), expected.size() * sizeof expected[0]) == 0;
    };
    require(batch.rows() == want.rows, "dispatch: wrong number of rows");
    require(same(batch.assist_info_for_combine().data(), want.assist_info_for_combine), "dispatch: wrong order of rows");
    require(same(batch.expand_x(), want.expand_x), "dispatch: rows differ from the reference");
    require(same(batch.dynamic_scales(), want.dynamic_scales), "dispatch: scales differ from the reference");

    const size_t row_bytes = static_cast<size_t>(s.hidden * token_bytes(options.dtype));
    for (size_t i = 0; i < static_cast<size_t>(batch.rows()); ++i) {
        const auto source = batch.assist_info_for_combine().subspan(3 * i, 3);
        std::memcpy(static_cast<std::byte*>(batch.y()) + i * row_bytes,
                    answer(s, options.dtype, source[0], source[1], source[2]).data(), row_bytes);
    }
    Tokens out(x[me].size());
    session.combine(batch, {.topk_weights = routing[me].weights.data(), .out = out.data()});
    std::vector<Tokens> rows(static_cast<size_t>(s.topk));  // of one token
    const Tokens sums = reference::combine(options, inputs[me], session.rank(),
                                           [&](int source, int64_t token, int64_t k, int32_t) -> const void* {
                                               Tokens& row = rows[static_cast<size_t>(k)];
                                               row = answer(s, options.dtype, source, token, k);
                                               return row.data();
                                           });
    require(out == sums, "combine: sums differ from the reference");
}

// How far two runs of the layer may be apart when only the GEMM adds in another order. In bf16 and f16 that can turn the
// rounding of a y and the rounding of out by one unit in the last place, at most 2^-7 or 2^-10 of it; the weights sum to 1. In
// f32 it is the error of the sums themselves: far below 1e-4 of the largest y for any width that fits this example.
float allowed_difference(TokenType dtype, float y_largest, float out_largest) {
    if (dtype == TokenType::f32) return 1e-4F * y_largest;
    return (y_largest + out_largest) / (dtype == TokenType::bf16 ? 128.0F : 1024.0F);
}

struct Difference {
    float largest = 0, allowed = 0;
};

// `out`, from this group, against one rank that holds all experts.
Difference check_against_one_rank(const Settings& s, const Model& model, const Tokens& x, const Tokens& out) {
    std::vector<Session> alone = Session::open_local(make_options(s, "auto"), 1);
    const TokenType dtype = alone[0].options().dtype;
    Tokens out_alone(x.size());
    const Pass pass = moe_layer(s, model, alone[0], x, out_alone);

    const std::vector<float> a = load_tokens(dtype, out.data(), s.tokens * s.hidden);
    const std::vector<float> b = load_tokens(dtype, out_alone.data(), s.tokens * s.hidden);
    std::vector<float> apart(a.size());
    for (size_t i = 0; i < a.size(); ++i) apart[i] = a[i] - b[i];
    const auto n = static_cast<int64_t>(a.size());
    const float out_largest = largest(b.data(), n);
    require(out_largest > 0 && std::isfinite(out_largest), "the layer on one rank gives nothing, or no numbers");
    Difference d;
    d.largest = largest(apart.data(), n);
    d.allowed = allowed_difference(dtype, pass.y_largest, out_largest);
    require(d.largest <= d.allowed, "the layer differs from one rank with all experts by " + std::to_string(d.largest) +
                                        "; allowed: " + std::to_string(d.allowed));
    return d;
}

// -------------------------------------------------------------------------------------------------------------- one rank

// Every rank waits here for every other: a dispatch without tokens, which is an ordinary one.
void barrier(Session& session) {
    ExpertBatch nothing = session.dispatch({});
    session.combine(nothing, {});
}

double median(std::vector<Pass>& passes, double Pass::*part) {
    const auto middle = passes.begin() + static_cast<int64_t>(passes.size() / 2);
    std::nth_element(passes.begin(), middle, passes.end(), [&](const Pass& a, const Pass& b) { return a.*part < b.*part; });
    return (*middle).*part;
}

// `sessions`: one per landing, which take turns.
void play_rank(const Settings& s, const Model& model, std::vector<Session>& sessions) {
    const TokenType dtype = sessions[0].options().dtype;
    const Tokens x = make_tokens(s, dtype, sessions[0].rank());
    std::vector<Tokens> out(sessions.size(), Tokens(x.size()));
    std::vector<std::vector<Pass>> passes(sessions.size());
    for (size_t l = 0; l < sessions.size(); ++l) {
        check_exactly(s, model, sessions[l]);
        moe_layer(s, model, sessions[l], x, out[l]);  // first touch of the window's pages
    }
    for (int i = 0; i < s.rounds; ++i)
        for (size_t l = 0; l < sessions.size(); ++l) {
            barrier(sessions[l]);
            passes[l].push_back(moe_layer(s, model, sessions[l], x, out[l]));
        }
    for (const Tokens& o : out) require(o == out[0], "the landings give different results");
    const Difference d = check_against_one_rank(s, model, x, out[0]);

    Session& first = sessions[0];
    if (first.rank() == 0)
        std::printf(
            "hidden %ld  ffn %ld  experts %ld  top %ld  %s  dispatch_quant %s  ranks %d  kernels %s\n"
            "median of %d passes in ms, waiting for other ranks included; BLAS on one thread per rank\n\n"
            "landing   rank  tokens  owned  rows  router  dispatch  experts  combine  last three\n",
            s.hidden, s.ffn, s.experts, s.topk, s.dtype.c_str(), s.dispatch_quant.c_str(), first.size(), first.simd_name(),
            s.rounds);
    for (size_t l = 0; l < sessions.size(); ++l)
        for (int r = 0; r < first.size(); ++r) {  // in turn
            std::fflush(stdout);
            barrier(first);
            if (r != first.rank()) continue;
            const double moved = median(passes[l], &Pass::moved);
            std::printf("%-8s  %4d  %6ld  %5ld  %4ld  %6.2f  %8.2f  %7.2f  %7.2f  %10.2f", s.landings[l].c_str(), r, s.tokens,
                        first.experts_local(), passes[l].back().rows, median(passes[l], &Pass::router),
                        median(passes[l], &Pass::dispatch), median(passes[l], &Pass::experts),
                        median(passes[l], &Pass::combine), moved);
            if (l > 0) std::printf("  %.2f x %s", moved / median(passes[0], &Pass::moved), s.landings[0].c_str());
            std::printf("\n");
        }
    std::fflush(stdout);
    barrier(first);  // a rank that found something wrong does not come here
    if (first.rank() == 0)
        std::printf(
            "\nevery rank and landing: dispatch and combine equal the reference bit for bit, the layer equals one rank's (rank "
            "0: "
            "apart by %.2e, allowed %.2e)\n",
            d.largest, d.allowed);
}

// ----------------------------------------------------------------------------------------------------------- many ranks

// Runs `play` and turns what it throws into a line and an exit code.
template <class Play>
int exit_code_of(int rank, Play play) {
    try {
        play();
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "moe_layer: rank %d: %s\n", rank, error.what());
        return 1;
    }
}

int play_as_threads(const Settings& s) {
    const Model model = make_model(s);
    std::vector<std::vector<Session>> sessions(static_cast<size_t>(s.ranks));  // [rank][landing]
    for (const std::string& landing : s.landings) {
        std::vector<Session> group = Session::open_local(make_options(s, landing), s.ranks);
        for (size_t r = 0; r < group.size(); ++r) sessions[r].push_back(std::move(group[r]));
    }
    std::vector<int> codes(sessions.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < sessions.size(); ++r)
        threads.emplace_back([&, r] {
            std::vector<Session> own = std::move(sessions[r]);  // end with the thread: no other rank waits for a failed one
            codes[r] = exit_code_of(static_cast<int>(r), [&] { play_rank(s, model, own); });
        });
    for (std::thread& thread : threads) thread.join();
    return *std::max_element(codes.begin(), codes.end());
}

int play_as_one_process(const Settings& s) {
    const int rank = std::atoi(std::getenv("RANK"));
    return exit_code_of(rank, [&] {
        const Model model = make_model(s);
        std::vector<Session> sessions;
        for (const std::string& landing : s.landings)
            sessions.push_back(Session::open(make_options(s, landing), Group::from_environment(landing)));
        play_rank(s, model, sessions);
    });
}

// Starts this program once per rank. The variables are torchrun's; the "port" only tells this job from others on the host.
int start_processes(const Settings& s, char** argv) {
    const std::string ranks = std::to_string(s.ranks), job = std::to_string(getpid());
    const std::string token = std::to_string(std::random_device{}()) + std::to_string(std::random_device{}());
    std::vector<pid_t> started;
    for (int r = 0; r < s.ranks; ++r) {
        const pid_t child = fork();
        if (child < 0) std::perror("moe_layer: fork");
        if (child != 0) {
            started.push_back(child);
            continue;
        }
        setenv("RANK", std::to_string(r).c_str(), 1);
        setenv("WORLD_SIZE", ranks.c_str(), 1);
        setenv("LOCAL_WORLD_SIZE", ranks.c_str(), 1);
        setenv("MASTER_ADDR", "127.0.0.1", 1);
        setenv("MASTER_PORT", job.c_str(), 1);
        setenv("SWITCHYARD_TOKEN", token.c_str(), 1);
        execv("/proc/self/exe", argv);
        std::perror("moe_layer: execv");
        _exit(1);
    }
    // A rank that fails is noticed by the others, which then end too: nobody is left to wait for.
    int code = 0;
    for (const pid_t child : started) {
        int status = 0;
        const bool good = child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!good) code = 1;
    }
    return code;
}

}  // namespace

int main(int argc, char** argv) {
    Settings s;
    CLI::App app("A Mixture-of-Experts layer on Switchyard: router, dispatch, SwiGLU experts, combine.");
    app.option_defaults()->always_capture_default();
    app.add_option("--hidden", s.hidden, "width of a token")->check(CLI::Range(1, 1 << 16));
    app.add_option("--ffn", s.ffn, "width inside an expert")->check(CLI::Range(1, 1 << 16));
    app.add_option("--experts", s.experts, "experts of the whole group")->check(CLI::Range(1, 4096));
    app.add_option("--topk", s.topk, "experts per token")->check(CLI::Range(1, 4096));
    app.add_option("--tokens", s.tokens, "tokens of each rank")->check(CLI::Range(1, 1 << 20));
    app.add_option("--ranks", s.ranks, "ranks to start, unless a launcher did")->check(CLI::Range(1, 256));
    app.add_option("--rounds", s.rounds, "timed passes")->check(CLI::Range(1, 1'000'000));
    app.add_option("--dtype", s.dtype, "type of tokens: bf16, f16 or f32");
    app.add_option("--dispatch-quant", s.dispatch_quant, "number format of rows on their way out");
    app.add_option("--landing", s.landings, "how rows lie when they arrive; several take turns")->delimiter(',');
    app.add_flag("--threads", s.threads, "ranks as threads of this process");
    app.add_flag("--residual", s.residual, "add x to the result");
    try {
        app.parse(argc, argv);
        if (s.topk > s.experts) throw CLI::ValidationError("--topk", "more experts per token than there are (--experts)");
        for (const std::string& landing : s.landings)
            if (const Status status = check_options(make_options(s, landing), s.ranks); !status.ok()) throw Error(status);
    } catch (const CLI::ParseError& error) {
        return app.exit(error) == 0 ? 0 : 2;
    } catch (const Error& error) {
        std::fprintf(stderr, "moe_layer: %s\n", error.what());
        return 2;
    }

    openblas_set_num_threads(1);  // ranks already share the CPUs; more threads each would only fight for them
    if (s.threads) return play_as_threads(s);
    if (std::getenv("RANK") && std::getenv("WORLD_SIZE")) return play_as_one_process(s);
    return start_processes(s, argv);
}
