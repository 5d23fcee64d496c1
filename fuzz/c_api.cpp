// Sequences of calls of the C interface, with nulls, wrong sizes, stale tickets and numbers out of range. Where the header
// promises an error, there must be one; memory is as large as the header asks and not a byte larger, so that the sanitizer sees
// what goes beyond. Sessions are groups of one rank or of two; all are played from one thread, so that the calls of a group of
// two end by their deadline or by what the other rank did before.
#include <fmt/format.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "input.hpp"
#include "switchyard/switchyard.h"

namespace switchyard::fuzz {
namespace {

constexpr int calls_most = 48;
constexpr size_t sessions_most = 4;
constexpr size_t tickets_most = 8;

// A struct of the interface in memory of exactly the size that it says it has.
template <class T>
class Sized {
 public:
    Sized(Input& in, const T& right) {
        size_t said = sizeof(T);
        switch (in.below(12)) {
            case 0: said = 8 * static_cast<size_t>(in.byte()); break;  // an older or a newer caller
            case 1: said = static_cast<size_t>(in.number()); break;
            case 2: return;  // null
            default: break;
        }
        const bool readable = said >= sizeof(size_t) && said <= 4096;
        memory_ = std::make_unique<uint64_t[]>(readable ? (said + 7) / 8 : 1);
        if (readable) std::memcpy(memory_.get(), &right, std::min(said, sizeof(T)));
        std::memcpy(memory_.get(), &said, sizeof said);
        if (readable && said > sizeof(T) && said % 8 == 0 && in.below(4) == 0) memory_[said / 8 - 1] = 1;
    }
    T* get() { return reinterpret_cast<T*>(memory_.get()); }
    /// Whether the caller's struct reaches beyond a field that begins there, of 8 bytes; otherwise it has its default.
    bool holds(size_t field) const { return memory_ && memory_[0] >= field + 8; }

 private:
    std::unique_ptr<uint64_t[]> memory_;
};

// Takes a code: the function's promise about it.
int32_t judged(int32_t code) {
    SY_HOLDS(code >= SY_OK && code <= SY_CORRUPT, "code %d", code);
    SY_HOLDS(code == SY_OK || sy_last_error()[0] != 0, "code %d without a text", code);
    return code;
}

struct Open {
    sy_session* session = nullptr;
    int64_t hidden = 0, topk = 0, experts = 0, tokens_max = 0, token_bytes = 0, ranks = 1;
    bool weights = false;
};

class Play {
 public:
    explicit Play(Input& in) : in_(in) {}
    ~Play() {
        for (Open& open : open_) judged(sy_free(&open.session));
    }

    void play() {
        for (int i = 0; i < calls_most && !in_.empty(); ++i) call();
    }

 private:
    sy_options wanted() {
        sy_options o;
        judged(sy_options_init(&o, sizeof o));
        o.hidden = in_.one_of<int64_t>({8, 33, 128});
        o.topk = 1 + in_.below(4);
        o.experts = 1 + in_.below(8);
        o.tokens_max = 1 + in_.below(8);
        o.timeout_ms = 1;
        // Small numbers only: a large one is room that has to be there.
        const auto changes = static_cast<unsigned>(in_.byte() | in_.byte() << 8);
        if (changes & 0x1) o.dtype = in_.below(4);
        if (changes & 0x2) o.dispatch_quant = in_.below(6);
        if (changes & 0x4) o.combine_quant = in_.below(8);
        if (changes & 0x8) o.mx_rule = in_.below(3);
        if (changes & 0x10) o.mx_overflow = in_.below(3);
        if (changes & 0x20) o.fp8_scale = in_.below(3);
        if (changes & 0x40) o.expert_alignment = in_.one_of<int64_t>({1, 16, 128, 3});
        if (changes & 0x80) o.deliver_weights = in_.flag();
        if (changes & 0x100) o.landing = in_.below(8);
        if (changes & 0x200) o.combine_path = in_.below(4);
        if (changes & 0x400) o.depth = in_.below(5);
        if (changes & 0x800) o.rows_max = o.cell_rows = in_.byte();
        if (changes & 0x1000) o.partial = in_.flag();
        if (changes & 0x2000) o.workers = in_.below(3);
        if (changes & 0x4000) o.simd = in_.below(9);
        if (changes & 0x8000) o.expert_token_nums = in_.number();
        return o;
    }

    Open& some_open() { return open_[static_cast<size_t>(in_.below(static_cast<int>(sessions_most)))]; }
    sy_batch& some_ticket() { return tickets_[static_cast<size_t>(in_.below(static_cast<int>(tickets_most)))]; }

    // The tickets of a freed session must not be used any more; all others may.
    void forget(const sy_session* session) {
        for (sy_batch& ticket : tickets_)
            if (ticket.session == session) ticket = {nullptr, in_.byte()};
    }
    Open* opened_as(const sy_session* session) {
        for (Open& open : open_)
            if (open.session == session && session != nullptr) return &open;
        return nullptr;
    }

    void note(Open& open, sy_session* session, int64_t ranks) {
        open.session = session;
        if (session == nullptr) return;
        sy_options used = {};
        used.struct_size = sizeof used;
        SY_HOLDS(sy_session_options(session, &used) == SY_OK, "%s", sy_last_error());
        open.hidden = used.hidden;
        open.topk = used.topk;
        open.experts = used.experts;
        open.tokens_max = used.tokens_max;
        open.token_bytes = used.dtype == SY_F32 ? 4 : 2;
        open.weights = used.deliver_weights != 0;
        open.ranks = ranks;
    }

    void free_one(Open& open) {
        forget(open.session);
        SY_HOLDS(judged(sy_free(&open.session)) == SY_OK && open.session == nullptr, "sy_free");
    }

    void call() {
        switch (in_.below(20)) {
            case 0: call_open(); break;
            case 1:
            case 2:
            case 3: call_dispatch(); break;
            case 4:
            case 5: call_combine(); break;
            case 6: judged(sy_drop(in_.below(8) == 0 ? nullptr : &some_ticket())); break;
            case 7: judged(sy_close(some_open().session)); break;
            case 8: free_one(some_open()); break;
            case 9: call_shrink(); break;
            case 10: call_get(); break;
            case 11: call_rows(); break;
            case 12: call_gather(); break;
            case 13: call_x(); break;
            case 14: call_about(); break;
            case 15: call_options(); break;
            case 16: call_table(); break;
            case 17: some_ticket() = some_ticket(); break;                      // a copy
            case 18: some_ticket() = {some_open().session, in_.byte()}; break;  // one that never was, or has long ended
            default: call_dispatch(); break;
        }
    }

    void call_open() {
        Open& open = some_open();
        if (open.session != nullptr) free_one(open);
        Sized<sy_options> options(in_, wanted());
        // Two ranks wait for each other until a deadline: it must be the short one, not the default.
        const bool has_deadline = options.get() == nullptr || options.get()->struct_size >= sizeof(sy_options);
        switch (in_.below(4)) {
            case 0: {
                sy_group group = {sizeof group, 0, 1, nullptr, nullptr};
                const std::string name = in_.text(40), token = in_.text(8);
                if (in_.flag()) group.name = name.c_str(), group.token = token.c_str();
                if (in_.below(4) == 0) group.rank = static_cast<int32_t>(in_.number());
                if (in_.below(8) == 0) group.size = static_cast<int32_t>(in_.number());
                if (!has_deadline) group.size = 1;
                Sized<sy_group> sized(in_, group);
                sy_session* session = nullptr;
                judged(sy_open(options.get(), sized.get(), in_.below(16) == 0 ? nullptr : &session));
                note(open, session, 1);
                break;
            }
            case 1: {
                const int32_t ranks = in_.below(8) == 0 ? static_cast<int32_t>(in_.number()) : 2;
                if (ranks > 2 || !has_deadline) break;  // many threads are not what is looked at
                std::array<sy_session*, 2> sessions{};
                judged(sy_open_local(options.get(), ranks, in_.below(16) == 0 ? nullptr : sessions.data()));
                note(open, sessions[0], ranks);
                for (Open& other : open_)
                    if (other.session == nullptr && sessions[1] != nullptr)
                        note(other, std::exchange(sessions[1], nullptr), ranks);
                judged(sy_free(&sessions[1]));
                break;
            }
            case 2: {
                Sized<sy_options> others(in_, wanted());
                if (!has_deadline || (others.get() != nullptr && others.get()->struct_size < sizeof(sy_options))) break;
                std::array<const sy_options*, 2> each = {options.get(), in_.flag() ? options.get() : others.get()};
                std::array<sy_session*, 2> sessions{};
                judged(sy_open_local_each(in_.below(16) == 0 ? nullptr : each.data(), 1 + in_.below(2), sessions.data()));
                note(open, sessions[0], sessions[1] == nullptr ? 1 : 2);
                judged(sy_free(&sessions[1]));
                break;
            }
            default: {
                sy_session* session = nullptr;
                judged(sy_open_local(options.get(), 1, &session));
                note(open, session, 1);
            }
        }
    }

    void call_dispatch() {
        Open& open = some_open();
        const bool odd = in_.below(8) == 0;
        const int64_t tokens = odd ? in_.number() : in_.below(static_cast<int>(open.tokens_max) + 1);
        const bool fits = tokens >= 0 && tokens <= open.tokens_max;
        const auto n = static_cast<size_t>(fits ? tokens : 0);
        sy_dispatch_args args = {};
        args.struct_size = sizeof args;
        args.tokens = tokens;
        const uint8_t lacks = in_.byte();
        // A stride that is allowed needs memory; one that is not must be refused before any is read.
        args.row_stride = lacks & 1 ? in_.number() : 0;
        const bool spreads = n > 1 && args.row_stride > open.hidden && args.row_stride <= int64_t{1} << 60;
        if (spreads) args.row_stride = std::min(args.row_stride, open.hidden + 3);
        const auto stride = static_cast<size_t>(spreads ? args.row_stride : open.hidden);
        const size_t x_elements = n == 0 ? 0 : (n - 1) * stride + static_cast<size_t>(open.hidden);
        std::vector<std::byte> x(x_elements * static_cast<size_t>(open.token_bytes), std::byte{0x3C});
        std::vector<int32_t> ids(n * static_cast<size_t>(open.topk));
        for (int32_t& id : ids) id = in_.below(static_cast<int>(open.experts) + 1) - 1;
        if (lacks & 2 && !ids.empty()) ids.back() = static_cast<int32_t>(in_.number());
        std::vector<float> weights(open.weights ? ids.size() : 0, 0.5F);
        args.x = lacks & 4 && lacks & 32 ? nullptr : x.data();
        args.topk_ids = lacks & 8 && lacks & 32 ? nullptr : ids.data();
        args.topk_weights = lacks & 16 && lacks & 32 ? nullptr : weights.data();
        args.tag = lacks & 64 ? in_.word() : 0;
        args.timeout_ms = lacks & 128 ? std::min<int64_t>(in_.number(), 2) : 1;
        if (open.ranks > 1 && args.timeout_ms == 0) args.timeout_ms = 1;
        std::vector<int64_t> sends(static_cast<size_t>(open.experts)), receives(static_cast<size_t>(open.ranks));
        if ((lacks & 96) == 96) {  // right, or one of them anything
            for (const int32_t id : ids)
                if (id >= 0 && id < open.experts) ++sends[static_cast<size_t>(id)];
            if (in_.flag() && !sends.empty())
                sends[static_cast<size_t>(in_.below(static_cast<int>(open.experts)))] = in_.number();
            receives.assign(receives.size(), in_.number());
            args.send_counts = in_.flag() ? sends.data() : nullptr;
            args.recv_counts = in_.flag() ? receives.data() : nullptr;
        }
        Sized<sy_dispatch_args> sized(in_, args);
        sy_batch* ticket = in_.below(16) == 0 ? nullptr : &some_ticket();
        const int32_t code = judged(sy_dispatch(open.session, sized.get(), ticket));
        if (code == SY_OK)
            SY_HOLDS(ticket != nullptr && ticket->session == open.session &&
                         (fits || !sized.holds(offsetof(sy_dispatch_args, tokens))),
                     "a dispatch that cannot be");
        if (code != SY_OK && ticket != nullptr && open.session != nullptr)
            SY_HOLDS(ticket->session == nullptr && ticket->epoch == 0, "a ticket after an error");
    }

    void call_combine() {
        sy_batch& ticket = some_ticket();
        Open* of = opened_as(ticket.session);
        Open none;
        Open& open = in_.below(8) == 0 ? some_open() : of != nullptr ? *of : none;
        sy_batch_view view = {};
        view.struct_size = sizeof view;
        const bool is_open = ticket.session != nullptr && sy_batch_get(&ticket, &view) == SY_OK;
        const size_t row = of == nullptr ? 0 : static_cast<size_t>(of->hidden * of->token_bytes);
        const auto tokens = static_cast<size_t>(is_open ? view.tokens : 0), rows = static_cast<size_t>(is_open ? view.rows : 0);
        const uint8_t lacks = in_.byte();
        std::vector<std::byte> y(rows * row), shared(tokens * row), out(tokens * row);
        std::vector<float> weights(of == nullptr ? 0 : tokens * static_cast<size_t>(of->topk), 1.0F);
        std::vector<int32_t> missing(tokens);
        sy_combine_args args = {};
        args.struct_size = sizeof args;
        args.y = lacks & 1 ? y.data() : nullptr;
        args.topk_weights = lacks & 2 ? weights.data() : nullptr;
        args.shared = lacks & 4 ? shared.data() : nullptr;
        std::vector<std::byte> home(of == nullptr ? 0 : out.size() * static_cast<size_t>(of->topk));
        args.out = (lacks & 56) == 56 || (lacks & 56) == 40 ? nullptr : out.data();
        args.rows = (lacks & 40) == 40 ? home.data() : nullptr;  // alone, with out, or with weights
        args.missing = lacks & 64 ? missing.data() : nullptr;
        args.timeout_ms = lacks & 128 ? std::min<int64_t>(in_.number(), 2) : 1;
        if (args.timeout_ms == 0) args.timeout_ms = 1;
        Sized<sy_combine_args> sized(in_, args);
        const bool lacks_ticket = in_.below(16) == 0;
        const int32_t code = judged(sy_combine(open.session, lacks_ticket ? nullptr : &ticket, sized.get()));
        if (code == SY_OK) SY_HOLDS(is_open && !lacks_ticket && ticket.session == nullptr, "a combine that cannot be");
        if (open.session != nullptr && !is_open) SY_HOLDS(code != SY_OK, "a batch that had ended was combined");
    }

    void call_shrink() {
        Open& open = some_open();
        std::vector<int32_t> members(static_cast<size_t>(open.ranks));
        const int64_t count = in_.below(8) == 0 ? in_.number() : open.ranks;
        const int64_t timeout_ms = in_.below(4) == 0 ? std::min<int64_t>(in_.number(), 2) : 1;
        const int32_t code =
            judged(sy_shrink(open.session, timeout_ms, in_.byte() & 1, in_.flag() ? members.data() : nullptr, count));
        if (code == SY_OK) SY_HOLDS(open.session != nullptr, "shrink of nothing");
    }

    void call_get() {
        sy_batch_view right = {};
        Sized<sy_batch_view> view(in_, right);
        judged(sy_batch_get(in_.below(16) == 0 ? nullptr : &some_ticket(), view.get()));
    }

    void call_rows() {
        sy_batch& ticket = some_ticket();
        const Open* of = opened_as(ticket.session);
        sy_batch_view view = {};
        view.struct_size = sizeof view;
        const bool is_open = of != nullptr && sy_batch_get(&ticket, &view) == SY_OK;
        const void *payload = nullptr, *scales = nullptr;
        std::vector<std::byte> copy;
        if (in_.flag()) {
            const int32_t code = judged(sy_batch_expand_x(&ticket, in_.below(16) == 0 ? nullptr : &payload, &scales));
            if (code != SY_OK) return;
            SY_HOLDS(is_open, "rows of nothing");
            const auto* p = static_cast<const std::byte*>(payload);
            copy.assign(p, p + view.rows * view.payload_bytes);
        } else {
            const int64_t i = in_.below(2) == 0 ? in_.byte() : in_.number();
            const int32_t code =
                judged(sy_batch_row(&ticket, i, in_.below(16) == 0 ? nullptr : &payload, in_.flag() ? &scales : nullptr));
            if (code != SY_OK) return;
            SY_HOLDS(is_open && i >= 0 && i < view.rows, "row %ld of %ld", static_cast<long>(i), static_cast<long>(view.rows));
            const auto* p = static_cast<const std::byte*>(payload);
            copy.assign(p, p + view.payload_bytes);
        }
    }

    void call_gather() {
        sy_batch& ticket = some_ticket();
        const Open* of = opened_as(ticket.session);
        sy_batch_view view = {};
        view.struct_size = sizeof view;
        const bool is_open = of != nullptr && sy_batch_get(&ticket, &view) == SY_OK;
        const int64_t expert = in_.below(4) == 0 ? in_.number() : in_.below(8);
        const int64_t first = in_.below(4) == 0 ? in_.number() : in_.below(8);
        const int64_t count = in_.below(4) == 0 ? in_.number() : in_.below(8);
        // A count beyond the rows is refused before anything is written.
        const auto n = static_cast<size_t>(is_open && count > 0 && count <= view.rows ? count : 0);
        const bool lacks_tile = in_.below(16) == 0;
        int32_t code;
        if (in_.flag()) {
            std::vector<float> tile(n * static_cast<size_t>(of == nullptr ? 0 : of->hidden) + 1);
            tile.pop_back();
            code = judged(sy_batch_gather_f32(&ticket, expert, first, count, lacks_tile ? nullptr : tile.data()));
        } else {
            std::vector<std::byte> tile(n * static_cast<size_t>(view.payload_bytes) + 1),
                scales(n * static_cast<size_t>(view.scale_bytes));
            tile.pop_back();
            code = judged(sy_batch_gather(&ticket, expert, first, count, lacks_tile ? nullptr : tile.data(),
                                          in_.flag() ? scales.data() : nullptr));
        }
        if (code == SY_OK)
            SY_HOLDS(is_open && expert >= 0 && first >= 0 && count >= 0 && count <= view.rows, "a gather that cannot be");
    }

    void call_x() {
        Open& open = some_open();
        void* x = nullptr;
        if (judged(sy_session_x(open.session, in_.below(16) == 0 ? nullptr : &x)) != SY_OK || x == nullptr) return;
        // Tokens written there, and dispatched from there.
        const int64_t tokens = in_.below(static_cast<int>(open.tokens_max) + 1);
        std::memset(x, 0x3C, static_cast<size_t>(tokens * open.hidden * open.token_bytes));
        std::vector<int32_t> ids(static_cast<size_t>(tokens * open.topk));
        std::vector<float> weights(ids.size(), 1.0F);
        sy_dispatch_args args = {};
        args.struct_size = sizeof args;
        args.x = static_cast<std::byte*>(x) + (in_.below(8) == 0 ? open.token_bytes : 0);
        args.tokens = in_.below(8) == 0 && tokens > 0 ? tokens - 1 : tokens;
        args.topk_ids = ids.data();
        args.topk_weights = weights.data();
        args.timeout_ms = 1;
        judged(sy_dispatch(open.session, &args, &some_ticket()));
    }

    void call_about() {
        sy_session* session = some_open().session;
        Sized<sy_session_info> info(in_, {});
        Sized<sy_stats> stats(in_, {});
        Sized<sy_options> options(in_, {});
        judged(sy_session_get(session, info.get()));
        judged(sy_session_stats(session, stats.get()));
        judged(sy_session_options(session, options.get()));
        std::vector<int64_t> waits(2);
        const int64_t count = in_.number();
        const int32_t code = judged(sy_session_waits(session, in_.below(16) == 0 ? nullptr : waits.data(), count));
        if (code == SY_OK) SY_HOLDS(count == 1 || count == 2, "waits of %ld ranks", static_cast<long>(count));
    }

    void call_options() {
        Sized<sy_options> options(in_, wanted());
        const std::string name = in_.flag() ? some_name() : in_.text(24), text = in_.text(24);
        if (judged(sy_options_set(options.get(), in_.below(16) == 0 ? nullptr : name.c_str(), text.c_str())) == SY_OK)
            judged(sy_options_check(options.get(), 1));
        const size_t room = in_.byte();
        const auto value = std::make_unique<char[]>(room);
        if (judged(sy_options_get(options.get(), name.c_str(), in_.below(16) == 0 ? nullptr : value.get(), room)) == SY_OK)
            SY_HOLDS(strnlen(value.get(), room) < room, "no final zero");
        judged(sy_options_check(options.get(), in_.number()));
        judged(sy_options_from_environment(options.get()));
        const size_t size = in_.below(4) == 0 ? static_cast<size_t>(in_.number()) : 8 * static_cast<size_t>(in_.below(40));
        const bool writes = size >= 16 && size <= 4096 && size % 8 == 0;
        const auto fresh = std::make_unique<uint64_t[]>(writes ? size / 8 : 1);
        judged(sy_options_init(in_.below(16) == 0 ? nullptr : reinterpret_cast<sy_options*>(fresh.get()), size));
    }

    std::string some_name() {
        sy_option_info info = {};
        info.struct_size = sizeof info;
        SY_HOLDS(sy_option_at(in_.below(static_cast<int>(sy_option_count())), &info) == SY_OK, "%s", sy_last_error());
        return info.name;
    }

    void call_table() {
        Sized<sy_option_info> info(in_, {});
        judged(sy_option_at(in_.number(), info.get()));
        int64_t first = -1, last = -1;
        const int64_t rank = in_.number(), ranks = in_.number(), experts = in_.number();
        if (judged(sy_experts_of(rank, ranks, experts, in_.below(16) == 0 ? nullptr : &first, &last)) == SY_OK)
            SY_HOLDS(first >= 0 && first <= last && last <= experts, "experts %ld..%ld", static_cast<long>(first),
                     static_cast<long>(last));
        SY_HOLDS(sy_code_name(static_cast<int32_t>(in_.number()))[0] != 0, "no name");
    }

    Input& in_;
    std::array<Open, sessions_most> open_;
    std::array<sy_batch, tickets_most> tickets_{};
};

}  // namespace
}  // namespace switchyard::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    switchyard::fuzz::Input in(data, size);
    switchyard::fuzz::Play(in).play();
    return 0;
}
