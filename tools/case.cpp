#include "case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

namespace switchyard::tools {
namespace {

// The CANN sample's own flags, and the numbers it writes where this library has names. Numbers are understood wherever the
// option is given.
struct SampleWords {
    const char* option;
    const char* flags;
    std::vector<std::pair<const char*, const char*>> numbers;
};
const std::vector<SampleWords>& sample_words() {
    static const std::vector<SampleWords> words = {
        {"dispatch_quant", "--quant-mode", {{"0", "none"}, {"2", "int8_token"}, {"4", "mxfp8_e5m2"}}},
        {"combine_quant", "--comm-quant-mode", {{"0", "none"}, {"2", "int8_block8"}}},
        {"dtype", "--token-dtype-choice", {{"0", "bf16"}, {"1", "f16"}}},
        {"expert_token_nums", "--expert-recv-info-type", {{"0", "cumsum"}, {"1", "count"}}},
    };
    return words;
}
const SampleWords* sample_words_of(std::string_view option) {
    for (const SampleWords& words : sample_words())
        if (option == words.option) return &words;
    return nullptr;
}

// Every flag of an option, "--quant-mode,--dispatch-quant".
std::string flags_of(const OptionInfo& info) {
    const SampleWords* sample = sample_words_of(info.name);
    return sample ? fmt::format("{},{}", info.flags, sample->flags) : info.flags;
}

// The option that a case's key names: by its name or by any of its flags, "expert_alignment" or "expert-alignment".
const OptionInfo* option_of_key(const std::string& key) {
    std::string flag = key;
    std::replace(flag.begin(), flag.end(), '_', '-');
    flag = "--" + flag.substr(std::min(flag.find_first_not_of('-'), flag.size()));
    for (const OptionInfo& info : option_table())
        if (key == info.name || (',' + flags_of(info) + ',').find(',' + flag + ',') != std::string::npos) return &info;
    return nullptr;
}

const std::vector<std::string> routings = {"balanced", "uniform", "zipf", "lognormal", "onehot", "drop"};

int64_t to_number(const std::string& flag, const std::string& text, int64_t low, int64_t high) {
    char* end = nullptr;
    errno = 0;
    const long long value = std::strtoll(text.c_str(), &end, 10);
    if (end == text.c_str() || end != text.c_str() + text.size() || errno != 0 || value < low || value > high)
        throw Mistake(fmt::format("{} is \"{}\"; give a whole number from {} to {}", flag, text, low, high));
    return value;
}

std::vector<int64_t> to_batches(const std::string& text, int ranks) {
    std::vector<int64_t> batches;
    for (size_t at = 0; at <= text.size();) {
        const size_t comma = std::min(text.find(',', at), text.size());
        batches.push_back(to_number("--bs", text.substr(at, comma - at), 0, int64_t{1} << 31));
        at = comma + 1;
    }
    if (batches.size() == 1) batches.assign(static_cast<size_t>(ranks), batches[0]);
    if (batches.size() != static_cast<size_t>(ranks))
        throw Mistake(fmt::format("--bs {} gives {} ranks a batch, but there are {} ranks; give one number, or one per rank",
                                  text, batches.size(), ranks));
    return batches;
}

void apply(Options& options, const std::string& name, const std::string& text) {
    std::string word = text;
    if (const SampleWords* sample = sample_words_of(name))
        for (const auto& [number, named] : sample->numbers)
            if (text == number) word = named;
    if (const Status s = set_option(options, *find_option(name), word); !s.ok()) throw Mistake(s.text());
}

int64_t to_milliseconds(const std::string& text) {
    char* end = nullptr;
    const double seconds = std::strtod(text.c_str(), &end);
    if (end == text.c_str() || end != text.c_str() + text.size() || !(seconds >= 0.001) || seconds > 1e9)
        throw Mistake(fmt::format("--timeout is \"{}\"; give seconds, 0.001 to 1e9", text));
    return std::llround(seconds * 1000);
}

// A number or a word. Nothing that holds others: its text would be made by recursion, as deep as the file likes.
std::string text_of(const std::string& key, const nlohmann::json& value) {
    if (value.is_structured()) throw Mistake(fmt::format("{} is a list or an object; give a number or a word", key));
    return value.is_string() ? value.get<std::string>() : value.dump();
}

// What case.json says. A key that is neither an option nor one of the known remarks is a mistake: it may be a misspelt option.
void read_description(const nlohmann::json& json, Case& c) {
    if (!json.is_object()) throw Mistake("not an object");
    c.ranks = static_cast<int>(to_number("ranks", text_of("ranks", json.at("ranks")), 1, ranks_max));
    for (const auto& [key, value] : json.items()) {
        if (key == "tokens_per_rank") {
            for (const auto& tokens : value) c.tokens.push_back(to_number(key, text_of(key, tokens), 0, int64_t{1} << 31));
        } else if (key == "seed") {
            c.seed = static_cast<uint64_t>(to_number(key, text_of(key, value), 0, INT64_MAX));
        } else if (key == "timeout") {
            c.options.timeout_ms = to_milliseconds(text_of(key, value));
        } else if (const OptionInfo* info = option_of_key(key)) {
            apply(c.options, info->name, text_of(key, value));
        } else if (key != "ranks" && key != "routing" && key != "values") {
            throw Mistake(fmt::format("there is no option \"{}\"; see switchyard run --help", key));
        }
    }
    if (c.tokens.size() != static_cast<size_t>(c.ranks))
        throw Mistake(fmt::format("tokens_per_rank names {} ranks, ranks is {}", c.tokens.size(), c.ranks));
}

// "NUMBER of rows", or the choices: "f16|bf16|f32".
std::string type_text(const OptionInfo& info) {
    if (info.values[0] == 0) return info.unit;
    std::string text;
    bool in_name = true;
    for (const char* c = info.values; *c; ++c) {
        if (*c == '=') in_name = false;
        if (*c == ' ') in_name = true, text += '|';
        if (in_name && *c != ' ') text += *c;
    }
    return text;
}

}  // namespace

void CaseFlags::add_to(CLI::App& app) {
    for (const OptionInfo& info : option_table()) {
        if (std::string_view(info.name) == "timeout_ms") continue;  // --timeout, in seconds
        app.add_option_function<std::string>(
               flags_of(info), [this, &info](const std::string& t) { options[info.name] = t; }, info.help)
            ->type_name(type_text(info));
    }
    app.add_option("--ranks,--chip-num-per-server", ranks, "processes, one per rank")->type_name("RANKS");
    app.add_option("--bs", batch, "tokens of each rank: one number, or one per rank (5,0,1,7)")->type_name("TOKENS");
    app.add_option("--seed,--random-seed", seed, "of made-up input")->type_name("NUMBER");
    app.add_option("--routing", routing, "of made-up input: balanced, uniform, zipf, lognormal, onehot, drop")
        ->type_name("CHOICE");
    app.add_option("--timeout", timeout, "deadline of one call")->type_name("SECONDS");
}

int64_t Case::token_bytes() const {
    return options.hidden * (options.dtype == TokenType::f32 ? 4 : 2);
}

Case read_case(const std::filesystem::path& folder, const CaseFlags& flags) {
    Case c;
    c.folder = folder;
    // The sample's defaults: what its generator does when it is given no option.
    Options& o = c.options;
    o.hidden = 7168;
    o.topk = 8;
    o.dispatch_quant = Format::mxfp8_e5m2;
    o.combine_quant = Format::int8_block8;
    constexpr int64_t batch = 8;

    const std::filesystem::path description = folder / "case.json";
    if (!folder.empty() && !std::filesystem::is_directory(folder))
        throw Mistake(
            fmt::format("{} is not a folder; make a case there with: switchyard gen {}", folder.string(), folder.string()));
    const bool described = !folder.empty() && std::filesystem::exists(description);
    if (described) o.dispatch_quant = o.combine_quant = Format::none;  // it says what differs from the library's defaults
    // A case of the sample's own generator overflows to infinity, as the sample does.
    const bool as_the_sample =
        !folder.empty() && !described && !flags.options.contains("mx_overflow") && !std::getenv("SWITCHYARD_MX_OVERFLOW");
    if (const Status s = set_options_from_environment(o); !s.ok()) throw Mistake(s.text());
    if (described) {
        try {
            read_description(nlohmann::json::parse(std::ifstream(description)), c);
        } catch (const nlohmann::json::exception& e) {
            throw Mistake(fmt::format("{}: {}", description.string(), e.what()));
        } catch (const Mistake& e) {
            throw Mistake(fmt::format("{}: {}", description.string(), e.what()));
        }
    } else {
        if (!flags.ranks.empty()) c.ranks = static_cast<int>(to_number("--ranks", flags.ranks, 1, ranks_max));
    }
    if (o.experts == 0) o.experts = 4 * int64_t{c.ranks};
    if (!flags.ranks.empty() && to_number("--ranks", flags.ranks, 1, ranks_max) != c.ranks)
        throw Mistake(fmt::format("--ranks {} but the case has {}; leave --ranks out", flags.ranks, c.ranks));
    if (!flags.batch.empty()) c.tokens = to_batches(flags.batch, c.ranks);
    if (c.tokens.empty()) c.tokens.assign(static_cast<size_t>(c.ranks), batch);
    for (const auto& [name, text] : flags.options) apply(o, name, text);
    if (as_the_sample && o.dispatch_quant == Format::mxfp8_e5m2) o.mx_overflow = MxOverflow::inf;
    if (!flags.timeout.empty()) o.timeout_ms = to_milliseconds(flags.timeout);
    if (!flags.seed.empty()) c.seed = static_cast<uint64_t>(to_number("--seed", flags.seed, 0, INT64_MAX));
    if (!flags.routing.empty()) {
        if (std::find(routings.begin(), routings.end(), flags.routing) == routings.end())
            throw Mistake(fmt::format("--routing is \"{}\"; allowed: {}", flags.routing, fmt::join(routings, ", ")));
        c.routing = flags.routing;
    }
    const int64_t most = *std::max_element(c.tokens.begin(), c.tokens.end());
    if (o.tokens_max == 0) o.tokens_max = most;
    if (o.tokens_max < most) throw Mistake(fmt::format("--tokens-max {} is below the batch of {} tokens", o.tokens_max, most));
    if (const Status s = check_options(o, c.ranks); !s.ok()) throw Mistake(s.text());
    return c;
}

// ------------------------------------------------------------------------------------------------------------------ files

std::filesystem::path file_of(const std::filesystem::path& folder, int rank, std::string_view name) {
    return folder / fmt::format("chip_{}", rank) / fmt::format("{}_{}.bin", name, rank);
}

std::vector<std::byte> read_file(const std::filesystem::path& path) {
    std::error_code error;
    const auto bytes = std::filesystem::file_size(path, error);  // an error for a folder, too
    if (error) throw Mistake(fmt::format("{} cannot be read: {}", path.string(), error.message()));
    std::vector<std::byte> data(bytes);
    std::ifstream in(path, std::ios::binary);
    in.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(data.size()));
    if (!in) throw Mistake(fmt::format("{} cannot be read to its end", path.string()));
    return data;
}

void make_folder(const std::filesystem::path& path) {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    if (error) throw Mistake(fmt::format("the folder {} cannot be made: {}", path.string(), error.message()));
}

void write_file(const std::filesystem::path& path, const void* data, size_t bytes) {
    std::ofstream out(path, std::ios::binary);
    out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    out.close();
    if (!out) throw Mistake(fmt::format("{} cannot be written", path.string()));
}

reference::RankInput Input::view(int64_t tokens) const {
    return {x.data(), tokens, topk_ids.data(), topk_weights.data()};
}

void check_input_files(const Case& c) {
    for (int r = 0; r < c.ranks; ++r) {
        const int64_t tokens = c.tokens[static_cast<size_t>(r)];
        const auto check = [&](const char* name, int64_t row_bytes, bool exact) {
            const std::filesystem::path path = file_of(c.folder / "input", r, name);
            std::error_code error;
            const auto bytes = std::filesystem::file_size(path, error);
            if (error) throw Mistake(fmt::format("{} cannot be read: {}", path.string(), error.message()));
            if (exact && static_cast<int64_t>(bytes) != tokens * row_bytes)
                throw Mistake(fmt::format("{} has {} bytes; {} tokens of {} bytes are {}: check --bs, --h, --k, --dtype",
                                          path.string(), bytes, tokens, row_bytes, tokens * row_bytes));
        };
        check("x", c.token_bytes(), true);
        check("expert_ids", c.options.topk * 4, true);
        check("expert_scales", c.options.topk * 4, true);
        check("expand_x", c.token_bytes(), false);
    }
}

Input read_input(const Case& c, int rank) {
    const auto read = [&](const char* name) { return read_file(file_of(c.folder / "input", rank, name)); };
    Input in;
    in.x = read("x");
    in.y = read("expand_x");
    const auto ids = read("expert_ids"), weights = read("expert_scales");
    in.topk_ids.resize(ids.size() / 4);
    in.topk_weights.resize(weights.size() / 4);
    if (!ids.empty()) std::memcpy(in.topk_ids.data(), ids.data(), ids.size());
    if (!weights.empty()) std::memcpy(in.topk_weights.data(), weights.data(), weights.size());
    return in;
}

// ---------------------------------------------------------------------------------------------------------- made-up input

namespace {

// SplitMix64: small, seedable, the same everywhere.
class Random {
 public:
    Random(uint64_t seed, uint64_t stream) : state_(seed * 0x9E3779B97F4A7C15 + stream * 0xD1342543DE82EF95 + 1) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        return z ^ (z >> 31);
    }
    double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
    uint64_t below(uint64_t n) { return static_cast<uint64_t>(uniform() * static_cast<double>(n)); }
    /// About normal: the sum of four uniforms, scaled to variance 1. Enough for values that only have to look like tokens.
    float gauss() {
        const uint64_t bits = next();
        const auto part = [&](int i) { return static_cast<float>((bits >> (16 * i)) & 0xFFFF) * 0x1p-16F; };
        return (part(0) + part(1) + part(2) + part(3) - 2.0F) * 1.7320508F;
    }

 private:
    uint64_t state_;
};

// A finite token bit pattern near `value`, truncated: made-up input needs no exact rounding.
void store_token(TokenType type, float value, std::byte* to) {
    const auto bits = std::bit_cast<uint32_t>(value);
    if (type == TokenType::f32) {
        std::memcpy(to, &bits, 4);
        return;
    }
    uint32_t half = bits >> 16;
    if (type == TokenType::f16) {
        const int exponent = static_cast<int>(bits >> 23 & 0xFF) - 127 + 15;
        const uint32_t magnitude = exponent <= 0 ? 0 : static_cast<uint32_t>(exponent) << 10 | (bits >> 13 & 0x3FF);
        half = (bits >> 16 & 0x8000) | std::min<uint32_t>(magnitude, 0x7BFF);
    }
    const auto token = static_cast<uint16_t>(half);
    std::memcpy(to, &token, 2);
}

void fill_tokens(Random& random, TokenType type, std::vector<std::byte>& to) {
    const size_t bytes = type == TokenType::f32 ? 4 : 2;
    for (size_t at = 0; at < to.size(); at += bytes) store_token(type, random.gauss(), to.data() + at);
}

// Popularity of each expert under a routing preset; see tools/reference.py for what each preset means.
std::vector<double> popularity(const Case& c) {
    const auto experts = static_cast<size_t>(c.options.experts);
    std::vector<double> weight(experts, 1.0);
    Random random(c.seed, 1);
    if (c.routing == "zipf") {
        for (size_t i = 0; i < experts; ++i) weight[i] = std::pow(static_cast<double>(i + 1), -1.2);
        for (size_t i = experts; i > 1; --i) std::swap(weight[i - 1], weight[random.below(i)]);
    }
    if (c.routing == "lognormal")
        for (double& w : weight) w = std::exp(static_cast<double>(random.gauss()));
    return weight;
}

void fill_ids(const Case& c, int rank, std::vector<int32_t>& ids) {
    const int64_t topk = c.options.topk, experts = c.options.experts;
    if (c.routing == "balanced") {
        int64_t slot = 0;
        for (int r = 0; r < rank; ++r) slot += c.tokens[static_cast<size_t>(r)] * topk;
        for (int32_t& id : ids) id = static_cast<int32_t>((slot + slot / experts) % experts), ++slot;
        return;
    }
    const std::vector<double> weight = popularity(c);
    const auto hot = static_cast<int32_t>(Random(c.seed, 2).below(static_cast<uint64_t>(experts)));
    Random random(c.seed, 1000 + static_cast<uint64_t>(rank));
    std::vector<double> left(weight.size());
    for (size_t start = 0; start < ids.size(); start += static_cast<size_t>(topk)) {
        double total = 0;
        int64_t unused = 0;  // experts this token has not drawn in this turn; a new turn when all are drawn
        for (int64_t k = 0; k < topk; ++k) {
            if (unused == 0) {
                left = weight;
                total = std::accumulate(left.begin(), left.end(), 0.0);
                unused = experts;
            }
            int32_t id = 0;
            if (k == 0 && c.routing == "onehot") {
                id = hot;
            } else {
                double at = random.uniform() * total;
                while (id + 1 < experts && (left[static_cast<size_t>(id)] == 0 || at >= left[static_cast<size_t>(id)]))
                    at -= left[static_cast<size_t>(id++)];
                while (left[static_cast<size_t>(id)] == 0) --id;  // rounding left nothing of the last one
            }
            total -= std::exchange(left[static_cast<size_t>(id)], 0.0);
            --unused;
            ids[start + static_cast<size_t>(k)] = c.routing == "drop" && random.below(4) == 0 ? -1 : id;
        }
    }
}

}  // namespace

Input make_input(const Case& c, int rank) {
    const auto tokens = static_cast<size_t>(c.tokens[static_cast<size_t>(rank)]);
    Input in;
    in.x.resize(tokens * static_cast<size_t>(c.token_bytes()));
    in.topk_ids.resize(tokens * static_cast<size_t>(c.options.topk));
    in.topk_weights.resize(in.topk_ids.size());
    Random random(c.seed, 2000 + static_cast<uint64_t>(rank));
    fill_tokens(random, c.options.dtype, in.x);
    for (float& w : in.topk_weights) w = static_cast<float>(random.uniform() / static_cast<double>(c.options.topk));
    fill_ids(c, rank, in.topk_ids);
    return in;
}

MadeUpExperts::MadeUpExperts(const Case& c)
    : row_bytes_(c.token_bytes()), rows_(rows_made * static_cast<size_t>(c.token_bytes())) {
    Random random(c.seed, 3);
    fill_tokens(random, c.options.dtype, rows_);
}

const void* MadeUpExperts::row(int source, int64_t token, int64_t k, int32_t expert) const {
    const auto n = static_cast<uint64_t>(((token * 31 + k) * 131 + expert) * 17 + source);
    return rows_.data() + n % rows_made * static_cast<uint64_t>(row_bytes_);
}

}  // namespace switchyard::tools
