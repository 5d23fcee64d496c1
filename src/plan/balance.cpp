#include "switchyard/balance.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ep/routing.hpp"

namespace switchyard {
namespace {

[[noreturn]] void refuse(std::string text) {
    throw Error(Status(Code::bad_input, std::move(text)));
}

// Refuses sizes that make no [T,K] of ids of E experts.
void check_ids(const char* call, std::span<const int32_t> ids, int64_t topk, int64_t experts) {
    if (topk < 1 || experts < 1 || experts > INT32_MAX)
        refuse(fmt::format("{}: topk is {} and experts {}; allowed: 1 or more of each.", call, topk, experts));
    const auto n = static_cast<int64_t>(ids.size());
    if (n % topk != 0) refuse(fmt::format("{}: topk_ids has {} slots, no multiple of topk {}.", call, n, topk));
    if (const int64_t i = ep::find_bad_id(ids.data(), n, experts); i < n)
        refuse(fmt::format("{}: topk_ids[{}][{}] is {}; experts are 0..{}, or -1 for an unused slot.", call, i / topk, i % topk,
                           ids[static_cast<size_t>(i)], experts - 1));
}

}  // namespace

LoadStatistics load_statistics(std::span<const uint64_t> loads, double hot_factor) {
    if (!(hot_factor > 0)) refuse(fmt::format("load_statistics: hot_factor is {}; allowed: above 0.", hot_factor));
    LoadStatistics s;
    if (loads.empty()) return s;
    const auto n = static_cast<double>(loads.size());
    for (const uint64_t load : loads)
        if (__builtin_add_overflow(s.total, load, &s.total))
            refuse("load_statistics: the loads are 2^64 rows or more in all; allowed: fewer.");
    s.mean = static_cast<double>(s.total) / n;
    s.max = *std::max_element(loads.begin(), loads.end());
    if (s.total == 0) return s;
    s.imbalance = static_cast<double>(s.max) / s.mean;

    std::vector<uint64_t> ascending(loads.begin(), loads.end());
    std::sort(ascending.begin(), ascending.end());
    double weighted = 0;
    for (size_t i = 0; i < ascending.size(); ++i)
        weighted += (2.0 * static_cast<double>(i + 1) - n - 1.0) * static_cast<double>(ascending[i]);
    s.gini = weighted / (n * static_cast<double>(s.total));

    for (size_t i = 0; i < loads.size(); ++i)
        if (static_cast<double>(loads[i]) >= hot_factor * s.mean) s.hot.push_back(static_cast<int32_t>(i));
    std::stable_sort(s.hot.begin(), s.hot.end(),
                     [&](int32_t a, int32_t b) { return loads[static_cast<size_t>(a)] > loads[static_cast<size_t>(b)]; });
    return s;
}

double switch_auxiliary_loss(std::span<const float> router_probs, std::span<const int32_t> topk_ids, int64_t experts,
                             int64_t topk, double alpha) {
    check_ids("switch_auxiliary_loss", topk_ids, topk, experts);
    const auto n = static_cast<size_t>(experts);
    const size_t tokens = topk_ids.size() / static_cast<size_t>(topk);
    if (router_probs.size() != tokens * n)
        refuse(fmt::format("switch_auxiliary_loss: router_probs has {} numbers; {} tokens of {} experts are {}.",
                           router_probs.size(), tokens, experts, tokens * n));
    if (tokens == 0) return 0;
    std::vector<double> p(n), f(n);
    for (size_t i = 0; i < router_probs.size(); ++i) p[i % n] += static_cast<double>(router_probs[i]);
    for (const int32_t id : topk_ids)
        if (id >= 0) f[static_cast<size_t>(id)] += 1;
    double sum = 0;
    for (size_t e = 0; e < n; ++e) sum += f[e] * p[e];
    const auto t = static_cast<double>(tokens);
    return alpha * static_cast<double>(experts) * sum / (t * static_cast<double>(topk) * t);
}

void update_bias(std::span<float> bias, std::span<const uint64_t> loads, float rate) {
    if (bias.size() != loads.size())
        refuse(
            fmt::format("update_bias: bias has {} experts and loads {}; give both of one model.", bias.size(), loads.size()));
    using Wide = unsigned __int128;  // any loads: exact
    const Wide total = std::accumulate(loads.begin(), loads.end(), Wide{0});
    for (size_t e = 0; e < bias.size(); ++e) {
        const Wide scaled = Wide{loads[e]} * loads.size();  // compared with the total as load is with the mean
        if (scaled < total) bias[e] += rate;
        if (scaled > total) bias[e] -= rate;
    }
}

CapacityResult apply_capacity(std::span<int32_t> topk_ids, int64_t topk, int64_t experts, double capacity_factor) {
    check_ids("apply_capacity", topk_ids, topk, experts);
    if (!(capacity_factor >= 0) || !std::isfinite(capacity_factor))
        refuse(fmt::format("apply_capacity: capacity_factor is {}; allowed: 0 or more.", capacity_factor));
    const double exact = capacity_factor * static_cast<double>(topk_ids.size()) / static_cast<double>(experts);
    CapacityResult r;
    // More than every slot is as good as every slot, and always fits.
    r.capacity = static_cast<int64_t>(std::min(std::ceil(exact - 1e-9 * std::max(exact, 1.0)), 0x1p62));
    r.dropped.resize(static_cast<size_t>(experts));
    std::vector<int64_t> kept(static_cast<size_t>(experts));
    for (int32_t& id : topk_ids) {
        if (id < 0) continue;
        const auto e = static_cast<size_t>(id);
        if (kept[e] < r.capacity) {
            ++kept[e];
            continue;
        }
        ++r.dropped[e];
        ++r.dropped_total;
        id = -1;
    }
    return r;
}

}  // namespace switchyard
