#include "allocations.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<int64_t> made{0};

void* allocate(std::size_t bytes, std::size_t alignment) {
    made.fetch_add(1, std::memory_order_relaxed);  // a count, orders nothing
    void* p = alignment <= __STDCPP_DEFAULT_NEW_ALIGNMENT__
                  ? std::malloc(bytes ? bytes : 1)
                  : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (!p) throw std::bad_alloc();
    return p;
}
}  // namespace

void* operator new(std::size_t bytes) {
    return allocate(bytes, 1);
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
    return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* p) noexcept {
    std::free(p);
}
void operator delete(void* p, std::size_t) noexcept {
    std::free(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
    std::free(p);
}
void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
    std::free(p);
}

namespace switchyard::bench {
int64_t allocations() {
    return made.load(std::memory_order_relaxed);
}
}  // namespace switchyard::bench
