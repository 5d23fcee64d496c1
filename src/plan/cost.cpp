#include "plan/cost.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "ep/exchange.hpp"
#include "ep/routing.hpp"
#include "layout/window.hpp"

namespace switchyard {
namespace plan {
namespace {

// Of `bins` equally likely ones, how many K draws hit.
double hit(double bins, double draws) {
    return bins * (1 - std::pow(1 - 1 / bins, draws));
}

int64_t groups_of(int64_t ranks, int64_t group_ranks) {
    return layout::ceil_div(ranks, std::max<int64_t>(group_ranks, 1));
}

}  // namespace

std::vector<Way> ways(int64_t ranks, int64_t group_ranks, bool loadable) {
    std::vector<Way> all = {{Landing::packed, 1}, {Landing::padded, 1}};
    if (loadable) all.push_back({Landing::in_place, ranks});
    all.push_back({Landing::allgather, 1});
    if (loadable) all.push_back({Landing::two_level, group_ranks > 0 ? group_ranks : ep::ranks_of_a_group(ranks)});
    all.push_back({Landing::alltoallv, 1});
    return all;
}

Amounts prices_of(const Calibration& c) {
    return {c.call, c.peer, c.row, c.row_apart, c.look, c.write_cache, c.write_memory, c.read_cache, c.read_memory};
}

void set_prices(Calibration& c, const Amounts& p) {
    c.call = p[0], c.peer = p[1], c.row = p[2], c.row_apart = p[3], c.look = p[4];
    c.write_cache = p[5], c.write_memory = p[6], c.read_cache = p[7], c.read_memory = p[8];
}

Amounts amounts_of(const Options& o, int64_t ranks, int64_t tokens, Way way, const Calibration& c) {
    const layout::RowLayout row = layout::row_layout(o.dispatch_quant, o.dtype, o.hidden);
    const double row_kib = static_cast<double>(row.payload_bytes + row.scale_bytes()) / 1024;
    const auto t = static_cast<double>(tokens), r = static_cast<double>(ranks), k = static_cast<double>(o.topk);
    const double rows = t * k, cache_kib = static_cast<double>(std::max<int64_t>(c.cache_bytes, 1)) / 1024;
    double write_cache = 0, write_memory = 0, read_cache = 0, read_memory = 0;
    // Rows of a pass lie in cache or in memory by the size of what it goes through, with a slope between.
    const auto in_memory = [&](double rows_in_all) {
        return std::clamp((rows_in_all * row_kib / cache_kib - 0.5) / 1.5, 0.0, 1.0);
    };
    const auto write = [&](double n) {
        const double far = in_memory(n);
        write_cache += n * row_kib * (1 - far), write_memory += n * row_kib * far;
    };
    const auto read = [&](double n) {
        const double far = in_memory(n);
        read_cache += n * row_kib * (1 - far), read_memory += n * row_kib * far;
    };
    double placed = rows, apart = 0, looks = 0;
    const double hops = ep::waits_for_counts(way.landing) ? 2 : 1;
    read(t);
    switch (way.landing) {
        case Landing::automatic:
        case Landing::packed: write(rows); break;
        case Landing::padded: write(rows), read(rows), write(rows), placed = 2 * rows; break;
        case Landing::alltoallv: write(rows), read(rows), write(rows), read(rows), write(rows), placed = 2 * rows; break;
        case Landing::in_place:
        case Landing::two_level:
        case Landing::allgather:
            placed = t * hit(static_cast<double>(groups_of(ranks, way.group_ranks)), k);
            write(placed);
            apart = rows, looks = r * rows;
            break;
    }
    if (apart > 0) {
        // Tokens that several of a rank's experts want are read from memory once.
        const double distinct = t * hit(r, k);
        read(distinct);
        read_cache += std::max(0.0, rows - distinct) * row_kib;
    } else {
        read(rows);
    }
    // Ranks that share a CPU take turns.
    const double turns = std::max(1.0, r / static_cast<double>(std::max<int64_t>(c.cpus, 1)));
    Amounts all = {hops, hops * r, placed, apart, looks, write_cache, write_memory, read_cache, read_memory};
    for (double& amount : all) amount *= turns;
    return all;
}

}  // namespace plan

std::vector<Estimate> estimate_landings(const Options& options, int64_t ranks, int64_t tokens, const Calibration& calibration,
                                        bool loadable) {
    Options o = options;
    if (o.landing == Landing::automatic) o.landing = Landing::packed;
    if (Status s = check_options(o, ranks); !s.ok()) throw Error(s);
    if (tokens < 0 || tokens > o.tokens_max)
        throw Error(Status(Code::bad_input,
                           fmt::format("estimate of {} tokens; allowed: 0..{} (option tokens_max).", tokens, o.tokens_max)));
    const layout::RowLayout row = layout::row_layout(o.dispatch_quant, o.dtype, o.hidden);
    const double row_bytes = static_cast<double>(row.payload_bytes + row.scale_bytes());
    const plan::Amounts prices = plan::prices_of(calibration);
    std::vector<Estimate> all;
    for (const plan::Way way : plan::ways(ranks, o.group_ranks, loadable)) {
        const plan::Amounts amounts = plan::amounts_of(o, ranks, tokens, way, calibration);
        double ns = 0;
        for (size_t i = 0; i < plan::prices; ++i) ns += prices[i] * amounts[i];
        const double k = static_cast<double>(o.topk), t = static_cast<double>(tokens);
        const int64_t groups = layout::ceil_div(ranks, way.group_ranks);
        const double copies = plan::hit(static_cast<double>(groups), k);
        std::string why;
        double bytes = t * k * static_cast<double>(ep::travelling_row_bytes(row, o.deliver_weights));
        switch (way.landing) {
            case Landing::automatic:
            case Landing::packed:
                why = fmt::format("{} tokens {} times to their final place, after the counts", tokens, o.topk);
                break;
            case Landing::padded:
                why = fmt::format("{} tokens {} times into cells, closed up by a copy", tokens, o.topk);
                break;
            case Landing::alltoallv:
                why = fmt::format("{} tokens {} times packed, moved as blocks, put in order, after the counts", tokens, o.topk);
                break;
            case Landing::in_place: why = fmt::format("{} tokens once, read where they are", tokens); break;
            case Landing::allgather: why = fmt::format("{} tokens to {:.1f} of {} ranks", tokens, copies, ranks); break;
            case Landing::two_level:
                why = fmt::format("{} tokens to {:.1f} of {} groups of {} ranks", tokens, copies, groups, way.group_ranks);
                break;
        }
        if (ep::rows_lie_apart(way.landing))
            bytes = t * copies * row_bytes +
                    static_cast<double>(groups) * t * k * static_cast<double>(ep::travelling_slot_bytes(o.deliver_weights));
        if (way.landing == Landing::alltoallv) bytes = t * k * static_cast<double>(layout::cell_row_of(row).stride);
        all.push_back({way.landing, way.group_ranks, ns / 1000, static_cast<int64_t>(bytes), std::move(why)});
    }
    std::stable_sort(all.begin(), all.end(), [](const Estimate& a, const Estimate& b) { return a.us < b.us; });
    return all;
}

int64_t predicted_bytes(const Options& options, int64_t ranks, int rank, std::span<const int32_t> topk_ids) {
    Options o = options;
    layout::Window window{};
    if (Status s = check_options(o, ranks); !s.ok()) throw Error(s);
    if (o.landing == Landing::automatic) throw Error(Status(Code::bad_input, "predicted_bytes of landing auto; name one."));
    if (Status s = ep::plan_window(o, ranks, &window); !s.ok()) throw Error(s);
    const auto slots = static_cast<int64_t>(topk_ids.size());
    if (slots % o.topk != 0 || slots / o.topk > o.tokens_max || rank < 0 || rank >= ranks)
        throw Error(
            Status(Code::bad_input, fmt::format("predicted_bytes: rank {} of {}, {} topk_ids; expected whole tokens of {} "
                                                "ids, at most {}.",
                                                rank, ranks, slots, o.topk, o.tokens_max)));
    if (const int64_t bad = ep::find_bad_id(topk_ids.data(), slots, o.experts); bad < slots)
        throw Error(Status(Code::bad_input, fmt::format("predicted_bytes: topk_ids[{}] is {}; experts are 0..{}, or -1.", bad,
                                                        topk_ids[static_cast<size_t>(bad)], o.experts - 1)));
    const ep::Placement placement = ep::Placement::contiguous(ranks, o.experts);
    const int64_t row_bytes = window.row.payload_bytes + window.row.scale_bytes();
    const int64_t used = std::count_if(topk_ids.begin(), topk_ids.end(), [](int32_t id) { return id >= 0; });
    if (o.landing == Landing::alltoallv) return used * window.cell.stride;
    if (!ep::rows_lie_apart(o.landing)) return used * ep::travelling_row_bytes(window.row, o.deliver_weights);
    int64_t copies = 0;
    std::vector<int64_t> last(static_cast<size_t>(ranks), -1);  // token that went to each group last
    for (int64_t i = 0; i < slots; ++i) {
        if (topk_ids[static_cast<size_t>(i)] < 0) continue;
        const int64_t owner = placement.owner[static_cast<size_t>(topk_ids[static_cast<size_t>(i)])];
        copies += std::exchange(last[static_cast<size_t>(owner / o.group_ranks)], i / o.topk) != i / o.topk;
    }
    return copies * row_bytes + layout::ceil_div(ranks, o.group_ranks) * slots * ep::travelling_slot_bytes(o.deliver_weights);
}

}  // namespace switchyard
