#include "home_rows.hpp"

namespace switchyard::bench {
namespace {
constexpr int64_t up(int64_t bytes, int64_t to) {
    return (bytes + to - 1) / to * to;
}
}  // namespace

Summer::Summer(const Task& task)
    : task_(task),
      encoded_(task.options().combine_quant != Format::none),
      scales_at_(up(task.wire().payload_bytes, 16)),
      row_bytes_(encoded_ ? up(scales_at_ + task.wire().scale_bytes(), 16) : task.token_bytes()),
      rows_(static_cast<size_t>(task.options().topk)),
      scales_(static_cast<size_t>(task.options().topk)),
      scratch_(static_cast<size_t>(row_bytes_)) {}

const std::byte* Summer::to_wire(const std::byte* y) {
    if (!encoded_) return y;
    const Options& o = task_.options();
    task_.kernels.encode(o.combine_format(), o.dtype, y, o.hidden, scratch_.data(), scratch_.data() + scales_at_);
    return scratch_.data();
}

void Summer::finish(int64_t token, void* out) {
    const Options& o = task_.options();
    task_.kernels.combine({.token = o.dtype,
                           .wire = o.combine_format(),
                           .encoded = encoded_,
                           .rows = rows_.data(),
                           .scales = scales_.data(),
                           .weights = task_.input.topk_weights.data() + token * o.topk,
                           .topk = o.topk,
                           .shared = nullptr},
                          o.hidden, static_cast<std::byte*>(out) + token * task_.token_bytes());
}

}  // namespace switchyard::bench
