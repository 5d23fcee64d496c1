// The index-driven sparse all-to-all by itself: rows of bytes go where an index sends them, and come back.
//
//   auto exchange = Exchange::open({.payload_bytes = {2 * H, 4}, .experts = E, .items_max = T}, Group::from_environment());
//   Received rows = exchange.send({.payloads = {x, ids}, .items = T, .expert_indices = experts});
//   ... rows.payload(0) etc.; answers to rows.answer(0) ...
//   exchange.send_back(rows, {.payloads = {out, nullptr}});
//
// A session sends tokens; this sends anything: up to eight payloads of any size per item travel with one routing. It runs on
// the same engine, with the same deadlines and errors: bad input of any rank is an error on all of them in the same call,
// before anybody has received anything. The pieces of the routing are plain functions below; `switchyard verify --local` shows
// them at work.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "switchyard/session.hpp"

namespace switchyard {

// ------------------------------------------------------------------------------------------------------- building blocks

/// counts [E]: how often each expert occurs among `indices` [n]; -1 is skipped. Throws bad_input: an index outside
/// -1..E-1, named with its place.
SY_API void count_experts(std::span<const int32_t> indices, std::span<int64_t> counts);

/// offsets [E+1]: the running sum of counts [E], from 0: rows of expert e lie in offsets[e]..offsets[e+1]-1. Throws bad_input:
/// a negative count, or sizes that do not fit each other.
SY_API void offsets_of(std::span<const int64_t> counts, std::span<int64_t> offsets);

/// permutation [number of used indices]: for each place in the order by expert, which index stands there. Stable: indices
/// of one expert keep their order. `offsets` [E+1] are those of the same indices. Throws bad_input.
SY_API void permutation_of(std::span<const int32_t> indices, std::span<const int64_t> offsets, std::span<int64_t> permutation);

/// to[i] = from[permutation[i] / repeat], rows of `row_bytes`: packs items in the order by expert. `repeat` = topk when an item
/// has several indices. `from` has `items` rows. Throws bad_input: an entry that points outside.
SY_API void reorder(const void* from, int64_t items, int64_t row_bytes, std::span<const int64_t> permutation, int64_t repeat,
                    void* to);

// -------------------------------------------------------------------------------------------------------------- exchange

inline constexpr int payloads_max = 8;

struct ExchangeOptions {
    // ---- equal on all ranks
    std::vector<int64_t> payload_bytes;  ///< bytes of one item in each payload, 1..8 of them, each >= 1
    int64_t experts = 0;                 ///< E, destinations; spread over the ranks like a session's experts. 0 = one per rank
    int64_t topk = 1;                    ///< K, destinations per item
    int64_t items_max = 0;               ///< the most items any rank passes to one send
    int64_t rows_max = 0;                ///< rows a rank can receive in one send; 0 = the worst case
    Landing strategy = Landing::automatic;  ///< how rows travel; never changes a byte of the result
    int64_t group_ranks = 0;                ///< of strategy two_level
    int64_t depth = 2;                      ///< sends in flight before the oldest must be sent back or dropped
    // ---- this rank only
    int64_t workers = 1;
    int64_t timeout_ms = 30000;
};

/// Input of send. Pointers may be null where there are no items.
struct SendArgs {
    std::array<const void*, payloads_max> payloads{};  ///< [n, payload_bytes[p]] each, dense
    int64_t items = 0;                                 ///< n, 0..items_max
    const int32_t* expert_indices = nullptr;           ///< [n,K], 0..E-1, or -1 for an unused one
    const int64_t* send_counts = nullptr;  ///< [E] if set: must be what the indices say, or it is a mismatch on all ranks
    const int64_t* recv_counts = nullptr;  ///< [R] if set: rows expected from each rank; others are a mismatch on all ranks
                                           ///< that names the pair
    uint64_t tag = 0;                      ///< if set, must be equal on all ranks
    int64_t timeout_ms = 0;                ///< deadline of this call; 0 = the exchange's
};

/// Input of alltoallv: items lie in the order of the ranks they go to.
struct AlltoallvArgs {
    std::array<const void*, payloads_max> payloads{};  ///< [sum of send_counts, payload_bytes[p]] each, dense
    const int64_t* send_counts = nullptr;              ///< [R] items for each rank
    const int64_t* recv_counts = nullptr;              ///< [R] if set: items expected from each rank
    uint64_t tag = 0;
    int64_t timeout_ms = 0;
};

/// Input of send_back.
struct SendBackArgs {
    /// [n,K, payload_bytes[p]] each, dense: where the answer to each (item, k) of this rank goes. Places of unused indices are
    /// left alone. Null, where there are several: not wanted.
    std::array<void*, payloads_max> payloads{};
    int64_t timeout_ms = 0;
};

/// What one rank received in one send: views into the window, valid until send_back or destruction; every accessor but epoch()
/// throws stale after that.
class SY_API Received {
 public:
    Received() = default;

    int64_t rows() const;  ///< N, by (local expert, source rank, item, k)

    /// Payload p of the rows where they lie: row i at data + i * stride. The first call may copy them there.
    struct Rows {
        const std::byte* data;
        int64_t stride;  ///< bytes
    };
    Rows payload(int p) const;
    /// Payload p of row i, wherever the strategy keeps it; copies nothing.
    const std::byte* row(int p, int64_t i) const;

    /// Where the answers of send_back go, payload p: row i at data + i * stride.
    struct Answers {
        std::byte* data;
        int64_t stride;  ///< bytes
    };
    Answers answer(int p) const;

    std::span<const int32_t> source_info() const;   ///< [N,3] (source rank, item, k)
    std::span<const int64_t> recv_counts() const;   ///< [L,R] rows of each local expert from each rank
    std::span<const int64_t> recv_offsets() const;  ///< [L+1] first row of each local expert
    std::span<const int64_t> send_counts() const;   ///< [E] rows of mine for each expert
    std::span<const int64_t> send_offsets() const;  ///< [E+1] their running sum
    std::span<const int64_t> permutation() const;   ///< [rows of mine] index n*K+k at each place of the order by expert
    uint64_t epoch() const;                         ///< number of this send

 private:
    friend class Exchange;
    void refuse_stale() const;
    const std::vector<int64_t>& parts() const;

    std::shared_ptr<void> exchange_;
    const std::vector<int64_t>* parts_ = nullptr;  // where each payload begins in a row
    ExpertBatch batch_;
    std::vector<int64_t> recv_counts_, send_counts_, send_offsets_, permutation_;
};

class SY_API Exchange {
 public:
    /// Opens this rank's part: meets the others, compares the options, maps the windows. Every rank gets the same outcome.
    /// Throws as Session::open.
    static Exchange open(const ExchangeOptions& options, const Group& group);
    /// Ranks as threads of this process.
    static std::vector<Exchange> open_local(const ExchangeOptions& options, int ranks);
    static std::vector<Exchange> open_local(std::span<const ExchangeOptions> options);

    Exchange(Exchange&&) noexcept;
    Exchange& operator=(Exchange&&) noexcept;
    ~Exchange();

    /// Sends each item to the owners of its indices and returns what this rank's experts received. Waits for all ranks. Throws
    /// as Session::dispatch. Allocates the tables of Received.
    Received send(const SendArgs& args);

    /// The same with counts instead of indices: of an exchange with one expert per rank and topk 1. The rows received lie by
    /// (source rank, item).
    Received alltoallv(const AlltoallvArgs& args);

    /// Brings the answers home, where the items came from. Waits for all ranks. Uses `rows` up. Throws as Session::combine.
    void send_back(Received& rows, const SendBackArgs& args);
    void send_back(Received&& rows, const SendBackArgs& args) { send_back(rows, args); }

    void close();

    int rank() const;
    int size() const;
    const ExchangeOptions& options() const;  ///< with every `automatic` and 0 replaced by what is used
    SessionStats stats() const;
    Session& session();  ///< the engine below: its trace, waits, shrink

 private:
    struct Impl;
    explicit Exchange(std::shared_ptr<Impl> impl);
    Impl& impl() const;
    std::shared_ptr<Impl> impl_;
};

}  // namespace switchyard
