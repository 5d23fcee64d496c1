// What the tests of the session share: a watchdog, seeds, ranks as threads, problems with their right answers, comparison.
//
// A Problem is one dispatch/combine of a whole group with the results that the scalar reference gives. golden_test judges the
// reference itself. A rank plays its part of a problem with dispatch_args, difference_of_batch, fill_y, combine_args.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "switchyard/reference.hpp"
#include "switchyard/session.hpp"

namespace switchyard::test {

// ---------------------------------------------------------------------------------------------------------------- scale

#if defined(__SANITIZE_THREAD__)
inline constexpr int64_t slowness = 5;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr int64_t slowness = 4;
#else
inline constexpr int64_t slowness = 1;
#endif

/// Repetitions that a slow build can bear.
constexpr int64_t scaled(int64_t n) {
    return n / slowness > 0 ? n / slowness : 1;
}

// --------------------------------------------------------------------------------------------------------------- landings

inline constexpr Landing every_landing[] = {Landing::packed,    Landing::padded,    Landing::in_place,
                                            Landing::allgather, Landing::two_level, Landing::alltoallv};

// -------------------------------------------------------------------------------------------------------------- watchdog

/// Ends the process with the name of the test that hangs. An alarm and not a thread, so that tests may fork.
class Watchdog : public testing::EmptyTestEventListener {
 public:
    static constexpr unsigned seconds = static_cast<unsigned>(300 * (slowness > 1 ? 2 : 1));

    /// Watches this process from now on; a forked child calls it again, because an alarm is not inherited.
    static void watch(const std::string& name, unsigned limit = seconds) {
        std::snprintf(text(), text_bytes, "\nwatchdog: %s did not end within %u s\n", name.c_str(), limit);
        signal(SIGALRM, bark);
        alarm(limit);
    }

    void OnTestStart(const testing::TestInfo& info) override { watch(std::string(info.test_suite_name()) + "." + info.name()); }
    void OnTestEnd(const testing::TestInfo&) override { alarm(0); }

 private:
    static constexpr size_t text_bytes = 256;
    static char* text() {
        static char buffer[text_bytes];
        return buffer;
    }
    static void bark(int) {
        const ssize_t written = write(STDERR_FILENO, text(), strlen(text()));
        static_cast<void>(written);
        signal(SIGABRT, SIG_DFL);
        abort();
    }
};

/// Whoever includes this header is watched.
inline const bool watchdog_installed = [] {
    testing::UnitTest::GetInstance()->listeners().Append(new Watchdog);
    return true;
}();

// ----------------------------------------------------------------------------------------------------------------- seeds

/// A seeded generator. The seed is printed; SWITCHYARD_TEST_SEED=n runs with another.
class Random : public std::mt19937_64 {
 public:
    Random() : Random(chosen_seed()) {
        std::printf("seed %llu; again: SWITCHYARD_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed_),
                    static_cast<unsigned long long>(seed_));
    }
    explicit Random(uint64_t seed) : std::mt19937_64(seed), seed_(seed) {}

    uint64_t seed() const { return seed_; }
    /// 0..n-1
    int64_t below(int64_t n) { return static_cast<int64_t>((*this)() % static_cast<uint64_t>(n)); }
    bool one_in(int64_t n) { return below(n) == 0; }
    template <class T>
    T pick(std::initializer_list<T> list) {
        return list.begin()[below(static_cast<int64_t>(list.size()))];
    }

 private:
    static uint64_t chosen_seed() {
        const char* text = std::getenv("SWITCHYARD_TEST_SEED");
        return text != nullptr ? std::strtoull(text, nullptr, 10) : 81442;
    }
    uint64_t seed_;
};

/// A number without a pattern from numbers with one (splitmix64).
constexpr uint64_t mix(uint64_t a, uint64_t b = 0, uint64_t c = 0) {
    uint64_t z = a + 0x9E3779B97F4A7C15U * (b + 1) + 0xD1B54A32D192ED03U * (c + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
}

// ------------------------------------------------------------------------------------------------------- ranks as threads

/// How a call ended.
struct Outcome {
    Code code = Code::ok;
    std::string text;
};

/// Calls f and tells how it ended; anything but an Error passes through.
template <class F>
Outcome outcome_of(F&& f) {
    try {
        f();
        return {};
    } catch (const Error& error) {
        return {error.code(), error.what()};
    }
}

/// Whether an outcome has that code and a text with all these words.
inline testing::AssertionResult is_error(const Outcome& outcome, Code code, std::initializer_list<std::string> words = {}) {
    if (outcome.code != code)
        return testing::AssertionFailure() << "expected " << code_name(code) << ", got " << code_name(outcome.code) << ": \""
                                           << outcome.text << "\"";
    for (const std::string& word : words)
        if (outcome.text.find(word) == std::string::npos)
            return testing::AssertionFailure() << "\"" << word << "\" is missing in: \"" << outcome.text << "\"";
    return testing::AssertionSuccess();
}

/// Whether a text names that rank, also in a list: "rank 2", "ranks 0, 2", "ranks 0 and 2".
inline bool names_rank(const std::string& text, int rank) {
    for (size_t at = 0; (at = text.find("rank", at)) != std::string::npos;) {
        at += 4;
        if (at < text.size() && text[at] == 's') ++at;
        if (at < text.size() && text[at] == ' ') ++at;
        while (at < text.size() && text[at] >= '0' && text[at] <= '9') {
            size_t digits = 0;
            if (std::stoll(text.substr(at, 9), &digits) == rank) return true;
            at += digits;
            for (const char* joint : {", ", " and "})
                if (text.compare(at, strlen(joint), joint) == 0) {
                    at += strlen(joint);
                    break;
                }
        }
    }
    return false;
}

/// Runs play(rank) for ranks 0..n-1, each on a thread of its own. An exception that leaves play is a failure of the test.
template <class Play>
void on_ranks(int64_t n, Play play) {
    std::vector<std::thread> threads;
    for (int r = 0; r < static_cast<int>(n); ++r)
        threads.emplace_back([&play, r] {
            try {
                play(r);
            } catch (const std::exception& error) {
                ADD_FAILURE() << "rank " << r << ": " << error.what();
            }
        });
    for (std::thread& t : threads) t.join();
}

inline void sleep_ms(int64_t ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

/// A one-way gate between threads; wait() needs no deadline of its own because of the watchdog.
class Signal {
 public:
    void raise(int n = 1) {
        count_ += n;
        count_.notify_all();
    }
    bool is_raised(int n = 1) const { return count_ >= n; }
    void wait(int n = 1) {
        for (int seen; (seen = count_) < n;) count_.wait(seen);
    }

 private:
    std::atomic<int> count_{0};
};

// ------------------------------------------------------------------------------------------------------------- comparison

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& v) {
    return std::as_bytes(std::span(v));
}

/// "" when equal, else the name and the first difference.
inline std::string difference(const std::string& name, std::span<const std::byte> got, std::span<const std::byte> expected) {
    if (got.size() != expected.size())
        return name + " has " + std::to_string(got.size()) + " bytes, expected " + std::to_string(expected.size());
    for (size_t i = 0; i < got.size(); ++i)
        if (got[i] != expected[i]) {
            char text[96];
            std::snprintf(text, sizeof text, " differs first at byte %zu of %zu: 0x%02X, expected 0x%02X", i, got.size(),
                          std::to_integer<unsigned>(got[i]), std::to_integer<unsigned>(expected[i]));
            return name + text;
        }
    return {};
}

// --------------------------------------------------------------------------------------------------------------- problems

inline size_t token_bytes(TokenType type) {
    return type == TokenType::f32 ? 4 : 2;
}

/// Fills n elements of `type`: plain numbers of moderate size from `seed`, or, when wild, any bit pattern.
inline void fill_values(TokenType type, uint64_t seed, bool wild, int64_t n, void* out) {
    auto* to = static_cast<std::byte*>(out);
    for (int64_t i = 0; i < n; ++i) {
        const uint64_t bits = mix(seed, static_cast<uint64_t>(i));
        uint32_t value = static_cast<uint32_t>(bits >> 32);
        if (!wild) {
            const auto sign = static_cast<uint32_t>(bits & 1);
            const auto scale = static_cast<uint32_t>(bits >> 8 & 7);  // one of eight powers of two below 8
            if (type == TokenType::f16)
                value = sign << 15 | (10 + scale) << 10 | (value & 0x3FFU);
            else if (type == TokenType::bf16)
                value = sign << 15 | (122 + scale) << 7 | (value & 0x7FU);
            else
                value = sign << 31 | (122 + scale) << 23 | (value & 0x7FFFFFU);
        }
        const auto narrow = static_cast<uint16_t>(value);
        if (type == TokenType::f32)
            std::memcpy(to + i * 4, &value, 4);
        else
            std::memcpy(to + i * 2, &narrow, 2);
    }
}

/// Fills n elements of `type` with NaN.
inline void fill_nan(TokenType type, int64_t n, void* out) {
    auto* to = static_cast<std::byte*>(out);
    const uint32_t wide = 0x7FC01234;
    const uint16_t narrow = type == TokenType::f16 ? 0x7E12 : 0x7FC1;
    for (int64_t i = 0; i < n; ++i)
        if (type == TokenType::f32)
            std::memcpy(to + i * 4, &wide, 4);
        else
            std::memcpy(to + i * 2, &narrow, 2);
}

/// One rank's side of a problem.
struct RankData {
    int64_t tokens = 0;
    int64_t stride = 0;              ///< elements between rows of x
    std::vector<std::byte> x;        ///< [T, stride]
    std::vector<std::byte> dense_x;  ///< [T,H], what the reference reads
    std::vector<int32_t> ids;        ///< [T,K]
    std::vector<float> weights;      ///< [T,K]
    std::vector<std::byte> shared;   ///< [T,H]
};

struct Problem {
    Options options;
    uint64_t seed = 0;
    bool wild = false;     ///< values of any bit pattern
    bool weighted = true;  ///< combine with weights
    bool with_shared = false;
    std::vector<RankData> ranks;
    std::optional<PlacementTable> table;           ///< where experts lie; solve() again after setting it
    std::vector<reference::Received> received;     ///< right results of dispatch
    std::vector<std::vector<std::byte>> combined;  ///< right results of combine
};

/// The row that `expert` gives for slot k of a token of `source`: any numbers, but the same ones everywhere.
inline void expert_row(const Problem& p, int32_t expert, int source, int64_t token, int64_t k, void* row) {
    const uint64_t seed = mix(mix(p.seed, static_cast<uint64_t>(expert), static_cast<uint64_t>(source)),
                              static_cast<uint64_t>(token), static_cast<uint64_t>(k));
    fill_values(p.options.dtype, seed, p.wild && seed % 4 == 0, p.options.hidden, row);
}

/// Computes p.received and p.combined.
inline void solve(Problem& p) {
    const Options& o = p.options;
    const size_t row_bytes = static_cast<size_t>(o.hidden) * token_bytes(o.dtype);
    std::vector<reference::RankInput> inputs;
    for (const RankData& d : p.ranks)
        inputs.push_back(
            {d.dense_x.data(), d.tokens, d.ids.data(), p.weighted || o.deliver_weights ? d.weights.data() : nullptr});
    // With a table rows go to slots as they would to so many experts. Combine does not know of it.
    Options placed = o;
    std::vector<reference::RankInput> placed_inputs = inputs;
    std::vector<std::vector<int32_t>> slots;
    if (p.table) placed.experts = p.table->slots();
    for (size_t r = 0; p.table && r < p.ranks.size(); ++r) {
        slots.push_back(slots_of(*p.table, static_cast<int>(r), p.ranks[r].ids));
        placed_inputs[r].topk_ids = slots.back().data();
    }
    p.received.clear(), p.combined.clear();
    for (size_t r = 0; r < p.ranks.size(); ++r) {
        const RankData& d = p.ranks[r];
        p.received.push_back(reference::dispatch(placed, placed_inputs, static_cast<int>(r)));
        reference::RankInput input = inputs[r];
        if (!p.weighted) input.topk_weights = nullptr;
        std::vector<std::byte> rows(static_cast<size_t>(o.topk) * row_bytes);
        p.combined.push_back(reference::combine(
            o, input, static_cast<int>(r),
            [&](int source, int64_t token, int64_t k, int32_t expert) {
                std::byte* row = rows.data() + static_cast<size_t>(k) * row_bytes;
                expert_row(p, expert, source, token, k, row);
                return static_cast<const void*>(row);
            },
            p.with_shared ? d.shared.data() : nullptr));
    }
}

/// How ids are drawn.
enum class Routing { uniform, skewed, sparse, repeated };

/// A problem of random inputs. `tokens[r]` of rank r; unused slots, rows nobody routes and their weights hold NaN.
inline Problem make_problem(Random& random, const Options& options, const std::vector<int64_t>& tokens,
                            Routing routing = Routing::uniform) {
    Problem p;
    p.options = options;
    p.seed = random();
    p.wild = random.one_in(3);
    p.weighted = !random.one_in(4);
    p.with_shared = random.one_in(3);
    const Options& o = options;
    const size_t item = token_bytes(o.dtype);
    const size_t row_bytes = static_cast<size_t>(o.hidden) * item;
    const auto favourite = static_cast<int32_t>(random.below(o.experts));
    for (const int64_t n : tokens) {
        RankData d;
        d.tokens = n;
        d.stride = o.hidden + (random.one_in(2) ? random.below(5) : 0);
        d.ids.resize(static_cast<size_t>(n * o.topk));
        for (int32_t& id : d.ids) {
            id = static_cast<int32_t>(random.below(o.experts));
            if (routing == Routing::skewed && !random.one_in(4)) id = favourite;
            if (routing == Routing::sparse && !random.one_in(3)) id = -1;
            if (routing == Routing::repeated && &id != d.ids.data() && random.one_in(2)) id = *(&id - 1);
        }
        d.weights.resize(d.ids.size());
        for (size_t i = 0; i < d.ids.size(); ++i)
            d.weights[i] = d.ids[i] < 0 ? __builtin_nanf("") : static_cast<float>(random.below(2001) - 1000) / 640.0F;
        d.x.resize(static_cast<size_t>(n * d.stride) * item);
        fill_nan(o.dtype, n * d.stride, d.x.data());
        d.dense_x.resize(static_cast<size_t>(n) * row_bytes);
        fill_nan(o.dtype, n * o.hidden, d.dense_x.data());
        for (int64_t t = 0; t < n; ++t) {
            bool routed = false;
            for (int64_t k = 0; k < o.topk; ++k) routed = routed || d.ids[static_cast<size_t>(t * o.topk + k)] >= 0;
            if (!routed) continue;
            std::byte* row = d.dense_x.data() + static_cast<size_t>(t) * row_bytes;
            fill_values(o.dtype, random(), p.wild && random.one_in(2), o.hidden, row);
            std::memcpy(d.x.data() + static_cast<size_t>(t * d.stride) * item, row, row_bytes);
        }
        d.shared.resize(static_cast<size_t>(n) * row_bytes);
        fill_values(o.dtype, random(), false, n * o.hidden, d.shared.data());
        p.ranks.push_back(std::move(d));
    }
    solve(p);
    return p;
}

/// The same problem for a group that ranks have left: they bring no tokens, and their experts are unused slots.
inline Problem without(const Problem& p, const std::vector<int>& lost) {
    Problem q = p;
    const auto ranks = static_cast<int64_t>(p.ranks.size());
    for (RankData& d : q.ranks)
        for (size_t i = 0; i < d.ids.size(); ++i)
            for (const int l : lost) {
                const ExpertRange range = experts_of(l, ranks, p.options.experts);
                if (d.ids[i] >= range.first && d.ids[i] < range.last) d.ids[i] = -1, d.weights[i] = __builtin_nanf("");
            }
    for (const int l : lost) {
        q.ranks[static_cast<size_t>(l)] = RankData();
        q.ranks[static_cast<size_t>(l)].stride = p.options.hidden;
    }
    q.received.clear();
    q.combined.clear();
    solve(q);
    return q;
}

/// Ranks 0..ranks-1 but for those.
inline std::vector<int> others(int ranks, const std::vector<int>& lost) {
    std::vector<int> left;
    for (int r = 0; r < ranks; ++r)
        if (std::find(lost.begin(), lost.end(), r) == lost.end()) left.push_back(r);
    return left;
}

/// What that rank passes to dispatch. Null pointers where it has no tokens.
inline DispatchArgs dispatch_args(const Problem& p, int rank) {
    const RankData& d = p.ranks[static_cast<size_t>(rank)];
    if (d.tokens == 0) return {};
    return {.x = d.x.data(),
            .tokens = d.tokens,
            .row_stride = d.stride == p.options.hidden ? 0 : d.stride,
            .topk_ids = d.ids.data(),
            .topk_weights = p.options.deliver_weights ? d.weights.data() : nullptr};
}

/// What that rank passes to combine, with y in batch.y().
inline CombineArgs combine_args(const Problem& p, int rank, void* out) {
    const RankData& d = p.ranks[static_cast<size_t>(rank)];
    if (d.tokens == 0) return {};
    return {.topk_weights = p.weighted ? d.weights.data() : nullptr,
            .shared = p.with_shared ? d.shared.data() : nullptr,
            .out = out};
}

/// Every result of a dispatch against the right one; "" when equal.
inline std::string difference_of_batch(const ExpertBatch& batch, const Problem& p, int rank) {
    const reference::Received& right = p.received[static_cast<size_t>(rank)];
    if (batch.rows() != right.rows)
        return "rows is " + std::to_string(batch.rows()) + ", expected " + std::to_string(right.rows);
    if (const int64_t tokens = p.ranks[static_cast<size_t>(rank)].tokens; batch.tokens() != tokens)
        return "tokens is " + std::to_string(batch.tokens()) + ", expected " + std::to_string(tokens);
    const auto rows = static_cast<size_t>(batch.rows());
    const auto view = [&](const void* at, int64_t bytes) {
        return std::span(static_cast<const std::byte*>(at), at ? rows * static_cast<size_t>(bytes) : 0);
    };
    std::string weights;
    if (p.options.deliver_weights)
        weights = difference("weights", view(batch.weights(), 4), bytes_of(right.weights));
    else if (batch.weights() != nullptr)
        weights = "weights are there without deliver_weights";
    for (const std::string& found :
         {difference("expert_token_nums", std::as_bytes(batch.expert_token_nums()), bytes_of(right.expert_token_nums)),
          difference("ep_recv_count", std::as_bytes(batch.ep_recv_count()), bytes_of(right.ep_recv_count)),
          difference("expert_offsets", std::as_bytes(batch.expert_offsets()), bytes_of(right.expert_offsets)),
          difference("assist_info_for_combine", std::as_bytes(batch.assist_info_for_combine()),
                     bytes_of(right.assist_info_for_combine)),
          difference("expand_x", view(batch.expand_x(), batch.payload_bytes()), right.expand_x),
          difference("dynamic_scales", view(batch.dynamic_scales(), batch.scale_bytes()), right.dynamic_scales), weights})
        if (!found.empty()) return found;
    return {};
}

/// The experts of this rank: writes y [N,H] row by row from the source info. Pad rows get NaN, which must not matter.
inline void fill_y(const ExpertBatch& batch, const Problem& p, int rank, void* y) {
    const std::span<const int32_t> info = batch.assist_info_for_combine();
    const std::span<const int64_t> offsets = batch.expert_offsets();
    const size_t row_bytes = static_cast<size_t>(p.options.hidden) * token_bytes(p.options.dtype);
    const int64_t slots = p.table ? p.table->slots() : p.options.experts;
    const auto first = static_cast<int32_t>(experts_of(rank, static_cast<int64_t>(p.ranks.size()), slots).first);
    const auto expert_at = [&](size_t e) {
        const int32_t slot = first + static_cast<int32_t>(e);
        return p.table ? p.table->expert_of[static_cast<size_t>(slot)] : slot;
    };
    for (size_t e = 0; e + 1 < offsets.size(); ++e)
        for (auto i = static_cast<size_t>(offsets[e]); i < static_cast<size_t>(offsets[e + 1]); ++i) {
            std::byte* row = static_cast<std::byte*>(y) + i * row_bytes;
            if (info[3 * i] < 0)
                fill_nan(p.options.dtype, p.options.hidden, row);
            else
                expert_row(p, expert_at(e), info[3 * i], info[3 * i + 1], info[3 * i + 2], row);
        }
}

/// Memory for a result with poison in it and a guard behind it.
class Output {
 public:
    explicit Output(size_t bytes = 0) : bytes_(bytes), all_(bytes + guard) { poison(); }
    void* data() { return all_.data(); }
    void poison() { std::memset(all_.data(), 0xA5, all_.size()); }
    /// "" when the bytes are these and nothing was written behind them.
    std::string difference_from(const std::string& name, std::span<const std::byte> right) const {
        if (std::string d = difference(name, std::span(all_.data(), bytes_), right); !d.empty()) return d;
        for (size_t i = bytes_; i < all_.size(); ++i)
            if (all_[i] != std::byte{0xA5}) return name + " was written beyond its end";
        return {};
    }

 private:
    static constexpr size_t guard = 64;
    size_t bytes_;
    std::vector<std::byte> all_;
};

inline Output output_of(const Problem& p, int rank) {
    return Output(static_cast<size_t>(p.ranks[static_cast<size_t>(rank)].tokens * p.options.hidden) *
                  token_bytes(p.options.dtype));
}

/// One whole round of one rank; "" when everything came out right.
inline std::string difference_of_round(Session& session, const Problem& p) {
    const int rank = session.rank();
    ExpertBatch batch = session.dispatch(dispatch_args(p, rank));
    if (std::string d = difference_of_batch(batch, p, rank); !d.empty()) return "rank " + std::to_string(rank) + ": " + d;
    fill_y(batch, p, rank, batch.y());
    Output out = output_of(p, rank);
    session.combine(batch, combine_args(p, rank, out.data()));
    std::string d = out.difference_from("x", p.combined[static_cast<size_t>(rank)]);
    return d.empty() ? d : "rank " + std::to_string(rank) + ": " + d;
}

/// Plays a whole round on all ranks: the session is sound.
inline void expect_round_works(std::vector<Session>& sessions, const Problem& p) {
    on_ranks(static_cast<int64_t>(sessions.size()),
             [&](int rank) { EXPECT_EQ(difference_of_round(sessions[static_cast<size_t>(rank)], p), ""); });
}

/// One line that tells which options a failure belongs to.
inline std::string text_of(const Options& options) {
    std::string text;
    for (const OptionInfo& info : option_table()) text += std::string(info.name) + "=" + option_text(info, options) + " ";
    return text;
}

}  // namespace switchyard::test
