// Command lines of run, trace and verify, and case.json: whatever they hold, the answer is a case within its limits or a
// Mistake with a text. No process is started. The input: arguments one a line, a zero byte, case.json.
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <vector>

#include "commands.hpp"
#include "input.hpp"

namespace switchyard::fuzz {
namespace {

using namespace tools;

// A folder for case.json, gone with the process.
class Folder {
 public:
    Folder() {
        std::string name = (std::filesystem::temp_directory_path() / "switchyard-fuzz-XXXXXX").string();
        SY_HOLDS(mkdtemp(name.data()) != nullptr, "mkdtemp");
        path = name;
    }
    ~Folder() {
        std::error_code none;
        std::filesystem::remove_all(path, none);
    }
    std::filesystem::path path;
};

// What the command line prints, kept from the screen.
class Quiet {
 public:
    Quiet() : out_(std::cout.rdbuf(text_.rdbuf())), err_(std::cerr.rdbuf(text_.rdbuf())) {}
    ~Quiet() {
        std::cout.rdbuf(out_);
        std::cerr.rdbuf(err_);
    }
    std::string text() const { return text_.str(); }

 private:
    std::ostringstream text_;
    std::streambuf *out_, *err_;
};

void expect_within_limits(const Case& c) {
    SY_HOLDS(c.ranks >= 1 && c.ranks <= ranks_max, "%d ranks", c.ranks);
    SY_HOLDS(c.tokens.size() == static_cast<size_t>(c.ranks), "%zu batches", c.tokens.size());
    SY_HOLDS(check_options(c.options, c.ranks).ok(), "%s", check_options(c.options, c.ranks).text().c_str());
    int64_t most = 0;
    for (const int64_t tokens : c.tokens) {
        SY_HOLDS(tokens >= 0 && tokens <= c.options.tokens_max, "%ld tokens", static_cast<long>(tokens));
        most = std::max(most, tokens);
    }
    // Input for it, where that is small.
    const int64_t largest = 1 << 14;
    if (c.ranks > 8 || most > 64 || c.options.topk > 64 || c.options.experts > largest || most * c.options.hidden > largest)
        return;
    for (int r = 0; r < c.ranks; ++r) {
        const tools::Input made = make_input(c, r);
        SY_HOLDS(static_cast<int64_t>(made.x.size()) == c.tokens[static_cast<size_t>(r)] * c.token_bytes(), "x of rank %d", r);
        for (const int32_t id : made.topk_ids)
            SY_HOLDS(id >= -1 && id < c.options.experts, "id %d of %ld experts", id, static_cast<long>(c.options.experts));
    }
}

// Throws Mistake.
template <class Flags>
void read(const Flags& said, const std::filesystem::path& folder) {
    expect_within_limits(read_case(said.folder.empty() ? std::filesystem::path() : folder, said.flags));
}

void play(std::string text) {
    static const Folder folder;
    const size_t end = std::min(text.find('\0'), text.size());
    std::ofstream(folder.path / "case.json", std::ios::binary) << text.substr(std::min(end + 1, text.size()));
    std::vector<std::string> words = {"switchyard", text[0] == 'v' ? "verify" : text[0] == 't' ? "trace" : "run"};
    std::istringstream lines(text.substr(0, end));
    std::string word;
    std::getline(lines, word);  // the command
    while (std::getline(lines, word)) words.push_back(word);
    std::vector<char*> argv;
    for (std::string& w : words) argv.push_back(w.data());
    argv.push_back(nullptr);
    const auto argc = static_cast<int>(words.size());

    const auto parsed = [&](auto parse, auto* said) {
        const Quiet quiet;
        const int code = parse(argc, argv.data(), said);
        SY_HOLDS(code == -1 || code == 0 || code == 2, "exit code %d", code);
        SY_HOLDS(code == -1 || !quiet.text().empty(), "exit code %d without a word", code);
        return code == -1;
    };
    const auto judge_run = [&](const RunFlags& said) {
        SY_HOLDS(said.rounds >= 1 && said.rounds <= 1'000'000, "%d rounds", said.rounds);
        SY_HOLDS(said.slow_rank >= -1 && said.slow_rank < ranks_max, "slow rank %d", said.slow_rank);
        SY_HOLDS(said.slow_ms >= 0 && said.slow_ms <= 60'000, "%ld ms", static_cast<long>(said.slow_ms));
        read(said, folder.path);
    };
    try {
        if (words[1] == "verify") {
            VerifyFlags said;
            if (!parsed(parse_verify, &said)) return;
            if (said.races)
                judge_run(*said.races);
            else
                read(said, folder.path);
        } else {
            RunFlags said;
            if (parsed(words[1] == "trace" ? parse_trace : parse_run, &said)) judge_run(said);
        }
    } catch (const Mistake& mistake) {
        SY_HOLDS(mistake.what()[0] != 0, "a mistake without a text");
    }
}

}  // namespace
}  // namespace switchyard::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    switchyard::fuzz::play(size == 0 ? std::string("\0", 1) : std::string(reinterpret_cast<const char*>(data), size));
    return 0;
}
