// One walk over a window gives both its size and every address in it: take() hands out offsets in order.
#pragma once

#include "layout/row.hpp"

namespace switchyard::layout {

/// Hands out places one after another. Overflow is remembered, not wrapped: bytes() is then limit_exceeded.
class Region {
 public:
    static constexpr uint64_t limit_exceeded = ~uint64_t{0};
    /// The largest window: half of the 47-bit address space of a process.
    static constexpr uint64_t limit = uint64_t{1} << 46;

    /// Offset of `count` items of `bytes_each`, aligned to `align` (a power of two).
    SY_HD constexpr uint64_t take(uint64_t count, uint64_t bytes_each, uint64_t align) {
        at_ = (at_ + align - 1) & ~(align - 1);
        const uint64_t start = at_;
        if (over_ || (bytes_each != 0 && count > (limit - (start < limit ? start : limit)) / bytes_each)) {
            over_ = true;
            return 0;
        }
        at_ = start + count * bytes_each;
        return start;
    }

    SY_HD constexpr uint64_t bytes() const { return over_ ? limit_exceeded : at_; }

 private:
    uint64_t at_ = 0;
    bool over_ = false;
};

}  // namespace switchyard::layout
