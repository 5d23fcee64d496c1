#include "switchyard/weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace switchyard {
namespace {

[[noreturn]] void refuse(Code code, std::string text) {
    throw Error(Status(code, std::move(text)));
}

int64_t ceil_div(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}

// One chunk that a rank sends: the `chunk`th of an old local slot, to a slot of the new table.
struct Item {
    int64_t old_local;
    int32_t slot;
    int64_t chunk;
};

int64_t local_slot_of(const PlacementTable& t, int64_t rank, int32_t expert) {
    const ExpertRange range = experts_of(rank, t.ranks, t.slots());
    const auto first = t.expert_of.begin() + range.first;
    return std::find(first, t.expert_of.begin() + range.last, expert) - first;
}

}  // namespace

Options weight_session_options(const PlacementTable& to, int64_t expert_bytes, int64_t chunk_bytes, int64_t chunks) {
    if (expert_bytes < 1 || chunk_bytes < 1 || chunks < 1)
        refuse(
            Code::bad_input,
            fmt::format("weight_session_options: experts of {} bytes in chunks of {}, {} a round; allowed: 1 or more of each.",
                        expert_bytes, chunk_bytes, chunks));
    Options o;
    o.dtype = TokenType::f32;
    o.hidden = ceil_div(std::min(chunk_bytes, expert_bytes), 4);
    o.topk = 1;
    o.experts = to.slots();
    o.tokens_max = chunks;
    o.landing = Landing::in_place;
    return o;
}

WeightTransfer move_weights(Session& mover, const PlacementTable& from, const PlacementTable& to, int64_t expert_bytes,
                            const void* old_weights, void* new_weights) {
    const Options& o = mover.options();
    const int64_t me = mover.rank();
    // What this rank finds wrong the others hear of in the dispatch that they are in.
    const auto refuse_all = [&](Code code, std::string text) {
        mover.refuse_dispatch(Status(code, fmt::format("move_weights, rank {}: {}", me, text)), 0, 0);
    };
    for (const PlacementTable* table : {&from, &to})
        if (const Status s = table->check(); !s.ok()) refuse_all(s.code(), s.text());
    if (from.ranks != to.ranks || from.experts != to.experts)
        refuse_all(Code::bad_input, fmt::format("from a table of {} ranks and {} experts to one of {} and {}; give two of one "
                                                "group.",
                                                from.ranks, from.experts, to.ranks, to.experts));
    if (expert_bytes < 1) refuse_all(Code::bad_input, fmt::format("expert_bytes is {}; allowed: 1 or more.", expert_bytes));
    if (mover.size() != to.ranks || o.experts != to.slots() || o.topk != 1 || o.dtype != TokenType::f32 ||
        o.dispatch_quant != Format::none || o.expert_alignment != 1 || o.tokens_max < 1 ||
        mover.loads().slots.size() != to.expert_of.size())
        refuse_all(
            Code::bad_input,
            fmt::format("the session is of {} ranks and {} experts with topk {}; the table has {} ranks and {} slots. Open "
                        "it with weight_session_options(to, expert_bytes) and without a table.",
                        mover.size(), o.experts, o.topk, to.ranks, to.slots()));
    const std::vector<WeightMove> moves = weight_moves(from, to);
    const ExpertRange old_range = experts_of(me, from.ranks, from.slots()), new_range = experts_of(me, to.ranks, to.slots());
    if ((old_range.count() > 0 && !old_weights) || (new_range.count() > 0 && !new_weights))
        refuse_all(Code::bad_input,
                   fmt::format("it has {} slots before and {} after; weights are null.", old_range.count(), new_range.count()));
    const auto* from_bytes = static_cast<const std::byte*>(old_weights);
    auto* to_bytes = static_cast<std::byte*>(new_weights);
    const int64_t chunk_bytes = o.hidden * 4, chunks = ceil_div(expert_bytes, chunk_bytes);
    const auto bytes_of = [&](int64_t chunk) {
        return static_cast<size_t>(std::min(chunk_bytes, expert_bytes - chunk * chunk_bytes));
    };

    WeightTransfer done;
    std::vector<Item> items;
    std::vector<int64_t> items_of(static_cast<size_t>(to.ranks));
    for (const WeightMove& m : moves) {
        const bool moves_away = m.source != m.target;
        if (moves_away) items_of[static_cast<size_t>(m.source)] += chunks;
        if (m.source != me) continue;
        const int64_t old_local = local_slot_of(from, me, m.expert);
        if (moves_away) {
            for (int64_t c = 0; c < chunks; ++c) items.push_back({old_local, m.slot, c});
        } else {
            std::memcpy(to_bytes + (m.slot - new_range.first) * expert_bytes, from_bytes + old_local * expert_bytes,
                        static_cast<size_t>(expert_bytes));
            done.kept += expert_bytes;
        }
    }
    // As many rounds on every rank, and at least one: it compares what the ranks want by the tag.
    done.rounds = std::max<int64_t>(1, ceil_div(*std::max_element(items_of.begin(), items_of.end()), o.tokens_max));
    const uint64_t tag = std::max<uint64_t>(1, (from.hash() * 3 ^ to.hash()) + static_cast<uint64_t>(expert_bytes));

    std::vector<std::byte> staging;  // where the session has no place of its own for tokens
    std::vector<int32_t> ids;
    std::vector<int64_t> next_chunk(static_cast<size_t>(new_range.count()));
    for (int64_t round = 0; round < done.rounds; ++round) {
        const auto mine = static_cast<int64_t>(items.size());
        const int64_t first = std::min(round * o.tokens_max, mine), last = std::min(first + o.tokens_max, mine);
        int64_t timeout_ms = 0;
        auto* x = static_cast<std::byte*>(mover.x_if_free(timeout_ms));
        if (!x) staging.resize(static_cast<size_t>((last - first) * chunk_bytes)), x = staging.data();
        ids.clear();
        for (int64_t i = first; i < last; ++i) {
            const Item& item = items[static_cast<size_t>(i)];
            const size_t n = bytes_of(item.chunk);
            std::byte* row = x + (i - first) * chunk_bytes;
            std::memcpy(row, from_bytes + item.old_local * expert_bytes + item.chunk * chunk_bytes, n);
            std::memset(row + n, 0, static_cast<size_t>(chunk_bytes) - n);
            ids.push_back(item.slot);
            done.sent += static_cast<int64_t>(n);
        }
        // Rows of a slot come from one rank, in the order in which it sends its chunks. The batch is dropped: nothing goes
        // home.
        const ExpertBatch batch =
            mover.dispatch({.x = x, .tokens = last - first, .topk_ids = ids.data(), .tag = tag, .timeout_ms = timeout_ms});
        for (int64_t local = 0; local < new_range.count(); ++local) {
            int64_t& chunk = next_chunk[static_cast<size_t>(local)];
            for (int64_t i = batch.expert_offsets()[static_cast<size_t>(local)];
                 i < batch.expert_offsets()[static_cast<size_t>(local) + 1]; ++i, ++chunk) {
                if (chunk >= chunks)
                    refuse(Code::corrupt, fmt::format("move_weights: slot {} of rank {} received too much.", local, me));
                std::memcpy(to_bytes + local * expert_bytes + chunk * chunk_bytes, batch.row(i).payload, bytes_of(chunk));
                done.received += static_cast<int64_t>(bytes_of(chunk));
            }
        }
    }
    for (const WeightMove& m : moves)
        if (m.target == me && m.source != me && next_chunk[static_cast<size_t>(m.slot - new_range.first)] != chunks)
            refuse(Code::corrupt, fmt::format("move_weights: slot {} received {} of {} chunks from rank {}.", m.slot,
                                              next_chunk[static_cast<size_t>(m.slot - new_range.first)], chunks, m.source));
    return done;
}

}  // namespace switchyard
