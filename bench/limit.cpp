// The limit of this machine in this run: as many rows as the task has slots, moved without anybody else.
#include <fmt/format.h>

#include <cstring>

#include "contestant.hpp"

namespace switchyard::bench {
namespace {

class Limit final : public Contestant {
 public:
    explicit Limit(const Task& task)
        : Contestant(task),
          row_bytes_(task.row().payload_bytes + task.row().scale_bytes()),
          received_(task.slots() * row_bytes_),
          y_((task.slots() + task.options().topk) * task.token_bytes()),
          rows_(static_cast<size_t>(task.options().topk)) {}

    std::string settings() const override {
        return fmt::format(
            "{} kernels; dispatch: streaming stores, rows one behind the other; combine: rows of one k behind each other, "
            "as experts' rows lie",
            task_.kernels.name);
    }

    void dispatch() override {
        const std::byte* x = task_.input.x.data();
        for (int64_t t = 0; t < task_.tokens(); ++t)
            for (int64_t k = 0; k < task_.options().topk; ++k) {
                std::byte* to = received_.data() + (t * task_.options().topk + k) * row_bytes_;
                task_.kernels.stream(to, x + t * task_.token_bytes(), static_cast<size_t>(row_bytes_));
            }
        task_.kernels.fence();
    }

    bool delivers() const override { return false; }
    void* y() override { return y_.data(); }

    void combine(void* out) override {
        const int64_t topk = task_.options().topk;
        for (int64_t t = 0; t < task_.tokens(); ++t) {
            for (int64_t k = 0; k < topk; ++k)
                rows_[static_cast<size_t>(k)] = task_.input.topk_ids[static_cast<size_t>(t * topk + k)] < 0
                                                    ? nullptr
                                                    : y_.data() + (k * (task_.tokens() + 1) + t) * task_.token_bytes();
            task_.kernels.combine({.token = task_.options().dtype,
                                   .wire = task_.options().combine_format(),
                                   .encoded = false,
                                   .rows = rows_.data(),
                                   .scales = rows_.data(),
                                   .weights = task_.input.topk_weights.data() + t * topk,
                                   .topk = topk,
                                   .shared = nullptr},
                                  task_.options().hidden, static_cast<std::byte*>(out) + t * task_.token_bytes());
        }
    }

    Moved moved() const override { return {received_.bytes(), task_.slots() * task_.token_bytes()}; }

 private:
    const int64_t row_bytes_;
    Memory received_, y_;
    std::vector<const void*> rows_;
};

}  // namespace

std::unique_ptr<Contestant> make_limit(const Task& task) {
    return std::make_unique<Limit>(task);
}

}  // namespace switchyard::bench
