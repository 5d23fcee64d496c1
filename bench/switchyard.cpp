// Switchyard's landings as contestants: only the public header.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "contestant.hpp"

namespace switchyard::bench {
namespace {

Options options_of(const Task& task, Landing landing, CombinePath path) {
    Options options = task.options();
    options.landing = landing;
    options.combine_path = path;
    options.depth = 1;  // one dispatch at a time, as every other contestant: its rows use the same memory again
    options.timeout_ms = std::max<int64_t>(options.timeout_ms, 60'000);
    return options;
}

class OurSession final : public Contestant {
 public:
    OurSession(const Task& task, Landing landing, CombinePath path)
        : Contestant(task), session_(Session::open(options_of(task, landing, path), task.group)) {
        tile_ = Memory(tile_rows * task.row().payload_bytes);
    }

    std::string settings() const override {
        const Options& o = session_.options();
        return fmt::format("landing {}, combine path {}, depth {}, workers {}, {} kernels, {}",
                           option_text(*find_option("landing"), o), option_text(*find_option("combine_path"), o), o.depth,
                           o.workers, session_.simd_name(), session_.memory_text());
    }

    void* input() override {
        x_ = session_.x();
        return x_;
    }

    void dispatch() override {
        before_ = session_.stats();
        batch_ = session_.dispatch({.x = x_ ? x_ : task_.input.x.data(),
                                    .tokens = task_.tokens(),
                                    .topk_ids = task_.input.topk_ids.data(),
                                    .topk_weights = task_.input.topk_weights.data()});
    }

    Delivered delivered() override {
        const void* scales = batch_.dynamic_scales();
        return {batch_.rows(), static_cast<std::byte*>(const_cast<void*>(batch_.expand_x())),
                static_cast<std::byte*>(const_cast<void*>(scales))};
    }

    bool can_touch(FirstTouch) const override { return true; }

    uint64_t first_touch(FirstTouch how) override {
        const int64_t bytes = batch_.payload_bytes();
        uint64_t sum = 0;
        if (how == FirstTouch::where_they_lie) {
            for (int64_t i = 0; i < batch_.rows(); ++i) sum += read_bytes(batch_.row(i).payload, bytes);
            return sum;
        }
        const auto offsets = batch_.expert_offsets();
        for (size_t e = 0; e + 1 < offsets.size(); ++e)
            for (int64_t first = 0, rows = offsets[e + 1] - offsets[e]; first < rows; first += tile_rows) {
                const int64_t count = std::min(tile_rows, rows - first);
                batch_.gather(static_cast<int64_t>(e), first, count, tile_.data());
                sum += read_bytes(tile_.data(), count * bytes);
            }
        return sum;
    }

    void* y() override { return batch_.y(); }

    void combine(void* out) override {
        session_.combine(batch_, {.topk_weights = task_.input.topk_weights.data(), .out = out});
    }

    Moved moved() const override {
        const SessionStats now = session_.stats();
        int64_t again = 0;  // what closing the gaps writes a second time
        const Landing landing = session_.options().landing;
        if (landing == Landing::padded || landing == Landing::alltoallv)
            again = task_.rows * (task_.row().payload_bytes + task_.row().scale_bytes());
        // A pushed row is written, then read by the sum.
        const int64_t home = static_cast<int64_t>(now.bytes_home - before_.bytes_home);
        return {static_cast<int64_t>(now.bytes_sent - before_.bytes_sent) + again,
                session_.options().combine_path == CombinePath::push ? 2 * home : home};
    }

    int64_t waited_ns() const override {
        const SessionStats s = session_.stats();
        return s.wait_ns_counts + s.wait_ns_rows + s.wait_ns_returned;
    }

    std::vector<int64_t> waited_by_rank() const override { return session_.wait_ns_by_rank(); }

 private:
    Session session_;
    ExpertBatch batch_;
    SessionStats before_;
    void* x_ = nullptr;
    Memory tile_;
};

}  // namespace

std::unique_ptr<Contestant> make_packed(const Task& task) {
    return std::make_unique<OurSession>(task, Landing::packed, CombinePath::read);
}
std::unique_ptr<Contestant> make_in_place(const Task& task) {
    return std::make_unique<OurSession>(task, Landing::in_place, CombinePath::read);
}
std::unique_ptr<Contestant> make_landing(const Task& task) {
    return std::make_unique<OurSession>(task, task.options().landing, CombinePath::read);
}
std::unique_ptr<Contestant> make_padded(const Task& task) {
    return std::make_unique<OurSession>(task, Landing::padded, CombinePath::push);
}

}  // namespace switchyard::bench
