// All-gather and local pick: every rank copies its tokens and their expert ids to every rank, and each picks the rows of its
// own experts out of what it got. Combine puts the experts' rows home, with one flag per peer, and sums them there.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "contestant.hpp"
#include "shared_window.hpp"
#include "wire_rows.hpp"

namespace switchyard::bench {
namespace {

class AllGather final : public Contestant {
 public:
    explicit AllGather(const Task& task)
        : Contestant(task),
          home_(task),
          sent_(task),
          flags_home_at_(SharedWindow::first_free + 64 * task.ranks()),
          ids_at_(flags_home_at_ + 64 * task.ranks()),
          ids_stride_(up(4 * task.options().tokens_max * task.options().topk)),
          rows_at_(up(ids_at_ + task.ranks() * ids_stride_, 4096)),
          home_at_(up(rows_at_ + task.ranks() * task.options().tokens_max * sent_.row_bytes(), 4096)),
          window_(task.group, "allgather", home_at_ + task.options().tokens_max * task.options().topk * home_.row_bytes(),
                  task.oversubscribed()),
          first_(static_cast<size_t>(task.experts(task.rank()).count() * task.ranks() + 1)),
          expand_x_(task.rows * task.row().payload_bytes),
          scales_(task.rows * task.row().scale_bytes()),
          y_(task.rows * task.token_bytes()),
          info_(static_cast<size_t>(task.rows)),
          home_bytes_(task.rows * home_.row_bytes()) {}

    std::string settings() const override {
        return fmt::format("quantised once per token; gather {}, pick {}, home {}", move_name(gathered_bytes()),
                           move_name(expand_x_.bytes()), move_name(home_bytes_));
    }

    void dispatch() override {
        ++epoch_;
        give();
        for (int q = 0; q < task_.ranks(); ++q)
            waited_ += window_.await([&] { return window_.flag(SharedWindow::first_free + 64 * q) >= epoch_; });
        pick();
    }

    Delivered delivered() override { return {task_.rows, expand_x_.data(), scales_.data()}; }
    uint64_t first_touch(FirstTouch) override { return read_bytes(expand_x_.data(), expand_x_.bytes()); }
    void* y() override { return y_.data(); }

    void combine(void* out) override {
        const Move move = move_for(task_.kernels, home_bytes_);
        const int64_t topk = task_.options().topk;
        for (int64_t i = 0; i < task_.rows; ++i) {
            const RowSource to = info_[static_cast<size_t>(i)];
            move(window_.at(to.rank, home_at_ + (to.token * topk + to.k) * home_.row_bytes()),
                 home_.to_wire(y_.data() + i * task_.token_bytes()), static_cast<size_t>(home_.row_bytes()));
        }
        task_.kernels.fence();
        for (int p = 0; p < task_.ranks(); ++p) window_.raise(p, flags_home_at_ + 64 * task_.rank(), epoch_);
        window_.wake();
        for (int q = 0; q < task_.ranks(); ++q)
            waited_ += window_.await([&] { return window_.flag(flags_home_at_ + 64 * q) >= epoch_; });
        for (int64_t t = 0; t < task_.tokens(); ++t)
            home_.sum(t, out, [&](int64_t k) { return window_.own(home_at_ + (t * topk + k) * home_.row_bytes()); });
    }

    Moved moved() const override {
        const int64_t picked = task_.rows * (task_.row().payload_bytes + task_.row().scale_bytes());
        return {gathered_bytes() + picked, home_bytes_ + task_.slots() * home_.row_bytes()};
    }
    int64_t waited_ns() const override { return waited_; }

 private:
    int64_t gathered_bytes() const { return task_.ranks() * task_.tokens() * sent_.row_bytes(); }
    int64_t tokens_of(int rank) const { return task_.shape.tokens[static_cast<size_t>(rank)]; }

    void give() {
        const Move move = move_for(task_.kernels, gathered_bytes());
        for (int64_t t = 0; t < task_.tokens(); ++t) {
            const std::byte* row = sent_.of_token(t);
            for (int p = 0; p < task_.ranks(); ++p)
                move(row_at(p, task_.rank(), t), row, static_cast<size_t>(sent_.row_bytes()));
        }
        task_.kernels.fence();
        for (int p = 0; p < task_.ranks(); ++p) {
            std::memcpy(window_.at(p, ids_at_ + task_.rank() * ids_stride_), task_.input.topk_ids.data(),
                        static_cast<size_t>(4 * task_.slots()));
            window_.raise(p, SharedWindow::first_free + 64 * task_.rank(), epoch_);
        }
        window_.wake();
    }

    // Twice over the ids: where each (expert, source) begins, then the rows.
    void pick() {
        const ExpertRange mine = task_.experts(task_.rank());
        const int64_t payload_bytes = task_.row().payload_bytes, scale_bytes = task_.row().scale_bytes();
        std::fill(first_.begin(), first_.end(), 0);
        const auto each = [&](auto&& do_row) {
            for (int q = 0; q < task_.ranks(); ++q) {
                const auto* ids = reinterpret_cast<const int32_t*>(window_.own(ids_at_ + q * ids_stride_));
                for (int64_t i = 0; i < tokens_of(q) * task_.options().topk; ++i)
                    if (ids[i] >= mine.first && ids[i] < mine.last)
                        do_row(q, i, static_cast<size_t>((ids[i] - mine.first) * task_.ranks() + q));
            }
        };
        each([&](int, int64_t, size_t pair) { ++first_[pair + 1]; });
        for (size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
        const Move move = move_for(task_.kernels, expand_x_.bytes());
        each([&](int q, int64_t slot, size_t pair) {
            const int64_t row = first_[pair]++;
            const int64_t token = slot / task_.options().topk;
            const std::byte* from = row_at(task_.rank(), q, token);
            move(expand_x_.data() + row * payload_bytes, from, static_cast<size_t>(payload_bytes));
            if (scale_bytes)
                std::memcpy(scales_.data() + row * scale_bytes, from + sent_.scales_at(), static_cast<size_t>(scale_bytes));
            info_[static_cast<size_t>(row)] = {q, static_cast<int32_t>(token),
                                               static_cast<int32_t>(slot % task_.options().topk)};
        });
        task_.kernels.fence();
    }

    std::byte* row_at(int window_of, int source, int64_t token) const {
        return window_.at(window_of, rows_at_ + (source * task_.options().tokens_max + token) * sent_.row_bytes());
    }

    Summer home_;
    SentRows sent_;
    const int64_t flags_home_at_, ids_at_, ids_stride_, rows_at_, home_at_;
    SharedWindow window_;
    std::vector<int64_t> first_;  // [L*R+1] next row of (local expert, source)
    Memory expand_x_, scales_, y_;
    std::vector<RowSource> info_;
    const int64_t home_bytes_;
    uint64_t epoch_ = 0;
    int64_t waited_ = 0;
};

}  // namespace

std::unique_ptr<Contestant> make_allgather(const Task& task) {
    return std::make_unique<AllGather>(task);
}

}  // namespace switchyard::bench
