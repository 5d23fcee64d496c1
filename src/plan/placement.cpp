// The table of slots, its text form, and the planner.
#include "plan/placement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include <queue>

namespace switchyard {
namespace {

constexpr int32_t parts_max = 4096;
constexpr int64_t slots_max = int64_t{1} << 20;
constexpr std::array<std::string_view, 3> choice_names = {"round_robin", "nearest", "least_loaded"};

constexpr int64_t parts_in_all_max = int64_t{1} << 24;  // a session lays a place out for each

[[noreturn]] void refuse(std::string text) {
    throw Error(Status(Code::bad_input, std::move(text)));
}

size_t index(int64_t i) {
    return static_cast<size_t>(i);
}

// Slots of each expert, ascending, one after the other: expert e has slots[first[e]..first[e+1]).
struct SlotsOf {
    std::vector<int32_t> first, slots;

    explicit SlotsOf(const PlacementTable& t) : first(index(t.experts) + 1), slots(t.expert_of.size()) {
        for (const int32_t e : t.expert_of) ++first[index(e) + 1];
        std::partial_sum(first.begin(), first.end(), first.begin());
        std::vector<int32_t> next(first.begin(), first.end() - 1);
        for (size_t s = 0; s < slots.size(); ++s) slots[index(next[index(t.expert_of[s])]++)] = static_cast<int32_t>(s);
    }
    std::span<const int32_t> of(int64_t expert) const {
        return {slots.data() + first[index(expert)], index(first[index(expert) + 1] - first[index(expert)])};
    }
};

void check_loads(const char* call, std::span<const uint64_t> loads, int64_t experts) {
    if (static_cast<int64_t>(loads.size()) != experts)
        refuse(fmt::format("{}: loads has {} numbers for {} experts; give one per expert.", call, loads.size(), experts));
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------------- table

int64_t PlacementTable::rank_of(int64_t slot) const {
    if (ranks < 1 || slot < 0 || slot >= slots())
        refuse(fmt::format("rank_of: slot {} of a placement table for {} slots and {} ranks.", slot, slots(), ranks));
    const int64_t each = slots() / ranks, extra = slots() % ranks;  // the first `extra` ranks have one more
    return slot < extra * (each + 1) ? slot / (each + 1) : extra + (slot - extra * (each + 1)) / each;
}

Status PlacementTable::check() const {
    const auto bad = [](std::string text) { return Status(Code::bad_input, "placement table: " + std::move(text)); };
    if (ranks < 1 || ranks > ranks_max) return bad(fmt::format("it is for {} ranks; allowed: 1..{}.", ranks, ranks_max));
    if (experts < 1 || experts > slots_max)
        return bad(fmt::format("it is for {} experts; allowed: 1..{}.", experts, slots_max));
    if (slots() < experts || slots() > slots_max)
        return bad(fmt::format("it has {} slots for {} experts; allowed: one per expert to {}.", slots(), experts, slots_max));
    if (!parts.empty() && parts.size() != expert_of.size())
        return bad(fmt::format("it has {} slots and {} parts; give one per slot, or none.", slots(), parts.size()));
    const auto choice_number = static_cast<int64_t>(choice);
    if (choice_number < 0 || choice_number >= static_cast<int64_t>(choice_names.size()))
        return bad(fmt::format("choice is {}; allowed: {}.", choice_number, fmt::join(choice_names, ", ")));
    int64_t parts_in_all = 0;
    std::vector<int64_t> last_holder(index(experts), -1);  // slots ascend, and so do their ranks
    for (int64_t s = 0; s < slots(); ++s) {
        const int32_t e = expert_of[index(s)];
        if (e < 0 || e >= experts) return bad(fmt::format("slot {} holds expert {}; experts are 0..{}.", s, e, experts - 1));
        const int64_t r = rank_of(s);
        if (last_holder[index(e)] == r)
            return bad(
                fmt::format("slot {} gives rank {} expert {} a second time; a replica belongs on another rank.", s, r, e));
        last_holder[index(e)] = r;
        if (!parts.empty() && (parts[index(s)] < 1 || parts[index(s)] > parts_max))
            return bad(fmt::format("slot {} has {} parts; allowed: 1..{}.", s, parts[index(s)], parts_max));
        if (!parts.empty()) parts_in_all += parts[index(s)];
    }
    for (int64_t e = 0; e < experts; ++e)
        if (last_holder[index(e)] < 0) return bad(fmt::format("expert {} lies in no slot.", e));
    if (parts_in_all > parts_in_all_max)
        return bad(
            fmt::format("it has {} parts in all; allowed: {}. Halve the parts of every slot.", parts_in_all, parts_in_all_max));
    return {};
}

uint64_t PlacementTable::hash() const {
    uint64_t h = 0xCBF29CE484222325;
    const auto add = [&](int64_t value) {
        for (int byte = 0; byte < 8; ++byte) h = (h ^ (static_cast<uint64_t>(value) >> (8 * byte) & 0xFF)) * 0x100000001B3;
    };
    for (const int64_t value : {ranks, experts, slots(), static_cast<int64_t>(choice), static_cast<int64_t>(parts.size())})
        add(value);
    for (const int32_t e : expert_of) add(e);
    for (const int32_t p : parts) add(p);
    return h;
}

PlacementTable PlacementTable::contiguous(int64_t ranks, int64_t experts) {
    if (ranks < 1 || ranks > ranks_max || experts < 1 || experts > slots_max)
        refuse(fmt::format("placement table: {} ranks and {} experts; allowed: 1..{} and 1..{}.", ranks, experts, ranks_max,
                           slots_max));
    PlacementTable t;
    t.ranks = ranks;
    t.experts = experts;
    t.expert_of.resize(index(experts));
    std::iota(t.expert_of.begin(), t.expert_of.end(), 0);
    return t;
}

// ------------------------------------------------------------------------------------------------------------------ text

std::string PlacementTable::to_text() const {
    if (static_cast<int64_t>(choice) < 0 || static_cast<int64_t>(choice) >= static_cast<int64_t>(choice_names.size()))
        refuse(fmt::format("placement table: choice is {}; allowed: {}.", static_cast<int64_t>(choice),
                           fmt::join(choice_names, ", ")));
    std::string text = fmt::format(
        "{{\"switchyard_placement\": 1, \"ranks\": {}, \"experts\": {}, \"choice\": \"{}\",\n"
        " \"expert_of\": [{}]",
        ranks, experts, choice_names[index(static_cast<int64_t>(choice))], fmt::join(expert_of, ","));
    if (!parts.empty()) text += fmt::format(",\n \"parts\": [{}]", fmt::join(parts, ","));
    return text + "}\n";
}

namespace {

// The JSON of one table: an object whose values are numbers, names and lists of numbers.
class TableReader {
 public:
    explicit TableReader(std::string_view text) : text_(text) {}

    PlacementTable read() {
        PlacementTable t;
        bool known = false;
        expect('{');
        if (!next_is('}')) {
            do {
                const std::string_view key = string();
                expect(':');
                if (key == "switchyard_placement") {
                    if (const int64_t version = number(); version != 1)
                        wrong(fmt::format("version {} of the format; this library reads 1", version));
                    known = true;
                } else if (key == "ranks") {
                    t.ranks = number();
                } else if (key == "experts") {
                    t.experts = number();
                } else if (key == "choice") {
                    const std::string_view name = string();
                    const auto* found = std::find(choice_names.begin(), choice_names.end(), name);
                    if (found == choice_names.end())
                        wrong(fmt::format("choice \"{}\"; allowed: {}", name, fmt::join(choice_names, ", ")));
                    t.choice = static_cast<ReplicaChoice>(found - choice_names.begin());
                } else if (key == "expert_of") {
                    t.expert_of = numbers();
                } else if (key == "parts") {
                    t.parts = numbers();
                } else {
                    wrong(fmt::format("key \"{}\", which no table has", key));
                }
            } while (next_is(','));
            expect('}');
        }
        skip_space();
        if (at_ != text_.size()) wrong("text behind the table");
        if (!known) wrong("no key \"switchyard_placement\"");
        return t;
    }

 private:
    [[noreturn]] void wrong(const std::string& what) const {
        const auto line = 1 + std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(at_), '\n');
        refuse(fmt::format("placement table: {} in line {}. Write tables with PlacementTable::to_text() or switchyard plan.",
                           what, line));
    }
    void skip_space() {
        while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
    }
    bool next_is(char c) {
        skip_space();
        if (at_ == text_.size() || text_[at_] != c) return false;
        ++at_;
        return true;
    }
    void expect(char c) {
        if (!next_is(c)) wrong(fmt::format("\"{}\" expected", c));
    }
    std::string_view string() {
        expect('"');
        const size_t end = text_.find('"', at_);
        if (end == std::string_view::npos) wrong("a name without its end");
        const std::string_view s = text_.substr(at_, end - at_);
        at_ = end + 1;
        return s;
    }
    int64_t number() {
        skip_space();
        int64_t value = 0;
        const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
        if (error != std::errc() || value < 0 || value > INT32_MAX) wrong("a whole number from 0 to 2147483647 expected");
        at_ = static_cast<size_t>(end - text_.data());
        return value;
    }
    std::vector<int32_t> numbers() {
        std::vector<int32_t> list;
        expect('[');
        if (next_is(']')) return list;
        do list.push_back(static_cast<int32_t>(number()));
        while (next_is(','));
        expect(']');
        return list;
    }

    std::string_view text_;
    size_t at_ = 0;
};

}  // namespace

PlacementTable PlacementTable::from_text(std::string_view text) {
    PlacementTable t = TableReader(text).read();
    if (const Status s = t.check(); !s.ok()) throw Error(s);
    return t;
}

// ----------------------------------------------------------------------------------------------------------------- turns

namespace plan {

ep::Turns turns_of(const PlacementTable& table, int64_t rank) {
    const SlotsOf slots(table);
    ep::Turns turns;
    turns.start = rank;
    turns.expert_of = table.expert_of;
    turns.first.push_back(0);
    std::vector<int64_t> lead;
    for (int64_t e = 0; e < table.experts; ++e) {
        const std::span<const int32_t> mine = slots.of(e);
        const auto* own = std::find_if(mine.data(), mine.data() + mine.size(), [&](int32_t s) {
            return table.choice == ReplicaChoice::nearest && table.rank_of(s) == rank;
        });
        if (own != mine.data() + mine.size()) {
            turns.slots.push_back(*own);
        } else if (table.choice == ReplicaChoice::least_loaded && !table.parts.empty() && mine.size() > 1) {
            // Every slot its parts times, spread evenly: at each place the slot that is furthest behind its share.
            int64_t total = 0;
            for (const int32_t s : mine) total += table.parts[index(s)];
            lead.assign(mine.size(), 0);
            for (int64_t place = 0; place < total; ++place) {
                for (size_t i = 0; i < mine.size(); ++i) lead[i] += table.parts[index(mine[i])];
                const auto most = std::max_element(lead.begin(), lead.end());  // the first of equals
                *most -= total;
                turns.slots.push_back(mine[index(most - lead.begin())]);
            }
        } else {
            turns.slots.insert(turns.slots.end(), mine.begin(), mine.end());
        }
        turns.first.push_back(static_cast<int32_t>(turns.slots.size()));
    }
    return turns;
}

}  // namespace plan

std::vector<int32_t> slots_of(const PlacementTable& table, int rank, std::span<const int32_t> topk_ids) {
    if (const Status s = table.check(); !s.ok()) throw Error(s);
    const auto n = static_cast<int64_t>(topk_ids.size());
    if (const int64_t i = ep::find_bad_id(topk_ids.data(), n, table.experts); i < n)
        refuse(fmt::format("slots_of: topk_ids[{}] is {}; experts are 0..{}, or -1 for an unused slot.", i, topk_ids[index(i)],
                           table.experts - 1));
    if (rank < 0 || rank >= table.ranks) refuse(fmt::format("slots_of: rank {} of {}.", rank, table.ranks));
    std::vector<int32_t> slots(topk_ids.size()), next(index(table.experts));
    const std::vector<uint8_t> left(index(table.ranks));
    ep::take_turns(plan::turns_of(table, rank), ep::Placement::contiguous(table.ranks, table.slots()), left, topk_ids.data(), n,
                   next, slots.data());
    return slots;
}

std::vector<double> planned_rank_loads(const PlacementTable& table, std::span<const uint64_t> loads) {
    if (const Status s = table.check(); !s.ok()) throw Error(s);
    check_loads("planned_rank_loads", loads, table.experts);
    const SlotsOf slots(table);
    const bool by_parts = table.choice == ReplicaChoice::least_loaded && !table.parts.empty();
    std::vector<double> ranks(index(table.ranks));
    for (int64_t e = 0; e < table.experts; ++e) {
        const auto part = [&](int32_t s) { return by_parts ? static_cast<double>(table.parts[index(s)]) : 1.0; };
        double total = 0;
        for (const int32_t s : slots.of(e)) total += part(s);
        for (const int32_t s : slots.of(e))
            ranks[index(table.rank_of(s))] += static_cast<double>(loads[index(e)]) * part(s) / total;
    }
    return ranks;
}

std::vector<WeightMove> weight_moves(const PlacementTable& from, const PlacementTable& to) {
    for (const PlacementTable* t : {&from, &to})
        if (const Status s = t->check(); !s.ok()) throw Error(s);
    if (from.ranks != to.ranks || from.experts != to.experts)
        refuse(fmt::format("weight_moves from a table of {} ranks and {} experts to one of {} and {}: give two of one group.",
                           from.ranks, from.experts, to.ranks, to.experts));
    const SlotsOf old(from);
    std::vector<int64_t> sends(index(from.ranks));
    std::vector<WeightMove> moves;
    for (int64_t s = 0; s < to.slots(); ++s) {
        const int32_t e = to.expert_of[index(s)];
        const auto target = static_cast<int32_t>(to.rank_of(s));
        int64_t source = -1;
        for (const int32_t holder_slot : old.of(e)) {
            const int64_t holder = from.rank_of(holder_slot);
            if (holder == target) {
                source = target;
                break;
            }
            if (source < 0 || sends[index(holder)] < sends[index(source)]) source = holder;
        }
        if (source != target) ++sends[index(source)];
        moves.push_back({static_cast<int32_t>(s), e, static_cast<int32_t>(source), target});
    }
    return moves;
}

// --------------------------------------------------------------------------------------------------------------- planner

namespace {

// Experts, with replicas, on some ranks: what one host, or the whole group, is planned as. Numbers are local.
class Packing {
 public:
    Packing(std::vector<double> loads, std::vector<int64_t> room)
        : loads_(std::move(loads)),
          room_(std::move(room)),
          copies_(loads_.size(), 1),
          held_(room_.size()),
          rank_loads_(room_.size()),
          holders_(loads_.size()),
          holds_(room_.size() * loads_.size()) {
        copies_max_ = std::count_if(room_.begin(), room_.end(), [](int64_t r) { return r > 0; });
    }

    void plan() {
        replicate();
        pack();
        improve();
    }

    const std::vector<std::vector<int32_t>>& held() const { return held_; }  // [ranks] experts, ascending after plan()

 private:
    double each(int32_t e) const { return loads_[index(e)] / static_cast<double>(copies_[index(e)]); }
    bool holds(int64_t r, int32_t e) const { return holds_[index(r) * loads_.size() + index(e)] != 0; }

    void replicate() {
        int64_t spare = std::accumulate(room_.begin(), room_.end(), int64_t{0}) - static_cast<int64_t>(loads_.size());
        const auto lighter = [this](int32_t a, int32_t b) { return each(a) != each(b) ? each(a) < each(b) : a > b; };
        std::vector<int32_t> heap(loads_.size());
        std::iota(heap.begin(), heap.end(), 0);
        std::make_heap(heap.begin(), heap.end(), lighter);
        for (; spare > 0; --spare) {
            std::pop_heap(heap.begin(), heap.end(), lighter);
            const int32_t e = heap.back();
            if (++copies_[index(e)] == copies_max_)
                heap.pop_back();
            else
                std::push_heap(heap.begin(), heap.end(), lighter);
        }
    }

    void put(int64_t r, int32_t e) {
        held_[index(r)].push_back(e);
        holders_[index(e)].push_back(static_cast<int32_t>(r));
        holds_[index(r) * loads_.size() + index(e)] = 1;
        rank_loads_[index(r)] += each(e);
    }
    void take(int64_t r, int32_t e) {
        std::erase(held_[index(r)], e);
        std::erase(holders_[index(e)], static_cast<int32_t>(r));
        holds_[index(r) * loads_.size() + index(e)] = 0;
        rank_loads_[index(r)] -= each(e);
    }

    void pack() {
        std::vector<int32_t> pieces;
        for (int32_t e = 0; e < static_cast<int32_t>(loads_.size()); ++e)
            pieces.insert(pieces.end(), index(copies_[index(e)]), e);
        std::stable_sort(pieces.begin(), pieces.end(), [this](int32_t a, int32_t b) { return each(a) > each(b); });
        const auto has_room = [this](int64_t r) { return static_cast<int64_t>(held_[index(r)].size()) < room_[index(r)]; };
        const auto ranks = static_cast<int64_t>(room_.size());
        for (const int32_t e : pieces) {
            int64_t best = -1;
            for (int64_t r = 0; r < ranks; ++r)
                if (has_room(r) && !holds(r, e) && (best < 0 || rank_loads_[index(r)] < rank_loads_[index(best)])) best = r;
            if (best >= 0) {
                put(best, e);
                continue;
            }
            // All ranks with room hold e. A full one that does not hands them an expert and takes e: it holds as many as any
            // with room and e is none of them, so one of its experts is new there.
            for (int64_t full = 0; full < ranks && best < 0; ++full) {
                if (holds(full, e) || room_[index(full)] == 0) continue;
                for (int64_t r = 0; r < ranks && best < 0; ++r) {
                    if (!has_room(r)) continue;
                    for (const int32_t f : held_[index(full)]) {
                        if (holds(r, f)) continue;
                        take(full, f);
                        put(r, f);
                        put(full, e);
                        best = full;
                        break;
                    }
                }
            }
        }
    }

    // Makes the most loaded rank lighter, again and again, without making another as heavy.
    void improve() {
        int64_t budget = 200'000'000;  // looks; bounds a plan of 2^20 slots
        while (budget > 0 && (swap_once(&budget) || trade_once(&budget))) {
        }
        for (auto& experts : held_) std::sort(experts.begin(), experts.end());
    }

    int64_t hottest() const {
        return std::max_element(rank_loads_.begin(), rank_loads_.end()) - rank_loads_.begin();  // the first of equals
    }
    static constexpr double better = 1 - 1e-9;

    bool swap_once(int64_t* budget) {
        const int64_t hot = hottest();
        const double most = rank_loads_[index(hot)];
        double best = most * better;
        int64_t with = -1;
        int32_t gives = 0, gets = 0;
        for (const int32_t a : held_[index(hot)])
            for (int64_t q = 0; q < static_cast<int64_t>(room_.size()); ++q) {
                if (q == hot || holds(q, a)) continue;
                for (const int32_t b : held_[index(q)]) {
                    --*budget;
                    const double less = each(a) - each(b);
                    const double result = std::max(most - less, rank_loads_[index(q)] + less);
                    if (result >= best || holds(hot, b)) continue;
                    best = result, with = q, gives = a, gets = b;
                }
            }
        if (with < 0) return false;
        take(hot, gives), take(with, gets);
        put(hot, gets), put(with, gives);
        return true;
    }

    bool trade_once(int64_t* budget) {
        const int64_t hot = hottest();
        double best = rank_loads_[index(hot)] * better;
        int64_t at = -1;
        int32_t grows = 0, shrinks = 0;
        for (const int32_t a : held_[index(hot)]) {
            if (copies_[index(a)] >= copies_max_) continue;
            const double a_new = loads_[index(a)] / static_cast<double>(copies_[index(a)] + 1);
            for (int64_t q = 0; q < static_cast<int64_t>(room_.size()); ++q) {
                if (holds(q, a)) continue;
                for (const int32_t b : held_[index(q)]) {
                    if (b == a || copies_[index(b)] < 2) continue;
                    const double b_new = loads_[index(b)] / static_cast<double>(copies_[index(b)] - 1);
                    // The ranks whose load changes: q, those that hold a, those that hold b.
                    double result = rank_loads_[index(q)] - each(b) + a_new;
                    for (const int32_t r : holders_[index(a)])
                        result =
                            std::max(result, rank_loads_[index(r)] - each(a) + a_new + (holds(r, b) ? b_new - each(b) : 0.0));
                    for (const int32_t r : holders_[index(b)])
                        if (r != q && !holds(r, a)) result = std::max(result, rank_loads_[index(r)] - each(b) + b_new);
                    *budget -= static_cast<int64_t>(holders_[index(a)].size() + holders_[index(b)].size());
                    if (result >= best) continue;
                    best = result, at = q, grows = a, shrinks = b;
                }
            }
        }
        if (at < 0) return false;
        take(at, shrinks);
        recopy(shrinks, -1), recopy(grows, +1);
        put(at, grows);
        return true;
    }

    void recopy(int32_t e, int64_t change) {
        for (const int32_t r : holders_[index(e)]) rank_loads_[index(r)] -= each(e);
        copies_[index(e)] += change;
        for (const int32_t r : holders_[index(e)]) rank_loads_[index(r)] += each(e);
    }

    std::vector<double> loads_;
    std::vector<int64_t> room_;    // [ranks]
    std::vector<int64_t> copies_;  // [experts]
    std::vector<std::vector<int32_t>> held_;
    std::vector<double> rank_loads_;
    std::vector<std::vector<int32_t>> holders_;
    std::vector<uint8_t> holds_;  // [ranks, experts]
    int64_t copies_max_ = 0;
};

// Expert groups onto hosts, as many on each, heaviest first onto the lightest host with room.
std::vector<int32_t> host_of_groups(std::span<const double> group_loads, int64_t hosts) {
    const int64_t each = static_cast<int64_t>(group_loads.size()) / hosts;
    std::vector<int32_t> order(group_loads.size()), host(group_loads.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return group_loads[index(a)] > group_loads[index(b)]; });
    std::vector<double> loads(index(hosts));
    std::vector<int64_t> count(index(hosts));
    for (const int32_t g : order) {
        int64_t best = -1;
        for (int64_t h = 0; h < hosts; ++h)
            if (count[index(h)] < each && (best < 0 || loads[index(h)] < loads[index(best)])) best = h;
        host[index(g)] = static_cast<int32_t>(best);
        loads[index(best)] += group_loads[index(g)];
        ++count[index(best)];
    }
    return host;
}

// Shares of every expert's replicas so that ranks come out even: expert by expert, water is poured onto the loads that the
// other experts leave, until nothing moves. Each pour lowers the sum of squares of the ranks' loads, whose least value is also
// the most even one.
void choose_parts(PlacementTable& t, std::span<const uint64_t> loads) {
    const SlotsOf slots(t);
    std::vector<double> share(t.expert_of.size()), ranks = planned_rank_loads(t, loads);
    for (int64_t e = 0; e < t.experts; ++e)
        for (const int32_t s : slots.of(e))
            share[index(s)] = static_cast<double>(loads[index(e)]) / static_cast<double>(slots.of(e).size());
    const double all = std::accumulate(ranks.begin(), ranks.end(), 0.0);
    std::vector<double> others;
    for (int turn = 0; turn < 200; ++turn) {
        double moved = 0;
        for (int64_t e = 0; e < t.experts; ++e) {
            const std::span<const int32_t> mine = slots.of(e);
            if (mine.size() < 2 || loads[index(e)] == 0) continue;
            others.clear();
            for (const int32_t s : mine) others.push_back(ranks[index(t.rank_of(s))] - share[index(s)]);
            std::vector<double> sorted = others;
            std::sort(sorted.begin(), sorted.end());
            double level = 0, below = 0;
            for (size_t n = 0; n < sorted.size(); ++n) {
                below += sorted[n];
                level = (static_cast<double>(loads[index(e)]) + below) / static_cast<double>(n + 1);
                if (n + 1 == sorted.size() || level <= sorted[n + 1]) break;
            }
            for (size_t i = 0; i < mine.size(); ++i) {
                const double now = std::max(0.0, level - others[i]);
                moved += std::abs(now - share[index(mine[i])]);
                ranks[index(t.rank_of(mine[i]))] = others[i] + now;
                share[index(mine[i])] = now;
            }
        }
        if (moved <= 1e-6 * all) break;
    }
    // Whole parts: each at least 1, the rest to the largest remainders. Coarser ones where all of them would be too many.
    t.parts.assign(t.expert_of.size(), 1);
    int fineness = 64;
    const auto parts_of = [&](size_t replicas) {
        const auto n = static_cast<int64_t>(replicas);
        return std::clamp<int64_t>(std::max<int64_t>(fineness, fineness / 16 * n), n, parts_max);
    };
    for (;; fineness /= 2) {
        int64_t in_all = 0;
        for (int64_t e = 0; e < t.experts; ++e) {
            const size_t n = slots.of(e).size();
            in_all += static_cast<int64_t>(n);  // of shares below one part
            if (n > 1 && loads[index(e)] > 0) in_all += parts_of(n);
        }
        if (in_all <= parts_in_all_max) break;
    }
    std::vector<std::pair<double, int32_t>> remainders;
    for (int64_t e = 0; e < t.experts; ++e) {
        const std::span<const int32_t> mine = slots.of(e);
        if (mine.size() < 2 || loads[index(e)] == 0) continue;
        const int64_t total = parts_of(mine.size());
        int64_t given = 0;
        remainders.clear();
        for (const int32_t s : mine) {
            const double exact = share[index(s)] / static_cast<double>(loads[index(e)]) * static_cast<double>(total);
            t.parts[index(s)] = std::clamp(static_cast<int32_t>(exact), 1, parts_max);
            given += t.parts[index(s)];
            remainders.push_back({t.parts[index(s)] - exact, s});  // ascending: most behind first, ties by slot
        }
        std::sort(remainders.begin(), remainders.end());
        for (size_t i = 0; given < total; i = (i + 1) % remainders.size(), ++given)
            t.parts[index(remainders[i].second)] = std::min(t.parts[index(remainders[i].second)] + 1, parts_max);
    }
}

}  // namespace

bool is_hierarchical(int64_t experts, const PlanArgs& a) {
    if (a.ranks_per_group < 1 || a.ranks_per_group >= a.ranks || a.ranks % a.ranks_per_group != 0) return false;
    const int64_t groups = a.expert_groups ? a.expert_groups : experts;
    return groups >= 1 && experts % groups == 0 && groups % (a.ranks / a.ranks_per_group) == 0 && a.slots % a.ranks == 0 &&
           a.slots <= a.ranks_per_group * experts;  // no rank can hold an expert twice
}

PlacementTable plan_placement(std::span<const uint64_t> loads, const PlanArgs& a) {
    const auto experts = static_cast<int64_t>(loads.size());
    if (a.ranks < 1 || a.ranks > ranks_max)
        refuse(fmt::format("plan_placement: {} ranks; allowed: 1..{}.", a.ranks, ranks_max));
    if (experts < 1) refuse("plan_placement: no loads; give one per expert.");
    if (a.slots < experts || a.slots > std::min(slots_max, a.ranks * experts))
        refuse(fmt::format(
            "plan_placement: {} slots for {} experts on {} ranks; allowed: {} (one per expert) to {} (each on every "
            "rank, at most 2^20).",
            a.slots, experts, a.ranks, experts, std::min(slots_max, a.ranks * experts)));
    if (a.ranks_per_group < 0 || a.expert_groups < 0)
        refuse(fmt::format("plan_placement: ranks_per_group {} and expert_groups {}; allowed: 0 or more.", a.ranks_per_group,
                           a.expert_groups));

    PlacementTable t;
    t.ranks = a.ranks;
    t.experts = experts;
    t.choice = a.choice;
    t.expert_of.assign(index(a.slots), -1);
    const bool hierarchical = is_hierarchical(experts, a);
    const int64_t hosts = hierarchical ? a.ranks / a.ranks_per_group : 1;
    const int64_t ranks_each = a.ranks / hosts;
    const int64_t groups = a.expert_groups && hierarchical ? a.expert_groups : experts;
    const int64_t group_size = experts / groups;
    std::vector<double> group_loads(index(groups));
    for (int64_t e = 0; e < experts; ++e) group_loads[index(e / group_size)] += static_cast<double>(loads[index(e)]);
    const std::vector<int32_t> host = host_of_groups(group_loads, hosts);
    for (int64_t h = 0; h < hosts; ++h) {
        std::vector<int32_t> mine;  // experts of this host
        std::vector<double> mine_loads;
        for (int32_t e = 0; e < experts; ++e)
            if (host[index(e / group_size)] == h) {
                mine.push_back(e);
                mine_loads.push_back(static_cast<double>(loads[index(e)]));
            }
        std::vector<int64_t> room;
        for (int64_t r = 0; r < ranks_each; ++r) room.push_back(experts_of(h * ranks_each + r, a.ranks, a.slots).count());
        Packing packing(std::move(mine_loads), std::move(room));
        packing.plan();
        for (int64_t r = 0; r < ranks_each; ++r) {
            int64_t slot = experts_of(h * ranks_each + r, a.ranks, a.slots).first;
            for (const int32_t e : packing.held()[index(r)]) t.expert_of[index(slot++)] = mine[index(e)];
        }
    }
    if (a.choice == ReplicaChoice::least_loaded) {
        // Shares in whole parts are coarse: where replicas are even as they are, equal shares stay.
        const auto most = [&] {
            const std::vector<double> planned = planned_rank_loads(t, loads);
            return *std::max_element(planned.begin(), planned.end());
        };
        const double with_equal = most();
        choose_parts(t, loads);
        if (most() >= with_equal) t.parts.clear();
    }
    if (const Status s = t.check(); !s.ok()) throw Error(s);
    return t;
}

}  // namespace switchyard
