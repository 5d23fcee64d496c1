/* messages.pml: the same protocol between hosts. No shared memory: messages arrive in any order; the receiver's handler
 * writes data into its own window and raises the flags there. Two ranks, one slot (slots share nothing).
 *
 * Handler, for a message of epoch w:  data (count row, rows, home rows): dropped if this rank has closed epoch w, else
 * written and counted under the stamp w (a newer stamp starts the count anew).  Control (returned, gone): carries the
 * sender's words for this slot; each is merged with max, so control messages may overtake each other.
 * arrived = rows counted == rows announced;  returned = the word is there AND all home rows are counted.
 * Rows leave from the session's own memory, never from the caller's: a call may end while they are still on the way.
 * Faults: LATES deadlines, DROPS batches dropped. Variant PADDED (rows go out with the counts).
 * Nothing of this is in the code yet; the model is here for whoever builds it.
 *
 * run long -DNE=4
 * run long -DLATES=1 -DDROPS=1
 * run long -DLATES=1 -DPADDED
 * mutation long deadlock  NO_FENCE -DLATES=1           the handler takes data of an epoch that this rank has closed
 * mutation long assertion ARRIVED_MSG                  `arrived` as a message of its own
 * mutation long assertion GONE_ALONE -DLATES=2         `gone` without the words beside it
 * mutation long assertion FROM_CALLER                  rows are sent from the caller's memory
 * mutation long deadlock  RESET_COUNT -DPADDED         the count starts anew on entering
 */
#ifndef NE
#define NE 3
#endif
#ifndef LATES
#define LATES 0
#endif
#ifndef DROPS
#define DROPS 0
#endif
#define COUNT    0
#define ROW0     1
#define ROW1     2
#define HOME     3
#define RETURNED 4
#define GONE     5
#define ARRIVED  6
#define KINDS    7
#define TORN     99

#define M(kind,dst,x) m[((dst)*KINDS + (kind))*(NE+1) + (x)]
bool m[2*KINDS*(NE+1)];                      /* in flight, to dst, of epoch x */
bool dropped[2*(NE+1)];                      /* payload of RETURNED: batch dropped, by rank and epoch */
byte carried[2*(NE+1)];                      /* payload of GONE: the sender's `returned` word, by rank and epoch */

byte cnt[2], row0[2], row1[2], home[2], y[2];                          /* windows */
byte x[2];                                                             /* the caller's tokens; TORN once a call ended */
byte counted[2], arrived[2], returned[2], gone[2];                     /* flags, written by the owner's handler only */
byte stamp[2], got[2], hstamp[2];                                      /* rows counted */
byte closed[2];                                                        /* newest epoch this rank has closed */
byte outcome[2*(NE+1)];
#define WON  2
#define LOST 3
#define TAIL 4
bool cause[NE+1];
byte lates = LATES, drops = DROPS;

#ifdef NO_FENCE
#define OLD(x) false
#else
#define OLD(x) ((x) <= closed[me])
#endif
#define MAX(a,b) if :: b > a -> a = b :: else -> skip fi

inline count_row(w) {
#ifdef RESET_COUNT
	got[me]++
#else
	if :: stamp[me] != w -> stamp[me] = w; got[me] = 1 :: else -> got[me]++ fi
#endif
}
#ifdef FROM_CALLER
#define PAYLOAD x[1-me]                      /* mutation: sent from the caller's memory without a copy */
#else
#define PAYLOAD w
#endif
inline deliver(kind, w) {
	M(kind,me,w) = false;
	if
	:: kind == COUNT -> if :: OLD(w) -> skip :: else -> cnt[me] = w; counted[me] = w fi
	:: kind == ROW0 -> if :: OLD(w) -> skip :: else -> row0[me] = PAYLOAD; count_row(w) fi
	:: kind == ROW1 -> if :: OLD(w) -> skip :: else -> row1[me] = PAYLOAD; count_row(w) fi
	:: kind == HOME -> if :: OLD(w) -> skip :: else -> assert(y[1-me] == w); home[me] = w; hstamp[me] = w fi
	:: kind == RETURNED -> MAX(returned[me], w)
	:: kind == GONE ->
#ifndef GONE_ALONE
		MAX(returned[me], carried[(1-me)*(NE+1) + w]);
#endif
		MAX(gone[me], w)
	:: kind == ARRIVED -> MAX(arrived[me], w)
	fi
}
#define GET(kind,x) atomic { M(kind,me,x) -> deliver(kind,x) }
#if NE > 3
#define ANY(kind) :: GET(kind,1) :: GET(kind,2) :: GET(kind,3) :: GET(kind,4)
#else
#define ANY(kind) :: GET(kind,1) :: GET(kind,2) :: GET(kind,3)
#endif
proctype handler(byte me) {
end:
	do
	ANY(COUNT)
	ANY(ROW0)
	ANY(ROW1)
	ANY(HOME)
	ANY(RETURNED)
	ANY(GONE)
#ifdef ARRIVED_MSG
	ANY(ARRIVED)
#endif
	od
}

#define SEND(kind) M(kind,1-me,e) = true
#define LEFT (gone[me] >= e && returned[me] < e)
#ifdef ARRIVED_MSG
#define ROWS_HERE (arrived[me] == e)
#else
#define ROWS_HERE (counted[me] == e && stamp[me] == e && got[me] == 2)
#endif
#ifdef RESET_COUNT
#undef ROWS_HERE
#define ROWS_HERE (counted[me] == e && got[me] == 2)
#endif
#define LATE atomic { lates > 0 -> lates--; cause[e] = true; mine = true }

proctype rank(byte me) {
	byte e = 1, own = 0;                     /* own: my `returned` word */
	bool mine, prior;
	do
	:: e > NE -> break
	:: e <= NE ->
		mine = false;
		if                                   /* gate */
		:: e == 1 || returned[me] >= e - 1 || gone[me] >= e - 1
		:: LATE -> goto leave
		fi;
#ifdef RESET_COUNT
		got[me] = 0;
#endif
		x[me] = e;
		SEND(COUNT);
#ifdef PADDED
		atomic { SEND(ROW0); SEND(ROW1) };
#endif
		if
		:: counted[me] == e -> assert(cnt[me] == e)
		:: LEFT -> goto leave
		:: LATE -> goto leave
		fi;
#ifndef PADDED
		atomic { SEND(ROW0); SEND(ROW1) };
#endif
#ifdef ARRIVED_MSG
		SEND(ARRIVED);
#endif
		if
		:: ROWS_HERE -> assert(row0[me] == e && row1[me] == e)
		:: LEFT -> goto leave
		:: LATE -> goto leave
		fi;
		x[me] = TORN;                        /* dispatch ends: the caller reuses its tokens */
		y[me] = TORN;                        /* the experts compute */
		assert(row0[me] == e && row1[me] == e && cnt[me] == e);
		y[me] = e;
		if
		:: atomic { drops > 0 -> drops--; cause[e] = true; dropped[me*(NE+1) + e] = true };
			own = e; SEND(RETURNED); closed[me] = e
		:: true ->
			atomic { own = e; SEND(HOME); SEND(RETURNED) };
			if
			:: returned[me] == e && (hstamp[me] == e || dropped[(1-me)*(NE+1) + e]) ->
				if
				:: dropped[(1-me)*(NE+1) + e] -> outcome[me*(NE+1) + e] = TAIL
				:: else -> assert(home[me] == e); outcome[me*(NE+1) + e] = WON
				fi
			:: LEFT -> outcome[me*(NE+1) + e] = TAIL
			:: LATE -> outcome[me*(NE+1) + e] = TAIL
			fi;
			assert(returned[me] <= e);       /* no word is overwritten before it is read */
			closed[me] = e
		fi;
		goto next;
leave:	atomic { x[me] = TORN; closed[me] = e; outcome[me*(NE+1) + e] = LOST; carried[me*(NE+1) + e] = own; SEND(GONE) };
next:	e++
	od
}

init {
	byte e = 1;
	atomic { run handler(0); run handler(1); run rank(0); run rank(1) };
	_nr_pr == 3;
	d_step {
		do
		:: e > NE -> break
		:: else ->
			assert(!(outcome[e] == LOST && outcome[NE+1+e] == WON) && !(outcome[e] == WON && outcome[NE+1+e] == LOST));
			assert((outcome[e] < LOST && outcome[NE+1+e] < LOST) || cause[e]);
			e++
		od
	}
}
