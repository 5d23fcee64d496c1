// The exchange by itself: items of several payloads as rows of bytes in a session. Waits and throws only through it.
#include "switchyard/exchange.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <tuple>

#include "core/clock.hpp"
#include "ep/routing.hpp"

namespace switchyard {
namespace {

[[noreturn]] void refuse(Code code, std::string text) {
    throw Error(Status(code, std::move(text)));
}

}  // namespace

// ------------------------------------------------------------------------------------------------------- building blocks

void count_experts(std::span<const int32_t> indices, std::span<int64_t> counts) {
    std::fill(counts.begin(), counts.end(), 0);
    for (size_t i = 0; i < indices.size(); ++i) {
        const int32_t e = indices[i];
        if (e == -1) continue;
        if (e < 0 || static_cast<size_t>(e) >= counts.size())
            refuse(Code::bad_input,
                   fmt::format("count_experts: indices[{}] is {}; experts are 0..{}, or -1 for an unused index.", i, e,
                               static_cast<int64_t>(counts.size()) - 1));
        ++counts[static_cast<size_t>(e)];
    }
}

void offsets_of(std::span<const int64_t> counts, std::span<int64_t> offsets) {
    if (offsets.size() != counts.size() + 1)
        refuse(Code::bad_input, fmt::format("offsets_of: {} counts and room for {} offsets; expected {}.", counts.size(),
                                            offsets.size(), counts.size() + 1));
    offsets[0] = 0;
    for (size_t e = 0; e < counts.size(); ++e) {
        if (counts[e] < 0 || __builtin_add_overflow(offsets[e], counts[e], &offsets[e + 1]))
            refuse(Code::bad_input,
                   fmt::format("offsets_of: counts[{}] is {}; expected counts from 0 whose sum fits 63 bits.", e, counts[e]));
    }
}

void permutation_of(std::span<const int32_t> indices, std::span<const int64_t> offsets, std::span<int64_t> permutation) {
    if (offsets.empty() || offsets.back() != static_cast<int64_t>(permutation.size()))
        refuse(Code::bad_input, fmt::format("permutation_of: offsets end at {} and the permutation has {} places.",
                                            offsets.empty() ? 0 : offsets.back(), permutation.size()));
    for (size_t e = 0; e < offsets.size(); ++e)
        if (offsets[e] < (e == 0 ? 0 : offsets[e - 1]) || (e == 0 && offsets[e] != 0))
            refuse(Code::bad_input, fmt::format("permutation_of: offsets[{}] is {}; expected a running sum from 0, as of "
                                                "offsets_of.",
                                                e, offsets[e]));
    std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
    for (size_t i = 0; i < indices.size(); ++i) {
        const int32_t e = indices[i];
        if (e == -1) continue;
        if (e < 0 || static_cast<size_t>(e) >= next.size() ||
            next[static_cast<size_t>(e)] >= offsets[static_cast<size_t>(e) + 1])
            refuse(Code::bad_input,
                   fmt::format("permutation_of: indices[{}] is {}, for which the offsets have no place (left).", i, e));
        permutation[static_cast<size_t>(next[static_cast<size_t>(e)]++)] = static_cast<int64_t>(i);
    }
    for (size_t e = 0; e < next.size(); ++e)
        if (next[e] != offsets[e + 1])
            refuse(Code::bad_input, fmt::format("permutation_of: expert {} has {} indices; by the offsets, {}.", e,
                                                next[e] - offsets[e], offsets[e + 1] - offsets[e]));
}

void reorder(const void* from, int64_t items, int64_t row_bytes, std::span<const int64_t> permutation, int64_t repeat,
             void* to) {
    if (items < 0 || row_bytes < 0 || repeat < 1)
        refuse(Code::bad_input, fmt::format("reorder: {} items of {} bytes, repeat {}; expected items and bytes from 0, repeat "
                                            "from 1.",
                                            items, row_bytes, repeat));
    const auto bytes = static_cast<size_t>(row_bytes);
    if ((!from || !to) && !permutation.empty() && bytes > 0)
        refuse(Code::bad_input, fmt::format("reorder: {} is null with {} rows.", from ? "to" : "from", permutation.size()));
    for (size_t i = 0; i < permutation.size(); ++i) {
        const int64_t item = permutation[i] / repeat;
        if (permutation[i] < 0 || item >= items)
            refuse(Code::bad_input, fmt::format("reorder: permutation[{}] is {}; there are {} items of {} indices.", i,
                                                permutation[i], items, repeat));
        std::memcpy(static_cast<std::byte*>(to) + i * bytes,
                    static_cast<const std::byte*>(from) + static_cast<size_t>(item) * bytes, bytes);
    }
}

// -------------------------------------------------------------------------------------------------------------- exchange

namespace {

// Where each payload lies in a row. One payload fills it (to an even number of bytes); several begin at multiples of 16.
struct RowParts {
    std::vector<int64_t> at;
    int64_t bytes = 0;

    explicit RowParts(const std::vector<int64_t>& payload_bytes) {
        for (const int64_t size : payload_bytes) {
            at.push_back(bytes);
            bytes += payload_bytes.size() == 1 ? (size + 1) / 2 * 2 : (size + 15) / 16 * 16;
        }
    }
};

// The longest row a session can have: its columns are 2 bytes wide and fewer than 2^31.
constexpr int64_t row_bytes_max = 2 * ((int64_t{1} << 31) - 1);

Status check(const ExchangeOptions& o, int ranks) {
    const auto bad = [](std::string text) { return Status(Code::bad_input, "exchange: " + std::move(text)); };
    if (o.payload_bytes.empty() || o.payload_bytes.size() > static_cast<size_t>(payloads_max))
        return bad(fmt::format("{} payloads; allowed: 1..{}.", o.payload_bytes.size(), payloads_max));
    for (size_t p = 0; p < o.payload_bytes.size(); ++p)
        if (o.payload_bytes[p] < 1 || o.payload_bytes[p] > row_bytes_max / payloads_max)
            return bad(
                fmt::format("payload_bytes[{}] is {}; allowed: 1..{}.", p, o.payload_bytes[p], row_bytes_max / payloads_max));
    if (o.experts < 0 || (o.experts == 0 && ranks < 1))
        return bad(fmt::format("experts is {}; allowed: 0 (one per rank) or more.", o.experts));
    // What a session would refuse in its own words.
    for (const auto& [name, below, value] :
         {std::tuple("topk", "topk", o.topk), std::tuple("items_max", "tokens_max", o.items_max),
          std::tuple("rows_max", "rows_max", o.rows_max), std::tuple("group_ranks", "group_ranks", o.group_ranks),
          std::tuple("depth", "depth", o.depth), std::tuple("workers", "workers", o.workers),
          std::tuple("timeout_ms", "timeout_ms", o.timeout_ms)}) {
        const OptionInfo& info = *find_option(below);
        if (value < info.low || value > info.high)
            return bad(fmt::format("{} is {}; allowed: {}..{}.", name, value, info.low, info.high));
    }
    if (o.items_max * o.topk >= int64_t{1} << 31)
        return bad(fmt::format("items_max {} * topk {} = {} rows from one rank; allowed: fewer than 2^31.", o.items_max, o.topk,
                               o.items_max * o.topk));
    return {};
}

// The session below. What check() refuses is opened with no columns: the session refuses that on all ranks; its text is
// replaced.
Options options_of(const ExchangeOptions& o, int ranks) {
    Options s;
    s.hidden = check(o, ranks).ok() ? RowParts(o.payload_bytes).bytes / 2 : 0;
    s.topk = o.topk;
    s.experts = o.experts == 0 ? ranks : o.experts;
    s.tokens_max = o.items_max;
    s.rows_max = o.rows_max;
    s.landing = o.strategy;
    s.group_ranks = o.group_ranks;
    s.depth = o.depth;
    s.workers = o.workers;
    s.timeout_ms = o.timeout_ms;
    return s;
}

}  // namespace

namespace {

// Where payloads are put together and taken apart: [items_max], [items_max * K] rows. Nothing where the one payload is the row.
struct Buffers {
    std::unique_ptr<std::byte[]> out, home;

    Status allocate(const ExchangeOptions& o, const RowParts& parts) {
        if (o.payload_bytes.size() == 1 && parts.bytes == o.payload_bytes[0]) return {};
        const auto items = static_cast<uint64_t>(std::max<int64_t>(o.items_max, 0));
        uint64_t bytes = 0;
        if (!__builtin_mul_overflow(
                items, static_cast<uint64_t>(parts.bytes) * static_cast<uint64_t>(std::max<int64_t>(o.topk, 1)), &bytes))
            try {
                out = std::make_unique_for_overwrite<std::byte[]>(items * static_cast<uint64_t>(parts.bytes));
                home = std::make_unique_for_overwrite<std::byte[]>(bytes);
                return {};
            } catch (const std::bad_alloc&) {
            }
        return {Code::system,
                fmt::format("exchange: no memory for {} items of {} payloads with {} answers each. Lower items_max.",
                            o.items_max, o.payload_bytes.size(), o.topk)};
    }
};

// What is wrong with the options of one rank, its memory included.
Status prepare(const ExchangeOptions& o, int ranks, Buffers& buffers) {
    if (Status s = check(o, ranks); !s.ok()) return s;
    return buffers.allocate(o, RowParts(o.payload_bytes));
}

// A number for what a row is made of. FNV-1a.
uint64_t number_of(const std::vector<int64_t>& payload_bytes) {
    uint64_t h = 0xCBF29CE484222325;
    for (const int64_t bytes : payload_bytes)
        for (int i = 0; i < 8; ++i) h = (h ^ (static_cast<uint64_t>(bytes) >> (8 * i) & 0xFF)) * 0x100000001B3;
    return h;
}

}  // namespace

struct Exchange::Impl {
    Session session;
    ExchangeOptions options;
    const RowParts parts;
    const bool as_they_are;  // the one payload is the row
    const Buffers buffers;
    std::vector<int32_t> indices;  // of alltoallv

    Impl(Session opened, const ExchangeOptions& given, Buffers&& made)
        : session(std::move(opened)),
          options(given),
          parts(given.payload_bytes),
          as_they_are(given.payload_bytes.size() == 1 && parts.bytes == given.payload_bytes[0]),
          buffers(std::move(made)) {
        const Options& used = session.options();
        options.experts = used.experts;
        options.rows_max = used.rows_max;
        options.strategy = used.landing;
        options.group_ranks = used.group_ranks;
    }

    Status wrong_items(const SendArgs& args) const {
        const auto bad = [&](std::string text) {
            return Status(Code::bad_input, fmt::format("rank {}: {}", session.rank(), text));
        };
        if (args.timeout_ms < 0)
            return bad(fmt::format("timeout_ms is {}; allowed: 0 (the exchange's) or milliseconds.", args.timeout_ms));
        if (args.items < 0 || args.items > options.items_max)
            return bad(fmt::format("items is {}; allowed: 0..{} (items_max).", args.items, options.items_max));
        if (args.items == 0) return {};
        for (size_t p = 0; p < parts.at.size(); ++p)
            if (!args.payloads[p]) return bad(fmt::format("payloads[{}] is null with {} items.", p, args.items));
        if (!args.expert_indices) return bad(fmt::format("expert_indices is null with {} items.", args.items));
        const int64_t n = args.items * options.topk;
        if (const int64_t i = ep::find_bad_id(args.expert_indices, n, options.experts); i < n)
            return bad(fmt::format("expert_indices[{}][{}] is {}; experts are 0..{}, or -1 for an unused index.",
                                   i / options.topk, i % options.topk, args.expert_indices[i], options.experts - 1));
        return {};
    }

    // Rows of the items in one piece, at `to`.
    void put_together(const SendArgs& args, std::byte* to) const {
        for (int64_t i = 0; i < args.items; ++i)
            for (size_t p = 0; p < parts.at.size(); ++p) {
                const auto bytes = static_cast<size_t>(options.payload_bytes[p]);
                std::byte* part = to + i * parts.bytes + parts.at[p];
                const int64_t end = p + 1 < parts.at.size() ? parts.at[p + 1] : parts.bytes;
                std::memcpy(part, static_cast<const std::byte*>(args.payloads[p]) + static_cast<size_t>(i) * bytes, bytes);
                std::memset(part + bytes, 0, static_cast<size_t>(end - parts.at[p]) - bytes);  // the gap travels, too
            }
    }
};

// A rank that refuses still meets the others, so that all of them get its error.
Exchange Exchange::open(const ExchangeOptions& options, const Group& group) {
    Buffers buffers;
    const Status wrong = prepare(options, group.size, buffers);
    Session session = Session::open_rows(options_of(options, group.size), group, number_of(options.payload_bytes), wrong);
    return Exchange(std::make_shared<Impl>(std::move(session), options, std::move(buffers)));
}

std::vector<Exchange> Exchange::open_local(const ExchangeOptions& options, int ranks) {
    Session::check_ranks_of_open_local(ranks);
    return open_local(std::vector<ExchangeOptions>(static_cast<size_t>(ranks), options));
}

std::vector<Exchange> Exchange::open_local(std::span<const ExchangeOptions> options) {
    Session::check_ranks_of_open_local(static_cast<int64_t>(options.size()));
    const auto ranks = static_cast<int>(options.size());
    std::vector<Options> below;
    std::vector<uint64_t> rows;
    std::vector<Buffers> buffers(options.size());
    for (size_t r = 0; r < options.size(); ++r) {
        if (const Status wrong = prepare(options[r], ranks, buffers[r]); !wrong.ok()) throw Error(wrong);
        below.push_back(options_of(options[r], ranks));
        rows.push_back(number_of(options[r].payload_bytes));
    }
    std::vector<Session> sessions = Session::open_local_rows(below, {}, rows);
    std::vector<Exchange> all;
    for (size_t r = 0; r < sessions.size(); ++r)
        all.push_back(Exchange(std::make_shared<Impl>(std::move(sessions[r]), options[r], std::move(buffers[r]))));
    return all;
}

Exchange::Exchange(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Exchange::Exchange(Exchange&&) noexcept = default;
Exchange& Exchange::operator=(Exchange&& other) noexcept {
    if (this != &other) {
        if (impl_) impl_->session.close();
        impl_ = std::move(other.impl_);
    }
    return *this;
}
Exchange::~Exchange() {
    if (impl_) impl_->session.close();
}
void Exchange::close() {
    if (impl_) impl_->session.close();
}
Exchange::Impl& Exchange::impl() const {
    if (!impl_) refuse(Code::stale, "call on an exchange that was moved away.");
    return *impl_;
}
int Exchange::rank() const {
    return impl().session.rank();
}
int Exchange::size() const {
    return impl().session.size();
}
const ExchangeOptions& Exchange::options() const {
    return impl().options;
}
SessionStats Exchange::stats() const {
    return impl().session.stats();
}
Session& Exchange::session() {
    return impl().session;
}

Received Exchange::send(const SendArgs& args) {
    Impl& s = impl();
    const ExchangeOptions& o = s.options;
    DispatchArgs below{.tokens = args.items,
                       .topk_ids = args.expert_indices,
                       .tag = args.tag,
                       .timeout_ms = args.timeout_ms,
                       .send_counts = args.send_counts,
                       .recv_counts = args.recv_counts};
    if (const Status wrong = s.wrong_items(args); !wrong.ok())
        s.session.refuse_dispatch(wrong, args.tag, args.timeout_ms);  // on all ranks, in the words of an exchange
    if (s.as_they_are) {
        below.x = args.payloads[0];
    } else if (args.items > 0) {
        // Straight to where the other ranks read, if rows stay at home.
        auto* to = static_cast<std::byte*>(s.session.x_if_free(below.timeout_ms));
        if (!to) to = s.buffers.out.get();
        s.put_together(args, to);
        below.x = to;
    }

    Received r;
    r.batch_ = s.session.dispatch(below);
    r.exchange_ = impl_;
    r.parts_ = &s.parts.at;

    // The tables of the routing, as the engine has used it.
    const std::span<const int32_t> running = r.batch_.ep_recv_count();
    r.recv_counts_.resize(running.size());
    for (size_t i = 0; i < running.size(); ++i) r.recv_counts_[i] = running[i] - (i ? running[i - 1] : 0);
    const std::span<const int32_t> indices(args.expert_indices, static_cast<size_t>(args.items * o.topk));
    r.send_counts_.resize(static_cast<size_t>(o.experts));
    r.send_offsets_.resize(static_cast<size_t>(o.experts) + 1);
    count_experts(indices, r.send_counts_);
    offsets_of(r.send_counts_, r.send_offsets_);
    r.permutation_.resize(static_cast<size_t>(r.send_offsets_.back()));
    permutation_of(indices, r.send_offsets_, r.permutation_);
    return r;
}

Received Exchange::alltoallv(const AlltoallvArgs& args) {
    Impl& s = impl();
    if (s.options.experts != s.session.size() || s.options.topk != 1)
        refuse(Code::bad_input,
               fmt::format("alltoallv on an exchange with {} experts on {} ranks and topk {}; expected one expert "
                           "per rank and topk 1.",
                           s.options.experts, s.session.size(), s.options.topk));
    SendArgs below{.payloads = args.payloads, .recv_counts = args.recv_counts, .tag = args.tag, .timeout_ms = args.timeout_ms};
    s.indices.clear();
    const auto refuse_all = [&](const std::string& text) {
        s.session.refuse_dispatch(Status(Code::bad_input, fmt::format("rank {}: {}", s.session.rank(), text)), args.tag,
                                  args.timeout_ms);
    };
    if (!args.send_counts) refuse_all("send_counts is null.");
    for (int r = 0; r < s.session.size(); ++r) {
        const int64_t count = args.send_counts[r];
        if (count < 0) refuse_all(fmt::format("send_counts[{}] is {}; counts are 0 or more.", r, count));
        if (count > s.options.items_max - below.items)
            refuse_all(fmt::format("send_counts[{}] is {}, with {} items before it; allowed in all: {} (items_max).", r, count,
                                   below.items, s.options.items_max));
        s.indices.insert(s.indices.end(), static_cast<size_t>(count), r);
        below.items += count;
    }
    below.expert_indices = s.indices.data();
    return send(below);
}

void Exchange::send_back(Received& rows, const SendBackArgs& args) {
    Impl& s = impl();
    if (rows.exchange_ && rows.exchange_ != impl_) refuse(Code::stale, "send_back of rows that another exchange received.");
    const std::vector<int64_t> mine = std::move(rows.permutation_);
    auto* home = static_cast<std::byte*>(args.payloads[0]);  // null, where it is the only one, is refused below, on all ranks
    if (!s.as_they_are && (home || s.parts.at.size() > 1)) home = s.buffers.home.get();
    rows.exchange_.reset();
    s.session.combine(rows.batch_, {.rows = home, .timeout_ms = args.timeout_ms});
    if (s.as_they_are) return;
    for (const int64_t i : mine)
        for (size_t p = 0; p < s.parts.at.size(); ++p) {
            const auto bytes = static_cast<size_t>(s.options.payload_bytes[p]);
            if (auto* to = static_cast<std::byte*>(args.payloads[p]))
                std::memcpy(to + static_cast<size_t>(i) * bytes, home + i * s.parts.bytes + s.parts.at[p], bytes);
        }
}

// -------------------------------------------------------------------------------------------------------------- received

namespace {

int64_t part_at(const std::vector<int64_t>& parts, int p) {
    if (p < 0 || static_cast<size_t>(p) >= parts.size())
        refuse(Code::bad_input, fmt::format("payload {} of an exchange with {}.", p, parts.size()));
    return parts[static_cast<size_t>(p)];
}

}  // namespace

void Received::refuse_stale() const {
    if (!exchange_) refuse(Code::stale, "the rows of this send have been sent back, or moved away.");
}
const std::vector<int64_t>& Received::parts() const {
    refuse_stale();
    return *parts_;
}
int64_t Received::rows() const {
    return batch_.rows();
}
Received::Rows Received::payload(int p) const {
    const int64_t at = part_at(parts(), p);
    return {static_cast<const std::byte*>(batch_.expand_x()) + at, batch_.payload_bytes()};
}
const std::byte* Received::row(int p, int64_t i) const {
    const int64_t at = part_at(parts(), p);
    return batch_.row(i).payload + at;
}
Received::Answers Received::answer(int p) const {
    const int64_t at = part_at(parts(), p);
    return {static_cast<std::byte*>(batch_.y()) + at, batch_.payload_bytes()};
}
std::span<const int32_t> Received::source_info() const {
    return batch_.assist_info_for_combine();
}
std::span<const int64_t> Received::recv_counts() const {
    refuse_stale();
    return recv_counts_;
}
std::span<const int64_t> Received::recv_offsets() const {
    return batch_.expert_offsets();
}
std::span<const int64_t> Received::send_counts() const {
    refuse_stale();
    return send_counts_;
}
std::span<const int64_t> Received::send_offsets() const {
    refuse_stale();
    return send_offsets_;
}
std::span<const int64_t> Received::permutation() const {
    refuse_stale();
    return permutation_;
}
uint64_t Received::epoch() const {
    return batch_.epoch();
}

}  // namespace switchyard
