// Time: monotonic nanoseconds, and the one deadline of a call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ctime>

namespace switchyard {

/// Nanoseconds of the monotonic clock.
inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

/// The moment at which a call gives up. Made once at the call's entry and passed down to everything that waits.
struct Deadline {
    int64_t at_ns = 0;
    int64_t start_ns = 0;

    static Deadline after_ms(int64_t ms) {
        ms = std::min(ms, int64_t{1} << 40);  // 35 years; in nanoseconds it fits
        const int64_t start = now_ns();
        return {start + ms * 1'000'000, start};
    }
    bool passed() const { return now_ns() >= at_ns; }
    int64_t left_ns() const { return at_ns - now_ns(); }
    /// How long the call has run, in milliseconds, for texts.
    int64_t waited_ms() const { return (now_ns() - start_ns) / 1'000'000; }
};

}  // namespace switchyard
