#include "contestant.hpp"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace switchyard::bench {

Memory::Memory(int64_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* p = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(p);
    std::memset(data_, 0xA5, static_cast<size_t>(bytes));
}
Memory::Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}
Memory::~Memory() {
    if (data_) munmap(data_, static_cast<size_t>(bytes_));
}

layout::RowLayout Task::row() const {
    return layout::row_layout(options().dispatch_quant, options().dtype, options().hidden);
}
layout::RowLayout Task::wire() const {
    return layout::row_layout(options().combine_quant, options().dtype, options().hidden);
}

std::vector<int32_t> Task::owners() const {
    std::vector<int32_t> owner(static_cast<size_t>(options().experts));
    for (int r = 0; r < ranks(); ++r)
        for (int64_t e = experts(r).first; e < experts(r).last; ++e) owner[static_cast<size_t>(e)] = r;
    return owner;
}

bool Task::oversubscribed() const {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) != 0 || CPU_COUNT(&set) < ranks();
}

// Compiled for each instruction set: a consumer with narrow loads would hide what a cache can give. Four sums in registers, so
// that additions do not wait for each other and only loads count.
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
uint64_t
read_bytes(const std::byte* data, int64_t bytes) {
    using Words = uint64_t __attribute__((vector_size(64)));
    Words a{}, b{}, c{}, d{};
    int64_t i = 0;
    for (; i + 256 <= bytes; i += 256) {
        Words w, x, y, z;
        std::memcpy(&w, data + i, 64);
        std::memcpy(&x, data + i + 64, 64);
        std::memcpy(&y, data + i + 128, 64);
        std::memcpy(&z, data + i + 192, 64);
        a += w, b += x, c += y, d += z;
    }
    a += b + c + d;
    uint64_t sum = 0;
    for (int j = 0; j < 8; ++j) sum += a[j];
    for (; i < bytes; ++i) sum += static_cast<uint64_t>(data[i]);
    return sum;
}

namespace {
constexpr int64_t stream_bytes_min = 2 << 20;
}
Move move_for(const quant::Kernels& kernels, int64_t bytes_in_all) {
    return bytes_in_all >= stream_bytes_min ? kernels.stream : kernels.copy;
}
const char* move_name(int64_t bytes_in_all) {
    return bytes_in_all >= stream_bytes_min ? "streaming stores" : "ordinary stores";
}

const std::vector<ContestantInfo>& contestants() {
    static const std::vector<ContestantInfo> all = {
        {"limit", "each rank streams as many rows to its own memory; sums as many rows of its own memory", false, false, 2,
         make_limit},
        {"packed", "Switchyard: counts, then every row to its final place; combine reads the experts' rows", false, false, 2,
         make_packed},
        {"in_place", "Switchyard: only counts and source info move, rows are read at home; combine reads", false, false, 2,
         make_in_place},
        {"padded", "Switchyard: fixed cells, gaps closed by a copy; combine pushes rows home", false, false, 4, make_padded},
        {"sample", "the CANN sample's protocol: a put per (token, k), flags, window copy; combine puts rows home", false, false,
         4, make_sample},
        {"allgather", "every token to every rank, each picks its experts' rows; combine puts rows home", false, false, 4,
         make_allgather},
#ifdef SY_BENCH_MPI
        {"open_mpi", "pack, MPI_Alltoall of counts, MPI_Alltoallv, reorder; combine the way back", true, false, 6,
         make_open_mpi},
#endif
#ifdef SY_BENCH_GLOO
        {"gloo", "the same steps with gloo::alltoall and gloo::alltoallv over TCP on the loopback device", false, false, 6,
         make_gloo},
#endif
        {"landing", "Switchyard with the landing of its shape; combine reads", false, true, 4, make_landing},
        {"memcpy_memory", "memcpy of rows from memory", false, true, 0, make_memcpy_memory},
        {"encode_memory", "encode of rows from memory", false, true, 0, make_encode_memory},
        {"memcpy_cache", "memcpy of rows from cache", false, true, 0, make_memcpy_cache},
        {"encode_cache", "encode of rows from cache", false, true, 0, make_encode_cache},
    };
    return all;
}

const ContestantInfo* find_contestant(const std::string& name) {
    for (const ContestantInfo& c : contestants())
        if (name == c.name) return &c;
    return nullptr;
}

}  // namespace switchyard::bench
