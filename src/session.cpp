// Opens everything, waits, and throws: the only file of the library that does the latter two.
#include "switchyard/session.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

std::vector<std::byte> make_card(const Options& options, const PlacementTable* table, const Status& refusal) {
    std::vector<int64_t> values;
    for (const OptionInfo& info : option_table())
        if (info.agreed) values.push_back(info.get(options));
    CardHead head;
    head.options = static_cast<uint32_t>(values.size());
    head.cpus = number_of(allowed_cpus());
    if (table) head.table = table->hash(), head.has_table = 1;
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
                return {Code::mismatch, fmt::format("option {}: rank 0 has {}, rank {} has {}. Give all ranks the same.",
                                                    info.name, option_text(info, a), r, option_text(info, b))};
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

struct Session::Impl {
    std::unique_ptr<Transport> link;
    std::unique_ptr<ep::Workers> workers;
    std::unique_ptr<ep::Rank> rank;
    std::vector<ep::Flight> flights;  // [depth]
    ep::DispatchStep dispatch;
    ep::CombineStep combine;
    ep::Await gate;  // of x()
    ep::RegroupStep regroup;
    bool regrouping = false;     // asked, and not decided yet
    std::vector<int64_t> waits;  // [R] ns that this rank lacked only what that rank, and those behind it, owed
    std::vector<int> pinned;     // [workers-1] CPU of each helper, with option pin
    uint64_t last_epoch = 0;
    std::vector<Estimate> estimates;  // of landing automatic, cheapest first
    std::string calibration_source;
    Patience patience;
    Status untold;  // an error of mine that the other ranks must hear of in the next dispatch
    bool connected = false;
    bool closed = false;

    explicit Impl(std::unique_ptr<Transport> transport) : link(std::move(transport)) {}
    ~Impl() {
        close();
        if (rank && !rank->here()) static_cast<void>(workers.release());  // a forked child does not have the threads
    }

    static std::shared_ptr<Impl> open(const Options& options, std::unique_ptr<Transport> link, const PlacementTable* table);

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
        ep::raise_closed(*rank);    // model: close
        for (ep::Flight& f : flights)
            if (f.open) ep::drop(*rank, f);  // model: close_drops
    }

    void refuse_ended(const char* call) const {
        if (closed) throw Error(Status(Code::stale, fmt::format("{} on a session that was closed. Open a new one.", call)));
        if (!rank->here())
            throw Error(
                Status(Code::stale, fmt::format("{} in process {} on a session of process {}: a forked child has no windows. "
                                                "Fork first, then open.",
                                                call, getpid(), rank->born.process())));
        if (regrouping)
            throw Error(
                Status(Code::stale, fmt::format("{} on a session whose shrink() has not ended well. Call shrink() again, "
                                                "or close the session.",
                                                call)));
    }
    void refuse_open(const ep::Flight& flight, uint64_t epoch) const {
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
    if (options.landing == Landing::automatic) {
        try {
            const Calibration calibration = load_calibration(calibration_path());
            calibration_source = calibration.source;
            estimates = estimate_landings(options, ranks, options.tokens_max, calibration);
        } catch (const Error& e) {
            return {e.code(), e.what()};
        }
        options.landing = estimates.front().landing;
        options.group_ranks = estimates.front().group_ranks;
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
        dispatch.allocate(*rank);
        combine.allocate(*rank);
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
    return {};
}

std::shared_ptr<Session::Impl> Session::Impl::open(const Options& options, std::unique_ptr<Transport> link,
                                                   const PlacementTable* table) {
    auto impl = std::make_shared<Impl>(std::move(link));
    const Deadline deadline = Deadline::after_ms(options.timeout_ms >= 1 ? options.timeout_ms : Options().timeout_ms);

    // A rank that refuses still meets the others, so that all of them get the error.
    const Status refusal = impl->prepare(options, table);
    const std::vector<std::byte> card = make_card(refusal.ok() ? impl->rank->options : options, table, refusal);
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
    return Session(Impl::open(options, transport_of(group), nullptr));
}

Session Session::open(const Options& options, const Group& group, const PlacementTable& table) {
    return Session(Impl::open(options, transport_of(group), &table));
}

std::vector<Session> Session::open_local(const Options& options, int ranks) {
    return open_local(std::vector<Options>(static_cast<size_t>(std::max(ranks, 0)), options));
}

std::vector<Session> Session::open_local(const Options& options, const PlacementTable& table) {
    throw_if(table.check());  // it says how many ranks there are
    const auto ranks = static_cast<size_t>(table.ranks);
    return open_local(std::vector<Options>(ranks, options), std::vector<PlacementTable>(ranks, table));
}

std::vector<Session> Session::open_local(std::span<const Options> options, std::span<const PlacementTable> tables) {
    if (options.empty()) throw Error(Status(Code::bad_input, "open_local: no ranks; give one Options per rank."));
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
                    impls[r] = Impl::open(options[r], std::move(links[r]), tables.empty() ? nullptr : &tables[r]);
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

ExpertBatch Session::dispatch(const DispatchArgs& args) {
    Impl& s = impl();
    const auto depth = static_cast<uint64_t>(s.rank->options.depth);
    s.refuse_ended("dispatch");
    const uint64_t epoch = s.last_epoch + 1;
    ep::Flight& flight = s.flights[epoch % depth];
    s.refuse_open(flight, epoch);
    if (epoch > layout::Word::epoch_max)
        throw Error(Status(Code::capacity, "the last epoch of this session is used up. Open a new one."));

    const Deadline deadline = s.deadline(args.timeout_ms);
    s.last_epoch = epoch;
    ++s.rank->stats.dispatches;
    flight.epoch = epoch;
    flight.slot = epoch % depth;

    const auto waited = [&](int64_t ns) {
        const bool for_rows = s.dispatch.phase() == ep::DispatchStep::Phase::rows;
        (for_rows ? s.rank->stats.wait_ns_rows : s.rank->stats.wait_ns_counts) += ns;
        s.waited_for(s.dispatch.awaited(), ns);
    };
    ep::Progress end;
    try {
        s.dispatch.start(*s.rank, flight, args, s.untold);  // model: prior_told
        s.untold = {};
        end = Waiter(*s.rank, s.patience)
                  .wait(
                      deadline, [&](bool thorough) { return s.dispatch.poll(*s.rank, flight, thorough); }, waited,
                      [&](int64_t ms) { s.dispatch.give_up(*s.rank, flight, ms); });
    } catch (...) {  // no memory for an error text, say
        s.dispatch.abandon(*s.rank, flight);
        throw;
    }
    if (end != ep::Progress::done) throw Error(s.dispatch.status());
    return ExpertBatch(impl_, &flight, epoch);
}

void* Session::x() {
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
    const Deadline deadline = s.deadline(0);
    Status late;
    const ep::Progress end =
        Waiter(*s.rank, s.patience)
            .wait(
                deadline, [&](bool thorough) { return s.gate.poll(*s.rank, thorough); },
                [&](int64_t ns) {
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

void Session::combine(ExpertBatch& batch, const CombineArgs& args) {
    Impl& s = impl();
    s.refuse_ended("combine");
    if (!batch.flight_) throw Error(Status(Code::stale, "combine of an empty batch: it was combined already, or moved away."));
    if (batch.session_.get() != &s)
        throw Error(Status(Code::stale,
                           fmt::format("combine on rank {} of a batch that another session dispatched (epoch {} of rank {}).",
                                       s.link->rank(), batch.epoch_, batch.flight_->rank->me())));
    ep::Flight& flight = *batch.flight_;
    if (!flight.open || flight.epoch != batch.epoch_)
        throw Error(
            Status(Code::stale, fmt::format("combine of the batch of epoch {}, which has ended; its slot holds epoch {} now.",
                                            batch.epoch_, flight.epoch)));

    const Deadline deadline = s.deadline(args.timeout_ms);
    ++s.rank->stats.combines;
    // The batch is used up; what it views stays readable until this call returns.
    const std::shared_ptr<void> alive = std::move(batch.session_);
    batch.flight_ = nullptr;

    const auto waited = [&](int64_t ns) {
        s.rank->stats.wait_ns_returned += ns;
        s.waited_for(s.combine.awaited(), ns);
    };
    ep::Progress end;
    try {
        s.combine.start(*s.rank, flight, args);
        end = Waiter(*s.rank, s.patience)
                  .wait(
                      deadline, [&](bool thorough) { return s.combine.poll(*s.rank, flight, thorough); }, waited,
                      [&](int64_t ms) { s.combine.give_up(*s.rank, flight, ms); });
    } catch (...) {  // no memory for an error text, say
        s.combine.abandon(*s.rank, flight);
        throw;
    }
    s.rank->edge(end == ep::Progress::done ? Edge::combined : Edge::combine_failed, flight.epoch);
    if (end == ep::Progress::done) return;
    if (s.combine.untold())  // model: prior
        s.untold = Status(s.combine.status().code(),
                          fmt::format("rank {}: its combine of epoch {} failed after this rank's rows had been offered: {}",
                                      s.link->rank(), flight.epoch, s.combine.status().text()));
    throw Error(s.combine.status());
}

std::vector<int> Session::shrink(const ShrinkArgs& args) {
    Impl& s = impl();
    const bool again = std::exchange(s.regrouping, false);
    s.refuse_ended("shrink");
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
    s.regrouping = true;
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
    if (s.estimates.empty())
        return fmt::format("landing {}, as asked for", option_text(*find_option("landing"), s.rank->options));
    std::string text = fmt::format("landing {}, of these for {} tokens:\n",
                                   option_text(*find_option("landing"), s.rank->options), s.rank->options.tokens_max);
    for (const Estimate& e : s.estimates) {
        Options o;
        o.landing = e.landing;
        text += fmt::format("  {:<10} {:>10.1f} us {:>12} bytes  {}\n", option_text(*find_option("landing"), o), e.us, e.bytes,
                            e.why);
    }
    return text + fmt::format("figures: {}", s.calibration_source);
}
SessionStats Session::stats() const {
    return impl().rank->stats;
}
SessionLoads Session::loads() const {
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
    ep::Rank& r = *impl().rank;
    std::fill(r.sent.begin(), r.sent.end(), 0);
    std::fill(r.seen.begin(), r.seen.end(), 0);
    r.seen_dispatches = 0;
}
std::span<const int64_t> Session::wait_ns_by_rank() const {
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
    if (!flight_ || !flight_->open || flight_->epoch != epoch_ || !flight_->rank->here()) return;
    ep::drop(*flight_->rank, *flight_);  // model: drop_batch
}

const ep::Flight& ExpertBatch::flight() const {
    if (!flight_ || !flight_->open || flight_->epoch != epoch_)
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
const void* ExpertBatch::expand_x() const {
    const ep::Flight& f = flight();
    throw_if(ep::materialise(*f.rank, *flight_));
    return part(f, f.rank->window.expand_x);
}
const void* ExpertBatch::dynamic_scales() const {
    const ep::Flight& f = flight();
    throw_if(ep::materialise(*f.rank, *flight_));
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
    if (!flight_ || !flight_->open || flight_->epoch != epoch_) flight();
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

void ExpertBatch::gather(int64_t expert, int64_t first, int64_t count, void* tile, void* tile_scales) const {
    const ep::Flight& f = flight();
    const layout::Window& w = f.rank->window;
    const int64_t start = first_row(f, expert, first, count);
    auto* to = static_cast<std::byte*>(tile);
    auto* scales_to = static_cast<std::byte*>(tile_scales);
    for (int64_t i = 0; i < count; ++i) {
        const Row from = row_of(f, start + i);
        std::memcpy(to + i * w.row.payload_bytes, from.payload, static_cast<size_t>(w.row.payload_bytes));
        if (from.scales && scales_to)
            std::memcpy(scales_to + i * w.row.scale_bytes(), from.scales, static_cast<size_t>(w.row.scale_bytes()));
    }
}

void ExpertBatch::gather_f32(int64_t expert, int64_t first, int64_t count, float* tile) const {
    const ep::Flight& f = flight();
    const layout::WindowShape& s = f.rank->window.shape;
    const int64_t start = first_row(f, expert, first, count);
    for (int64_t i = 0; i < count; ++i) {
        const Row from = row_of(f, start + i);
        f.rank->kernels.decode(f.rank->options.dispatch_format(), s.token, from.payload, from.scales, s.hidden,
                               tile + i * s.hidden);
    }
}

}  // namespace switchyard
