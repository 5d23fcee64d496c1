#include "switchyard/status.hpp"

#include "switchyard/trace.hpp"

namespace switchyard {

const char* edge_name(Edge edge) {
    constexpr const char* names[edges] = {"dispatch_began", "slot_free",  "counts_out",      "counts_in",     "rows_out",
                                          "rows_in",        "dispatched", "dispatch_failed", "combine_began", "y_out",
                                          "y_in",           "combined",   "combine_failed",  "shrunk"};
    const auto i = static_cast<int32_t>(edge);
    return i >= 0 && i < edges ? names[i] : "unknown";
}

const char* code_name(Code code) {
    switch (code) {
        case Code::ok: return "ok";
        case Code::bad_input: return "bad_input";
        case Code::mismatch: return "mismatch";
        case Code::capacity: return "capacity";
        case Code::stale: return "stale";
        case Code::depth: return "depth";
        case Code::peer_lost: return "peer_lost";
        case Code::peer_closed: return "peer_closed";
        case Code::peer_left: return "peer_left";
        case Code::timed_out: return "timed_out";
        case Code::system: return "system";
        case Code::corrupt: return "corrupt";
    }
    return "unknown";
}

const std::string& Status::text() const {
    static const std::string none;
    return rep_ ? rep_->text : none;
}

}  // namespace switchyard
