// The state plane of a window: flags, count rows, reasons. What each word means and who writes it.
//
// The protocol behind it, with its proof obligations, is docs/memory_order.md. Offsets depend on ranks and depth only.
#pragma once

#include "layout/row.hpp"

namespace switchyard::layout {

/// A flag word: epoch (48 bits) | code (4 bits) | rank (12 bits). Waits compare the epoch; fresh memory is epoch 0.
struct Word {
    uint64_t bits = 0;

    static constexpr uint64_t epoch_max = (uint64_t{1} << 48) - 1;
    SY_HD static constexpr Word of(uint64_t epoch, uint32_t code, int32_t rank) {
        return {epoch << 16 | uint64_t{code & 15U} << 12 | (static_cast<uint64_t>(rank) & 0xFFFU)};
    }
    SY_HD constexpr uint64_t epoch() const { return bits >> 16; }
    SY_HD constexpr uint32_t code() const { return static_cast<uint32_t>(bits >> 12 & 15U); }
    SY_HD constexpr int32_t rank() const { return static_cast<int32_t>(bits & 0xFFFU); }
};

/// The flags that rank `writer` raises in this window for one slot. One cache line, one writer, never reset.
struct FlagLine {
    uint64_t counted;     ///< my count row lies in your slot, and I have closed the epoch that used this slot before
    uint64_t returned;    ///< my y is ready or never comes, and I am done with the rows and counts in my slot
    uint64_t gone;        ///< I left this epoch with an error
    uint64_t arrived[5];  ///< my rows lie in your slot; word 0, the others are reserved
};
static_assert(sizeof(FlagLine) == 64);

/// Which word of a FlagLine.
enum class Flag : int32_t { counted = 0, returned = 1, gone = 2, arrived = 3 };
SY_HD constexpr uint64_t flag_offset(Flag flag) {
    return static_cast<uint64_t>(flag) * 8;
}

/// Codes of a `returned` word; the other flags carry switchyard::Code.
inline constexpr uint32_t returned_ok = 0;
inline constexpr uint32_t returned_dropped = 1;

/// Why `writer` refused or left an epoch; written before the flag that carries the code.
struct Reason {
    uint64_t epoch;
    uint64_t text_bytes;
    char text[496];
};
static_assert(sizeof(Reason) == 512);

/// Head of a count row; i32 counts [E] follow, the sender's rows for every expert of the group, and then, if it expects some,
/// i32 [R], those that it expects from every rank.
struct CountHead {
    uint64_t epoch;
    uint64_t tag;      ///< the caller's, 0 = none; must be equal on all ranks
    int64_t tokens;    ///< T of the sender
    uint64_t expects;  ///< 1: the last R numbers are there
    uint64_t reserved[4];
};
static_assert(sizeof(CountHead) == 64);

/// One line per writer and session.
struct MemberLine {
    uint64_t closed;   ///< 1: the writer has closed its session
    uint64_t regroup;  ///< a Turn: the writer has left all epochs and asks for this generation of the group
    uint64_t reserved[6];
};
static_assert(sizeof(MemberLine) == 64);

/// A regroup word: generation (16 bits) | the writer's next epoch (48 bits). Only grows.
struct Turn {
    uint64_t bits = 0;

    static constexpr uint64_t generation_max = 0xFFFF;
    SY_HD static constexpr Turn of(uint64_t generation, uint64_t next_epoch) {
        return {generation << 48 | (next_epoch & Word::epoch_max)};
    }
    SY_HD constexpr uint64_t generation() const { return bits >> 48; }
    SY_HD constexpr uint64_t next_epoch() const { return bits & Word::epoch_max; }
};

/// Who is left and where they go on, as one rank has seen it; in its own window, two in turn.
struct Offer {
    uint64_t generation;
    uint64_t base;         ///< first epoch of the generation
    uint64_t members[64];  ///< bit r % 64 of word r / 64
    uint64_t reserved[6];
};
static_assert(sizeof(Offer) == 576 && 64 * 64 > ranks_max);

/// In the window of rank 0, which outlives its owner: a Word of the generation that was decided last and of the rank whose
/// offer stands. Changed by compare-and-swap only.
struct Decision {
    uint64_t word;
    uint64_t reserved[7];
};
static_assert(sizeof(Decision) == 64);

/// Two words for sleeping, written by all ranks; they carry no meaning: see transport.hpp. And one for who looks from outside.
struct Bell {
    uint32_t bell;
    uint32_t sleepers;
    int64_t waiting_since_ns;  ///< when the call began in which the owner waits, of the monotonic clock; 0: in none, or it has
                               ///< not slept in it yet. Written by the owner, read by no rank
    uint64_t reserved[6];
};
static_assert(sizeof(Bell) == 64);

}  // namespace switchyard::layout
