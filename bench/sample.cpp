// The CANN sample's protocol as an algorithm, on windows in shared memory.
//
// Dispatch: every (token, k) is quantised and put, with its source info, into the next free cell of (expert, source rank) in
// the owner's window. Then a flag with the counts goes to every peer. When all flags are there the owner copies the cells
// together: expand_x, scales, source info.
// Combine: every row is quantised and put to the place of its (token, k) in its home window, then a flag for that place. Home
// waits for the K flags of a token, then sums its rows.
//
// Left out of the sample: nothing that moves a byte. Its 64 cores become one; where a flag is awaited a rank spins or sleeps.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "contestant.hpp"
#include "shared_window.hpp"
#include "wire_rows.hpp"

namespace switchyard::bench {
namespace {

// Where things lie in every rank's window.
struct SampleLayout {
    int64_t rows_per_cell_max, cell_row, scales_at, info_at;
    int64_t local_max, counts_at, counts_stride, flags_home_at, home_at, cells_at, bytes;

    explicit SampleLayout(const Task& task, const Summer& home) {
        const Options& o = task.options();
        const int64_t ranks = task.ranks();
        local_max = (o.experts + ranks - 1) / ranks;
        // A token takes an expert again only when there are fewer experts than k.
        rows_per_cell_max = o.tokens_max * ((o.topk + o.experts - 1) / o.experts);
        scales_at = up(task.row().payload_bytes, 16);
        info_at = up(scales_at + task.row().scale_bytes(), 4);
        cell_row = up(info_at + 12);
        counts_at = SharedWindow::first_free;
        counts_stride = up(8 + 4 * local_max);
        flags_home_at = counts_at + ranks * counts_stride;
        home_at = up(flags_home_at + 8 * o.tokens_max * o.topk, 4096);
        cells_at = up(home_at + o.tokens_max * o.topk * home.row_bytes(), 4096);
        bytes = cells_at + local_max * ranks * rows_per_cell_max * cell_row;
    }
    int64_t cell(int64_t local, int ranks, int source, int64_t row) const {
        return cells_at + ((local * ranks + source) * rows_per_cell_max + row) * cell_row;
    }
};

class Sample final : public Contestant {
 public:
    explicit Sample(const Task& task)
        : Contestant(task),
          home_(task),
          at_(task, home_),
          window_(task.group, "sample", at_.bytes, task.oversubscribed()),
          owner_(task.owners()),
          next_(owner_.size()),
          scratch_(static_cast<size_t>(at_.cell_row)),
          expand_x_(task.rows * task.row().payload_bytes),
          scales_(task.rows * task.row().scale_bytes()),
          y_(task.rows * task.token_bytes()),
          info_(static_cast<size_t>(task.rows)),
          out_bytes_(task.slots() * task.row().payload_bytes),
          home_bytes_(task.rows * home_.row_bytes()) {}

    std::string settings() const override {
        return fmt::format("quantised per (token, k); {} out, {} home", move_name(out_bytes_), move_name(home_bytes_));
    }

    void dispatch() override {
        ++epoch_;
        send();
        // Counts and flag, to every peer.
        for (int p = 0; p < task_.ranks(); ++p) {
            const ExpertRange range = task_.experts(p);
            const int64_t at = at_.counts_at + task_.rank() * at_.counts_stride;
            std::memcpy(window_.at(p, at + 8), next_.data() + range.first, static_cast<size_t>(range.count()) * 4);
            window_.raise(p, at, epoch_);
        }
        window_.wake();
        for (int q = 0; q < task_.ranks(); ++q)
            waited_ += window_.await([&] { return window_.flag(at_.counts_at + q * at_.counts_stride) >= epoch_; });
        copy_window();
    }

    Delivered delivered() override { return {task_.rows, expand_x_.data(), scales_.data()}; }
    uint64_t first_touch(FirstTouch) override { return read_bytes(expand_x_.data(), expand_x_.bytes()); }
    void* y() override { return y_.data(); }

    void combine(void* out) override {
        const Move move = move_for(task_.kernels, home_bytes_);
        const int64_t topk = task_.options().topk;
        for (int64_t i = 0; i < task_.rows; ++i) {
            const RowSource to = info_[static_cast<size_t>(i)];
            const int64_t place = to.token * topk + to.k;
            const std::byte* row = home_.to_wire(y_.data() + i * task_.token_bytes());
            move(window_.at(to.rank, at_.home_at + place * home_.row_bytes()), row, static_cast<size_t>(home_.row_bytes()));
            task_.kernels.fence();
            window_.raise(to.rank, at_.flags_home_at + 8 * place, epoch_);
        }
        window_.wake();
        for (int64_t t = 0; t < task_.tokens(); ++t) {
            for (int64_t k = 0; k < topk; ++k)
                if (task_.input.topk_ids[static_cast<size_t>(t * topk + k)] >= 0)
                    waited_ += window_.await([&] { return window_.flag(at_.flags_home_at + 8 * (t * topk + k)) >= epoch_; });
            home_.sum(t, out, [&](int64_t k) { return window_.own(at_.home_at + (t * topk + k) * home_.row_bytes()); });
        }
    }

    Moved moved() const override {
        const int64_t row = task_.row().payload_bytes + task_.row().scale_bytes() + 12;
        return {task_.slots() * row + task_.rows * row, home_bytes_ + task_.slots() * home_.row_bytes()};
    }
    int64_t waited_ns() const override { return waited_; }

 private:
    void send() {
        const Options& o = task_.options();
        const Move move = move_for(task_.kernels, out_bytes_);
        const auto payload_bytes = static_cast<size_t>(task_.row().payload_bytes);
        std::fill(next_.begin(), next_.end(), 0);
        for (int64_t t = 0; t < task_.tokens(); ++t) {
            const std::byte* x = task_.input.x.data() + t * task_.token_bytes();
            for (int64_t k = 0; k < o.topk; ++k) {
                const int32_t e = task_.input.topk_ids[static_cast<size_t>(t * o.topk + k)];
                if (e < 0) continue;
                const int32_t owner = owner_[static_cast<size_t>(e)];
                const int64_t row = next_[static_cast<size_t>(e)]++;
                std::byte* cell = window_.at(owner, at_.cell(e - task_.experts(owner).first, task_.ranks(), task_.rank(), row));
                const RowSource info{task_.rank(), static_cast<int32_t>(t), static_cast<int32_t>(k)};
                if (o.dispatch_quant == Format::none) {
                    move(cell, x, payload_bytes);
                    std::memcpy(cell + at_.info_at, &info, sizeof info);
                } else {
                    task_.kernels.encode(o.dispatch_format(), o.dtype, x, o.hidden, scratch_.data(),
                                         scratch_.data() + at_.scales_at);
                    std::memcpy(scratch_.data() + at_.info_at, &info, sizeof info);
                    move(cell, scratch_.data(), scratch_.size());
                }
            }
        }
        task_.kernels.fence();
    }

    void copy_window() {
        const int64_t payload_bytes = task_.row().payload_bytes, scale_bytes = task_.row().scale_bytes();
        const Move move = move_for(task_.kernels, expand_x_.bytes());
        int64_t row = 0;
        for (int64_t local = 0; local < task_.experts(task_.rank()).count(); ++local)
            for (int source = 0; source < task_.ranks(); ++source) {
                int32_t count;
                std::memcpy(&count, window_.own(at_.counts_at + source * at_.counts_stride + 8 + 4 * local), sizeof count);
                for (int32_t i = 0; i < count; ++i, ++row) {
                    const std::byte* cell = window_.own(at_.cell(local, task_.ranks(), source, i));
                    move(expand_x_.data() + row * payload_bytes, cell, static_cast<size_t>(payload_bytes));
                    if (scale_bytes)
                        std::memcpy(scales_.data() + row * scale_bytes, cell + at_.scales_at, static_cast<size_t>(scale_bytes));
                    std::memcpy(&info_[static_cast<size_t>(row)], cell + at_.info_at, sizeof(RowSource));
                }
            }
        task_.kernels.fence();
    }

    Summer home_;
    const SampleLayout at_;
    SharedWindow window_;
    const std::vector<int32_t> owner_;
    std::vector<int32_t> next_;  // [E] rows of mine for each expert so far
    std::vector<std::byte> scratch_;
    Memory expand_x_, scales_, y_;
    std::vector<RowSource> info_;
    const int64_t out_bytes_, home_bytes_;
    uint64_t epoch_ = 0;
    int64_t waited_ = 0;
};

}  // namespace

std::unique_ptr<Contestant> make_sample(const Task& task) {
    return std::make_unique<Sample>(task);
}

}  // namespace switchyard::bench
