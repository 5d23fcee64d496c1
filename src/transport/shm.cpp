// Ranks as processes of one user on one host: each window is a memfd that every rank maps.
//
// Promised:   after attach() no socket and no descriptor of memory is open, nothing lies in any file system, and the memory
//             goes with the last process that maps it. A lost rank's window stays mapped. A child after fork() has none of the
//             windows; destroying its copy of the transport does not disturb the parent.
// Relied on:  rendezvous.hpp, which brings the ranks together and passes the descriptors.
#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "switchyard/inspect.hpp"
#include "transport/mapped.hpp"
#include "transport/rendezvous.hpp"

namespace switchyard {

namespace {

// lost() asks the system at most this often; in between it repeats what it knows.
constexpr int64_t look_every_ns = 20'000;

// The windows of all ranks in this process.
class Windows {
 public:
    Windows() = default;
    Windows(const Windows&) = delete;
    Windows& operator=(const Windows&) = delete;
    // In a child after fork() these addresses are not mapped (MADV_DONTFORK), or are something else's by now.
    ~Windows() {
        if (getpid() == owner_) unmap();
    }

    Status map(int rank, const std::vector<FileDescriptor>& memory, uint64_t bytes) {
        owner_ = getpid();
        for (size_t r = 0; r < memory.size(); ++r) {
            uint64_t page_bytes = 0;
            Status status = check_shared_memory(memory[r].get(), bytes, static_cast<int>(r), &page_bytes);
            const uint64_t whole = (bytes + page_bytes - 1) / std::max<uint64_t>(page_bytes, 1) * page_bytes;
            void* p = MAP_FAILED;
            if (status.ok()) {
                p = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory[r].get(), 0);
                if (p == MAP_FAILED) status = map_refused(rank, static_cast<int>(memory.size()), bytes, errno);
            }
            if (!status.ok()) {
                unmap();
                return status;
            }
            madvise(p, whole, MADV_DONTFORK);
            madvise(p, whole, MADV_HUGEPAGE);  // a wish: not every kernel grants it
            starts_.push_back(static_cast<std::byte*>(p));
            bytes_.push_back(whole);
            // Its owner binds it, before anybody can touch it: that is after the verdict, which waits for this rank.
            if (static_cast<int>(r) == rank) memory_ = {page_bytes, bind_near(p, whole)};
        }
        return {};
    }
    void unmap() {
        for (size_t r = 0; r < starts_.size(); ++r) munmap(starts_[r], bytes_[r]);
        starts_.clear();
        bytes_.clear();
    }
    const std::vector<std::byte*>& starts() const { return starts_; }
    const WindowMemory& memory() const { return memory_; }

 private:
    pid_t owner_ = 0;
    std::vector<std::byte*> starts_;
    std::vector<uint64_t> bytes_;  // mapped: whole pages
    WindowMemory memory_;
};

class ShmTransport final : public MappedTransport {
 public:
    explicit ShmTransport(const ShmGroup& group) : MappedTransport(group.rank, group.size, true), group_(group) {}

    Status attach(const AttachRequest& request, Deadline deadline, std::vector<std::vector<std::byte>>* cards) override {
        if (Status status = check_group(group_); !status.ok()) return status;
        if (std::exchange(attach_called_, true)) {
            return {Code::bad_input, fmt::format("attach on rank {} was called before; a transport attaches once.", rank())};
        }
        Offer offer;
        offer.card = request.card;
        offer.shape = {request.window_bytes, request.bell_offset};
        offer.refusal = prepare(request, &offer);

        Meeting meeting;
        Status status;
        if (size() == 1) {
            status = std::move(offer.refusal);
            meeting.cards.emplace_back(request.card.begin(), request.card.end());
            meeting.shapes.push_back(offer.shape);
            meeting.windows.push_back(std::move(offer.window));
            if (status.ok()) status = take(meeting);
        } else {
            status = meet(group_, std::move(offer), deadline, &meeting, [&] { return take(meeting); });
        }
        if (!status.ok()) {
            windows_.unmap();
            return status;
        }
        processes_ = std::move(meeting.processes);
        *cards = std::move(meeting.cards);
        if (!windows_.starts().empty())
            use_windows(windows_.starts(), request.window_bytes, request.bell_offset, windows_.memory());
        return {};
    }

    bool kill(int peer) override {
        if (peer < 0 || peer >= size() || peer == rank() || processes_.empty()) return false;
        // By its descriptor, not its number: the number may belong to another process by now.
        return syscall(SYS_pidfd_send_signal, processes_[static_cast<size_t>(peer)].get(), SIGKILL, nullptr, 0) == 0;
    }

    bool lost(int peer) override {
        if (peer < 0 || peer >= size() || peer == rank() || processes_.empty()) return false;  // a lone rank has none either
        look();
        // Partner: the store in look(). It says only that the process is gone; what the process stored before its end is
        // ordered by the system, which reports the end after the last store.
        return lost_[static_cast<size_t>(peer)].load(std::memory_order_acquire);
    }

 private:
    // Makes what this rank brings to the meeting.
    Status prepare(const AttachRequest& request, Offer* offer) {
        if (Status status = check_request(request); !status.ok()) return status;
        if (request.window_bytes > 0) {
            const char* name = inspect::window_name;  // by which the group is found from outside
            if (wants_huge_pages(request.huge_pages, request.window_bytes))
                make_huge_memory(name, request.window_bytes, &offer->window);
            if (!offer->window.valid() && request.huge_pages == HugePages::yes)
                return huge_pages_refused(rank(), request.window_bytes, errno);
            if (!offer->window.valid())
                if (Status status = make_shared_memory(name, request.window_bytes, &offer->window); !status.ok()) return status;
        }
        if (size() == 1) return {};
        offer->process = FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
        if (offer->process.valid()) return {};
        const int error = errno;
        offer->window.reset();  // its number may be what is missing for the socket that tells the others
        if (error == EMFILE || error == ENFILE) return system_refused("pidfd_open", rank(), error);
        return {Code::system,
                fmt::format("attach on rank {}: pidfd_open: {}.\n  Linux 5.3 or newer is needed, and a container whose seccomp "
                            "profile allows the call.",
                            rank(), std::strerror(error))};
    }

    // Maps the windows and starts to watch the processes. `meeting` keeps the descriptors: rank 0 still deals them.
    Status take(Meeting& meeting) {
        if (shapes_fit(meeting.shapes)) {
            Status status = windows_.map(rank(), meeting.windows, meeting.shapes.front().window_bytes);
            if (!status.ok()) return status;
        }
        if (size() == 1) return {};  // nobody to watch
        ends_ = FileDescriptor(epoll_create1(EPOLL_CLOEXEC));
        if (!ends_.valid()) return system_refused("the other ranks' processes cannot be watched", rank(), errno);
        for (int r = 0; r < size(); ++r) {
            if (r == rank()) continue;
            epoll_event event = {};
            event.events = EPOLLIN;
            event.data.u32 = static_cast<uint32_t>(r);
            if (epoll_ctl(ends_.get(), EPOLL_CTL_ADD, meeting.processes[static_cast<size_t>(r)].get(), &event) != 0) {
                return system_refused("the other ranks' processes cannot be watched", rank(), errno);
            }
        }
        lost_ = std::make_unique<std::atomic<bool>[]>(meeting.processes.size());
        return {};
    }

    // Asks the system who has ended. Level-triggered and never changed afterwards: a child after fork() shares this epoll.
    void look() {
        const int64_t now = now_ns();
        // Partner: the store below, of another thread of this rank; two that look at once do no harm.
        if (now - looked_at_ns_.load(std::memory_order_relaxed) < look_every_ns) return;
        looked_at_ns_.store(now, std::memory_order_relaxed);
        std::array<epoll_event, 64> events;
        const int count = epoll_wait(ends_.get(), events.data(), static_cast<int>(events.size()), 0);
        // When more have ended than there is room for, the system names the others next time.
        for (int i = 0; i < count; ++i) {
            const uint32_t peer = events[static_cast<size_t>(i)].data.u32;
            lost_[peer].store(true, std::memory_order_release);  // partner: the load in lost()
        }
    }

    const ShmGroup group_;
    bool attach_called_ = false;
    Windows windows_;
    std::vector<FileDescriptor> processes_;  // pidfd of every other rank; empty until attached
    FileDescriptor ends_;                    // epoll over them
    std::unique_ptr<std::atomic<bool>[]> lost_;
    std::atomic<int64_t> looked_at_ns_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_shm_transport(const ShmGroup& group) {
    return std::make_unique<ShmTransport>(group);
}

}  // namespace switchyard
