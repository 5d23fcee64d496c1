// The bytes of a fuzzer as numbers and choices. What the bytes do not say is zero, so that every input is a whole one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace switchyard::fuzz {

class Input {
 public:
    Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}

    bool empty() const { return left_ == 0; }
    uint8_t byte() { return left_ == 0 ? uint8_t{0} : (--left_, *data_++); }
    bool flag() { return (byte() & 1) != 0; }
    /// 0..n-1, for n up to 256.
    int below(int n) { return byte() % n; }
    template <class T>
    T one_of(std::initializer_list<T> choices) {
        return choices.begin()[below(static_cast<int>(choices.size()))];
    }
    uint64_t word() {
        uint64_t value = 0;
        const size_t n = std::min(left_, sizeof value);
        std::memcpy(&value, data_, n);
        skip(n);
        return value;
    }
    /// A number as mistakes have them: small, near a limit, or any.
    int64_t number() {
        const uint8_t kind = byte();
        switch (kind % 8) {
            case 0: return static_cast<int8_t>(byte());
            case 1: return int64_t{INT32_MAX} - static_cast<int8_t>(byte());
            case 2: return int64_t{INT32_MIN} + static_cast<int8_t>(byte());
            case 3: return INT64_MAX - byte();
            case 4: return INT64_MIN + byte();
            case 5: return int64_t{1} << byte() % 63;
            case 6: return static_cast<int64_t>(word());
            default: return kind / 8;
        }
    }
    /// At most `most` bytes, as many as the next byte says.
    std::string text(size_t most) {
        const size_t n = std::min({size_t{byte()}, most, left_});
        std::string s(reinterpret_cast<const char*>(data_), n);
        skip(n);
        return s;
    }
    /// All that is left.
    std::string rest() {
        std::string s(reinterpret_cast<const char*>(data_), left_);
        skip(left_);
        return s;
    }

 private:
    void skip(size_t n) {
        data_ += n;
        left_ -= n;
    }
    const uint8_t* data_;
    size_t left_;
};

/// Ends the process with a text: what a fuzzer takes for a find.
#define SY_HOLDS(condition, ...)                                                               \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: %s does not hold: ", __FILE__, __LINE__, #condition); \
            std::fprintf(stderr, __VA_ARGS__);                                                 \
            std::fputc('\n', stderr);                                                          \
            std::abort();                                                                      \
        }                                                                                      \
    } while (false)

}  // namespace switchyard::fuzz
