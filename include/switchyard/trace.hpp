// What a session did lately, event by event: always noted, kept in a ring, read with Session::trace().
#pragma once

#include <cstdint>

#include "switchyard/status.hpp"

namespace switchyard {

/// What has just been finished. In the order of a dispatch with landing packed and a combine; padded and in_place go from
/// slot_free to rows_out.
enum class Edge : int32_t {
    dispatch_began = 0,
    slot_free = 1,   ///< every rank has closed the epoch that used the slot before
    counts_out = 2,  ///< my counts (or my refusal) are with every rank
    counts_in = 3,   ///< every rank's counts are here
    rows_out = 4,    ///< my rows are with their owners
    rows_in = 5,     ///< every rank's rows are here
    dispatched = 6,  ///< the batch is handed out
    dispatch_failed = 7,
    combine_began = 8,
    y_out = 9,  ///< my experts' output is offered (or pushed home)
    y_in = 10,  ///< every rank's output is there
    combined = 11,
    combine_failed = 12,
    shrunk = 13,  ///< a new generation of the group begins with the next epoch
};
inline constexpr int edges = 14;

/// "counts_in"
SY_API const char* edge_name(Edge edge);

struct TraceEvent {
    int64_t at_ns;       ///< of the monotonic clock, which all processes of a host share
    uint64_t epoch;      ///< number of the dispatch
    int64_t waited_ns;   ///< of the time since the event before, spent waiting
    int32_t waited_for;  ///< rank that was lacking longest in that time, or -1
    Edge edge;
};
static_assert(sizeof(TraceEvent) == 32);

}  // namespace switchyard
