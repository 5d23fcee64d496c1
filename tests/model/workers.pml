/* workers.pml: the caller and its helpers fill a peer's slot with streaming stores; the caller joins them and raises the flag.
 *
 *   run:    task = ...; to_join = helpers; round += 1 (release)     helper:  round (acquire) has moved on: task
 *           take pieces, stream, fence                                       take pieces, stream, fence
 *           to_join (acquire) == 0: all have ended                           to_join -= 1 (acq_rel)
 *   then:   arrived.store(epoch, release)
 *
 * A streaming store sits in its own core's buffers (mine) until that core's fence; no other core can flush it.
 * Sizes: W threads (2 or 3), PIECES handed out one by one, EPOCHS.
 *
 * Checked: who sees the flag sees every row; a helper works on the task of its round; the join ends.
 *
 * run long
 * run quick -DW=3 -DEPOCHS=2
 * run long -DW=3 -DPIECES=6 -DEPOCHS=3
 *
 * mutation quick assertion NO_FENCE           only the thread that raises fences
 * mutation quick assertion COUNT_FIRST        a helper counts down before its fence
 * mutation long  assertion NO_JOIN            the flag is raised before the helpers have been joined
 * mutation long  assertion ROUND_FIRST        the round is counted before the task is there
 * mutation long  deadlock  LEFT_LATE          the count-down is set after the round
 */
#ifndef W
#define W 2
#endif
#ifndef PIECES
#define PIECES 4
#endif
#ifndef EPOCHS
#define EPOCHS 3
#endif
#define TORN 99

byte row[PIECES], arrived;                   /* receiver's window */
byte returned;                               /* sender's window: the receiver is done with this epoch's rows */
byte taken = PIECES, task, to_join, round;      /* inside the sending rank */

inline fence() {
	d_step {
		i = 0;
		do :: i == PIECES -> break :: i < PIECES -> if :: (mine >> i) & 1 -> row[i] = e :: else -> skip fi; i++ od;
		mine = 0; i = 0
	}
}
// label split_body = src/ep/workers.hpp split
inline take_pieces() {
	do
	:: atomic { taken < PIECES -> p = taken; taken++ };
		d_step { row[p] = TORN; mine = mine | (1 << p); p = 0 }
	:: taken == PIECES -> break
	od
}

proctype helper() {
	byte p, i, e = 1, mine;
	do
	:: e > EPOCHS -> break
	// label round_load = src/ep/workers.hpp serve
	:: e <= EPOCHS && round == e ->
		assert(task == e);
		take_pieces();
#if !defined(NO_FENCE) && !defined(COUNT_FIRST)
		fence();
#endif
		// label count_down = src/ep/workers.hpp serve
		to_join--;
#ifdef COUNT_FIRST
		fence();
#endif
		e++
	od
}

proctype caller() {
	byte p, i, e = 1, mine;
	do
	:: e > EPOCHS -> break
	:: e <= EPOCHS && returned == e - 1 ->   /* gate */
		taken = 0;
#ifdef ROUND_FIRST
		to_join = W - 1;
		round = e;
		task = e;
#else
		task = e;
#ifndef LEFT_LATE
		// label left_store = src/ep/workers.hpp run
		to_join = W - 1;
#endif
		// label round_add = src/ep/workers.hpp run
		round = e;
#ifdef LEFT_LATE
		to_join = W - 1;
#endif
#endif
		take_pieces();
		fence();
#ifndef NO_JOIN
		// label join = src/ep/workers.hpp run
		to_join == 0;
#endif
		arrived = e;
		e++
	od
}

#define LOOK d_step { p = 0; do :: p == PIECES -> break :: else -> assert(row[p] == e); p++ od; p = 0 }
proctype receiver() {
	byte e = 1, p;
	do
	:: e > EPOCHS -> break
	:: e <= EPOCHS && arrived == e ->
		LOOK;
		skip;
		LOOK;
		returned = e;
		e++
	od
}

init { atomic { run caller(); run receiver(); run helper(); if :: W > 2 -> run helper() :: else -> skip fi } }
