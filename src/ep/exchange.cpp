#include "ep/exchange.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/machine.hpp"

namespace switchyard::ep {
namespace {

// Below this many bytes of rows per call the rows stay in cache, and ordinary stores win; above, a streaming store saves
// the read of the line it overwrites.
constexpr int64_t stream_bytes_min = 2 << 20;

// Tokens a worker takes at a time: large enough to keep the counter quiet, small enough to share 8 tokens.
int64_t grain_of(const Rank& rank, int64_t items) {
    return std::clamp<int64_t>(items / (rank.workers.count() * 4), 1, 64);
}

struct Info {
    int32_t source, token, k;
    float weight;
};
static_assert(sizeof(Info) == 16);

// Stores rows at places in windows: through a pointer where the window can be reached, else by put.
class RowWriter {
 public:
    RowWriter(const Rank& rank, int64_t bytes_in_all)
        : rank_(rank),
          move_(bytes_in_all >= stream_bytes_min ? rank.kernels.stream : rank.kernels.copy),
          payload_bytes_(static_cast<size_t>(rank.window.row.payload_bytes)),
          scale_bytes_(static_cast<size_t>(rank.window.row.scale_bytes())) {}

    void to_final_place(uint64_t slot, RowPlace at, const std::byte* payload, const std::byte* scales, const Info& info) const {
        const auto row = static_cast<uint64_t>(at.row);
        const layout::Window& w = rank_.window;
        const uint64_t base = w.slot(slot);
        write(at.rank, base + w.expand_x + row * payload_bytes_, payload, payload_bytes_, move_);
        if (scale_bytes_) write(at.rank, base + w.scales + row * scale_bytes_, scales, scale_bytes_, rank_.kernels.copy);
        write(at.rank, base + w.source_info + row * 12, &info, 12, rank_.kernels.copy);
        if (w.shape.weights) write(at.rank, base + w.weights + row * 4, &info.weight, 4, rank_.kernels.copy);
    }

    void to_cell(int target, uint64_t cell, const std::byte* payload, const std::byte* scales, const Info& info) const {
        const layout::CellRow& c = rank_.window.cell;
        write(target, cell, payload, payload_bytes_, move_);
        if (scale_bytes_) write(target, cell + static_cast<uint64_t>(c.scales_at), scales, scale_bytes_, rank_.kernels.copy);
        write(target, cell + static_cast<uint64_t>(c.info_at), &info, sizeof info, rank_.kernels.copy);
    }

 private:
    void write(int target, uint64_t offset, const void* data, size_t bytes, void (*move)(void*, const void*, size_t)) const {
        if (std::byte* window = rank_.base[static_cast<size_t>(target)]) return move(window + offset, data, bytes);
        const Place place{target, offset};
        rank_.link.put({&place, 1}, data, bytes);
    }

    const Rank& rank_;
    void (*const move_)(void*, const void*, size_t);
    const size_t payload_bytes_;
    const size_t scale_bytes_;
};

// Encodes every token that has a used slot once, into its worker's own memory, and hands it to
// send(token, k, payload, scales, info) for each used slot: the row is written on from there while it is in cache.
template <class Send>
void each_row(Rank& rank, const DispatchArgs& args, Send send) {
    const layout::Window& w = rank.window;
    const int64_t topk = w.shape.topk;
    const int64_t stride = (args.row_stride ? args.row_stride : w.shape.hidden) * layout::token_bytes(w.shape.token);
    const RowFormat format = rank.options.dispatch_format();
    const auto* x = static_cast<const std::byte*>(args.x);
    rank.workers.split(
        args.tokens, grain_of(rank, args.tokens),
        [&](int64_t worker, int64_t first, int64_t last) {
            for (int64_t t = first; t < last; ++t) {
                const int32_t* ids = args.topk_ids + t * topk;
                const std::byte* payload = x + t * stride;
                const std::byte* scales = nullptr;
                bool encoded = format.format == Format::none;
                for (int64_t k = 0; k < topk; ++k) {
                    if (ids[k] < 0) continue;
                    if (!encoded) {
                        std::byte* scratch = rank.scratch[static_cast<size_t>(worker)].data();
                        std::byte* scratch_scales = scratch + w.cell.scales_at;
                        rank.kernels.encode(format, w.shape.token, payload, w.shape.hidden, scratch, scratch_scales);
                        payload = scratch;
                        scales = scratch_scales;
                        encoded = true;
                    }
                    const float weight = w.shape.weights ? args.topk_weights[t * topk + k] : 1.0F;
                    send(t, k, payload, scales, Info{rank.me(), static_cast<int32_t>(t), static_cast<int32_t>(k), weight});
                }
            }
        },
        [&](int64_t) { rank.kernels.fence(); });
}

// Counts the rows that were written.
void note_sent(Rank& rank, const Flight& flight) {
    const int64_t row_bytes = travelling_row_bytes(rank.window.row, rank.window.shape.weights);
    int64_t rows = 0, to_peers = 0;
    for (int p = 0; p < rank.ranks(); ++p) {
        const int64_t n = flight.rows_between(rank.me(), p);
        rows += n;
        if (p != rank.me()) to_peers += n;
    }
    rank.stats.rows_sent += static_cast<uint64_t>(rows);
    rank.stats.bytes_sent += static_cast<uint64_t>(rows * row_bytes);
    rank.stats.bytes_sent_peers += static_cast<uint64_t>(to_peers * row_bytes);
}

Status tags_differ(const Flight& flight, int first, uint64_t first_tag, int rank, uint64_t tag) {
    return {Code::mismatch,
            fmt::format("dispatch {}: rank {} calls it with tag {}, rank {} with tag {}. The ranks are not in the "
                        "same layer or step; make the same calls on all of them.",
                        flight.epoch, first, first_tag, rank, tag)};
}

// A row's source info, as it lies in this rank's window: another rank wrote it.
struct Source {
    int32_t rank, token, k;
    bool pad() const { return rank == -1; }
};
// A number that another process may be changing: read once, so that what is checked is what is used. Partner: none, any value
// is judged.
int32_t read_once(const std::byte* at) {
    return std::atomic_ref<int32_t>(*reinterpret_cast<int32_t*>(const_cast<std::byte*>(at))).load(std::memory_order_relaxed);
}
Source source_of(const Flight& flight, int64_t row) {
    const std::byte* at = flight.rank->own(flight.rank->window.slot(flight.slot) + flight.rank->window.source_info) + row * 12;
    return {read_once(at), read_once(at + 4), read_once(at + 8)};
}
// Whether it names a slot of a token that was dispatched. Checked before anything is addressed by it.
bool is_dispatched(const Flight& flight, const Source& s) {
    return s.rank >= 0 && s.rank < flight.rank->ranks() && s.token >= 0 &&
           s.token < flight.source_tokens[static_cast<size_t>(s.rank)] && s.k >= 0 && s.k < flight.rank->window.shape.topk;
}
Status bad_source(const Flight& flight, int64_t row, const Source& s) {
    return {Code::corrupt,
            fmt::format("epoch {}: source info of row {} is ({}, {}, {}), outside the tokens dispatched. A process of "
                        "this group does not follow the window format.",
                        flight.epoch, row, s.rank, s.token, s.k)};
}

}  // namespace

int64_t ranks_of_a_group(int64_t ranks) {
    const int64_t nodes = NumaMap().nodes();
    if (nodes > 1 && ranks % nodes == 0) return ranks / nodes;
    int64_t root = 1;
    while (root * root < ranks) ++root;
    return root;
}

layout::WindowShape shape_of(const Options& o, int64_t ranks) {
    return {.ranks = ranks,
            .depth = o.depth,
            .experts = o.experts,
            .experts_per_rank = experts_of(0, ranks, o.experts).count(),
            .hidden = o.hidden,
            .topk = o.topk,
            .tokens_max = o.tokens_max,
            .rows_max = o.rows_max,
            .cell_rows = o.cell_rows,
            .token = o.dtype,
            .dispatch = o.dispatch_quant,
            .combine = o.combine_quant,
            .weights = o.deliver_weights,
            .landing = o.landing,
            .group_ranks = o.group_ranks,
            .push = o.combine_path != CombinePath::read};
}

Status plan_window(Options& options, int64_t ranks, layout::Window* window) {
    if (options.landing == Landing::automatic) options.landing = Landing::packed;
    if (options.landing == Landing::in_place) options.group_ranks = ranks;
    if (options.landing == Landing::two_level && options.group_ranks == 0) options.group_ranks = ranks_of_a_group(ranks);
    if (options.landing == Landing::allgather || options.group_ranks == 0) options.group_ranks = 1;
    const int64_t experts_per_rank = experts_of(0, ranks, options.experts).count();
    const int64_t worst = options.tokens_max * options.topk * ranks + experts_per_rank * (options.expert_alignment - 1);
    if (options.rows_max == 0) options.rows_max = std::min(worst, (int64_t{1} << 31) - 1);
    const int64_t all = options.tokens_max * options.topk;
    if (options.cell_rows == 0 || (options.landing == Landing::padded && options.cell_rows > all)) options.cell_rows = all;
    *window = layout::window_of(shape_of(options, ranks));
    if (window->bytes != layout::Region::limit_exceeded) return {};
    return {Code::capacity, fmt::format("a window for {} rows of {} columns at depth {} does not fit an address space. Lower "
                                        "rows_max (0 = the worst case), tokens_max or depth.",
                                        options.rows_max, options.hidden, options.depth)};
}

Rank::Rank(Transport& link_in, const layout::Window& window_in, const quant::Kernels& kernels_in, Workers& workers_in,
           const Options& options_in, Turns turns_in)
    : link(link_in),
      window(window_in),
      kernels(kernels_in),
      workers(workers_in),
      options(options_in),
      placement(Placement::contiguous(link_in.size(), window_in.shape.experts)),
      turns(std::move(turns_in)),
      sent(static_cast<size_t>(window_in.shape.experts)),
      seen(static_cast<size_t>(window_in.shape.experts)) {
    base.resize(static_cast<size_t>(link.size()));
    left.resize(static_cast<size_t>(link.size()));
    const auto row = static_cast<size_t>(std::max(window.cell.stride, window.home_row.stride));
    scratch.assign(static_cast<size_t>(workers.count()), std::vector<std::byte>(row));
    row_pointers.assign(static_cast<size_t>(workers.count()), std::vector<const void*>(static_cast<size_t>(2 * options.topk)));
}

void Rank::sleep_at_random() {
    if (dice == 0) dice = static_cast<uint64_t>(now_ns()) * 2 + 1;
    dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
    if (dice % 2 == 0) return;  // half of the edges stay sharp
    const auto us = static_cast<int64_t>((dice >> 8) % static_cast<uint64_t>(options.jitter_us + 1));
    std::this_thread::sleep_for(std::chrono::microseconds(us));
}

Status Rank::connect() {
    bool all_reachable = true;
    for (int r = 0; r < ranks(); ++r) {
        base[static_cast<size_t>(r)] = link.reach(r);
        all_reachable = all_reachable && link.reach(r);
    }
    if (options.combine_path == CombinePath::automatic)
        options.combine_path = all_reachable ? CombinePath::read : CombinePath::push;
    const auto refuse = [](const char* what, const char* instead) {
        return Status(Code::bad_input, fmt::format("option {}, but the windows of other ranks cannot be loaded over this "
                                                   "transport; use {} or auto.",
                                                   what, instead));
    };
    if (options.combine_path == CombinePath::read && !all_reachable) return refuse("combine_path is read", "push");
    if (options.landing == Landing::in_place && !all_reachable) return refuse("landing is in_place", "packed");
    if (options.landing == Landing::two_level && !all_reachable) return refuse("landing is two_level", "packed");
    return {};
}

Rank::Holder Rank::holder_of(int source, int reader) const {
    const int group = group_of(reader);
    if (group == group_of(source)) return {source, window.shape.sources() == 1 ? 0 : source};
    const auto size = static_cast<int>(options.group_ranks);
    const int first = group * size;
    return {first + source % std::min(size, ranks() - first), source};  // spread over the group
}

void Flight::allocate(Rank& of) {
    rank = &of;
    const layout::WindowShape& s = of.window.shape;
    const auto ranks = static_cast<size_t>(s.ranks);
    const auto experts = static_cast<size_t>(s.experts);
    const auto local = static_cast<size_t>(of.placement.of_rank[static_cast<size_t>(of.me())].count());
    counts.resize(ranks * experts);
    expected.resize(ranks * ranks);
    source_tokens.resize(ranks);
    expert_first.resize(experts);
    rows_of.resize(ranks);
    lost.resize(ranks);
    if (of.options.partial) missing.resize(static_cast<size_t>(s.tokens_max));
    if (of.options.partial || !of.turns.empty()) slot_ids.resize(static_cast<size_t>(s.tokens_max * s.topk));
    places.resize(static_cast<size_t>(s.tokens_max * s.topk));
    next.resize(experts);
    ends.resize(experts);
    if (rows_lie_apart(of.options.landing)) groups_seen.resize(static_cast<size_t>(of.workers.count()) * ranks);
    local_counts.resize(local);
    expert_token_nums.resize(local);
    expert_offsets.resize(local + 1);
    ep_recv_count.resize(local * ranks);
}

int64_t Flight::rows_between(int source, int target) const {
    const ExpertRange range = rank->placement.of_rank[static_cast<size_t>(target)];
    int64_t sum = 0;
    for (int64_t e = range.first; e < range.last; ++e) sum += count(source, e);
    return sum;
}

void send_counts(Rank& rank, Flight& flight, const DispatchArgs& args) {
    const layout::Window& w = rank.window;
    const auto experts = static_cast<size_t>(w.shape.experts);
    const auto me = static_cast<size_t>(rank.me());
    const std::span<int32_t> mine(flight.counts.data() + me * experts, experts);
    count_rows(args.topk_ids, args.tokens * w.shape.topk, mine);

    const std::span<int32_t> expected(flight.expected.data() + me * static_cast<size_t>(rank.ranks()),
                                      static_cast<size_t>(rank.ranks()));
    for (size_t q = 0; q < expected.size(); ++q)
        expected[q] = args.recv_counts ? static_cast<int32_t>(args.recv_counts[q]) : -1;

    const layout::CountHead head{flight.epoch, args.tag, args.tokens, args.recv_counts != nullptr, {}};  // model: store_counts
    for (int p = 0; p < rank.ranks(); ++p) {
        const uint64_t at = w.count_row(flight.slot, rank.me());
        const Place head_place{p, at};
        const Place counts_place{p, at + sizeof head};
        rank.link.put({&head_place, 1}, &head, sizeof head);
        rank.link.put({&counts_place, 1}, mine.data(), mine.size_bytes());
        const Place expected_place{p, at + sizeof head + mine.size_bytes()};
        if (head.expects) rank.link.put({&expected_place, 1}, expected.data(), expected.size_bytes());
    }
}

Status take_counts(Rank& rank, Flight& flight, uint64_t tag) {
    const layout::Window& w = rank.window;
    const layout::WindowShape& s = w.shape;
    const auto experts = static_cast<size_t>(s.experts), ranks = static_cast<size_t>(s.ranks);
    int first = -1;  // member: all ranks compare with its tag, and tell the same
    uint64_t first_tag = 0;
    const auto differs = [&](int q, uint64_t its) {
        if (first < 0) first = q, first_tag = its;
        return its != first_tag;
    };
    for (int q = 0; q < rank.ranks(); ++q) {
        if (q == rank.me()) {
            flight.source_tokens[static_cast<size_t>(q)] = flight.tokens;
            if (!differs(q, tag)) continue;
            return tags_differ(flight, first, first_tag, q, tag);
        }
        int32_t* counts = flight.counts.data() + static_cast<size_t>(q) * experts;
        int32_t* expected = flight.expected.data() + static_cast<size_t>(q) * ranks;
        if (!rank.is_member(q)) {
            std::fill(counts, counts + experts, 0);
            std::fill(expected, expected + ranks, -1);
            flight.source_tokens[static_cast<size_t>(q)] = 0;
            continue;
        }
        layout::CountHead head;  // model: load_counts
        std::memcpy(&head, rank.own(w.count_row(flight.slot, q)), sizeof head);
        std::memcpy(counts, rank.own(w.count_row(flight.slot, q)) + sizeof head, 4 * experts);
        if (head.expects)
            std::memcpy(expected, rank.own(w.count_row(flight.slot, q)) + sizeof head + 4 * experts, 4 * ranks);
        else
            std::fill(expected, expected + ranks, -1);

        int64_t sum = 0;
        bool impossible = false;
        for (size_t e = 0; e < experts; ++e) {
            sum += counts[e];
            impossible = impossible || counts[e] < 0 || (s.padded() && counts[e] > s.cell_rows);
        }
        if (head.epoch != flight.epoch || head.tokens < 0 || head.tokens > s.tokens_max || impossible ||
            sum > head.tokens * s.topk)
            return {
                Code::corrupt,
                fmt::format("dispatch {}: the count row of rank {} says epoch {}, {} tokens, {} rows{}; expected epoch {}, "
                            "0..{} tokens of at most {} rows each. That process does not follow the window format.",
                            flight.epoch, q, head.epoch, head.tokens, sum,
                            impossible ? ", some negative or more than a cell holds" : "", flight.epoch, s.tokens_max, s.topk)};
        if (differs(q, head.tag)) return tags_differ(flight, first, first_tag, q, head.tag);
        flight.source_tokens[static_cast<size_t>(q)] = head.tokens;
    }
    for (int to = 0; to < rank.ranks(); ++to)
        for (int from = 0; from < rank.ranks(); ++from) {
            const int32_t wanted = flight.expected[static_cast<size_t>(to) * ranks + static_cast<size_t>(from)];
            if (wanted == -1 || wanted == flight.rows_between(from, to)) continue;
            return {Code::mismatch,
                    fmt::format("dispatch {}: rank {} sends {} rows to rank {}, which expects {} (recv_counts).", flight.epoch,
                                from, flight.rows_between(from, to), to, wanted)};
        }
    place_experts(rank.placement, flight.counts, rank.options.expert_alignment, flight.expert_first, flight.rows_of);
    for (int p = 0; p < rank.ranks(); ++p) {
        const int64_t rows = flight.rows_of[static_cast<size_t>(p)];
        if (rows <= s.rows_max) continue;
        return {Code::capacity,
                fmt::format("dispatch {}: rank {} would receive {} rows; its window holds {} (option rows_max). "
                            "Raise rows_max to at least {}, or leave it 0 for the worst case.",
                            flight.epoch, p, rows, s.rows_max, rows)};
    }
    return {};
}

void fill_places(Rank& rank, Flight& flight, const int32_t* ids) {
    place_rows(rank.placement, flight.counts, flight.expert_first, rank.me(), ids, flight.tokens * rank.window.shape.topk,
               flight.next, flight.places.data());
}

void fill_results(Rank& rank, Flight& flight) {
    const ExpertRange range = rank.placement.of_rank[static_cast<size_t>(rank.me())];
    const auto ranks = static_cast<size_t>(rank.ranks());
    const bool cumsum = rank.options.expert_token_nums == TokenNums::cumsum;
    flight.rows = flight.rows_of[static_cast<size_t>(rank.me())];
    int32_t running = 0;
    for (int64_t e = range.first; e < range.last; ++e) {
        const auto local = static_cast<size_t>(e - range.first);
        const int32_t before = running;
        for (size_t q = 0; q < ranks; ++q) {
            running += flight.count(static_cast<int>(q), e);
            flight.ep_recv_count[local * ranks + q] = running;
        }
        flight.local_counts[local] = running - before;
        flight.expert_token_nums[local] = cumsum ? running : running - before;
        flight.expert_offsets[local] = flight.expert_first[static_cast<size_t>(e)];
    }
    flight.expert_offsets.back() = flight.rows;
    rank.stats.rows_received += static_cast<uint64_t>(running);

    // Every rank has the count rows of all: each can tell the loads of the whole group without asking.
    const auto add = [&](size_t q, std::vector<uint64_t>& to) {
        const int32_t* counts = flight.counts.data() + q * to.size();
        for (size_t s = 0; s < to.size(); ++s) to[s] += static_cast<uint32_t>(counts[s]);
    };
    for (size_t q = 0; q < ranks; ++q) add(q, rank.seen);
    add(static_cast<size_t>(rank.me()), rank.sent);
    ++rank.seen_dispatches;
}

void send_rows(Rank& rank, Flight& flight, const DispatchArgs& args) {
    const int64_t topk = rank.window.shape.topk;
    const RowWriter writer(rank, args.tokens * topk * rank.window.row.payload_bytes);
    each_row(rank, args, [&](int64_t t, int64_t k, const std::byte* payload, const std::byte* scales, const Info& info) {
        // model: store_rows
        writer.to_final_place(flight.slot, flight.places[static_cast<size_t>(t * topk + k)], payload, scales, info);
    });
    note_sent(rank, flight);
}

void send_cells(Rank& rank, Flight& flight, const DispatchArgs& args) {
    const layout::Window& w = rank.window;
    const int64_t topk = w.shape.topk;
    std::fill(flight.next.begin(), flight.next.end(), 0);  // a place is just the number among my rows for that expert
    number_rows(rank.placement, args.topk_ids, args.tokens * topk, flight.next, flight.places.data());
    const RowWriter writer(rank, args.tokens * topk * w.row.payload_bytes);
    each_row(rank, args, [&](int64_t t, int64_t k, const std::byte* payload, const std::byte* scales, const Info& info) {
        const RowPlace place = flight.places[static_cast<size_t>(t * topk + k)];
        const int64_t local = args.topk_ids[t * topk + k] - rank.placement.of_rank[static_cast<size_t>(place.rank)].first;
        // model: store_cells
        writer.to_cell(place.rank, w.cell_at(flight.slot, local, rank.me(), place.row), payload, scales, info);
    });
    note_sent(rank, flight);
}

namespace {

// Copies rows that lie apart in this window to expand_x and its companions, in order. cell_at(local expert, source): window
// offset of the first of the rows of that expert from that source, which lie one behind the other.
template <class CellAt>
void place_received(Rank& rank, Flight& flight, CellAt cell_at) {
    const layout::Window& w = rank.window;
    const ExpertRange range = rank.placement.of_rank[static_cast<size_t>(rank.me())];
    const auto payload_bytes = static_cast<size_t>(w.row.payload_bytes);
    const auto scale_bytes = static_cast<size_t>(w.row.scale_bytes());
    std::byte* slot = rank.own(w.slot(flight.slot));
    auto* move = flight.rows * w.row.payload_bytes >= stream_bytes_min ? rank.kernels.stream : rank.kernels.copy;
    rank.workers.split(
        range.count() * rank.ranks(), 1,
        [&](int64_t, int64_t first, int64_t last) {
            for (int64_t pair = first; pair < last; ++pair) {
                const int64_t local = pair / rank.ranks();
                const auto source = static_cast<int>(pair % rank.ranks());
                const int32_t count = flight.count(source, range.first + local);
                int64_t row = flight.expert_first[static_cast<size_t>(range.first + local)];
                for (int q = 0; q < source; ++q) row += flight.count(q, range.first + local);
                const std::byte* cell = rank.own(cell_at(local, source));
                for (int64_t i = 0; i < count; ++i, ++row, cell += w.cell.stride) {
                    const auto at = static_cast<size_t>(row);
                    move(slot + w.expand_x + at * payload_bytes, cell, payload_bytes);  // model: load_cells
                    if (scale_bytes) std::memcpy(slot + w.scales + at * scale_bytes, cell + w.cell.scales_at, scale_bytes);
                    std::memcpy(slot + w.source_info + at * 12, cell + w.cell.info_at, 12);
                    if (w.shape.weights) std::memcpy(slot + w.weights + at * 4, cell + w.cell.info_at + 12, 4);
                }
            }
        },
        [&](int64_t) { rank.kernels.fence(); });
}

}  // namespace

void place_cells(Rank& rank, Flight& flight) {
    place_received(rank, flight, [&](int64_t local, int source) { return rank.window.cell_at(flight.slot, local, source, 0); });
}

void send_blocks(Rank& rank, Flight& flight, const DispatchArgs& args) {
    const layout::Window& w = rank.window;
    const int64_t topk = w.shape.topk;
    // Experts ascend with their owners, so rows by expert are rows by owner.
    int32_t first = 0;
    for (int64_t e = 0; e < w.shape.experts; ++e) {
        flight.next[static_cast<size_t>(e)] = first;
        first += flight.count(rank.me(), e);
    }
    number_rows(rank.placement, args.topk_ids, args.tokens * topk, flight.next, flight.places.data());
    // Packing goes through the cache, which the next step reads.
    const RowWriter pack(rank, 0);
    each_row(rank, args, [&](int64_t t, int64_t k, const std::byte* payload, const std::byte* scales, const Info& info) {
        const RowPlace place = flight.places[static_cast<size_t>(t * topk + k)];
        pack.to_cell(rank.me(), w.block_out_at(flight.slot, place.row), payload, scales, info);
    });

    // This rank's own block first, then the next ranks', so that not everybody writes to rank 0 at once.
    const auto stream = int64_t{first} * w.cell.stride >= stream_bytes_min;
    uint64_t to_peers = 0;
    for (int i = 0; i < rank.ranks(); ++i) {
        const int p = (rank.me() + i) % rank.ranks();
        int64_t out = 0, in = 0;
        for (int q = 0; q < p; ++q) out += flight.rows_between(rank.me(), q);
        for (int q = 0; q < rank.me(); ++q) in += flight.rows_between(q, p);
        const int64_t rows = flight.rows_between(rank.me(), p);
        if (rows == 0) continue;
        const std::byte* from = rank.own(w.block_out_at(flight.slot, out));
        const uint64_t to = w.block_in_at(flight.slot, in);
        const auto stride = static_cast<size_t>(w.cell.stride);
        if (p != rank.me()) to_peers += static_cast<uint64_t>(rows) * stride;
        if (std::byte* window = rank.base[static_cast<size_t>(p)]) {
            auto* move = stream ? rank.kernels.stream : rank.kernels.copy;
            rank.workers.split(
                rows, grain_of(rank, rows),
                [&](int64_t, int64_t begin, int64_t end) {
                    const size_t at = static_cast<size_t>(begin) * stride;
                    move(window + to + at, from + at, static_cast<size_t>(end - begin) * stride);  // model: store_blocks
                },
                [&](int64_t) { rank.kernels.fence(); });
        } else {
            const Place place{p, to};
            rank.link.put({&place, 1}, from, static_cast<size_t>(rows) * stride);
        }
    }
    rank.stats.rows_sent += static_cast<uint64_t>(first);
    rank.stats.bytes_sent += static_cast<uint64_t>(first) * static_cast<uint64_t>(w.cell.stride);
    rank.stats.bytes_sent_peers += to_peers;
}

void place_blocks(Rank& rank, Flight& flight) {
    const layout::Window& w = rank.window;
    const ExpertRange range = rank.placement.of_rank[static_cast<size_t>(rank.me())];
    place_received(rank, flight, [&](int64_t local, int source) {
        int64_t before = 0;
        for (int q = 0; q < source; ++q) before += flight.rows_between(q, rank.me());
        for (int64_t e = range.first; e < range.first + local; ++e) before += flight.count(source, e);
        return w.block_in_at(flight.slot, before);
    });
}

void offer_tokens(Rank& rank, Flight& flight, const DispatchArgs& args) {
    const layout::Window& w = rank.window;
    const int64_t topk = w.shape.topk;
    const RowFormat format = rank.options.dispatch_format();
    const auto payload_bytes = static_cast<size_t>(w.row.payload_bytes);
    const auto scale_bytes = static_cast<size_t>(w.row.scale_bytes());
    const auto ranks = static_cast<size_t>(rank.ranks());
    const int64_t stride = (args.row_stride ? args.row_stride : w.shape.hidden) * layout::token_bytes(w.shape.token);
    const auto* from = static_cast<const std::byte*>(args.x);
    const uint64_t slot = w.slot(flight.slot);
    const uint64_t own_token = w.x_token(rank.holder_of(rank.me(), rank.me()).copy);
    std::byte* x = rank.own(slot + w.x + own_token * payload_bytes);
    std::byte* scales = rank.own(slot + w.x_scales + own_token * scale_bytes);
    const bool there = from == x && (args.tokens <= 1 || stride == w.row.payload_bytes) && format.format == Format::none;

    // Encoded rows are made where this rank's own group reads them, and go on to other groups from there, out of the cache.
    const bool plain = format.format == Format::none;
    const int own_group = rank.group_of(rank.me());
    const bool is_one_group = rank.options.group_ranks >= rank.ranks();
    auto* move = args.tokens * w.row.payload_bytes >= stream_bytes_min ? rank.kernels.stream : rank.kernels.copy;
    // By a store wherever there can be one: with two_level the readers are others than the holder, and a flag raised for them
    // follows this rank's stores to every window, but its puts to theirs only.
    const auto send = [&](int target, uint64_t offset, const void* data, size_t bytes) {
        if (std::byte* window = rank.base[static_cast<size_t>(target)]) return move(window + offset, data, bytes);
        const Place place{target, offset};
        rank.link.put({&place, 1}, data, bytes);
    };
    std::fill(flight.groups_seen.begin(), flight.groups_seen.end(), 0);
    std::atomic<int64_t> kept{0}, sent{0};
    rank.workers.split(
        args.tokens, grain_of(rank, args.tokens),
        [&](int64_t worker, int64_t first, int64_t last) {
            const std::span<int32_t> seen(flight.groups_seen.data() + static_cast<size_t>(worker) * ranks, ranks);
            int64_t kept_here = 0, sent_here = 0;
            for (int64_t t = first; t < last; ++t) {
                const int32_t* ids = args.topk_ids + t * topk;
                const auto at = static_cast<size_t>(t);
                const std::byte* row = from + t * stride;
                bool is_kept = false;
                const auto keep = [&] {
                    if (is_kept) return;
                    is_kept = true;
                    // model: store_x
                    if (!plain)
                        rank.kernels.encode(format, w.shape.token, row, w.shape.hidden, x + at * payload_bytes,
                                            scales + at * scale_bytes);
                    else if (!there)
                        rank.kernels.copy(x + at * payload_bytes, row, payload_bytes);
                };
                for (int64_t k = 0; k < topk; ++k) {
                    if (ids[k] < 0) continue;
                    if (is_one_group) {
                        keep();
                        kept_here += !there;
                        break;
                    }
                    const int owner = rank.placement.owner[static_cast<size_t>(ids[k])];
                    const int group = rank.group_of(owner);
                    if (std::exchange(seen[static_cast<size_t>(group)], static_cast<int32_t>(t + 1)) == t + 1) continue;
                    if (!plain || group == own_group) keep();
                    if (group == own_group) {
                        ++kept_here;
                        continue;
                    }
                    const Rank::Holder to = rank.holder_of(rank.me(), owner);
                    const uint64_t token = w.x_token(to.copy) + at;
                    send(to.rank, slot + w.x + token * payload_bytes, plain ? row : x + at * payload_bytes, payload_bytes);
                    if (scale_bytes)
                        send(to.rank, slot + w.x_scales + token * scale_bytes, scales + at * scale_bytes, scale_bytes);
                    ++sent_here;
                }
            }
            kept.fetch_add(kept_here, std::memory_order_relaxed);  // read after the workers have been joined
            sent.fetch_add(sent_here, std::memory_order_relaxed);
        },
        [&](int64_t) { rank.kernels.fence(); });

    // The ids and weights whole, once to each group; they tell its ranks which tokens there are theirs.
    const auto slots = static_cast<size_t>(args.tokens * topk);
    const auto slot_bytes = slots * static_cast<size_t>(travelling_slot_bytes(w.shape.weights));
    uint64_t to_peers = static_cast<uint64_t>(sent.load(std::memory_order_relaxed)) * (payload_bytes + scale_bytes);
    for (int reader = 0; slots && reader < rank.ranks(); reader += static_cast<int>(rank.options.group_ranks)) {
        const Rank::Holder to = rank.holder_of(rank.me(), reader);
        send(to.rank, slot + w.x_ids + w.x_slot(to.copy) * 4, args.topk_ids, 4 * slots);
        if (w.shape.weights) send(to.rank, slot + w.x_weights + w.x_slot(to.copy) * 4, args.topk_weights, 4 * slots);
        if (to.rank != rank.me()) to_peers += slot_bytes;
    }
    rank.kernels.fence();

    rank.stats.rows_sent +=
        static_cast<uint64_t>(std::count_if(args.topk_ids, args.topk_ids + slots, [](int32_t id) { return id >= 0; }));
    rank.stats.bytes_sent_peers += to_peers;
    rank.stats.bytes_sent +=
        to_peers + slot_bytes + static_cast<uint64_t>(kept.load(std::memory_order_relaxed)) * (payload_bytes + scale_bytes);
}

Status find_sources(Rank& rank, Flight& flight) {
    const layout::Window& w = rank.window;
    const ExpertRange range = rank.placement.of_rank[static_cast<size_t>(rank.me())];
    const auto topk = static_cast<uint32_t>(w.shape.topk);
    const uint64_t slot = w.slot(flight.slot);
    std::byte* infos = rank.own(slot + w.source_info);
    std::byte* weights = rank.own(slot + w.weights);
    // Of each local expert: the next row, and the first row that no longer belongs to the source at hand.
    const std::span<int32_t> next(flight.next), end(flight.ends);
    for (int64_t e = range.first; e < range.last; ++e)
        next[static_cast<size_t>(e)] = end[static_cast<size_t>(e)] =
            static_cast<int32_t>(flight.expert_first[static_cast<size_t>(e)]);
    for (int q = 0; q < rank.ranks(); ++q) {
        int64_t expected = 0;
        for (int64_t e = range.first; e < range.last; ++e) {
            expected += flight.count(q, e);
            end[static_cast<size_t>(e)] += flight.count(q, e);
        }
        if (expected == 0) continue;
        const Rank::Holder holder = rank.holder_of(q, rank.me());
        const std::byte* home = rank.base[static_cast<size_t>(holder.rank)] + slot;
        const auto* ids = reinterpret_cast<const int32_t*>(home + w.x_ids) + w.x_slot(holder.copy);
        const std::byte* its_weights = home + w.x_weights + w.x_slot(holder.copy) * 4;
        const auto slots = static_cast<uint32_t>(flight.source_tokens[static_cast<size_t>(q)] * w.shape.topk);
        const auto differs = [&] {
            return Status(Code::corrupt, fmt::format("dispatch {}: the topk_ids of rank {} are not those it counted. A process "
                                                     "of this group does not follow the window format.",
                                                     flight.epoch, q));
        };
        int64_t found = 0;
        constexpr uint32_t block = 512;
        uint16_t hits[block];
        for (uint32_t start = 0; start < slots; start += block) {
            const uint32_t n = std::min(block, slots - start);
            // Without a branch: one id in R is a hit, at random.
            uint32_t hit = 0;
            for (uint32_t i = 0; i < n; ++i) {
                hits[hit] = static_cast<uint16_t>(i);
                hit += static_cast<uint32_t>(ids[start + i]) - static_cast<uint32_t>(range.first) <
                       static_cast<uint32_t>(range.count());
            }
            for (uint32_t h = 0; h < hit; ++h) {
                const uint32_t i = start + hits[h];
                const int32_t e = read_once(reinterpret_cast<const std::byte*>(ids + i));  // again: it may have been changed
                if (e < range.first || e >= range.last || next[static_cast<size_t>(e)] >= end[static_cast<size_t>(e)])
                    return differs();
                const auto row = static_cast<size_t>(next[static_cast<size_t>(e)]++);
                const int32_t info[3] = {q, static_cast<int32_t>(i / topk), static_cast<int32_t>(i % topk)};
                std::memcpy(infos + row * 12, info, 12);
                if (w.shape.weights) std::memcpy(weights + row * 4, its_weights + size_t{i} * 4, 4);
            }
            found += hit;
        }
        if (found != expected) return differs();
    }
    return {};
}

Status find_row(const Flight& flight, int64_t row, ExpertBatch::Row* found) {
    const Rank& rank = *flight.rank;
    const layout::Window& w = rank.window;
    const uint64_t slot = w.slot(flight.slot);
    const auto at = static_cast<uint64_t>(row);
    const auto payload_bytes = static_cast<uint64_t>(w.row.payload_bytes);
    const auto scale_bytes = static_cast<uint64_t>(w.row.scale_bytes());
    const Source source = source_of(flight, row);
    if (source.pad()) {  // zeroes in this rank's own expand_x
        *found = {rank.own(slot + w.expand_x + at * payload_bytes), rank.own(slot + w.scales + at * scale_bytes)};
    } else if (is_dispatched(flight, source)) {
        const Rank::Holder holder = rank.holder_of(source.rank, rank.me());
        const std::byte* home = rank.base[static_cast<size_t>(holder.rank)] + slot;
        const uint64_t token = w.x_token(holder.copy) + static_cast<uint64_t>(source.token);
        *found = {home + w.x + token * payload_bytes, home + w.x_scales + token * scale_bytes};  // model: load_x
    } else {
        return bad_source(flight, row, source);
    }
    if (!scale_bytes) found->scales = nullptr;
    return {};
}

Status materialise(Rank& rank, Flight& flight) {
    if (flight.materialised || !rows_lie_apart(rank.options.landing)) return {};
    const layout::Window& w = rank.window;
    const auto payload_bytes = static_cast<size_t>(w.row.payload_bytes);
    const auto scale_bytes = static_cast<size_t>(w.row.scale_bytes());
    std::byte* slot = rank.own(w.slot(flight.slot));
    auto* move = flight.rows * w.row.payload_bytes >= stream_bytes_min ? rank.kernels.stream : rank.kernels.copy;
    std::atomic<int64_t> bad_row{-1};
    rank.workers.split(
        flight.rows, grain_of(rank, flight.rows),
        [&](int64_t, int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                ExpertBatch::Row from;
                if (!find_row(flight, i, &from).ok()) {
                    bad_row.store(i, std::memory_order_relaxed);  // read after the workers have been joined
                    return;
                }
                std::byte* to = slot + w.expand_x + static_cast<size_t>(i) * payload_bytes;
                if (to == from.payload) continue;
                move(to, from.payload, payload_bytes);  // model: load_x_materialise
                if (scale_bytes) std::memcpy(slot + w.scales + static_cast<size_t>(i) * scale_bytes, from.scales, scale_bytes);
            }
        },
        [&](int64_t) { rank.kernels.fence(); });
    ExpertBatch::Row unused;
    if (const int64_t row = bad_row.load(std::memory_order_relaxed); row >= 0) return find_row(flight, row, &unused);
    flight.materialised = true;
    return {};
}

void blank_rows_of(Rank& rank, Flight& flight, int source) {
    const layout::Window& w = rank.window;
    const ExpertRange range = rank.placement.of_rank[static_cast<size_t>(rank.me())];
    std::byte* slot = rank.own(w.slot(flight.slot));
    for (int64_t e = range.first; e < range.last; ++e) {
        int64_t first = flight.expert_first[static_cast<size_t>(e)];
        for (int q = 0; q < source; ++q) first += flight.count(q, e);
        const auto at = static_cast<size_t>(first), n = static_cast<size_t>(flight.count(source, e));
        std::memset(slot + w.expand_x + at * static_cast<size_t>(w.row.payload_bytes), 0,
                    n * static_cast<size_t>(w.row.payload_bytes));
        std::memset(slot + w.scales + at * static_cast<size_t>(w.row.scale_bytes()), 0,
                    n * static_cast<size_t>(w.row.scale_bytes()));
        std::memset(slot + w.source_info + at * 12, 0xFF, n * 12);
        if (w.shape.weights) std::memset(slot + w.weights + at * 4, 0, n * 4);
    }
}

const int32_t* slots_of_ids(const Rank& rank, Flight& flight, const DispatchArgs& args) {
    const bool some_left = rank.options.partial && rank.generation > 0;
    if (rank.turns.empty() && !some_left) return args.topk_ids;
    const int64_t topk = rank.window.shape.topk;
    int32_t* slots = flight.slot_ids.data();
    take_turns(rank.turns, rank.placement, rank.left, args.topk_ids, args.tokens * topk, flight.next, slots);
    for (int64_t t = 0; some_left && t < args.tokens; ++t) {
        int32_t missing = 0;
        for (int64_t i = t * topk; i < (t + 1) * topk; ++i) missing += args.topk_ids[i] >= 0 && slots[i] < 0;
        flight.missing[static_cast<size_t>(t)] = missing;
    }
    return slots;
}

void write_pad_rows(Rank& rank, const Flight& flight) {
    if (rank.options.expert_alignment == 1) return;
    const layout::Window& w = rank.window;
    const ExpertRange range = rank.placement.of_rank[static_cast<size_t>(rank.me())];
    std::byte* slot = rank.own(w.slot(flight.slot));
    for (int64_t e = range.first; e < range.last; ++e) {
        int64_t first = flight.expert_first[static_cast<size_t>(e)];
        for (int q = 0; q < rank.ranks(); ++q) first += flight.count(q, e);
        const int64_t last = flight.expert_offsets[static_cast<size_t>(e - range.first + 1)];
        const auto at = static_cast<size_t>(first);
        const auto n = static_cast<size_t>(last - first);
        if (n == 0) continue;
        const auto zero = [&](uint64_t part, int64_t bytes, int value) {
            std::memset(slot + part + at * static_cast<size_t>(bytes), value, n * static_cast<size_t>(bytes));
        };
        zero(w.expand_x, w.row.payload_bytes, 0);
        zero(w.scales, w.row.scale_bytes(), 0);
        zero(w.source_info, 12, 0xFF);
        if (w.shape.weights) zero(w.weights, 4, 0);
    }
}

void place_y(Rank& rank, Flight& flight, const void* y) {
    const layout::Window& w = rank.window;
    const int64_t bytes = w.shape.hidden * layout::token_bytes(w.shape.token);
    std::byte* to = rank.own(w.slot(flight.slot) + w.y);
    auto* move = flight.rows * bytes >= stream_bytes_min ? rank.kernels.stream : rank.kernels.copy;
    if (y == to) return;
    rank.workers.split(
        flight.rows, 64,
        [&](int64_t, int64_t first, int64_t last) {
            // model: store_y
            move(to + first * bytes, static_cast<const std::byte*>(y) + first * bytes,
                 static_cast<size_t>((last - first) * bytes));
        },
        [&](int64_t) { rank.kernels.fence(); });
}

Status push_home(Rank& rank, Flight& flight, const void* y) {
    const layout::Window& w = rank.window;
    const RowFormat wire = rank.options.combine_format();
    const int64_t bytes = w.shape.hidden * layout::token_bytes(w.shape.token);
    const auto* rows = static_cast<const std::byte*>(y);
    auto* move = flight.rows * w.wire.payload_bytes >= stream_bytes_min ? rank.kernels.stream : rank.kernels.copy;
    std::atomic<int64_t> bad_row{-1};
    rank.workers.split(
        flight.rows, grain_of(rank, flight.rows),
        [&](int64_t worker, int64_t first, int64_t last) {
            std::byte* scratch = rank.scratch[static_cast<size_t>(worker)].data();
            for (int64_t i = first; i < last; ++i) {
                const Source source = source_of(flight, i);
                if (source.pad()) continue;
                if (!is_dispatched(flight, source)) {
                    bad_row.store(i, std::memory_order_relaxed);  // read after the workers have been joined
                    return;
                }
                const std::byte* payload = rows + i * bytes;
                if (wire.format != Format::none) {
                    rank.kernels.encode(wire, w.shape.token, payload, w.shape.hidden, scratch, scratch + w.home_row.scales_at);
                    payload = scratch;
                }
                const uint64_t home = w.home_at(flight.slot, source.token, source.k);  // model: store_home
                const auto home_bytes = wire.format == Format::none
                                            ? static_cast<size_t>(w.wire.payload_bytes)
                                            : static_cast<size_t>(w.home_row.scales_at + w.wire.scale_bytes());
                if (std::byte* window = rank.base[static_cast<size_t>(source.rank)]) {
                    move(window + home, payload, home_bytes);
                } else {
                    const Place place{source.rank, home};
                    rank.link.put({&place, 1}, payload, home_bytes);
                }
            }
        },
        [&](int64_t) { rank.kernels.fence(); });
    const int64_t pushed = flight.ep_recv_count.empty() ? 0 : flight.ep_recv_count.back();  // without pad rows
    rank.stats.bytes_home += static_cast<uint64_t>(pushed * (w.wire.payload_bytes + w.wire.scale_bytes()));
    if (const int64_t row = bad_row.load(std::memory_order_relaxed); row >= 0)
        return bad_source(flight, row, source_of(flight, row));
    return {};
}

namespace {

// For each token: point at its rows by where(place, token, k), then sum them.
template <class Where>
void sum_rows(Rank& rank, Flight& flight, const CombineArgs& args, bool encoded, Where where) {
    const layout::Window& w = rank.window;
    const int64_t topk = w.shape.topk;
    const int64_t bytes = w.shape.hidden * layout::token_bytes(w.shape.token);
    rank.workers.split(
        flight.tokens, grain_of(rank, flight.tokens),
        [&](int64_t worker, int64_t first, int64_t last) {
            const void** rows = rank.row_pointers[static_cast<size_t>(worker)].data();
            const void** scales = rows + topk;
            for (int64_t t = first; t < last; ++t) {
                for (int64_t k = 0; k < topk; ++k) {
                    const RowPlace place = flight.places[static_cast<size_t>(t * topk + k)];
                    const bool is_there = place.rank >= 0 && flight.lost[static_cast<size_t>(place.rank)] == 0;
                    rows[k] = is_there ? where(place, t, k) : nullptr;
                    scales[k] = rows[k] && encoded ? static_cast<const std::byte*>(rows[k]) + w.home_row.scales_at : nullptr;
                }
                const quant::CombineInput input{
                    .token = w.shape.token,
                    .wire = rank.options.combine_format(),
                    .encoded = encoded,
                    .rows = rows,
                    .scales = scales,
                    .weights = args.topk_weights ? args.topk_weights + t * topk : nullptr,
                    .topk = topk,
                    .shared = args.shared ? static_cast<const std::byte*>(args.shared) + t * bytes : nullptr};
                rank.kernels.combine(input, w.shape.hidden, static_cast<std::byte*>(args.out) + t * bytes);
            }
        },
        [](int64_t) {});
}

}  // namespace

void sum_read(Rank& rank, Flight& flight, const CombineArgs& args) {
    const layout::Window& w = rank.window;
    const auto bytes = static_cast<size_t>(w.shape.hidden * layout::token_bytes(w.shape.token));
    const uint64_t y = w.slot(flight.slot) + w.y;  // model: load_y
    sum_rows(rank, flight, args, false, [&](RowPlace place, int64_t, int64_t) {
        return rank.base[static_cast<size_t>(place.rank)] + y + static_cast<size_t>(place.row) * bytes;
    });
    int64_t rows = 0;
    for (int64_t i = 0; i < flight.tokens * w.shape.topk; ++i) rows += flight.places[static_cast<size_t>(i)].rank >= 0;
    rank.stats.bytes_home += static_cast<uint64_t>(rows) * bytes;
}

void sum_home(Rank& rank, Flight& flight, const CombineArgs& args) {
    const layout::Window& w = rank.window;
    const bool encoded = rank.options.combine_quant != Format::none;
    sum_rows(rank, flight, args, encoded,
             // model: load_home
             [&](RowPlace, int64_t token, int64_t k) { return rank.own(w.home_at(flight.slot, token, k)); });
}

void bring_rows(Rank& rank, Flight& flight, const CombineArgs& args) {
    const layout::Window& w = rank.window;
    const int64_t topk = w.shape.topk;
    const auto bytes = static_cast<size_t>(w.shape.hidden * layout::token_bytes(w.shape.token));
    const bool at_home = rank.options.combine_path == CombinePath::push;
    const RowFormat wire = rank.options.combine_format();
    const uint64_t y = w.slot(flight.slot) + w.y;
    const int64_t slots = flight.tokens * topk;
    std::atomic<int64_t> brought{0};
    rank.workers.split(
        slots, grain_of(rank, slots),
        [&](int64_t, int64_t first, int64_t last) {
            int64_t mine = 0;
            for (int64_t i = first; i < last; ++i) {
                const RowPlace place = flight.places[static_cast<size_t>(i)];
                if (place.rank < 0 || flight.lost[static_cast<size_t>(place.rank)] != 0) continue;
                const std::byte* row =
                    at_home ? rank.own(w.home_at(flight.slot, i / topk, i % topk))
                            : rank.base[static_cast<size_t>(place.rank)] + y + static_cast<size_t>(place.row) * bytes;
                std::byte* to = static_cast<std::byte*>(args.rows) + static_cast<size_t>(i) * bytes;
                ++mine;
                if (wire.format == Format::none) {
                    std::memcpy(to, row, bytes);
                    continue;
                }
                const void* rows = row;
                const void* scales = row + w.home_row.scales_at;
                rank.kernels.combine({.token = w.shape.token,
                                      .wire = wire,
                                      .encoded = at_home,
                                      .rows = &rows,
                                      .scales = at_home ? &scales : nullptr,
                                      .weights = nullptr,
                                      .topk = 1,
                                      .shared = nullptr},
                                     w.shape.hidden, to);
            }
            brought.fetch_add(mine, std::memory_order_relaxed);  // read after the workers have been joined
        },
        [](int64_t) {});
    if (!at_home) rank.stats.bytes_home += static_cast<uint64_t>(brought.load(std::memory_order_relaxed)) * bytes;
}

}  // namespace switchyard::ep
