// Moving experts' weights to where a new placement wants them, with the library's own dispatch: weights are rows of bytes.
//
//   Session mover = Session::open(weight_session_options(to, expert_bytes), group);
//   move_weights(mover, from, to, expert_bytes, old_weights, new_weights);       // all ranks
//   mover.close();
//   Session placed = Session::open(options, group, to);
#pragma once

#include <cstdint>

#include "switchyard/plan.hpp"
#include "switchyard/session.hpp"

namespace switchyard {

/// Options for a session that moves weights of `expert_bytes` each to a table: a "token" is a chunk of an expert's bytes (f32,
/// so that it travels bit for bit; landing in_place, so that it is copied once into the sender's window and once out of it),
/// its one "expert" the slot it goes to. A round moves up to `chunks` chunks per rank; `chunk_bytes` * `chunks` * depth is what
/// the window of a rank takes. Throws bad_input for sizes below 1.
SY_API Options weight_session_options(const PlacementTable& to, int64_t expert_bytes, int64_t chunk_bytes = 256 << 10,
                                      int64_t chunks = 64);

/// What move_weights did on this rank, in bytes of weights.
struct WeightTransfer {
    int64_t sent = 0;
    int64_t received = 0;
    int64_t kept = 0;  ///< copied within the rank
    int64_t rounds = 0;
};

/// Gives every rank the weights of its slots under `to`, from the ranks that hold them under `from` (weight_moves says who
/// sends what). Called on all ranks with the same tables and sizes; ranks that differ get mismatch.
///
/// mover: a session opened with weight_session_options(to, expert_bytes, ...), without a table. old_weights [L of from,
/// expert_bytes] and new_weights [L of to, expert_bytes] of this rank, in slot order, at any address; they must not overlap;
/// null where a rank has no slots. new_weights is written whole, and undefined after an error.
///
/// Waits for all ranks, each round at most mover's timeout_ms. Allocates lists of a few numbers per slot. Throws Error:
/// bad_input (a table, a size, a session of other options, null; on all ranks, in this call), and what dispatch throws.
SY_API WeightTransfer move_weights(Session& mover, const PlacementTable& from, const PlacementTable& to, int64_t expert_bytes,
                                   const void* old_weights, void* new_weights);

}  // namespace switchyard
