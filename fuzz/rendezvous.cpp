// The meeting of processes with one that says what it likes: a rank attaches on a thread of its own, and the input plays the
// others through raw sockets, rank 0 or guests, with right and wrong messages, descriptors and hang-ups.
//
// Some inputs open a whole session instead, with the card of a real one to change: of another version, of other options, or one
// that no build makes.
//
// What must hold: attach comes back, with windows that can be touched to their last byte or with a text; no descriptor is left.
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <string_view>
#include <thread>
#include <vector>

#include "ep/exchange.hpp"
#include "input.hpp"
#include "switchyard/session.hpp"
#include "transport/rendezvous.hpp"

namespace switchyard::fuzz {
namespace {

constexpr uint64_t window_bytes = 8192, bell_offset = 128;
constexpr size_t verdict_bytes = 3088;
constexpr int64_t deadline_ms = 200;  // of inputs that make attach wait; most end sooner
constexpr int events_most = 24;
constexpr int ranks_most = 3;
const std::string token = "token";

// A message's first 64 bytes, as docs and rendezvous.cpp have them.
struct Header {
    uint64_t magic = 0x3176'7a64'5957'5359;
    uint32_t version = 1;
    uint32_t kind = 1;
    int32_t rank = 1;
    int32_t size = 2;
    uint32_t token_bytes = 0;
    uint32_t name_bytes = 0;
    uint32_t body_bytes = 0;
    int32_t code = 0;
    uint64_t window_bytes = fuzz::window_bytes;
    uint64_t bell_offset = fuzz::bell_offset;
    int64_t left_ns = int64_t{1} << 42;
};
static_assert(sizeof(Header) == 64);

enum Kind : uint32_t { hello = 1, welcome = 2, refuse = 3, deal = 4, mapped = 5, failed = 6 };

// Sockets, memory and processes. Not all files: the symbolizer of a sanitizer opens pipes at some time.
int open_files() {
    DIR* folder = opendir("/proc/self/fd");
    SY_HOLDS(folder != nullptr, "/proc/self/fd");
    int count = 0;
    while (const dirent* entry = readdir(folder)) {
        std::array<char, 64> what{};
        if (readlinkat(dirfd(folder), entry->d_name, what.data(), what.size() - 1) <= 0) continue;
        for (const char* kind : {"socket:", "/memfd:", "anon_inode:[pidfd]"})
            count += std::string_view(what.data()).starts_with(kind);
    }
    closedir(folder);
    return count;
}

FileDescriptor memory_of(size_t bytes, unsigned seals) {
    FileDescriptor fd(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    SY_HOLDS(ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0, "ftruncate");
    if (seals) SY_HOLDS(fcntl(fd.get(), F_ADD_SEALS, seals) == 0, "seals");
    return fd;
}

Options session_options(int64_t timeout_ms = deadline_ms) {
    Options o;
    o.hidden = 4;
    o.topk = 1;
    o.experts = 2;
    o.tokens_max = 1;
    o.rows_max = 4;
    o.cell_rows = 1;
    o.landing = Landing::packed;
    o.combine_path = CombinePath::read;
    o.huge_pages = HugePages::no;
    o.timeout_ms = timeout_ms;
    return o;
}

layout::Window session_window(int size) {
    return layout::window_of(ep::shape_of(session_options(), size));
}

// What can be sent in a message.
struct Descriptors {
    std::vector<FileDescriptor> all;
    Descriptors() {
        all.emplace_back(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
        all.push_back(memory_of(window_bytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
        all.push_back(memory_of(window_bytes / 2, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
        all.push_back(memory_of(window_bytes, 0));
        all.push_back(memory_of(window_bytes, F_SEAL_SHRINK | F_SEAL_WRITE));
        all.emplace_back(open("/dev/null", O_RDWR | O_CLOEXEC));
        all.emplace_back(eventfd(1, EFD_CLOEXEC));
        all.emplace_back(static_cast<int>(syscall(SYS_pidfd_open, getppid(), 0)));
        for (int size = 2; size <= ranks_most; ++size)
            all.push_back(memory_of(session_window(size).bytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
        for (const FileDescriptor& fd : all) SY_HOLDS(fd.valid(), "descriptor %zu", static_cast<size_t>(&fd - all.data()));
    }
};

class Meeting {
 public:
    explicit Meeting(Input& in) : in_(in), size_(2 + in.below(2)), name_("fuzz-" + std::to_string(getpid())) {
        static const Descriptors known;
        for (const FileDescriptor& fd : known.all) fds_.push_back(fd.get());
        memory_ = fds_[1];
        const std::string door = door_name({0, size_, name_, token});
        address_.sun_family = AF_UNIX;
        std::memcpy(address_.sun_path + 1, door.data(), door.size());
        address_bytes_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + door.size());
    }

    void play() {
        const uint8_t who = in_.byte();
        if (who & 2) {
            // The card first: it is what another meeting of this class hears.
            static const std::string real = Meeting::card_of_rank_0();
            card_ = real;
            opens_session_ = true;
            window_bytes_ = session_window(size_).bytes;
            bell_offset_ = session_window(size_).bell;
            memory_ = fds_[fds_.size() - static_cast<size_t>(1 + ranks_most - size_)];
        }
        if (who & 1)
            play_guests();
        else
            play_rank_0();
    }

 private:
    // The rank under test, on a thread of its own.
    void start(int rank) {
        if (opens_session_) {
            rank_ = std::thread([this, rank] {
                open_session(rank);
                ended_ = true;
            });
            return;
        }
        rank_ = std::thread([this, rank] {
            const auto transport = make_shm_transport({rank, size_, name_, token});
            const std::string card(size_t{40}, 'c');
            std::vector<std::vector<std::byte>> cards;
            const Status s = transport->attach({.card = std::as_bytes(std::span(card.data(), card.size())),
                                                .window_bytes = window_bytes,
                                                .bell_offset = bell_offset,
                                                .huge_pages = HugePages::no},
                                               Deadline::after_ms(deadline_ms), &cards);
            SY_HOLDS(s.ok() || !s.text().empty(), "an error without a text");
            SY_HOLDS(s.ok() || s.code() <= Code::corrupt, "code %d", static_cast<int>(s.code()));
            if (s.ok()) {
                SY_HOLDS(cards.size() == static_cast<size_t>(size_), "%zu cards", cards.size());
                for (int r = 0; r < size_; ++r) {
                    volatile std::byte* window = transport->reach(r);
                    static_cast<void>(transport->lost(r));
                    if (window == nullptr) continue;
                    window[0] = std::byte{1};
                    window[window_bytes - 1] = std::byte{1};
                }
            }
            ended_ = true;
        });
    }

    // As a user does, up to the first dispatch.
    void open_session(int rank) const {
        try {
            Session session =
                Session::open(session_options(timeout_ms_), {.rank = rank, .size = size_, .name = name_, .token = token});
            const std::array<uint16_t, 4> x{};
            const int32_t id = 1;
            static_cast<void>(session.dispatch({.x = x.data(), .tokens = 1, .topk_ids = &id, .timeout_ms = 1}));
        } catch (const Error& error) {
            SY_HOLDS(error.what()[0] != 0, "an error without a text");
            SY_HOLDS(error.code() > Code::ok && error.code() <= Code::corrupt, "code %d", static_cast<int>(error.code()));
        }
    }

    // What rank 0 of a session deals to a guest that does all as it should.
    static std::string card_of_rank_0() {
        Input nothing(nullptr, 0);
        Meeting real(nothing);
        real.opens_session_ = true;
        real.timeout_ms_ = 60'000;  // this one must not pass
        real.window_bytes_ = session_window(real.size_).bytes;
        real.bell_offset_ = session_window(real.size_).bell;
        real.memory_ = real.fds_[real.fds_.size() - static_cast<size_t>(1 + ranks_most - real.size_)];
        real.start(0);
        FileDescriptor guest = real.connect_to_door();
        real.send_made(guest.get(), hello, 1, {real.fds_[0], real.memory_});
        std::string card;
        std::array<char, 4096> bytes;
        for (int message = 0; message < 2; ++message) {  // welcome, deal
            pollfd p = {guest.get(), POLLIN, 0};
            const ssize_t n = ::poll(&p, 1, 60'000) > 0 ? recv(guest.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) : -1;
            SY_HOLDS(n >= static_cast<ssize_t>(sizeof(Header)), "message %d has %ld bytes", message, static_cast<long>(n));
            card.assign(bytes.data() + sizeof(Header), static_cast<size_t>(n) - sizeof(Header));
        }
        guest.reset();
        real.rank_.join();
        SY_HOLDS(!card.empty(), "no card");
        return card;
    }

    FileDescriptor new_socket() const {
        return FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    }

    FileDescriptor connect_to_door() {
        for (int tries = 0; tries < 2000 && !ended_; ++tries) {
            FileDescriptor fd = new_socket();
            if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address_), address_bytes_) == 0) return fd;
            usleep(50);  // it is not listening yet
        }
        return {};
    }

    void send(int socket, const Header& header, const std::string& rest, const std::vector<int>& fds, size_t cut) {
        std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
        bytes += rest;
        bytes.resize(bytes.size() - std::min(cut, bytes.size()));
        iovec part = {bytes.data(), bytes.size()};
        alignas(cmsghdr) std::array<char, CMSG_SPACE(8 * sizeof(int))> control = {};
        msghdr message = {};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        if (!fds.empty()) {
            message.msg_control = control.data();
            message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
            cmsghdr* c = CMSG_FIRSTHDR(&message);
            c->cmsg_level = SOL_SOCKET;
            c->cmsg_type = SCM_RIGHTS;
            c->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
            std::memcpy(CMSG_DATA(c), fds.data(), fds.size() * sizeof(int));
        }
        static_cast<void>(sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT));  // it may be gone
    }

    // A message of that kind, right but for what the input changes.
    void send_made(int socket, uint32_t kind, int rank, std::vector<int> fds) {
        Header h;
        h.kind = kind;
        h.rank = rank;
        h.size = size_;
        std::string with_token = kind == hello ? token : "", with_name = kind == hello ? name_ : "";
        h.window_bytes = window_bytes_;
        h.bell_offset = bell_offset_;
        std::string body = kind == hello || kind == deal ? card_ : "";
        const auto changes = static_cast<unsigned>(in_.byte() | in_.byte() << 8);
        if (changes & 0x1) h.kind = static_cast<uint32_t>(in_.number());
        if (changes & 0x2) h.rank = static_cast<int32_t>(in_.number());
        if (changes & 0x4) h.size = static_cast<int32_t>(in_.number());
        if (changes & 0x8) with_token = in_.text(64);
        if (changes & 0x10) with_name = in_.text(64);
        if (changes & 0x20) change_body(body);
        if (changes & 0x40) h.window_bytes = static_cast<uint64_t>(in_.number());
        if (changes & 0x80) h.bell_offset = static_cast<uint64_t>(in_.number());
        if (changes & 0x100) h.left_ns = in_.number();
        if (changes & 0x200) h.code = static_cast<int32_t>(in_.number());
        if (changes & 0x400) h.version = static_cast<uint32_t>(in_.number());
        if (changes & 0x800) {
            fds.clear();
            for (int n = in_.below(7); n > 0; --n)
                fds.push_back(fds_[static_cast<size_t>(in_.below(static_cast<int>(fds_.size())))]);
        }
        h.token_bytes = static_cast<uint32_t>(with_token.size());
        h.name_bytes = static_cast<uint32_t>(with_name.size());
        h.body_bytes = static_cast<uint32_t>(body.size());
        if (changes & 0x1000) h.token_bytes = static_cast<uint32_t>(in_.number());
        if (changes & 0x2000) h.name_bytes = static_cast<uint32_t>(in_.number());
        if (changes & 0x4000) h.body_bytes = static_cast<uint32_t>(in_.number());
        const size_t cut = changes & 0x8000 ? in_.byte() : 0;
        send(socket, h, with_token + with_name + body, fds, cut);
    }

    void change_body(std::string& body) {
        if (!opens_session_ || body.empty() || in_.below(4) == 0) {
            body = in_.text(255);
            return;
        }
        const size_t words = body.size() / 4;
        for (int n = 1 + in_.below(3); n > 0; --n) {
            const auto value = static_cast<uint32_t>(in_.number());
            std::memcpy(body.data() + 4 * (in_.byte() % words), &value, sizeof value);
        }
        if (in_.below(4) == 0) body.resize(body.size() - std::min(size_t{in_.byte()}, body.size()));
        if (in_.below(4) == 0) body += in_.text(255);
    }

    // Waits for a message and takes it: the next event then comes after what the rank under test did.
    void hear(int socket) const {
        pollfd p = {socket, POLLIN, 0};
        std::array<char, 64> some;
        if (::poll(&p, 1, 20) > 0) static_cast<void>(recv(socket, some.data(), some.size(), MSG_DONTWAIT));
    }

    void drain(int socket) const {
        std::array<char, 256> some;
        while (recv(socket, some.data(), some.size(), MSG_DONTWAIT) > 0) {
        }
    }

    // Rank 0 is under test; the input is everybody who knocks.
    void play_guests() {
        start(0);
        std::array<FileDescriptor, 4> sockets;
        for (int i = 0; i < events_most && !in_.empty() && !ended_; ++i) {
            const uint8_t what = in_.byte();
            FileDescriptor& s = sockets[what & 3];
            const int rank = 1 + (what >> 2) % 3;
            if (!s.valid()) s = connect_to_door();
            if (!s.valid()) break;
            switch (what >> 4) {
                case 0:
                case 1:
                case 2:
                case 3: send_made(s.get(), hello, rank, {fds_[0], memory_}); break;
                case 4:
                case 5: send_made(s.get(), mapped, rank, {}); break;
                case 6: send_made(s.get(), failed, rank, {}); break;
                case 7: s.reset(); break;
                case 8: shutdown(s.get(), SHUT_RD); break;
                case 9: shutdown(s.get(), SHUT_WR); break;
                case 10: hear(s.get()); break;
                case 11: drain(s.get()); break;
                default: {
                    const std::string raw = in_.text(255);
                    static_cast<void>(::send(s.get(), raw.data(), raw.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
                }
            }
        }
        // Ends the meeting, if nothing has: a rank that cannot take part, and the others that want to hear of it.
        std::array<FileDescriptor, ranks_most> last;
        for (int r = 1; r < size_ && !ended_; ++r) {
            last[static_cast<size_t>(r)] = connect_to_door();
            Header h;
            h.rank = r;
            h.size = size_;
            h.code = 1;
            h.token_bytes = static_cast<uint32_t>(token.size());
            h.name_bytes = static_cast<uint32_t>(name_.size());
            send(last[static_cast<size_t>(r)].get(), h, token + name_, {}, 0);
        }
        rank_.join();
    }

    // A guest is under test; the input is rank 0.
    void play_rank_0() {
        FileDescriptor door = new_socket();
        SY_HOLDS(
            bind(door.get(), reinterpret_cast<const sockaddr*>(&address_), address_bytes_) == 0 && listen(door.get(), 8) == 0,
            "door: %s", std::strerror(errno));
        const FileDescriptor verdict = memory_of(verdict_bytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
        start(1);
        FileDescriptor guest;
        while (!ended_ && !guest.valid()) {
            pollfd p = {door.get(), POLLIN, 0};
            if (::poll(&p, 1, 1) > 0)
                guest = FileDescriptor(accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        }
        for (int i = 0; i < events_most && !in_.empty() && !ended_; ++i) {
            const uint8_t what = in_.byte();
            const int rank = (what & 15) % size_;
            switch (what >> 4) {
                case 0:
                case 1:
                case 2: send_made(guest.get(), welcome, rank, {verdict.get(), fds_[0]}); break;
                case 3:
                case 4:
                case 5:
                case 6: send_made(guest.get(), deal, rank, {fds_[0], memory_}); break;
                case 7: send_made(guest.get(), refuse, rank, {}); break;
                case 8: {  // the verdict page
                    const auto word = static_cast<uint32_t>(in_.number());
                    static_cast<void>(pwrite(verdict.get(), &word, 4, 4 * (what & 3)));
                    break;
                }
                case 9: hear(guest.get()); break;
                case 10: drain(guest.get()); break;
                case 11: shutdown(guest.get(), SHUT_WR); break;
                default: {
                    const std::string raw = in_.text(255);
                    static_cast<void>(::send(guest.get(), raw.data(), raw.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
                }
            }
        }
        // A guest that was let in hears of the end; one that was not knocks again and is refused.
        guest.reset();
        while (!ended_) {
            pollfd p = {door.get(), POLLIN, 0};
            if (::poll(&p, 1, 1) <= 0) continue;
            const FileDescriptor again(accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
            Header h;
            h.kind = refuse;
            h.code = 1;
            send(again.get(), h, "", {}, 0);
            while (!ended_ && recv(again.get(), &h, 1, MSG_DONTWAIT) != 0 && errno == EAGAIN) usleep(20);
        }
        rank_.join();
    }

    Input& in_;
    const int size_;
    const std::string name_;
    std::vector<int> fds_;
    bool opens_session_ = false;
    int64_t timeout_ms_ = deadline_ms;
    uint64_t window_bytes_ = fuzz::window_bytes, bell_offset_ = fuzz::bell_offset;
    int memory_ = -1;  // a window as it should be
    std::string card_ = std::string(size_t{40}, 'c');
    sockaddr_un address_ = {};
    socklen_t address_bytes_ = 0;
    std::thread rank_;
    std::atomic<bool> ended_ = false;
};

}  // namespace
}  // namespace switchyard::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace switchyard::fuzz;
    static int before = 0;
    Input in(data, size);
    if (before == 0) {  // what is made once is not a leak
        Input first(reinterpret_cast<const uint8_t*>("\0\3"), 2);
        Meeting(first).play();
    }
    Meeting(in).play();
    const int after = open_files();
    SY_HOLDS(before == 0 || before == after, "%d sockets, memories and processes are open, %d were", after, before);
    before = after;
    return 0;
}
