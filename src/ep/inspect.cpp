// A group seen from outside: the flags of every window, read as data. The rules are those of flags.cpp, dispatch.cpp and
// combine.cpp; here nobody waits and nothing is raised.
#include "switchyard/inspect.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/clock.hpp"
#include "core/machine.hpp"
#include "ep/exchange.hpp"
#include "layout/window.hpp"
#include "quant/quant.hpp"
#include "transport/group_text.hpp"
#include "transport/transport.hpp"

namespace switchyard::inspect {

using layout::Word;

// ------------------------------------------------------------------------------------------------------- build and needs

Build build() {
    Build b;
#if defined(__clang__)
    b.compiler = fmt::format("Clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#elif defined(__GNUC__)
    b.compiler = fmt::format("GCC {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#else
    b.compiler = "unknown";
#endif
    b.libraries = fmt::format("fmt {}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100);
    if (const char* highway = quant::highway_version()) b.libraries += fmt::format(", Highway {}", highway);
    b.libraries += fmt::format(", hwloc {}", hwloc_version());
    for (const quant::Kernels* k : quant::available_kernels()) b.kernels.emplace_back(k->name);
    b.window_format = layout::window_version;
    return b;
}

Status needs_of(const Options& options, int64_t ranks, Needs* needs) {
    if (Status s = check_options(options, ranks); !s.ok()) return s;
    Options used = options;
    layout::Window window{};
    if (Status s = ep::plan_window(used, ranks, &window); !s.ok()) return s;
    needs->window_bytes = static_cast<int64_t>(window.bytes);
    // Below 2^46 * 2^12: it fits.
    needs->mapped_bytes = needs->window_bytes * ranks;
    // Rank 0 of a larger group is the one with most: of every rank its window, its process and its connection, and beside
    // them the door, a connection not yet told apart, the verdict, and what reading the machine's topology opens.
    needs->descriptors = ranks == 1 ? 1 + topology_descriptors : 3 * ranks + 3 + topology_descriptors;

    // A window cut to what comes when every expert gets the same. Rows are touched as x and as y; home rows only when they
    // are pushed; padded landing fills a cell row for each row too, and those are scattered over cells of the worst case.
    const bool padded = used.landing == Landing::padded;
    if (used.combine_path == CombinePath::automatic) used.combine_path = CombinePath::read;
    if (padded) used.landing = Landing::packed;
    const int64_t rows = used.tokens_max * used.topk;
    used.rows_max = std::min(used.rows_max, padded ? 2 * rows : rows);
    needs->touched_bytes = static_cast<int64_t>(layout::window_of(ep::shape_of(used, ranks)).bytes);
    return {};
}

// ------------------------------------------------------------------------------------------------------------- one window

static_assert(sizeof(layout::WindowHeader) == header_bytes);

Status read_window(std::span<const std::byte> bytes, Window* window) {
    if (bytes.size() < header_bytes)
        return {Code::corrupt, fmt::format("{} bytes are no header of a window; it has {}.", bytes.size(), header_bytes)};
    layout::WindowHeader h;
    std::memcpy(&h, bytes.data(), sizeof h);
    if (h.magic == 0) return {Code::stale, "the window has no header yet: its owner is still opening the session."};
    if (h.magic != layout::window_magic)
        return {Code::corrupt,
                fmt::format("no window: it starts with {:#x}, a window with {:#x}.", h.magic, layout::window_magic)};
    if (h.version != layout::window_version)
        return {Code::mismatch, fmt::format("the window has format {}, this build reads format {}. Use the switchyard that "
                                            "the group was started with.",
                                            h.version, layout::window_version)};
    Window w;
    w.rank = h.rank;
    w.process = h.process;
    w.bytes = h.window_bytes;
    Options& o = w.options;
    o.hidden = h.hidden;
    o.topk = h.topk;
    o.experts = h.experts;
    o.tokens_max = h.tokens_max;
    o.rows_max = h.rows_max;
    o.cell_rows = h.cell_rows;
    o.depth = h.depth;
    o.dtype = static_cast<TokenType>(h.token);
    o.dispatch_quant = static_cast<Format>(h.dispatch);
    o.combine_quant = static_cast<Format>(h.combine);
    o.deliver_weights = h.weights != 0;
    o.landing = static_cast<Landing>(h.landing);
    o.group_ranks = h.group_ranks;
    o.combine_path = h.push ? CombinePath::automatic : CombinePath::read;
    // Another process wrote it: nothing is computed from numbers that no session can have.
    if (Status s = check_options(o, h.ranks); !s.ok() || o.landing == Landing::automatic)
        return {Code::corrupt, fmt::format("no session has such a window: {}", s.text())};
    const uint64_t bytes_needed = layout::window_of(ep::shape_of(o, h.ranks)).bytes;
    if (h.rank < 0 || h.rank >= h.ranks || bytes_needed != h.window_bytes || bytes_needed == layout::Region::limit_exceeded)
        return {Code::corrupt,
                fmt::format("no session has such a window: rank {} of {}, {} bytes.", h.rank, h.ranks, h.window_bytes)};
    w.ranks = static_cast<int>(h.ranks);
    *window = w;
    return {};
}

// ---------------------------------------------------------------------------------------------------------------- a group

namespace {

// In a wait for sure.
bool is_asleep(const Member& m) {
    return m.waited_ms >= 0;
}

// The flags of all windows as one look found them, and what follows.
class Look {
 public:
    Look(const Window& window, std::span<const Process> processes, const Read& read)
        : w_(layout::window_of(ep::shape_of(window.options, window.ranks))),
          ranks_(window.ranks),
          depth_(static_cast<uint64_t>(window.options.depth)),
          counts_first_(ep::waits_for_counts(window.options.landing)),
          read_(read),
          // The plane from the bell to the last flag line, of every window that can be read.
          planes_(static_cast<size_t>(ranks_)) {
        group_.members.resize(static_cast<size_t>(ranks_));
        for (int r = 0; r < ranks_; ++r) {
            std::vector<std::byte>& plane = planes_[at(r)];
            plane.resize(w_.reasons - w_.bell);
            if (!read_(r, w_.bell, plane.data(), plane.size())) plane.clear();
            Member& m = group_.members[at(r)];
            m.rank = r;
            if (at(r) < processes.size()) m.process = processes[at(r)];
            // Never in the future, but for a rank whose time namespace has another clock.
            if (const int64_t since = known(r) ? load<layout::Bell>(r, w_.bell).waiting_since_ns : 0; since != 0)
                m.waited_ms = std::max<int64_t>(now_ns() - since, 0) / 1'000'000;
        }
    }

    Group take() {
        find_generation();
        for (Member& m : group_.members) m.told = told(m.rank);
        for (Member& m : group_.members) find_phase(m);
        return std::move(group_);
    }

 private:
    static size_t at(int rank) { return static_cast<size_t>(rank); }
    bool known(int rank) const { return !planes_[at(rank)].empty(); }
    const Member& member(int rank) const { return group_.members[at(rank)]; }

    template <class T>
    T load(int window, uint64_t offset) const {
        T value;
        std::memcpy(&value, planes_[at(window)].data() + (offset - w_.bell), sizeof value);
        return value;
    }
    /// The line of `writer` in the window of `in`.
    layout::FlagLine line(int in, uint64_t slot, int writer) const {
        return load<layout::FlagLine>(in, w_.flag_line(slot, writer));
    }

    // Who is left, and since which epoch: the decision in the window of rank 0, and the offer that it names.
    void find_generation() {
        layout::Decision decision{};
        if (!known(0) || !read_(0, w_.decision, &decision, sizeof decision)) return;
        const Word word{decision.word};
        layout::Offer offer{};
        if (word.epoch() == 0 || word.rank() >= ranks_ || !read_(word.rank(), w_.offer(word.epoch()), &offer, sizeof offer) ||
            offer.generation != word.epoch())
            return;
        group_.generation = word.epoch();
        base_ = std::max<uint64_t>(offer.base, 1);
        left_.resize(static_cast<size_t>(ranks_));
        for (int r = 0; r < ranks_; ++r) left_[at(r)] = (offer.members[r / 64] >> (r % 64) & 1) == 0;
    }
    bool is_member(int rank) const { return left_.empty() || !left_[at(rank)]; }

    // The highest of every window: a rank that raises its flags now has raised some.
    Told told(int writer) const {
        Told t;
        for (int in = 0; in < ranks_; ++in) {
            if (!known(in)) continue;
            for (uint64_t slot = 0; slot < depth_; ++slot) {
                const layout::FlagLine l = line(in, slot, writer);
                t.counted = std::max(t.counted, Word{l.counted}.epoch());
                t.arrived = std::max(t.arrived, Word{l.arrived[0]}.epoch());
                t.returned = std::max(t.returned, Word{l.returned}.epoch());
                t.gone = std::max(t.gone, Word{l.gone}.epoch());
            }
            const auto m = load<layout::MemberLine>(in, w_.member(writer));
            t.closed = t.closed || m.closed != 0;
            t.regroup = std::max(t.regroup, layout::Turn{m.regroup}.generation());
        }
        return t;
    }

    /// Epochs in the window of `in` of what `writer` has raised in the slot of `epoch`.
    struct Seen {
        uint64_t begun, arrived, returned, gone;
        bool dropped;
    };
    Seen seen(int in, int writer, uint64_t epoch) const {
        const layout::FlagLine l = line(in, epoch % depth_, writer);
        const uint64_t arrived = Word{l.arrived[0]}.epoch();
        return {counts_first_ ? Word{l.counted}.epoch() : arrived, arrived, Word{l.returned}.epoch(), Word{l.gone}.epoch(),
                Word{l.returned}.code() == layout::returned_dropped};
    }

    // Rows that `from` sends to `to` in an epoch, from its count row in a window; -1 when that is not there.
    int64_t rows_between(int in, uint64_t epoch, int from, int first, int last) const {
        const uint64_t row = w_.count_row(epoch % depth_, from);
        layout::CountHead head{};
        if (!read_(in, row, &head, sizeof head) || head.epoch != epoch) return -1;
        const ExpertRange range{experts_of(first, ranks_, w_.shape.experts).first,
                                experts_of(last, ranks_, w_.shape.experts).last};
        std::vector<int32_t> counts(static_cast<size_t>(range.count()));
        if (!read_(in, row + sizeof head + static_cast<uint64_t>(range.first) * 4, counts.data(), counts.size() * 4)) return -1;
        int64_t rows = 0;
        for (const int32_t n : counts) rows += n;
        return rows;
    }

    // The members that lack something for which `m` may wait. A rank that runs sees a death within milliseconds: it leaves the
    // epoch, or with option partial goes on without; so nobody but a stopped one waits for the dead.
    template <class Lacks>
    std::vector<int> members_that(const Member& m, Lacks lacks) const {
        std::vector<int> ranks;
        for (int p = 0; p < ranks_; ++p) {
            const bool is_dead = member(p).process.life == Life::ended && !member(p).told.closed;
            if (is_member(p) && !(is_dead && m.process.life == Life::running) && lacks(p)) ranks.push_back(p);
        }
        return ranks;
    }

    void set(Member& m, Phase phase, uint64_t epoch, std::vector<int> awaited = {}) const {
        m.phase = phase;
        m.epoch = epoch;
        m.awaited = std::move(awaited);
    }

    void find_phase(Member& m) const {
        const int q = m.rank;
        const uint64_t last = std::max({counts_first_ ? m.told.counted : m.told.arrived, m.told.gone, base_ - 1});
        m.epoch = last;
        if (!is_member(q)) return set(m, Phase::left, last);
        if (m.told.closed) return set(m, Phase::closed, last);
        if (m.process.life == Life::ended) return set(m, Phase::ended, last);
        if (!known(q)) return set(m, Phase::unknown, last);
        if (m.told.regroup > group_.generation)
            return set(m, Phase::shrinking, m.told.regroup, members_that(m, [&](int p) {
                           return layout::Turn{load<layout::MemberLine>(q, w_.member(p)).regroup}.generation() <
                                      m.told.regroup &&
                                  !member(p).told.closed && member(p).process.life != Life::ended;
                       }));
        if (last < base_) {
            if (is_asleep(m)) return find_gate(m, last);
            return set(m, last == 0 ? Phase::fresh : Phase::between, last);
        }
        if (m.told.gone == last) {
            if (is_asleep(m)) find_gate(m, last);
            return m.phase == Phase::gate ? void() : find_reason(m, last);
        }

        // A call that has not returned comes before whatever is open beside it.
        const auto uncounted = members_that(m, [&](int p) { return seen(q, p, last).begun < last; });
        if (!uncounted.empty()) return set(m, counts_first_ ? Phase::counts : Phase::rows, last, uncounted);
        if (counts_first_) {
            // Who raises `arrived` raises it everywhere; a rank without rows for this one skips it.
            if (m.told.arrived < last && m.told.returned < last && rows_between(q, last, q, 0, ranks_ - 1) > 0)
                return set(m, Phase::sending, last);
            const auto owed = members_that(m, [&](int p) {
                const Seen s = seen(q, p, last);
                return s.arrived < last && s.returned < last && rows_between(q, last, p, q, q) != 0;
            });
            if (!owed.empty() && m.told.returned < last) return set(m, Phase::rows, last, owed);
        }
        // The dispatch of every epoch up to the last has returned. Combine is called in any order; the latest first, because an
        // earlier one may have timed out, which raises nothing.
        for (uint64_t e = last; e >= base_ && e + depth_ > last; --e) {
            const Seen own = seen(q, q, e);
            if (own.returned != e || own.dropped || own.gone == e) continue;
            bool is_over = false;
            const auto missing = members_that(m, [&](int p) {
                const Seen s = seen(q, p, e);
                is_over = is_over || (s.gone >= e && s.returned != e) || (s.returned == e && s.dropped);
                return s.returned < e;
            });
            if (!is_over && !missing.empty()) return set(m, Phase::output, e, missing);
        }
        if (is_asleep(m)) {
            find_gate(m, last);
            if (m.phase == Phase::gate) return;
        }
        for (uint64_t e = std::max(base_, last >= depth_ ? last - depth_ + 1 : 1); e <= last; ++e) {
            const Seen own = seen(q, q, e);
            if (own.begun == e && own.returned < e && own.gone < e) return set(m, Phase::batch, e);
        }
        set(m, Phase::between, last);
    }

    // Asleep, and nothing of what it has begun is missing: then in the gate of the next epoch, where nothing is raised yet.
    void find_gate(Member& m, uint64_t last) const {
        set(m, last == 0 ? Phase::fresh : Phase::between, last);
        if (last + 1 < base_ + depth_) return;
        const uint64_t closes = last + 1 - depth_;
        const auto has_not_closed = [&](int p) {
            const Seen s = seen(m.rank, p, last + 1);
            return s.returned < closes && s.gone < closes;
        };
        if (has_not_closed(m.rank)) return;  // a dispatch in its place would have been refused
        auto missing = members_that(m, has_not_closed);
        if (!missing.empty()) set(m, Phase::gate, last + 1, std::move(missing));
    }

    void find_reason(Member& m, uint64_t epoch) const {
        set(m, Phase::departed, epoch);
        for (int in = 0; in < ranks_ && m.code == Code::ok; ++in) {
            if (!known(in)) continue;
            const Word word{line(in, epoch % depth_, m.rank).gone};
            if (word.epoch() != epoch) continue;
            m.code = static_cast<Code>(word.code());
            if (word.rank() < ranks_ && word.rank() != m.rank) m.awaited = {word.rank()};
            layout::Reason reason{};
            if (!read_(in, w_.reason(epoch, m.rank), &reason, sizeof reason) || reason.epoch != epoch) continue;
            m.reason.assign(reason.text, std::min<uint64_t>(reason.text_bytes, sizeof reason.text));
            for (char& c : m.reason)
                if (static_cast<unsigned char>(c) < 0x20) c = ' ';
        }
    }

    const layout::Window w_;
    const int ranks_;
    const uint64_t depth_;
    const bool counts_first_;
    const Read& read_;
    std::vector<std::vector<std::byte>> planes_;
    Group group_;
    uint64_t base_ = 1;       // first epoch of the generation
    std::vector<bool> left_;  // empty: nobody
};

bool is_waiting(const Member& m) {
    switch (m.phase) {
        case Phase::gate:
        case Phase::counts:
        case Phase::rows:
        case Phase::output:
        case Phase::shrinking: return !m.awaited.empty();
        default: return false;
    }
}

// "in dispatch 41 for the rows of rank 1", without the ranks that do it.
std::string wait_text(const Member& m) {
    const std::string whom = ranks_text(m.awaited);
    switch (m.phase) {
        case Phase::gate: return fmt::format("in dispatch {} for {} to end the epoch that used the slot before", m.epoch, whom);
        case Phase::counts: return fmt::format("in dispatch {} for the counts of {}", m.epoch, whom);
        case Phase::rows: return fmt::format("in dispatch {} for the rows of {}", m.epoch, whom);
        case Phase::output: return fmt::format("in combine {} for the experts' output of {}", m.epoch, whom);
        case Phase::shrinking: return fmt::format("in shrink (generation {}) for {} to call it too", m.epoch, whom);
        default: return {};
    }
}

// In a dispatch the call is sure; a combine that has timed out leaves no trace.
std::string verb(const Member& m, bool plural) {
    if (is_asleep(m) || m.phase != Phase::output) return plural ? "wait" : "waits";
    return plural ? "wait (or waited, and gave up)" : "waits (or waited, and gave up)";
}

std::string process_text(const Member& m) {
    return m.process.id > 0 ? fmt::format("process {}", m.process.id) : "its process";
}

}  // namespace

Group look(const Window& window, std::span<const Process> processes, const Read& read) {
    return Look(window, processes, read).take();
}

std::string phase_text(const Member& m) {
    switch (m.phase) {
        case Phase::unknown: return "its window cannot be read";
        case Phase::fresh: return "has opened the session, and not called dispatch";
        case Phase::gate:
        case Phase::counts:
        case Phase::rows:
        case Phase::output: return fmt::format("{} {}", verb(m, false), wait_text(m));
        case Phase::shrinking:
            return m.awaited.empty() ? fmt::format("is in shrink (generation {})", m.epoch)
                                     : fmt::format("{} {}", verb(m, false), wait_text(m));
        case Phase::sending: return fmt::format("moves its rows in dispatch {}", m.epoch);
        case Phase::batch:
            if (is_asleep(m)) return fmt::format("has not looked yet: all that dispatch {} waits for is there", m.epoch);
            return fmt::format("holds the batch of epoch {}: its experts are at work, or combine was not called", m.epoch);
        case Phase::between: return fmt::format("has ended epoch {}, and not called dispatch since", m.epoch);
        case Phase::departed:
            return fmt::format("has left epoch {} with {}{}, and not called dispatch since", m.epoch, code_name(m.code),
                               m.awaited.empty() ? "" : fmt::format(" because of {}", ranks_text(m.awaited)));
        case Phase::closed: return "has closed its session";
        case Phase::left: return "has left the group: a shrink went on without it";
        case Phase::ended: return fmt::format("has ended (its process is gone), in or after epoch {}", m.epoch);
    }
    return {};
}

std::vector<Remark> remarks(const Group& group) {
    std::vector<Remark> out;
    const auto find = [&](int r) -> const Member& { return group.members[static_cast<size_t>(r)]; };
    const auto is_stuck = [](const Member& m) { return is_waiting(m) && m.process.life != Life::stopped; };

    // Ranks that wait for the same, in one sentence.
    std::vector<bool> told(group.members.size());
    std::vector<bool> awaited(group.members.size());
    for (const Member& m : group.members) {
        if (!is_stuck(m)) continue;
        for (const int p : m.awaited) awaited[static_cast<size_t>(p)] = true;
        if (told[static_cast<size_t>(m.rank)]) continue;
        std::vector<int> who;
        int64_t waited_ms = -1;
        for (const Member& o : group.members)
            if (is_stuck(o) && o.phase == m.phase && o.epoch == m.epoch && o.awaited == m.awaited &&
                verb(o, true) == verb(m, true)) {
                told[static_cast<size_t>(o.rank)] = true;
                who.push_back(o.rank);
                waited_ms = std::max(waited_ms, o.waited_ms);
            }
        std::string whom;
        if (m.awaited.size() == 1) {
            const Member& p = find(m.awaited[0]);
            if (p.process.life == Life::stopped)
                whom = fmt::format(", whose process{} is stopped", p.process.id > 0 ? fmt::format(" {}", p.process.id) : "");
            else if (is_waiting(p) || p.phase == Phase::closed || p.phase == Phase::ended)
                whom = fmt::format(", which {}", phase_text(p));
        }
        std::string since;
        if (waited_ms >= 0)
            since = fmt::format("; {} called {:.1f} s ago", who.size() > 1 ? "the first of them" : "it",
                                static_cast<double>(waited_ms) / 1e3);
        out.push_back(
            {false, fmt::format("{} {} {}{}{}", ranks_text(who), verb(m, who.size() > 1), wait_text(m), whom, since), ""});
    }

    // For whom in the end.
    bool has_root = false;
    for (const Member& m : group.members) {
        const bool is_awaited = awaited[static_cast<size_t>(m.rank)];
        const std::string who = fmt::format("rank {} ({})", m.rank, process_text(m));
        if (m.phase == Phase::ended) {
            out.push_back({true, fmt::format("{} has ended without closing its session, in or after epoch {}", who, m.epoch),
                           "look at its own output and exit code; the others get peer_lost: shrink() on them, or start the "
                           "group again"});
        } else if (m.process.life == Life::stopped) {
            out.push_back({true, fmt::format("{} is stopped; it {}", who, phase_text(m)),
                           m.process.id > 0 ? fmt::format("kill -CONT {}", m.process.id) : "kill -CONT its process"});
        } else if (m.phase == Phase::departed) {
            out.push_back(
                {false, fmt::format("rank {} {}{}", m.rank, phase_text(m), m.reason.empty() ? "" : ": " + m.reason), ""});
        } else if (is_awaited && !is_waiting(m) && m.phase != Phase::closed) {
            out.push_back(
                {false, fmt::format("it comes down to {}, which {}", who, phase_text(m)),
                 m.process.id > 0 && m.process.life == Life::running
                     ? fmt::format("see what it does: gdb -p {0} -batch -ex 'thread apply all bt', or py-spy dump --pid {0}",
                                   m.process.id)
                     : ""});
        }
        has_root = has_root || (is_awaited && !is_stuck(m));
    }
    const bool any_waits = std::any_of(group.members.begin(), group.members.end(), is_stuck);
    if (any_waits && !has_root)
        out.push_back(
            {true, "every rank that is awaited waits itself: nobody will move before a deadline passes",
             "all ranks must make the same calls in the same order; after timed_out, shrink() brings them together again"});
    return out;
}

}  // namespace switchyard::inspect
