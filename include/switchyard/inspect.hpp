// What can be told without a session: what this build is made of, what a group of a given shape needs, and what a group that is
// open somewhere else does: which rank is in which epoch, and who waits for whom. `switchyard doctor` prints all of it.
//
// Nothing here writes to a window, and nothing waits. How the bytes of another process are read is the caller's business
// (process_vm_readv, say): looking at a group costs it nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "switchyard/options.hpp"
#include "switchyard/status.hpp"

namespace switchyard::inspect {

// ------------------------------------------------------------------------------------------------------ build and needs

/// What this library was built from. Its own version is sy_version() of switchyard.h.
struct Build {
    std::string compiler;              ///< "GCC 12.2.0"
    std::string libraries;             ///< "fmt 9.1.0, Highway 1.0.3, hwloc 2.9.0"
    std::vector<std::string> kernels;  ///< sets this build has and this processor can run, best first; "scalar" is always there
    uint32_t window_format = 0;        ///< ranks of one group have the same
};
SY_API Build build();

/// What a group of processes needs from each rank's process.
struct Needs {
    int64_t window_bytes = 0;   ///< address space, and size of a memory file, that each rank's window reserves
    int64_t mapped_bytes = 0;   ///< address space of all windows: every rank maps every one
    int64_t touched_bytes = 0;  ///< of one window, about what dispatch and combine touch when experts get equal shares of
                                ///< tokens_max tokens of every rank; only touched pages cost memory
    int64_t descriptors = 0;    ///< the most files open at a time while the group opens, the program's own not counted
};
/// Computes them; landing automatic counts as packed (choose_landing in strategy.hpp chooses as a session does). bad_input as
/// check_options, capacity when a window fits no address space.
SY_API Status needs_of(const Options& options, int64_t ranks, Needs* needs);

// ------------------------------------------------------------------------------------------------------------- one window

/// A memory file of this name is a window: so it stands in /proc/PID/maps as "/memfd:switchyard-window (deleted)".
inline constexpr const char* window_name = "switchyard-window";

/// What the first bytes of a window say.
struct Window {
    int rank = 0;
    int ranks = 0;
    int64_t process = 0;  ///< id of the rank's process in its own process namespace
    uint64_t bytes = 0;
    Options options;  ///< what decides the layout; the rest has its default. combine_path is read or automatic
};
inline constexpr size_t header_bytes = 136;

/// Reads them from the first header_bytes bytes of a window. stale: the header is not there yet, its owner is still opening the
/// session; mismatch: a window of another format; corrupt: no window.
SY_API Status read_window(std::span<const std::byte> header, Window* window);

// -------------------------------------------------------------------------------------------------------------- a group

/// A rank's process as the system shows it.
enum class Life { unknown, running, stopped, ended };

/// What the caller knows about a rank besides its window.
struct Process {
    int64_t id = 0;  ///< for texts
    Life life = Life::unknown;
};

/// What a rank has told the others: the last epoch for which it has raised each flag, 0 for none.
struct Told {
    uint64_t counted = 0;   ///< its counts (landings packed, alltoallv)
    uint64_t arrived = 0;   ///< its rows; a rank that sends none need not raise it
    uint64_t returned = 0;  ///< its experts' output, or that it never comes
    uint64_t gone = 0;      ///< that it left the epoch with an error
    uint64_t regroup = 0;   ///< generation it asks for in shrink()
    bool closed = false;
    friend bool operator==(const Told&, const Told&) = default;
};

/// Where a rank stands.
enum class Phase {
    unknown,    ///< its window cannot be read
    fresh,      ///< has opened the session and not called dispatch
    gate,       ///< in dispatch: waits until the slot's last epoch has ended everywhere
    counts,     ///< in dispatch: waits for counts
    sending,    ///< in dispatch: moves its rows
    rows,       ///< in dispatch: waits for rows
    batch,      ///< dispatch has returned; combine has not been called
    output,     ///< in combine: waits for the experts' output
    between,    ///< has ended its last epoch, and not begun the next
    departed,   ///< has left its last epoch with an error, and not begun the next
    shrinking,  ///< in shrink()
    closed,     ///< has closed its session
    left,       ///< not of the group any longer, since a shrink()
    ended,      ///< its process has ended
};

struct Member {
    int rank = 0;
    Process process;
    Told told;
    Phase phase = Phase::unknown;
    uint64_t epoch = 0;        ///< of the phase
    std::vector<int> awaited;  ///< ranks that have not given what the phase waits for
    int64_t waited_ms = -1;  ///< how long ago the call began in which it waits; -1: it has not slept in one. A wait that never
                             ///< sleeps is a short one, or one that the rank has given up
    Code code = Code::ok;    ///< departed: why
    std::string reason;      ///< departed: in the rank's own words, or empty
};

struct Group {
    std::vector<Member> members;  ///< [R]
    uint64_t generation = 0;      ///< how often it has shrunk
};

/// Copies `bytes` bytes at `offset` of the window of `rank` to `to`; false when they cannot be read.
using Read = std::function<bool(int rank, uint64_t offset, void* to, size_t bytes)>;

/// Looks at a group once. `window` is any one of it; `processes` [R]. What is seen of a group that moves is a blur: look
/// again, and believe what has not changed. Throws nothing of its own; allocates.
SY_API Group look(const Window& window, std::span<const Process> processes, const Read& read);

/// What a rank does, in words: "waits in dispatch 41 for the rows of rank 1".
SY_API std::string phase_text(const Member& member);

/// Something to say about a group that does not move.
struct Remark {
    bool is_trouble = false;  ///< nothing will move before somebody acts
    std::string text;         ///< "rank 0 waits in dispatch 41 for the rows of rank 1, whose process 4711 is stopped; it called
                              ///< 12.3 s ago"
    std::string cure;         ///< or empty
};
/// Who waits for whom, and for whom in the end; ranks that wait for the same in one sentence.
SY_API std::vector<Remark> remarks(const Group& group);

}  // namespace switchyard::inspect
