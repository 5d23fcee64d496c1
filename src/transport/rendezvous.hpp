// How the processes of one group on one host find each other: cards and file descriptors for everybody, and one verdict.
//
// Rank 0 listens on an abstract Unix socket named after the user and the group; the others connect, say who they are, and hand
// in a card, a window (memfd) and their process (pidfd). When all have come, rank 0 deals everything to everybody; each rank
// maps and says so; then rank 0 gives the verdict.
//
// Promised:   meet() has the same outcome on every rank that comes back from it. The verdict is one word in memory shared by
//             all ranks, changed once, from undecided to go or to given up; whoever wants to leave must change it first, and
//             learns so if it was go already. An error ends the wait of all ranks that have come, at once; rank 0 stays up to
//             two seconds, never past its deadline, to tell those that have not. Only processes of the same user that know the
//             token can join, or make the group fail. Nothing is left in the file system or in the name space of sockets,
//             however a process ends.
// Relied on:  Linux; one host, one network namespace; rank 0 sees a dead guest by its pidfd or the end of its connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/clock.hpp"
#include "switchyard/status.hpp"
#include "transport/mapped.hpp"
#include "transport/transport.hpp"

namespace switchyard {

/// Owns a file descriptor.
class FileDescriptor {
 public:
    FileDescriptor() = default;
    explicit FileDescriptor(int fd) : fd_(fd) {}
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept {
        if (this != &other) {
            reset();
            fd_ = std::exchange(other.fd_, -1);
        }
        return *this;
    }
    ~FileDescriptor() { reset(); }

    int get() const { return fd_; }
    bool valid() const { return fd_ >= 0; }
    void reset();

 private:
    int fd_ = -1;
};

/// The text of a call into the system that failed on `rank`, with the limit of open files if that is the reason.
Status system_refused(const char* what, int rank, int error);

/// Memory that processes share: sparse, zero, sealed so that nobody can cut it short under a reader. system on refusal.
Status make_shared_memory(const char* name, uint64_t bytes, FileDescriptor* memory);

/// The same in reserved huge pages, all of them taken at once. False, with errno, when there are not enough.
bool make_huge_memory(const char* name, uint64_t bytes, FileDescriptor* memory);

/// Looks whether a descriptor that came from `rank` is such memory of that size: else a store into it could be a SIGBUS.
/// Fills `page_bytes`; a mapping of it is a multiple of that long.
Status check_shared_memory(int memory, uint64_t bytes, int rank, uint64_t* page_bytes);

/// What one rank brings.
struct Offer {
    std::span<const std::byte> card;
    WindowSize shape;
    FileDescriptor window;   ///< shared memory of shape.window_bytes; none when that is 0
    FileDescriptor process;  ///< pidfd of this process
    Status refusal;          ///< an error: this rank cannot take part, and everybody is to learn why
};

/// What all ranks brought, by rank.
struct Meeting {
    std::vector<std::vector<std::byte>> cards;
    std::vector<WindowSize> shapes;
    std::vector<FileDescriptor> windows;    ///< all valid when the shapes fit
    std::vector<FileDescriptor> processes;  ///< the own one is not there
};

/// What is wrong with a group without asking anybody.
Status check_group(const ShmGroup& group);

/// The name of the group's abstract socket, without the zero byte before it.
std::string door_name(const ShmGroup& group);

/// Brings the ranks of `group` together; group.size >= 2. `map` is called once everything has come, when `meeting` is filled;
/// its error becomes everybody's.
Status meet(const ShmGroup& group, Offer offer, const Deadline& deadline, Meeting* meeting, const std::function<Status()>& map);

}  // namespace switchyard
