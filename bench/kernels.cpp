// switchyard bench --kernels: every number kernel of every instruction set beside memcpy, from cache and from memory.
//
// A kernel and memcpy take turns in one loop, a few rows each, so that whatever slows the machine down slows both; their median
// times are compared. memcpy moves the bytes that the kernel reads (payload and scales, or all rows of a sum), in the same
// buffers. From cache it is one row again and again; from memory each turn takes the next rows of buffers that no cache holds,
// memcpy half a buffer behind the kernel. The loop is Google Benchmark's, and so are all flags.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "layout/row.hpp"
#include "quant/numbers.hpp"
#include "quant/quant.hpp"
#include "switchyard/options.hpp"

namespace switchyard::bench {
namespace {

constexpr int64_t hidden = 7168, topk = 8;
constexpr int64_t memory_bytes = 192 << 20;  // of the larger side of a kernel; the caches of one chip share a third of it

enum class Work { encode, decode, combine_plain, combine_encoded, copy, stream };

/// One benchmark: a kernel on one kind of row.
struct Subject {
    Work work;
    RowFormat format;
    TokenType token;
    const quant::Kernels* kernels;
    bool cached;

    layout::RowLayout row() const { return layout::row_layout(format.format, token, hidden); }
    int64_t token_row() const { return hidden * layout::token_bytes(token); }
    int64_t wire_row() const { return row().payload_bytes + row().scale_bytes(); }  // the scales lie behind their payload
    bool reads_wire() const { return work == Work::decode || work == Work::combine_encoded; }
    int64_t source_row() const { return reads_wire() ? wire_row() : token_row(); }
    int64_t rows_read() const { return work == Work::combine_plain || work == Work::combine_encoded ? topk : 1; }
    int64_t bytes_read() const { return rows_read() * source_row(); }
    /// The larger of what the kernel and what memcpy writes.
    int64_t bytes_written() const {
        const int64_t own = work == Work::decode ? 4 * hidden : work == Work::encode ? wire_row() : token_row();
        return std::max(own, bytes_read());
    }
    /// Places of the ring: one in cache.
    int64_t places() const { return cached ? 1 : memory_bytes / std::max(bytes_read(), bytes_written()); }
    /// Calls between two looks at the clock: a few microseconds.
    int64_t calls() const { return rows_read() == 1 ? 16 : 2; }

    std::string kind() const {
        switch (work) {
            case Work::encode: return "encode";
            case Work::decode: return "decode";
            case Work::combine_plain: return "combine";
            case Work::combine_encoded: return "combine encoded";
            case Work::copy: return "copy";
            case Work::stream: return "stream";
        }
        return "";
    }
    std::string rows() const {
        Options o;
        o.dtype = token;
        const std::string type = option_text(*find_option("dtype"), o);
        if (work == Work::copy || work == Work::stream) return type;
        const bool of_combine = format.format == Format::int8_block8 || format.format == Format::int8_block128;
        (of_combine ? o.combine_quant : o.dispatch_quant) = format.format;
        return fmt::format("{} {}", option_text(*find_option(of_combine ? "combine_quant" : "dispatch_quant"), o), type);
    }
    std::string name() const {
        std::string text = fmt::format("{}/{}/{}/{}", kind(), rows(), kernels->name, cached ? "cache" : "memory");
        std::replace(text.begin(), text.end(), ' ', '_');
        return text;
    }
};

/// Page-aligned memory, touched when it is made.
class Buffer {
 public:
    explicit Buffer(int64_t bytes) : data_(static_cast<uint8_t*>(std::aligned_alloc(4096, static_cast<size_t>(bytes)))) {
        if (data_ == nullptr) throw std::bad_alloc();
        std::memset(data_.get(), 0, static_cast<size_t>(bytes));
    }
    uint8_t* data() const { return data_.get(); }

 private:
    struct Free {
        void operator()(uint8_t* data) const { std::free(data); }
    };
    std::unique_ptr<uint8_t, Free> data_;
};

/// The buffers, made for the first benchmark and used by all.
struct Buffers {
    Buffer from{memory_bytes}, to{memory_bytes};
    std::string content;  // what `from` is full of
};
Buffers& buffers() {
    static Buffers all;
    return all;
}

/// Normally distributed tokens. Their few subnormals, zeros and large values are what a model has too.
std::vector<uint8_t> some_tokens(TokenType token, int64_t count) {
    std::mt19937_64 random(7);
    std::normal_distribution<float> normal;
    std::vector<uint8_t> tokens(static_cast<size_t>(count * layout::token_bytes(token)));
    for (int64_t i = 0; i < count; ++i) {
        const float value = normal(random);
        switch (token) {
            case TokenType::f16: quant::store(tokens.data(), i, quant::F16::narrow(value)); break;
            case TokenType::bf16: quant::store(tokens.data(), i, quant::Bf16::narrow(value)); break;
            case TokenType::f32: quant::store(tokens.data(), i, value); break;
        }
    }
    return tokens;
}

/// Fills the source with rows of the kind that the subject reads: a few different ones, over and over.
void fill(const Subject& s) {
    const std::string content = s.reads_wire() ? "wire " + s.rows() : fmt::format("tokens {}", static_cast<int>(s.token));
    Buffers& all = buffers();
    if (all.content == content) return;
    constexpr int64_t different = 61;
    const std::vector<uint8_t> tokens = some_tokens(s.token, different * hidden);
    std::vector<uint8_t> rows(static_cast<size_t>(different * s.source_row()));
    for (int64_t i = 0; i < different; ++i) {
        const uint8_t* x = tokens.data() + i * s.token_row();
        uint8_t* row = rows.data() + i * s.source_row();
        if (s.reads_wire())
            quant::scalar_kernels().encode(s.format, s.token, x, hidden, row, row + s.row().payload_bytes);
        else
            std::memcpy(row, x, static_cast<size_t>(s.token_row()));
    }
    for (int64_t done = 0; done < memory_bytes; done += std::ssize(rows))
        std::memcpy(all.from.data() + done, rows.data(), static_cast<size_t>(std::min(std::ssize(rows), memory_bytes - done)));
    all.content = content;
}

/// One call of the kernel at a place of the ring.
void call(const Subject& s, int64_t place) {
    const quant::Kernels& k = *s.kernels;
    const uint8_t* from = buffers().from.data() + place * s.bytes_read();
    uint8_t* to = buffers().to.data() + place * s.bytes_written();
    const int64_t payload = s.row().payload_bytes;
    switch (s.work) {
        case Work::encode: k.encode(s.format, s.token, from, hidden, to, to + payload); break;
        case Work::decode:
            k.decode(s.format, s.token, from, from + payload, hidden, static_cast<float*>(static_cast<void*>(to)));
            break;
        case Work::combine_plain:
        case Work::combine_encoded: {
            static constexpr float weights[topk] = {0.31F, 0.23F, 0.14F, 0.11F, 0.08F, 0.06F, 0.04F, 0.03F};
            const void* rows[topk];
            const void* scales[topk];
            for (int64_t i = 0; i < topk; ++i) {
                rows[i] = from + i * s.source_row();
                scales[i] = from + i * s.source_row() + payload;
            }
            k.combine({s.token, s.format, s.reads_wire(), rows, scales, weights, topk, nullptr}, hidden, to);
            break;
        }
        case Work::copy: k.copy(to, from, static_cast<size_t>(s.bytes_read())); break;
        case Work::stream: k.stream(to, from, static_cast<size_t>(s.bytes_read())); break;
    }
}

double median(std::vector<double>& of) {
    const auto middle = of.begin() + std::ssize(of) / 2;
    std::nth_element(of.begin(), middle, of.end());
    return *middle;
}

void measure(benchmark::State& state, const Subject& s) {
    using Clock = std::chrono::steady_clock;
    fill(s);
    const int64_t places = s.places(), calls = s.calls();
    int64_t at = 0, behind = places / 2;
    const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
    std::vector<double> kernel_times, memcpy_times;
    for (auto _ : state) {
        const auto start = Clock::now();
        for (int64_t i = 0; i < calls; ++i) {
            call(s, at);
            at = at + 1 == places ? 0 : at + 1;
        }
        s.kernels->fence();  // what was streamed has to leave the processor too
        const auto between = Clock::now();
        for (int64_t i = 0; i < calls; ++i) {
            std::memcpy(buffers().to.data() + behind * s.bytes_written(), buffers().from.data() + behind * s.bytes_read(),
                        static_cast<size_t>(s.bytes_read()));
            benchmark::ClobberMemory();
            behind = behind + 1 == places ? 0 : behind + 1;
        }
        const auto end = Clock::now();
        kernel_times.push_back(seconds(between - start));
        memcpy_times.push_back(seconds(end - between));
        state.SetIterationTime(kernel_times.back());
    }
    const double kernel_time = median(kernel_times), memcpy_time = median(memcpy_times);
    const auto bytes = static_cast<double>(calls * s.bytes_read());
    state.counters["read_per_second"] = benchmark::Counter(bytes / kernel_time, {}, benchmark::Counter::kIs1024);
    state.counters["of_memcpy"] = memcpy_time / kernel_time;
}

std::vector<Subject> every_subject() {
    std::vector<Subject> all;
    // Rows outside, sets inside: what `from` is full of changes as rarely as possible.
    const auto add = [&](Work work, Format format, TokenType token) {
        for (bool cached : {true, false})
            for (const quant::Kernels* kernels : quant::available_kernels()) {
                const bool is_own = work != Work::copy || kernels == &quant::scalar_kernels();  // every set has the same copy
                if (is_own) all.push_back({work, {.format = format}, token, kernels, cached});
            }
    };
    constexpr Format formats[] = {Format::none,         Format::int8_token,        Format::mxfp8_e5m2,
                                  Format::mxfp8_e4m3,   Format::fp8_e4m3_block128, Format::int8_block8,
                                  Format::int8_block128};
    for (TokenType token : {TokenType::f16, TokenType::bf16, TokenType::f32}) {
        const bool quantised = token != TokenType::f32;  // f32 tokens travel as they are
        for (Format format : formats)
            if (quantised || format == Format::none) add(Work::encode, format, token);
        for (Format format : {Format::none, Format::int8_block8, Format::int8_block128})
            if (quantised || format == Format::none) add(Work::combine_plain, format, token);
        if (token == TokenType::f16) {
            add(Work::copy, Format::none, token);
            add(Work::stream, Format::none, token);
        }
        for (Format format : formats) {
            if (quantised || format == Format::none) add(Work::decode, format, token);
            if (quantised && (format == Format::int8_block8 || format == Format::int8_block128))
                add(Work::combine_encoded, format, token);
        }
    }
    return all;
}

/// Collects the shares and prints them at the end, a line per kernel and kind of row, a column per instruction set.
class Table final : public benchmark::BenchmarkReporter {
 public:
    explicit Table(const std::vector<Subject>& subjects) : subjects_(subjects) {}

    bool ReportContext(const Context&) override { return true; }
    void ReportRuns(const std::vector<Run>& runs) override {
        for (const Run& run : runs)
            if (run.run_type == Run::RT_Iteration)
                shares_[run.run_name.function_name].push_back(run.counters.at("of_memcpy").value);
    }
    void Finalize() override {
        if (shares_.empty()) return;
        fmt::print("Share of memcpy on the bytes that a kernel reads: from cache / from memory. H {}, K {}.\n", hidden, topk);
        fmt::print("encode writes a row, decode reads one back as f32, combine sums K rows (encoded: of wire rows).\n\n{:40}",
                   "");
        for (const quant::Kernels* kernels : quant::available_kernels()) fmt::print(" {:>11}", kernels->name);
        fmt::print("\n");
        std::vector<Work> order = {Work::encode,          Work::decode, Work::combine_plain,
                                   Work::combine_encoded, Work::copy,   Work::stream};
        for (Work work : order) print_lines(work);
    }

 private:
    void print_lines(Work work) {
        std::vector<std::string> printed;
        for (const Subject& s : subjects_) {
            const std::string line = fmt::format("{:16} {}", s.kind(), s.rows());
            if (s.work != work || std::find(printed.begin(), printed.end(), line) != printed.end()) continue;
            printed.push_back(line);
            std::string cells;
            bool any = false;
            for (const quant::Kernels* kernels : quant::available_kernels()) {
                const std::string cell = share(s, kernels, true) + " / " + share(s, kernels, false);
                any = any || cell != "- / -";
                cells += fmt::format(" {:>11}", cell == "- / -" ? "-" : cell);
            }
            if (any) fmt::print("{:40}{}\n", line, cells);
        }
    }
    std::string share(Subject s, const quant::Kernels* kernels, bool cached) {
        s.kernels = kernels;
        s.cached = cached;
        const auto found = shares_.find(s.name());
        return found == shares_.end() ? "-" : fmt::format("{:.2f}", median(found->second));
    }

    const std::vector<Subject>& subjects_;
    std::map<std::string, std::vector<double>> shares_;
};

void print_help() {
    fmt::print(
        "switchyard bench --kernels [--benchmark_...]\n\n"
        "Times every number kernel beside memcpy, from cache and from memory, in under a minute, and prints the shares.\n\n"
        "  --benchmark_filter=REGEX       only these, as in 'encode/mxfp8.*/cache'\n"
        "  --benchmark_list_tests         their names\n"
        "  --benchmark_min_time=SECONDS   of each; default 0.02\n"
        "  --benchmark_repetitions=N      the table then has medians; with --benchmark_enable_random_interleaving shuffled\n"
        "  --benchmark_format=json        or console, csv: every run with times and counters instead of the table\n\n"
        "All flags of Google Benchmark 1.7 work.\n");
}

int kernels_main(int argc, char** argv) {
    std::vector<std::string> words(argv, argv + argc);
    if (std::find(words.begin(), words.end(), "--help") != words.end()) return print_help(), 0;
    bool own_table = true;
    for (const std::string& word : words) own_table = own_table && !word.starts_with("--benchmark_format");
    words.insert(words.begin() + 1, "--benchmark_min_time=0.02");  // a later one counts
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    auto count = static_cast<int>(words.size());
    benchmark::Initialize(&count, pointers.data());
    if (benchmark::ReportUnrecognizedArguments(count, pointers.data())) return 2;

    const std::vector<Subject> subjects = every_subject();
    for (const Subject& s : subjects)
        benchmark::RegisterBenchmark(s.name().c_str(), [&s](benchmark::State& state) { measure(state, s); })
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
    Table table(subjects);
    benchmark::RunSpecifiedBenchmarks(own_table ? &table : nullptr);
    return 0;
}

}  // namespace
}  // namespace switchyard::bench

int main(int argc, char** argv) {
    return switchyard::bench::kernels_main(argc, argv);
}
