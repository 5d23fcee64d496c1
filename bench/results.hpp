// From the rounds of all ranks to numbers.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plan.hpp"

namespace switchyard::bench {

/// Of many rounds, in microseconds; `median` of nothing is 0.
struct Times {
    double median = 0, p99 = 0, min = 0, max = 0;
    size_t rounds = 0;
    explicit operator bool() const { return rounds > 0; }
};
Times times_of(std::vector<double> us);

/// One call of one contestant in one cell.
struct Result {
    const Cell* cell;
    const Entry* entry;
    std::string call;  ///< dispatch, first_touch, first_touch_tiles, combine
    std::string settings;
    Times group;          ///< of each round: from the start that all ranks share to the end of the slowest rank
    Times slowest_rank;   ///< of each round: the longest time of any rank from its own start
    double own_us = -1;   ///< slowest rank's median time that was not waiting; -1: unknown
    double wait_us = -1;  ///< largest median of waiting
    double bytes_per_rank = 0;
    double rows_per_rank = 0;                          ///< received (dispatch) or summed (combine), mean over ranks
    std::vector<std::vector<double>> wait_by_rank_us;  ///< [R][R] us per round rank i lacked rank j; empty: unknown
    double of_limit = 0;                               ///< limit / this; 0: no limit took part
    int64_t allocations = 0;

    double gb_per_s() const { return group.median > 0 ? bytes_per_rank / group.median / 1000 : 0; }
    nlohmann::json to_json() const;
};

class Results {
 public:
    /// Plays every tree of the plan; prints progress on a terminal. Throws std::runtime_error with everything that was wrong.
    Results(const Plan& plan, char** argv);

    /// In order of the plan. `call` may be missing where a contestant does not have it.
    const std::vector<Result>& all() const { return results_; }
    const Result* find(const std::string& cell, const std::string& label, const std::string& call) const;

 private:
    void take(const Cell& cell, const std::vector<std::vector<nlohmann::json>>& told);
    std::vector<Result> results_;
};

}  // namespace switchyard::bench
