// What went wrong, as a value inside the library and as an exception at its edge.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

/// Part of the library's interface: visible to those who link it.
#ifndef SY_API
#define SY_API [[gnu::visibility("default")]]
#endif

namespace switchyard {

/// Kinds of trouble. The C ABI uses the same numbers.
enum class Code : int32_t {
    ok = 0,
    bad_input = 1,    ///< an argument, id, shape or option is outside what is allowed; the text names it
    mismatch = 2,     ///< ranks disagree about an option, a shape or a version; the text names the pair and the field
    capacity = 3,     ///< more rows than the window holds; the text gives the number needed
    stale = 4,        ///< a batch used twice, after its session closed, or with another session
    depth = 5,        ///< one dispatch more in flight than the session's depth
    peer_lost = 6,    ///< a rank's process ended
    peer_closed = 7,  ///< a rank closed its session
    peer_left = 8,    ///< a rank gave this epoch up, for a reason of its own
    timed_out = 9,    ///< the deadline of the call passed; the text says who was awaited
    system = 10,      ///< the operating system refused something
    corrupt = 11,     ///< a peer's window or message, or a file, holds what no correct program writes
};

/// The name of a code, as it stands in error texts: "bad_input", "timed_out", ...
SY_API const char* code_name(Code code);

/// Success, or a code with a text. Success is a null pointer: free to make, copy and test.
/// The text says what happened, where, expected against found, and what to do next.
class [[nodiscard]] SY_API Status {
 public:
    Status() = default;
    Status(Code code, std::string text) : rep_(std::make_shared<const Rep>(Rep{code, std::move(text)})) {}

    bool ok() const { return rep_ == nullptr; }
    Code code() const { return rep_ ? rep_->code : Code::ok; }
    const std::string& text() const;

 private:
    struct Rep {
        Code code;
        std::string text;
    };
    std::shared_ptr<const Rep> rep_;
};

/// Thrown by the C++ interface; what() is the status text.
class SY_API Error : public std::runtime_error {
 public:
    explicit Error(const Status& status) : std::runtime_error(status.text()), code_(status.code()) {}
    Code code() const { return code_; }

 private:
    Code code_;
};

}  // namespace switchyard
