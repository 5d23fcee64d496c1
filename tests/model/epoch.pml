/* epoch.pml: who may overwrite what. The flags and the memory of one session from dispatch to combine, epoch after epoch,
 * with bad input, lost deadlines and deaths.
 *
 * Memory. A count row, the rows from one rank, y, the home rows, the x place, a reason record: each is one cell, the epoch it
 * belongs to, or TORN from its first store until the release that publishes it. A store begins as early and is whole as late
 * as the rules allow. A read lasts from the acquire that allowed it to the reader's next release and is checked at both
 * ends: loads, too, as early and as late as allowed. -DTSO delays every flag in a store buffer on top of that.
 * Flags. counted, arrived, returned, gone: one word per (window, slot, writer) = 4 * epoch + code; one writer, growing.
 * Calls. One list of calls, the same on all ranks; every legal order is tried: dispatch, end of any open epoch,
 * with -DOVERCALL also one dispatch too many.
 * Waits are coarse here: a look sees all flags at one moment, and any dead rank may end it. await.pml has looks step by step.
 * Sizes: R ranks (2 or 3), D = depth, NE epochs. Faults, how many in all: BADS bad inputs, LATES deadlines that strike in a
 * wait, DROPS batches dropped, DEATHS deaths at any step.
 * Variants: PADDED (rows go out with the counts), PUSH (y rows go to the token's home), IN_PLACE (rows stay in the sender's
 * x place and are read there), SPARSE (no `arrived` between pairs that exchange no row; not padded).
 *
 * Checked: no torn or stale cell is read, no slot in use is written, no flag is overwritten unread, no deadlock, an error
 * before `returned` on one rank means combine on none, bad input fails the same call everywhere, no error without cause, who
 * failed alone in combine is heard in his next dispatch, one dispatch too many is refused without effect.
 *
 * run quick -DR=2 -DD=1 -DNE=3 -DLATES=1 -DDROPS=1
 * run quick -DR=2 -DD=1 -DNE=3 -DLATES=1 -DBADS=1 -DPADDED -DPUSH
 * run quick -DR=2 -DD=1 -DNE=3 -DLATES=1 -DBADS=1 -DSPARSE
 * run quick -DR=2 -DD=1 -DNE=3 -DLATES=1 -DBADS=1 -DPADDED -DIN_PLACE
 * run quick -DR=2 -DD=2 -DNE=2 -DDEATHS=1
 * run quick -DR=2 -DD=1 -DNE=3 -DLATES=1 -DTSO
 * run quick -DR=3 -DD=1 -DNE=3
 * run long -DR=2 -DD=2 -DNE=3 -DLATES=1
 * run long -DR=2 -DD=1 -DNE=3 -DLATES=1 -DBADS=1 -DDROPS=1
 * run long -DR=3 -DD=2 -DNE=3
 * run long -DR=3 -DD=2 -DNE=3 -DPADDED -DPUSH
 * run long -DR=3 -DD=2 -DNE=3 -DSPARSE
 * run long -DR=3 -DD=2 -DNE=3 -DPADDED -DIN_PLACE
 * run long -DR=2 -DD=2 -DNE=3 -DOVERCALL
 * run long -DR=3 -DD=1 -DNE=2 -DTSO
 * run long -DR=2 -DD=1 -DNE=5 -DLATES=3
 * run long -DR=2 -DD=1 -DNE=4 -DLATES=2 -DBADS=1 -DDROPS=1
 * run long -DR=2 -DD=1 -DNE=4 -DLATES=2 -DBADS=1 -DPADDED -DPUSH
 * run long -DR=2 -DD=1 -DNE=4 -DLATES=2 -DBADS=1 -DSPARSE
 * run long -DR=2 -DD=1 -DNE=4 -DLATES=2 -DBADS=1 -DPADDED -DIN_PLACE
 * run long -DR=2 -DD=2 -DNE=3 -DLATES=1 -DBADS=1 -DDROPS=1
 * run long -DR=2 -DD=2 -DNE=3 -DLATES=1 -DDROPS=1 -DPUSH -DOVERCALL
 * run long -DR=2 -DD=2 -DNE=4 -DLATES=1 -DSPARSE
 * run long -DR=2 -DD=2 -DNE=4 -DLATES=1 -DPADDED -DIN_PLACE
 * run long -DR=2 -DD=2 -DNE=3 -DLATES=1 -DDEATHS=1
 * run long -DR=2 -DD=1 -DNE=3 -DLATES=2 -DBADS=1 -DTSO
 * run long -DR=3 -DD=1 -DNE=2 -DLATES=1
 * run long -DR=3 -DD=1 -DNE=2 -DBADS=1 -DDROPS=1 -DPADDED
 * run long -DR=3 -DD=1 -DNE=2 -DLATES=1 -DSPARSE
 * run long -DR=3 -DD=1 -DNE=2 -DLATES=1 -DPADDED -DIN_PLACE
 * run long -DR=3 -DD=1 -DNE=3 -DBADS=1 -DDROPS=1
 * run long -DR=3 -DD=1 -DNE=2 -DDEATHS=1
 *
 * mutation quick assertion FLAG_FIRST=COUNTED      the flag is raised before the count row is whole
 * mutation long  assertion FLAG_FIRST=ARRIVED      ... before the rows
 * mutation quick assertion FLAG_FIRST=RETURNED     ... before y
 * mutation long  assertion FLAG_FIRST=ARRIVED -DPADDED
 * mutation long  assertion FLAG_FIRST=ARRIVED -DPADDED -DIN_PLACE
 * mutation long  assertion FLAG_FIRST=RETURNED -DPUSH
 * mutation quick assertion FLAG_FIRST=GONE -DLATES=1       `gone` is raised before the reason record is whole
 * mutation quick assertion NO_WAIT=COUNTED         rows go out before all count rows are there
 * mutation long  assertion NO_WAIT=ARRIVED         the batch is handed out before all rows are there
 * mutation long  assertion NO_WAIT=RETURNED        y is summed before it was offered
 * mutation long  assertion NO_WAIT=ARRIVED -DPADDED
 * mutation long  assertion NO_WAIT=ARRIVED -DPADDED -DIN_PLACE
 * mutation long  assertion NO_WAIT=RETURNED -DPUSH
 * mutation quick assertion NO_GATE -DLATES=1       a slot is used again without a gate: after a lost deadline
 * mutation long  assertion NO_GATE -DDROPS=1       ... after a dropped batch
 * mutation long  assertion NO_GATE -DDROPS=1 -DPADDED
 * mutation quick assertion NO_GATE -DDROPS=1 -DPADDED -DIN_PLACE          ... the x place is written while a peer reads it
 * mutation quick assertion X_BEFORE_GATE -DPADDED -DIN_PLACE -DDROPS=1  x() hands the place out without a gate
 * mutation quick deadlock  NO_REFUSE -DD=2 -DOVERCALL  one dispatch too many is not refused
 * mutation long  assertion NO_REFUSE -DD=2 -DOVERCALL -DNO_GATE
 * mutation long  assertion READ_AFTER_RETURNED     rows are read (materialise, say) after `returned` was raised
 * mutation long  assertion READ_AFTER_RETURNED -DPADDED -DIN_PLACE
 * mutation quick assertion SUM_AFTER_END           combine hands back before its sums have ended
 * mutation long  assertion SUM_AFTER_END -DPUSH
 * mutation long  deadlock  DEAF -DLATES=1          waits do not look at `gone`
 * mutation quick deadlock  SILENT -DLATES=1        `gone` is not raised
 * mutation long  deadlock  SILENT -DBADS=1
 * mutation quick assertion NO_PRIOR -DLATES=1      who failed alone in combine keeps it to himself
 * mutation quick assertion GONE_LAST -DLATES=2 -DNE=4  `returned` is read before `gone`
 * mutation quick assertion RECORDS=1 -DLATES=2 -DBADS=1    one reason record per slot
 * mutation quick assertion REASON_TWICE -DLATES=1 -DBADS=1 who has refused writes his record again at his deadline
 */
#ifndef R
#define R 2
#endif
#ifndef D
#define D 1
#endif
#ifndef NE
#define NE 3
#endif
#ifndef DROPS
#define DROPS 0
#endif
#ifndef BADS
#define BADS 0
#endif
#ifndef LATES
#define LATES 0
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef FLAG_FIRST
#define FLAG_FIRST 9
#endif
#ifndef NO_WAIT
#define NO_WAIT 9
#endif
#ifndef RECORDS
#define RECORDS 2                    /* reason records per slot and writer, used in turn */
#endif

#define COUNTED  0                   /* kinds of flag */
#define ARRIVED  1
#define RETURNED 2
#define GONE     3                   /* the writer left this epoch with an error */
#define OK   0                       /* codes in a flag */
#define BAD  1                       /* verdict: the writer refuses the epoch, no row has moved */
#define DROP 2                       /* its caller dropped the batch: there is no y */
#define FAIL 3                       /* any other error, in `gone` and in variable why */
#define TORN 99

#define V(x,c)  ((x)*4 + (c))
#define EP(v)   ((v) >> 2)
#define CODE(v) ((v) & 3)
#define AT(dst,src) (((dst)*D + sl)*R + (src))
#define FL(kind,dst,src) flag[(kind)*R*D*R + AT(dst,src)]
#define REACHED(kind,p) (EP(FL(kind,me,p)) == e)
#define FUTURE(kind,p)  (EP(FL(kind,me,p)) > e)
#define LEFT(p)   ((p) < R && (p) != me && EP(FL(GONE,me,p)) >= e && !REACHED(RETURNED,p))
#define CLOSED(p) (REACHED(RETURNED,p) || EP(FL(GONE,me,p)) >= e)
#ifdef DEAF
#define SOMEBODY_LEFT false
#else
#define SOMEBODY_LEFT (LEFT(0) || LEFT(1) || LEFT(R-1))
#endif
#ifdef SPARSE                        /* some pairs exchange no row in an epoch: both sides know it from the counts */
#define SENDS(src,dst) (((src) + 2*(dst) + e) % 3 != 0)
#else
#define SENDS(src,dst) true
#endif
#ifdef PADDED
#define FIRST ARRIVED                /* the flag that carries counts and verdict */
#else
#define FIRST COUNTED
#endif
#define CNT(dst,src) cnt[AT(dst,src)]
#define Y(r) y[(r)*D + sl]
#define X(r) x[(r)*D + sl]
#define REC(dst,src) rec[((dst)*RECORDS*D + (e / D) % RECORDS * D + sl)*R + (src)]
#define OUT(r,x) outcome[(r)*(NE+2) + (x)]
#define LOST_PEER (dead & ~(1 << me))
#define DIE atomic { deaths > 0 -> deaths--; dead = dead | (1 << me); goto done }
#define OPENED(x) (open & (1 << (x)))

byte flag[4*R*D*R];                                      /* state plane of all windows */
byte rec[R*RECORDS*D*R];
byte cnt[R*D*R], row[R*D*R], y[R*D];                     /* data plane of all windows */
#ifdef PUSH
byte home[R*D*R];
#endif
#ifdef IN_PLACE
byte x[R*D];
#endif
byte busy[R*D];                                          /* ghost: epoch of the batch its caller holds */
byte dead;                                               /* bit per rank; a survivor may notice at any time */
byte bads = BADS, lates = LATES, drops = DROPS, deaths = DEATHS;

#define DISPATCH 200
#define TRY      201
#define END      202
byte script[3*NE + 2];
byte outcome[R*(NE+2)];                                  /* ghost, how each epoch ended on each rank: */
#define LEFT_OUT 1                                       /*   batch dropped of its own will */
#define WON  2                                           /*   combined */
#define LOST 3                                           /*   an error before `returned` was raised */
#define TAIL 4                                           /*   an error in combine after that */
bool badly[NE+2];                                        /* ghost: some rank gave a BAD verdict */
bool cause[NE+2];                                        /* ghost: a fault struck in this epoch */
byte last[R];                                            /* ghost: newest epoch a rank took */
byte alone[R*(NE+2)];                                    /* ghost: failed alone in combine; 1 + last at that time */

#ifdef TSO
chan sb[R] = [3] of { byte, byte, byte, bool };
#endif

inline data_whole(kind, dst, c) {                        /* my stores for this flag are complete */
	if :: reason -> REC(dst,me) = e :: else -> skip fi;
	if
	:: kind == COUNTED -> CNT(dst,me) = e
#ifdef PADDED
	:: kind == ARRIVED -> CNT(dst,me) = e; if :: c == OK -> row[AT(dst,me)] = e :: else -> skip fi
#else
	:: kind == ARRIVED -> if :: SENDS(me,dst) -> row[AT(dst,me)] = e :: else -> skip fi
#endif
#ifdef PUSH
	:: kind == RETURNED && c == OK -> home[AT(dst,me)] = e
#else
	:: kind == RETURNED && c == OK -> Y(me) = e
#endif
	:: else -> skip
	fi
#ifdef IN_PLACE
	;
	if :: kind == ARRIVED -> X(me) = e :: else -> skip fi
#endif
}
// label raise_all = src/ep/flags.cpp raise_all
inline raise(kind, c) {                                  /* one flag to every peer, peer after peer; mine concerns only me */
	i = 1; q = (me + 1) % R;
	do
	:: i == R -> break
#ifdef SPARSE
	:: i < R && kind == ARRIVED && !SENDS(me,q) -> i++; q = (me + i) % R
	:: i < R && (kind != ARRIVED || SENDS(me,q)) ->
#else
	:: i < R ->
#endif
#ifdef TSO
		sb[me]!kind,q,V(e,c),reason;
#else
		if
		:: kind == FLAG_FIRST -> FL(kind,q,me) = V(e,c)
		:: else -> skip
		fi;
		// label store_release = src/transport/mapped.cpp MappedTransport::raise
		d_step { data_whole(kind, q, c); FL(kind,q,me) = V(e,c) };
#endif
		d_step { i++; q = (me + i) % R }
	:: DIE
	od;
	reason = false; i = 0; q = 0
}

inline row_seen(kind, p) {                               /* what an OK flag promises about peer p's stores */
	if
	:: kind == COUNTED  -> assert(CNT(me,p) == e)
#ifdef IN_PLACE
	:: kind == ARRIVED  -> assert(((row[AT(me,p)] == e && X(p) == e) || !SENDS(p,me)) && CNT(me,p) == e)
#else
	:: kind == ARRIVED  -> assert((row[AT(me,p)] == e || !SENDS(p,me)) && CNT(me,p) == e)
#endif
#ifdef PUSH
	:: kind == RETURNED -> assert(home[AT(me,p)] == e)
#else
	:: kind == RETURNED -> assert(Y(p) == e)
#endif
	fi
}
inline all_seen(kind) { d_step { q = 0; do :: q == R -> break :: q == me -> q++ :: else -> row_seen(kind, q); q++ od; q = 0 } }

inline await(kind) {                                     /* all peers' flag of this kind; why = OK if all said OK */
	q = 0; why = OK;
	do
	:: q == me -> q++
	:: q == R -> break
	// label load_acquire = src/ep/flags.cpp load_acquire
	// label see = src/ep/flags.cpp see
	// label await_flag = src/ep/flags.cpp Await::is_there
	:: q < R && q != me && REACHED(kind,q) ->
		d_step {
			if
			:: CODE(FL(kind,me,q)) == OK -> row_seen(kind, q)
			:: else -> why = CODE(FL(kind,me,q))
			fi;
			q++
		}
	:: q < R && q != me && FUTURE(kind,q) -> assert(false)               /* a flag was overwritten unread */
	:: q < R && q != me && kind == NO_WAIT -> d_step { row_seen(kind, q); q++ }
#ifdef SPARSE
	:: q < R && q != me && kind == ARRIVED && !SENDS(q,me) -> q++
#endif
#ifdef GONE_LAST
	:: q < R && q != me && !REACHED(RETURNED,q) ->
		if
		:: EP(FL(GONE,me,q)) >= e -> why = FAIL; break
		:: else -> skip
		fi
#else
	:: SOMEBODY_LEFT -> why = FAIL; break
#endif
	:: atomic { lates > 0 -> lates--; why = FAIL; late = true; mine = true; cause[e] = true }; break
	:: LOST_PEER -> why = FAIL; mine = true; break
	:: DIE
	od;
	q = 0;
	read_reason()
}

/* The reason of whoever is to blame, for the text of an error. It lasts, like every read. */
#define SAYS(kind,p) (REACHED(kind,p) && CODE(FL(kind,me,p)) != OK)
#define PUBLISHED(p) ((p) != me && (SAYS(GONE,p) || SAYS(FIRST,p)))
// label read_reason = src/ep/flags.cpp reason_text
// label left_reason = src/ep/flags.cpp Await::left_by
// label refusal_reason = src/ep/dispatch.cpp DispatchStep::refused
inline read_reason() {
	if
	:: why != OK && why != DROP && !late ->
		if
		:: PUBLISHED(0) -> q = 0; read_record()
		:: PUBLISHED(1) -> q = 1; read_record()
		:: PUBLISHED(R-1) -> q = R-1; read_record()
		:: true -> skip
		fi;
		q = 0
	:: else -> skip
	fi
}
inline read_record() {
	d_step { seen = REC(me,q); assert(seen != TORN) };
	d_step { assert(REC(me,q) == seen); seen = 0 }
}

inline start(kind) {                                     /* first bytes of my stores reach memory */
	d_step {
		q = 0;
		do
		:: q == R -> break
		:: q == me -> q++
		:: else ->
			if
			:: kind == COUNTED -> CNT(q,me) = TORN
			:: kind == ARRIVED ->
				if
				:: SENDS(me,q) ->
					assert(busy[q*D + sl] == 0);             /* never into a slot in use */
					row[AT(q,me)] = TORN
				:: else -> skip
				fi
#ifdef PUSH
			:: kind == RETURNED -> home[AT(q,me)] = TORN
#else
			:: kind == RETURNED -> Y(me) = TORN
#endif
			:: kind == GONE -> REC(q,me) = TORN
			fi;
			q++
		od;
		q = 0
	}
}
// label send_reason = src/ep/flags.cpp send_reason
inline write_reason() { start(GONE); reason = true }
// label store_x = src/ep/exchange.cpp offer_tokens
inline start_x() {                                       /* the caller, or a copy of its tokens, writes the x place */
#ifdef IN_PLACE
	X(me) = TORN
#else
	skip
#endif
}
inline late_sums() {                                     /* mutation: combine came back before its reads of y had ended */
#ifdef SUM_AFTER_END
	if
	:: e > D && OUT(me, e - D) == WON -> d_step { e = e - D; all_seen_of_y(); e = e + D }
	:: else -> skip
	fi
#else
	skip
#endif
}
inline all_seen_of_y() { q = 0; do :: q == R -> break :: q == me -> q++ :: else -> row_seen(RETURNED, q); q++ od; q = 0 }

/* Every peer has closed the epoch that used this slot before. step = the epoch that wants it; then e = step. */
// label gate = src/ep/flags.cpp Await::begin_gate
// label gate_flag = src/ep/flags.cpp Await::is_there
inline gate(told) {
	if :: step > D -> e = step - D :: else -> e = 0 fi;
	q = 0;
	do
	:: q == me -> q++
	:: q == R -> break
	:: q < R && q != me && (e == 0 || CLOSED(q)) -> q++
	:: atomic { lates > 0 -> lates--; why = FAIL; cause[step] = cause[step] || told }; break
	:: LOST_PEER -> why = FAIL; break
	:: DIE
	od;
	q = 0; e = step
}

proctype rank(byte me) {
	byte k = 0, e = 0, sl = 0, q = 0, i = 0, why = OK, verdict = OK, open = 0, step = 0, seen = 0, next = 1;
	bool mine = false, prior = false, late = false, reason = false;

call:
	atomic {
		e = 0; sl = 0; q = 0; why = OK; mine = false; late = false; verdict = OK; step = script[k]; k++;
		if
		:: step == END -> goto done
		:: step == DISPATCH -> goto dispatch
		:: step == TRY ->
#ifdef NO_REFUSE
			goto dispatch
#else
			assert(next <= D || OPENED(next - D) || OUT(me, next - D) >= LOST);
			goto call                                        /* refused: no epoch taken, nothing written */
#endif
		:: else ->
			e = step; sl = e % D;
			if
			:: OPENED(e) -> goto finish
			:: else -> goto call                             /* its dispatch failed, there is no batch */
			fi
		fi
	};

dispatch:
#ifdef IN_PLACE
	atomic { sl = next % D; step = next };
	// label x_gate = src/session.cpp Session::x
	if                                                       /* x(): takes no epoch, and an error there concerns nobody else */
#ifdef X_BEFORE_GATE
	:: true -> e = step; start_x()
#else
	:: true -> gate(false); if :: why == OK -> start_x() :: else -> why = OK fi
#endif
	:: true -> skip                                          /* tokens from elsewhere: copied in dispatch */
	fi;
#endif
	atomic { sl = next % D; step = next; next++; last[me] = step };         /* epoch taken, come what may */
#ifdef NO_GATE
	e = step;
#else
	// label dispatch_gate = src/ep/dispatch.cpp DispatchStep::start
	gate(true);
#endif
	atomic {
		if
		// label prior_told = src/session.cpp Session::Impl::begin
		:: prior -> verdict = BAD; prior = false             /* tell what struck me after others had finished */
		:: !prior && bads > 0 -> verdict = BAD; bads--
		:: !prior -> skip
		fi;
		if
		:: why != OK -> goto leave
		:: why == OK && verdict == BAD -> badly[e] = true; cause[e] = true
		:: else -> skip
		fi
	};
	start(COUNTED);
	// label store_counts = src/ep/exchange.cpp send_counts
	// label refuse_reason = src/ep/dispatch.cpp DispatchStep::after_gate
	if :: verdict == BAD -> write_reason() :: else -> start_x() fi;
#ifdef PADDED
	// label store_cells = src/ep/exchange.cpp send_cells
	if :: verdict == OK -> start(ARRIVED) :: else -> skip fi;
#endif
	// label raise_counted = src/ep/dispatch.cpp DispatchStep::after_gate
	raise(FIRST, verdict);
	late_sums();
	// label await_counted = src/ep/dispatch.cpp DispatchStep::after_gate
	await(FIRST);
	if
#ifdef REASON_TWICE
	:: late -> write_reason(); goto leave
#else
	:: late && verdict == OK -> write_reason(); goto leave
#endif
	:: else -> skip
	fi;
	if
	:: verdict == BAD || why != OK -> goto leave
	:: else -> skip
	fi;
#ifndef PADDED
	// label load_counts = src/ep/exchange.cpp take_counts
	// label store_rows = src/ep/exchange.cpp send_rows
	// label store_blocks = src/ep/exchange.cpp send_blocks
	start(ARRIVED);
	// label raise_arrived = src/ep/dispatch.cpp DispatchStep::after_counts
	raise(ARRIVED, OK);
	late_sums();
	// label await_arrived = src/ep/dispatch.cpp DispatchStep::after_counts
	await(ARRIVED);
	// label give_up = src/ep/dispatch.cpp DispatchStep::end_with_reason
	if
	:: late -> write_reason(); goto leave
	:: why != OK -> goto leave
	:: else -> skip
	fi;
#endif
	atomic { busy[me*D + sl] = e; open = open | (1 << e) };  /* the caller has its batch */
#ifndef PUSH
	// label store_y = src/ep/exchange.cpp place_y
	start(RETURNED);                                         /* and writes y */
#endif
	goto call;

finish:
#ifdef PUSH
	// label store_home = src/ep/exchange.cpp push_home
	start(RETURNED);
#endif
#ifndef READ_AFTER_RETURNED
	// label load_cells = src/ep/exchange.cpp place_received
	// label load_x = src/ep/exchange.cpp find_row
	// label load_x_materialise = src/ep/exchange.cpp materialise
	all_seen(ARRIVED);                                       /* rows and counts were read until now */
#endif
	atomic { busy[me*D + sl] = 0; open = open & ~(1 << e) };
	if
	:: atomic { drops > 0 -> drops--; cause[e] = true };
		// label raise_dropped = src/ep/combine.cpp drop
		// label drop_batch = src/session.cpp ExpertBatch::~ExpertBatch
		raise(RETURNED, DROP);
		OUT(me,e) = LEFT_OUT
	:: atomic { bads > 0 -> bads--; cause[e] = true };       /* combine's own input is bad */
		// label combine_reason = src/ep/combine.cpp CombineStep::start
		// label leave_combine = src/ep/combine.cpp CombineStep::start
		write_reason();
		goto leave
	:: true ->
		// label raise_returned = src/ep/combine.cpp CombineStep::start
		raise(RETURNED, OK);
#ifdef READ_AFTER_RETURNED
		all_seen(ARRIVED);
#endif
		// label await_returned = src/ep/combine.cpp CombineStep::start
		await(RETURNED);
		if
		:: why == OK ->
#ifndef SUM_AFTER_END
			// label load_y = src/ep/exchange.cpp sum_read
			// label load_home = src/ep/exchange.cpp sum_home
			all_seen(RETURNED);                              /* still whole when the last row was summed */
#endif
			OUT(me,e) = WON
		:: else ->
			d_step {
				OUT(me,e) = TAIL;
				if :: mine -> alone[me*(NE+2) + e] = 1 + last[me] :: else -> skip fi;
#ifndef NO_PRIOR
				// label prior = src/session.cpp Session::Impl::end
				prior = prior || mine
#endif
			}
		fi
	fi;
	goto call;

leave:                                                       /* an error before `returned`: close the epoch, say so */
	OUT(me,e) = LOST;
#ifndef SILENT
	// label raise_gone = src/ep/flags.cpp leave
	// label leave_dispatch = src/ep/dispatch.cpp DispatchStep::end
	// label leave_refused = src/ep/dispatch.cpp DispatchStep::refused
	// label abandon_dispatch = src/ep/dispatch.cpp DispatchStep::abandon
	// label abandon_combine = src/ep/combine.cpp CombineStep::abandon
	raise(GONE, FAIL);
#endif
	reason = false;
	goto call;

done:
	skip
}

#ifdef TSO
proctype drain(byte me) {                                    /* store buffer: flags reach memory later, in order */
	byte kind, dst, v, e, sl;
	bool reason;
end:
	do
	:: atomic { sb[me]?kind,dst,v,reason -> e = EP(v); sl = e % D; data_whole(kind, dst, CODE(v)); FL(kind,dst,me) = v }
	od
}
#endif

#define FINISHED(i) (fin & (1 << (i)))
#define ADD(x) script[k] = x; k++
#define FINISH(i) n >= i && !FINISHED(i) -> ADD(i); fin = fin | (1 << i)
init {
	byte n = 0, k = 0, fin = 0, p, q, e, f;
	bool tried = false;
	atomic {                                                 /* any order of calls a caller may make */
		do
		:: n < NE && (n + 1 <= D || FINISHED(n + 1 - D)) -> ADD(DISPATCH); n++
#ifdef OVERCALL
		// label refuse_open = src/session.cpp refuse_open
		:: n < NE && !tried && n + 1 > D && !FINISHED(n + 1 - D) -> ADD(TRY); tried = true
#endif
		:: FINISH(1)
		:: FINISH(2)
		:: FINISH(3)
		:: FINISH(4)
		:: FINISH(5)
		:: FINISH(6)
		:: n == NE && fin == ((1 << (NE+1)) - 2) -> ADD(END); break
		od;
#ifdef TSO
		p = 0; do :: p < R -> run drain(p); p++ :: else -> break od;
#endif
		p = 0; do :: p < R -> run rank(p); p++ :: else -> break od
	};
#ifdef TSO
	_nr_pr == 1 + R;
#else
	_nr_pr == 1;
#endif
	d_step {                                                 /* agreement, once all have come to the end */
		e = 1;
		do
		:: e > NE -> break
		:: else ->
			p = 0;
			do
			:: p == R -> break
			:: else ->
				q = 0;
				do
				:: q == R -> break
				:: q == p || ((dead >> p) & 1) || ((dead >> q) & 1) -> q++
				:: else ->
					/* an error on one rank before it had returned: combine succeeds on no rank */
					assert(OUT(p,e) != LOST || OUT(q,e) != WON);
					/* bad input in dispatch: the same call fails on every rank */
					assert(!badly[e] || OUT(q,e) == LOST);
					/* no error without a cause */
					assert(OUT(p,e) < LOST || cause[e] || dead);
					/* alone with an error in combine, then another dispatch: every other rank gets an error, now or there */
					f = e;
					do
					:: f > NE -> break
					:: f <= NE && OUT(q,f) >= LOST -> break
					:: else -> f++
					od;
					assert(alone[p*(NE+2) + e] == 0 || last[p] < alone[p*(NE+2) + e] || f <= NE);
					q++
				od;
				p++
			od;
			e++
		od
	}
}
