#include "transport/rendezvous.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>
#include <type_traits>

#include "core/text.hpp"
#include "switchyard/types.hpp"
#include "transport/group_text.hpp"

namespace switchyard {

namespace {

// ---------------------------------------------------------------------------------------------------------------- limits

constexpr size_t name_bytes_max = 1024;  // of a group's name and of its token
constexpr size_t text_bytes_max = 3072;  // of an error text that travels
constexpr size_t fds_max = 2;            // in one message
// How long somebody waits for those who do not know yet that the group has failed: a rank that cannot take part for rank 0,
// rank 0 for ranks that have not come. At most until its deadline.
constexpr int64_t farewell_ns = 2'000'000'000;
// How much earlier than a guest's deadline rank 0 gives up, so that the guest still gets the text that names the missing.
constexpr int64_t head_start_ns = 50'000'000;
// Connections that have not said who they are; one more, and the oldest of them goes. A rank speaks as soon as it is
// connected, so the oldest is a stranger; a rank that is hit all the same connects again.
constexpr size_t strangers_max = 32;

// --------------------------------------------------------------------------------------------------------------- messages

enum class Kind : uint32_t {
    hello = 1,    // guest: rank, size, token, name, shape, card; window and process. With a code: why it cannot take part
    welcome = 2,  // rank 0: you are in; the verdict and the process of rank 0
    refuse = 3,   // rank 0: you are not in; code and text
    deal = 4,     // rank 0: rank, shape, card; process and window
    mapped = 5,   // guest: I have mapped all windows
    failed = 6,   // guest: I give the group up; code and text
};

constexpr uint64_t magic_word = 0x3176'7a64'5957'5359;  // "YSWYdzv1"
constexpr uint32_t format_version = 1;

// Starts every message; token, name and body follow. magic, version, kind, rank, size and token_bytes keep their places in all
// versions, so that a process of another version that knows the token can be named.
struct Header {
    uint64_t magic = magic_word;
    uint32_t version = format_version;
    Kind kind = Kind::hello;
    int32_t rank = 0;
    int32_t size = 0;
    uint32_t token_bytes = 0;
    uint32_t name_bytes = 0;
    uint32_t body_bytes = 0;
    int32_t code = 0;
    uint64_t window_bytes = 0;
    uint64_t bell_offset = 0;
    int64_t left_ns = 0;  // until the sender's deadline
};
static_assert(sizeof(Header) == 64 && std::is_trivially_copyable_v<Header>);

constexpr size_t message_bytes_max = sizeof(Header) + 2 * name_bytes_max + card_bytes_max;

struct Message {
    Header header;
    std::string_view token;
    std::string_view name;
    std::span<const std::byte> body;
    std::vector<FileDescriptor> fds;
    bool fds_cut = false;  // more were sent; usually because this process may open no more

    // The error that travels in a refuse, failed or hello.
    Status status() const {
        const auto first = static_cast<int32_t>(Code::bad_input);
        const auto last = static_cast<int32_t>(Code::corrupt);
        const Code code = header.code >= first && header.code <= last ? static_cast<Code>(header.code) : Code::corrupt;
        std::string text(reinterpret_cast<const char*>(body.data()), std::min(body.size(), text_bytes_max));
        if (text.empty()) text = "attach failed: a process of this group gave the group up without a reason.";
        return {code, printable(std::move(text))};
    }
};

std::span<const std::byte> text_body(const std::string& text) {
    return std::as_bytes(std::span(text.data(), std::min(text.size(), text_bytes_max)));
}

enum class Sent { yes, later, gone };

struct SendResult {
    Sent what;
    int error;  // errno when not sent
};

// Sends one message, all or nothing, without waiting.
SendResult send_message(int socket, Header header, std::string_view token, std::string_view name,
                        std::span<const std::byte> body, std::span<const int> fds) {
    header.token_bytes = static_cast<uint32_t>(token.size());
    header.name_bytes = static_cast<uint32_t>(name.size());
    header.body_bytes = static_cast<uint32_t>(body.size());
    std::array<iovec, 4> parts = {iovec{&header, sizeof header}, iovec{const_cast<char*>(token.data()), token.size()},
                                  iovec{const_cast<char*>(name.data()), name.size()},
                                  iovec{const_cast<std::byte*>(body.data()), body.size()}};
    msghdr message = {};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    alignas(cmsghdr) std::array<char, CMSG_SPACE(fds_max * sizeof(int))> control = {};
    if (!fds.empty()) {
        message.msg_control = control.data();
        message.msg_controllen = CMSG_SPACE(fds.size_bytes());
        cmsghdr* c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(fds.size_bytes());
        std::memcpy(CMSG_DATA(c), fds.data(), fds.size_bytes());
    }
    while (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        // ETOOMANYREFS: as many descriptors of this user are under way as one process may open; receivers will take them.
        if (errno == EAGAIN || errno == ETOOMANYREFS || errno == ENOBUFS) return {Sent::later, errno};
        if (errno != EINTR) return {Sent::gone, errno};
    }
    return {Sent::yes, 0};
}

enum class Received { nothing, message, ended, garbage };

// Receives messages of bounded size; a message is valid until the next one.
class Mailbox {
 public:
    Mailbox() : buffer_(message_bytes_max) {}

    Received receive(int socket, Message* m) {
        m->fds.clear();
        iovec part = {buffer_.data(), buffer_.size()};
        alignas(cmsghdr) std::array<char, CMSG_SPACE(fds_max * sizeof(int))> control;
        msghdr message = {};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        ssize_t got;
        bool reset_seen = false;
        for (;;) {
            message.msg_control = control.data();
            message.msg_controllen = control.size();
            got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
            if (got >= 0) break;
            if (errno == EINTR) continue;
            // The other side closed with something unread. What it had said before comes after this error.
            if (errno == ECONNRESET && !reset_seen) {
                reset_seen = true;
                continue;
            }
            return errno == EAGAIN ? Received::nothing : Received::ended;
        }
        for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
            const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < count; ++i) {
                int fd;
                std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
                m->fds.emplace_back(fd);
            }
        }
        m->fds_cut = (message.msg_flags & MSG_CTRUNC) != 0;
        if (got == 0) return Received::ended;
        const auto bytes = static_cast<size_t>(got);
        if ((message.msg_flags & MSG_TRUNC) != 0 || bytes < sizeof(Header)) return Received::garbage;
        std::memcpy(&m->header, buffer_.data(), sizeof(Header));
        const Header& h = m->header;
        if (h.magic != magic_word || h.token_bytes > name_bytes_max || bytes < sizeof(Header) + h.token_bytes) {
            return Received::garbage;
        }
        const auto* text = reinterpret_cast<const char*>(buffer_.data()) + sizeof(Header);
        m->token = {text, h.token_bytes};
        m->name = {};
        m->body = {};
        if (h.version != format_version) return Received::message;  // whatever follows is not ours to read
        if (h.name_bytes > name_bytes_max || h.body_bytes > card_bytes_max ||
            bytes != sizeof(Header) + h.token_bytes + h.name_bytes + h.body_bytes) {
            return Received::garbage;
        }
        m->name = {text + h.token_bytes, h.name_bytes};
        m->body = std::span(buffer_).subspan(sizeof(Header) + h.token_bytes + h.name_bytes, h.body_bytes);
        return Received::message;
    }

 private:
    std::vector<std::byte> buffer_;
};

// ---------------------------------------------------------------------------------------------------------------- verdict

// One page that all ranks share. `word` changes once; `text` is written by rank 0 alone, before `text_ready`.
struct VerdictPage {
    uint32_t word;
    uint32_t text_ready;
    int32_t code;
    uint32_t text_bytes;
    char text[text_bytes_max];
};

class Verdict {
 public:
    enum Word : uint32_t { undecided = 0, go = 1, given_up = 2 };

    Verdict() = default;
    ~Verdict() {
        if (page_ != nullptr) munmap(page_, sizeof(VerdictPage));
    }
    Verdict(const Verdict&) = delete;
    Verdict& operator=(const Verdict&) = delete;

    // Maps the page; false with errno.
    bool map(int memory) {
        void* p = mmap(nullptr, sizeof(VerdictPage), PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
        if (p == MAP_FAILED) return false;
        madvise(p, sizeof(VerdictPage), MADV_DONTFORK);
        page_ = static_cast<VerdictPage*>(p);
        return true;
    }
    bool there() const { return page_ != nullptr; }

    // Decides, or learns what has been decided before.
    Word decide(Word wish) {
        uint32_t found = undecided;
        // Acquire and release on both outcomes; partner: this same exchange on the other ranks. Who finds go sees that every
        // rank has mapped; who finds given_up sees the text if rank 0 had written it.
        if (std::atomic_ref<uint32_t>(page_->word).compare_exchange_strong(found, wish, std::memory_order_acq_rel)) return wish;
        return found == go ? go : given_up;
    }

    // Rank 0: why the group is given up. Call it before decide().
    void write_text(const Status& why) {
        page_->code = static_cast<int32_t>(why.code());
        const std::string& text = why.text();
        // Not read back from the page, which every guest can write.
        const size_t bytes = std::min(text.size(), text_bytes_max);
        page_->text_bytes = static_cast<uint32_t>(bytes);
        std::memcpy(page_->text, text.data(), bytes);
        // Pairs with the acquire load in text().
        std::atomic_ref<uint32_t>(page_->text_ready).store(1, std::memory_order_release);
    }

    // What rank 0 wrote, if it did.
    std::optional<Status> text() const {
        // Pairs with the release store in write_text().
        if (std::atomic_ref<uint32_t>(page_->text_ready).load(std::memory_order_acquire) == 0) return std::nullopt;
        Message m;
        m.header.code = page_->code;
        // Once: every guest can write the page, and what is bounded must be what is used.
        const size_t bytes = std::atomic_ref<uint32_t>(page_->text_bytes).load(std::memory_order_relaxed);
        m.body = std::as_bytes(std::span(page_->text, std::min(bytes, text_bytes_max)));
        return m.status();
    }

 private:
    VerdictPage* page_ = nullptr;
};

// ---------------------------------------------------------------------------------------------------------------- sockets

std::string member_text(int rank, pid_t process) {
    return fmt::format("rank {} (process {})", rank, process);
}

socklen_t door_address(const std::string& name, sockaddr_un* address) {
    *address = {};
    address->sun_family = AF_UNIX;
    std::memcpy(address->sun_path + 1, name.data(), name.size());  // sun_path[0] stays 0: an abstract name
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

FileDescriptor new_socket() {
    return FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// Room for the largest message, where the system's default is less.
void widen(int socket) {
    int bytes = 0;
    socklen_t length = sizeof bytes;
    if (getsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, &length) == 0 && bytes >= int{4 * message_bytes_max}) return;
    bytes = int{2 * message_bytes_max};  // the system doubles it
    setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

// Ends a connection also where a child of this process still holds a copy of the descriptor.
void hang_up(FileDescriptor& socket) {
    if (socket.valid()) shutdown(socket.get(), SHUT_RDWR);
    socket.reset();
}

// Who is at the other end, as the system says.
bool peer_of(int socket, ucred* peer) {
    socklen_t length = sizeof *peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, peer, &length) == 0;
}

// Whether a descriptor is the process at the other end of a connection. A rank ends when that process does, and kill_missing
// kills it: neither must be somebody else. True also where the system cannot tell: no /proc, or a process of another name
// space.
bool is_process(int fd, pid_t process) {
    const std::string path = fmt::format("/proc/self/fdinfo/{}", fd);
    const FileDescriptor info(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!info.valid() || process <= 0) return true;
    std::array<char, 1024> text;
    const ssize_t bytes = read(info.get(), text.data(), text.size());
    const std::string_view lines(text.data(), bytes > 0 ? static_cast<size_t>(bytes) : 0);
    constexpr std::string_view key = "\nPid:\t";  // of a process descriptor; nothing else has it
    const size_t at = lines.find(key);
    if (at == std::string_view::npos) return false;
    long found = 0;
    std::from_chars(lines.data() + at + key.size(), lines.data() + lines.size(), found);
    return found == process || found <= 0;  // 0: of another name space; -1: it has ended, and will be heard of
}

int poll_ms(int64_t ns) {
    constexpr int64_t hour_ns = 3'600'000'000'000;
    return static_cast<int>((std::clamp<int64_t>(ns, 0, hour_ns) + 999'999) / 1'000'000);
}

// Compares without telling by its time how much of the token was right.
bool same_token(std::string_view a, std::string_view b) {
    if (a.size() != b.size()) return false;
    unsigned difference = 0;
    for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
    return difference == 0;
}

Status lost_in_attach(const ShmGroup& group, int rank, pid_t process) {
    return {Code::peer_lost, fmt::format("attach failed: {} of {} in group \"{}\" ended before all ranks had attached.\n"
                                         "  See its own output for the reason; then start all ranks again.",
                                         member_text(rank, process), group.size, group.name)};
}

// ----------------------------------------------------------------------------------------------------------------- knocking

// One try of a process to be let in.
struct Knock {
    enum class Answer { welcome, refused, nobody, closed, silent, trouble };
    Answer answer;
    FileDescriptor socket;
    pid_t process = 0;  // of rank 0
    Status status;      // refused, trouble
    int error = 0;      // nobody: errno
};

// Connects, says hello and waits for the answer, which is left in `m` when it is a welcome.
Knock knock(const ShmGroup& group, const Offer& offer, const Deadline& deadline, Mailbox& mailbox, Message* m) {
    using Answer = Knock::Answer;
    Knock k{Answer::trouble, new_socket(), 0, {}, 0};
    if (!k.socket.valid()) {
        k.status = system_refused("no socket", group.rank, errno);
        return k;
    }
    sockaddr_un address;
    const socklen_t length = door_address(door_name(group), &address);
    if (connect(k.socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
        k.answer = Answer::nobody;
        k.error = errno;
        return k;
    }
    ucred peer = {};
    if (!peer_of(k.socket.get(), &peer)) {
        k.status = system_refused("the system does not say who is at the other end of a socket", group.rank, errno);
        return k;
    }
    if (peer.uid != geteuid()) {
        k.socket.reset();  // nothing is said to a stranger
        k.status = {
            Code::mismatch,
            fmt::format("attach on rank {}: the socket @{} belongs to user {} (process {}); this process runs as user {}.\n"
                        "  Run all ranks as one user, or give the group another name.",
                        group.rank, door_name(group), peer.uid, peer.pid, geteuid())};
        return k;
    }
    k.process = peer.pid;
    widen(k.socket.get());

    Header hello;
    hello.kind = Kind::hello;
    hello.rank = group.rank;
    hello.size = group.size;
    hello.code = static_cast<int32_t>(offer.refusal.code());
    hello.window_bytes = offer.shape.window_bytes;
    hello.bell_offset = offer.shape.bell_offset;
    std::array<int, fds_max> fds = {offer.process.get(), offer.window.get()};
    const size_t fd_count = !offer.process.valid() ? 0 : offer.window.valid() ? 2 : 1;
    const auto body = offer.refusal.ok() ? offer.card : text_body(offer.refusal.text());
    for (bool said = false;;) {
        const int64_t left = deadline.left_ns();
        if (left <= 0) {
            k.answer = Answer::silent;
            return k;
        }
        int64_t wait = left;
        if (!said) {
            hello.left_ns = left;
            const SendResult r =
                send_message(k.socket.get(), hello, group.token, group.name, body, std::span(fds.data(), fd_count));
            // A refusal may have come before the hello went out: look for it before giving the connection up.
            if (r.what == Sent::gone && r.error != EPIPE && r.error != ECONNRESET) {
                k.status = system_refused("the hello to rank 0 could not be sent", group.rank, r.error);
                return k;
            }
            said = r.what != Sent::later;
            if (!said) wait = std::min<int64_t>(wait, 1'000'000);
        }
        pollfd p = {k.socket.get(), POLLIN, 0};
        ::poll(&p, 1, poll_ms(wait));
        switch (mailbox.receive(k.socket.get(), m)) {
            case Received::nothing: continue;
            case Received::ended: k.answer = Answer::closed; return k;
            case Received::garbage: break;
            case Received::message:
                if (m->header.version == format_version && m->header.kind == Kind::refuse) {
                    k.answer = Answer::refused;
                    k.status = m->status();
                    return k;
                }
                if (m->header.version == format_version && m->header.kind == Kind::welcome) {
                    if (m->fds.size() == 2) {
                        k.answer = Answer::welcome;
                    } else {
                        k.status = system_refused("the file descriptors of rank 0 did not arrive", group.rank, EMFILE);
                    }
                    return k;
                }
                break;
        }
        k.status = {Code::corrupt,
                    fmt::format("attach on rank {}: process {} at socket @{} answered with what no rank 0 says.\n"
                                "  Start all ranks from one build.",
                                group.rank, peer.pid, door_name(group))};
        return k;
    }
}

// A pause between two tries, growing, at most until the deadline.
void pause_between(int tries, const Deadline& deadline) {
    const int64_t ns = std::min<int64_t>({int64_t{1'000'000} << std::min(tries, 4), deadline.left_ns(), 16'000'000});
    if (ns <= 0) return;
    timespec t = {0, static_cast<long>(ns)};
    nanosleep(&t, nullptr);
}

// ------------------------------------------------------------------------------------------------------------------- rank 0

class Host {
 public:
    Host(const ShmGroup& group, Offer offer, const Deadline& deadline, Meeting* meeting, const std::function<Status()>& map)
        : group_(group),
          offer_(std::move(offer)),
          deadline_(deadline),
          meeting_(meeting),
          map_(map),
          guests_(static_cast<size_t>(group.size)),
          told_(static_cast<size_t>(group.size)),
          give_up_at_ns_(deadline.at_ns) {}

    Status run() {
        told_[0] = true;
        if (Status status = open_door(); !status.ok()) return status;
        trouble_ = offer_.refusal.ok() ? make_verdict() : offer_.refusal;
        while (trouble_.ok()) {
            if (complete() && !self_mapped_) {
                take_own();
                trouble_ = map_();
                self_mapped_ = true;
                continue;
            }
            if (complete() && mapped_ == group_.size - 1 && !overtaken_) {
                if (verdict_.decide(Verdict::go) == Verdict::go) {
                    leave();
                    return {};
                }
                overtaken_ = true;  // a guest gave up before; its reason is on the way
            }
            if (now_ns() >= give_up_at_ns_) {
                trouble_ = timed_out();
                break;
            }
            serve();
        }
        if (verdict_.there()) {
            verdict_.write_text(trouble_);
            verdict_.decide(Verdict::given_up);
        }
        tell_all();
        leave();
        return trouble_;
    }

 private:
    struct Stranger {
        FileDescriptor socket;
        pid_t process = 0;
    };
    struct Guest {
        FileDescriptor socket;  // valid from the welcome on
        pid_t process = 0;
        bool mapped = false;
        int next_deal = 0;     // rank whose card goes out next
        bool starved = false;  // the last deal found too many descriptors under way
    };

    bool complete() const { return came_ == group_.size - 1; }
    static size_t at(int rank) { return static_cast<size_t>(rank); }

    Status open_door() {
        const std::string name = door_name(group_);
        sockaddr_un address;
        const socklen_t length = door_address(name, &address);
        for (int tries = 0;; ++tries) {
            door_ = new_socket();
            if (!door_.valid() && offer_.window.valid()) {
                // As a guest does without a socket: make room to tell the others.
                offer_.refusal = system_refused("no socket", 0, errno);
                offer_.window.reset();
                offer_.process.reset();
                door_ = new_socket();
            }
            if (!door_.valid()) return system_refused("no socket", 0, errno);
            if (bind(door_.get(), reinterpret_cast<sockaddr*>(&address), length) == 0) break;
            if (errno != EADDRINUSE) return system_refused(fmt::format("socket @{}", name).c_str(), 0, errno);
            // Somebody else is rank 0 here. Ask: the answer says what is wrong, to both. Nobody there: it is just leaving.
            const Offer nothing;
            Knock k = knock(group_, nothing, deadline_, mailbox_, &message_);
            if (k.answer == Knock::Answer::refused || k.answer == Knock::Answer::trouble) return k.status;
            if (deadline_.passed()) {
                return {Code::timed_out,
                        fmt::format("attach timed out on rank 0 of group \"{}\" after {} ms: the name @{} is held by another "
                                    "process, which does not answer.\n"
                                    "  End that process, or give this group another name.",
                                    group_.name, deadline_.waited_ms(), name)};
            }
            pause_between(tries, deadline_);
        }
        if (listen(door_.get(), group_.size + int{strangers_max}) != 0) return system_refused("listen", 0, errno);
        return {};
    }

    Status make_verdict() {
        if (Status status = make_shared_memory("switchyard-verdict", sizeof(VerdictPage), &verdict_memory_); !status.ok()) {
            return status;
        }
        if (!verdict_.map(verdict_memory_.get())) return system_refused("mmap of the verdict", 0, errno);
        return {};
    }

    void take_own() {
        meeting_->cards[0].assign(offer_.card.begin(), offer_.card.end());
        meeting_->shapes[0] = offer_.shape;
        // Dealt from here; the process of rank 0 stays in offer_, because it goes to the others only.
        meeting_->windows[0] = std::move(offer_.window);
        windows_fit_ = shapes_fit(meeting_->shapes);
    }

    Status timed_out() const {
        std::vector<int> missing;
        for (int r = 1; r < group_.size; ++r) {
            const Guest& g = guests_[at(r)];
            if (complete() ? !g.mapped : !g.socket.valid()) missing.push_back(r);
        }
        if (missing.empty()) {
            return {Code::timed_out,
                    fmt::format("attach of group \"{}\" timed out after {} ms on rank 0: another rank's deadline "
                                "passed just before all were ready.\n  Raise timeout_ms.",
                                group_.name, deadline_.waited_ms())};
        }
        std::string text = fmt::format("attach of group \"{}\" timed out after {} ms on rank 0: {} of {} ", group_.name,
                                       deadline_.waited_ms(), ranks_text(missing), group_.size);
        text += complete() ? "came but did not map the windows." : "did not come.";
        if (first_deadline_ > 0) text += fmt::format(" (Rank {} waits no longer.)", first_deadline_);
        if (wrong_tokens_ > 0) text += fmt::format(" {} with another token refused.", wrong_tokens_);
        text += complete()
                    ? "\n  Look whether they are stopped or the host is overloaded, or raise timeout_ms."
                    : "\n  Look whether they run, with the same name and token, as the same user and in the same network "
                      "namespace, or raise timeout_ms.";
        return {Code::timed_out, text};
    }

    // Waits for whatever comes next and handles it.
    void serve() {
        polls_.clear();
        polls_.push_back({door_.get(), POLLIN, 0});
        for (const Stranger& s : strangers_) polls_.push_back({s.socket.get(), POLLIN, 0});
        const size_t strangers = strangers_.size();
        bool starved = false;
        for (int r = 1; r < group_.size; ++r) {
            Guest& g = guests_[at(r)];
            if (!g.socket.valid()) continue;
            const bool deals = self_mapped_ && g.next_deal < group_.size;
            starved |= deals && g.starved;
            polls_.push_back({g.socket.get(), static_cast<short>(deals && !g.starved ? POLLIN | POLLOUT : POLLIN), 0});
            polls_.push_back({meeting_->processes[at(r)].get(), POLLIN, 0});
        }
        const int64_t left = give_up_at_ns_ - now_ns();
        if (::poll(polls_.data(), polls_.size(), poll_ms(starved ? std::min<int64_t>(left, 1'000'000) : left)) < 0) {
            if (errno != EINTR) trouble_ = system_refused("poll", 0, errno);
            return;
        }

        size_t next = 1 + strangers;
        for (int r = 1; r < group_.size && trouble_.ok(); ++r) {
            Guest& g = guests_[at(r)];
            if (!g.socket.valid()) continue;
            const bool spoke = (polls_[next].revents & ~POLLOUT) != 0;
            const bool ended = polls_[next + 1].revents != 0;
            const bool room = (polls_[next].revents & POLLOUT) != 0;
            next += 2;
            if (spoke || ended) hear_guest(r, g);
            if (ended && trouble_.ok()) trouble_ = lost_in_attach(group_, r, g.process);
            if (trouble_.ok() && (room || g.starved)) deal(r, g);
        }
        if (!trouble_.ok()) return;
        for (size_t i = 0; i < strangers && trouble_.ok(); ++i) {
            if (polls_[1 + i].revents != 0) hear_stranger(strangers_[i]);
        }
        std::erase_if(strangers_, [](const Stranger& s) { return !s.socket.valid(); });
        if (trouble_.ok() && polls_[0].revents != 0) accept_some();
    }

    // False when the system has no room for another connection.
    bool accept_some() {
        // A bounded number at a time, so that somebody who connects for ever does not keep rank 0 from its guests.
        for (size_t i = 0; i < strangers_max; ++i) {
            FileDescriptor socket(accept4(door_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
            if (!socket.valid()) {
                if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
                    if (trouble_.ok()) trouble_ = system_refused("a connection could not be accepted", 0, errno);
                    return false;
                }
                if (errno == EINTR || errno == ECONNABORTED) continue;
                return true;
            }
            ucred peer = {};
            if (!peer_of(socket.get(), &peer) || peer.uid != geteuid()) continue;  // closes it
            if (strangers_.size() == strangers_max) {
                hang_up(strangers_.front().socket);
                strangers_.erase(strangers_.begin());
            }
            widen(socket.get());
            strangers_.push_back({std::move(socket), peer.pid});
        }
        return true;
    }

    void refuse(Stranger& s, const Status& why) {
        Header h;
        h.kind = Kind::refuse;
        h.code = static_cast<int32_t>(why.code());
        // The first message on this connection: there is room for it. If the other side has gone, nobody misses it.
        static_cast<void>(send_message(s.socket.get(), h, {}, {}, text_body(why.text()), {}));
        hang_up(s.socket);
    }

    // Everybody is to hear why there is no group, also who comes late: else it would wait for it until its own deadline.
    void tell_all() {
        for (int r = 1; r < group_.size; ++r) {
            Guest& g = guests_[at(r)];
            if (!g.socket.valid()) continue;
            hang_up(g.socket);  // it reads the verdict
            told_[at(r)] = true;
        }
        const int64_t until_ns = std::min(give_up_at_ns_, now_ns() + farewell_ns);
        for (;;) {
            const bool room = accept_some();
            for (Stranger& s : strangers_) hear_stranger(s);
            std::erase_if(strangers_, [](const Stranger& s) { return !s.socket.valid(); });
            const int64_t left = until_ns - now_ns();
            if (!room || left <= 0 || std::find(told_.begin(), told_.end(), false) == told_.end()) break;
            polls_.assign(1, {door_.get(), POLLIN, 0});
            for (const Stranger& s : strangers_) polls_.push_back({s.socket.get(), POLLIN, 0});
            ::poll(polls_.data(), polls_.size(), poll_ms(left));
        }
        for (Stranger& s : strangers_) refuse(s, trouble_);
    }

    void hear_stranger(Stranger& s) {
        const Received what = mailbox_.receive(s.socket.get(), &message_);
        if (what == Received::nothing) return;
        const Header& h = message_.header;
        if (what != Received::message || h.kind != Kind::hello) {
            hang_up(s.socket);
            return;
        }
        const std::string door = fmt::format("rank 0 (process {}) of group \"{}\"", getpid(), group_.name);
        if (!same_token(message_.token, group_.token)) {
            ++wrong_tokens_;
            refuse(s,
                   {Code::mismatch, fmt::format("attach on rank {}: refused by {}: the token differs.\n"
                                                "  Start all ranks with one token, or give groups that live at the same time "
                                                "different names.",
                                                h.rank, door)});
            return;
        }
        // From here on it is one of us: what is wrong with it is told to all, unless the group is complete without it.
        if (!trouble_.ok()) return answer(s, trouble_);
        if (h.version != format_version) {
            return wrong(s,
                         {Code::mismatch, fmt::format("attach failed: {} speaks version {} of the rendezvous, {} version {}.\n"
                                                      "  Start all ranks from one build.",
                                                      member_text(h.rank, s.process), h.version, door, format_version)});
        }
        if (message_.name != group_.name) {
            refuse(s, {Code::mismatch,
                       fmt::format("attach on rank {}: refused by {}: this process wants group \"{}\", whose socket "
                                   "has the same name.\n  Give one of the two groups another name.",
                                   h.rank, door, message_.name)});
            return;
        }
        if (complete()) {
            // Of the next group of this name: its rank has left attach sooner than this one. It knocks again.
            hang_up(s.socket);
            return;
        }
        if (h.size != group_.size) {
            return wrong(s, {Code::mismatch, fmt::format("attach failed: {} was started with {} ranks, {} with {}.\n"
                                                         "  Start all ranks with one size.",
                                                         member_text(h.rank, s.process), h.size, door, group_.size)});
        }
        if (h.rank < 0 || h.rank >= group_.size) {
            refuse(s, {Code::mismatch,
                       fmt::format("attach on rank {}: refused by {}: ranks are 0..{}.", h.rank, door, group_.size - 1)});
            return;
        }
        Guest& g = guests_[at(h.rank)];
        if (h.rank == 0 || g.socket.valid()) {
            return wrong(s,
                         {Code::mismatch,
                          fmt::format("attach failed: rank {} of group \"{}\" is claimed by process {} and by process {}.\n"
                                      "  Give every process a rank of its own, and groups that live at the same time different "
                                      "names.",
                                      h.rank, group_.name, h.rank == 0 ? getpid() : g.process, s.process)});
        }
        if (h.code != 0) {
            trouble_ = message_.status();
            return answer(s, trouble_);
        }
        const size_t fds = h.window_bytes > 0 ? 2 : 1;
        if (message_.fds.size() != fds) {
            rlimit limit = {};
            getrlimit(RLIMIT_NOFILE, &limit);
            trouble_ = {Code::system,
                        fmt::format("attach failed: of {} file descriptors of {}, {} arrived at {}, which may have {} "
                                    "files open.\n  Raise that limit (ulimit -n).",
                                    fds, member_text(h.rank, s.process), message_.fds.size(), door, limit.rlim_cur)};
            return answer(s, trouble_);
        }
        if (!is_process(message_.fds[0].get(), s.process)) {
            return wrong(s,
                         {Code::corrupt, fmt::format("attach failed: {} brings the descriptor of something else than its own "
                                                     "process.\n  Start all ranks from one build.",
                                                     member_text(h.rank, s.process))});
        }
        welcome(s, g);
    }

    // An error of one of us: all are to hear it.
    void wrong(Stranger& s, const Status& status) {
        trouble_ = status;
        answer(s, status);
    }

    // Refuses the sender of the hello at hand, and remembers that its rank has been told.
    void answer(Stranger& s, const Status& why) {
        const int32_t rank = message_.header.rank;
        if (rank >= 0 && rank < group_.size) told_[at(rank)] = true;
        refuse(s, why);
    }

    void welcome(Stranger& s, Guest& g) {
        const Header& h = message_.header;
        const int64_t left = std::clamp<int64_t>(h.left_ns, 0, INT64_MAX / 2);
        const int64_t gives_up_at = now_ns() + left - std::min(head_start_ns, left / 8);
        if (gives_up_at < give_up_at_ns_) {
            give_up_at_ns_ = gives_up_at;
            first_deadline_ = h.rank;
        }
        meeting_->cards[at(h.rank)].assign(message_.body.begin(), message_.body.end());
        meeting_->shapes[at(h.rank)] = {h.window_bytes, h.bell_offset};
        meeting_->processes[at(h.rank)] = std::move(message_.fds[0]);
        if (message_.fds.size() > 1) meeting_->windows[at(h.rank)] = std::move(message_.fds[1]);
        g.socket = std::move(s.socket);
        g.process = s.process;
        ++came_;
        Header reply;
        reply.kind = Kind::welcome;
        reply.size = group_.size;
        const std::array<int, 2> fds = {verdict_memory_.get(), offer_.process.get()};
        const SendResult r = send_message(g.socket.get(), reply, {}, {}, {}, fds);
        if (r.what == Sent::yes) return;
        trouble_ = r.error == EPIPE || r.error == ECONNRESET ? lost_in_attach(group_, h.rank, g.process)
                                                             : system_refused("the welcome could not be sent", 0, r.error);
    }

    void hear_guest(int rank, Guest& g) {
        for (;;) {
            switch (mailbox_.receive(g.socket.get(), &message_)) {
                case Received::nothing: return;
                case Received::ended: trouble_ = lost_in_attach(group_, rank, g.process); return;
                case Received::garbage: break;
                case Received::message:
                    if (message_.header.kind == Kind::failed) {
                        trouble_ = message_.status();
                        if (trouble_.code() == Code::timed_out) {
                            // It could not know who is missing; here it is known.
                            first_deadline_ = rank;
                            trouble_ = timed_out();
                        }
                        return;
                    }
                    if (message_.header.kind == Kind::mapped && !g.mapped && g.next_deal == group_.size) {
                        g.mapped = true;
                        ++mapped_;
                        continue;
                    }
                    break;
            }
            trouble_ = {Code::corrupt, fmt::format("attach failed: {} sent what no correct rank sends.\n"
                                                   "  Start all ranks from one build.",
                                                   member_text(rank, g.process))};
            return;
        }
    }

    // Sends what there is room for of everybody's cards, windows and processes.
    void deal(int rank, Guest& g) {
        for (; g.next_deal < group_.size; ++g.next_deal) {
            const int r = g.next_deal;
            if (r == rank) continue;
            Header h;
            h.kind = Kind::deal;
            h.rank = r;
            h.window_bytes = meeting_->shapes[at(r)].window_bytes;
            h.bell_offset = meeting_->shapes[at(r)].bell_offset;
            const std::array<int, 2> fds = {r == 0 ? offer_.process.get() : meeting_->processes[at(r)].get(),
                                            meeting_->windows[at(r)].get()};
            const SendResult s = send_message(g.socket.get(), h, {}, {}, meeting_->cards[at(r)],
                                              std::span(fds.data(), windows_fit_ ? size_t{2} : size_t{1}));
            g.starved = s.what == Sent::later && s.error != EAGAIN;
            if (s.what == Sent::later) return;
            if (s.what == Sent::gone) {
                // Its last words, if it had any, tell more than the failed send.
                hear_guest(rank, g);
                if (trouble_.ok()) trouble_ = system_refused("cards could not be sent", 0, s.error);
                return;
            }
        }
    }

    // The door goes first: a guest that sees its connection end may at once knock for the next group of the same name.
    void leave() {
        hang_up(door_);
        for (Stranger& s : strangers_) hang_up(s.socket);
        for (Guest& g : guests_) hang_up(g.socket);
    }

    const ShmGroup& group_;
    Offer offer_;
    const Deadline& deadline_;
    Meeting* const meeting_;
    const std::function<Status()>& map_;

    FileDescriptor door_;
    FileDescriptor verdict_memory_;
    Verdict verdict_;
    std::vector<Stranger> strangers_;
    std::vector<Guest> guests_;  // by rank; element 0 is not used
    std::vector<bool> told_;     // by rank: has heard that the group has failed
    Mailbox mailbox_;
    Message message_;
    std::vector<pollfd> polls_;
    Status trouble_;  // ends the meeting; the first one counts
    int64_t give_up_at_ns_;
    int first_deadline_ = 0;  // the guest that set it, or 0
    int came_ = 0;
    int mapped_ = 0;
    int wrong_tokens_ = 0;
    bool self_mapped_ = false;
    bool windows_fit_ = false;
    bool overtaken_ = false;
};

// ------------------------------------------------------------------------------------------------------------- other ranks

class Guest {
 public:
    Guest(const ShmGroup& group, Offer offer, const Deadline& deadline, Meeting* meeting, const std::function<Status()>& map)
        : group_(group), offer_(std::move(offer)), deadline_(deadline), meeting_(meeting), map_(map) {}

    Status run() {
        if (!offer_.refusal.ok()) return say_goodbye();
        if (Status status = get_in(); !status.ok()) return status;
        const auto self = static_cast<size_t>(group_.rank);
        meeting_->cards[self].assign(offer_.card.begin(), offer_.card.end());
        meeting_->shapes[self] = offer_.shape;
        meeting_->windows[self] = std::move(offer_.window);
        dealt_.assign(static_cast<size_t>(group_.size), false);
        dealt_[self] = true;
        for (int missing = group_.size - 1; missing > 0; --missing) {
            if (Wait w = next_message(); w.over) return w.outcome;
            if (Status status = take_deal(); !status.ok()) return give_up(std::move(status));
        }
        if (Status status = map_(); !status.ok()) return give_up(std::move(status));
        has_mapped_ = true;
        Header mapped;
        mapped.kind = Kind::mapped;
        while (send_message(socket_.get(), mapped, {}, {}, {}, {}).what == Sent::later && !deadline_.passed()) {
            pause_between(0, deadline_);
        }
        // If rank 0 has hung up meanwhile, the verdict tells why.
        if (Wait w = next_message(); w.over) return w.outcome;
        return give_up(strange_message());
    }

 private:
    struct Wait {
        bool over;
        Status outcome;
    };

    // This rank cannot take part: the others shall hear why.
    Status say_goodbye() {
        Deadline until = deadline_;
        until.at_ns = std::min(until.at_ns, now_ns() + farewell_ns);
        for (int tries = 0; !until.passed(); ++tries) {
            const Knock k = knock(group_, offer_, until, mailbox_, &message_);
            if (k.answer != Knock::Answer::nobody && k.answer != Knock::Answer::closed) break;
            pause_between(tries, until);
        }
        return offer_.refusal;
    }

    // Something of its own went wrong on the way in.
    Status withdraw(Knock k) {
        if (k.socket.valid()) {
            say_failed(k.socket, k.status);
            return k.status;
        }
        if (k.status.code() != Code::system) return k.status;
        // Not even a socket could be had. What this rank would have brought is of no use now, and may be what is in the way.
        offer_.refusal = k.status;
        offer_.window.reset();
        offer_.process.reset();
        return say_goodbye();
    }

    static void say_failed(FileDescriptor& socket, const Status& why) {
        Header h;
        h.kind = Kind::failed;
        h.code = static_cast<int32_t>(why.code());
        static_cast<void>(send_message(socket.get(), h, {}, {}, text_body(why.text()), {}));
        hang_up(socket);
    }

    Status get_in() {
        int error = 0;
        pid_t closed_by = 0;
        for (int tries = 0;; ++tries) {
            Knock k = knock(group_, offer_, deadline_, mailbox_, &message_);
            switch (k.answer) {
                case Knock::Answer::refused: return k.status;
                case Knock::Answer::trouble: return withdraw(std::move(k));
                case Knock::Answer::welcome:
                    socket_ = std::move(k.socket);
                    host_process_ = k.process;
                    return take_welcome();
                case Knock::Answer::nobody: error = k.error; break;
                case Knock::Answer::closed: closed_by = k.process; break;  // it was just leaving: the next one may be ours
                case Knock::Answer::silent:
                    return {Code::timed_out,
                            fmt::format("attach timed out on rank {} of group \"{}\" after {} ms: rank 0 (process {}) "
                                        "at socket @{} does not answer.\n"
                                        "  Look whether it is stopped or the host is overloaded, or raise timeout_ms.",
                                        group_.rank, group_.name, deadline_.waited_ms(), k.process, door_name(group_))};
            }
            if (deadline_.passed()) break;
            pause_between(tries, deadline_);
        }
        std::string why = error != 0 ? std::strerror(error) : "no answer";
        if (closed_by != 0) why = fmt::format("process {} was there, but left without an answer; then {}", closed_by, why);
        return {Code::timed_out,
                fmt::format(
                    "attach timed out on rank {} of group \"{}\": rank 0 could not be reached at socket @{} for {} ms: {}.\n"
                    "  Start rank 0 with the same name, as the same user and in the same network namespace, or raise "
                    "timeout_ms.",
                    group_.rank, group_.name, door_name(group_), deadline_.waited_ms(), why)};
    }

    Status take_welcome() {
        verdict_memory_ = std::move(message_.fds[0]);
        host_ = std::move(message_.fds[1]);
        if (!is_process(host_.get(), host_process_)) return give_up(strange_message());
        uint64_t page_bytes = 0;
        Status status = check_shared_memory(verdict_memory_.get(), sizeof(VerdictPage), 0, &page_bytes);
        if (status.ok() && !verdict_.map(verdict_memory_.get())) {
            status = system_refused("mmap of the verdict", group_.rank, errno);
        }
        if (!status.ok()) return give_up(std::move(status));
        return {};
    }

    // The next message, or the end: rank 0 hangs up once there is a verdict.
    Wait next_message() {
        for (;;) {
            // First what has been said, then who is still there: messages before an end count.
            switch (mailbox_.receive(socket_.get(), &message_)) {
                case Received::message: return {false, {}};
                case Received::garbage: return {true, give_up(strange_message())};
                case Received::ended: return {true, verdict()};
                case Received::nothing: break;
            }
            const int64_t left = deadline_.left_ns();
            if (left <= 0) {
                return {true, give_up({Code::timed_out,
                                       fmt::format("attach timed out on rank {} of group \"{}\" after {} ms: rank 0 "
                                                   "(process {}) let it in, but did not say that all had come.\n"
                                                   "  Look whether rank 0 is stopped or the host is overloaded, or "
                                                   "raise timeout_ms.",
                                                   group_.rank, group_.name, deadline_.waited_ms(), host_process_)})};
            }
            std::array<pollfd, 2> polls = {pollfd{socket_.get(), POLLIN, 0}, pollfd{host_.get(), POLLIN, 0}};
            if (::poll(polls.data(), polls.size(), poll_ms(left)) <= 0) continue;
            if (polls[0].revents == 0 && polls[1].revents != 0) return {true, verdict()};
        }
    }

    // Rank 0 has hung up or ended.
    Status verdict() {
        if (verdict_.decide(Verdict::given_up) == Verdict::go) return went();
        if (std::optional<Status> text = verdict_.text()) return *text;
        return lost_in_attach(group_, 0, host_process_);
    }

    // The group goes on. Every rank can write that, but it is true only when this one has mapped: without, it has no windows
    // and watches no process.
    Status went() const { return has_mapped_ ? Status() : strange_message(); }

    // Leaves with an error of its own, unless the verdict was there before.
    Status give_up(Status why) {
        if (verdict_.there()) {
            if (verdict_.decide(Verdict::given_up) == Verdict::go) return went();
            if (std::optional<Status> text = verdict_.text()) return *text;
        }
        say_failed(socket_, why);
        return why;
    }

    Status take_deal() {
        const Header& h = message_.header;
        if (h.version != format_version || h.kind != Kind::deal || h.rank < 0 || h.rank >= group_.size ||
            dealt_[static_cast<size_t>(h.rank)]) {
            return strange_message();
        }
        if (message_.fds_cut || message_.fds.empty()) {
            return system_refused(fmt::format("the file descriptors of rank {} did not arrive", h.rank).c_str(), group_.rank,
                                  EMFILE);
        }
        const auto r = static_cast<size_t>(h.rank);
        dealt_[r] = true;
        meeting_->cards[r].assign(message_.body.begin(), message_.body.end());
        meeting_->shapes[r] = {h.window_bytes, h.bell_offset};
        meeting_->processes[r] = std::move(message_.fds[0]);
        if (message_.fds.size() > 1) meeting_->windows[r] = std::move(message_.fds[1]);
        return {};
    }

    Status strange_message() const {
        return {Code::corrupt, fmt::format("attach failed on rank {}: rank 0 (process {}) sent what no correct rank sends.\n"
                                           "  Start all ranks from one build.",
                                           group_.rank, host_process_)};
    }

    const ShmGroup& group_;
    Offer offer_;
    bool has_mapped_ = false;
    const Deadline& deadline_;
    Meeting* const meeting_;
    const std::function<Status()>& map_;

    FileDescriptor socket_;
    FileDescriptor host_;  // pidfd of rank 0
    FileDescriptor verdict_memory_;
    Verdict verdict_;
    pid_t host_process_ = 0;
    Mailbox mailbox_;
    Message message_;
    std::vector<bool> dealt_;
};

}  // namespace

void FileDescriptor::reset() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
}

Status system_refused(const char* what, int rank, int error) {
    std::string hint;
    if (error == EMFILE || error == ENFILE) {
        rlimit limit = {};
        getrlimit(RLIMIT_NOFILE, &limit);
        hint = fmt::format("\n  This process may have {} files open; raise the limit (ulimit -n).", limit.rlim_cur);
    }
    return {Code::system, fmt::format("attach on rank {}: {}: {}.{}", rank, what, std::strerror(error), hint)};
}

namespace {
// Asked before a file grows: the system answers one above this limit with a signal that ends the process.
bool is_above_file_limit(uint64_t bytes) {
    rlimit limit = {};
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur;
}
}  // namespace

Status make_shared_memory(const char* name, uint64_t bytes, FileDescriptor* memory) {
    const auto refused = [&](const char* what) {
        return Status(Code::system,
                      fmt::format("attach: {} for {} of shared memory: {}.\n"
                                  "  Lower rows_max or tokens_max, or look at the limits of this process (ulimit -a).",
                                  what, bytes_text(bytes), std::strerror(errno)));
    };
    if (is_above_file_limit(bytes)) {
        errno = EFBIG;
        return refused("file size limit (ulimit -f)");
    }
    if (bytes > uint64_t{INT64_MAX}) {
        errno = EFBIG;
        return refused("ftruncate");
    }
    FileDescriptor fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd.valid()) return refused("memfd_create");
    if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return refused("ftruncate");
    if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return refused("sealing");
    *memory = std::move(fd);
    return {};
}

namespace {
constexpr auto hugetlbfs_magic = 0x958458f6;  // linux/magic.h

uint64_t page_of(int memory) {
    struct statfs fs = {};
    if (fstatfs(memory, &fs) == 0 && fs.f_type == hugetlbfs_magic && fs.f_bsize > 0) return static_cast<uint64_t>(fs.f_bsize);
    return static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}
uint64_t round_up(uint64_t bytes, uint64_t to) {
    return (bytes + to - 1) / to * to;
}
}  // namespace

bool make_huge_memory(const char* name, uint64_t bytes, FileDescriptor* memory) {
    FileDescriptor fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB | 21U << MAP_HUGE_SHIFT));
    if (!fd.valid()) return false;
    const uint64_t whole = round_up(bytes, page_of(fd.get()));
    if (is_above_file_limit(whole)) {
        errno = EFBIG;
        return false;
    }
    if (whole > uint64_t{INT64_MAX} || ftruncate(fd.get(), static_cast<off_t>(whole)) != 0) return false;
    // Bound before the first page is taken.
    void* p = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (p == MAP_FAILED) return false;
    bind_near(p, whole);
    munmap(p, whole);
    if (fallocate(fd.get(), 0, 0, static_cast<off_t>(whole)) != 0) return false;
    if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return false;
    *memory = std::move(fd);
    return true;
}

Status check_shared_memory(int memory, uint64_t bytes, int rank, uint64_t* page_bytes) {
    struct stat s = {};
    const int seals = fcntl(memory, F_GET_SEALS);
    if (seals < 0 || fstat(memory, &s) != 0) {
        return {Code::corrupt, fmt::format("attach failed: what rank {} sent as shared memory is something else: {}.\n"
                                           "  Start all ranks from one build.",
                                           rank, std::strerror(errno))};
    }
    *page_bytes = page_of(memory);
    const bool is_huge = *page_bytes > static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t expected = is_huge ? round_up(bytes, *page_bytes) : bytes;
    // A huge page that is not there yet could be missing when it is touched: a signal.
    const bool is_whole = !is_huge || static_cast<uint64_t>(s.st_blocks) * 512 >= expected;
    if (static_cast<uint64_t>(s.st_size) != expected || !is_whole || (seals & F_SEAL_SHRINK) == 0) {
        return {Code::corrupt,
                fmt::format("attach failed: the shared memory of rank {} has {} bytes{}, {} against shrinking; {} bytes "
                            "and a seal were announced.\n  Start all ranks from one build.",
                            rank, s.st_size, is_whole ? "" : ", not all of them there",
                            (seals & F_SEAL_SHRINK) != 0 ? "sealed" : "not sealed", expected)};
    }
    return {};
}

Status check_group(const ShmGroup& group) {
    if (group.size < 1 || group.size > ranks_max) {
        return {Code::bad_input,
                fmt::format("group \"{}\" has size {}; a group has 1..{} ranks.", group.name, group.size, ranks_max)};
    }
    if (group.rank < 0 || group.rank >= group.size) {
        return {Code::bad_input, fmt::format("rank {} of group \"{}\" does not exist; ranks are 0..{}.", group.rank, group.name,
                                             group.size - 1)};
    }
    if (group.name.size() > name_bytes_max || group.token.size() > name_bytes_max) {
        return {Code::bad_input, fmt::format("group name and token have {} and {} bytes; at most {} each.", group.name.size(),
                                             group.token.size(), name_bytes_max)};
    }
    return {};
}

std::string door_name(const ShmGroup& group) {
    // Readable for who lists sockets, and a hash of the whole name for what is not shown of it. Two names that meet all the
    // same are told apart by the hello.
    std::string shown;
    for (const char c : group.name.substr(0, 32)) {
        const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '.';
        shown += plain ? c : '_';
    }
    uint64_t hash = 0xcbf2'9ce4'8422'2325;  // FNV-1a
    for (const char c : group.name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100'0000'01b3;
    return fmt::format("switchyard-{}-{}-{:016x}", geteuid(), shown, hash);
}

Status meet(const ShmGroup& group, Offer offer, const Deadline& deadline, Meeting* meeting,
            const std::function<Status()>& map) {
    const auto size = static_cast<size_t>(group.size);
    meeting->cards.resize(size);
    meeting->shapes.resize(size);
    meeting->windows.resize(size);
    meeting->processes.resize(size);
    if (group.rank == 0) return Host(group, std::move(offer), deadline, meeting, map).run();
    return Guest(group, std::move(offer), deadline, meeting, map).run();
}

}  // namespace switchyard
