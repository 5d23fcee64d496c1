// Experts' weights in a file, and as many of them in memory as a limit allows: for ranks whose experts do not all fit.
//
//   ExpertMemory::create("layer7.experts", L, expert_bytes, [&](int64_t e, std::byte* to) { ... });      // once
//   ExpertMemory memory = ExpertMemory::open("layer7.experts", {.memory_bytes = int64_t{4} << 30});
//
//   PendingDispatch going = session.dispatch_async(args);
//   going.wait_counted();
//   const auto counts = going.counts();            // they are here before the rows
//   memory.prefetch(counts);                       // reads what is missing while rows travel and experts compute
//   ExpertBatch batch = going.get();
//   for (const int64_t e : memory.order(counts)) {
//       const ExpertMemory::Lease weights = memory.acquire(e);
//       ... rows of expert e, with weights.data() ...
//   }
//
// Uses no session and is of no group: a rank opens the file of its own experts. docs/expert_memory.md has the format of the
// file and what was measured.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "switchyard/status.hpp"

namespace switchyard {

/// How an ExpertMemory is opened.
struct ExpertMemoryOptions {
    int64_t memory_bytes = 0;  ///< the most that experts' weights may take in memory: room for memory_bytes / stride() experts,
                               ///< at least one and no more than there are
    int64_t experts = 0;       ///< how many the file must have; 0 = any
    int64_t expert_bytes = 0;  ///< of what size; 0 = any
    int64_t readers = 2;       ///< threads that read, 1..64
    int64_t chunk_bytes = 1 << 20;  ///< what a reader reads at a time, rounded up to pages: an expert of several chunks is read
                                    ///< by several readers; >= 1
    bool direct = true;             ///< past the page cache (O_DIRECT) where the file system can: weights then take no memory
                                    ///< but memory_bytes
    int64_t timeout_ms = 30000;     ///< deadline of one acquire, >= 1
};

/// What an ExpertMemory has done since it was opened.
struct ExpertMemoryStats {
    uint64_t hits = 0;             ///< acquires that found their expert in memory
    uint64_t misses = 0;           ///< acquires that had to wait for it; those that failed are in neither
    uint64_t prefetches = 0;       ///< experts whose reading prefetch() began
    uint64_t prefetches_used = 0;  ///< of these, acquired afterwards, whether they were there in time or not
    uint64_t prefetches_lost = 0;  ///< of these, given up or driven out before they were acquired
    uint64_t bytes_read = 0;       ///< of the file
    int64_t wait_ns = 0;           ///< spent waiting in acquire
    int64_t read_ns = 0;           ///< in which something was being read; 1 - wait_ns / read_ns is the share that was hidden
};

/// The experts of one file. Calls, and the ends of leases, come from one thread at a time; the readers are its own threads and
/// sleep when there is nothing to read. Everything is allocated at open. In a forked child every call throws stale, and leased
/// weights are not there.
///
/// Who is driven out when an expert needs room: of those that nobody holds, the one whose last lease ended the longest ago, but
/// none that the last prefetch() has announced and that was not acquired since, while there is another way.
class SY_API ExpertMemory {
 public:
    /// Writes a file of `experts` experts of `expert_bytes` each: fill(e, to) writes the weights of expert e, 0..experts-1 in
    /// order, to `to` [expert_bytes], which is zero and page aligned. The file is whole and on disk when it appears: it is
    /// written beside under another name first, and replaces what had its own. Allocates one expert. Throws Error: bad_input
    /// (sizes below 1, or a file too large for 63 bits), system (what the system refuses, no room for one); and what fill
    /// throws. Nothing is left of a file that could not be written.
    static void create(const std::string& path, int64_t experts, int64_t expert_bytes,
                       const std::function<void(int64_t expert, std::byte* to)>& fill);
    /// The same from weights in memory: experts[e] points to expert_bytes bytes. bad_input also for null.
    static void create(const std::string& path, std::span<const void* const> experts, int64_t expert_bytes);

    /// Takes the memory, touched and all, and starts the readers; reads nothing but the header. A symbolic link is followed.
    /// Throws Error: system (the file cannot be opened, no memory, no thread), bad_input (an option; no file of experts),
    /// corrupt (a damaged header, a file that is too short), mismatch (another version, or not the experts that are expected).
    static ExpertMemory open(const std::string& path, const ExpertMemoryOptions& options);

    ExpertMemory(ExpertMemory&&) noexcept;
    ExpertMemory& operator=(ExpertMemory&&) noexcept;
    ~ExpertMemory();  ///< waits for chunks that are being read, for no others. Leases stay good

    /// An expert's weights, kept in memory until this ends. Does not wait.
    class SY_API Lease {
     public:
        Lease() = default;
        Lease(Lease&& other) noexcept;
        Lease& operator=(Lease&& other) noexcept;
        ~Lease();

        const std::byte* data() const { return data_; }  ///< [expert_bytes], page aligned; null in an empty lease
        int64_t expert() const { return expert_; }       ///< -1 in an empty lease

     private:
        friend class ExpertMemory;
        std::shared_ptr<void> memory_;
        const std::byte* data_ = nullptr;
        int64_t expert_ = -1;
    };

    /// Announces a computation: counts [experts()], rows of each. Begins to read the experts that have rows and are not in
    /// memory, in the order that order() gives, as far as there is room, and goes on as leases end. An expert with rows is not
    /// driven out from now on until it is acquired, so that each is read at most once for this computation if it is done
    /// in the order of order(). Takes the place of what was announced before; reads that are not for this one are given up.
    /// With two computations under way announce their sum.
    ///
    /// Never waits for a read, allocates nothing. Throws bad_input: not experts() counts, or one below 0.
    void prefetch(std::span<const int64_t> counts);

    /// The experts with rows, in the order in which they should be computed: those in memory first, since each makes room for
    /// another one when it is done; then those being read, in their order, then the others; among equals the ones with fewer
    /// rows first, so that room comes soon and the experts in demand are there the next time. Experts are independent of each
    /// other: results do not depend on it. A view, good until the next call of this. Allocates nothing; throws as prefetch.
    std::span<const int64_t> order(std::span<const int64_t> counts);

    /// Waits until the expert's weights are in memory, at most timeout_ms (0: that of the options), and holds them there. An
    /// expert that is held already can be leased again. What was not read yet is read at once, before all that is
    /// announced. Allocates nothing. Throws Error: bad_input (no expert of the file, timeout_ms below 0), capacity (leases
    /// hold all the room; tells how many), timed_out (reading goes on), system (the file cannot be read, or was cut short; the
    /// next acquire tries again).
    Lease acquire(int64_t expert, int64_t timeout_ms = 0);

    int64_t experts() const;
    int64_t expert_bytes() const;
    int64_t stride() const;  ///< bytes that an expert takes in the file and in memory: expert_bytes in whole pages
    int64_t room() const;    ///< how many experts there is room for in memory
    bool is_resident(int64_t expert) const;  ///< in memory, whole
    bool direct() const;                     ///< whether reads go past the page cache
    ExpertMemoryStats stats() const;

 private:
    struct Impl;
    explicit ExpertMemory(std::shared_ptr<Impl> impl);
    Impl& impl(const char* call) const;
    std::shared_ptr<Impl> impl_;
};

}  // namespace switchyard
