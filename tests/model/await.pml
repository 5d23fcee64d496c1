/* await.pml: how a wait ends, and with what. One slot, looks step by step as Await makes them: each load of a flag, of
 * `closed` and of the end of a process is a step of its own, and everything else may happen in between. epoch.pml has the
 * memory; here it is verdicts, ends and sleep.
 *
 * A rank dispatches and combines NE epochs, then closes its session, and its process ends. news = something was stored into
 * my window or a process has ended since I announced that I would sleep; bell.pml has how that is known. A rank that sleeps
 * without news sleeps for ever: a wait that never ends is a deadlock of the model.
 * Faults, how many in all: BADS bad inputs in dispatch or combine, LATES deadlines, DROPS batches dropped, CLOSES sessions
 * closed early (between calls, or with a batch open), KILLS processes that end at any step. CAPACITY: epoch 1 is too large
 * for a window.
 * Variants: PADDED (`arrived` carries counts and verdict), SPARSE (no `arrived` between some pairs), THREADS (ranks are
 * threads, whose end nobody can see).
 * FINE: bit per rank whose looks are step by step; the others look at one moment (default all).
 *
 * Checked: every wait ends; with all alive and well it ends with success on all; after a refusal all ranks give the same
 * verdict and name the same rank; after an error before `returned` nobody combines; no error without a cause, and a batch
 * that was dropped is none in dispatch; who left or refused before he ended is not called closed or dead; no rank is called
 * corrupt.
 *
 * run quick -DR=2 -DNE=2 -DBADS=1 -DDROPS=1 -DCLOSES=1
 * run quick -DR=2 -DNE=2 -DLATES=1 -DKILLS=1
 * run quick -DR=2 -DNE=2 -DCLOSES=1 -DTHREADS
 * run quick -DR=3 -DNE=1 -DFINE=1 -DDROPS=1 -DSPARSE
 * run quick -DR=2 -DNE=2 -DLATES=1 -DCAPACITY
 * run long -DR=2 -DNE=3 -DLATES=2 -DBADS=1
 * run long -DR=2 -DNE=3 -DLATES=1 -DCLOSES=1 -DDROPS=1
 * run long -DR=2 -DNE=2 -DBADS=2 -DDROPS=1 -DKILLS=1 -DPADDED
 * run long -DR=3 -DNE=1 -DFINE=1 -DBADS=2
 * run long -DR=3 -DNE=1 -DFINE=1 -DBADS=1 -DCLOSES=1
 * run long -DR=3 -DNE=1 -DFINE=2 -DBADS=1 -DCLOSES=1
 * run long -DR=3 -DNE=1 -DFINE=4 -DBADS=1 -DCLOSES=1
 * run long -DR=3 -DNE=1 -DFINE=2 -DBADS=1 -DLATES=1
 * run long -DR=3 -DNE=1 -DFINE=1 -DLATES=1 -DCAPACITY
 * run long -DR=3 -DNE=1 -DFINE=1 -DKILLS=1
 * run long -DR=3 -DNE=1 -DFINE=1 -DPADDED -DBADS=1 -DCLOSES=1
 * run long -DR=3 -DNE=1 -DFINE=2 -DSPARSE -DDROPS=1 -DCLOSES=1
 * run long -DR=3 -DNE=1 -DDROPS=1
 *
 * mutation quick deadlock  NEWS_LATE -DLATES=1      the ticket is drawn after the look
 * mutation long  deadlock  QUICK_LOOK -DLATES=1     sleeps after a look that was not thorough
 * mutation quick deadlock  CLOSE_SILENT -DCLOSES=1 -DTHREADS   close() raises nothing
 * mutation long  assertion RETURNED_FIRST -DNE=3 -DLATES=2     `returned` is loaded before `gone`
 * mutation quick assertion FLAGS_FIRST -DR=3 -DNE=1 -DFINE=1 -DBADS=1  the flag is loaded before `closed` and the end
 * mutation quick assertion GONE_BEFORE_ENDS -DLATES=1 -DNE=1   no second look why a rank that has ended had left
 * mutation quick assertion NO_SECOND_TAKE -DBADS=1 -DNE=1 -DKILLS=1    no second look at the flags before an end is an error
 * mutation quick assertion COMMON_LEAVES -DR=3 -DNE=1 -DFINE=1 -DBADS=1    a verdict that all reach alone is taken for a leave
 * mutation quick assertion LATER_LEAVES -DNE=2 -DLATES=1 -DCAPACITY    a word about a later epoch is taken for one about this
 * mutation long  assertion ENDS_COUNT -DR=3 -DNE=1 -DFINE=1 -DBADS=1 -DCLOSES=1    any end counts in dispatch, refusal or not
 * mutation quick assertion FINISHED_COUNTS -DR=3 -DNE=1 -DFINE=1 -DDROPS=1     ... nor whether that rank had finished the epoch
 * mutation quick assertion SKIPPED_OWES -DR=3 -DNE=1 -DFINE=1 -DSPARSE -DDROPS=1   who sends no row owes its flag for ever
 */
#ifndef R
#define R 2
#endif
#ifndef NE
#define NE 2
#endif
#ifndef BADS
#define BADS 0
#endif
#ifndef LATES
#define LATES 0
#endif
#ifndef DROPS
#define DROPS 0
#endif
#ifndef CLOSES
#define CLOSES 0
#endif
#ifndef KILLS
#define KILLS 0
#endif
#ifndef FINE
#define FINE 7
#endif

#define COUNTED  0                   /* kinds of flag */
#define ARRIVED  1
#define RETURNED 2
#define GONE     3
#define GATE     4                   /* what is awaited at the gate: `returned` or `gone` of the epoch before */
#define OK      0                    /* codes, in a flag and as the end of a call */
#define BAD     1                    /* a common verdict, which all reach from the counts (bad_input, mismatch, capacity) */
#define OWN     2                    /* the sender's own view (timed_out, system, corrupt); seen from outside: peer_left */
#define ENDED   3                    /* peer_lost, peer_closed */
#define LEFT    4                    /* peer_left */
#define DROPPED 5                    /* (`returned`) there is no y */
#define NOBODY  9
#define PENDING 0                    /* what a look ends with */
#define DONE    1
#define FAILED  2
#ifdef PADDED
#define FIRST ARRIVED
#else
#define FIRST COUNTED
#endif
#ifdef SPARSE
#define SENDS(src,dst) (((src) + 2*(dst) + e) % 3 != 0)
#else
#define SENDS(src,dst) true
#endif
#define WORD(kind,dst,src) word[((kind)*R + (dst))*R + (src)]        /* 8 * epoch + code */
#define EP(v)   ((v) >> 3)
#define CODE(v) ((v) & 7)
#define BIT(p)  (1 << (p))
#define IN(p,set) (((set) >> (p)) & 1)
#define OUT(r,x) outcome[(r)*(NE+1) + (x)]
#define HOW(r,x) how[(r)*(NE+1) + (x)]
#define WHO(r,x) who[(r)*(NE+1) + (x)]

byte word[4*R*R];
bool closed[R*R];                    /* member lines: [window][writer] */
byte ended;                          /* processes, a bit per rank */
bool news[R];
byte bads = BADS, lates = LATES, drops = DROPS, closes = CLOSES, kills = KILLS;

byte outcome[R*(NE+1)];              /* ghost: how each epoch ended on each rank */
#define GAVE_UP 1                    /*   dropped of its own will */
#define WON     2                    /*   combined */
#define LOST    3                    /*   an error in dispatch */
#define REFUSED 4                    /*   combine's own input was bad */
#define TAIL    5                    /*   an error in combine after `returned` */
byte how[R*(NE+1)], who[R*(NE+1)];   /* ghost: with which code and whose fault */
byte worst[NE+1];                    /* ghost: 1 + lowest rank that refused */
byte struck[NE+1];                   /* ghost: 1 = a batch dropped, 2 = a refusal, 4 = any other fault, in this epoch */
bool early;                          /* ghost: a session was closed early, or a process killed */

inline all_hear() { news[0] = true; news[1] = true; news[R-1] = true }
#define DIE atomic { kills > 0 -> kills--; early = true; ended = ended | BIT(me); all_hear(); goto dead }

// label raise_all_await = src/ep/flags.cpp raise_all
inline raise(kind, c) {
	d_step { i = 1; q = (me + 1) % R };
	do
	:: i == R -> break
	:: i < R && kind == ARRIVED && FIRST == COUNTED && !SENDS(me,q) -> d_step { i++; q = (me + i) % R }
	:: i < R && (kind != ARRIVED || FIRST == ARRIVED || SENDS(me,q)) ->
		d_step { WORD(kind,q,me) = 8*e + (c); news[q] = true; i++; q = (me + i) % R }
	:: DIE
	od;
	atomic { i = 0; q = 0 }
}

#define THERE(p) ((kind == GATE && (EP(WORD(RETURNED,me,p)) == e - 1 || EP(WORD(GONE,me,p)) >= e - 1)) || \
                  (kind != GATE && EP(WORD(kind,me,p)) == e))
#define AHEAD(p) (EP(WORD(kind % GATE,me,p)) > e)

// label take_flags = src/ep/flags.cpp Await::take_flags
inline take_flags() {                                    /* takes the ranks off whose flag is there; the lowest that refuses */
	p = 0;
	do
	:: p == R -> break
	:: p < R && !IN(p,waiting) -> p++
	:: p < R && IN(p,waiting) ->
		d_step {
			if
			:: THERE(p) ->
				waiting = waiting & ~BIT(p);
				if
				:: kind != GATE && CODE(WORD(kind,me,p)) != OK && p < refuser -> refuser = p; refusal = CODE(WORD(kind,me,p))
				:: else -> skip
				fi
			:: else -> skip
			fi;
			p++
		}
	od;
	p = 0
}

// label left_gone = src/ep/flags.cpp Await::somebody_left
// label left_returned = src/ep/flags.cpp Await::somebody_left
inline somebody_left() {                                 /* fills code and culprit */
	p = 0;
	do
	:: p == R || code != OK -> break
	:: p == me && code == OK -> p++
	:: p < R && p != me && code == OK ->
#ifdef RETURNED_FIRST
		done = (EP(WORD(RETURNED,me,p)) == e);
		g = WORD(GONE,me,p);
#else
		g = WORD(GONE,me,p);
		done = (EP(WORD(RETURNED,me,p)) == e);
#endif
		d_step {
			if
			:: EP(g) < e || done -> p++
			:: else ->
				if
				:: refuser != NOBODY && THERE(p) -> p++
#ifndef COMMON_LEAVES
				:: !(refuser != NOBODY && THERE(p)) && kind != RETURNED && CODE(g) == BAD -> p++
#endif
#ifndef LATER_LEAVES
				:: refuser == NOBODY && THERE(p) && CODE(g) != BAD && kind != RETURNED && EP(g) > e ->
					if :: later == OK -> later = (CODE(g) == OWN -> LEFT : CODE(g)); later_who = p :: else -> skip fi;
					p++
#endif
				:: else -> culprit = p; code = (CODE(g) == OWN -> LEFT : CODE(g)); was_told = true
				fi
			fi;
			g = 0; done = false
		}
	od;
	p = 0
}

/* In the order opposite to that in which a rank ends: flags, `gone`, `closed`, its process. At the gate and in combine only the
 * ranks still awaited count; so it is in dispatch once a refusal or a common verdict is known. */
#ifdef LATER_LEAVES
#define ONLY_AWAITED (kind == GATE || kind == RETURNED || refuser != NOBODY || (EP(g) == e && CODE(g) == BAD))
#else
#define ONLY_AWAITED (kind == GATE || kind == RETURNED || refuser != NOBODY || (EP(g) == e && CODE(g) == BAD) || EP(g) > e)
#endif
// label closed_load = src/ep/flags.cpp has_closed
// label ended_lost = src/ep/flags.cpp Await::somebody_ended
// label ended_closed = src/ep/flags.cpp Await::somebody_ended
// label ended_gone = src/ep/flags.cpp Await::somebody_ended
// label ended_returned = src/ep/flags.cpp Await::somebody_ended
// label ended_flag = src/ep/flags.cpp Await::somebody_ended
inline somebody_ended() {
	p = 0;
	do
	:: p == R || code != OK -> break
	:: p == me && code == OK -> p++
	:: p < R && p != me && code == OK ->
		if
		:: !IN(p,waiting) && (kind == GATE || kind == RETURNED || refuser != NOBODY) -> p++
		:: else ->
#ifdef FLAGS_FIRST
			owes = (IN(p,waiting) && !THERE(p));
			g = WORD(GONE,me,p);
			done = (EP(WORD(RETURNED,me,p)) == e);
			is_closed = closed[me*R + p];
			is_lost = IN(p,ended);
#else
			is_lost = IN(p,ended);
			is_closed = closed[me*R + p];
			g = WORD(GONE,me,p);
			done = (EP(WORD(RETURNED,me,p)) == e);
#ifdef SKIPPED_OWES
			owes = !THERE(p);
#else
			owes = (IN(p,waiting) && !THERE(p));
#endif
#endif
			d_step {
				if
#ifdef ENDS_COUNT
				:: !owes && (kind == GATE || kind == RETURNED) -> p++
#else
				:: !owes && ONLY_AWAITED -> p++
#ifndef FINISHED_COUNTS
				:: !owes && !ONLY_AWAITED && done -> p++          /* it has finished this epoch and owes nothing */
#endif
#endif
				:: else ->
					assert(!owes || !AHEAD(p));
					if
					:: is_lost || is_closed -> code = ENDED; culprit = p
					:: else -> p++
					fi
				fi;
				is_lost = false; is_closed = false; g = 0; done = false; owes = false
			}
		fi
	od;
	p = 0
}

/* A rank has left. It may have raised the awaited flag just before; a refusal is then the reason to tell. */
// label failed_unless_refused = src/ep/flags.cpp Await::failed_unless_refused
inline failed_unless_refused() {
	take_flags();
	if
	:: waiting == 0 && refuser != NOBODY -> d_step { code = OK; culprit = NOBODY; result = DONE }
	:: else -> result = FAILED
	fi
}

// label poll = src/ep/flags.cpp Await::poll
inline poll() {
#ifndef NEWS_LATE
	news[me] = false;                                    /* the ticket is drawn, then the look */
#endif
	take_flags();
#ifdef QUICK_LOOK
	if :: waiting != 0 -> skip :: else ->
#endif
	if :: kind != GATE -> somebody_left() :: else -> skip fi;
	if
	:: code != OK -> failed_unless_refused()
	:: code == OK && waiting == 0 -> result = DONE
	:: code == OK && waiting != 0 ->
		somebody_ended();
		if
		:: code == OK -> skip
		:: else ->
			d_step { was = code; was_culprit = culprit; code = OK; culprit = NOBODY };
#ifndef GONE_BEFORE_ENDS
			if :: kind != GATE -> somebody_left() :: else -> skip fi;
#endif
			if
			:: code != OK -> failed_unless_refused()
			:: else ->
				before = refuser;
#ifndef NO_SECOND_TAKE
				take_flags();
#endif
				d_step {
					if
					:: before == refuser -> code = was; culprit = was_culprit; result = FAILED
					:: else -> skip
					fi
				}
			fi;
			d_step { was = OK; was_culprit = 0; before = 0 }
		fi
	fi
#ifdef QUICK_LOOK
	fi
#endif
#ifdef NEWS_LATE
	;
	if :: result == PENDING -> news[me] = false :: else -> skip fi
#endif
}

/* Begins a wait; goto wait makes it, and comes back to after_gate, after_first, after_rows or after_returned. */
// label begin = src/ep/flags.cpp Await::begin
inline begin(what) {
	d_step {
		kind = what; waiting = (BIT(R) - 1) & ~BIT(me); refuser = NOBODY; refusal = OK; culprit = NOBODY; code = OK;
		result = PENDING; later = OK; later_who = NOBODY;
		if
		:: kind == GATE && e == 1 -> waiting = 0                         /* nobody has used the slot yet */
		:: kind == FIRST && verdict != OK -> refuser = me; refusal = verdict     /* my own flag is the first that is there */
		:: kind == ARRIVED && FIRST == COUNTED ->                        /* who sends no row is not awaited */
			p = 0;
			do :: p == R -> break :: else -> if :: !SENDS(p,me) -> waiting = waiting & ~BIT(p) :: else -> skip fi; p++ od;
			p = 0
		:: else -> skip
		fi
	}
}

#define NOTE(o,c,w) OUT(me,e) = o; HOW(me,e) = c; WHO(me,e) = w

proctype rank(byte me) {
	byte e = 1, kind, waiting, refuser = NOBODY, refusal, code, culprit = NOBODY, result, verdict, prior;
	byte p, q, i, g, was, was_culprit, before, later, later_who = NOBODY;
	bool done, owes, is_lost, is_closed, open, was_told, late;

	goto dispatch;

/* Looks, sleeps until there is news, looks again; at the deadline one last look. DONE, or FAILED with code and culprit. */
// label wait = src/session.cpp wait
wait:
	if :: IN(me,FINE) -> poll() :: else -> atomic { poll() } fi;
	// label last_look = src/session.cpp wait
	d_step { if :: late && result == PENDING -> result = FAILED; code = OWN; culprit = me :: else -> skip fi; late = false };
	if
	:: result == PENDING ->
		if
		:: news[me] -> skip
		:: atomic { lates > 0 -> lates--; struck[e] = struck[e] | 4; late = true }
		:: DIE
		fi;
		goto wait
	:: else -> skip
	fi;
	/* who left before he ended is not called closed or dead */
	assert(result != FAILED || code != ENDED || was_told || kind == GATE || EP(WORD(GONE,me,culprit)) < e);
	/* nor who refused */
	assert(result != FAILED || code != ENDED || was_told || kind != FIRST ||
	       EP(WORD(FIRST,me,culprit)) != e || CODE(WORD(FIRST,me,culprit)) == OK);
	if
	:: kind == GATE -> goto after_gate
	:: kind == FIRST -> goto after_first
	:: kind == RETURNED -> goto after_returned
	:: else -> goto after_rows
	fi;

dispatch:
	if
	:: e > NE -> goto close
	:: atomic { e <= NE && closes > 0 -> closes--; early = true }; goto close
	:: e <= NE -> skip
	fi;
	atomic {                                                 /* the epoch is taken; its own input, or what nobody has heard yet */
		verdict = prior; prior = OK;
		if
		:: verdict == OK && bads > 0 -> bads--; verdict = BAD
		:: true -> skip
		fi
	};
	begin(GATE);
	goto wait;
after_gate:
	if :: result == FAILED -> goto leave :: else -> skip fi;
	d_step {
		if
		:: verdict == BAD ->
			struck[e] = struck[e] | 2;
			if :: worst[e] == 0 || worst[e] > me + 1 -> worst[e] = me + 1 :: else -> skip fi
		:: verdict != OK && verdict != BAD -> struck[e] = struck[e] | 4
		:: else -> skip
		fi
	};
	raise(FIRST, verdict);
	begin(FIRST);
	goto wait;
after_first:
	if
	:: result == FAILED -> goto leave
	:: result == DONE && refuser != NOBODY -> code = refusal; culprit = refuser; goto leave
#ifdef CAPACITY
	:: result == DONE && refuser == NOBODY && e == 1 -> code = BAD; struck[e] = struck[e] | 2; goto leave
	:: result == DONE && refuser == NOBODY && e != 1 -> skip
#else
	:: else -> skip
#endif
	fi;
	// label left_later = src/ep/dispatch.cpp DispatchStep::judge_later
	if :: later != OK -> code = later; culprit = later_who; goto leave :: else -> skip fi;   /* the counts name no verdict */
#ifdef PADDED
	goto batch;
#else
	raise(ARRIVED, OK);
	begin(ARRIVED);
	goto wait;
#endif
after_rows:
	if :: result == FAILED -> goto leave :: else -> skip fi;
	if :: later != OK -> code = later; culprit = later_who; goto leave :: else -> skip fi;
batch:
	open = true;
	if
	:: true -> open = false
	:: atomic { bads > 0 -> bads--; struck[e] = struck[e] | 4; open = false; NOTE(REFUSED, BAD, me) };
		raise(GONE, BAD);
		goto next
	:: atomic { drops > 0 -> drops--; struck[e] = struck[e] | 1; open = false; NOTE(GAVE_UP, OK, NOBODY) };
		raise(RETURNED, DROPPED);
		goto next
	:: atomic { closes > 0 -> closes--; early = true }; goto close
	fi;
	raise(RETURNED, OK);
	begin(RETURNED);
	goto wait;
after_returned:
	atomic {
		if
		:: result == DONE && refuser == NOBODY -> NOTE(WON, OK, NOBODY)
		// label combine_closed = src/ep/combine.cpp CombineStep::poll
		:: result == DONE && refuser != NOBODY -> NOTE(TAIL, (closed[me*R + refuser] -> ENDED : DROPPED), refuser)
		:: result == FAILED -> NOTE(TAIL, code, culprit); if :: code == ENDED || code == OWN -> prior = code :: else -> skip fi
		fi
	};
	goto next;

leave:
	atomic { NOTE(LOST, code, culprit) };
	raise(GONE, (code == LEFT -> OWN : code));
next:
	skip;
	d_step {
		e++; kind = 0; waiting = 0; refuser = NOBODY; refusal = OK; code = OK; culprit = NOBODY; result = PENDING;
		verdict = OK; was_told = false; later = OK; later_who = NOBODY
	};
	goto dispatch;

close:                                                       /* closed first, then what is open is dropped */
	skip;
#ifndef CLOSE_SILENT
	// label raise_closed = src/ep/flags.cpp raise_closed
	// label close = src/session.cpp close
	d_step { i = 1; q = (me + 1) % R };
	do
	:: i == R -> break
	:: i < R -> d_step { closed[q*R + me] = true; news[q] = true; i++; q = (me + i) % R }
	:: DIE
	od;
	// label close_drops = src/session.cpp close
	if :: open -> open = false; raise(RETURNED, DROPPED) :: else -> skip fi;
#endif
#ifndef THREADS
	atomic { ended = ended | BIT(me); all_hear() };
#endif
dead:
	skip
}

init {
	byte e = 1, p, q;
	atomic { p = 0; do :: p < R -> run rank(p); p++ :: else -> break od; p = 0 };
	_nr_pr == 1;
	d_step {
		do
		:: e > NE -> break
		:: else ->
			p = 0;
			do
			:: p == R -> break
			:: else ->
				/* a refusal and nothing else: the same verdict, the same rank named, on all */
				assert(struck[e] != 2 || early || (OUT(p,e) == LOST && HOW(p,e) == BAD &&
				       WHO(p,e) == (worst[e] == 0 -> NOBODY : worst[e] - 1)));
				/* a refusal among other faults: an error in dispatch on all */
				assert(!(struck[e] & 2) || early || OUT(p,e) == LOST);
				/* no error in dispatch without a cause, and a dropped batch is none; none in combine without one either */
				assert(OUT(p,e) != LOST || (struck[e] & 6) || early);
				assert(OUT(p,e) != TAIL || struck[e] || early);
				assert(early || OUT(p,e) != 0);
				q = 0;
				do
				:: q == R -> break
				:: else -> assert((OUT(p,e) != LOST && OUT(p,e) != REFUSED) || OUT(q,e) != WON); q++
				od;
				p++
			od;
			e++
		od
	}
}
