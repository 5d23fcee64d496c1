// Plays a group over a sim::World: a scenario drawn from the seed, ranks that follow its script, a judge of what they did.
//
//   Scenario   shape, inputs, script and faults: everything that is decided before the first turn
//   Player     a rank: the engine's steps, driven as Session and its Waiter drive them, one look per turn
//   Game       gives turns, also in the middle of another rank's call; keeps time; strikes with the faults
//   Judge      what the calls ended with, against what the scenario allows
#include "switchyard/simulation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <optional>

#include "ep/combine.hpp"
#include "ep/dispatch.hpp"
#include "layout/window.hpp"
#include "plan/placement.hpp"
#include "quant/quant.hpp"
#include "switchyard/reference.hpp"
#include "transport/sim.hpp"

namespace switchyard::simulation {
namespace {

using ep::Progress;
using sim::Log;
using sim::Random;
using sim::World;

constexpr int64_t ms = 1'000'000;
constexpr int64_t turns_max = 300'000;  // the watchdog: no seed comes near
constexpr std::byte stale{0x5B};        // where nothing has arrived

// --------------------------------------------------------------------------------------------------------------- scenario

struct Input {
    int64_t tokens = 0;
    uint64_t tag = 0;
    std::vector<std::byte> x, shared;  // [T,H]
    std::vector<int32_t> ids;          // [T,K]
    std::vector<int32_t> slots;        // [T,K] where they go: the ids again without a placement table
    std::vector<float> weights;        // [T,K]
    std::vector<int64_t> sends;        // [E] send_counts, or empty
    std::vector<int64_t> expects;      // [R] recv_counts, or empty
};

// A dispatch and what becomes of it; round i is epoch i + 1.
struct Round {
    std::vector<Input> of;  // [R]
    bool weighted = true, with_shared = false, y_in_window = true, x_in_window = false;
    bool as_rows = false;           // combine brings rows home and sums nothing
    bool excess = false;            // a rank would receive more rows than its window holds
    std::vector<uint8_t> overfull;  // [R] whether it sends more rows to an expert than a cell holds
    // The right results, once somebody needs them.
    bool solved = false;
    std::vector<reference::Received> received;
    std::vector<std::vector<std::byte>> combined;
};

struct Op {
    enum class Kind { dispatch, combine, drop, wait_dispatch, wait_combine } kind;
    int round;
    bool waits = true;  // dispatch, combine: for its end; otherwise it is one in two halves, and a wait_* follows
};

enum class Trouble { bad_input, tag, counts, drop, bad_combine, destroy, close, death, stall };

struct Fault {
    Trouble kind;
    int rank;
    int round;      // of the first six
    int64_t at;     // close: before this op; death, stall: in this call of a link or a kernel
    int64_t ns;     // stall
    int64_t which;  // kinds of bad input
};

struct Scenario {
    Options options;
    std::optional<PlacementTable> table;
    int ranks = 1;
    sim::WorldShape world;
    int64_t turn_ns = 1000;       // longest turn
    int64_t break_one_in = 0;     // calls of a link or kernel in which others get turns; 0 = none
    int64_t spins = 0;            // looks before a rank sleeps
    std::vector<int64_t> weight;  // [R] how often a rank gets a turn
    std::vector<Round> rounds;
    std::vector<Op> script;
    std::vector<Fault> faults;

    int64_t timeout_ns() const { return options.timeout_ms * ms; }
    /// As window and reference see them: slots are their experts.
    Options slot_options() const {
        Options o = options;
        if (table) o.experts = table->slots();
        return o;
    }
    const Fault* fault(Trouble kind, int rank, int round) const {
        for (const Fault& f : faults)
            if (f.kind == kind && f.rank == rank && f.round == round) return &f;
        return nullptr;
    }
    bool has(Trouble kind) const {
        return std::any_of(faults.begin(), faults.end(), [&](const Fault& f) { return f.kind == kind; });
    }
    /// Whether every verdict follows from the inputs alone.
    bool is_calm() const {
        return !has(Trouble::death) && !has(Trouble::stall) && !has(Trouble::close) && !has(Trouble::destroy);
    }
};

// Values: slices of one long row of plain numbers, so that making a token costs a copy. Slices that matter differ.
class Values {
 public:
    Values(TokenType type, int64_t hidden, Random& random)
        : item_(static_cast<size_t>(layout::token_bytes(type))), row_bytes_(static_cast<size_t>(hidden) * item_) {
        pool_.resize((static_cast<size_t>(hidden) + starts) * item_);
        for (size_t i = 0; i < pool_.size() / item_; ++i) {
            const auto bits = static_cast<uint32_t>(random.next());
            const uint32_t sign = bits >> 31;
            const uint32_t scale = bits >> 28 & 7;  // one of eight powers of two below 8
            if (type == TokenType::f32) {
                const uint32_t value = sign << 31 | (122 + scale) << 23 | (bits & 0x7FFFFFU);
                std::memcpy(pool_.data() + 4 * i, &value, 4);
            } else {
                const auto value =
                    static_cast<uint16_t>(type == TokenType::f16 ? sign << 15 | (10 + scale) << 10 | (bits & 0x3FFU)
                                                                 : sign << 15 | (122 + scale) << 7 | (bits & 0x7FU));
                std::memcpy(pool_.data() + 2 * i, &value, 2);
            }
        }
    }
    size_t row_bytes() const { return row_bytes_; }
    const std::byte* row(uint64_t name) const { return pool_.data() + sim::mix(name) % starts * item_; }
    /// The output of an expert for slot k of a token.
    const std::byte* y(int round, int source, int64_t token, int64_t k) const {
        return row(uint64_t{1} << 40 | static_cast<uint64_t>(round) << 30 | static_cast<uint64_t>(source) << 20 |
                   static_cast<uint64_t>(token) << 10 | static_cast<uint64_t>(k));
    }

 private:
    static constexpr size_t starts = 1999;
    size_t item_, row_bytes_;
    std::vector<std::byte> pool_;
};

template <class T>
T pick(Random& random, std::initializer_list<T> list) {
    return list.begin()[random.below(static_cast<int64_t>(list.size()))];
}

void draw_shape(Random& random, Scenario& s) {
    Options& o = s.options;
    s.ranks = static_cast<int>(random.one_in(3) ? random.between(1, 8) : random.between(2, 4));
    s.world.reachable = random.one_in(2);
    o.hidden = random.one_in(8) ? random.between(41, 140) : random.between(1, 40);
    o.topk = random.between(1, 4);
    o.experts = random.between(1, 10);
    o.dtype = pick(random, {TokenType::f16, TokenType::bf16, TokenType::f32});
    if (o.dtype != TokenType::f32) {
        o.dispatch_quant = pick(random, {Format::none, Format::none, Format::int8_token, Format::mxfp8_e5m2, Format::mxfp8_e4m3,
                                         Format::fp8_e4m3_block128});
        o.combine_quant = pick(random, {Format::none, Format::none, Format::int8_block8, Format::int8_block128});
    }
    o.expert_token_nums = random.one_in(2) ? TokenNums::count : TokenNums::cumsum;
    o.expert_alignment = random.one_in(8) ? 16 : 1;
    o.deliver_weights = random.one_in(3);
    o.landing = pick(random, {Landing::packed, Landing::padded, Landing::allgather, Landing::alltoallv,
                              s.world.reachable ? Landing::in_place : Landing::packed,
                              s.world.reachable ? Landing::two_level : Landing::allgather});
    o.group_ranks = o.landing == Landing::in_place ? s.ranks : o.landing == Landing::two_level ? random.between(1, s.ranks) : 1;
    o.combine_path = s.world.reachable && random.one_in(2) ? CombinePath::read : CombinePath::push;
    o.depth = random.between(1, 3);
    o.timeout_ms = random.between(400, 1500);
    if (random.one_in(3)) {
        std::vector<uint64_t> loads;
        for (int64_t e = 0; e < o.experts; ++e) loads.push_back(static_cast<uint64_t>(random.below(100)));
        const int64_t spare = random.between(0, std::min<int64_t>(6, (s.ranks - 1) * o.experts));
        s.table = plan_placement(
            loads, {.ranks = s.ranks,
                    .slots = o.experts + spare,
                    .choice = pick(random, {ReplicaChoice::round_robin, ReplicaChoice::nearest, ReplicaChoice::least_loaded})});
    }

    const int64_t us = 1000;
    s.world.delay_ns = pick(random, {int64_t{0}, us, 20 * us, 500 * us});
    s.world.late_ns = pick(random, {us, 100 * us, 5 * ms});
    s.world.late_one_in = random.between(2, 20);
    s.turn_ns = pick(random, {int64_t{200}, 2 * us, 20 * us});
    s.break_one_in = pick(random, {0, 64, 16, 5});
    s.spins = random.below(6);
    for (int r = 0; r < s.ranks; ++r) s.weight.push_back(random.one_in(4) ? 1 : 8);
}

// Fills send_counts and recv_counts as they are.
void tell_counts(const Scenario& s, Round& round) {
    const int64_t slots = s.slot_options().experts;
    for (Input& in : round.of) {
        in.sends.assign(static_cast<size_t>(s.options.experts), 0);
        in.expects.assign(static_cast<size_t>(s.ranks), 0);
    }
    for (size_t source = 0; source < round.of.size(); ++source) {
        Input& in = round.of[source];
        for (const int32_t id : in.ids)
            if (id >= 0) ++in.sends[static_cast<size_t>(id)];
        for (const int32_t slot : in.slots)
            for (int r = 0; slot >= 0 && r < s.ranks; ++r) {
                const ExpertRange range = experts_of(r, s.ranks, slots);
                if (slot >= range.first && slot < range.last) ++round.of[static_cast<size_t>(r)].expects[source];
            }
    }
}

// The calls, the same on all ranks. The last that begins is a combine, when all dispatches have ended: who has come back from
// it knows that all have dispatched.
void draw_script(Random& random, Scenario& s) {
    const auto rounds = static_cast<int>(s.rounds.size()), depth = static_cast<int>(s.options.depth);
    const bool halves = random.one_in(2);
    std::vector<int> dispatching, open, combining;
    const auto take = [&](std::vector<int>& from) {
        const size_t at = random.one_in(3) ? static_cast<size_t>(random.below(static_cast<int64_t>(from.size()))) : 0;
        const int round = from[at];
        from.erase(from.begin() + static_cast<int64_t>(at));
        return round;
    };
    for (int next = 0; next < rounds || !dispatching.empty() || !open.empty() || !combining.empty();) {
        bool room = next < rounds;  // whether the next dispatch has its slot
        for (const std::vector<int>* in_use : {&dispatching, &open, &combining})
            for (const int round : *in_use) room = room && round > next - depth;
        const bool waits = !halves || random.one_in(3);
        if (room && ((dispatching.empty() && open.empty() && combining.empty()) || random.one_in(2))) {
            s.script.push_back({Op::Kind::dispatch, next, waits});
            (waits ? open : dispatching).push_back(next++);
        } else if (!dispatching.empty() && (open.empty() || random.one_in(2))) {
            open.push_back(take(dispatching));
            s.script.push_back({Op::Kind::wait_dispatch, open.back()});
        } else if (!combining.empty() && (open.empty() || random.one_in(2))) {
            s.script.push_back({Op::Kind::wait_combine, take(combining)});
        } else {
            const bool last = next == rounds && dispatching.empty() && open.size() == 1;
            const int round = take(open);
            if (!last && random.one_in(6)) {
                s.script.push_back({Op::Kind::drop, round});
            } else {
                s.script.push_back({Op::Kind::combine, round, waits});
                if (!waits) combining.push_back(round);
            }
        }
    }
}

void draw_rounds(Random& random, Scenario& s, const Values& values) {
    Options& o = s.options;
    o.tokens_max = random.between(0, 5);
    const int64_t rounds = random.between(1, 5);
    const bool tagged = random.one_in(2);
    for (int i = 0; i < rounds; ++i) {
        Round round;
        round.weighted = !random.one_in(4);
        round.with_shared = random.one_in(3);
        round.y_in_window = random.one_in(2);
        round.x_in_window = random.one_in(2);
        round.as_rows = o.combine_quant == Format::none && random.one_in(4);
        const bool with_counts = random.one_in(4);
        const bool nobody = random.one_in(10);
        const auto favourite = static_cast<int32_t>(random.below(o.experts));
        const int64_t skew = random.between(1, 4);  // 1: nearly all to the favourite
        for (int r = 0; r < s.ranks; ++r) {
            Input in;
            in.tokens = nobody || random.one_in(6) ? 0 : random.between(0, o.tokens_max);
            in.tag = tagged ? static_cast<uint64_t>(7 + i) : 0;
            in.x.resize(static_cast<size_t>(in.tokens) * values.row_bytes());
            in.shared.resize(in.x.size());
            for (int64_t t = 0; t < in.tokens; ++t) {
                const size_t at = static_cast<size_t>(t) * values.row_bytes();
                std::memcpy(in.x.data() + at, values.row(random.next()), values.row_bytes());
                std::memcpy(in.shared.data() + at, values.row(random.next()), values.row_bytes());
            }
            for (int64_t j = 0; j < in.tokens * o.topk; ++j) {
                auto id = static_cast<int32_t>(random.below(o.experts));
                if (skew == 1 && !random.one_in(4)) id = favourite;
                if (random.one_in(6)) id = -1;
                if (j > 0 && random.one_in(6)) id = in.ids.back();
                in.ids.push_back(id);
                in.weights.push_back(static_cast<float>(random.between(-1000, 1000)) / 640.0F);
            }
            in.slots = s.table ? slots_of(*s.table, r, in.ids) : in.ids;
            round.of.push_back(std::move(in));
        }
        if (with_counts) tell_counts(s, round);
        s.rounds.push_back(std::move(round));
    }

    // What each round asks of the fullest window and the fullest cell, and a window that may be too small for some of them.
    const int64_t slots = s.slot_options().experts;
    std::vector<int64_t> asked;
    std::vector<std::vector<int64_t>> asked_cells;  // [rounds][R]
    int64_t most_in_cell = 0;
    for (const Round& round : s.rounds) {
        std::vector<int64_t> of_slot(static_cast<size_t>(slots));
        std::vector<int64_t>& cells = asked_cells.emplace_back();
        for (const Input& in : round.of) {
            std::vector<int64_t> mine(static_cast<size_t>(slots));
            for (const int32_t slot : in.slots)
                if (slot >= 0) ++mine[static_cast<size_t>(slot)];
            for (size_t i = 0; i < mine.size(); ++i) of_slot[i] += mine[i];
            cells.push_back(*std::max_element(mine.begin(), mine.end()));
            most_in_cell = std::max(most_in_cell, cells.back());
        }
        int64_t fullest = 0;
        for (int r = 0; r < s.ranks; ++r) {
            const ExpertRange range = experts_of(r, s.ranks, slots);
            int64_t rows = 0;
            for (int64_t i = range.first; i < range.last; ++i)
                rows += (of_slot[static_cast<size_t>(i)] + o.expert_alignment - 1) / o.expert_alignment * o.expert_alignment;
            fullest = std::max(fullest, rows);
        }
        asked.push_back(fullest);
    }
    const auto room_for = [&](int64_t most) {
        return std::max<int64_t>(1, random.one_in(6) ? random.between(most / 2, most) : most + random.below(3));
    };
    o.rows_max = room_for(*std::max_element(asked.begin(), asked.end()));
    o.cell_rows = random.one_in(3) ? std::max<int64_t>(1, o.tokens_max * o.topk) : room_for(most_in_cell);
    for (size_t i = 0; i < asked.size(); ++i) {
        Round& round = s.rounds[i];
        round.excess = asked[i] > o.rows_max;
        for (const int64_t rows : asked_cells[i]) round.overfull.push_back(o.landing == Landing::padded && rows > o.cell_rows);
    }

    draw_script(random, s);
}

void draw_faults(Random& random, Scenario& s) {
    const auto rounds = static_cast<int64_t>(s.rounds.size());
    for (int64_t n = pick(random, {0, 1, 1, 2, 3}); n > 0; --n) {
        Fault f{};
        f.kind = pick(random, {Trouble::bad_input, Trouble::tag, Trouble::counts, Trouble::drop, Trouble::bad_combine,
                               Trouble::destroy, Trouble::close, Trouble::death, Trouble::death, Trouble::stall});
        f.rank = static_cast<int>(random.below(s.ranks));
        f.round = static_cast<int>(random.below(rounds));
        f.which = random.below(8);
        if (f.kind == Trouble::close) f.at = random.below(static_cast<int64_t>(s.script.size()));
        if (f.kind == Trouble::death || f.kind == Trouble::stall) f.at = random.between(1, int64_t{1} << random.between(3, 10));
        if (f.kind == Trouble::stall) f.ns = random.between(1, 40) * s.timeout_ns() / 10;
        Round& round = s.rounds[static_cast<size_t>(f.round)];
        if (f.kind == Trouble::tag) round.of[static_cast<size_t>(f.rank)].tag = 99;
        if (f.kind == Trouble::counts) {
            const int64_t most = s.options.tokens_max * s.options.topk;
            if (most == 0 || s.fault(Trouble::counts, f.rank, f.round)) continue;
            if (round.of[0].expects.empty()) tell_counts(s, round);
            int64_t& expected = round.of[static_cast<size_t>(f.rank)].expects[static_cast<size_t>(f.which % s.ranks)];
            expected += expected < most ? 1 : -1;
        }
        s.faults.push_back(f);
    }
    s.options.partial = random.one_in(3);
}

std::string text_of(const Scenario& s) {
    const Options& o = s.options;
    const auto name = [&](const char* option) { return option_text(*find_option(option), o); };
    std::string text = fmt::format(
        "{} ranks, {} windows, H {}, K {}, E {}, {}, dispatch {}, combine {}, landing {}, path {}, depth {}, "
        "rows_max {}, cell_rows {}, alignment {}{}{}\n",
        s.ranks, s.world.reachable ? "reachable" : "unreachable", o.hidden, o.topk, o.experts, name("dtype"),
        name("dispatch_quant"), name("combine_quant"), name("landing"), name("combine_path"), o.depth, o.rows_max, o.cell_rows,
        o.expert_alignment, o.deliver_weights ? ", weights delivered" : "", o.partial ? ", partial" : "");
    if (s.table) {
        text += "slots hold experts";
        for (const int32_t expert : s.table->expert_of) text += fmt::format(" {}", expert);
        text += fmt::format(", replica choice {}\n", static_cast<int>(s.table->choice));
    }
    text += fmt::format("what is sent arrives within {} us, 1 in {} within {} us; deadline {} ms; breaks in 1 of {} calls\n",
                        s.world.delay_ns / 1000, s.world.late_one_in, s.world.late_ns / 1000, o.timeout_ms, s.break_one_in);
    text += "script:";
    for (const Op& op : s.script) {
        const char* what = "";
        switch (op.kind) {
            case Op::Kind::dispatch: what = op.waits ? "dispatch" : "dispatch_async"; break;
            case Op::Kind::combine: what = op.waits ? "combine" : "combine_async"; break;
            case Op::Kind::drop: what = "drop"; break;
            case Op::Kind::wait_dispatch: what = "wait for dispatch"; break;
            case Op::Kind::wait_combine: what = "wait for combine"; break;
        }
        text += fmt::format("{} {} {}", &op == s.script.data() ? "" : ",", what, op.round + 1);
    }
    text += "\ntokens:";
    for (const Round& round : s.rounds) {
        text += ' ';
        for (int r = 0; r < s.ranks; ++r) text += fmt::format("{}{}", r ? "," : "", round.of[static_cast<size_t>(r)].tokens);
        if (round.excess) text += " (more rows than a window holds)";
        for (size_t r = 0; r < round.overfull.size(); ++r)
            if (round.overfull[r]) text += fmt::format(" (rank {} has more for an expert than a cell holds)", r);
    }
    text += s.faults.empty() ? "\nno faults" : "\nfaults:";
    for (const Fault& f : s.faults) {
        text += &f == s.faults.data() ? " " : "; ";
        switch (f.kind) {
            case Trouble::bad_input: text += fmt::format("rank {} gives dispatch {} bad input", f.rank, f.round + 1); break;
            case Trouble::tag: text += fmt::format("rank {} gives dispatch {} another tag", f.rank, f.round + 1); break;
            case Trouble::counts: text += fmt::format("rank {} expects other rows in dispatch {}", f.rank, f.round + 1); break;
            case Trouble::drop: text += fmt::format("rank {} drops batch {}", f.rank, f.round + 1); break;
            case Trouble::bad_combine: text += fmt::format("rank {} gives combine {} bad input", f.rank, f.round + 1); break;
            case Trouble::destroy:
                text += fmt::format("rank {} destroys its handles of round {} unread", f.rank, f.round + 1);
                break;
            case Trouble::close: text += fmt::format("rank {} closes before its call {}", f.rank, f.at + 1); break;
            case Trouble::death: text += fmt::format("rank {} dies at its step {}", f.rank, f.at); break;
            case Trouble::stall: text += fmt::format("rank {} stops at its step {} for {} ms", f.rank, f.at, f.ns / ms); break;
        }
    }
    return text;
}

// What combine sums for a rank when its ids go to `slots`.
std::vector<std::byte> combined_of(const Scenario& s, const Values& values, const Round& round, int index, int rank,
                                   const int32_t* slots) {
    const Input& in = round.of[static_cast<size_t>(rank)];
    return reference::combine(
        s.slot_options(), {in.x.data(), in.tokens, slots, round.weighted ? in.weights.data() : nullptr}, rank,
        [&](int source, int64_t t, int64_t k, int32_t) { return static_cast<const void*>(values.y(index, source, t, k)); },
        round.with_shared ? in.shared.data() : nullptr);
}

// The rows of a rank become rows of zeroes that nobody sent.
void blank(reference::Received& received, int source) {
    const auto rows = static_cast<size_t>(received.rows);
    for (size_t row = 0; row < rows; ++row) {
        int32_t* info = received.assist_info_for_combine.data() + 3 * row;
        if (info[0] != source) continue;
        std::fill_n(info, 3, -1);
        for (std::vector<std::byte>* bytes : {&received.expand_x, &received.dynamic_scales}) {
            const size_t each = bytes->size() / rows;
            std::fill_n(bytes->begin() + static_cast<std::ptrdiff_t>(row * each), each, std::byte{0});
        }
        if (!received.weights.empty()) received.weights[row] = 0;
    }
}

void solve(const Scenario& s, const Values& values, Round& round, int index) {
    if (round.solved) return;
    round.solved = true;
    const Options options = s.slot_options();
    std::vector<reference::RankInput> inputs;
    for (const Input& in : round.of)
        inputs.push_back(
            {in.x.data(), in.tokens, in.slots.data(), round.weighted || options.deliver_weights ? in.weights.data() : nullptr});
    for (int r = 0; r < s.ranks; ++r) {
        const auto at = static_cast<size_t>(r);
        round.received.push_back(reference::dispatch(options, inputs, r));
        if (round.as_rows) {
            std::vector<std::byte>& rows = round.combined.emplace_back(round.of[at].ids.size() * values.row_bytes(), stale);
            for (size_t i = 0; i < round.of[at].ids.size(); ++i)
                if (const auto n = static_cast<int64_t>(i); round.of[at].ids[i] >= 0)
                    std::memcpy(rows.data() + i * values.row_bytes(), values.y(index, r, n / options.topk, n % options.topk),
                                values.row_bytes());
            continue;
        }
        round.combined.push_back(combined_of(s, values, round, index, r, round.of[at].slots.data()));
    }
}

// ------------------------------------------------------------------------------------------------------------------ players

// How a call ended.
struct Ending {
    bool called = false, ended = false;
    int64_t start = 0, end = 0;
    int64_t held = 0;  // of that, while others had the processor in the middle of this rank's looks
    Code code = Code::ok;
    std::string text;
    Status prior;               // that its dispatch carried to the others
    bool unread = false;        // its handle was destroyed
    std::vector<uint8_t> lost;  // [R] option partial: ranks without which it has ended well
    bool goes_without(int peer) const { return !lost.empty() && lost[static_cast<size_t>(peer)] != 0; }
};

// A dispatch or combine under way.
struct Call {
    bool is_dispatch;
    int round;
};

struct Player {
    enum class State { thinking, in_gate, waiting, closed, dead };

    int rank = 0;
    ep::Workers workers{1};
    std::unique_ptr<ep::Rank> engine;
    struct Slot {
        ep::Flight flight;
        ep::DispatchStep dispatch;
        ep::CombineStep combine;
    };
    std::vector<Slot> slots;
    std::vector<Call> active;  // by epoch
    ep::Await gate;            // of Session::x()
    uint64_t last_epoch = 0;
    Status untold;

    State state = State::thinking;
    bool busy = false;      // in a turn, perhaps interrupted
    size_t op = 0;          // next
    int64_t pause = 0;      // turns
    int64_t ops_left = -1;  // before it gives up after a fatal error; -1 = no such
    int64_t steps = 0;      // calls of its link and kernels
    int64_t closed_at = -1, died_at = -1;

    // What it waits for: the gate, or the end of a call.
    Call awaited{};
    bool x_waits = false;  // behind the gate: whether the dispatch waits
    int64_t waits_since = 0;
    int64_t spins_left = 0;
    bool announced = false, slept = false;
    uint32_t ticket = 0;

    std::vector<Ending> gates, dispatches, combines;  // [rounds]
    std::vector<uint8_t> open, dropped;               // [rounds]
    std::vector<int64_t> drop_begun, drop_done;       // [rounds]
    std::vector<std::vector<std::byte>> y, out;       // [rounds]
    std::vector<std::vector<int32_t>> missing;        // [rounds][T]

    bool ended() const { return state == State::closed || state == State::dead; }
    Slot& slot(int of_round) { return slots[(static_cast<size_t>(of_round) + 1) % slots.size()]; }
    ep::Flight& flight(int of_round) { return slot(of_round).flight; }
    Ending& ending(const Call& call) { return (call.is_dispatch ? dispatches : combines)[static_cast<size_t>(call.round)]; }
};

struct Died {};

class Game {
 public:
    Game(const Play& play, Log& log);
    ~Game();

    /// Until every rank has ended and all has arrived, or something is wrong.
    void play();

    const Scenario& scenario() const { return scenario_; }
    const std::string& failure() const { return failure_; }
    int64_t turns() const { return turns_; }
    int64_t now() const { return world_->now(); }
    std::array<int64_t, 12> endings() const;

    /// Called by the kernels: the rank whose turn it is may be interrupted, or struck, there too.
    void between() { between(running_); }
    const quant::Kernels* kernels = nullptr;

 private:
    template <class... A>
    void fail(fmt::format_string<A...> text, A&&... arguments) {
        if (failure_.empty()) failure_ = fmt::vformat(text, fmt::make_format_args(arguments...));
    }
    std::byte* part(Player& p, int round, uint64_t offset) {
        return world_->window(p.rank) + window_.slot(p.flight(round).slot) + offset;
    }
    int64_t rounds() const { return static_cast<int64_t>(scenario_.rounds.size()); }
    Round& round(int i) { return scenario_.rounds[static_cast<size_t>(i)]; }

    void between(int rank);
    bool step(int64_t until_ns);
    void turn(Player& p);
    void think(Player& p);
    void look(Player& p);

    void begin_gate(Player& p, int round, bool waits);
    void begin_dispatch(Player& p, int round, const void* x, bool waits);
    void begin_combine(Player& p, int round, bool waits);
    void begun(Player& p, Call call, bool waits);
    void wait(Player& p, Player::State state, Call awaited);
    void move(Player& p, bool thorough);
    void expire(Player& p);
    void end(Player& p, Call call, Progress progress);
    void end_gate(Player& p, Progress progress);
    void take_end(Player& p, Call call);
    void note_end(Player& p, const char* what, int round, Ending& e, const Status& status);
    int64_t first_deadline(Player& p);
    void destroy(Player& p, Call call);
    void drop(Player& p, int round);
    void close(Player& p);

    void fill_y(Player& p, int round);
    void check_batch(Player& p, int round);
    void check_out(Player& p, int round, const char* what);
    void check_same(Player& p, int round, const char* what, const void* got, const void* want, size_t bytes);

    // The judge
    void judge();
    void judge_windows();
    bool must_end_all() const;
    void judge_truth(const Player& p, const char* call, int round, const Ending& e, bool dispatch);
    void judge_told(const Player& p, int round);
    void judge_dispatch(int round);
    void judge_combine(int round);

    Log& log_;
    Random random_;
    Scenario scenario_;
    std::optional<Values> values_;
    layout::Window window_{};
    quant::Kernels interrupted_{};  // kernels that call between() first
    std::optional<World> world_;
    std::deque<Player> players_;
    int running_ = -1;
    bool playing_ = false;
    int64_t turns_ = 0;
    struct Stop {
        int64_t start, end;
    };
    std::vector<Stop> stops_;  // of ranks that a fault has stopped
    std::string failure_;
};

thread_local Game* game = nullptr;  // whose kernels run

quant::Kernels interrupted(const quant::Kernels& kernels) {
    quant::Kernels k = kernels;
    k.encode = [](const RowFormat& format, TokenType token, const void* x, int64_t hidden, void* payload, void* scales) {
        game->between();
        game->kernels->encode(format, token, x, hidden, payload, scales);
    };
    k.combine = [](const quant::CombineInput& input, int64_t hidden, void* out) {
        game->between();
        game->kernels->combine(input, hidden, out);
    };
    k.copy = [](void* to, const void* from, size_t bytes) {
        game->between();
        game->kernels->copy(to, from, bytes);
    };
    k.stream = [](void* to, const void* from, size_t bytes) {
        game->between();
        game->kernels->stream(to, from, bytes);
    };
    k.fence = [] {
        game->between();
        game->kernels->fence();
    };
    return k;
}

Game::Game(const Play& play, Log& log) : log_(log), random_(play.seed) {
    kernels = quant::find_kernels(play.simd);
    if (!kernels) throw Error(Status(Code::bad_input, "this build on this processor has no kernels of that instruction set."));
    interrupted_ = interrupted(*kernels);

    draw_shape(random_, scenario_);
    values_.emplace(scenario_.options.dtype, scenario_.options.hidden, random_);
    draw_rounds(random_, scenario_, *values_);
    draw_faults(random_, scenario_);
    const Options& o = scenario_.options;
    if (const Status s = check_options(o, scenario_.ranks); !s.ok()) throw Error(s);

    window_ = layout::window_of(ep::shape_of(scenario_.slot_options(), scenario_.ranks));
    sim::WorldShape shape = scenario_.world;
    shape.ranks = scenario_.ranks;
    shape.window_bytes = window_.bytes;
    shape.bell_offset = window_.bell;
    shape.broken = play.broken;
    shape.misplaced_by = window_.slot_bytes;
    world_.emplace(random_.next(), shape, log_);
    world_->between = [this](int rank) { between(rank); };
    for (int r = 0; r < scenario_.ranks; ++r) {
        std::memset(world_->window(r) + window_.slots, std::to_integer<int>(stale), window_.bytes - window_.slots);
        Player& p = players_.emplace_back();
        p.rank = r;
        std::vector<std::vector<std::byte>> cards;
        Status s = world_->link(r).attach({.card = {}, .window_bytes = window_.bytes, .bell_offset = window_.bell}, {}, &cards);
        p.engine = std::make_unique<ep::Rank>(world_->link(r), window_, interrupted_, p.workers, o,
                                              scenario_.table ? plan::turns_of(*scenario_.table, r) : ep::Turns());
        if (s.ok()) s = p.engine->connect();
        if (!s.ok()) throw Error(s);
        p.slots.resize(static_cast<size_t>(o.depth));
        for (Player::Slot& slot : p.slots) {
            slot.flight.allocate(*p.engine);
            slot.dispatch.allocate(*p.engine);
            slot.combine.allocate(*p.engine);
        }
        p.gate.allocate(*p.engine);
        const auto n = scenario_.rounds.size();
        p.gates.resize(n);
        p.dispatches.resize(n);
        p.combines.resize(n);
        p.open.resize(n);
        p.dropped.resize(n);
        p.drop_begun.resize(n);
        p.drop_done.resize(n, std::numeric_limits<int64_t>::max());
        p.y.resize(n);
        p.out.resize(n);
        p.missing.resize(n);
    }
    game = this;
}

Game::~Game() {
    game = nullptr;
}

std::array<int64_t, 12> Game::endings() const {
    std::array<int64_t, 12> count{};
    for (const Player& p : players_)
        for (const auto* calls : {&p.dispatches, &p.combines})
            for (const Ending& e : *calls)
                if (e.ended) ++count[static_cast<size_t>(e.code)];
    return count;
}

void Game::play() {
    playing_ = true;
    const auto all_ended = [&] {
        return std::all_of(players_.begin(), players_.end(), [](const Player& p) { return p.ended(); });
    };
    while (failure_.empty() && !all_ended()) {
        if (!step(std::numeric_limits<int64_t>::max())) {
            fail("nothing is under way, and yet not every rank has ended");
        }
    }
    while (failure_.empty() && !world_->idle()) world_->pass(std::max<int64_t>(world_->next_ns() - world_->now(), 0));
    playing_ = false;
    if (failure_.empty()) judge();
}

// One turn of some rank that is awake, or, when all sleep, the passing of time to what happens next. False when nothing
// happens by `until_ns`.
bool Game::step(int64_t until_ns) {
    int64_t all = 0;
    for (const Player& p : players_)
        if (!p.busy && !p.ended() && !world_->asleep(p.rank)) all += scenario_.weight[static_cast<size_t>(p.rank)];
    if (all == 0) {
        const int64_t next = world_->next_ns();
        if (next == std::numeric_limits<int64_t>::max() || next > until_ns) return false;
        world_->pass(std::max<int64_t>(next - world_->now(), 0));
        return true;
    }
    int64_t at = random_.below(all);
    for (Player& p : players_) {
        if (p.busy || p.ended() || world_->asleep(p.rank)) continue;
        at -= scenario_.weight[static_cast<size_t>(p.rank)];
        if (at >= 0) continue;
        if (++turns_ > turns_max) {
            fail("watchdog: {} turns, and not every rank has ended", turns_max);
            return false;
        }
        const int interrupted_rank = running_;
        running_ = p.rank;
        p.busy = true;
        world_->pass(random_.between(1, scenario_.turn_ns));
        try {
            turn(p);
        } catch (const Died&) {
        } catch (const sim::CallerBug& bug) {
            fail("a call outside the contract: {}", bug.text);
        }
        p.busy = false;
        running_ = interrupted_rank;
        return failure_.empty();
    }
    return false;
}

// In the middle of a rank's call: it may be struck, or others may have the processor for a while.
void Game::between(int rank) {
    if (!playing_ || !failure_.empty()) return;
    Player& p = players_[static_cast<size_t>(rank)];
    ++p.steps;
    const int64_t before = world_->now();
    for (const Fault& f : scenario_.faults) {
        if (f.rank != rank || f.at != p.steps) continue;
        if (f.kind == Trouble::death) {
            p.state = Player::State::dead;
            p.died_at = world_->now();
            world_->kill(rank);
            throw Died();
        }
        if (f.kind == Trouble::stall) {
            log_.note(before, "rank {} stops for {} ns", rank, f.ns);
            const size_t stop = stops_.size();
            stops_.push_back({before, std::numeric_limits<int64_t>::max()});
            while (world_->now() < before + f.ns && failure_.empty() && step(before + f.ns)) {
            }
            world_->pass(std::max<int64_t>(before + f.ns - world_->now(), 0));
            stops_[stop].end = world_->now();
            log_.note(world_->now(), "rank {} goes on", rank);
        }
    }
    if (scenario_.break_one_in > 0 && random_.one_in(scenario_.break_one_in)) {
        for (int64_t n = random_.between(1, 8); n > 0 && failure_.empty() && step(world_->now()); --n) {
        }
    }
    const int64_t held = world_->now() - before;
    for (const Call& call : p.active) p.ending(call).held += held;
    if (p.state == Player::State::in_gate) p.gates[static_cast<size_t>(p.awaited.round)].held += held;
}

void Game::turn(Player& p) {
    if (p.state == Player::State::thinking)
        think(p);
    else
        look(p);
}

// Between two calls.
void Game::think(Player& p) {
    if (p.pause > 0) return static_cast<void>(--p.pause);
    const bool closes = std::any_of(scenario_.faults.begin(), scenario_.faults.end(), [&](const Fault& f) {
        return f.kind == Trouble::close && f.rank == p.rank && f.at == static_cast<int64_t>(p.op);
    });
    if (closes || p.op == scenario_.script.size() || p.ops_left == 0) return close(p);
    if (p.ops_left > 0) --p.ops_left;
    const Op op = scenario_.script[p.op++];
    const auto i = static_cast<size_t>(op.round);
    p.pause = random_.one_in(4) ? random_.below(12) : 0;
    switch (op.kind) {
        case Op::Kind::dispatch: {
            const bool has_place =
                scenario_.options.landing == Landing::in_place && scenario_.options.dispatch_quant == Format::none;
            if (has_place && round(op.round).x_in_window) return begin_gate(p, op.round, op.waits);
            return begin_dispatch(p, op.round, round(op.round).of[static_cast<size_t>(p.rank)].x.data(), op.waits);
        }
        case Op::Kind::wait_dispatch:
        case Op::Kind::wait_combine: {
            const Call call{op.kind == Op::Kind::wait_dispatch, op.round};
            if (!p.ending(call).called) return;
            if (scenario_.fault(Trouble::destroy, p.rank, op.round)) return destroy(p, call);
            return wait(p, Player::State::waiting, call);
        }
        case Op::Kind::combine:
        case Op::Kind::drop: break;
    }
    if (!p.open[i]) return;  // its dispatch has failed
    check_batch(p, op.round);
    if (op.kind == Op::Kind::drop || scenario_.fault(Trouble::drop, p.rank, op.round)) return drop(p, op.round);
    begin_combine(p, op.round, op.waits);
}

// Session::x(): waits for the slot of the next dispatch.
void Game::begin_gate(Player& p, int of_round, bool waits) {
    Ending& e = p.gates[static_cast<size_t>(of_round)];
    e.called = true;
    e.start = world_->now();
    ep::Flight next;
    next.epoch = p.last_epoch + 1;
    next.slot = next.epoch % static_cast<uint64_t>(scenario_.options.depth);
    p.gate.begin_gate(*p.engine, next);
    p.x_waits = waits;
    wait(p, Player::State::in_gate, {true, of_round});
}

void Game::begin_dispatch(Player& p, int of_round, const void* x, bool waits) {
    const Options& o = scenario_.options;
    Ending& e = p.dispatches[static_cast<size_t>(of_round)];
    const Input& in = round(of_round).of[static_cast<size_t>(p.rank)];
    DispatchArgs args{.x = x,
                      .tokens = in.tokens,
                      .topk_ids = in.ids.data(),
                      .topk_weights = round(of_round).weighted || o.deliver_weights ? in.weights.data() : nullptr,
                      .tag = in.tag,
                      .send_counts = in.sends.empty() ? nullptr : in.sends.data(),
                      .recv_counts = in.expects.empty() ? nullptr : in.expects.data()};
    std::vector<int32_t> bad_ids = in.ids;
    if (const Fault* f = scenario_.fault(Trouble::bad_input, p.rank, of_round)) {
        const bool some = in.tokens > 0;
        switch (some ? f->which : 4 + f->which % 4) {
            case 0: bad_ids.back() = static_cast<int32_t>(o.experts), args.topk_ids = bad_ids.data(); break;
            case 1: bad_ids.front() = -2, args.topk_ids = bad_ids.data(); break;
            case 2: args.x = nullptr; break;
            case 3: args.topk_ids = nullptr; break;
            case 4: args.tokens = o.tokens_max + 1; break;
            case 5: args.tokens = -1; break;
            case 6: args.row_stride = -1; break;
            default: args.timeout_ms = -1; break;
        }
    }
    ep::Flight& flight = p.flight(of_round);
    flight.epoch = ++p.last_epoch;
    flight.slot = flight.epoch % static_cast<uint64_t>(o.depth);
    // What lies in the slot is this rank's own until it has counted; whoever takes it for this epoch's is found out.
    const auto rows = static_cast<size_t>(std::max<int64_t>(flight.rows, 0));
    const auto spoil = [&](uint64_t offset, int64_t bytes) {
        std::memset(part(p, of_round, offset), std::to_integer<int>(stale), rows * static_cast<size_t>(bytes));
    };
    spoil(window_.expand_x, window_.row.payload_bytes);
    spoil(window_.scales, window_.row.scale_bytes());
    spoil(window_.source_info, 12);
    if (o.deliver_weights) spoil(window_.weights, 4);

    e.called = true;
    e.start = world_->now();
    e.prior = p.untold;
    p.active.push_back({true, of_round});  // the latest epoch: the last
    p.slot(of_round).dispatch.start(*p.engine, flight, args, std::exchange(p.untold, {}));
    begun(p, {true, of_round}, waits);
}

void Game::begin_combine(Player& p, int of_round, bool waits) {
    const auto i = static_cast<size_t>(of_round);
    p.open[i] = false;
    fill_y(p, of_round);
    const Round& r = round(of_round);
    const Input& in = r.of[static_cast<size_t>(p.rank)];
    p.out[i].assign(r.as_rows ? in.ids.size() * values_->row_bytes() : in.x.size(), stale);
    p.missing[i].assign(static_cast<size_t>(in.tokens), -1);
    CombineArgs args{.y = r.y_in_window ? nullptr : p.y[i].data(), .missing = p.missing[i].data()};
    if (r.as_rows) {
        args.rows = p.out[i].data();
    } else {
        args.topk_weights = r.weighted ? in.weights.data() : nullptr;
        args.shared = r.with_shared ? in.shared.data() : nullptr;
        args.out = p.out[i].data();
    }
    if (const Fault* f = scenario_.fault(Trouble::bad_combine, p.rank, of_round)) {
        if (f->which % 2 == 0 && in.tokens > 0)
            args.out = args.rows = nullptr;
        else
            args.timeout_ms = -1;
    }
    Ending& e = p.combines[i];
    e.called = true;
    e.start = world_->now();
    const Call call{false, of_round};
    p.active.insert(std::find_if(p.active.begin(), p.active.end(), [&](const Call& other) { return other.round > of_round; }),
                    call);
    p.slot(of_round).combine.start(*p.engine, p.flight(of_round), args);
    begun(p, call, waits);
}

// As Session posts it: a look at once, then the caller waits or goes on.
void Game::begun(Player& p, Call call, bool waits) {
    if (call.is_dispatch)
        log_.note(world_->now(), "rank {} has begun dispatch {}", p.rank, call.round + 1);
    else
        log_.note(world_->now(), "rank {} has begun combine {}", p.rank, call.round + 1);
    p.state = Player::State::thinking;
    p.waits_since = world_->now();
    move(p, false);
    if (waits) wait(p, Player::State::waiting, call);
}

void Game::wait(Player& p, Player::State state, Call awaited) {
    if (state == Player::State::waiting && p.ending(awaited).ended) return take_end(p, awaited);
    p.state = state;
    p.awaited = awaited;
    p.waits_since = world_->now();
    p.spins_left = scenario_.spins;
    p.announced = p.slept = false;
}

// One look at every call that is under way: who waits for one moves all.
void Game::move(Player& p, bool thorough) {
    for (size_t i = 0; i < p.active.size();) {
        const Call call = p.active[i];
        Player::Slot& slot = p.slot(call.round);
        const Progress progress = call.is_dispatch ? slot.dispatch.poll(*p.engine, slot.flight, thorough)
                                                   : slot.combine.poll(*p.engine, slot.flight, thorough);
        if (progress == Progress::pending)
            ++i;
        else
            end(p, call, progress);
    }
}

// Gives up what is late.
void Game::expire(Player& p) {
    for (size_t i = 0; i < p.active.size();) {
        const Call call = p.active[i];
        const int64_t waited_ns = world_->now() - p.ending(call).start;
        Player::Slot& slot = p.slot(call.round);
        if (waited_ns < scenario_.timeout_ns()) {
            ++i;
            continue;
        }
        if (call.is_dispatch)
            slot.dispatch.give_up(*p.engine, slot.flight, waited_ns / ms);
        else
            slot.combine.give_up(*p.engine, slot.flight, waited_ns / ms);
        end(p, call, Progress::failed);
    }
}

int64_t Game::first_deadline(Player& p) {
    int64_t first = std::numeric_limits<int64_t>::max();
    for (const Call& call : p.active) first = std::min(first, p.ending(call).start + scenario_.timeout_ns());
    if (p.state == Player::State::in_gate)
        first = std::min(first, p.gates[static_cast<size_t>(p.awaited.round)].start + scenario_.timeout_ns());
    return first;
}

// One look of a rank that waits, as Session's Waiter takes it: a few turns spinning, then announce, look once more, sleep.
void Game::look(Player& p) {
    const bool at_gate = p.state == Player::State::in_gate;
    const auto poll = [&](bool thorough) {
        move(p, thorough);
        if (at_gate) return p.gate.poll(*p.engine, thorough);
        return p.ending(p.awaited).ended ? Progress::done : Progress::pending;
    };
    const auto over = [&](Progress progress) { return at_gate ? end_gate(p, progress) : take_end(p, p.awaited); };
    Transport& link = p.engine->link;
    if (p.announced && p.slept) {
        link.awake();
        p.announced = p.slept = false;
        p.spins_left = random_.below(3);
    }
    if (!p.announced) {
        Progress progress = poll(false);
        if (progress == Progress::pending && world_->now() >= first_deadline(p)) {
            progress = poll(true);
            if (progress == Progress::pending) {
                expire(p);
                if (!at_gate && p.ending(p.awaited).ended) progress = Progress::done;
                if (at_gate && world_->now() >= p.gates[static_cast<size_t>(p.awaited.round)].start + scenario_.timeout_ns())
                    progress = Progress::failed;
            }
        }
        if (progress != Progress::pending) return over(progress);
        if (p.spins_left-- > 0) return;
        p.ticket = link.announce();
        p.announced = true;
        return;
    }
    const Progress progress = poll(true);
    if (progress == Progress::pending) {
        // Only a death rings nobody. Where none is planned, ranks sleep without a slice: all else must wake them.
        const int64_t left = std::max<int64_t>(first_deadline(p) - world_->now(), 1);
        link.sleep(p.ticket, scenario_.has(Trouble::death) ? std::min(10 * ms, left) : left);
        p.slept = true;
        return;
    }
    link.awake();
    p.announced = false;
    over(progress);
}

// A call has come to its end, whoever waits for it.
void Game::end(Player& p, Call call, Progress progress) {
    std::erase_if(p.active, [&](const Call& c) { return c.round == call.round; });
    Player::Slot& slot = p.slot(call.round);
    Status status;
    if (progress == Progress::failed) {
        status = call.is_dispatch ? slot.dispatch.status() : slot.combine.status();
        if (status.ok()) fail("rank {}: call of round {} failed without a reason", p.rank, call.round + 1);
    }
    Ending& e = p.ending(call);
    const char* const what = call.is_dispatch ? "dispatch" : "combine";
    if (status.ok()) e.lost = slot.flight.lost;
    note_end(p, what, call.round, e, status);
    for (const Player& q : players_)
        if (e.goes_without(q.rank) && q.died_at < 0)
            fail("rank {}: {} {} goes without rank {}, which lives", p.rank, what, call.round + 1, q.rank);
    if (!call.is_dispatch && slot.combine.untold())
        p.untold = Status(status.code(),
                          fmt::format("rank {}: its combine of epoch {} failed after this rank's rows had been offered: {}",
                                      p.rank, call.round + 1, status.text()));
}

void Game::note_end(Player& p, const char* what, int of_round, Ending& e, const Status& status) {
    e.ended = true;
    e.end = world_->now();
    e.code = status.code();
    e.text = status.text();
    log_.note(e.end, "rank {} ends a call of round {} with code {}", p.rank, of_round + 1, static_cast<int>(e.code));
    log_.add(e.text.data(), e.text.size());
    if (!status.ok()) log_.say(e.end, fmt::format("rank {}: {}", p.rank, e.text));

    // A call ends by its deadline, or as soon as its rank looks after it, but for what others took in the middle of it and the
    // time in which a sleeper gets up.
    const int64_t looked_from = std::max(e.start, p.waits_since);
    const int64_t late_ns = e.end - std::max(e.start + scenario_.timeout_ns(), looked_from) - e.held;
    if (late_ns > scenario_.world.late_ns + 20 * ms)
        fail("rank {}: {} of round {} ended {} ms after its deadline", p.rank, what, of_round + 1, late_ns / ms);
    // And long before it, except while a rank is stopped: whatever else happens, a death, an error, a rank that has to catch
    // up, is over before long.
    int64_t waited_ns = e.end - looked_from;
    for (const Stop& stop : stops_)
        waited_ns -= std::max<int64_t>(0, std::min(stop.end, e.end) - std::max(stop.start, looked_from));
    if (waited_ns > 200 * ms)
        fail("rank {}: {} of round {} has waited {} ms while no rank was stopped: {}", p.rank, what, of_round + 1,
             waited_ns / ms, e.text);
}

// The end of the call is given out.
void Game::take_end(Player& p, Call call) {
    const auto i = static_cast<size_t>(call.round);
    const Ending& e = p.ending(call);
    p.state = Player::State::thinking;
    if (e.code == Code::peer_lost || e.code == Code::peer_closed)
        if (p.ops_left < 0) p.ops_left = random_.below(4);
    if (e.code != Code::ok) return;
    if (call.is_dispatch) {
        p.open[i] = true;
        check_batch(p, call.round);
        if (random_.one_in(2)) fill_y(p, call.round);  // as early as it may be
        return;
    }
    check_out(p, call.round, "out");
    log_.add(p.out[i].data(), p.out[i].size());
}

void Game::end_gate(Player& p, Progress progress) {
    const int of_round = p.awaited.round;
    Status status;
    if (progress == Progress::failed) {
        status = p.gate.failure();
        if (status.ok()) status = Status(Code::timed_out, fmt::format("x timed out on rank {}", p.rank));
    }
    note_end(p, "x", of_round, p.gates[static_cast<size_t>(of_round)], status);
    const Input& in = round(of_round).of[static_cast<size_t>(p.rank)];
    if (!status.ok()) return begin_dispatch(p, of_round, in.x.data(), p.x_waits);
    const uint64_t slot = (p.last_epoch + 1) % static_cast<uint64_t>(scenario_.options.depth);
    std::byte* place = world_->window(p.rank) + window_.slot(slot) + window_.x;
    std::copy(in.x.begin(), in.x.end(), place);
    begin_dispatch(p, of_round, place, p.x_waits);
}

// As the destructors of PendingDispatch and PendingCombine.
void Game::destroy(Player& p, Call call) {
    log_.note(world_->now(), "rank {} destroys a handle of round {}", p.rank, call.round + 1);
    Ending& e = p.ending(call);
    e.unread = true;
    Player::Slot& slot = p.slot(call.round);
    if (e.ended) {
        if (call.is_dispatch && e.code == Code::ok) drop(p, call.round);
        return;
    }
    std::erase_if(p.active, [&](const Call& c) { return c.round == call.round; });
    if (call.is_dispatch)
        slot.dispatch.withdraw(*p.engine, slot.flight);
    else
        slot.combine.abandon(*p.engine, slot.flight);
    e.ended = true;
    e.end = world_->now();
    e.code = call.is_dispatch ? slot.dispatch.status().code() : Code::ok;
}

void Game::drop(Player& p, int of_round) {
    const auto i = static_cast<size_t>(of_round);
    log_.note(world_->now(), "rank {} drops batch {}", p.rank, of_round + 1);
    p.open[i] = false;
    p.dropped[i] = true;
    p.drop_begun[i] = world_->now();
    ep::drop(*p.engine, p.flight(of_round));
    p.drop_done[i] = world_->now();
}

// As Session::close.
void Game::close(Player& p) {
    log_.note(world_->now(), "rank {} closes", p.rank);
    p.closed_at = world_->now();
    ep::raise_closed(*p.engine);
    for (const Call& call : std::exchange(p.active, {})) {
        Player::Slot& slot = p.slot(call.round);
        if (call.is_dispatch)
            slot.dispatch.abandon(*p.engine, slot.flight, Code::peer_closed);
        else
            slot.combine.abandon(*p.engine, slot.flight);
    }
    for (int i = 0; i < rounds(); ++i)
        if (p.open[static_cast<size_t>(i)]) drop(p, i);
    p.state = Player::State::closed;
}

void Game::fill_y(Player& p, int of_round) {
    const auto i = static_cast<size_t>(of_round);
    const size_t bytes = values_->row_bytes();
    const auto rows = static_cast<size_t>(p.flight(of_round).rows);
    p.y[i].assign(rows * bytes, stale);
    std::byte* to = round(of_round).y_in_window ? part(p, of_round, window_.y) : p.y[i].data();
    for (size_t row = 0; row < rows; ++row) {
        int32_t source[3];
        std::memcpy(source, part(p, of_round, window_.source_info) + 12 * row, sizeof source);
        if (source[0] < 0) continue;
        std::memcpy(to + row * bytes, values_->y(of_round, source[0], source[1], source[2]), bytes);
    }
}

void Game::check_same(Player& p, int of_round, const char* what, const void* got, const void* want, size_t bytes) {
    if (bytes == 0 || std::memcmp(got, want, bytes) == 0) return;
    const auto* a = static_cast<const std::byte*>(got);
    const auto* b = static_cast<const std::byte*>(want);
    const auto at = static_cast<size_t>(std::mismatch(a, a + bytes, b).first - a);
    fail("rank {}: {} of round {} differs first at byte {} of {}: 0x{:02X}, the reference has 0x{:02X}", p.rank, what,
         of_round + 1, at, bytes, std::to_integer<unsigned>(a[at]), std::to_integer<unsigned>(b[at]));
}

// What combine has written, against the reference: that of a routing without the slots of ranks which it went without.
void Game::check_out(Player& p, int of_round, const char* what) {
    const auto i = static_cast<size_t>(of_round), me = static_cast<size_t>(p.rank);
    Round& r = round(of_round);
    const Input& in = r.of[me];
    const Ending& e = p.combines[i];
    const Options options = scenario_.slot_options();
    std::vector<int32_t> missing(static_cast<size_t>(in.tokens));
    std::vector<int32_t> slots = in.slots;
    for (int q = 0; q < scenario_.ranks; ++q) {
        if (!e.goes_without(q)) continue;
        const ExpertRange range = experts_of(q, scenario_.ranks, options.experts);
        for (size_t n = 0; n < slots.size(); ++n)
            if (slots[n] >= range.first && slots[n] < range.last)
                slots[n] = -1, ++missing[n / static_cast<size_t>(options.topk)];
    }
    check_same(p, of_round, "missing", p.missing[i].data(), missing.data(), missing.size() * sizeof(int32_t));
    solve(scenario_, *values_, r, of_round);
    std::vector<std::byte> want = r.combined[me];
    if (!r.as_rows && slots != in.slots) want = combined_of(scenario_, *values_, r, of_round, p.rank, slots.data());
    const size_t bytes = values_->row_bytes();
    for (size_t n = 0; r.as_rows && n < slots.size(); ++n)  // rows of unused slots are left alone
        if (slots[n] < 0) std::memset(want.data() + n * bytes, std::to_integer<int>(stale), bytes);
    check_same(p, of_round, what, p.out[i].data(), want.data(), want.size());
}

// The batch that lies in the window, against the reference: in it the rows of a rank without which it ended are nobody's.
void Game::check_batch(Player& p, int of_round) {
    solve(scenario_, *values_, round(of_round), of_round);
    const reference::Received& all = round(of_round).received[static_cast<size_t>(p.rank)];
    const Ending& e = p.dispatches[static_cast<size_t>(of_round)];
    std::optional<reference::Received> without;
    for (int q = 0; q < scenario_.ranks; ++q) {
        if (!e.goes_without(q)) continue;
        if (!without) without = all;
        blank(*without, q);
    }
    const reference::Received& want = without ? *without : all;
    ep::Flight& f = p.flight(of_round);
    if (f.rows != want.rows)
        return fail("rank {}: round {} has {} rows, the reference {}", p.rank, of_round + 1, f.rows, want.rows);
    const auto same = [&](const char* what, const auto& got, const auto& right) {
        if (got.size() != right.size()) return fail("rank {}: round {} has {} {}", p.rank, of_round + 1, got.size(), what);
        check_same(p, of_round, what, got.data(), right.data(), got.size() * sizeof(got[0]));
    };
    same("expert_token_nums", f.expert_token_nums, want.expert_token_nums);
    same("expert_offsets", f.expert_offsets, want.expert_offsets);
    same("ep_recv_count", f.ep_recv_count, want.ep_recv_count);
    check_same(p, of_round, "source info", part(p, of_round, window_.source_info), want.assist_info_for_combine.data(),
               want.assist_info_for_combine.size() * 4);
    if (scenario_.options.deliver_weights)
        check_same(p, of_round, "weights", part(p, of_round, window_.weights), want.weights.data(), want.weights.size() * 4);
    const auto payload_bytes = static_cast<size_t>(window_.row.payload_bytes);
    const auto scale_bytes = static_cast<size_t>(window_.row.scale_bytes());
    if (ep::rows_lie_apart(scenario_.options.landing)) {
        for (int64_t row = 0; row < f.rows; ++row) {
            ExpertBatch::Row at;
            if (const Status s = ep::find_row(f, row, &at); !s.ok()) return fail("rank {}: {}", p.rank, s.text());
            check_same(p, of_round, "a row at its home", at.payload,
                       want.expand_x.data() + static_cast<size_t>(row) * payload_bytes, payload_bytes);
            if (scale_bytes)
                check_same(p, of_round, "scales at their home", at.scales,
                           want.dynamic_scales.data() + static_cast<size_t>(row) * scale_bytes, scale_bytes);
        }
        if (!f.materialised && !random_.one_in(3)) return;
        if (const Status s = ep::materialise(*p.engine, f); !s.ok()) return fail("rank {}: {}", p.rank, s.text());
    }
    check_same(p, of_round, "expand_x", part(p, of_round, window_.expand_x), want.expand_x.data(), want.expand_x.size());
    check_same(p, of_round, "scales", part(p, of_round, window_.scales), want.dynamic_scales.data(),
               want.dynamic_scales.size());
}

// -------------------------------------------------------------------------------------------------------------------- judge

void Game::judge() {
    for (Player& p : players_) {
        for (int i = 0; i < rounds(); ++i) {
            const auto at = static_cast<size_t>(i);
            if (p.gates[at].ended) judge_truth(p, "x", i, p.gates[at], false);
            if (p.dispatches[at].ended) judge_truth(p, "dispatch", i, p.dispatches[at], true);
            if (!p.combines[at].ended) continue;
            judge_truth(p, "combine", i, p.combines[at], false);
            judge_told(p, i);
            if (p.combines[at].code == Code::ok && !p.combines[at].unread) check_out(p, i, "out, at the end,");
        }
    }
    for (int i = 0; i < rounds(); ++i) {
        judge_dispatch(i);
        judge_combine(i);
    }
    judge_windows();
}

// Whether every rank plays the script to its end. A rank whose last combine fails at once may close while others still have a
// batch open that it has dropped: they hear of its end, and end as well.
bool Game::must_end_all() const {
    return scenario_.is_calm() && std::all_of(players_.begin(), players_.end(), [](const Player& p) { return p.ops_left < 0; });
}

// A call fails only for a reason that is true, and names it.
void Game::judge_truth(const Player& p, const char* call, int of_round, const Ending& e, bool dispatch) {
    const auto i = static_cast<size_t>(of_round);
    const auto says = [&](const std::string& words) { return e.text.find(words) != std::string::npos; };
    const auto any = [&](auto holds) { return std::any_of(players_.begin(), players_.end(), holds); };
    const auto lie = [&] {
        fail("rank {}: {} of round {} has no cause for: {}: {}", p.rank, call, of_round + 1, code_name(e.code), e.text);
    };
    if (dispatch && e.unread) return;  // nobody has heard the reason
    bool true_reason = false;
    switch (e.code) {
        case Code::ok: return;
        case Code::bad_input:
            true_reason = any([&](const Player& q) {
                if (dispatch)
                    return scenario_.fault(Trouble::bad_input, q.rank, of_round) &&
                           says(fmt::format("dispatch {} refused: rank {}: ", of_round + 1, q.rank));
                // The reason may be missing where that rank has left a later epoch of the slot by now.
                return scenario_.fault(Trouble::bad_combine, q.rank, of_round) &&
                       says(scenario_.is_calm() ? fmt::format("combine {}: rank {}: ", of_round + 1, q.rank)
                                                : fmt::format("rank {}", q.rank));
            });
            break;
        case Code::mismatch:
            true_reason = dispatch && any([&](const Player& q) {
                              return (says("with tag 99") && scenario_.fault(Trouble::tag, q.rank, of_round)) ||
                                     (says(fmt::format("to rank {}, which expects", q.rank)) &&
                                      scenario_.fault(Trouble::counts, q.rank, of_round));
                          });
            break;
        case Code::capacity:
            true_reason =
                dispatch && (round(of_round).excess || any([&](const Player& q) {
                                 return round(of_round).overfull[static_cast<size_t>(q.rank)] &&
                                        says(fmt::format("dispatch {} refused: rank {}: it sends", of_round + 1, q.rank));
                             }));
            break;
        case Code::peer_lost:
        case Code::peer_closed: {
            const char* did = e.code == Code::peer_lost ? "has died" : "closed its session";
            true_reason = any([&](const Player& q) {
                return (e.code == Code::peer_lost ? q.died_at : q.closed_at) >= 0 &&
                       says(fmt::format("rank {} {}", q.rank, did));
            });
            // Who has offered its rows in this epoch has not left it, and cannot be the one who says so.
            for (const Player& q : players_)
                if (!dispatch && q.died_at < 0 && says(fmt::format("as rank {} has seen", q.rank)) && q.combines[i].called &&
                    !scenario_.fault(Trouble::bad_combine, q.rank, of_round))
                    true_reason = false;
            break;
        }
        case Code::peer_left:
            true_reason = any([&](const Player& q) {
                if (says(fmt::format("rank {} dropped its batch", q.rank)))  // not: closed its session with it open
                    return q.dropped[i] && (q.closed_at < 0 || q.drop_begun[i] < q.closed_at);
                if (!says(fmt::format("rank {} gave up epoch {} (", q.rank, of_round + 1))) return false;
                if (q.died_at >= 0) return true;  // perhaps while it left
                const bool left = (q.dispatches[i].ended && q.dispatches[i].code != Code::ok) ||
                                  (q.combines[i].called && scenario_.fault(Trouble::bad_combine, q.rank, of_round));
                if (!left) return false;
                // The word is that of the last epoch which the rank has left in this slot.
                for (size_t later = i; later < q.dispatches.size(); later += static_cast<size_t>(scenario_.options.depth))
                    for (const Ending* of : {&q.dispatches[later], &q.combines[later]})
                        if (of->ended && of->code != Code::ok && says(fmt::format("({})", code_name(of->code)))) return true;
                return false;
            });
            break;
        case Code::timed_out:
            // Somebody must have stopped; then this rank's time is up, or one whose time was up while it combined tells so.
            true_reason = scenario_.has(Trouble::stall) &&
                          (dispatch && says("refused: ") ? any([&](const Player& q) {
                              return says(fmt::format("refused: rank {}: its combine of epoch", q.rank)) &&
                                     q.dispatches[i].prior.code() == Code::timed_out;
                          })
                                                         : says(fmt::format("timed out on rank {}", p.rank)) &&
                                                               e.end - e.start >= scenario_.timeout_ns());
            break;
        default: break;
    }
    if (!true_reason) lie();
}

// What has failed on this rank after the others may have finished, its next dispatch tells them.
void Game::judge_told(const Player& p, int of_round) {
    const Ending& e = p.combines[static_cast<size_t>(of_round)];
    const bool late = e.code == Code::timed_out || e.code == Code::peer_lost ||
                      (e.code == Code::peer_closed && e.text.find("with this batch open") == std::string::npos);
    if (!late) return;
    for (const Ending& next : p.dispatches) {
        if (!next.called || next.start < e.end) continue;
        if (next.prior.ok())
            fail("rank {}: combine {} failed with {}, and the next dispatch does not tell", p.rank, of_round + 1,
                 code_name(e.code));
        return;
    }
}

// Where all ranks make the call in time, one verdict for all, which follows from what they brought.
void Game::judge_dispatch(int of_round) {
    const auto i = static_cast<size_t>(of_round);
    int64_t first = std::numeric_limits<int64_t>::max(), last = 0, end = 0, held = 0;
    bool all_called = true, all_ended = true, closed = false;
    Code verdict = Code::ok;
    for (const Player& p : players_) {
        const Ending& e = p.dispatches[i];
        all_called = all_called && e.called;
        all_ended = all_ended && e.ended;
        first = std::min(first, e.start);
        last = std::max(last, e.start);
        end = std::max(end, e.end);
        held = std::max(held, e.held);
        if (verdict == Code::ok && !e.prior.ok()) verdict = e.prior.code();
        if (verdict == Code::ok && scenario_.fault(Trouble::bad_input, p.rank, of_round)) verdict = Code::bad_input;
        if (verdict == Code::ok && round(of_round).overfull[static_cast<size_t>(p.rank)]) verdict = Code::capacity;
    }
    const uint64_t tag = round(of_round).of[0].tag;
    for (const Input& in : round(of_round).of)
        if (verdict == Code::ok && in.tag != tag) verdict = Code::mismatch;
    for (const Player& p : players_)
        if (verdict == Code::ok && scenario_.fault(Trouble::counts, p.rank, of_round)) verdict = Code::mismatch;
    if (verdict == Code::ok && round(of_round).excess) verdict = Code::capacity;

    for (const Player& p : players_)
        if (p.dispatches[i].ended && p.dispatches[i].code == Code::ok && (!all_called || verdict != Code::ok))
            fail("rank {}: dispatch {} succeeded, but {}", p.rank, of_round + 1,
                 all_called ? fmt::format("the verdict is {}", code_name(verdict)) : "not all ranks have called it");

    bool in_time = all_ended && last - first < scenario_.timeout_ns() / 2 && held < scenario_.timeout_ns() / 4;
    for (const Player& p : players_) {
        in_time = in_time && (p.died_at < 0 || p.died_at > end);
        closed = closed || (p.closed_at >= 0 && p.closed_at <= end);
    }
    if (must_end_all() && !in_time) fail("round {}: without a cause, not all ranks have dispatched it in time", of_round + 1);
    // Whose combine fails at once, or who drops, may have closed while others still wait for rows: they may fail of that. Who
    // destroys his handle leaves at any moment, and his word may stand where an earlier one about this epoch was.
    bool unread = false;
    for (const Player& p : players_)
        for (size_t later = i; later < p.dispatches.size(); later += static_cast<size_t>(scenario_.options.depth))
            unread = unread || p.dispatches[later].unread;
    if (!in_time || unread || (closed && verdict == Code::ok)) return;
    const std::string& text = players_.front().dispatches[i].text;
    for (const Player& p : players_) {
        const Ending& e = p.dispatches[i];
        if (e.code != verdict)
            fail("rank {}: dispatch {} ended with {}, the verdict is {}: {}", p.rank, of_round + 1, code_name(e.code),
                 code_name(verdict), e.text);
        if (e.text != text) fail("dispatch {}: rank 0 says \"{}\", rank {} \"{}\"", of_round + 1, text, p.rank, e.text);
    }
}

void Game::judge_combine(int of_round) {
    const auto i = static_cast<size_t>(of_round);
    int64_t first = std::numeric_limits<int64_t>::max(), last = 0, end = 0, held = 0;
    const auto offered = [&](const Player& p) {  // called combine with good input
        return p.combines[i].called && !scenario_.fault(Trouble::bad_combine, p.rank, of_round);
    };
    bool all_offered = true;
    bool all_dispatched = true, all_end = true, dropped = false, refused = false;
    for (const Player& p : players_) {
        const Ending& e = p.combines[i];
        const bool bad = scenario_.fault(Trouble::bad_combine, p.rank, of_round) != nullptr;
        all_offered = all_offered && offered(p);
        all_dispatched = all_dispatched && p.dispatches[i].ended && p.dispatches[i].code == Code::ok;
        all_end = all_end && (e.ended || p.dropped[i]);
        dropped = dropped || p.dropped[i];
        refused = refused || (e.called && bad);
        if (p.dropped[i]) {
            first = std::min(first, p.drop_begun[i]);
            last = std::max(last, p.drop_done[i]);
        }
        if (e.called) {
            first = std::min(first, e.start);
            last = std::max(last, e.start);
            end = std::max(end, e.end);
            held = std::max(held, e.held);
        }
    }
    for (const Player& p : players_) {
        if (!p.combines[i].ended || p.combines[i].code != Code::ok || p.combines[i].unread || all_offered) continue;
        for (const Player& q : players_)
            if (!offered(q) && !p.combines[i].goes_without(q.rank))
                fail("rank {}: combine {} succeeded, but rank {} has not offered its rows", p.rank, of_round + 1, q.rank);
    }

    bool in_time = all_dispatched && all_end && last - first < scenario_.timeout_ns() / 2 && held < scenario_.timeout_ns() / 4;
    for (const Player& p : players_)
        in_time = in_time && (p.died_at < 0 || p.died_at > end) &&
                  (p.closed_at < 0 || p.dropped[i] || p.closed_at >= p.combines[i].end);
    if (must_end_all() && all_dispatched && !in_time)
        fail("round {}: without a cause, not all ranks have combined it in time", of_round + 1);
    if (!in_time) return;
    for (const Player& p : players_) {
        const Ending& e = p.combines[i];
        if (!e.called || e.unread) continue;
        bool right = e.code == Code::ok;
        if (dropped || refused) {
            // A rank with bad input may have left a later epoch in this slot by now; then its word is about that one.
            bool told_later = false;
            for (const Player& q : players_)
                for (size_t later = i + static_cast<size_t>(scenario_.options.depth); later < q.dispatches.size(); ++later)
                    told_later = told_later || (scenario_.fault(Trouble::bad_combine, q.rank, of_round) &&
                                                q.dispatches[later].called && q.dispatches[later].start < e.end);
            right = (refused && e.code == Code::bad_input) ||
                    ((dropped || told_later) && (e.code == Code::peer_left || e.code == Code::peer_closed)) ||
                    (told_later && e.code == Code::peer_lost);
        }
        if (!right)
            fail("rank {}: combine {} ended with {}{}{}: {}", p.rank, of_round + 1, code_name(e.code),
                 dropped ? "; a rank has dropped its batch" : "", refused ? "; a rank has given bad input" : "", e.text);
    }
}

// Nothing is written outside the parts of a window, nor in them behind what the rounds can have needed.
void Game::judge_windows() {
    const Options& o = scenario_.options;
    const layout::Window& w = window_;
    for (Player& p : players_) {
        const std::byte* window = world_->window(p.rank);
        const auto untouched = [&](const char* where, uint64_t from, uint64_t to, std::byte value) {
            for (uint64_t at = from; at < to; ++at)
                if (window[at] != value)
                    return fail("rank {}: byte {} of its window was written, which is {}", p.rank, at, where);
        };
        if (!world_->guards_are_whole(p.rank)) fail("rank {}: something was written outside its window", p.rank);
        untouched("in the header", 0, w.bell, std::byte{0});
        untouched("behind the bell", w.bell + 8, w.members, std::byte{0});
        for (int r = 0; r < scenario_.ranks; ++r) {
            untouched("behind a member's word", w.member(r) + 8, w.member(r) + sizeof(layout::MemberLine), std::byte{0});
            for (uint64_t slot = 0; slot < static_cast<uint64_t>(o.depth); ++slot)
                untouched("a flag without use", w.flag_line(slot, r) + 32, w.flag_line(slot, r) + sizeof(layout::FlagLine),
                          std::byte{0});
        }
        for (int64_t slot = 0; slot < o.depth; ++slot) {
            uint64_t rows = 0;
            bool told_counts = false;
            std::vector<uint64_t> cells(static_cast<size_t>(scenario_.ranks));   // the most rows of one source
            std::vector<uint64_t> tokens(static_cast<size_t>(scenario_.ranks));  // and its most tokens
            for (int i = 0; i < rounds(); ++i) {
                if ((i + 1) % o.depth != slot) continue;
                const Round& r = round(i);
                told_counts = told_counts || !r.of[0].expects.empty();
                for (size_t q = 0; q < cells.size(); ++q) {
                    cells[q] = std::max(cells[q], static_cast<uint64_t>(r.of[q].ids.size()));
                    tokens[q] = std::max(tokens[q], static_cast<uint64_t>(r.of[q].tokens));
                }
                if (r.excess || !std::any_of(players_.begin(), players_.end(),
                                             [&](const Player& q) { return q.dispatches[static_cast<size_t>(i)].called; }))
                    continue;
                solve(scenario_, *values_, round(i), i);
                rows = std::max(rows, static_cast<uint64_t>(r.received[static_cast<size_t>(p.rank)].rows));
            }
            const uint64_t base = w.slot(static_cast<uint64_t>(slot));
            const uint64_t own_tokens = tokens[static_cast<size_t>(p.rank)];
            const auto token_bytes = static_cast<uint64_t>(values_->row_bytes());
            for (int r = 0; r < scenario_.ranks; ++r)
                untouched("behind a count row",
                          w.count_row(static_cast<uint64_t>(slot), r) + sizeof(layout::CountHead) +
                              4 * static_cast<uint64_t>(w.shape.experts + (told_counts ? w.shape.ranks : 0)),
                          w.count_row(static_cast<uint64_t>(slot), r) + w.count_stride, stale);
            untouched("behind the count rows", base + w.counts + static_cast<uint64_t>(scenario_.ranks) * w.count_stride,
                      base + w.expand_x, stale);
            untouched("behind expand_x", base + w.expand_x + rows * static_cast<uint64_t>(w.row.payload_bytes), base + w.scales,
                      stale);
            untouched("behind the scales", base + w.scales + rows * static_cast<uint64_t>(w.row.scale_bytes()),
                      base + w.source_info, stale);
            untouched("behind the source info", base + w.source_info + rows * 12, base + w.weights, stale);
            untouched("behind the weights", base + w.weights + (o.deliver_weights ? rows * 4 : 0), base + w.y, stale);
            untouched("behind y", base + w.y + rows * token_bytes, base + w.home, stale);
            const uint64_t home_rows = w.shape.push ? own_tokens * static_cast<uint64_t>(o.topk) : 0;
            const auto home_stride = static_cast<uint64_t>(w.home_row.stride);
            const uint64_t home_bytes = o.combine_quant == Format::none
                                            ? token_bytes
                                            : static_cast<uint64_t>(w.home_row.scales_at + w.wire.scale_bytes());
            for (uint64_t n = 0; n < home_rows; ++n)
                untouched("behind a home row", base + w.home + n * home_stride + home_bytes,
                          base + w.home + (n + 1) * home_stride, stale);
            untouched("behind the home rows", base + w.home + home_rows * home_stride, base + w.landing, stale);
            if (w.shape.padded()) {
                const auto stride = static_cast<uint64_t>(w.cell.stride);
                for (int64_t e = 0; e < w.shape.experts_per_rank; ++e)
                    for (int r = 0; r < scenario_.ranks; ++r) {
                        const uint64_t cell = w.cell_at(static_cast<uint64_t>(slot), e, r, 0);
                        const auto all = static_cast<uint64_t>(w.shape.cell_rows);
                        const uint64_t used = std::min(cells[static_cast<size_t>(r)], all);
                        for (uint64_t n = 0; n < used; ++n)
                            untouched("behind a cell's row", cell + n * stride + static_cast<uint64_t>(w.cell.info_at) + 16,
                                      cell + (n + 1) * stride, stale);
                        untouched("behind a cell", cell + used * stride, cell + all * stride, stale);
                    }
            } else {
                untouched("where cells would be", base + w.landing, base + w.blocks_out, stale);
            }
            const auto block_stride = static_cast<uint64_t>(w.shape.blocks() ? w.cell.stride : 0);
            untouched("behind the blocks that left", base + w.blocks_out + cells[static_cast<size_t>(p.rank)] * block_stride,
                      base + w.blocks_in, stale);
            untouched("behind the blocks that came", base + w.blocks_in + rows * block_stride, base + w.x, stale);
            if (w.shape.sources() == 0) untouched("where tokens would be", base + w.x, base + w.slot_bytes, stale);
            for (int64_t copy = 0; copy < w.shape.sources(); ++copy) {
                const int q = w.shape.sources() == 1 ? p.rank : static_cast<int>(copy);
                const bool is_here = p.engine->holder_of(q, p.rank).rank == p.rank;
                const auto all = static_cast<uint64_t>(o.tokens_max), topk = static_cast<uint64_t>(o.topk);
                const uint64_t used = is_here ? tokens[static_cast<size_t>(q)] : 0;
                const auto behind = [&](const char* what, uint64_t part, uint64_t bytes) {
                    const uint64_t first = base + part + w.x_token(copy) * bytes;
                    untouched(what, first + used * bytes, first + all * bytes, stale);
                };
                behind("behind the tokens of a rank", w.x, static_cast<uint64_t>(w.row.payload_bytes));
                behind("behind their scales", w.x_scales, static_cast<uint64_t>(w.row.scale_bytes()));
                behind("behind their ids", w.x_ids, 4 * topk);
                if (w.shape.weights) behind("behind their weights", w.x_weights, 4 * topk);
            }
        }
    }
}

}  // namespace

const char* broken_name(Broken broken) {
    switch (broken) {
        case Broken::nothing: return "nothing";
        case Broken::flag_before_puts: return "flag_before_puts";
        case Broken::flags_overtake: return "flags_overtake";
        case Broken::puts_overtake: return "puts_overtake";
        case Broken::old_flag: return "old_flag";
        case Broken::lost_wake_up: return "lost_wake_up";
        case Broken::misplaced_put: return "misplaced_put";
    }
    return "?";
}

Report play(const Play& play) {
    Log log(play.trace);
    Game game_of_seed(play, log);
    game_of_seed.play();
    Report report;
    report.scenario = text_of(game_of_seed.scenario());
    report.failure = game_of_seed.failure();
    report.hash = log.hash();
    report.turns = game_of_seed.turns();
    report.virtual_ns = game_of_seed.now();
    report.faults = static_cast<int64_t>(game_of_seed.scenario().faults.size());
    report.endings = game_of_seed.endings();
    report.events = std::move(log.lines());
    return report;
}

}  // namespace switchyard::simulation
