// The pipeline around an all-to-all library: pack, counts, rows, reorder; and the way back. What the library does is left open.
//
// Dispatch: rows sorted by (owner, expert) into one send buffer, each token encoded once; an all-to-all of counts per expert;
// an all-to-all of rows with their scales; the received rows, which lie by (source, expert), reordered by (expert, source).
// Combine: the experts' rows back into the order in which they came, encoded where a format is set; the all-to-all of rows
// backwards; the sum at home straight from the receive buffer.
#pragma once

#include <span>

#include "contestant.hpp"
#include "wire_rows.hpp"

namespace switchyard::bench {

class Collective : public Contestant {
 public:
    explicit Collective(const Task& task);

    void dispatch() final;
    Delivered delivered() final { return {task_.rows, expand_x_.data(), scales_.data()}; }
    uint64_t first_touch(FirstTouch) final { return read_bytes(expand_x_.data(), expand_x_.bytes()); }
    void* y() final { return y_.data(); }
    void combine(void* out) final;
    Moved moved() const final;

 protected:
    /// One block of `block` numbers to every rank and from every rank.
    virtual void exchange_counts(const int32_t* send, int32_t* received, int64_t block) = 0;
    /// Rows of `row_bytes` bytes: `send_rows[p]` to rank p, `received_rows[p]` from it, without gaps, in order of ranks.
    virtual void exchange_rows(const std::byte* send, std::span<const int64_t> send_rows, std::byte* received,
                               std::span<const int64_t> received_rows, int64_t row_bytes) = 0;
    /// The two sizes of rows that are exchanged.
    int64_t row_bytes_out() const { return sent_.row_bytes(); }
    int64_t row_bytes_home() const { return home_.row_bytes(); }

 private:
    void pack();
    void reorder();
    template <class Do>
    void each_block(Do do_block) const;

    Summer home_;
    const int64_t local_max_;
    SentRows sent_;
    const std::vector<int32_t> owner_;
    std::vector<int32_t> counts_sent_, counts_received_;  // [R*local_max]
    std::vector<int64_t> rows_sent_, rows_received_;      // [R]
    std::vector<int64_t> next_;                           // [E] place of the next row in the send buffer
    std::vector<int64_t> place_;                          // [T*K] where each row lies there
    Memory send_, received_, expand_x_, scales_, y_, send_home_, received_home_;
};

}  // namespace switchyard::bench
