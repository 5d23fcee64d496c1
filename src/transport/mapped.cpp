#include "transport/mapped.hpp"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <utility>

#include "core/machine.hpp"
#include "transport/group_text.hpp"

// ThreadSanitizer sees no fences. Under it the fence and the look at `sleepers` become one read-modify-write of `sleepers`.
#if defined(__SANITIZE_THREAD__)
#define SY_SEES_NO_FENCES 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SY_SEES_NO_FENCES 1
#endif
#endif
#ifndef SY_SEES_NO_FENCES
#define SY_SEES_NO_FENCES 0
#endif

namespace switchyard {

namespace {

// The words lie in memory shared by processes: a lock hidden in an atomic would be a different lock in each of them.
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);
static_assert(std::atomic_ref<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint8_t>::is_always_lock_free);

[[noreturn]] void caller_bug(const std::string& text) {
    std::fprintf(stderr, "switchyard: bug in the caller of a transport: %s\n", text.c_str());
    std::fflush(stderr);
    std::abort();
}

// Not FUTEX_PRIVATE: the waker may be another process.
void futex_wake_all(uint32_t* word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void futex_wait(uint32_t* word, uint32_t expected, int64_t at_most_ns) {
    timespec t;
    t.tv_sec = static_cast<time_t>(at_most_ns / 1'000'000'000);
    t.tv_nsec = static_cast<long>(at_most_ns % 1'000'000'000);
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, nullptr, 0);
}

}  // namespace

MappedTransport::MappedTransport(int rank, int size, bool reachable) : Transport(rank, size), reachable_(reachable) {}

Status MappedTransport::check_request(const AttachRequest& request) const {
    if (request.card.size() > card_bytes_max) {
        return {Code::bad_input, fmt::format("attach on rank {}: the card has {} bytes; at most {} are carried.", rank(),
                                             request.card.size(), card_bytes_max)};
    }
    const uint64_t bytes = request.window_bytes;
    const uint64_t bell = request.bell_offset;
    if (bytes > 0 && (bell % sizeof(SleepWords) != 0 || bytes < sizeof(SleepWords) || bell > bytes - sizeof(SleepWords))) {
        return {Code::bad_input, fmt::format("attach on rank {}: the bell lies at {}; it needs {} bytes at a multiple of {} "
                                             "inside a window of {} bytes.",
                                             rank(), bell, sizeof(SleepWords), sizeof(SleepWords), bytes)};
    }
    return {};
}

void MappedTransport::use_windows(std::vector<std::byte*> windows, uint64_t window_bytes, uint64_t bell_offset,
                                  WindowMemory memory) {
    memory_ = std::move(memory);
    raised_ = std::make_unique<std::atomic<uint8_t>[]>(windows.size());
    windows_ = std::move(windows);
    window_bytes_ = window_bytes;
    bell_offset_ = bell_offset;
}

std::byte* MappedTransport::window() {
    return windows_.empty() ? nullptr : windows_[static_cast<size_t>(rank())];
}

std::byte* MappedTransport::reach(int peer) {
    if (windows_.empty() || peer < 0 || peer >= size()) return nullptr;
    if (!reachable_ && peer != rank()) return nullptr;
    return windows_[static_cast<size_t>(peer)];
}

void MappedTransport::check_place(const char* verb, int peer, uint64_t offset, uint64_t bytes) const {
    if (windows_.empty()) caller_bug(fmt::format("{} on rank {} without windows: attach() mapped none", verb, rank()));
    if (peer < 0 || peer >= size()) {
        caller_bug(fmt::format("{} on rank {} to rank {}; ranks are 0..{}", verb, rank(), peer, size() - 1));
    }
    // Compared by subtraction: offset + bytes could wrap around.
    if (bytes > window_bytes_ || offset > window_bytes_ - bytes) {
        caller_bug(fmt::format("{} on rank {} to rank {}: {} bytes at offset {} do not lie in a window of {} bytes", verb,
                               rank(), peer, bytes, offset, window_bytes_));
    }
}

void MappedTransport::put(std::span<const Place> places, const void* data, size_t bytes) {
    for (const Place& place : places) check_place("put", place.rank, place.offset, bytes);
    if (bytes == 0) return;  // null data is legal then
    // memmove, because a rank may put from its own window.
    for (const Place& place : places) std::memmove(windows_[static_cast<size_t>(place.rank)] + place.offset, data, bytes);
}

void MappedTransport::raise(int peer, uint64_t offset, uint64_t value) {
    check_place("raise", peer, offset, sizeof(uint64_t));
    if (offset % sizeof(uint64_t) != 0) {
        caller_bug(fmt::format("raise on rank {} to rank {}: offset {} is not a multiple of 8", rank(), peer, offset));
    }
    auto* word = reinterpret_cast<uint64_t*>(windows_[static_cast<size_t>(peer)] + offset);
    // Pairs with the acquire load of whoever looks at the flag: it sees every put and every store through reach() before it.
    // model: store_release, flag_store
    std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_release);
    // Pairs with the acquire exchange in ring(), which another thread of this rank may run: the flag is stored before its
    // fence. A plain store, not a read-modify-write, so that the flags of several peers travel at the same time.
    // model: mark_store
    raised_[static_cast<size_t>(peer)].store(1, std::memory_order_release);
}

void MappedTransport::ring() {
    if (windows_.empty()) return;
    // In groups of 64, so that a group costs one fence and its set of peers one register. Marks are taken before the fence:
    // a mark set after it belongs to a flag that this fence does not cover, and to the ring() of the thread that set it.
    for (int first = 0; first < size(); first += 64) {
        const int count = std::min(64, size() - first);
        uint64_t taken = 0;
        for (int i = 0; i < count; ++i) {
            std::atomic<uint8_t>& mark = raised_[static_cast<size_t>(first) + static_cast<size_t>(i)];
            // Pairs with the release store of the mark in raise(). When two threads have marked the same peer, the one that
            // takes the mark wakes for both: both flags were visible before their marks, and the exchange comes after both.
            // model: mark_take
            if (mark.load(std::memory_order_relaxed) != 0 && mark.exchange(0, std::memory_order_acquire) != 0) {
                taken |= uint64_t{1} << i;
            }
        }
        if (taken == 0) continue;
#if !SY_SEES_NO_FENCES
        // Pairs with the fence in announce(): either wake() sees the sleeper, or the sleeper's look at the flags sees the flag.
        // model: ring_fence
        std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
        for (; taken != 0; taken &= taken - 1) wake(first + std::countr_zero(taken));
    }
}

MappedTransport::SleepWords& MappedTransport::sleep_words(int peer) {
    return *reinterpret_cast<SleepWords*>(windows_[static_cast<size_t>(peer)] + bell_offset_);
}

void MappedTransport::wake(int peer) {
    SleepWords& words = sleep_words(peer);
    std::atomic_ref<uint32_t> sleepers(words.sleepers);
#if SY_SEES_NO_FENCES
    // Pairs with the read-modify-write in announce(): the later one of the two sees what came before the earlier one.
    // model: sleepers_load
    const uint32_t asleep = sleepers.fetch_add(0, std::memory_order_acq_rel);
#else
    // Ordered after the flags by the fence in ring(). Partner: the addition in announce(). model: sleepers_load
    const uint32_t asleep = sleepers.load(std::memory_order_relaxed);
#endif
    // A rank that died in its sleep stays counted; that costs a call into the system and nothing else.
    if (asleep == 0) return;
    // Pairs with the acquire load in announce(): a ticket that already counts this ring comes with the flags before it.
    // model: bell_add
    std::atomic_ref<uint32_t>(words.bell).fetch_add(1, std::memory_order_release);
    futex_wake_all(&words.bell);  // model: bell_wake
}

uint32_t MappedTransport::announce() {
    check_place("announce", rank(), bell_offset_, sizeof(SleepWords));
    SleepWords& words = sleep_words(rank());
    std::atomic_ref<uint32_t> sleepers(words.sleepers);
#if SY_SEES_NO_FENCES
    // Pairs with the read-modify-write in wake(). model: announce_add
    sleepers.fetch_add(1, std::memory_order_acq_rel);
#else
    // Partner: the load in wake(), ordered by this fence and the one in ring().
    sleepers.fetch_add(1, std::memory_order_relaxed);     // model: announce_add
    std::atomic_thread_fence(std::memory_order_seq_cst);  // model: announce_fence
#endif
    // Pairs with the release addition in wake(). Read before the caller looks at the flags: a ring after that look changes
    // the bell, and sleep() returns. model: announce_ticket
    return std::atomic_ref<uint32_t>(words.bell).load(std::memory_order_acquire);
}

void MappedTransport::sleep(uint32_t ticket, int64_t slice_ns) {
    check_place("sleep", rank(), bell_offset_, sizeof(SleepWords));
    if (slice_ns > 0) futex_wait(&sleep_words(rank()).bell, ticket, slice_ns);  // model: sleep_wait
}

void MappedTransport::awake() {
    check_place("awake", rank(), bell_offset_, sizeof(SleepWords));
    // Partner: the look at `sleepers` in wake(), which may still count this rank and then rings for nobody. model: awake_sub
    std::atomic_ref<uint32_t>(sleep_words(rank()).sleepers).fetch_sub(1, std::memory_order_relaxed);
}

void MappedTransport::nudge() {
    if (windows_.empty()) return;
#if !SY_SEES_NO_FENCES
    // Pairs with the fence in announce(), as that of ring() does. model: nudge_fence
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
    wake(rank());
}

bool shapes_fit(const std::vector<WindowSize>& shapes) {
    for (const WindowSize& shape : shapes) {
        if (shape.window_bytes == 0 || shape != shapes.front()) return false;
    }
    return !shapes.empty();
}

std::vector<int> bind_near(void* start, uint64_t bytes) {
    static const NumaMap map;
    std::vector<int> nodes = map.nodes_near(allowed_cpus());
    if (!map.bind(start, bytes, nodes)) nodes.clear();
    return nodes;
}

Status huge_pages_refused(int rank, uint64_t window_bytes, int error) {
    return {Code::system, fmt::format("attach on rank {}: option huge_pages is yes, but a window of {} finds no room in the "
                                      "reserved huge pages: {}.\n  {}, lower rows_max or tokens_max, or use huge_pages auto.",
                                      rank, bytes_text(window_bytes), std::strerror(error),
                                      error == EFBIG ? "Raise the file size limit (ulimit -f)"
                                                     : "Reserve more (sysctl vm.nr_hugepages=N, pages of 2 MiB as a rule)")};
}

Status map_refused(int rank, int windows, uint64_t window_bytes, int error) {
    const auto all = static_cast<unsigned __int128>(window_bytes) * static_cast<unsigned>(windows);
    const uint64_t total = all > UINT64_MAX ? UINT64_MAX : static_cast<uint64_t>(all);
    return {Code::system, fmt::format("attach on rank {}: {} windows of {} each, {} together, could not be mapped: {}.\n"
                                      "  Lower rows_max or tokens_max, or allow this process more memory (ulimit -v, "
                                      "vm.overcommit_memory).",
                                      rank, windows, bytes_text(window_bytes), bytes_text(total), std::strerror(error))};
}

}  // namespace switchyard
