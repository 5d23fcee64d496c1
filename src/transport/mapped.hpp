// The verbs of a transport whose windows are all mapped in this process: base of `local` (threads) and `shm` (processes).
//
// Promised:   nothing is ever written outside a window: a place that does not lie in it, or a flag that is not aligned, is a
//             bug of the caller and ends the process with a text, in every build, before the first byte of that call is stored.
//             put(), raise(), ring(), lost() and the three of sleeping allocate nothing and take no lock; several threads may
//             call them at the same time. A thread rings after its own raises.
// Relied on:  windows of one size, mapped for reading and writing until the transport is destroyed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.hpp"

namespace switchyard {

class MappedTransport : public Transport {
 public:
    std::byte* window() final;
    const WindowMemory& memory() const final { return memory_; }
    std::byte* reach(int peer) final;
    void put(std::span<const Place> places, const void* data, size_t bytes) final;
    void raise(int peer, uint64_t offset, uint64_t value) final;
    void ring() final;
    void poll() final {}  // Nothing travels by itself here: a store is the delivery.
    uint32_t announce() final;
    void sleep(uint32_t ticket, int64_t slice_ns) final;
    void awake() final;
    void nudge() final;

 protected:
    /// With `reachable` false reach() hides the windows of the others.
    MappedTransport(int rank, int size, bool reachable);

    /// What is wrong with a request without asking another rank.
    Status check_request(const AttachRequest& request) const;

    /// Takes the mapped windows of all ranks, in the order of ranks. They belong to the derived class, which unmaps them.
    void use_windows(std::vector<std::byte*> windows, uint64_t window_bytes, uint64_t bell_offset, WindowMemory memory);

 private:
    /// The two words of a window that serve sleeping; all ranks write them, they carry no meaning.
    struct SleepWords {
        uint32_t bell;
        uint32_t sleepers;
    };
    SleepWords& sleep_words(int peer);
    void check_place(const char* verb, int peer, uint64_t offset, uint64_t bytes) const;
    void wake(int peer);

    const bool reachable_;
    std::vector<std::byte*> windows_;  // empty until attach has mapped them
    uint64_t window_bytes_ = 0;
    uint64_t bell_offset_ = 0;
    WindowMemory memory_;
    std::unique_ptr<std::atomic<uint8_t>[]> raised_;  // per peer: 1 = raised since the last ring
};

/// One window as its owner and the others see it: bytes and where they sleep. Windows are mapped when all shapes are equal
/// and not empty; the places of sleeping count too, because a bell elsewhere would never be heard.
struct WindowSize {
    uint64_t window_bytes = 0;
    uint64_t bell_offset = 0;
    friend bool operator==(const WindowSize&, const WindowSize&) = default;
};

/// True when windows are to be mapped.
bool shapes_fit(const std::vector<WindowSize>& shapes);

/// Binds fresh memory to the NUMA nodes near the CPUs this process may use, so that it lies there whoever writes it first.
/// Returns them; empty when there is nothing to choose.
std::vector<int> bind_near(void* start, uint64_t bytes);

/// Whether huge pages are to be tried: `automatic` spares them for windows that fill at least one.
inline constexpr uint64_t huge_page_bytes = 2 << 20;
inline bool wants_huge_pages(HugePages huge, uint64_t window_bytes) {
    return huge == HugePages::yes || (huge == HugePages::automatic && window_bytes >= huge_page_bytes);
}

/// The text of a window for which there are no huge pages, with the cure; `error` is errno.
Status huge_pages_refused(int rank, uint64_t window_bytes, int error);

/// The text of a window that cannot be mapped; `error` is errno.
Status map_refused(int rank, int windows, uint64_t window_bytes, int error);

}  // namespace switchyard
