/* bell.pml: sleeping. One window with a 32-bit doorbell, while 64-bit flags say what happened; threads that raise flags
 * there, threads of its owner that wait for them.
 *
 *   raise:  flag.store(release); mark.store(1, release)             wait:  look
 *   ring:   mark.exchange(0, acquire) was 1:                               sleepers += 1; fence(seq_cst); d = bell
 *             fence(seq_cst)                                               look
 *             sleepers > 0: bell += 1; futex_wake(all)                     futex_wait(bell, d, slice)
 *                                                                          sleepers -= 1
 *
 * Stores sit in a store buffer, in order, until drained at any time; a fence waits for that. An exchange may take a mark of
 * its own thread out of the buffer before the flag in front of it has left: that is what the fence in ring is for. Reads
 * take no time: a store that has left its buffer is seen by all (x86, and Arm from version 8).
 * Sizes: RAISERS, WAITERS (1 or 2), ROUNDS. SAME_RANK: the raisers are threads of one rank and share one mark. DIES: a
 * raiser may die between flag and ring; SLICE: a sleep ends by itself.
 *
 * Checked: nobody sleeps for ever while his flags are there.
 *
 * run long
 * run quick -DSAME_RANK
 * run quick -DROUNDS=3 -DWAITERS=1
 * run quick -DRAISERS=1 -DWAITERS=1 -DDIES -DSLICE
 * run long -DROUNDS=3 -DSAME_RANK
 * run long -DROUNDS=3
 * run long -DDIES -DSLICE
 *
 * mutation quick deadlock NO_FENCE_RAISER       ring() looks at `sleepers` without a fence
 * mutation quick deadlock NO_FENCE_WAITER       announce() without a fence
 * mutation long  deadlock TICKET_LATE           the bell is read after the look at the flags
 * mutation quick deadlock LOOK_FIRST            the look comes before the announcement
 * mutation quick deadlock WAKE_ONE              futex_wake(1)
 * mutation long  deadlock NO_RING               flags are raised, nobody rings
 * mutation quick deadlock CLEAR_LATE -DSAME_RANK        the mark is cleared after the wake-up instead of taken before
 * mutation long  deadlock WRAP=2                a bell that comes round between two instructions
 * mutation quick deadlock DIES                  no slices
 */
#ifndef RAISERS
#define RAISERS 2
#endif
#ifndef WAITERS
#define WAITERS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef WRAP
#define WRAP 200
#endif
#ifdef SAME_RANK
#define MARK mark[0]
#else
#define MARK mark[i]
#endif
#define THREADS 2
#define ERASE 2

byte flag[THREADS];                          /* in memory: the newest round that this raiser has flagged */
byte mark[THREADS];                          /* in memory of the raising rank: raised since the last ring */
byte fpend[THREADS], mpend[THREADS];         /* in the raiser's store buffer, flag before mark; 0 = nothing */
byte sleepers, wpend[THREADS], bell;
bool asleep[THREADS], gone[THREADS];
byte done_upto[THREADS];

proctype drain(byte i) {                     /* any buffered store reaches memory at any time */
end:
	do
	:: atomic { fpend[i] != 0 -> flag[i] = fpend[i]; fpend[i] = 0 }
	:: atomic { fpend[i] == 0 && mpend[i] == 1 -> MARK = 1; mpend[i] = 0 }
	:: atomic { fpend[i] == 0 && mpend[i] == ERASE -> MARK = 0; mpend[i] = 0 }
	:: atomic { wpend[i] != 0 -> sleepers++; wpend[i] = 0 }
	od
}

inline wake() {
	atomic {
#ifdef WAKE_ONE
		if
		:: asleep[0] -> asleep[0] = false
		:: asleep[1] -> asleep[1] = false
		:: else -> skip
		fi
#else
		asleep[0] = false; asleep[1] = false
#endif
	}
}

#define ALL_DONE(x) (done_upto[0] >= (x) && done_upto[WAITERS-1] >= (x))
proctype raiser(byte i) {
	byte r = 1, asleep_seen;
	bool taken;
	do
	:: r > ROUNDS -> break
	:: r <= ROUNDS && fpend[i] == 0 && mpend[i] == 0 && ALL_DONE(r - 1) ->   /* the protocol above */
		// label flag_store = src/transport/mapped.cpp MappedTransport::raise
		fpend[i] = r;
		// label mark_store = src/transport/mapped.cpp MappedTransport::raise
		mpend[i] = 1;
#ifdef DIES
		if :: i == 0 -> break :: true -> skip fi;
#endif
#ifndef NO_RING
		// label ring_after_raises = src/ep/flags.cpp raise_all
		// label ring_after_closed = src/ep/flags.cpp raise_closed
#ifdef CLEAR_LATE
		taken = (mpend[i] == 1 || MARK != 0);
#else
		// label mark_take = src/transport/mapped.cpp MappedTransport::ring
		atomic {
			if
			:: mpend[i] == 1 -> mpend[i] = ERASE; taken = true
			:: mpend[i] != 1 && MARK != 0 -> MARK = 0; taken = true
			:: mpend[i] != 1 && MARK == 0 -> taken = false      /* another thread of this rank took it and wakes for both */
			fi
		};
#endif
		if
		:: taken ->
#ifndef NO_FENCE_RAISER
			// label ring_fence = src/transport/mapped.cpp MappedTransport::ring
			// A caller who hands an operation to his own progress thread is a raiser whose mark is always set.
			// label nudge_fence = src/transport/mapped.cpp MappedTransport::nudge
			fpend[i] == 0 && mpend[i] == 0;
#endif
			// label sleepers_load = src/transport/mapped.cpp MappedTransport::wake
			asleep_seen = sleepers;
			if
			// label bell_add = src/transport/mapped.cpp MappedTransport::wake
			// label bell_wake = src/transport/mapped.cpp MappedTransport::wake
			:: asleep_seen > 0 -> bell = (bell + 1) % WRAP; wake()
			:: else -> skip
			fi;
			asleep_seen = 0
		:: else -> skip
		fi;
#ifdef CLEAR_LATE
		MARK = 0;
#endif
		taken = false;
#endif
		r++
	od
}

#define THERE (flag[0] >= r && flag[RAISERS-1] >= r)
proctype waiter(byte w) {
	byte r = 1, d;
	bool there;
	do
	:: r > ROUNDS -> break
	:: r <= ROUNDS ->
		do
		:: THERE -> break                    /* a look while spinning */
		:: true ->
#ifdef LOOK_FIRST
			there = THERE;
#endif
			// label announced = src/session.cpp wait
			// label announce = src/session.cpp Announced
			// label announce_add = src/transport/mapped.cpp MappedTransport::announce
#ifdef NO_FENCE_WAITER
			wpend[w] = 1;                    /* may still sit in the buffer */
#else
			// label announce_fence = src/transport/mapped.cpp MappedTransport::announce
			sleepers++;
#endif
#ifndef TICKET_LATE
			// label announce_ticket = src/transport/mapped.cpp MappedTransport::announce
			d = bell;
#endif
#ifndef LOOK_FIRST
			// label announced_look = src/session.cpp wait
			there = THERE;
#endif
#ifdef TICKET_LATE
			d = bell;
#endif
			if
			:: there -> skip
			:: else ->
				// label asleep = src/session.cpp wait
				// label sleep_wait = src/transport/mapped.cpp MappedTransport::sleep
				atomic { if :: bell == d -> asleep[w] = true :: else -> skip fi };
#ifdef SLICE
				asleep[w] = false
#else
				!asleep[w]
#endif
			fi;
			// label awake = src/session.cpp ~Announced
			// label awake_sub = src/transport/mapped.cpp MappedTransport::awake
			if
			:: atomic { wpend[w] == 1 -> wpend[w] = 0 }
			:: atomic { wpend[w] == 0 -> sleepers-- }
			fi;
			d = 0;
			if :: there -> there = false; break :: else -> skip fi
		od;
		done_upto[w] = r;
		r++
	od
}

init {
	atomic {
		run drain(0);
		run drain(1);
		run raiser(0);
		if :: RAISERS > 1 -> run raiser(1) :: else -> skip fi;
		run waiter(0);
		if :: WAITERS > 1 -> run waiter(1) :: else -> skip fi
	}
}
