#include "rank.hpp"

#include <fmt/format.h>

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "allocations.hpp"
#include "contestant.hpp"
#include "processes.hpp"
#include "shared_window.hpp"
#include "switchyard/reference.hpp"

namespace switchyard::bench {
namespace {

// A row as a number, so that what is expected need not be kept: 4,096 tokens would be gigabytes.
uint64_t hash_row(const std::byte* data, int64_t bytes) {
    uint64_t h = 0x9E3779B97F4A7C15 ^ static_cast<uint64_t>(bytes);
    const auto mix = [&h](uint64_t word) {
        h = (h ^ word) * 0xD1342543DE82EF95;
        h ^= h >> 32;
    };
    int64_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
        uint64_t word;
        std::memcpy(&word, data + i, 8);
        mix(word);
    }
    for (; i < bytes; ++i) mix(static_cast<uint64_t>(data[i]));
    return h;
}

std::vector<uint64_t> hash_rows(const void* data, int64_t rows, int64_t row_bytes) {
    std::vector<uint64_t> hashes;
    if (row_bytes == 0) return hashes;
    for (int64_t i = 0; i < rows; ++i)
        hashes.push_back(hash_row(static_cast<const std::byte*>(data) + i * row_bytes, row_bytes));
    return hashes;
}

// What one task gives and must give on this rank.
class Expectation {
 public:
    Expectation(const tools::Case& shape, int rank) : shape_(shape), experts_(shape) {
        std::vector<tools::Input> inputs;
        std::vector<reference::RankInput> views;
        for (int r = 0; r < shape.ranks; ++r) inputs.push_back(tools::make_input(shape, r));
        for (size_t r = 0; r < inputs.size(); ++r) views.push_back(inputs[r].view(shape.tokens[r]));
        const reference::Received got = reference::dispatch(shape.options, views, rank);
        rows = got.rows;
        const layout::RowLayout row =
            layout::row_layout(shape.options.dispatch_quant, shape.options.dtype, shape.options.hidden);
        expand_x_ = hash_rows(got.expand_x.data(), rows, row.payload_bytes);
        scales_ = hash_rows(got.dynamic_scales.data(), rows, row.scale_bytes());

        const ExpertRange mine = experts_of(rank, shape.ranks, shape.options.experts);
        for (int64_t i = 0; i < rows; ++i) {
            const int32_t* info = got.assist_info_for_combine.data() + 3 * i;
            const auto next = std::upper_bound(got.expert_offsets.begin(), got.expert_offsets.end(), i);
            const auto expert = static_cast<int32_t>(mine.first + (next - got.expert_offsets.begin()) - 1);
            y_of_rows_.push_back(experts_.row(info[0], info[1], info[2], expert));
        }
        input = std::move(inputs[static_cast<size_t>(rank)]);
        x_ = input.x;
        const int64_t topk = shape.options.topk, tokens = shape.tokens[static_cast<size_t>(rank)];
        for (int64_t k = 0; k < topk; ++k) {  // the order of a limit's y
            for (int64_t t = 0; t < tokens; ++t) {
                const int32_t e = input.topk_ids[static_cast<size_t>(t * topk + k)];
                y_of_slots_.push_back(e < 0 ? nullptr : experts_.row(rank, t, k, e));
            }
            y_of_slots_.push_back(nullptr);
        }
        const std::vector<std::byte> sum =
            reference::combine(shape.options, input.view(tokens), rank,
                               [&](int s, int64_t t, int64_t k, int32_t e) { return experts_.row(s, t, k, e); });
        out_ = hash_rows(sum.data(), tokens, shape.token_bytes());
        out.resize(sum.size());
    }
    Expectation(const Expectation&) = delete;
    Expectation& operator=(const Expectation&) = delete;

    /// The model writes x, the experts write y: just before they are needed, as in a model.
    void write_x(void* to) {
        if (!x_.empty()) std::memcpy(to ? to : input.x.data(), x_.data(), x_.size());
    }
    void write_y(Contestant& c) {
        auto* to = static_cast<std::byte*>(c.y());
        const auto bytes = static_cast<size_t>(shape_.token_bytes());
        for (const void* row : c.delivers() ? y_of_rows_ : y_of_slots_) {
            if (row) std::memcpy(to, row, bytes);
            to += bytes;
        }
    }

    /// What differs, or "".
    std::string wrong_rows(const Contestant& c, const Delivered& got, const layout::RowLayout& row) const {
        if (!c.delivers()) return "";
        if (got.rows != rows) return fmt::format("{} rows arrived, expected {}", got.rows, rows);
        if (std::string s = difference("expand_x", expand_x_, got.expand_x, row.payload_bytes); !s.empty()) return s;
        return difference("dynamic_scales", scales_, got.scales, row.scale_bytes());
    }
    std::string wrong_out(const Contestant& c) const {
        return c.delivers() ? difference("out of combine", out_, out.data(), shape_.token_bytes()) : "";
    }

    int64_t rows = 0;
    tools::Input input;
    std::vector<std::byte> out;

 private:
    static std::string difference(const char* what, const std::vector<uint64_t>& hashes, const std::byte* data, int64_t bytes) {
        for (size_t i = 0; i < hashes.size(); ++i)
            if (hash_row(data + static_cast<int64_t>(i) * bytes, bytes) != hashes[i])
                return fmt::format("row {} of {} differs from the reference", i, what);
        return "";
    }
    const tools::Case shape_;
    const tools::MadeUpExperts experts_;
    std::vector<std::byte> x_;
    std::vector<uint64_t> expand_x_, scales_, out_;
    std::vector<const void*> y_of_rows_, y_of_slots_;
};

// Entries with the same shape share one expectation.
std::string key_of(const tools::Case& c) {
    std::string key = fmt::format("{} {} {} {}", c.ranks, c.seed, c.routing, fmt::join(c.tokens, ","));
    for (const OptionInfo& info : option_table()) key += " " + option_text(info, c.options);
    return key;
}

struct Player {
    const Entry* entry = nullptr;
    Expectation* expected = nullptr;
    std::unique_ptr<Task> task;
    std::unique_ptr<Contestant> contestant;
    // ns of each round. From the start that all ranks share: _ns; from this rank's own start: _alone_ns.
    std::vector<int64_t> dispatch_ns, dispatch_alone_ns, dispatch_wait_ns, touch_ns, tiles_ns, combine_ns, combine_alone_ns,
        combine_wait_ns;
    int64_t allocations = 0;
    std::vector<int64_t> waited_by_rank;  // ns of all timed rounds
};

class CellPlayer {
 public:
    CellPlayer(const Flags& flags, const Cell& cell, int cell_number, const Group& group, StartLine& line)
        : flags_(flags), cell_(cell), number_(cell_number), group_(group), line_(line) {
        for (const Entry& e : cell.entries) {
            auto& expected = expected_[key_of(e.shape)];
            if (!expected) expected = std::make_unique<Expectation>(e.shape, group.rank);
            Player p;
            p.entry = &e;
            p.expected = expected.get();
            order_.push_back(players_.size());
            players_.push_back(std::move(p));
        }
    }

    /// False when a contestant was wrong.
    ///
    /// Which physical pages a contestant has got can make it half as fast again, and they stay for as long as it lives. So
    /// all contestants are made anew several times, in another order: each sits now on these pages, now on those.
    bool play() {
        const int seatings = flags_.rounds ? 1 : seatings_of(cell_);
        int done = 0;
        for (int seating = 0; seating < seatings; ++seating) {
            seat(seating);
            if (!check()) return false;
            for (int i = 0; i < 2; ++i) round(-1 - i, false);  // warm up
            done = play_rounds(done, seatings);
            if (seating + 1 == seatings && !check()) return false;
            if (seating + 1 == seatings)
                for (size_t i = 0; i < players_.size(); ++i) report(i, done);
            line_.meet();  // nobody closes what another still uses
            for (Player& p : players_) p.contestant.reset();
            line_.meet();
        }
        return true;
    }

 private:
    static int seatings_of(const Cell& cell) {
        int64_t bytes = 0;
        for (const Entry& e : cell.entries)
            bytes += e.shape.ranks * e.shape.options.tokens_max * e.shape.options.topk * e.shape.token_bytes();
        return bytes > (int64_t{2} << 30) ? 4 : 6;
    }

    void seat(int seating) {
        shuffle(1'000'000 + seating);
        for (const size_t turn : order_) {
            Player& p = players_[turn];
            Group own = group_;
            own.name += fmt::format("/{}/{}/{}", cell_.name, p.entry->label, seating);
            const quant::Kernels* kernels = quant::find_kernels(p.entry->shape.options.simd);
            if (!kernels) throw tools::Mistake("this processor or build lacks the kernels of --simd");
            p.task = std::make_unique<Task>(Task{p.entry->shape, own, *kernels, p.expected->input, p.expected->rows});
            p.contestant = find_contestant(p.entry->contestant)->make(*p.task);
        }
    }

    /// Rounds of one seating; returns how many have been played in all.
    int play_rounds(int done, int seatings) {
        const int64_t start = now_ns();
        const auto wanted = static_cast<int64_t>(cell_.seconds * 1e9 / seatings);
        for (int here = 0;; ++here, ++done) {
            // As many as fit; but 20 in all, or the median means little, unless they take four times as long as wanted.
            const int64_t spent = now_ns() - start;
            const int least = (20 + seatings - 1) / seatings;
            const bool more = flags_.rounds
                                  ? here < flags_.rounds
                                  : here < 2 || (here < 1000 && spent < wanted) || (here < least && spent < 4 * wanted);
            if (!line_.meet(more).of_first) return done;
            round(done, true);
            if (done % 8 == 0) tell({{"cell", number_}, {"round", done}});
        }
    }

    bool check() {
        bool right = true;
        for (Player& p : players_) {
            Contestant& c = *p.contestant;
            p.expected->write_x(c.input());
            line_.meet();
            c.dispatch();
            Delivered got = c.delivered();
            if (p.entry->contestant == flags_.sabotage && got.rows > 0) got.expand_x[0] ^= std::byte{1};
            std::string wrong = p.expected->wrong_rows(c, got, p.task->row());
            // Poison what came: a later round that delivers nothing would otherwise look right.
            if (got.expand_x) std::memset(got.expand_x, 0xCD, static_cast<size_t>(got.rows * p.task->row().payload_bytes));
            if (got.scales) std::memset(got.scales, 0xCD, static_cast<size_t>(got.rows * p.task->row().scale_bytes()));
            if (c.combines()) {
                std::fill(p.expected->out.begin(), p.expected->out.end(), std::byte{0xCD});
                p.expected->write_y(c);
                line_.meet();
                c.combine(p.expected->out.data());
                if (wrong.empty()) wrong = p.expected->wrong_out(c);
            }
            if (!wrong.empty()) tell({{"cell", number_}, {"wrong", fmt::format("{}: {}", p.entry->label, wrong)}});
            right = line_.meet(!wrong.empty()).of_any == 0 && right;
        }
        return right;
    }

    // Every round in another order, the same on all ranks: nobody always follows the same contestant and finds its caches.
    void shuffle(int number) {
        uint64_t state = static_cast<uint64_t>(number + 2) * 0x9E3779B97F4A7C15 + 1;
        for (size_t i = order_.size(); i > 1; --i) {
            state = (state ^ (state >> 31)) * 0xBF58476D1CE4E5B9;
            std::swap(order_[i - 1], order_[(state >> 33) % i]);
        }
    }

    void round(int number, bool counts) {
        shuffle(number);
        for (const size_t turn : order_) {
            Player& p = players_[turn];
            Contestant& c = *p.contestant;
            p.expected->write_x(c.input());
            // Half of the rounds have nothing but the calls; in the others a consumer follows dispatch.
            const FirstTouch how =
                number % 4 == 3 && c.can_touch(FirstTouch::tiles) ? FirstTouch::tiles : FirstTouch::where_they_lie;
            const bool touches = number % 2 != 0 && c.can_touch(how);
            const std::vector<int64_t> waited = c.waited_by_rank();

            const Timed d = timed(c, [&] {
                c.dispatch();
                if (touches) seen_ += c.first_touch(how);
            });
            Timed m;
            if (c.combines()) {
                p.expected->write_y(c);
                m = timed(c, [&] { c.combine(p.expected->out.data()); });
            }
            if (!counts) continue;
            p.allocations += d.allocations + m.allocations;
            const std::vector<int64_t> waited_now = c.waited_by_rank();
            p.waited_by_rank.resize(waited_now.size());
            for (size_t q = 0; q < waited_now.size(); ++q) p.waited_by_rank[q] += waited_now[q] - waited[q];
            if (touches) {
                (how == FirstTouch::tiles ? p.tiles_ns : p.touch_ns).push_back(d.group_ns);
            } else {
                p.dispatch_ns.push_back(d.group_ns);
                p.dispatch_alone_ns.push_back(d.alone_ns);
                if (c.waited_ns() >= 0) p.dispatch_wait_ns.push_back(d.wait_ns);
            }
            if (!c.combines()) continue;
            p.combine_ns.push_back(m.group_ns);
            p.combine_alone_ns.push_back(m.alone_ns);
            if (c.waited_ns() >= 0) p.combine_wait_ns.push_back(m.wait_ns);
        }
    }

    struct Timed {
        int64_t group_ns = 0, alone_ns = 0, wait_ns = 0, allocations = 0;
    };
    // All ranks meet before, and after: who is done must not take the CPU from who is not.
    template <class Call>
    Timed timed(const Contestant& c, Call call) {
        const int64_t waited = c.waited_ns();
        const StartLine::Start start = line_.meet();
        const int64_t allocated = allocations();
        const int64_t begin = now_ns();
        call();
        const int64_t end = now_ns();
        const Timed t{end - start.at_ns, end - begin, c.waited_ns() - waited, allocations() - allocated};
        line_.meet();
        return t;
    }

    void report(size_t i, int rounds) const {
        const Player& p = players_[i];
        const Moved moved = p.contestant->moved();
        tell({{"cell", number_},
              {"entry", i},
              {"rounds", rounds},
              {"settings", p.contestant->settings()},
              {"rows", p.expected->rows},
              {"dispatch_bytes", moved.dispatch},
              {"combine_bytes", moved.combine},
              {"allocations", p.allocations},
              {"waited_by_rank", p.waited_by_rank},
              {"dispatch", p.dispatch_ns},
              {"dispatch_alone", p.dispatch_alone_ns},
              {"dispatch_wait", p.dispatch_wait_ns},
              {"first_touch", p.touch_ns},
              {"first_touch_tiles", p.tiles_ns},
              {"combine", p.combine_ns},
              {"combine_alone", p.combine_alone_ns},
              {"combine_wait", p.combine_wait_ns},
              {"seen", seen_ % 2}});
    }

    const Flags& flags_;
    const Cell& cell_;
    const int number_;
    const Group& group_;
    StartLine& line_;
    std::map<std::string, std::unique_ptr<Expectation>> expected_;
    std::vector<Player> players_;
    std::vector<size_t> order_;  // of the turns in this round
    uint64_t seen_ = 0;
};

}  // namespace

int rank_main(const Flags& flags, const Tree& tree) {
    try {
        prepare_rank();
        const Group group = Group::from_environment("bench");
        cpu_set_t set;
        StartLine line(group, sched_getaffinity(0, sizeof set, &set) != 0 || CPU_COUNT(&set) < group.size);
        for (size_t i = 0; i < tree.cells.size(); ++i) {
            tell({{"cell", i}, {"begins", true}});
            CellPlayer player(flags, tree.cells[i], static_cast<int>(i), group, line);
            if (!player.play()) return 1;
        }
        return 0;
    } catch (const std::exception& e) {
        tell({{"error", e.what()}});
        return 1;
    }
}

}  // namespace switchyard::bench
