// A window that all ranks map, and the wait for something in it: what contestants without a session build on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "switchyard/session.hpp"
#include "transport/transport.hpp"

namespace switchyard::bench {

class SharedWindow {
 public:
    /// Meets the other ranks and maps a window of `bytes` per rank; the first 64 bytes of it are taken. Throws Error.
    SharedWindow(const Group& group, const std::string& label, int64_t bytes, bool oversubscribed);

    static constexpr int64_t first_free = 64;

    std::byte* at(int rank, int64_t offset) const { return link_->reach(rank) + offset; }
    std::byte* own(int64_t offset) const { return link_->window() + offset; }

    /// Raises a flag in that rank's window; wake() wakes those who sleep on what was raised since.
    void raise(int rank, int64_t offset, uint64_t value) { link_->raise(rank, static_cast<uint64_t>(offset), value); }
    void wake() { link_->ring(); }
    /// Acquire: everything that was stored before the flag was raised is visible.
    uint64_t flag(int64_t offset) const;

    /// Returns when there() is true: spins at first when every rank has a CPU of its own, then sleeps. Throws Error when a rank
    /// has died or nothing came for a minute. Returns how long it waited, in ns.
    template <class There>
    int64_t await(There there) {
        if (there()) return 0;
        const int64_t start = now_ns();
        int64_t spin_until = start + spin_ns_;
        for (;;) {
            if (there()) return now_ns() - start;
            if (now_ns() < spin_until) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
                continue;
            }
            const uint32_t ticket = link_->announce();
            const bool here = there();
            if (!here) link_->sleep(ticket, 10'000'000);
            link_->awake();
            if (here) return now_ns() - start;
            // A rank that has ended may have raised its last flag before.
            if (const Status gone = missing(start); !gone.ok() && !there()) throw Error(gone);
            spin_until = now_ns() + std::min<int64_t>(spin_ns_, 20'000);
        }
    }

 private:
    Status missing(int64_t start_ns) const;
    std::unique_ptr<Transport> link_;
    int64_t spin_ns_;
};

/// All ranks meet here before each timed call.
class StartLine {
 public:
    StartLine(const Group& group, bool oversubscribed);

    struct Start {
        int64_t at_ns;      ///< when the last rank came: the same number on every rank
        uint64_t of_first;  ///< word of rank 0
        uint64_t of_any;    ///< all words, or-ed
    };
    Start meet(uint64_t word = 0);

 private:
    struct Arrival {
        int64_t at_ns;
        uint64_t word;
    };
    // A rank can be one meeting ahead of another, never two: two places per rank are enough.
    static int64_t flag_at(int rank) { return SharedWindow::first_free + int64_t{rank} * 128; }
    static int64_t arrival_at(int rank, uint64_t meeting) {
        return flag_at(rank) + 64 + static_cast<int64_t>(meeting % 2) * 16;
    }
    const int rank_, ranks_;
    SharedWindow window_;
    uint64_t meeting_ = 0;
};

}  // namespace switchyard::bench
