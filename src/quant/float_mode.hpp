// The floating point mode every number kernel runs in: round to nearest even, subnormals kept, no traps.
//
// A caller may have flush-to-zero, denormals-are-zero or another rounding set; with them the same row would give other
// bytes on another machine. A kernel holds a FloatMode while it calls the function that does the arithmetic. That function
// must not be inlined into the holder, or the compiler may move arithmetic across the change of mode.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

#if defined(__GNUC__)
#define SY_NOINLINE __attribute__((noinline))
#else
#define SY_NOINLINE
#endif

namespace switchyard::quant {

/// Sets the mode while it lives and puts the caller's back. Costs a register read where the mode is already right.
class FloatMode {
 public:
    FloatMode() : saved_(read()) {
        if ((saved_ & kControl) != kStandard) write(kStandard);
    }
    ~FloatMode() {
        if ((saved_ & kControl) != kStandard) write(saved_);
    }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__) || defined(__i386__)
    using Register = uint32_t;
    static constexpr Register kControl = 0xFFC0;   // MXCSR without its sticky exception flags
    static constexpr Register kStandard = 0x1F80;  // every exception masked, nearest even, no FTZ, no DAZ
    static Register read() {
        return _mm_getcsr();
    }
    static void write(Register value) {
        _mm_setcsr(value);
    }
#elif defined(__aarch64__)
    using Register = uint64_t;
    static constexpr Register kControl = ~Register{0};  // FPCR holds control bits only
    static constexpr Register kStandard = 0;
    static Register read() {
        Register value;
        asm volatile("mrs %0, fpcr" : "=r"(value));
        return value;
    }
    static void write(Register value) {
        asm volatile("msr fpcr, %0" : : "r"(value) : "memory");
    }
#else
    // Other processors: the C library's default mode is the standard one, and nothing here can change it.
    using Register = uint32_t;
    static constexpr Register kControl = 0;
    static constexpr Register kStandard = 0;
    static Register read() {
        return 0;
    }
    static void write(Register) {}
#endif
    Register saved_;
};

}  // namespace switchyard::quant
