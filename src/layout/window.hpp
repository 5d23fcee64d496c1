// The window of a rank: where everything lies, byte by byte (docs/window_format.md).
//
//   header | bell | member lines [R] | flag lines [D][R] | reasons [2][D][R] | slot 0 | slot 1 | ...
//   slot:    count rows [R] | expand_x [rows] | scales [rows] | source info [rows] | weights [rows] | y [rows]
//            | home rows [tokens_max * K] | landing cells [L][R][cell rows] | blocks out [tokens_max * K], in [rows]
//            | x rows [S][tokens_max], x scales, x ids, x weights: tokens of S ranks
//
// The first line depends on ranks and depth only. Every rank's window has the same layout. Slots and their parts start on
// pages. Constant arithmetic only, for host and device.
#pragma once

#include "layout/region.hpp"
#include "layout/row.hpp"
#include "layout/state.hpp"

namespace switchyard::layout {

inline constexpr uint64_t window_magic = 0x4452415943545753;  // "SWTCYARD" in memory order
inline constexpr uint32_t window_version = 4;
inline constexpr uint64_t page_bytes = 4096;
inline constexpr uint64_t line_bytes = 64;

/// Everything that decides the layout; equal on all ranks.
struct WindowShape {
    int64_t ranks;
    int64_t depth;
    int64_t experts;
    int64_t experts_per_rank;  ///< most of any rank
    int64_t hidden;
    int64_t topk;
    int64_t tokens_max;
    int64_t rows_max;   ///< rows a rank can receive, pad rows included
    int64_t cell_rows;  ///< rows of a landing cell: what one rank can send to one expert
    TokenType token;
    Format dispatch;
    Format combine;
    bool weights;         ///< topk weights travel with the rows
    Landing landing;      ///< chosen, not automatic
    int64_t group_ranks;  ///< of landing two_level; decides who writes what where, not how much
    bool push;            ///< home rows exist

    SY_HD constexpr bool padded() const { return landing == Landing::padded; }     ///< landing cells exist
    SY_HD constexpr bool blocks() const { return landing == Landing::alltoallv; }  ///< blocks exist
    /// S, ranks whose tokens there is room for: 1 (the owner's), all, or 0: x rows do not exist.
    SY_HD constexpr int64_t sources() const {
        if (landing == Landing::in_place) return 1;
        return landing == Landing::allgather || landing == Landing::two_level ? ranks : 0;
    }
};

/// First page of a window, written by its owner when the session opens.
struct WindowHeader {
    uint64_t magic;
    uint32_t version;
    uint32_t header_bytes;
    uint64_t window_bytes;
    int64_t process;  ///< process id of the owner, as it sees itself
    int32_t rank;
    int32_t token, dispatch, combine;
    int32_t weights, landing, push, group_ranks;
    int64_t ranks, depth, experts, experts_per_rank, hidden, topk, tokens_max, rows_max, cell_rows;
};
static_assert(sizeof(WindowHeader) == 136 && sizeof(WindowHeader) <= page_bytes);

/// One row in a landing cell: payload, scales, source info (rank, token, k, weight bits), padded to a line.
struct CellRow {
    int64_t scales_at;  ///< bytes from the start of the row
    int64_t info_at;
    int64_t stride;
};
SY_HD constexpr CellRow cell_row_of(const RowLayout& row) {
    const int64_t scales_at = 16 * ceil_div(row.payload_bytes, 16);
    const int64_t info_at = 16 * ceil_div(scales_at + row.scale_bytes(), 16);
    const auto line = static_cast<int64_t>(line_bytes);
    return {scales_at, info_at, line * ceil_div(info_at + 16, line)};
}

/// One row pushed home: payload, scales, padded to a line.
struct HomeRow {
    int64_t scales_at;
    int64_t stride;
};
SY_HD constexpr HomeRow home_row_of(const RowLayout& row) {
    const int64_t scales_at = 16 * ceil_div(row.payload_bytes, 16);
    const auto line = static_cast<int64_t>(line_bytes);
    return {scales_at, line * ceil_div(scales_at + row.scale_bytes(), line)};
}

/// All offsets, in bytes from the start of the window; those of a slot from the start of the slot.
struct Window {
    WindowShape shape;
    RowLayout row;   ///< dispatch
    RowLayout wire;  ///< combine
    CellRow cell;
    HomeRow home_row;
    int64_t token_slots;  ///< slots (token, k) of one rank

    uint64_t bell, members, flags, reasons, decision, offers, slots;
    uint64_t counts, count_stride, expand_x, scales, source_info, weights, y, home, landing, blocks_out, blocks_in;
    uint64_t x, x_scales, x_ids, x_weights;
    uint64_t slot_bytes;
    uint64_t bytes;  ///< of the whole window; Region::limit_exceeded when no address space could hold it

    SY_HD constexpr uint64_t flag_line(uint64_t slot, int64_t writer) const {
        return flags + (slot * static_cast<uint64_t>(shape.ranks) + static_cast<uint64_t>(writer)) * sizeof(FlagLine);
    }
    /// Reason of `writer` for an epoch. Two per slot, used in turn: the gate of e+D may pass while a rank that combines still
    /// reads the reason of e, the gate of e+2D may not.
    SY_HD constexpr uint64_t reason(uint64_t epoch, int64_t writer) const {
        const auto depth = static_cast<uint64_t>(shape.depth);
        const uint64_t turn = epoch / depth & 1;
        return reasons + ((turn * depth + epoch % depth) * static_cast<uint64_t>(shape.ranks) + static_cast<uint64_t>(writer)) *
                             sizeof(Reason);
    }
    SY_HD constexpr uint64_t member(int64_t writer) const {
        return members + static_cast<uint64_t>(writer) * sizeof(MemberLine);
    }
    /// The offer of the window's owner for a generation.
    SY_HD constexpr uint64_t offer(uint64_t generation) const { return offers + (generation & 1) * sizeof(Offer); }
    SY_HD constexpr uint64_t slot(uint64_t index) const { return slots + index * slot_bytes; }
    SY_HD constexpr uint64_t count_row(uint64_t slot_index, int64_t writer) const {
        return slot(slot_index) + counts + static_cast<uint64_t>(writer) * count_stride;
    }
    /// Landing cell row of local expert `expert`, from `source`, the `index`th.
    SY_HD constexpr uint64_t cell_at(uint64_t slot_index, int64_t expert, int64_t source, int64_t index) const {
        const int64_t n = (expert * shape.ranks + source) * shape.cell_rows + index;
        return slot(slot_index) + landing + static_cast<uint64_t>(n * cell.stride);
    }
    /// The `index`th row of a block that leaves, or has come.
    SY_HD constexpr uint64_t block_out_at(uint64_t slot_index, int64_t index) const {
        return slot(slot_index) + blocks_out + static_cast<uint64_t>(index * cell.stride);
    }
    SY_HD constexpr uint64_t block_in_at(uint64_t slot_index, int64_t index) const {
        return slot(slot_index) + blocks_in + static_cast<uint64_t>(index * cell.stride);
    }
    /// First token, and first slot (token, k), of the `copy`th rank whose tokens lie in this window.
    SY_HD constexpr uint64_t x_token(int64_t copy) const { return static_cast<uint64_t>(copy * shape.tokens_max); }
    SY_HD constexpr uint64_t x_slot(int64_t copy) const { return static_cast<uint64_t>(copy * token_slots); }
    /// Home row of slot `k` of `token`.
    SY_HD constexpr uint64_t home_at(uint64_t slot_index, int64_t token, int64_t k) const {
        return slot(slot_index) + home + static_cast<uint64_t>((token * shape.topk + k) * home_row.stride);
    }
};

/// The walk: sizes and addresses of a window of that shape.
SY_HD constexpr Window window_of(const WindowShape& s) {
    Window w{};
    w.shape = s;
    w.row = row_layout(s.dispatch, s.token, s.hidden);
    w.wire = row_layout(s.combine, s.token, s.hidden);
    w.cell = cell_row_of(w.row);
    w.home_row = home_row_of(w.wire);
    w.token_slots = s.tokens_max * s.topk;

    const auto ranks = static_cast<uint64_t>(s.ranks);
    const auto depth = static_cast<uint64_t>(s.depth);
    const auto rows = static_cast<uint64_t>(s.rows_max);

    Region slot;
    w.count_stride =
        line_bytes * static_cast<uint64_t>(ceil_div(static_cast<int64_t>(sizeof(CountHead)) + 4 * (s.experts + s.ranks),
                                                    static_cast<int64_t>(line_bytes)));
    w.counts = slot.take(ranks, w.count_stride, page_bytes);
    w.expand_x = slot.take(rows, static_cast<uint64_t>(w.row.payload_bytes), page_bytes);
    w.scales = slot.take(rows, static_cast<uint64_t>(w.row.scale_bytes()), page_bytes);
    w.source_info = slot.take(rows, 12, page_bytes);
    w.weights = slot.take(s.weights ? rows : 0, 4, page_bytes);
    w.y = slot.take(rows, static_cast<uint64_t>(s.hidden * token_bytes(s.token)), page_bytes);
    w.home = slot.take(s.push ? static_cast<uint64_t>(w.token_slots) : 0, static_cast<uint64_t>(w.home_row.stride), page_bytes);
    // Cells of one expert first as a count of their own: the product of all four factors may not fit 64 bits.
    Region cells;
    cells.take(static_cast<uint64_t>(s.padded() ? s.cell_rows : 0), static_cast<uint64_t>(w.cell.stride), 1);
    w.landing = slot.take(s.padded() ? ranks * static_cast<uint64_t>(s.experts_per_rank) : 0, cells.bytes(), page_bytes);
    const auto stride = static_cast<uint64_t>(w.cell.stride);
    w.blocks_out = slot.take(s.blocks() ? static_cast<uint64_t>(w.token_slots) : 0, stride, page_bytes);
    w.blocks_in = slot.take(s.blocks() ? rows : 0, stride, page_bytes);
    const auto tokens = static_cast<uint64_t>(s.sources() * s.tokens_max);
    const auto token_slots = static_cast<uint64_t>(s.sources() * w.token_slots);
    w.x = slot.take(tokens, static_cast<uint64_t>(w.row.payload_bytes), page_bytes);
    w.x_scales = slot.take(tokens, static_cast<uint64_t>(w.row.scale_bytes()), page_bytes);
    w.x_ids = slot.take(token_slots, 4, page_bytes);
    w.x_weights = slot.take(s.weights ? token_slots : 0, 4, page_bytes);
    slot.take(0, 0, page_bytes);
    w.slot_bytes = slot.bytes();

    Region window;
    window.take(1, page_bytes, page_bytes);
    w.bell = window.take(1, sizeof(Bell), line_bytes);
    w.members = window.take(ranks, sizeof(MemberLine), line_bytes);
    w.flags = window.take(depth * ranks, sizeof(FlagLine), line_bytes);
    w.reasons = window.take(2 * depth * ranks, sizeof(Reason), line_bytes);
    w.decision = window.take(1, sizeof(Decision), line_bytes);
    w.offers = window.take(2, sizeof(Offer), line_bytes);
    w.slots = window.take(depth, w.slot_bytes, page_bytes);
    w.bytes = window.bytes();
    return w;
}

/// First page of the window of `rank`.
constexpr WindowHeader header_of(const Window& w, int rank, int64_t process) {
    const WindowShape& s = w.shape;
    return {.magic = window_magic,
            .version = window_version,
            .header_bytes = sizeof(WindowHeader),
            .window_bytes = w.bytes,
            .process = process,
            .rank = rank,
            .token = static_cast<int32_t>(s.token),
            .dispatch = static_cast<int32_t>(s.dispatch),
            .combine = static_cast<int32_t>(s.combine),
            .weights = s.weights,
            .landing = static_cast<int32_t>(s.landing),
            .push = s.push,
            .group_ranks = static_cast<int32_t>(s.group_ranks),
            .ranks = s.ranks,
            .depth = s.depth,
            .experts = s.experts,
            .experts_per_rank = s.experts_per_rank,
            .hidden = s.hidden,
            .topk = s.topk,
            .tokens_max = s.tokens_max,
            .rows_max = s.rows_max,
            .cell_rows = s.cell_rows};
}

}  // namespace switchyard::layout
