// Ranks as threads of this process: windows are anonymous memory, attach() is a meeting under one lock.
//
// Promised:   windows live until the last transport of the group is destroyed. Once one rank fails to attach, by its
//             deadline, by its request or by being destroyed, every other rank gets that same error, at once.
// Relied on:  attach() of all ranks at the same time, each on a thread of its own.
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "transport/group_text.hpp"
#include "transport/mapped.hpp"

namespace switchyard {

namespace {

// Memory that is given back by the process that took it. A child after fork() has no such mapping (MADV_DONTFORK), but
// perhaps another one at the same address, which must stay.
class AnonymousWindow {
 public:
    // On refusal start() is null and errno tells why.
    AnonymousWindow(size_t bytes, HugePages huge) : bytes_(bytes), owner_(getpid()) {
        constexpr int what = MAP_PRIVATE | MAP_ANONYMOUS;
        if (wants_huge_pages(huge, bytes)) {
            // Reserved when it is mapped: no page is missing later.
            bytes_ = (bytes + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
            take(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, what | MAP_HUGETLB | huge_2mib, -1, 0), huge_page_bytes);
        }
        if (start_ == nullptr && huge != HugePages::yes) {
            bytes_ = bytes;
            // NORESERVE: a window is sized for the worst case; only touched pages cost memory.
            take(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, what | MAP_NORESERVE, -1, 0),
                 static_cast<size_t>(sysconf(_SC_PAGESIZE)));
            if (start_ != nullptr) madvise(start_, bytes_, MADV_HUGEPAGE);  // a wish: not every kernel grants it
        }
    }
    ~AnonymousWindow() {
        if (start_ != nullptr && getpid() == owner_) munmap(start_, bytes_);
    }
    AnonymousWindow(AnonymousWindow&& other) noexcept
        : start_(std::exchange(other.start_, nullptr)),
          bytes_(other.bytes_),
          owner_(other.owner_),
          memory_(std::move(other.memory_)) {}
    AnonymousWindow& operator=(AnonymousWindow&&) = delete;

    std::byte* start() const { return start_; }
    const WindowMemory& memory() const { return memory_; }

 private:
    static constexpr int huge_2mib = 21 << MAP_HUGE_SHIFT;

    void take(void* p, size_t page_bytes) {
        if (p == MAP_FAILED) return;
        start_ = static_cast<std::byte*>(p);
        madvise(p, bytes_, MADV_DONTFORK);
        memory_ = {page_bytes, bind_near(p, bytes_)};
    }

    std::byte* start_ = nullptr;
    size_t bytes_;
    pid_t owner_;
    WindowMemory memory_;
};

// What the ranks of one group share. All fields are guarded by `mutex`; after `complete` nothing changes any more.
struct LocalGroup {
    explicit LocalGroup(int ranks)
        : came(static_cast<size_t>(ranks)),
          shapes(static_cast<size_t>(ranks)),
          cards(static_cast<size_t>(ranks)),
          huge_pages(static_cast<size_t>(ranks)) {}

    std::mutex mutex;
    std::condition_variable changed;
    std::vector<bool> came;
    std::vector<WindowSize> shapes;
    std::vector<std::vector<std::byte>> cards;
    std::vector<HugePages> huge_pages;
    int count = 0;
    bool complete = false;
    Status broken;  // the first error; from then on everybody's
    std::vector<AnonymousWindow> windows;

    // The first error wins. Called with the lock held; returns what is everybody's error.
    const Status& fail(Status status) {
        if (broken.ok()) {
            broken = std::move(status);
            changed.notify_all();
        }
        return broken;
    }

    // Called with the lock held, when the last rank has come.
    void finish(int last) {
        if (shapes_fit(shapes)) {
            const auto ranks = static_cast<int>(shapes.size());
            windows.reserve(shapes.size());
            for (int r = 0; r < ranks; ++r) {
                const HugePages huge = huge_pages[static_cast<size_t>(r)];
                windows.emplace_back(shapes.front().window_bytes, huge);
                if (windows.back().start() == nullptr) {
                    const int error = errno;
                    windows.clear();
                    fail(huge == HugePages::yes ? huge_pages_refused(r, shapes.front().window_bytes, error)
                                                : map_refused(last, ranks, shapes.front().window_bytes, error));
                    return;
                }
            }
        }
        complete = true;
        changed.notify_all();
    }

    Status timed_out(int rank, const Deadline& deadline) const {
        std::vector<int> missing;
        for (size_t r = 0; r < came.size(); ++r) {
            if (!came[r]) missing.push_back(static_cast<int>(r));
        }
        return {Code::timed_out,
                fmt::format("attach timed out on rank {} after {} ms: {} of {} did not come.\n"
                            "  Call attach() of all ranks at the same time, each on a thread of its own, or raise "
                            "timeout_ms.",
                            rank, deadline.waited_ms(), ranks_text(missing), came.size())};
    }
};

class LocalTransport final : public MappedTransport {
 public:
    LocalTransport(std::shared_ptr<LocalGroup> group, int rank, int size, bool reachable)
        : MappedTransport(rank, size, reachable), group_(std::move(group)), owner_(getpid()) {}

    ~LocalTransport() override {
        // In a child after fork() the lock may be held by a thread that does not exist there.
        if (getpid() != owner_) return;
        const std::lock_guard lock(group_->mutex);
        if (!group_->complete) {
            group_->fail(
                {Code::peer_closed,
                 fmt::format("attach failed: rank {} of {} was destroyed before all ranks had attached.", rank(), size())});
        }
    }

    Status attach(const AttachRequest& request, Deadline deadline, std::vector<std::vector<std::byte>>* cards) override {
        std::unique_lock lock(group_->mutex);
        const auto self = static_cast<size_t>(rank());
        if (group_->came[self]) {
            return {Code::bad_input, fmt::format("attach on rank {} was called before; a transport attaches once.", rank())};
        }
        if (Status status = check_request(request); !status.ok()) return group_->fail(std::move(status));
        if (!group_->broken.ok()) return group_->broken;
        group_->came[self] = true;
        group_->huge_pages[self] = request.huge_pages;
        group_->shapes[self] = {request.window_bytes, request.bell_offset};
        group_->cards[self].assign(request.card.begin(), request.card.end());
        if (++group_->count == size()) group_->finish(rank());

        const std::chrono::steady_clock::time_point until{std::chrono::nanoseconds(deadline.at_ns)};
        const bool decided = group_->changed.wait_until(lock, until, [&] { return group_->complete || !group_->broken.ok(); });
        if (!decided) return group_->fail(group_->timed_out(rank(), deadline));
        if (!group_->broken.ok()) return group_->broken;

        *cards = group_->cards;
        if (group_->windows.empty()) return {};
        std::vector<std::byte*> windows;
        for (const AnonymousWindow& window : group_->windows) windows.push_back(window.start());
        use_windows(std::move(windows), request.window_bytes, request.bell_offset, group_->windows[self].memory());
        return {};
    }

    bool lost(int) override { return false; }  // a thread does not end without its process

 private:
    const std::shared_ptr<LocalGroup> group_;
    const pid_t owner_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_local_transports(int ranks, bool reachable) {
    std::vector<std::unique_ptr<Transport>> transports;
    if (ranks < 1) return transports;
    const auto group = std::make_shared<LocalGroup>(ranks);
    for (int r = 0; r < ranks; ++r) transports.push_back(std::make_unique<LocalTransport>(group, r, ranks, reachable));
    return transports;
}

}  // namespace switchyard
