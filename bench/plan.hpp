// What a benchmark plays: cells, in process trees. A cell is a list of contestants that take turns, round by round.
#pragma once

#include <string>
#include <vector>

#include "case.hpp"

namespace switchyard::bench {

/// One contestant with its task. Entries of one cell may differ in shape: that, too, is compared within one run.
struct Entry {
    std::string label;  ///< unique in its cell
    std::string contestant;
    tools::Case shape;
};

struct Cell {
    std::string name;  ///< unique in its plan
    std::string scenario;
    std::vector<Entry> entries;
    double seconds = 0;     ///< about how long its timed rounds may take
    std::string curve, at;  ///< of a scaling curve: its axis, and where on it
};

/// Cells with the same number of ranks share their processes.
struct Tree {
    int ranks = 0;
    std::vector<Cell> cells;
    bool by_mpirun() const;
};

struct Plan {
    std::vector<Tree> trees;
};

/// What the command line asks for.
struct Flags {
    std::vector<std::string> scenarios;
    std::vector<std::string> ranks, quants, contestants;
    tools::Case base;  ///< hidden, topk, dtype, seed, routing, workers, simd
    int64_t experts_per_rank = 4;
    bool bars = false, seed_table = false, curves = false, strategies = false, json = false;
    bool hidden_is_default = true;
    int rounds = 0;  ///< exactly so many; 0: as many as fit into `seconds`
    double seconds = 0;
    std::string sabotage;
    std::string report, from;  ///< files: the page, and lines of an earlier run
};

struct Scenario {
    const char* name;
    const char* text;
    std::vector<int64_t> tokens;  ///< of rank 0, 1, ..., repeated
    const char* routing;
    std::vector<const char*> contestants;  ///< unless named on the command line; empty: all
};
const std::vector<Scenario>& scenarios();
const Scenario* find_scenario(const std::string& name);

/// The same plan in the parent and in every rank. Throws Mistake.
Plan make_plan(const Flags& flags);

/// About the most memory that the contestants of any cell of the plan take, in bytes.
int64_t memory_of(const Plan& plan);

}  // namespace switchyard::bench
