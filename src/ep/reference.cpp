#include "switchyard/reference.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "layout/row.hpp"
#include "quant/quant.hpp"

namespace switchyard::reference {
namespace {

struct Row {
    int32_t expert;
    int32_t source, token, k;
};

void check_id(int64_t rank, int64_t token, int64_t k, int32_t id, int64_t experts) {
    if (id < -1 || id >= experts)
        throw Error(
            Status(Code::bad_input, fmt::format("rank {}: topk_ids[{}][{}] is {}; experts are 0..{}, or -1 for an unused slot.",
                                                rank, token, k, id, experts - 1)));
}

}  // namespace

Received dispatch(const Options& options, std::span<const RankInput> inputs, int rank) {
    const auto ranks = static_cast<int64_t>(inputs.size());
    const ExpertRange range = experts_of(rank, ranks, options.experts);
    const layout::RowLayout row = layout::row_layout(options.dispatch_quant, options.dtype, options.hidden);
    const int64_t token_bytes = options.hidden * layout::token_bytes(options.dtype);

    std::vector<Row> rows;
    for (int64_t source = 0; source < ranks; ++source) {
        const RankInput& in = inputs[static_cast<size_t>(source)];
        for (int64_t t = 0; t < in.tokens; ++t)
            for (int64_t k = 0; k < options.topk; ++k) {
                const int32_t id = in.topk_ids[t * options.topk + k];
                check_id(source, t, k, id, options.experts);
                if (id >= range.first && id < range.last)
                    rows.push_back({id, static_cast<int32_t>(source), static_cast<int32_t>(t), static_cast<int32_t>(k)});
            }
    }
    std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
        return std::tie(a.expert, a.source, a.token, a.k) < std::tie(b.expert, b.source, b.token, b.k);
    });

    Received r;
    const auto append = [&](const Row* from) {  // null: a pad row
        const auto at = static_cast<size_t>(r.rows++);
        r.expand_x.resize(r.expand_x.size() + static_cast<size_t>(row.payload_bytes));
        r.dynamic_scales.resize(r.dynamic_scales.size() + static_cast<size_t>(row.scale_bytes()));
        if (!from) {
            r.assist_info_for_combine.insert(r.assist_info_for_combine.end(), {-1, -1, -1});
            r.weights.push_back(0);
            return;
        }
        const RankInput& in = inputs[static_cast<size_t>(from->source)];
        quant::scalar_kernels().encode(options.dispatch_format(), options.dtype,
                                       static_cast<const std::byte*>(in.x) + from->token * token_bytes, options.hidden,
                                       r.expand_x.data() + at * static_cast<size_t>(row.payload_bytes),
                                       r.dynamic_scales.data() + at * static_cast<size_t>(row.scale_bytes()));
        r.assist_info_for_combine.insert(r.assist_info_for_combine.end(), {from->source, from->token, from->k});
        r.weights.push_back(in.topk_weights ? in.topk_weights[from->token * options.topk + from->k] : 1.0F);
    };

    int32_t running = 0;
    size_t next = 0;
    for (auto expert = static_cast<int32_t>(range.first); expert < range.last; ++expert) {
        r.expert_offsets.push_back(r.rows);
        const int32_t before = running;
        for (int32_t source = 0; source < ranks; ++source) {
            for (; next < rows.size() && rows[next].expert == expert && rows[next].source == source; ++next, ++running)
                append(&rows[next]);
            r.ep_recv_count.push_back(running);
        }
        r.expert_token_nums.push_back(options.expert_token_nums == TokenNums::cumsum ? running : running - before);
        while (r.rows % options.expert_alignment != 0) append(nullptr);
    }
    r.expert_offsets.push_back(r.rows);
    return r;
}

std::vector<std::byte> combine(const Options& options, const RankInput& input, int rank, const RowOf& y, const void* shared) {
    const int64_t bytes = options.hidden * layout::token_bytes(options.dtype);
    std::vector<std::byte> out(static_cast<size_t>(input.tokens * bytes));
    std::vector<const void*> rows(static_cast<size_t>(options.topk));
    for (int64_t t = 0; t < input.tokens; ++t) {
        for (int64_t k = 0; k < options.topk; ++k) {
            const int32_t id = input.topk_ids[t * options.topk + k];
            rows[static_cast<size_t>(k)] = id < 0 ? nullptr : y(rank, t, k, id);
        }
        const quant::CombineInput in{.token = options.dtype,
                                     .wire = options.combine_format(),
                                     .encoded = false,
                                     .rows = rows.data(),
                                     .scales = nullptr,
                                     .weights = input.topk_weights ? input.topk_weights + t * options.topk : nullptr,
                                     .topk = options.topk,
                                     .shared = shared ? static_cast<const std::byte*>(shared) + t * bytes : nullptr};
        quant::scalar_kernels().combine(in, options.hidden, out.data() + t * bytes);
    }
    return out;
}

}  // namespace switchyard::reference
