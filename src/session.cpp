// Opens sessions, and is the only file of the engine that waits for other ranks in a call.
#include "switchyard/session.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/clock.hpp"
#include "core/machine.hpp"
#include "core/text.hpp"
#include "ep/combine.hpp"
#include "ep/dispatch.hpp"
#include "ep/regroup.hpp"
#include "layout/window.hpp"
#include "plan/placement.hpp"
#include "quant/quant.hpp"
#include "switchyard/strategy.hpp"
#include "transport/transport.hpp"

namespace switchyard {
namespace {

void throw_if(const Status& status) {
    if (!status.ok()) throw Error(status);
}

// ---------------------------------------------------------------------------------------------------------------- group

int64_t number_from_environment(const char* name, int64_t low, int64_t high) {
    const char* text = std::getenv(name);
    if (!text)
        throw Error(
            Status(Code::bad_input, fmt::format("environment variable {} is not set. Start the ranks with torchrun, with "
                                                "`switchyard run`, or fill in a Group yourself.",
                                                name)));
    char* end = nullptr;
    const long long value = std::strtoll(text, &end, 10);
    if (end == text || *end || value < low || value > high)
        throw Error(
            Status(Code::bad_input, fmt::format("environment variable {} is \"{}\"; allowed: {}..{}.", name, text, low, high)));
    return value;
}

// ----------------------------------------------------------------------------------------------------------------- cards

// What a rank shows the others when a session opens: its agreed options, or why it refuses.
struct CardHead {
    uint64_t magic = layout::window_magic;
    uint32_t format = layout::window_version;
    uint32_t options = 0;  // how many values follow
    uint32_t refusal_code = 0;
    uint32_t text_bytes = 0;  // of the refusal, behind the values
    uint64_t cpus = 0;        // a number for the CPUs this rank may run on: ranks with the same one share them
    uint64_t table = 0;       // hash of the placement table
    uint64_t has_table = 0;   // 1 or 0
    uint64_t rows = 0;        // what rows are made of: of an exchange its payloads
    uint64_t automatic = 0;   // 1: landing auto chose the landing
};

uint64_t number_of(const std::vector<int>& cpus) {
    uint64_t number = 1;
    for (const int cpu : cpus) number = (number ^ static_cast<uint64_t>(cpu + 1)) * 0x9E3779B97F4A7C15;
    return number;
}

// Of the CPUs this rank may run on, those that the ranks which may run on the same ones leave to it.
std::vector<int> own_cpus(const std::vector<std::vector<std::byte>>& cards, size_t me) {
    const auto number = [&](size_t r) {
        CardHead head;
        std::memcpy(&head, cards[r].data(), sizeof head);
        return head.cpus;
    };
    int64_t before = 0, all = 0;
    for (size_t r = 0; r < cards.size(); ++r)
        if (number(r) == number(me)) {
            before += r < me;
            ++all;
        }
    return share_of(allowed_cpus(), before, all);
}

std::vector<std::byte> make_card(const Options& options, const PlacementTable* table, uint64_t rows, bool automatic,
                                 const Status& refusal) {
    std::vector<int64_t> values;
    for (const OptionInfo& info : option_table())
        if (info.agreed) values.push_back(info.get(options));
    CardHead head;
    head.options = static_cast<uint32_t>(values.size());
    head.cpus = number_of(allowed_cpus());
    if (table) head.table = table->hash(), head.has_table = 1;
    head.rows = rows;
    head.automatic = automatic;
    head.refusal_code = static_cast<uint32_t>(refusal.code());
    head.text_bytes = static_cast<uint32_t>(std::min<size_t>(refusal.text().size(), 4096));
    std::vector<std::byte> card(sizeof head + values.size() * 8 + head.text_bytes);
    std::memcpy(card.data(), &head, sizeof head);
    std::memcpy(card.data() + sizeof head, values.data(), values.size() * 8);
    std::memcpy(card.data() + sizeof head + values.size() * 8, refusal.text().data(), head.text_bytes);
    return card;
}

// The verdict over all cards; every rank computes the same.
Status compare_cards(const std::vector<std::vector<std::byte>>& cards) {
    std::vector<int64_t> first;
    CardHead first_head;
    const auto table_text = [](const CardHead& h) {
        return h.has_table ? fmt::format("{:016x}", h.table) : std::string("none");
    };
    for (size_t r = 0; r < cards.size(); ++r) {
        CardHead head;
        const std::vector<std::byte>& card = cards[r];
        if (card.size() < sizeof head) return {Code::corrupt, fmt::format("rank {} sent a card of {} bytes.", r, card.size())};
        std::memcpy(&head, card.data(), sizeof head);
        if (head.magic != layout::window_magic || head.format != layout::window_version)
            return {Code::mismatch,
                    fmt::format("rank {} has window format {}, this build has {}. Start all ranks from one version.", r,
                                head.magic == layout::window_magic ? fmt::format("{}", head.format) : "unknown",
                                layout::window_version)};
        if (card.size() != sizeof head + size_t{head.options} * 8 + head.text_bytes)
            return {Code::corrupt,
                    fmt::format("rank {} sent a card of {} bytes with {} options.", r, card.size(), head.options)};
        if (head.refusal_code != 0)
            return {
                head.refusal_code <= static_cast<uint32_t>(Code::corrupt) ? static_cast<Code>(head.refusal_code)
                                                                          : Code::corrupt,
                fmt::format("rank {}: {}", r,
                            printable(std::string(reinterpret_cast<const char*>(card.data() + card.size() - head.text_bytes),
                                                  head.text_bytes)))};
        std::vector<int64_t> values(head.options);
        std::memcpy(values.data(), card.data() + sizeof head, values.size() * 8);
        if (r == 0) {
            first = values;
            first_head = head;
            continue;
        }
        if (head.rows != first_head.rows)
            return {Code::mismatch,
                    fmt::format("payload_bytes: rank {} has others than rank 0. Give all ranks the same payloads.", r)};
        size_t i = 0;
        for (const OptionInfo& info : option_table()) {
            if (!info.agreed) continue;
            if (i >= values.size() || i >= first.size())
                return {Code::mismatch,
                        fmt::format("ranks 0 and {} know different options. Start all ranks from one version.", r)};
            if (values[i] != first[i]) {
                Options a, b;
                info.set(a, first[i]);
                info.set(b, values[i]);
                std::string text = fmt::format("option {}: rank 0 has {}, rank {} has {}. Give all ranks the same.", info.name,
                                               option_text(info, a), r, option_text(info, b));
                const bool by_landing =
                    info.name == std::string_view("landing") || info.name == std::string_view("group_ranks");
                if (by_landing && (head.automatic || first_head.automatic))
                    text +=
                        " With landing auto each rank chose by the calibration in its cache folder and by the NUMA nodes it "
                        "sees: name a landing, or give all ranks the same HOME.";
                return {Code::mismatch, std::move(text)};
            }
            ++i;
        }
        if (head.has_table != first_head.has_table || head.table != first_head.table)
            return {Code::mismatch,
                    fmt::format("placement table: rank 0 has {}, rank {} has {} (hash). Give all ranks the same.",
                                table_text(first_head), r, table_text(head))};
    }
    return {};
}

// ----------------------------------------------------------------------------------------------------------------- waiting

// How long a wait keeps its CPU busy before it sleeps.
struct Patience {
    int64_t spin_ns = 0;
    int64_t yield_ns = 0;

    /// Spinning pays only while nobody who is awaited needs this CPU. Where a few ranks share one, handing it on costs less
    /// than being woken; where many do, it comes round to ranks that wait as well. Measured: docs/performance.md, "What was
    /// tried".
    static Patience of(int64_t threads, int64_t cpus) {
        if (threads <= cpus) return {200'000, 0};
        return {0, threads <= 4 * cpus ? 500'000 : 0};
    }
};

// Polls a step until it ends; between two looks it spins, then lets others run, then sleeps, in slices.
class Waiter {
 public:
    Waiter(ep::Rank& rank, Patience patience) : rank_(rank), link_(rank.link), patience_(patience) {}

    /// poll(thorough) -> Progress; waited(ns) tells how long nothing was done before the next poll; at the deadline
    /// give_up(waited_ms) ends the step. Returns the step's end.
    template <class Poll, class Waited, class GiveUp>
    ep::Progress wait(Deadline deadline, Poll poll, Waited waited, GiveUp give_up) {
        constexpr int64_t slice_ns = 10'000'000;  // bounds what a raiser that dies between flag and wake-up can cost
        int64_t spin_until = now_ns() + patience_.spin_ns;
        int64_t yield_until = spin_until + patience_.yield_ns;
        Shown shown(rank_);
        for (;;) {
            ep::Progress progress = poll(false);  // model: wait
            if (progress != ep::Progress::pending) return progress;
            const int64_t now = now_ns();
            if (now >= deadline.at_ns) {
                // One last look: a rank that was stopped itself may find everything there.
                if (progress = poll(true); progress != ep::Progress::pending) return progress;  // model: last_look
                give_up(deadline.waited_ms());
                return ep::Progress::failed;
            }
            if (now < spin_until) {
                relax();
            } else if (now < yield_until) {
                sched_yield();
            } else {
                shown.since(deadline.start_ns);
                const Announced asleep(link_);  // model: announced
                progress = poll(true);          // model: announced_look
                if (progress != ep::Progress::pending) return progress;
                // model: asleep
                link_.sleep(asleep.ticket, std::min(slice_ns, deadline.at_ns - now));
                spin_until = now_ns() + std::min<int64_t>(patience_.spin_ns, 20'000);
                yield_until = spin_until;  // who has slept once waits for more than a switch
            }
            waited(now_ns() - now);
        }
    }

 private:
    struct Announced {
        explicit Announced(Transport& l) : link(l), ticket(l.announce()) {}  // model: announce
        ~Announced() { link.awake(); }                                       // model: awake
        Transport& link;
        const uint32_t ticket;
    };
    // Shows who looks from outside since when this rank waits (switchyard/inspect.hpp). No rank reads it: no step of the
    // protocol, and it orders nothing. Taken back when the wait ends, however it does.
    struct Shown {
        explicit Shown(ep::Rank& rank) : bell(*reinterpret_cast<layout::Bell*>(rank.own(rank.window.bell))) {}
        ~Shown() {
            if (is_shown) since(0);
        }
        void since(int64_t ns) {
            is_shown = true;
            std::atomic_ref<int64_t>(bell.waiting_since_ns).store(ns, std::memory_order_relaxed);
        }
        layout::Bell& bell;
        bool is_shown = false;
    };
    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }
    ep::Rank& rank_;
    Transport& link_;
    const Patience patience_;
};

}  // namespace

Group Group::from_environment(const std::string& label) {
    Group group;
    group.size = static_cast<int>(number_from_environment("WORLD_SIZE", 1, ranks_max));
    group.rank = static_cast<int>(number_from_environment("RANK", 0, group.size - 1));
    if (std::getenv("LOCAL_WORLD_SIZE"))
        if (const int64_t local = number_from_environment("LOCAL_WORLD_SIZE", 1, group.size); local != group.size)
            throw Error(
                Status(Code::bad_input, fmt::format("LOCAL_WORLD_SIZE is {} and WORLD_SIZE {}: the job spans several hosts; "
                                                    "this build joins the ranks of one host.",
                                                    local, group.size)));
    const char* address = std::getenv("MASTER_ADDR");
    const char* port = std::getenv("MASTER_PORT");
    const char* token = std::getenv("SWITCHYARD_TOKEN");
    if (group.size > 1 && (!address || !port))
        throw Error(Status(Code::bad_input,
                           fmt::format("environment variable {} is not set; it tells this job from others on the host.",
                                       address ? "MASTER_PORT" : "MASTER_ADDR")));
    group.name = fmt::format("{}:{}/{}", address ? address : "", port ? port : "", label);
    group.token = token ? token : "";
    return group;
}

// --------------------------------------------------------------------------------------------------------------- session

// One dispatch or combine, from the call that begins it to the one that is told its end. Each slot has one: a combine begins
// when the end of its dispatch was told.
struct Operation {
    enum class State : uint32_t {
        none,
        posted,  // to be begun by the session's worker
        moving,
        done,
        failed,
    };
    // Stored with release, loaded with acquire: posted hands the arguments to the worker, done and failed hand the results, and
    // the arguments' memory, back to the caller.
    std::atomic<State> state{State::none};
    // These four belong to the caller, and to the worker from posted to the end.
    bool is_dispatch = true;
    uint64_t epoch = 0;
    Deadline deadline;
    ep::Flight* flight = nullptr;

    DispatchArgs dispatch_args;
    Status refusal;  // of the caller, which this dispatch carries to the others
    CombineArgs combine_args;
    ep::DispatchStep dispatch;
    ep::CombineStep combine;
    std::exception_ptr broken;  // what was thrown in a step: no memory for a text, say

    bool has_ended() const {
        const State now = state.load(std::memory_order_acquire);  // pairs with the release in Impl::end()
        return now == State::done || now == State::failed;
    }
};

// Operations move in slots of their own and share the rest of this rank: its workers, scratch, counters, its place in the order
// of flags. So one thread at a time moves them: the caller, or with option progress the worker, which holds `moving` meanwhile.
// Then the caller never begins or moves anything itself; what else it does with flags or workers, it does in a Turn.
struct Session::Impl {
    std::unique_ptr<Transport> link;
    std::unique_ptr<ep::Workers> workers;
    std::unique_ptr<ep::Rank> rank;
    std::vector<ep::Flight> flights;    // [depth]
    std::vector<Operation> operations;  // [depth]
    std::vector<Operation*> active;     // those that move, oldest epoch first
    ep::Await gate;                     // of x()
    ep::RegroupStep regroup;
    bool regrouping = false;     // asked, and not decided yet
    std::vector<int64_t> waits;  // [R] ns that this rank lacked only what that rank, and those behind it, owed
    std::vector<int> pinned;     // [workers-1] CPU of each helper, with option pin
    uint64_t last_epoch = 0;
    Chosen chosen;  // of landing automatic
    Patience patience;
    int64_t looked_ns = 0;  // when look() was thorough
    Status untold;          // an error of mine that the other ranks must hear of in the next dispatch
    bool connected = false;
    bool closed = false;

    // Option progress
    std::unique_ptr<std::thread> progress;
    std::mutex moving;
    std::atomic<int> turns{0};       // callers that want `moving`; the worker lets them go first
    std::atomic<uint32_t> posts{0};  // grows when there is something new for the worker. Release, pairs with its acquire loads
    std::atomic<uint32_t> ends{0};   // grows when an operation has ended, or the alarm has rung. Likewise for the caller
    std::atomic<bool> stop{false};
    const Operation* watched = nullptr;  // a dispatch of which the caller awaits a part; under `moving`
    int64_t watched_part = 0;
    static constexpr int64_t never_ns = std::numeric_limits<int64_t>::max();
    std::atomic<int64_t> alarm_ns{never_ns};  // when the caller wants to hear of ends that did not come. Ordered by posts

    explicit Impl(std::unique_ptr<Transport> transport) : link(std::move(transport)) {}
    ~Impl() {
        close();
        if (rank && !rank->here()) {  // a forked child does not have the threads
            static_cast<void>(workers.release());
            static_cast<void>(progress.release());
        } else if (progress) {
            stop.store(true, std::memory_order_relaxed);  // ordered by posts
            tell_worker();
            progress->join();
        }
    }

    // The right to move operations, and to use what they share. Costs nothing without a worker.
    class Turn {
     public:
        explicit Turn(Impl& s) : s_(s), locks_(s.progress && s.rank->here()) {
            if (!locks_) return;
            s_.turns.fetch_add(1, std::memory_order_relaxed);  // a hint; the mutex orders
            s_.moving.lock();
            s_.turns.fetch_sub(1, std::memory_order_relaxed);
        }
        ~Turn() {
            if (locks_) s_.moving.unlock();
        }
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;

     private:
        Impl& s_;
        const bool locks_;  // not in a forked child, whose copy of the mutex nobody may ever unlock
    };
    // What of a dispatch may be here before its end: the rows of a local expert, or the counts.
    static constexpr int64_t part_counts = -1;
    bool has(const Operation& op, int64_t part) const {
        return part == part_counts ? op.dispatch.has_counts(*rank) : op.dispatch.has_rows_of(*rank, *op.flight, part);
    }
    void tell_worker() {
        posts.fetch_add(1, std::memory_order_release);
        posts.notify_one();
        if (connected) link->nudge();  // it may sleep for flags
    }

    Operation& post_dispatch(const DispatchArgs& args, const Status& refusal = {});
    Operation& post_combine(ExpertBatch& batch, const CombineArgs& args);
    void post(Operation& op);
    void begin(Operation& op);
    void move(bool thorough);
    void look();
    void end(Operation& op, bool well);
    void break_off(Operation& op);
    void expire();
    int64_t first_deadline() const;
    void waited_in(Operation& op, int64_t ns);
    bool wait(Operation& op, int64_t until_ns);
    template <class Ready>
    bool wait_until(int64_t until_ns, Ready ready, Operation& op);
    void take_end(Operation& op);
    void withdraw(Operation& op, Code code);
    void begin_posted();
    void serve();

    static std::shared_ptr<Impl> open(const Options& options, std::unique_ptr<Transport> link, const PlacementTable* table,
                                      uint64_t rows, const Status& refused);

    /// What this rank can find wrong alone; otherwise everything it needs is allocated, down to the last thread.
    Status prepare(Options options, const PlacementTable* table);

    /// Helper i stays on the ith CPU, the first being left to the caller's thread; around again when there are fewer.
    void pin_helpers(const std::vector<int>& cpus) {
        if (cpus.empty()) return;
        std::atomic<bool> refused = false;
        pinned.assign(static_cast<size_t>(workers->count() - 1), -1);
        workers->run([&](int64_t worker) {
            if (worker == 0) return;
            const int cpu = cpus[static_cast<size_t>(worker) % cpus.size()];
            if (pin_this_thread(cpu))
                pinned[static_cast<size_t>(worker - 1)] = cpu;
            else
                refused = true;
        });
        if (refused) pinned.clear();
    }

    /// Raises `closed`, then drops what is open: who finds a batch dropped knows why. Never waits.
    void close() {
        if (closed || !connected) return;
        closed = true;
        if (!rank->here()) return;  // a forked child does not have the windows
        const Turn turn(*this);
        ep::raise_closed(*rank);  // model: close
        for (Operation& op : operations) withdraw(op, Code::peer_closed);
        for (ep::Flight& f : flights)
            if (f.open) ep::drop(*rank, f);  // model: close_drops
    }

    void refuse_closed(const char* call) const {
        if (closed) throw Error(Status(Code::stale, fmt::format("{} on a session that was closed. Open a new one.", call)));
        if (!rank->here())
            throw Error(
                Status(Code::stale, fmt::format("{} in process {} on a session of process {}: a forked child has no windows. "
                                                "Fork first, then open.",
                                                call, getpid(), rank->born.process())));
    }
    void refuse_ended(const char* call) const {
        refuse_closed(call);
        if (regrouping)
            throw Error(
                Status(Code::stale, fmt::format("{} on a session whose shrink() has not ended well. Call shrink() again, "
                                                "or close the session.",
                                                call)));
    }
    void refuse_open(const ep::Flight& flight, uint64_t epoch) const {
        const Operation& op = operations[epoch % operations.size()];
        if (op.state.load(std::memory_order_acquire) != Operation::State::none)  // pairs with end()
            throw Error(Status(Code::depth,
                               fmt::format("dispatch {}: the {} of epoch {} was begun and its end not taken, and depth is {}. "
                                           "Wait for its handle first, or open the session with a larger depth.",
                                           epoch, op.is_dispatch ? "dispatch" : "combine", op.epoch, rank->options.depth)));
        if (flight.open)  // model: refuse_open
            throw Error(Status(Code::depth,
                               fmt::format("dispatch {}: epoch {} is still open and depth is {}. Combine or drop its batch "
                                           "first, or open the session with a larger depth.",
                                           epoch, flight.epoch, rank->options.depth)));
    }
    void waited_for(int peer, int64_t ns) {
        if (peer >= 0) waits[static_cast<size_t>(peer)] += ns;
        rank->trace.waited(peer, ns);
    }
    Deadline deadline(int64_t timeout_ms) const {
        return Deadline::after_ms(timeout_ms > 0 ? timeout_ms : rank->options.timeout_ms);
    }
};

Status Session::Impl::prepare(Options options, const PlacementTable* table) {
    const auto ranks = static_cast<int64_t>(link->size());
    if (Status s = check_options(options, ranks); !s.ok()) return s;
    if (table) {
        if (Status s = table->check(); !s.ok()) return s;
        if (table->ranks != ranks || table->experts != options.experts)
            return {Code::bad_input,
                    fmt::format("placement table: it is for {} ranks and {} experts; the group has {} and option "
                                "experts is {}. Plan one for them.",
                                table->ranks, table->experts, ranks, options.experts)};
    }
    const quant::Kernels* kernels = quant::find_kernels(options.simd);
    if (!kernels) {
        std::string have;
        for (const quant::Kernels* k : quant::available_kernels())
            have += fmt::format("{}{}", have.empty() ? "" : ", ", k->name);
        return {Code::bad_input, fmt::format("option simd is {}; this build on this processor has: {}.",
                                             option_text(*find_option("simd"), options), have)};
    }
    options.simd = kernels->simd;
    try {
        chosen = choose_landing(options, ranks);
    } catch (const Error& e) {  // the file of the calibration
        return {e.code(), e.what()};
    }
    layout::Window window{};
    const int64_t experts = options.experts;
    if (table) options.experts = table->slots();  // the engine moves rows to slots
    if (Status s = ep::plan_window(options, ranks, &window); !s.ok()) return s;
    options.experts = experts;
    try {
        workers = std::make_unique<ep::Workers>(options.workers);
        rank = std::make_unique<ep::Rank>(*link, window, *kernels, *workers, options,
                                          table ? plan::turns_of(*table, link->rank()) : ep::Turns());
        flights.resize(static_cast<size_t>(options.depth));
        for (ep::Flight& f : flights) f.allocate(*rank);
        operations = std::vector<Operation>(static_cast<size_t>(options.depth));
        for (size_t i = 0; i < operations.size(); ++i) {
            operations[i].flight = &flights[i];
            operations[i].dispatch.allocate(*rank);
            operations[i].combine.allocate(*rank);
        }
        active.reserve(operations.size());
        gate.allocate(*rank);
        regroup.allocate(*rank);
        waits.resize(static_cast<size_t>(ranks));
    } catch (const std::system_error& e) {
        return {Code::system,
                fmt::format("{} worker threads cannot be started: {}. Lower option workers.", options.workers - 1, e.what())};
    } catch (const std::bad_alloc&) {
        return {Code::system,
                fmt::format("no memory for the tables of {} flights of {} tokens with {} experts each. Lower tokens_max, "
                            "topk or depth.",
                            options.depth, options.tokens_max, options.topk)};
    }
    patience = Patience::of(ranks * options.workers, usable_cpus());
    if (options.progress == ProgressBy::worker) {
        try {
            progress = std::make_unique<std::thread>([this] {
                posts.wait(0, std::memory_order_acquire);  // for the first post, or the end; pairs with tell_worker()
                serve();
            });
        } catch (const std::system_error& e) {
            return {Code::system,
                    fmt::format("the progress worker cannot be started: {}. Leave option progress at caller.", e.what())};
        }
    }
    return {};
}

std::shared_ptr<Session::Impl> Session::Impl::open(const Options& options, std::unique_ptr<Transport> link,
                                                   const PlacementTable* table, uint64_t rows, const Status& refused) {
    auto impl = std::make_shared<Impl>(std::move(link));
    const Deadline deadline = Deadline::after_ms(options.timeout_ms >= 1 ? options.timeout_ms : Options().timeout_ms);

    // A rank that refuses still meets the others, so that all of them get the error.
    const Status refusal = refused.ok() ? impl->prepare(options, table) : refused;
    const std::vector<std::byte> card =
        make_card(refusal.ok() ? impl->rank->options : options, table, rows, options.landing == Landing::automatic, refusal);
    std::vector<std::vector<std::byte>> cards;
    throw_if(impl->link->attach({.card = card,
                                 .window_bytes = refusal.ok() ? impl->rank->window.bytes : 0,
                                 .bell_offset = refusal.ok() ? impl->rank->window.bell : 0,
                                 .huge_pages = options.huge_pages},
                                deadline, &cards));
    throw_if(compare_cards(cards));
    if (!impl->link->window())
        throw Error(Status(Code::corrupt,
                           fmt::format("rank {}: all ranks have the same options, but not windows of one size. A process of "
                                       "this group does not follow the window format. Start all ranks from one build.",
                                       impl->link->rank())));
    throw_if(impl->rank->connect());
    if (options.pin) impl->pin_helpers(own_cpus(cards, static_cast<size_t>(impl->link->rank())));
    const layout::WindowHeader header = layout::header_of(impl->rank->window, impl->link->rank(), impl->rank->born.process());
    std::memcpy(impl->link->window(), &header, sizeof header);
    impl->connected = true;
    return impl;
}

namespace {
std::unique_ptr<Transport> transport_of(const Group& group) {
    if (group.size < 1 || group.rank < 0 || group.rank >= group.size)
        throw Error(
            Status(Code::bad_input, fmt::format("group: rank {} of {}; allowed: rank 0..size-1.", group.rank, group.size)));
    return make_shm_transport({.rank = group.rank, .size = group.size, .name = group.name, .token = group.token});
}
}  // namespace

Session Session::open(const Options& options, const Group& group) {
    return Session(Impl::open(options, transport_of(group), nullptr, 0, {}));
}

Session Session::open(const Options& options, const Group& group, const PlacementTable& table) {
    return Session(Impl::open(options, transport_of(group), &table, 0, {}));
}

Session Session::open_rows(const Options& options, const Group& group, uint64_t rows, const Status& refusal) {
    return Session(Impl::open(options, transport_of(group), nullptr, rows, refusal));
}

void Session::check_ranks_of_open_local(int64_t ranks) {
    if (ranks < 1 || ranks > ranks_max)
        throw Error(Status(Code::bad_input, fmt::format("open_local: {} ranks; allowed: 1..{}.", ranks, ranks_max)));
}

std::vector<Session> Session::open_local(const Options& options, int ranks) {
    check_ranks_of_open_local(ranks);
    return open_local(std::vector<Options>(static_cast<size_t>(ranks), options));
}

std::vector<Session> Session::open_local(const Options& options, const PlacementTable& table) {
    throw_if(table.check());  // it says how many ranks there are
    const auto ranks = static_cast<size_t>(table.ranks);
    return open_local(std::vector<Options>(ranks, options), std::vector<PlacementTable>(ranks, table));
}

std::vector<Session> Session::open_local(std::span<const Options> options, std::span<const PlacementTable> tables) {
    return open_local_rows(options, tables, {});
}

std::vector<Session> Session::open_local_rows(std::span<const Options> options, std::span<const PlacementTable> tables,
                                              std::span<const uint64_t> rows) {
    if (options.empty()) throw Error(Status(Code::bad_input, "open_local: no ranks; give one Options per rank."));
    check_ranks_of_open_local(static_cast<int64_t>(options.size()));
    if (!tables.empty() && tables.size() != options.size())
        throw Error(Status(Code::bad_input, fmt::format("open_local: {} tables for {} ranks; give one per rank, or none.",
                                                        tables.size(), options.size())));
    std::vector<std::unique_ptr<Transport>> links = make_local_transports(static_cast<int>(options.size()));
    std::vector<std::shared_ptr<Impl>> impls(options.size());
    std::vector<std::exception_ptr> errors(options.size());
    std::vector<std::thread> threads;
    Status refused;
    try {
        for (size_t r = 0; r < options.size(); ++r)
            threads.emplace_back([&, r] {
                try {
                    impls[r] = Impl::open(options[r], std::move(links[r]), tables.empty() ? nullptr : &tables[r],
                                          rows.empty() ? 0 : rows[r], {});
                } catch (...) {
                    errors[r] = std::current_exception();
                }
            });
    } catch (const std::system_error& e) {
        refused = Status(Code::system, fmt::format("open_local: thread {} of {} cannot be started: {}.", threads.size(),
                                                   options.size(), e.what()));
        for (size_t r = threads.size(); r < links.size(); ++r) links[r].reset();  // those that started stop waiting
    }
    for (std::thread& t : threads) t.join();
    throw_if(refused);
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
    std::vector<Session> sessions;
    sessions.reserve(impls.size());
    for (std::shared_ptr<Impl>& impl : impls) sessions.push_back(Session(std::move(impl)));
    return sessions;
}

Session::Impl& Session::impl() const {
    if (!impl_) throw Error(Status(Code::stale, "call on a session that was moved away."));
    return *impl_;
}

Session::Session(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&& other) noexcept {
    if (this != &other) {
        if (impl_) impl_->close();
        impl_ = std::move(other.impl_);
    }
    return *this;
}
Session::~Session() {
    if (impl_) impl_->close();
}
void Session::close() {
    if (impl_) impl_->close();
}

// ------------------------------------------------------------------------------------------------------------ operations

Operation& Session::Impl::post_dispatch(const DispatchArgs& args, const Status& refusal) {
    refuse_ended("dispatch");
    if (last_epoch >= layout::Word::epoch_max)
        throw Error(Status(Code::capacity, "the last epoch of this session is used up. Open a new one."));
    const uint64_t epoch = last_epoch + 1;
    Operation& op = operations[epoch % operations.size()];
    refuse_open(*op.flight, epoch);
    last_epoch = epoch;
    op.flight->epoch = epoch;
    op.flight->slot = epoch % operations.size();
    op.is_dispatch = true;
    op.epoch = epoch;
    op.deadline = deadline(args.timeout_ms);
    op.dispatch_args = args;
    op.refusal = refusal;
    post(op);
    return op;
}

Operation& Session::Impl::post_combine(ExpertBatch& batch, const CombineArgs& args) {
    refuse_ended("combine");
    if (!batch.flight_) throw Error(Status(Code::stale, "combine of an empty batch: it was combined already, or moved away."));
    if (batch.session_.get() != this)
        throw Error(Status(Code::stale,
                           fmt::format("combine on rank {} of a batch that another session dispatched (epoch {} of rank {}).",
                                       link->rank(), batch.epoch_, batch.flight_->rank->me())));
    ep::Flight& flight = *batch.flight_;
    // The epoch first: of a later one in this slot the worker may be changing `open`.
    if (flight.epoch != batch.epoch_ || !flight.open)
        throw Error(
            Status(Code::stale, fmt::format("combine of the batch of epoch {}, which has ended; its slot holds epoch {} now.",
                                            batch.epoch_, flight.epoch)));
    Operation& op = operations[flight.slot];
    op.is_dispatch = false;
    op.epoch = flight.epoch;
    op.deadline = deadline(args.timeout_ms);
    op.combine_args = args;
    batch.session_.reset();  // the batch is used up; the caller keeps the session
    batch.flight_ = nullptr;
    post(op);
    return op;
}

// Hands the operation to the worker; or begins it here, and does what can be done of it.
void Session::Impl::post(Operation& op) {
    if (progress) {
        op.state.store(Operation::State::posted, std::memory_order_release);  // pairs with the acquire in begin_posted()
        return tell_worker();
    }
    begin(op);
    move(false);
}

void Session::Impl::begin(Operation& op) {
    op.state.store(Operation::State::moving, std::memory_order_relaxed);  // only who moves it asks
    active.insert(std::find_if(active.begin(), active.end(), [&](const Operation* other) { return other->epoch > op.epoch; }),
                  &op);
    try {
        if (op.is_dispatch) {
            ++rank->stats.dispatches;
            const Status prior = std::exchange(untold, {});  // an older error goes first
            op.dispatch.start(*rank, *op.flight, op.dispatch_args, prior.ok() ? op.refusal : prior);  // model: prior_told
        } else {
            ++rank->stats.combines;
            op.combine.start(*rank, *op.flight, op.combine_args);
        }
    } catch (...) {
        break_off(op);
    }
}

// One look at every operation that moves. Who moves one moves all: the ranks may wait for theirs in any order.
void Session::Impl::move(bool thorough) {
    for (size_t i = 0; i < active.size();) {
        Operation& op = *active[i];
        try {
            const ep::Progress progress_of =
                op.is_dispatch ? op.dispatch.poll(*rank, *op.flight, thorough) : op.combine.poll(*rank, *op.flight, thorough);
            if (progress_of == ep::Progress::pending)
                ++i;
            else
                end(op, progress_of == ep::Progress::done);
        } catch (...) {
            break_off(op);
        }
    }
}

// The caller's look, which may be the first for long. Nothing with a worker, which looks all the time.
void Session::Impl::look() {
    if (progress || active.empty()) return;
    const int64_t now = now_ns();
    const bool late = now >= first_deadline();
    const bool thorough = late || now - looked_ns > 1'000'000;
    if (thorough) looked_ns = now;
    move(thorough);
    if (late) expire();
}

// Takes the operation off those that move; from now on it is the caller's.
void Session::Impl::end(Operation& op, bool well) {
    std::erase(active, &op);
    if (!op.is_dispatch) {
        rank->edge(well ? Edge::combined : Edge::combine_failed, op.epoch);
        if (!well && op.combine.untold())  // model: prior
            untold = Status(op.combine.status().code(),
                            fmt::format("rank {}: its combine of epoch {} failed after this rank's rows had been offered: {}",
                                        link->rank(), op.epoch, op.combine.status().text()));
    }
    // Pairs with the acquire in has_ended().
    op.state.store(well ? Operation::State::done : Operation::State::failed, std::memory_order_release);
    if (!progress) return;
    ends.fetch_add(1, std::memory_order_release);
    ends.notify_all();
}

// Called where an exception is caught: no memory for an error text, say. Does not allocate.
void Session::Impl::break_off(Operation& op) {
    op.broken = std::current_exception();
    if (op.is_dispatch)
        op.dispatch.abandon(*rank, *op.flight);
    else
        op.combine.abandon(*rank, *op.flight);
    std::erase(active, &op);
    op.state.store(Operation::State::failed, std::memory_order_release);  // as in end()
    ends.fetch_add(1, std::memory_order_release);
    ends.notify_all();
}

// Gives up what is late.
void Session::Impl::expire() {
    for (size_t i = 0; i < active.size();) {
        Operation& op = *active[i];
        if (!op.deadline.passed()) {
            ++i;
            continue;
        }
        try {
            if (op.is_dispatch)
                op.dispatch.give_up(*rank, *op.flight, op.deadline.waited_ms());
            else
                op.combine.give_up(*rank, *op.flight, op.deadline.waited_ms());
            end(op, false);
        } catch (...) {
            break_off(op);
        }
    }
}

int64_t Session::Impl::first_deadline() const {
    int64_t first = never_ns;
    for (const Operation* op : active) first = std::min(first, op->deadline.at_ns);
    return first;
}

void Session::Impl::waited_in(Operation& op, int64_t ns) {
    SessionStats& stats = rank->stats;
    if (!op.is_dispatch) {
        stats.wait_ns_returned += ns;
        return waited_for(op.combine.awaited(), ns);
    }
    const bool for_rows = op.dispatch.phase() == ep::DispatchStep::Phase::rows;
    (for_rows ? stats.wait_ns_rows : stats.wait_ns_counts) += ns;
    waited_for(op.dispatch.awaited(), ns);
}

// Waits until ready() is true, which the movement of `op` makes it, or `until_ns`. The ends of operations make it look again.
template <class Ready>
bool Session::Impl::wait_until(int64_t until_ns, Ready ready, Operation& op) {
    if (!progress) {
        while (!ready()) {
            const int64_t at = std::min(until_ns, first_deadline());
            Waiter(*rank, patience)
                .wait(
                    Deadline{at, op.deadline.start_ns},
                    [&](bool thorough) {
                        move(thorough);
                        return ready() ? ep::Progress::done : ep::Progress::pending;
                    },
                    [&](int64_t ns) { waited_in(op, ns); }, [&](int64_t) { expire(); });
            if (now_ns() >= until_ns) return ready();
        }
        return true;
    }
    bool alarm = false;
    for (;;) {
        const uint32_t seen = ends.load(std::memory_order_acquire);  // pairs with end() and serve()
        if (ready()) break;
        if (until_ns != never_ns) {
            if (now_ns() >= until_ns) return false;
            if (!alarm) {
                alarm = true;
                alarm_ns.store(until_ns, std::memory_order_relaxed);
                tell_worker();
                continue;
            }
        }
        ends.wait(seen, std::memory_order_acquire);
    }
    if (alarm) alarm_ns.store(never_ns, std::memory_order_relaxed);
    return true;
}

bool Session::Impl::wait(Operation& op, int64_t until_ns) {
    return op.has_ended() || wait_until(
                                 until_ns, [&] { return op.has_ended(); }, op);
}

// Frees the operation, and throws its error.
void Session::Impl::take_end(Operation& op) {
    const bool well = op.state.load(std::memory_order_acquire) == Operation::State::done;  // pairs with the release in end()
    op.state.store(Operation::State::none, std::memory_order_relaxed);
    if (well) return;
    if (op.broken) std::rethrow_exception(std::exchange(op.broken, nullptr));
    throw Error(op.is_dispatch ? op.dispatch.status() : op.combine.status());
}

// The caller does not want its end any more. In a Turn. Afterwards nothing the arguments point to is touched. What was posted
// is begun first, so that the others see the same whether the worker had come to it or not.
void Session::Impl::withdraw(Operation& op, Code code) {
    if (op.state.load(std::memory_order_acquire) == Operation::State::posted) {
        begin_posted();
        move(false);  // as post() would have: beyond its gate it can tell the others why
    }
    if (op.state.load(std::memory_order_acquire) == Operation::State::moving) {
        std::erase(active, &op);
        try {
            if (!op.is_dispatch) {
                op.combine.abandon(*rank, *op.flight);
                rank->edge(Edge::combine_failed, op.epoch);
            } else if (code == Code::ok) {
                op.dispatch.withdraw(*rank, *op.flight);
            } else {
                op.dispatch.abandon(*rank, *op.flight, code);
            }
        } catch (...) {  // no memory for the text
            op.dispatch.abandon(*rank, *op.flight);
        }
    }
    op.broken = nullptr;
    op.state.store(Operation::State::none, std::memory_order_release);
}

// In the order of epochs.
void Session::Impl::begin_posted() {
    for (;;) {
        Operation* next = nullptr;
        for (Operation& op : operations)
            if (op.state.load(std::memory_order_acquire) == Operation::State::posted && (!next || op.epoch < next->epoch))
                next = &op;
        if (!next) return;
        begin(*next);
    }
}

// The progress worker: as the caller waits for one, it waits for all; without any it sleeps until something is posted.
void Session::Impl::serve() {
    // It never yields instead of sleeping, because the CPU it would come back to is that of the experts.
    const Patience own = Patience::of(static_cast<int64_t>(link->size()) * (rank->options.workers + 1), usable_cpus());
    Waiter waiter(*rank, {own.spin_ns, 0});
    uint32_t seen = 0;
    int64_t at = never_ns, start = 0;  // what the oldest operation waits for until, and since
    const auto look = [&](bool thorough) {
        while (turns.load(std::memory_order_relaxed) > 0) sched_yield();
        const std::lock_guard<std::mutex> lock(moving);
        const uint32_t now = posts.load(std::memory_order_acquire);  // pairs with tell_worker()
        const bool is_new = std::exchange(seen, now) != now;
        if (is_new) begin_posted();
        move(thorough);
        at = active.empty() ? never_ns : std::min(first_deadline(), alarm_ns.load(std::memory_order_relaxed));
        start = active.empty() ? 0 : active.front()->deadline.start_ns;
        if (watched && has(*watched, watched_part)) {
            watched = nullptr;
            ends.fetch_add(1, std::memory_order_release);  // pairs with wait_until()
            ends.notify_all();
        }
        return is_new || active.empty() ? ep::Progress::done : ep::Progress::pending;
    };
    while (!stop.load(std::memory_order_relaxed)) {
        if (look(false) == ep::Progress::done && at == never_ns) {
            // Again: the post that look() has seen may be that of the end, after which none comes.
            if (stop.load(std::memory_order_relaxed)) break;
            posts.wait(seen, std::memory_order_acquire);  // pairs with tell_worker()
            continue;
        }
        waiter.wait(
            Deadline{at, start}, look,
            [&](int64_t ns) {
                const std::lock_guard<std::mutex> lock(moving);
                if (!active.empty()) waited_in(*active.front(), ns);
            },
            [&](int64_t) {
                const std::lock_guard<std::mutex> lock(moving);
                expire();
            });
        // Unless the caller has set another one meanwhile.
        int64_t rings = alarm_ns.load(std::memory_order_relaxed);
        if (now_ns() >= rings && alarm_ns.compare_exchange_strong(rings, never_ns, std::memory_order_relaxed)) {
            ends.fetch_add(1, std::memory_order_release);
            ends.notify_all();
        }
    }
}

ExpertBatch Session::dispatch(const DispatchArgs& args) {
    Impl& s = impl();
    Operation& op = s.post_dispatch(args);
    s.wait(op, Impl::never_ns);
    s.take_end(op);
    return ExpertBatch(impl_, op.flight, op.epoch);
}

void Session::refuse_dispatch(const Status& why, uint64_t tag, int64_t timeout_ms) {
    Impl& s = impl();
    Operation& op = s.post_dispatch({.tag = tag, .timeout_ms = timeout_ms}, why);
    s.wait(op, Impl::never_ns);
    s.take_end(op);
    throw Error(why);
}

PendingDispatch Session::dispatch_async(const DispatchArgs& args) {
    Operation& op = impl().post_dispatch(args);
    return PendingDispatch(impl_, &op, op.epoch, true);
}

void Session::combine(ExpertBatch& batch, const CombineArgs& args) {
    Impl& s = impl();
    const std::shared_ptr<Impl> alive = impl_;  // what the batch views stays readable until this call returns
    Operation& op = s.post_combine(batch, args);
    s.wait(op, Impl::never_ns);
    s.take_end(op);
}

PendingCombine Session::combine_async(ExpertBatch& batch, const CombineArgs& args) {
    Operation& op = impl().post_combine(batch, args);
    return PendingCombine(impl_, &op, op.epoch, false);
}
PendingCombine Session::combine_async(ExpertBatch&& batch, const CombineArgs& args) {
    return combine_async(batch, args);
}

void Session::progress() {
    Impl& s = impl();
    if (!s.closed && s.rank->here()) s.look();
}

void* Session::x(int64_t timeout_ms) {
    Impl& s = impl();
    s.refuse_ended("x");
    const Options& o = s.rank->options;
    if (o.landing != Landing::in_place || o.dispatch_quant != Format::none) return nullptr;
    // The next dispatch's slot: free once every rank has closed the epoch that used it.
    const uint64_t epoch = s.last_epoch + 1;
    ep::Flight& flight = s.flights[epoch % static_cast<uint64_t>(o.depth)];
    s.refuse_open(flight, epoch);
    ep::Flight next;
    next.epoch = epoch;
    next.slot = epoch % static_cast<uint64_t>(o.depth);
    s.gate.begin_gate(*s.rank, next);  // model: x_gate
    const Deadline deadline = s.deadline(timeout_ms);
    Status late;
    const ep::Progress end =
        Waiter(*s.rank, s.patience)
            .wait(
                deadline,
                [&](bool thorough) {
                    const Impl::Turn turn(s);
                    if (!s.progress) {  // a peer may wait for one of these before it closes that epoch
                        s.move(thorough);
                        if (now_ns() >= s.first_deadline()) s.expire();
                    }
                    return s.gate.poll(*s.rank, thorough);
                },
                [&](int64_t ns) {
                    const Impl::Turn turn(s);
                    s.rank->stats.wait_ns_counts += ns;
                    s.waited_for(s.gate.first_awaited(), ns);
                },
                [&](int64_t ms) {
                    late = Status(Code::timed_out, fmt::format("x of dispatch {} timed out on rank {} after {} ms "
                                                               "waiting for {}.",
                                                               epoch, s.link->rank(), ms, s.gate.awaited()));
                });
    if (end != ep::Progress::done) throw Error(late.ok() ? s.gate.failure() : late);
    const layout::Window& w = s.rank->window;
    return s.rank->own(w.slot(next.slot) + w.x);
}

void* Session::x_if_free(int64_t& timeout_ms) {
    const int64_t all_ms = timeout_ms > 0 ? timeout_ms : impl().rank->options.timeout_ms, start_ns = now_ns();
    void* place = nullptr;
    try {
        place = x(all_ms);
    } catch (const Error&) {  // the dispatch meets the same, and takes its epoch, so that ranks stay in step
    }
    timeout_ms = std::max<int64_t>(1, all_ms - (now_ns() - start_ns) / 1'000'000);
    return place;
}

std::vector<int> Session::shrink(const ShrinkArgs& args) {
    Impl& s = impl();
    const bool again = s.regrouping;  // and stays so until it has ended well
    s.refuse_closed("shrink");
    if (args.timeout_ms < 0)
        throw Error(Status(Code::bad_input, fmt::format("shrink: timeout_ms is {}; allowed: 0 (the session's) or milliseconds.",
                                                        args.timeout_ms)));
    for (const std::byte* window : s.rank->base)
        if (!window)
            throw Error(Status(Code::bad_input,
                               "shrink: the windows of other ranks cannot be loaded over this transport. Open a "
                               "new session with the ranks that are left."));
    if (s.rank->generation >= layout::Turn::generation_max)
        throw Error(Status(Code::capacity, "shrink: the last generation of this session is used up. Open a new one."));
    // Nothing of the old generation is under way here once this rank asks: its workers are idle between calls.
    const Impl::Turn turn(s);
    s.regrouping = true;
    s.active.clear();
    for (Operation& op : s.operations) {
        op.broken = nullptr;
        op.state.store(Operation::State::none, std::memory_order_release);
    }
    for (ep::Flight& f : s.flights) f.open = false;
    s.untold = {};
    Deadline deadline = s.deadline(args.timeout_ms);
    if (!again) s.regroup.start(*s.rank, s.last_epoch + 1);

    for (bool killed = false;; killed = true) {
        bool late = false;
        const ep::Progress end =
            Waiter(*s.rank, s.patience)
                .wait(
                    deadline, [&](bool) { return s.regroup.poll(*s.rank); }, [](int64_t) {}, [&](int64_t) { late = true; });
        if (end == ep::Progress::done) break;
        if (!late) throw Error(s.regroup.status());
        const std::vector<int>& missing = s.regroup.awaited();
        bool all = args.kill_missing && !killed;
        for (const int p : missing) all = all && s.link->kill(p);
        if (!all)
            throw Error(
                Status(Code::timed_out,
                       fmt::format("shrink timed out on rank {} after {} ms: rank{} {} did not call it and {} not ended. A "
                                   "stopped process would go on writing to the windows it holds: end it, or call "
                                   "shrink with kill_missing.",
                                   s.link->rank(), deadline.waited_ms(), missing.size() > 1 ? "s" : "",
                                   fmt::join(missing, ", "), missing.size() > 1 ? "have" : "has")));
        deadline = Deadline::after_ms(5000);
    }
    s.regrouping = false;
    s.last_epoch = s.rank->base_epoch - 1;
    s.rank->edge(Edge::shrunk, s.last_epoch);
    std::vector<int> members;
    for (int p = 0; p < s.link->size(); ++p)
        if (s.rank->is_member(p)) members.push_back(p);
    return members;
}

int Session::rank() const {
    return impl().link->rank();
}
int Session::size() const {
    return impl().link->size();
}
const Options& Session::options() const {
    return impl().rank->options;
}
const char* Session::simd_name() const {
    return impl().rank->kernels.name;
}
int64_t Session::experts_local() const {
    return impl().rank->placement.of_rank[static_cast<size_t>(rank())].count();
}
int64_t Session::window_bytes() const {
    return static_cast<int64_t>(impl().rank->window.bytes);
}
std::vector<TraceEvent> Session::trace() const {
    const Impl::Turn turn(impl());
    return impl().rank->trace.events();
}
std::string Session::memory_text() const {
    const Impl& s = impl();
    const WindowMemory& m = s.link->memory();
    std::string text = fmt::format("pages of {} KiB", m.page_bytes >> 10);
    if (!m.nodes.empty()) text += fmt::format(" on NUMA node{} {}", m.nodes.size() > 1 ? "s" : "", fmt::join(m.nodes, ", "));
    if (!s.pinned.empty())
        text += fmt::format(", helpers on CPU{} {}", s.pinned.size() > 1 ? "s" : "", fmt::join(s.pinned, ", "));
    return text;
}
std::string Session::explain() const {
    const Impl& s = impl();
    if (s.chosen.estimates.empty())
        return fmt::format("landing {}, as asked for", option_text(*find_option("landing"), s.rank->options));
    std::string text = fmt::format("landing {}, of these for {} tokens:\n",
                                   option_text(*find_option("landing"), s.rank->options), s.rank->options.tokens_max);
    for (const Estimate& e : s.chosen.estimates) {
        Options o;
        o.landing = e.landing;
        text += fmt::format("  {:<10} {:>10.1f} us {:>12} bytes  {}\n", option_text(*find_option("landing"), o), e.us, e.bytes,
                            e.why);
    }
    return text + fmt::format("figures: {}", s.chosen.figures);
}
SessionStats Session::stats() const {
    const Impl::Turn turn(impl());
    return impl().rank->stats;
}
SessionLoads Session::loads() const {
    const Impl::Turn turn(impl());
    const ep::Rank& r = *impl().rank;
    SessionLoads loads;
    loads.dispatches = r.seen_dispatches;
    loads.sent.resize(static_cast<size_t>(r.options.experts));
    loads.experts.resize(loads.sent.size());
    loads.slots = r.seen;
    loads.ranks.resize(static_cast<size_t>(r.ranks()));
    for (size_t s = 0; s < r.seen.size(); ++s) {
        const auto e = r.turns.empty() ? s : static_cast<size_t>(r.turns.expert_of[s]);
        loads.sent[e] += r.sent[s];
        loads.experts[e] += r.seen[s];
        loads.ranks[static_cast<size_t>(r.placement.owner[s])] += r.seen[s];
    }
    return loads;
}
void Session::reset_loads() {
    const Impl::Turn turn(impl());
    ep::Rank& r = *impl().rank;
    std::fill(r.sent.begin(), r.sent.end(), 0);
    std::fill(r.seen.begin(), r.seen.end(), 0);
    r.seen_dispatches = 0;
}
std::vector<int64_t> Session::wait_ns_by_rank() const {
    const Impl::Turn turn(impl());
    return impl().waits;
}

// ----------------------------------------------------------------------------------------------------------------- batch

ExpertBatch::ExpertBatch(std::shared_ptr<void> session, ep::Flight* flight, uint64_t epoch)
    : session_(std::move(session)), flight_(flight), epoch_(epoch) {}

ExpertBatch::ExpertBatch(ExpertBatch&& other) noexcept
    : session_(std::move(other.session_)), flight_(std::exchange(other.flight_, nullptr)), epoch_(other.epoch_) {}

ExpertBatch& ExpertBatch::operator=(ExpertBatch&& other) noexcept {
    if (this != &other) {
        ExpertBatch old(std::move(*this));
        session_ = std::move(other.session_);
        flight_ = std::exchange(other.flight_, nullptr);
        epoch_ = other.epoch_;
    }
    return *this;
}

ExpertBatch::~ExpertBatch() {
    // The epoch first: that of a slot used again is the worker's to open.
    if (!flight_ || flight_->epoch != epoch_ || !flight_->open || !flight_->rank->here()) return;
    const Session::Impl::Turn turn(*static_cast<Session::Impl*>(session_.get()));
    ep::drop(*flight_->rank, *flight_);  // model: drop_batch
}

const ep::Flight& ExpertBatch::flight() const {
    if (!flight_ || flight_->epoch != epoch_ || !flight_->open)
        throw Error(Status(Code::stale, fmt::format("the batch of epoch {} has ended; its rows are gone.", epoch_)));
    if (!flight_->rank->here())
        throw Error(Status(
            Code::stale, fmt::format("the batch of epoch {} in process {}: a forked child has no windows.", epoch_, getpid())));
    return *flight_;
}

namespace {
const std::byte* part(const ep::Flight& f, uint64_t offset) {
    return f.rank->own(f.rank->window.slot(f.slot) + offset);
}
}  // namespace

int64_t ExpertBatch::rows() const {
    return flight().rows;
}
int64_t ExpertBatch::tokens() const {
    return flight().tokens;
}
uint64_t ExpertBatch::epoch() const {
    return epoch_;
}
void ExpertBatch::copy_rows() const {
    if (flight_->materialised) return;
    const Session::Impl::Turn turn(*static_cast<Session::Impl*>(session_.get()));
    throw_if(ep::materialise(*flight_->rank, *flight_));
}
const void* ExpertBatch::expand_x() const {
    const ep::Flight& f = flight();
    copy_rows();
    return part(f, f.rank->window.expand_x);
}
const void* ExpertBatch::dynamic_scales() const {
    const ep::Flight& f = flight();
    copy_rows();
    return scale_bytes() ? part(f, f.rank->window.scales) : nullptr;
}
int64_t ExpertBatch::payload_bytes() const {
    return flight().rank->window.row.payload_bytes;
}
int64_t ExpertBatch::scale_bytes() const {
    return flight().rank->window.row.scale_bytes();
}
std::span<const int32_t> ExpertBatch::assist_info_for_combine() const {
    const ep::Flight& f = flight();
    return {reinterpret_cast<const int32_t*>(part(f, f.rank->window.source_info)), static_cast<size_t>(f.rows * 3)};
}
std::span<const int64_t> ExpertBatch::expert_token_nums() const {
    return flight().expert_token_nums;
}
std::span<const int32_t> ExpertBatch::ep_recv_count() const {
    return flight().ep_recv_count;
}
std::span<const int64_t> ExpertBatch::expert_offsets() const {
    return flight().expert_offsets;
}
const float* ExpertBatch::weights() const {
    const ep::Flight& f = flight();
    return f.rank->window.shape.weights ? reinterpret_cast<const float*>(part(f, f.rank->window.weights)) : nullptr;
}
void* ExpertBatch::y() const {
    return const_cast<std::byte*>(part(flight(), flight().rank->window.y));
}

namespace {
ExpertBatch::Row row_of(const ep::Flight& f, int64_t i) {
    const layout::Window& w = f.rank->window;
    if (ep::rows_lie_apart(f.rank->options.landing) && !f.materialised) {
        ExpertBatch::Row found;
        throw_if(ep::find_row(f, i, &found));
        return found;
    }
    return {part(f, w.expand_x) + i * w.row.payload_bytes,
            w.row.scale_bytes() ? part(f, w.scales) + i * w.row.scale_bytes() : nullptr};
}
}  // namespace

ExpertBatch::Row ExpertBatch::row(int64_t i) const {
    // Called once per row: looks at what costs nothing, not at the process it runs in.
    if (!flight_ || flight_->epoch != epoch_ || !flight_->open) flight();
    if (i < 0 || i >= flight_->rows)
        throw Error(
            Status(Code::bad_input, fmt::format("row {} of the batch of epoch {}; it has {} rows.", i, epoch_, flight_->rows)));
    return row_of(*flight_, i);
}

namespace {
// Rows first..first+count-1 of a local expert as rows of the batch.
int64_t first_row(const ep::Flight& f, int64_t expert, int64_t first, int64_t count) {
    const auto experts = static_cast<int64_t>(f.expert_offsets.size()) - 1;
    const bool known = expert >= 0 && expert < experts;
    const int64_t start = known ? f.expert_offsets[static_cast<size_t>(expert)] : 0;
    const int64_t rows = known ? f.expert_offsets[static_cast<size_t>(expert) + 1] - start : 0;
    if (known && first >= 0 && count >= 0 && first <= rows && count <= rows - first) return start + first;
    throw Error(
        Status(Code::bad_input,
               fmt::format("gather of {} rows from row {} of local expert {}: {}.", count, first, expert,
                           known ? fmt::format("it has {} rows", rows) : fmt::format("this rank has {} experts", experts))));
}
}  // namespace

namespace {
void gather_rows(const ep::Flight& f, int64_t expert, int64_t first, int64_t count, void* tile, void* tile_scales) {
    const layout::Window& w = f.rank->window;
    const int64_t start = first_row(f, expert, first, count);
    auto* to = static_cast<std::byte*>(tile);
    auto* scales_to = static_cast<std::byte*>(tile_scales);
    for (int64_t i = 0; i < count; ++i) {
        const ExpertBatch::Row from = row_of(f, start + i);
        std::memcpy(to + i * w.row.payload_bytes, from.payload, static_cast<size_t>(w.row.payload_bytes));
        if (from.scales && scales_to)
            std::memcpy(scales_to + i * w.row.scale_bytes(), from.scales, static_cast<size_t>(w.row.scale_bytes()));
    }
}

void gather_rows_f32(const ep::Flight& f, int64_t expert, int64_t first, int64_t count, float* tile) {
    const layout::WindowShape& s = f.rank->window.shape;
    const int64_t start = first_row(f, expert, first, count);
    for (int64_t i = 0; i < count; ++i) {
        const ExpertBatch::Row from = row_of(f, start + i);
        f.rank->kernels.decode(f.rank->options.dispatch_format(), s.token, from.payload, from.scales, s.hidden,
                               tile + i * s.hidden);
    }
}

}  // namespace

void ExpertBatch::gather(int64_t expert, int64_t first, int64_t count, void* tile, void* tile_scales) const {
    gather_rows(flight(), expert, first, count, tile, tile_scales);
}
void ExpertBatch::gather_f32(int64_t expert, int64_t first, int64_t count, float* tile) const {
    gather_rows_f32(flight(), expert, first, count, tile);
}

// --------------------------------------------------------------------------------------------------------------- handles

Pending::Pending(std::shared_ptr<void> session, Operation* operation, uint64_t epoch, bool is_dispatch)
    : session_(std::move(session)), operation_(operation), epoch_(epoch), is_dispatch_(is_dispatch) {}

Pending::Pending(Pending&& other) noexcept {
    swap(other);
}

void Pending::swap(Pending& other) noexcept {
    std::swap(session_, other.session_);
    std::swap(operation_, other.operation_);
    std::swap(epoch_, other.epoch_);
    std::swap(is_dispatch_, other.is_dispatch_);
    std::swap(ended_well_, other.ended_well_);
}

Pending::~Pending() {
    if (!operation_) return;
    Session::Impl& s = *static_cast<Session::Impl*>(session_.get());
    if (!s.rank->here()) return;  // a forked child has no windows
    if (!ended_well_ && is_mine()) {
        const Session::Impl::Turn turn(s);
        s.withdraw(*operation_, Code::ok);
    }
    if (is_dispatch_) const ExpertBatch dropped(session_, operation_->flight, epoch_);
}

// Whether the operation is still this one: shrink and close end all, and the next may use its place.
bool Pending::is_mine() const {
    return operation_->epoch == epoch_ && operation_->is_dispatch == is_dispatch_ &&
           operation_->state.load(std::memory_order_acquire) != Operation::State::none;
}

// The operation, if its end is still to be given out.
Operation& Pending::operation(const char* call) const {
    if (!operation_)
        throw Error(Status(Code::stale, fmt::format("{} of a handle that has nothing: its error was thrown already, its batch "
                                                    "was taken, or it was moved away.",
                                                    call)));
    const Session::Impl& s = *static_cast<Session::Impl*>(session_.get());
    s.refuse_ended(call);
    if (!is_mine())
        throw Error(Status(Code::stale, fmt::format("{} of the {} of epoch {}, which shrink() has ended.", call,
                                                    is_dispatch_ ? "dispatch" : "combine", epoch_)));
    return *operation_;
}

void Pending::take_end() {
    Operation& op = *operation_;
    operation_ = nullptr;  // when an error is thrown
    static_cast<Session::Impl*>(session_.get())->take_end(op);
    ended_well_ = true;
    if (is_dispatch_) operation_ = &op;  // there is the batch still
}

bool Pending::done() const {
    return !operation_ || ended_well_ || !is_mine() || operation_->has_ended();
}

bool Pending::poll() {
    if (ended_well_) return true;
    Operation& op = operation("poll");
    if (!op.has_ended()) static_cast<Session::Impl*>(session_.get())->look();
    if (!op.has_ended()) return false;
    take_end();
    return true;
}

namespace {
int64_t end_of_wait(int64_t timeout_ms) {
    if (timeout_ms < 0)
        throw Error(
            Status(Code::bad_input, fmt::format("wait: timeout_ms is {}; allowed: 0 (until the operation's deadline) or "
                                                "milliseconds.",
                                                timeout_ms)));
    return timeout_ms > 0 ? Deadline::after_ms(timeout_ms).at_ns : std::numeric_limits<int64_t>::max();
}
}  // namespace

bool Pending::wait(int64_t timeout_ms) {
    if (ended_well_) return true;
    Operation& op = operation("wait");
    if (!static_cast<Session::Impl*>(session_.get())->wait(op, end_of_wait(timeout_ms))) return false;
    take_end();
    return true;
}

ExpertBatch PendingDispatch::get() {
    if (ended_well_ && !operation_)
        throw Error(Status(Code::stale, fmt::format("get of dispatch {}, whose batch was taken already.", epoch_)));
    wait();
    return ExpertBatch(session_, std::exchange(operation_, nullptr)->flight, epoch_);
}

bool PendingDispatch::has(int64_t part) const {
    Session::Impl& s = *static_cast<Session::Impl*>(session_.get());
    if (ended_well_) return true;
    const Session::Impl::Turn turn(s);
    return operation_->state.load(std::memory_order_acquire) != Operation::State::posted && s.has(*operation_, part);
}

namespace {
void check_expert(const ep::Rank& rank, int64_t expert) {
    const int64_t experts = rank.placement.of_rank[static_cast<size_t>(rank.me())].count();
    if (expert < 0 || expert >= experts)
        throw Error(Status(Code::bad_input, fmt::format("local expert {}; this rank has {} experts.", expert, experts)));
}
}  // namespace

bool PendingDispatch::ready(int64_t expert) {
    if (!operation_) operation("ready");
    check_expert(*static_cast<Session::Impl*>(session_.get())->rank, expert);
    return poll() || has(expert);
}

bool PendingDispatch::counted() {
    if (!operation_) operation("counted");
    return poll() || has(Session::Impl::part_counts);
}

bool PendingDispatch::wait_expert(int64_t expert, int64_t timeout_ms) {
    if (!operation_) operation("wait_expert");
    check_expert(*static_cast<Session::Impl*>(session_.get())->rank, expert);
    return wait_part(expert, timeout_ms);
}

bool PendingDispatch::wait_counted(int64_t timeout_ms) {
    if (!operation_) operation("wait_counted");
    return wait_part(Session::Impl::part_counts, timeout_ms);
}

bool PendingDispatch::wait_part(int64_t part, int64_t timeout_ms) {
    const int64_t until_ns = end_of_wait(timeout_ms);
    if (poll()) return true;
    Operation& op = *operation_;
    Session::Impl& s = *static_cast<Session::Impl*>(session_.get());
    {
        const Session::Impl::Turn turn(s);
        s.watched = &op;
        s.watched_part = part;
    }
    const bool in_time = s.wait_until(
        until_ns, [&] { return op.has_ended() || has(part); }, op);
    {
        const Session::Impl::Turn turn(s);
        s.watched = nullptr;
    }
    if (in_time && op.has_ended()) take_end();
    return in_time;
}

// The flight of a handle that is still good for something: under way, or ended well and its batch not over.
const ep::Flight& PendingDispatch::flight(const char* call) const {
    if (!operation_ || !ended_well_) operation(call);
    const ep::Flight& f = *operation_->flight;
    if (ended_well_ && (f.epoch != epoch_ || !f.open || !f.rank->here()))  // by shrink, close or its batch's combine
        throw Error(Status(Code::stale, fmt::format("the batch of epoch {} has ended; its rows are gone.", epoch_)));
    return f;
}

std::span<const int64_t> PendingDispatch::counts() const {
    const ep::Flight& f = flight("counts");
    if (!has(Session::Impl::part_counts))
        throw Error(
            Status(Code::bad_input, fmt::format("dispatch {}: the counts of all ranks are not here yet. Ask counted() or "
                                                "wait_counted() first.",
                                                epoch_)));
    return f.local_counts;
}

const ep::Flight& PendingDispatch::ready_flight(int64_t expert) const {
    if (!operation_) operation("rows");
    check_expert(*static_cast<Session::Impl*>(session_.get())->rank, expert);
    const ep::Flight& f = flight("rows");
    if (!has(expert))
        throw Error(
            Status(Code::bad_input, fmt::format("dispatch {}: the rows of local expert {} are not here yet. Ask ready() "
                                                "or wait_expert() first.",
                                                epoch_, expert)));
    return f;
}

int64_t PendingDispatch::rows_of(int64_t expert) const {
    const ep::Flight& f = ready_flight(expert);
    return f.expert_offsets[static_cast<size_t>(expert) + 1] - f.expert_offsets[static_cast<size_t>(expert)];
}
void PendingDispatch::gather(int64_t expert, int64_t first, int64_t count, void* tile, void* tile_scales) const {
    gather_rows(ready_flight(expert), expert, first, count, tile, tile_scales);
}
void PendingDispatch::gather_f32(int64_t expert, int64_t first, int64_t count, float* tile) const {
    gather_rows_f32(ready_flight(expert), expert, first, count, tile);
}
void* PendingDispatch::y_of(int64_t expert) const {
    const ep::Flight& f = ready_flight(expert);
    const layout::WindowShape& s = f.rank->window.shape;
    const auto first = static_cast<uint64_t>(f.expert_offsets[static_cast<size_t>(expert)]);
    return f.rank->own(f.rank->window.slot(f.slot) + f.rank->window.y +
                       first * static_cast<uint64_t>(s.hidden * layout::token_bytes(s.token)));
}

}  // namespace switchyard
