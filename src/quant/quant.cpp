// Compiles the vector kernels once per instruction set and knows which of them this processor can run.
//
// SY_SCALAR_ONLY leaves them out: then there is only the scalar set, and nothing here needs Highway.
#include "quant/quant.hpp"

#include <array>

#ifndef SY_SCALAR_ONLY
#define HWY_WANT_AVX3_DL  // Ice Lake, Zen 4 and later: bytes of two vectors are picked in one instruction
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)  // vectors of unknown size: NEON serves there
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/quant.cpp"
#include <hwy/foreach_target.h>
// The line above includes this file once per instruction set.
#include "quant/quant-inl.hpp"
#endif

#if defined(SY_SCALAR_ONLY) || HWY_ONCE
namespace switchyard::quant {
namespace {

/// Sets in the order of available_kernels(), as many as there are.
struct Sets {
    std::array<const Kernels*, 8> set{};
    size_t count = 0;
    void add(const Kernels& kernels) { set[count++] = &kernels; }
};

Sets find_sets() {
    Sets sets;
#ifndef SY_SCALAR_ONLY
    const int64_t supported = hwy::SupportedTargets();
#if HWY_TARGETS & HWY_AVX3_DL
    if (supported & HWY_AVX3_DL) sets.add(N_AVX3_DL::kernels<Simd::avx512_dl>("avx512_dl"));
#endif
#if HWY_TARGETS & HWY_AVX3
    if (supported & HWY_AVX3) sets.add(N_AVX3::kernels<Simd::avx512>("avx512"));
#endif
#if HWY_TARGETS & HWY_AVX2
    if (supported & HWY_AVX2) sets.add(N_AVX2::kernels<Simd::avx2>("avx2"));
#endif
#if HWY_TARGETS & HWY_SSE4
    if (supported & HWY_SSE4) sets.add(N_SSE4::kernels<Simd::sse4>("sse4"));
#endif
#if HWY_TARGETS & HWY_SSSE3
    if (supported & HWY_SSSE3) sets.add(N_SSSE3::kernels<Simd::ssse3>("ssse3"));
#endif
#if HWY_TARGETS & HWY_NEON
    if (supported & HWY_NEON) sets.add(N_NEON::kernels<Simd::neon>("neon"));
#endif
#endif
    sets.add(scalar_kernels());
    return sets;
}

}  // namespace

std::span<const Kernels* const> available_kernels() {
    static const Sets sets = find_sets();
    return {sets.set.data(), sets.count};
}

const char* highway_version() {
#ifdef SY_SCALAR_ONLY
    return nullptr;
#else
#define SY_TEXT_OF(x) #x
#define SY_TEXT(x) SY_TEXT_OF(x)
    return SY_TEXT(HWY_MAJOR) "." SY_TEXT(HWY_MINOR) "." SY_TEXT(HWY_PATCH);
#undef SY_TEXT
#undef SY_TEXT_OF
#endif
}

const Kernels* find_kernels(Simd simd) {
    for (const Kernels* set : available_kernels()) {
        if (simd == Simd::automatic || set->simd == simd) return set;
    }
    return nullptr;
}

}  // namespace switchyard::quant
#endif
