// Rows as they travel, payload and then scales in one piece: out, for contestants that quantise once per token, and home, one
// place per (token, k), for contestants that push.
#pragma once

#include "contestant.hpp"
#include "shared_window.hpp"

namespace switchyard::bench {

struct RowSource {
    int32_t rank, token, k;
};

/// Rows on their way out.
class SentRows {
 public:
    explicit SentRows(const Task& task);
    int64_t scales_at() const { return scales_at_; }
    int64_t row_bytes() const { return row_bytes_; }
    /// The row of a token in dispatch's wire format: the token itself, or encoded to scratch.
    const std::byte* of_token(int64_t token);

 private:
    const Task& task_;
    const int64_t scales_at_, row_bytes_;
    std::vector<std::byte> scratch_;
};

/// Sums the rows of one token, given where each lies in combine's wire format (null: unused slot).
class Summer {
 public:
    explicit Summer(const Task& task);
    /// row_at(k) -> first byte of the payload; scales follow at scales_at().
    template <class RowAt>
    void sum(int64_t token, void* out, RowAt row_at) {
        const int64_t topk = task_.options().topk;
        const int32_t* ids = task_.input.topk_ids.data() + token * topk;
        for (int64_t k = 0; k < topk; ++k) {
            const std::byte* row = ids[k] < 0 ? nullptr : row_at(k);
            rows_[static_cast<size_t>(k)] = row;
            scales_[static_cast<size_t>(k)] = row ? row + scales_at_ : nullptr;
        }
        finish(token, out);
    }
    /// A row as it travels: payload, then scales.
    int64_t scales_at() const { return scales_at_; }
    int64_t row_bytes() const { return row_bytes_; }
    bool encoded() const { return encoded_; }
    /// The row in its wire format: `y` itself, or encoded to scratch.
    const std::byte* to_wire(const std::byte* y);

 private:
    void finish(int64_t token, void* out);
    const Task& task_;
    const bool encoded_;
    const int64_t scales_at_, row_bytes_;
    std::vector<const void*> rows_, scales_;
    std::vector<std::byte> scratch_;
};

}  // namespace switchyard::bench
