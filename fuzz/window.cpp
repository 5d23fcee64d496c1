// The window of a rank in a group with a hostile or broken member: two or three ranks play epochs over private windows on one
// thread, and between any two steps the input writes what it likes into any window, ends ranks, or passes deadlines.
//
// What must hold: no access outside a window (no page before and behind one can be touched) or outside this process's own
// memory (sanitizers); a step never writes a word of the state plane that belongs to another rank; every step returns.
#include <sys/mman.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "ep/combine.hpp"
#include "ep/dispatch.hpp"
#include "ep/regroup.hpp"
#include "input.hpp"
#include "transport/mapped.hpp"

namespace switchyard::fuzz {
namespace {

constexpr int ranks_most = 3;
constexpr int steps_most = 400;

// A window between two pages that cannot be touched. The bytes of the last page are used to the end.
class Guarded {
 public:
    explicit Guarded(uint64_t bytes) : bytes_((bytes + page - 1) / page * page) {
        void* p = mmap(nullptr, bytes_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        SY_HOLDS(p != MAP_FAILED, "mmap of %lu bytes", static_cast<unsigned long>(bytes_));
        all_ = static_cast<std::byte*>(p);
        SY_HOLDS(mprotect(all_ + page, bytes_, PROT_READ | PROT_WRITE) == 0, "mprotect");
    }
    ~Guarded() { munmap(all_, bytes_ + 2 * page); }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;
    std::byte* start() const { return all_ + page; }

 private:
    static constexpr uint64_t page = 4096;
    const uint64_t bytes_;
    std::byte* all_;
};

class Link final : public MappedTransport {
 public:
    Link(int rank, const std::vector<std::byte*>& windows, const layout::Window& w, bool reachable)
        : MappedTransport(rank, static_cast<int>(windows.size()), reachable) {
        use_windows(windows, w.bytes, w.bell, {});
    }
    Status attach(const AttachRequest&, Deadline, std::vector<std::vector<std::byte>>*) override { return {}; }
    bool lost(int peer) override { return ended[static_cast<size_t>(peer)]; }

    std::array<bool, ranks_most> ended{};
};

struct Player {
    enum class Does { nothing, dispatch, experts, combine, regroup } does = Does::nothing;
    std::unique_ptr<Link> link;
    ep::Workers workers{1};
    std::unique_ptr<ep::Rank> rank;
    std::vector<ep::Flight> flights;
    ep::DispatchStep dispatch;
    ep::CombineStep combine;
    ep::RegroupStep regroup;
    uint64_t last_epoch = 0;
    Status untold;

    std::vector<std::byte> x, out, shared;
    std::vector<int32_t> ids, missing;
    std::vector<float> weights;
    int64_t tokens = 0;

    ep::Flight& flight() { return flights[last_epoch % flights.size()]; }
};

class Group {
 public:
    explicit Group(Input& in) : in_(in), options_(options()), window_(layout::window_of(ep::shape_of(options_, ranks_))) {
        std::vector<std::byte*> starts;
        for (int r = 0; r < ranks_; ++r) starts.push_back(memory_.emplace_back(new Guarded(window_.bytes))->start());
        const quant::Kernels& kernels = in_.flag() ? *quant::find_kernels(Simd::automatic) : quant::scalar_kernels();
        for (int r = 0; r < ranks_; ++r) {
            Player& p = players_[static_cast<size_t>(r)];
            p.link = std::make_unique<Link>(r, starts, window_, reachable_);
            p.rank = std::make_unique<ep::Rank>(*p.link, window_, kernels, p.workers, options_);
            is_sound_ = is_sound_ && p.rank->connect().ok();
            p.flights.resize(static_cast<size_t>(options_.depth));
            for (ep::Flight& f : p.flights) f.allocate(*p.rank);
            p.dispatch.allocate(*p.rank);
            p.combine.allocate(*p.rank);
            p.regroup.allocate(*p.rank);
        }
    }

    void play() {
        if (!is_sound_) return;  // options that this transport refuses
        for (int i = 0; i < steps_most && !in_.empty(); ++i) {
            const uint8_t what = in_.byte();
            const int r = (what >> 4) % ranks_;
            switch (what & 15) {
                case 0:
                case 1: tamper(r); break;
                case 2: tamper_anywhere(r); break;
                case 3:
                    players_[static_cast<size_t>(in_.below(ranks_))].link->ended[static_cast<size_t>(r)] = in_.flag();
                    break;
                case 4: give_up(players_[static_cast<size_t>(r)]); break;
                case 5: start_regroup(players_[static_cast<size_t>(r)]); break;
                case 6: ep::raise_closed(*players_[static_cast<size_t>(r)].rank); break;
                case 7:  // everybody once around, in turn
                    for (int p = 0; p < ranks_; ++p) step(p, true);
                    break;
                default: step(r, (what & 1) != 0); break;
            }
        }
        for (int i = 0; i < 3; ++i)
            for (int r = 0; r < ranks_; ++r) step(r, true);
        for (int r = 0; r < ranks_; ++r) give_up(players_[static_cast<size_t>(r)]);
    }

 private:
    Options options() {
        Options o;
        ranks_ = 2 + in_.below(2);
        reachable_ = in_.below(4) != 0;
        o.hidden = in_.one_of<int64_t>({4, 37, 130});
        o.topk = 1 + in_.below(4);
        o.experts = 1 + in_.below(9);
        o.tokens_max = 1 + in_.below(8);
        o.rows_max = in_.one_of<int64_t>({8, 40, 200});
        o.cell_rows = o.tokens_max;
        o.depth = 1 + in_.below(2);
        o.dtype = in_.one_of({TokenType::f16, TokenType::bf16, TokenType::f32});
        o.landing = in_.one_of(
            {Landing::packed, Landing::padded, Landing::in_place, Landing::allgather, Landing::two_level, Landing::alltoallv});
        o.group_ranks = o.landing == Landing::in_place ? ranks_ : o.landing == Landing::two_level ? 1 + in_.below(ranks_) : 1;
        o.combine_path = in_.one_of({CombinePath::automatic, CombinePath::push, CombinePath::read});
        if (o.dtype != TokenType::f32) {
            o.dispatch_quant = static_cast<Format>(in_.below(5));
            o.combine_quant = in_.one_of({Format::none, Format::int8_block8, Format::int8_block128});
        }
        o.expert_alignment = in_.one_of<int64_t>({1, 16});
        o.deliver_weights = in_.flag();
        o.partial = in_.flag();
        SY_HOLDS(check_options(o, ranks_).ok(), "%s", check_options(o, ranks_).text().c_str());
        return o;
    }

    // One step of a rank: what it does next, and a look.
    void step(int r, bool thorough) {
        Player& p = players_[static_cast<size_t>(r)];
        remember_state_planes();
        switch (p.does) {
            case Player::Does::nothing: start_dispatch(p); break;
            case Player::Does::dispatch:
                switch (p.dispatch.poll(*p.rank, p.flight(), thorough)) {
                    case ep::Progress::pending: break;
                    case ep::Progress::done: p.does = Player::Does::experts; break;
                    case ep::Progress::failed: ended(p, p.dispatch.status()); break;
                }
                break;
            case Player::Does::experts:
                play_experts(p);
                start_combine(p);
                break;
            case Player::Does::combine:
                switch (p.combine.poll(*p.rank, p.flight(), thorough)) {
                    case ep::Progress::pending: break;
                    case ep::Progress::done: p.does = Player::Does::nothing; break;
                    case ep::Progress::failed:
                        if (p.combine.untold()) p.untold = p.combine.status();
                        ended(p, p.combine.status());
                        break;
                }
                break;
            case Player::Does::regroup:
                switch (p.regroup.poll(*p.rank)) {
                    case ep::Progress::pending: break;
                    case ep::Progress::done:
                        SY_HOLDS(p.rank->is_member(r), "rank %d is no member of its own group", r);
                        SY_HOLDS(p.rank->base_epoch > 0 && p.rank->base_epoch <= layout::Word::epoch_max, "base %lu",
                                 static_cast<unsigned long>(p.rank->base_epoch));
                        p.last_epoch = p.rank->base_epoch - 1;
                        p.does = Player::Does::nothing;
                        break;
                    case ep::Progress::failed: ended(p, p.regroup.status()); break;
                }
                break;
        }
        expect_only_own_words(r);
    }

    void ended(Player& p, const Status& why) {
        SY_HOLDS(!why.ok() && !why.text().empty(), "a step failed without a reason");
        p.does = Player::Does::nothing;
    }

    void start_dispatch(Player& p) {
        ep::Flight& next = p.flights[(p.last_epoch + 1) % p.flights.size()];
        if (next.open || p.last_epoch >= layout::Word::epoch_max) return;  // the session refuses both
        ++p.last_epoch;
        next.epoch = p.last_epoch;
        next.slot = p.last_epoch % p.flights.size();
        const auto bytes = static_cast<size_t>(layout::token_bytes(options_.dtype));
        const auto hidden = static_cast<size_t>(options_.hidden);
        p.tokens = in_.below(static_cast<int>(options_.tokens_max) + 1);
        const auto tokens = static_cast<size_t>(p.tokens);
        p.ids.resize(tokens * static_cast<size_t>(options_.topk));
        p.weights.assign(p.ids.size(), 0.5F);
        const int bad = in_.below(32);  // one in 32 inputs is refused by its own rank
        for (int32_t& id : p.ids) id = in_.below(static_cast<int>(options_.experts) + 1) - 1;
        if (bad == 1 && !p.ids.empty()) p.ids.back() = static_cast<int32_t>(in_.number());
        // Exactly as long as it must be: the sanitizer sees one byte too far.
        p.x.assign(tokens * hidden * bytes, std::byte{0x3C});
        p.shared.assign(p.x.size(), std::byte{0x3C});
        p.out.assign(p.x.size(), std::byte{0});
        p.missing.assign(tokens, 0);
        p.does = Player::Does::dispatch;
        p.dispatch.start(*p.rank, next,
                         {.x = p.x.data(),
                          .tokens = p.tokens,
                          .topk_ids = p.ids.data(),
                          .topk_weights = p.weights.data(),
                          .tag = in_.below(16) == 1 ? uint64_t{7} : 0},
                         std::exchange(p.untold, {}));
    }

    // What the caller may do with a batch: read each row where it is, all rows at once, and write y.
    void play_experts(Player& p) {
        ep::Flight& f = p.flight();
        const layout::Window& w = p.rank->window;
        SY_HOLDS(f.rows >= 0 && f.rows <= options_.rows_max, "%ld rows", static_cast<long>(f.rows));
        SY_HOLDS(f.expert_offsets.back() == f.rows && f.expert_offsets.front() == 0, "offsets end at %ld",
                 static_cast<long>(f.expert_offsets.back()));
        std::vector<std::byte> payload(static_cast<size_t>(w.row.payload_bytes));
        std::vector<std::byte> scales(static_cast<size_t>(w.row.scale_bytes()));
        std::vector<float> values(static_cast<size_t>(options_.hidden));
        const bool at_home = ep::rows_lie_apart(options_.landing);
        for (int64_t i = 0; at_home && i < f.rows; ++i) {
            ExpertBatch::Row row;
            if (!ep::find_row(f, i, &row).ok()) continue;
            std::memcpy(payload.data(), row.payload, payload.size());
            if (row.scales) std::memcpy(scales.data(), row.scales, scales.size());
            p.rank->kernels.decode(p.rank->options.dispatch_format(), options_.dtype, row.payload, row.scales, options_.hidden,
                                   values.data());
        }
        static_cast<void>(ep::materialise(*p.rank, f));
        if (f.rows > 0)
            std::memset(p.rank->own(w.slot(f.slot) + w.y), 0x3C,
                        static_cast<size_t>(f.rows * options_.hidden * layout::token_bytes(options_.dtype)));
    }

    void start_combine(Player& p) {
        p.does = Player::Does::combine;
        if (in_.below(16) == 1) {
            ep::drop(*p.rank, p.flight());
            p.does = Player::Does::nothing;
            return;
        }
        p.combine.start(*p.rank, p.flight(),
                        {.topk_weights = in_.flag() ? p.weights.data() : nullptr,
                         .shared = in_.flag() ? p.shared.data() : nullptr,
                         .out = p.out.data(),
                         .missing = p.missing.data()});
    }

    // The deadline of the call at hand passes.
    void give_up(Player& p) {
        if (p.does == Player::Does::dispatch) {
            if (p.dispatch.phase() != ep::DispatchStep::Phase::ended) p.dispatch.give_up(*p.rank, p.flight(), 1);
            ended(p, p.dispatch.status());
        } else if (p.does == Player::Does::combine) {
            p.combine.give_up(*p.rank, p.flight(), 1);
            if (p.combine.untold()) p.untold = p.combine.status();
            ended(p, p.combine.status());
        }
    }

    // As Session::shrink() does; only where all windows can be loaded.
    void start_regroup(Player& p) {
        if (!reachable_ || p.does == Player::Does::dispatch || p.does == Player::Does::combine) return;
        if (p.does == Player::Does::regroup || p.rank->generation >= layout::Turn::generation_max) return;
        for (ep::Flight& f : p.flights) f.open = false;
        p.untold = {};
        p.does = Player::Does::regroup;
        p.regroup.start(*p.rank, p.last_epoch + 1);
    }

    // ------------------------------------------------------------------------------------------------------- the hostile

    uint64_t evil_word() {
        const uint64_t epoch = players_[0].last_epoch + static_cast<uint64_t>(in_.below(7)) - 3;
        switch (in_.below(5)) {
            case 0: return layout::Word::of(epoch, in_.byte(), in_.byte() << 4 | in_.byte()).bits;
            case 1: return layout::Word::of(epoch, in_.byte(), in_.below(ranks_)).bits;
            case 2: return layout::Turn::of(static_cast<uint64_t>(in_.byte()) % 8, epoch).bits;
            case 3: return layout::Turn::of(players_[0].rank->generation + 1, static_cast<uint64_t>(in_.number())).bits;
            default: return static_cast<uint64_t>(in_.number());
        }
    }

    template <class T>
    void write(int r, uint64_t offset, T value) {
        SY_HOLDS(offset + sizeof value <= window_.bytes, "offset %lu", static_cast<unsigned long>(offset));
        std::memcpy(memory_[static_cast<size_t>(r)]->start() + offset, &value, sizeof value);
    }

    // A word that means something, in the window of rank r.
    void tamper(int r) {
        const layout::Window& w = window_;
        const uint64_t slot = static_cast<uint64_t>(in_.below(static_cast<int>(options_.depth)));
        const int writer = in_.below(ranks_);
        const auto row = static_cast<uint64_t>(in_.below(static_cast<int>(options_.rows_max)));
        switch (in_.below(12)) {
            case 0: write(r, w.flag_line(slot, writer) + 8 * static_cast<uint64_t>(in_.below(4)), evil_word()); break;
            case 1: write(r, w.member(writer) + 8 * static_cast<uint64_t>(in_.below(2)), evil_word()); break;
            case 2: write(r, w.decision, evil_word()); break;
            case 3: write(r, w.offer(in_.byte()) + 8 * static_cast<uint64_t>(in_.below(3)), evil_word()); break;
            case 4: write(r, w.count_row(slot, writer) + 8 * static_cast<uint64_t>(in_.below(3)), in_.number()); break;
            case 5:
                write(r,
                      w.count_row(slot, writer) + sizeof(layout::CountHead) +
                          4 * static_cast<uint64_t>(in_.below(static_cast<int>(options_.experts))),
                      static_cast<int32_t>(in_.number()));
                break;
            case 6:
                write(r, w.slot(slot) + w.source_info + row * 12 + 4 * static_cast<uint64_t>(in_.below(3)),
                      static_cast<int32_t>(in_.number()));
                break;
            case 7:
                if (ep::rows_lie_apart(options_.landing))
                    write(r,
                          w.slot(slot) + w.x_ids +
                              4 * static_cast<uint64_t>(in_.below(static_cast<int>(w.shape.sources() * w.token_slots))),
                          static_cast<int32_t>(in_.number()));
                break;
            case 8:
                write(r, w.reason(players_[0].last_epoch, writer) + 8 * static_cast<uint64_t>(in_.below(2)), evil_word());
                break;
            case 9: write(r, w.bell + 4 * static_cast<uint64_t>(in_.below(2)), static_cast<int32_t>(in_.number())); break;
            case 10: write(r, 8 * static_cast<uint64_t>(in_.below(16)), evil_word()); break;  // the header
            default: write(r, w.slot(slot) + w.expand_x + row, in_.byte()); break;
        }
    }

    // Any 8 bytes, at any offset.
    void tamper_anywhere(int r) { write(r, in_.word() % (window_.bytes - 7), in_.word()); }

    // ------------------------------------------------------------------------------------------------------- the judge

    void remember_state_planes() {
        before_.resize(static_cast<size_t>(ranks_) * window_.slots);
        for (int r = 0; r < ranks_; ++r)
            std::memcpy(before_.data() + static_cast<size_t>(r) * window_.slots, memory_[static_cast<size_t>(r)]->start(),
                        window_.slots);
    }

    // Whether rank `writer` may change that byte of the state plane of the window of `owner`.
    bool may_write(int writer, int owner, uint64_t at) const {
        const layout::Window& w = window_;
        const auto among = [&](uint64_t start, uint64_t end, uint64_t each) {
            return at >= start && at < end &&
                   (at - start) / each % static_cast<uint64_t>(ranks_) == static_cast<uint64_t>(writer);
        };
        if (at >= w.bell && at < w.bell + sizeof(layout::Bell)) return true;
        if (among(w.members, w.flags, sizeof(layout::MemberLine))) return true;
        if (among(w.flags, w.reasons, sizeof(layout::FlagLine))) return true;
        if (among(w.reasons, w.decision, sizeof(layout::Reason))) return true;
        if (at >= w.decision && at < w.decision + 8) return owner == 0;
        return at >= w.offers && at < w.offers + 2 * sizeof(layout::Offer) && owner == writer;
    }

    void expect_only_own_words(int writer) const {
        for (int owner = 0; owner < ranks_; ++owner) {
            const std::byte* was = before_.data() + static_cast<size_t>(owner) * window_.slots;
            const std::byte* is = memory_[static_cast<size_t>(owner)]->start();
            if (std::memcmp(was, is, window_.slots) == 0) continue;
            for (uint64_t at = 0; at < window_.slots; ++at)
                SY_HOLDS(was[at] == is[at] || may_write(writer, owner, at), "rank %d wrote byte %lu of the window of rank %d",
                         writer, static_cast<unsigned long>(at), owner);
        }
    }

    Input& in_;
    int ranks_ = 0;
    bool reachable_ = true;
    bool is_sound_ = true;
    const Options options_;
    const layout::Window window_;
    std::vector<std::unique_ptr<Guarded>> memory_;
    std::array<Player, ranks_most> players_;
    std::vector<std::byte> before_;
};

}  // namespace
}  // namespace switchyard::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    switchyard::fuzz::Input in(data, size);
    switchyard::fuzz::Group(in).play();
    return 0;
}
