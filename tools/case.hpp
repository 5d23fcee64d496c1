// A case: options, ranks and inputs, from a folder in the sample's layout or made up from a seed.
//
//   CASE/case.json
//   CASE/input/chip_<r>/{x,expert_ids,expert_scales,expand_x}_<r>.bin
//   CASE/golden/chip_<r>/{expand_x,dynamic_scales,assist_info_for_combine,expert_token_nums,ep_recv_count,x}_<r>.bin
//   CASE/output/chip_<r>/...   as golden, written by a run
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/options.hpp"
#include "switchyard/reference.hpp"

namespace switchyard::tools {

/// A mistake of the user: one line that says what and how to mend it. The program ends with exit code 2.
struct Mistake : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// To stderr, which may not be there: what cannot be told there is told by the exit code.
template <class... A>
void to_stderr(fmt::format_string<A...> text, A&&... arguments) {
    std::fputs(fmt::vformat(text, fmt::make_format_args(arguments...)).c_str(), stderr);
}

/// What the command line said about a case, before it is known which case.
struct CaseFlags {
    std::map<std::string, std::string> options;  ///< option name -> text, as given
    std::string ranks, batch, seed, routing, timeout;
    void add_to(CLI::App& app);
};

struct Case {
    Options options;
    int ranks = 2;
    std::vector<int64_t> tokens;  ///< [R]
    uint64_t seed = 0;
    std::string routing = "balanced";
    std::filesystem::path folder;  ///< empty: made up

    int64_t token_bytes() const;
};

/// The case in `folder`, or with an empty `folder` one made up from the flags. Throws Mistake.
Case read_case(const std::filesystem::path& folder, const CaseFlags& flags);

/// One rank's input; `y` is the experts' output for the rows it receives, in their order (only from a folder).
struct Input {
    std::vector<std::byte> x, y;
    std::vector<int32_t> topk_ids;
    std::vector<float> topk_weights;
    reference::RankInput view(int64_t tokens) const;
};

/// Checks that the input files of all ranks are there and have the sizes of the case. Throws Mistake naming the file.
void check_input_files(const Case& c);

/// Reads input/chip_<rank>, whose files were checked.
Input read_input(const Case& c, int rank);

/// Makes the input of a rank from the case's seed: the same on every rank that asks.
Input make_input(const Case& c, int rank);

/// The output of a made-up expert for a row of slot (token, k) of `source`: [H], the same on every rank that asks.
class MadeUpExperts {
 public:
    explicit MadeUpExperts(const Case& c);
    const void* row(int source, int64_t token, int64_t k, int32_t expert) const;

 private:
    static constexpr size_t rows_made = 61;
    int64_t row_bytes_;
    std::vector<std::byte> rows_;
};

/// CASE/<part>/chip_<rank>/<name>_<rank>.bin
std::filesystem::path file_of(const std::filesystem::path& folder, int rank, std::string_view name);

std::vector<std::byte> read_file(const std::filesystem::path& path);
void make_folder(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const void* data, size_t bytes);

}  // namespace switchyard::tools
