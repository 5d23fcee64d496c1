// A contestant: one way to dispatch and combine, played by one rank, in the same process as all others.
//
// A round is: the model writes x to input(); all ranks meet; dispatch(); first_touch(); the experts write y(); all ranks meet;
// combine(). Only dispatch, first_touch and combine are timed. Contestants allocate when they are made, not in these calls,
// as far as their own code goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "case.hpp"
#include "quant/quant.hpp"
#include "switchyard/session.hpp"

namespace switchyard::bench {

/// Memory of this rank alone, page aligned, touched once when it is made so that no timed call meets a fresh page.
class Memory {
 public:
    Memory() = default;
    explicit Memory(int64_t bytes);
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;
    ~Memory();
    std::byte* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data_);
    }

 private:
    std::byte* data_ = nullptr;
    int64_t bytes_ = 0;
};

/// What one rank works on. Lives as long as its contestants.
struct Task {
    const tools::Case& shape;
    const Group group;  ///< a name of its own for every contestant
    const quant::Kernels& kernels;
    const tools::Input& input;  ///< of this rank
    const int64_t rows;         ///< this rank will receive

    const Options& options() const { return shape.options; }
    int rank() const { return group.rank; }
    int ranks() const { return group.size; }
    int64_t tokens() const { return shape.tokens[static_cast<size_t>(group.rank)]; }
    int64_t slots() const { return tokens() * shape.options.topk; }
    int64_t token_bytes() const { return shape.token_bytes(); }
    layout::RowLayout row() const;   ///< of dispatch, on the wire
    layout::RowLayout wire() const;  ///< of combine, on the wire
    ExpertRange experts(int rank_of) const { return experts_of(rank_of, group.size, shape.options.experts); }
    std::vector<int32_t> owners() const;  ///< [E] rank of each expert
    bool oversubscribed() const;          ///< more ranks than CPUs: whoever waits must give its CPU away
};

/// Rows as a contestant delivered them, for the check: in order of (local expert, source rank, token, k).
struct Delivered {
    int64_t rows = 0;
    std::byte* expand_x = nullptr;
    std::byte* scales = nullptr;  ///< null without scales
};

/// The least multiple of `to` that is not below `bytes`.
constexpr int64_t up(int64_t bytes, int64_t to = 64) {
    return (bytes + to - 1) / to * to;
}

/// How a consumer reads the rows it received for the first time.
enum class FirstTouch { where_they_lie, tiles };
inline constexpr int64_t tile_rows = 32;

/// Bytes that one call's own code has moved on this rank: every copy counted, and each byte once (as it is written, or in
/// a sum as it is read). Copies inside the kernel or another library's transfer count once.
struct Moved {
    int64_t dispatch = 0;
    int64_t combine = 0;
};

class Contestant {
 public:
    explicit Contestant(const Task& task) : task_(task) {}
    virtual ~Contestant() = default;
    Contestant(const Contestant&) = delete;
    Contestant& operator=(const Contestant&) = delete;

    /// How it was set up, in a few words for the output.
    virtual std::string settings() const = 0;

    /// Where x of the next dispatch is to be written, or null: it is read from the task's input. Called before each dispatch.
    virtual void* input() { return nullptr; }
    virtual void dispatch() = 0;

    /// False for a limit: it moves as many bytes, but to nobody. Its y is [K,T+1] rows: those of its own tokens for
    /// each k, and one that keeps the rows of a token from lying at the same place in all pages.
    virtual bool delivers() const { return true; }
    /// False when there is only a dispatch.
    virtual bool combines() const { return true; }
    /// The rows of the last dispatch; may copy them together first.
    virtual Delivered delivered() { return {}; }

    /// Reads every row of the last dispatch once. Returns a sum, so that nothing is left out.
    virtual uint64_t first_touch(FirstTouch) { return 0; }
    virtual bool can_touch(FirstTouch how) const { return delivers() && how == FirstTouch::where_they_lie; }

    /// Where the experts write their output, [rows,H], after dispatch.
    virtual void* y() = 0;
    /// out [T,H]
    virtual void combine(void* out) = 0;

    virtual Moved moved() const = 0;
    /// Time spent waiting for others since the contestant was made, or -1 when it cannot tell.
    virtual int64_t waited_ns() const { return -1; }
    /// The same by the rank that was lacking, [R], or empty.
    virtual std::vector<int64_t> waited_by_rank() const { return {}; }

 protected:
    const Task& task_;
};

/// Reads `bytes` from memory, once.
uint64_t read_bytes(const std::byte* data, int64_t bytes);

/// Ordinary stores where the rows of one call stay in cache, streaming stores where they do not: as Switchyard does.
using Move = void (*)(void*, const void*, size_t);
Move move_for(const quant::Kernels& kernels, int64_t bytes_in_all);
const char* move_name(int64_t bytes_in_all);

/// The contestants this build has, in the order in which they are listed.
struct ContestantInfo {
    const char* name;
    const char* text;
    bool starts_by_mpirun;
    bool is_part;  ///< of a bar: does not dispatch, and takes part only when it is named
    int copies;    ///< how often it keeps the task's K * T rows of tokens, all buffers together: what memory it takes
    std::unique_ptr<Contestant> (*make)(const Task&);
};
const std::vector<ContestantInfo>& contestants();
const ContestantInfo* find_contestant(const std::string& name);

std::unique_ptr<Contestant> make_limit(const Task& task);
std::unique_ptr<Contestant> make_packed(const Task& task);
std::unique_ptr<Contestant> make_in_place(const Task& task);
std::unique_ptr<Contestant> make_landing(const Task& task);
std::unique_ptr<Contestant> make_padded(const Task& task);
std::unique_ptr<Contestant> make_sample(const Task& task);
std::unique_ptr<Contestant> make_allgather(const Task& task);
std::unique_ptr<Contestant> make_open_mpi(const Task& task);
std::unique_ptr<Contestant> make_gloo(const Task& task);
std::unique_ptr<Contestant> make_memcpy_memory(const Task& task);
std::unique_ptr<Contestant> make_encode_memory(const Task& task);
std::unique_ptr<Contestant> make_memcpy_cache(const Task& task);
std::unique_ptr<Contestant> make_encode_cache(const Task& task);

}  // namespace switchyard::bench
