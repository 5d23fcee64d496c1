// The threads of one rank that move rows: the caller and `count - 1` helpers that sleep between calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace switchyard::ep {

class Workers {
 public:
    /// Throws std::system_error when a thread cannot be started; those that were are stopped first.
    explicit Workers(int64_t count) {
        try {
            for (int64_t i = 1; i < count; ++i) helpers_.emplace_back([this, i] { serve(i); });
        } catch (...) {
            stop();
            throw;
        }
    }
    ~Workers() { stop(); }
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;

    int64_t count() const { return static_cast<int64_t>(helpers_.size()) + 1; }

    /// Runs task(worker) on every worker, 0 being the caller, and returns when all have ended: their stores are then
    /// visible to the caller, except streaming stores, which each task fences itself. Does not allocate.
    template <class Task>
    void run(Task&& task) {
        if (helpers_.empty()) return task(int64_t{0});
        call_ = [](void* t, int64_t worker) { (*static_cast<std::remove_reference_t<Task>*>(t))(worker); };
        task_ = &task;
        // Pairs with the acquire of the last wait below through the helpers' own fetch_sub. model: left_store
        left_.store(static_cast<int64_t>(helpers_.size()), std::memory_order_relaxed);
        // Pairs with the acquire in serve(): a helper that sees the new round sees the task. model: round_add
        round_.fetch_add(1, std::memory_order_release);
        round_.notify_all();
        task(int64_t{0});
        // Pairs with the fetch_sub in serve(): zero means that every helper's stores are visible. model: join
        for (int64_t left; (left = left_.load(std::memory_order_acquire)) != 0;) left_.wait(left, std::memory_order_acquire);
    }

    /// The same for items 0..items-1 in pieces of `grain`: body(worker, first, last). end(worker) runs once on each
    /// worker after its last piece: the place for its fence.
    template <class Body, class End>
    void split(int64_t items, int64_t grain, Body&& body, End&& end) {
        if (helpers_.empty() || items <= grain) {
            if (items > 0) body(int64_t{0}, int64_t{0}, items);
            return end(int64_t{0});
        }
        std::atomic<int64_t> next{0};
        run([&](int64_t worker) {
            // Relaxed: only the numbers handed out matter; run() orders the data. model: split_body
            for (int64_t first; (first = next.fetch_add(grain, std::memory_order_relaxed)) < items;)
                body(worker, first, first + grain < items ? first + grain : items);
            end(worker);
        });
    }

 private:
    void stop() {
        stop_ = true;
        // Pairs with the acquire in serve(): a helper that sees the new round sees stop_.
        round_.fetch_add(1, std::memory_order_release);
        round_.notify_all();
        for (std::thread& t : helpers_) t.join();
    }
    void serve(int64_t worker) {
        uint32_t seen = 0;
        for (;;) {
            // Pairs with the release fetch_add in run() and in the destructor. model: round_load
            round_.wait(seen, std::memory_order_acquire);
            seen = round_.load(std::memory_order_acquire);  // model: round_load
            if (stop_) return;
            call_(task_, worker);
            // Pairs with the acquire load in run(): this worker's stores come before its count-down. model: count_down
            if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_one();
        }
    }

    std::vector<std::thread> helpers_;
    std::atomic<uint32_t> round_{0};
    std::atomic<int64_t> left_{0};
    bool stop_ = false;
    void (*call_)(void*, int64_t) = nullptr;
    void* task_ = nullptr;
};

}  // namespace switchyard::ep
