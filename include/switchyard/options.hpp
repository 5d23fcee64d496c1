// Every option of a session, in one table: its names, unit, limits, and whether all ranks must agree on it.
//
// The command line, case files, environment variables, the check that ranks agree, and the help text all walk this table.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

struct Options {
    // ---- shape: equal on all ranks
    int64_t hidden = 0;      ///< H, width of a token, >= 1
    int64_t topk = 0;        ///< K, experts per token, 1..4096
    int64_t experts = 0;     ///< E, routed experts of the whole group, 1..2^20; the first E mod R ranks own one more
    int64_t tokens_max = 0;  ///< the most tokens any rank passes to one dispatch, >= 0
    TokenType dtype = TokenType::f16;

    // ---- number formats: equal on all ranks
    Format dispatch_quant = Format::none;
    Format combine_quant = Format::none;
    MxRule mx_rule = MxRule::floor;
    MxOverflow mx_overflow = MxOverflow::saturate;
    Fp8Scale fp8_scale = Fp8Scale::f32;

    // ---- form of the results: equal on all ranks
    TokenNums expert_token_nums = TokenNums::count;
    int64_t expert_alignment = 1;  ///< rows of each expert start at a multiple of this: 1, 16, 32 or 128
    bool deliver_weights = false;  ///< topk_weights travel with the rows: batch.weights()

    // ---- how it is done: equal on all ranks, never changes a result
    Landing landing = Landing::automatic;
    CombinePath combine_path = CombinePath::automatic;
    int64_t group_ranks = 0;  ///< landing two_level: so many ranks, one after the other, are a group, all if more; 0 = those of
                              ///< one NUMA node, or about the square root of all ranks on a host with one node
    int64_t depth = 2;        ///< dispatches in flight before the oldest must be combined or dropped, 1..64
    int64_t rows_max = 0;     ///< rows a rank can receive in one dispatch, pad rows of
                              ///< expert_alignment included; 0 = the worst case
    int64_t cell_rows = 0;    ///< landing padded: rows a rank can send to one expert in one dispatch; 0 = the worst case,
                              ///< tokens_max * topk. The classic capacity: ceil(factor * tokens_max * topk / experts), the
                              ///< most that apply_capacity (balance.hpp) leaves of any batch; a rank that sends more is a
                              ///< capacity error on all ranks

    bool partial = false;  ///< a rank that has died contributes nothing instead of ending combine; after shrink() its
                           ///< experts count as unused slots. CombineArgs::missing tells how many

    // ---- this rank only
    int64_t workers = 1;  ///< threads that move rows, the caller's included, 1..64
    Simd simd = Simd::automatic;
    HugePages huge_pages = HugePages::automatic;
    bool pin = false;            ///< each helper thread stays on one CPU of this rank's share of those its process may use;
                                 ///< the caller's thread is left alone
    int64_t jitter_us = 0;       ///< for tests: sleeps up to so long, at random, wherever a phase ends
    int64_t timeout_ms = 30000;  ///< deadline of one call, in milliseconds, >= 1
    ProgressBy progress = ProgressBy::caller;

    RowFormat dispatch_format() const { return {dispatch_quant, mx_rule, mx_overflow, fp8_scale}; }
    RowFormat combine_format() const { return {combine_quant, mx_rule, mx_overflow, fp8_scale}; }
};

/// One line of the table. Values are integers; an option with `values` is an enum or a number with a name for each value.
struct OptionInfo {
    const char* name;   ///< field of Options and key of case.json, e.g. "dispatch_quant"
    const char* flags;  ///< on the command line, aliases after a comma, e.g. "--topk,--k"; timeout_ms is --timeout S there
    const char* unit;   ///< "rows", "ms", or "" for a choice
    bool agreed;        ///< must be equal on all ranks
    int64_t low, high;  ///< allowed, both included
    const char* help;
    int64_t (*get)(const Options&);
    void (*set)(Options&, int64_t);
    /// Names of a choice, "f16=0 bf16=1 f32=2"; several names may stand for one value, the first is printed. Empty: a number.
    const char* values;
};

/// The table, in the order in which a difference between ranks is looked for.
SY_API std::span<const OptionInfo> option_table();

/// The line of that name, or null.
SY_API const OptionInfo* find_option(std::string_view name);

/// Value of an option as text: the name of a choice or the number.
SY_API std::string option_text(const OptionInfo& info, const Options& options);

/// Sets an option from text (a name or a number). bad_input names the option, the text and what is allowed.
SY_API Status set_option(Options& options, const OptionInfo& info, std::string_view text);

/// Sets from the environment, for programs that want that (the command line does; Session::open does not by itself):
/// SWITCHYARD_<NAME> for every option, e.g. SWITCHYARD_TIMEOUT_MS=5000.
SY_API Status set_options_from_environment(Options& options);

/// Everything about one rank's options that is wrong without asking another rank; `ranks` is the size of the group.
SY_API Status check_options(const Options& options, int64_t ranks);

/// First and last+1 expert that a rank owns under the default contiguous placement.
struct ExpertRange {
    int64_t first;
    int64_t last;
    int64_t count() const { return last - first; }
};
/// Throws bad_input when there is no such rank, or experts is negative.
SY_API ExpertRange experts_of(int64_t rank, int64_t ranks, int64_t experts);

}  // namespace switchyard
