#include "wire_rows.hpp"

namespace switchyard::bench {
SentRows::SentRows(const Task& task)
    : task_(task),
      scales_at_(up(task.row().payload_bytes, 16)),
      row_bytes_(task.row().scale_bytes() ? up(scales_at_ + task.row().scale_bytes()) : task.row().payload_bytes),
      scratch_(static_cast<size_t>(row_bytes_)) {}

const std::byte* SentRows::of_token(int64_t token) {
    const Options& o = task_.options();
    const std::byte* x = task_.input.x.data() + token * task_.token_bytes();
    if (o.dispatch_quant == Format::none) return x;
    task_.kernels.encode(o.dispatch_format(), o.dtype, x, o.hidden, scratch_.data(), scratch_.data() + scales_at_);
    return scratch_.data();
}

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
