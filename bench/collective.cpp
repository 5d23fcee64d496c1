#include "collective.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace switchyard::bench {
Collective::Collective(const Task& task)
    : Contestant(task),
      home_(task),
      local_max_((task.options().experts + task.ranks() - 1) / task.ranks()),
      sent_(task),
      owner_(task.owners()),
      counts_sent_(static_cast<size_t>(task.ranks() * local_max_)),
      counts_received_(counts_sent_.size()),
      rows_sent_(static_cast<size_t>(task.ranks())),
      rows_received_(rows_sent_.size()),
      next_(owner_.size()),
      place_(static_cast<size_t>(task.slots())),
      send_(task.slots() * sent_.row_bytes()),
      received_(task.rows * sent_.row_bytes()),
      expand_x_(task.rows * task.row().payload_bytes),
      scales_(task.rows * task.row().scale_bytes()),
      y_(task.rows * task.token_bytes()),
      send_home_(task.rows * home_.row_bytes()),
      received_home_(task.slots() * home_.row_bytes()) {}

void Collective::dispatch() {
    pack();
    exchange_counts(counts_sent_.data(), counts_received_.data(), local_max_);
    for (size_t q = 0; q < rows_received_.size(); ++q) {
        const int32_t* counts = counts_received_.data() + static_cast<int64_t>(q) * local_max_;
        rows_received_[q] = std::accumulate(counts, counts + local_max_, int64_t{0});
    }
    exchange_rows(send_.data(), rows_sent_, received_.data(), rows_received_, sent_.row_bytes());
    reorder();
}

void Collective::pack() {
    const Options& o = task_.options();
    const std::vector<int32_t>& ids = task_.input.topk_ids;
    std::fill(counts_sent_.begin(), counts_sent_.end(), 0);
    for (const int32_t e : ids)
        if (e >= 0) {
            const int32_t p = owner_[static_cast<size_t>(e)];
            ++counts_sent_[static_cast<size_t>(p * local_max_ + e - task_.experts(p).first)];
        }
    int64_t at = 0;
    for (int p = 0; p < task_.ranks(); ++p) {
        const int64_t before = at;
        const ExpertRange range = task_.experts(p);
        for (int64_t e = range.first; e < range.last; ++e) {
            next_[static_cast<size_t>(e)] = at;
            at += counts_sent_[static_cast<size_t>(p * local_max_ + e - range.first)];
        }
        rows_sent_[static_cast<size_t>(p)] = at - before;
    }
    const Move move = move_for(task_.kernels, send_.bytes());
    for (int64_t t = 0; t < task_.tokens(); ++t) {
        const std::byte* row = sent_.of_token(t);
        for (int64_t k = 0; k < o.topk; ++k) {
            const auto slot = static_cast<size_t>(t * o.topk + k);
            if (ids[slot] < 0) continue;
            place_[slot] = next_[static_cast<size_t>(ids[slot])]++;
            move(send_.data() + place_[slot] * sent_.row_bytes(), row, static_cast<size_t>(sent_.row_bytes()));
        }
    }
    task_.kernels.fence();
}

// do_block(first row by (source, expert), first row by (expert, source), rows) for each pair that has rows.
template <class Do>
void Collective::each_block(Do do_block) const {
    int64_t ordered = 0;
    for (int64_t e = 0; e < task_.experts(task_.rank()).count(); ++e) {
        int64_t source_first = 0;
        for (size_t q = 0; q < rows_received_.size(); ++q) {
            const int32_t* counts = counts_received_.data() + static_cast<int64_t>(q) * local_max_;
            if (counts[e] > 0)
                do_block(source_first + std::accumulate(counts, counts + e, int64_t{0}), ordered, int64_t{counts[e]});
            ordered += counts[e];
            source_first += rows_received_[q];
        }
    }
}

void Collective::reorder() {
    const int64_t payload_bytes = task_.row().payload_bytes, scale_bytes = task_.row().scale_bytes();
    const Move move = move_for(task_.kernels, expand_x_.bytes());
    each_block([&](int64_t came, int64_t ordered, int64_t rows) {
        if (sent_.row_bytes() == payload_bytes)  // nothing but payload: the block in one piece
            return move(expand_x_.data() + ordered * sent_.row_bytes(), received_.data() + came * sent_.row_bytes(),
                        static_cast<size_t>(rows * sent_.row_bytes()));
        for (int64_t i = 0; i < rows; ++i) {
            const std::byte* from = received_.data() + (came + i) * sent_.row_bytes();
            move(expand_x_.data() + (ordered + i) * payload_bytes, from, static_cast<size_t>(payload_bytes));
            std::memcpy(scales_.data() + (ordered + i) * scale_bytes, from + sent_.scales_at(),
                        static_cast<size_t>(scale_bytes));
        }
    });
    task_.kernels.fence();
}

void Collective::combine(void* out) {
    const int64_t bytes = home_.row_bytes();
    const Move move = move_for(task_.kernels, send_home_.bytes());
    each_block([&](int64_t came, int64_t ordered, int64_t rows) {
        const std::byte* from = y_.data() + ordered * task_.token_bytes();
        if (!home_.encoded()) return move(send_home_.data() + came * bytes, from, static_cast<size_t>(rows * bytes));
        for (int64_t i = 0; i < rows; ++i)
            move(send_home_.data() + (came + i) * bytes, home_.to_wire(from + i * task_.token_bytes()),
                 static_cast<size_t>(bytes));
    });
    task_.kernels.fence();
    exchange_rows(send_home_.data(), rows_received_, received_home_.data(), rows_sent_, bytes);
    const int64_t topk = task_.options().topk;
    for (int64_t t = 0; t < task_.tokens(); ++t)
        home_.sum(t, out, [&](int64_t k) { return received_home_.data() + place_[static_cast<size_t>(t * topk + k)] * bytes; });
}

Moved Collective::moved() const {
    // Packed, moved, reordered; packed, moved, summed.
    return {send_.bytes() + received_.bytes() + expand_x_.bytes() + scales_.bytes(),
            send_home_.bytes() + received_home_.bytes() + task_.slots() * home_.row_bytes()};
}

}  // namespace switchyard::bench
