// The contract between ranks: attach windows, put bytes into a peer's window, then raise a flag there.
//
// Promised:   a raise() is seen after every put() and raise() to the same peer, and after every store of the calling thread
//             through reach(), that came before it. Puts of one thread to the same bytes are seen in their order. attach()
//             has the same outcome on every rank that comes back from it.
// Open:       the order of puts to different places; the order between different peers; when a put becomes visible before a
//             raise that follows it; whether it becomes visible before a raise that it follows; whether a rank can be reached.
// Relied on:  8-byte aligned flags, one writer per flag, values that only grow; offsets inside the window.
//
// A transport moves bytes and flags. It does not know tokens, formats or the layout of a window; where the bell lies it is
// told. Only attach() and sleep() wait. tests/transport_test.cpp runs one suite of contract tests on every transport; that of
// the simulation, whose ranks have no threads, is in tests/sim_test.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/clock.hpp"
#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

/// A place in the window of a rank.
struct Place {
    int rank;
    uint64_t offset;  ///< bytes from the start of that window
};

/// What a rank brings to attach().
struct AttachRequest {
    /// Shown to every other rank before anything is mapped: options, version, or why this rank refuses. At most card_bytes_max.
    std::span<const std::byte> card;
    /// Size of this rank's window. Windows are mapped only when all ranks ask for the same size above 0, with the same bell.
    size_t window_bytes = 0;
    /// Where in every window 8 bytes lie for sleeping, at a multiple of 8: two u32, `bell` and `sleepers`, zero at first.
    size_t bell_offset = 0;
    /// Whether the window lies in reserved huge pages. All of it is taken at once then: what is missing is known here, not by a
    /// signal later.
    HugePages huge_pages = HugePages::automatic;
};

/// What a window was given.
struct WindowMemory {
    size_t page_bytes = 0;
    std::vector<int> nodes;  ///< NUMA nodes it is bound to; empty: where it is touched first
};

inline constexpr size_t card_bytes_max = 64 * 1024;

class Transport {
 public:
    virtual ~Transport() = default;
    Transport(const Transport&) = delete;
    Transport& operator=(const Transport&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }

    /// Joins the group and maps the windows. Called once, first. Waits for all ranks, at most until `deadline`.
    /// On success `cards[r]` is the card of rank r, on every rank; the windows are there, fresh pages zero, unless the sizes
    /// differ or are 0: then window() and reach() stay null, and the cards tell why. An error of one rank is everybody's,
    /// at once; timed_out names the ranks that did not come.
    virtual Status attach(const AttachRequest& request, Deadline deadline, std::vector<std::vector<std::byte>>* cards) = 0;

    /// This rank's window, page aligned, or null before attach. Stays mapped until the transport is destroyed.
    virtual std::byte* window() = 0;

    /// What this rank's window lies in, after attach.
    virtual const WindowMemory& memory() const = 0;

    /// A pointer to that rank's window when it can be loaded and stored directly, else null. reach(rank()) is window().
    virtual std::byte* reach(int peer) = 0;

    /// Copies `bytes` to every place. `data` may be reused when it returns.
    virtual void put(std::span<const Place> places, const void* data, size_t bytes) = 0;

    /// Stores a flag (8 aligned bytes at `offset`) in that rank's window, with release order.
    virtual void raise(int peer, uint64_t offset, uint64_t value) = 0;

    /// Wakes the ranks that sleep on what was raised since the last ring(). Call it after a series of raises.
    virtual void ring() = 0;

    /// Makes progress. Never blocks.
    virtual void poll() = 0;

    /// True once that rank's process has ended: none of its stores is still under way. Never blocks. Its window stays readable.
    virtual bool lost(int peer) = 0;

    /// Ends that rank's process where this can be done; lost() tells when it has ended. False where it cannot. Never blocks.
    virtual bool kill(int) { return false; }

    // ---- sleeping: announce(); look at the flags once more; sleep(ticket, slice) unless all there; awake()
    /// Says that this rank is about to sleep; returns a ticket. A raise whose ring() does not see the announcement
    /// is seen by a look at the flags after it.
    virtual uint32_t announce() = 0;
    /// Sleeps until the bell differs from `ticket` or `slice_ns` have passed. May wake early.
    virtual void sleep(uint32_t ticket, int64_t slice_ns) = 0;
    /// Takes the announcement back.
    virtual void awake() = 0;
    /// Wakes the threads of this rank itself that sleep: what the caller stored before is seen by their look after announce().
    virtual void nudge() {}

 protected:
    Transport(int rank, int size) : rank_(rank), size_(size) {}

 private:
    const int rank_;
    const int size_;
};

/// Ranks as threads of this process. One element per rank; attach() of all of them must run at the same time.
/// With `reachable` false reach() of other ranks is null and rows travel by put(), as between hosts.
std::vector<std::unique_ptr<Transport>> make_local_transports(int ranks, bool reachable = true);

/// What processes of one host need to find each other.
struct ShmGroup {
    int rank = 0;
    int size = 1;
    std::string name;   ///< equal on all ranks, different for groups that live at the same time on one host
    std::string token;  ///< equal on all ranks; a stranger without it is refused. May be empty
};

/// Ranks as processes of one user on one host: memfd windows passed over an abstract Unix socket, nothing left behind.
std::unique_ptr<Transport> make_shm_transport(const ShmGroup& group);

}  // namespace switchyard
