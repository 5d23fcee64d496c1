// The encoder against memcpy on the same buffers: one rank alone, rows from memory and rows from cache.
#include <fmt/format.h>

#include <cstring>

#include "contestant.hpp"

namespace switchyard::bench {
namespace {

// From memory: far more than any cache holds. From cache: input and output fit into the second level.
constexpr int64_t memory_bytes = 192 << 20;
constexpr int64_t cache_bytes = 112 << 10;
constexpr int64_t cache_turns = 64;

class Encoding final : public Contestant {
 public:
    Encoding(const Task& task, bool encodes, bool cached)
        : Contestant(task),
          encodes_(encodes),
          rows_(std::max<int64_t>(1, (cached ? cache_bytes : memory_bytes) / task.token_bytes())),
          turns_(cached ? cache_turns : 1),
          from_(rows_ * task.token_bytes()),
          to_(rows_ * task.token_bytes()),
          scales_(task.row().scale_bytes()) {
        // Real tokens, or zeros would make an encoder look fast.
        const auto& x = task.input.x;
        for (int64_t i = 0; i < rows_; ++i)
            std::memcpy(from_.data() + i * task.token_bytes(),
                        x.data() + i * task.token_bytes() % static_cast<int64_t>(x.size()),
                        static_cast<size_t>(task.token_bytes()));
    }

    std::string settings() const override {
        return fmt::format("{} of {} rows, {} times, row by row, {} kernels", encodes_ ? "encode" : "memcpy", rows_, turns_,
                           task_.kernels.name);
    }

    void dispatch() override {
        const Options& o = task_.options();
        const int64_t bytes = task_.token_bytes(), payload_bytes = task_.row().payload_bytes;
        for (int64_t turn = 0; turn < turns_; ++turn)
            for (int64_t i = 0; i < rows_; ++i) {
                if (encodes_)
                    task_.kernels.encode(o.dispatch_format(), o.dtype, from_.data() + i * bytes, o.hidden,
                                         to_.data() + i * payload_bytes, scales_.data());
                else
                    std::memcpy(to_.data() + i * bytes, from_.data() + i * bytes, static_cast<size_t>(bytes));
            }
    }

    bool delivers() const override { return false; }
    bool combines() const override { return false; }
    void* y() override { return nullptr; }
    void combine(void*) override {}
    Moved moved() const override { return {turns_ * from_.bytes(), 0}; }

 private:
    const bool encodes_;
    const int64_t rows_, turns_;
    Memory from_, to_, scales_;
};

}  // namespace

std::unique_ptr<Contestant> make_memcpy_memory(const Task& task) {
    return std::make_unique<Encoding>(task, false, false);
}
std::unique_ptr<Contestant> make_encode_memory(const Task& task) {
    return std::make_unique<Encoding>(task, true, false);
}
std::unique_ptr<Contestant> make_memcpy_cache(const Task& task) {
    return std::make_unique<Encoding>(task, false, true);
}
std::unique_ptr<Contestant> make_encode_cache(const Task& task) {
    return std::make_unique<Encoding>(task, true, true);
}

}  // namespace switchyard::bench
