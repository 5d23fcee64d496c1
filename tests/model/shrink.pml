/* shrink.pml: survivors of a death (or of a lost deadline) agree on who is left and on the next epoch, without new memory.
 *
 * Every rank that ended an epoch with an error closes all its epochs, ends all its stores into other windows, then writes
 * joined = (generation + 1, my next epoch) to every peer, and waits for each member to have joined, died or closed. Then it
 * offers (those who joined, the largest next epoch) by one compare-and-swap on the decision word of the new generation;
 * the first offer stands, all adopt it. Epochs below the new base count as closed; no flag is reset.
 * Only one phase of an epoch is modelled (rows + arrived, returned, gone). The place of a row depends on source AND epoch,
 * as with packed rows: a late store of an old epoch would hit another source's row.
 * Faults: DEATHS, LATES. Who has joined and then died may be taken along here or not; the code leaves him out.
 *
 * run quick -DR=3 -DNE=2 -DDEATHS=1
 * run long -DR=3 -DNE=3 -DDEATHS=1
 * run long -DR=3 -DNE=3 -DDEATHS=2
 * run long -DR=3 -DNE=3 -DDEATHS=0 -DLATES=1
 * mutation quick assertion LOCAL_VIEW -DNE=2 -DLATES=1      each rank regroups by what it has seen itself
 * mutation long assertion EARLY_JOIN -DNE=3                joined before the stores of the old epoch have ended
 * mutation long assertion NO_MAX -DNE=3                    no common next epoch
 * mutation long  assertion EXCLUDE -DNE=3 -DLATES=1         a rank that is only slow is left out
 */
#ifndef R
#define R 3
#endif
#ifndef NE
#define NE 4
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef LATES
#define LATES 0
#endif
#define GENS  (DEATHS + LATES + 2)
#define ALL   ((1 << R) - 1)
#define TORN  99
#define AT(dst,src)  ((dst)*R + (src))
#define CELL(dst,src) row[(dst)*R + ((src) + e) % R]
#define IN(q,set) (((set) >> (q)) & 1)

byte row[R*R], arrived[R*R], returned[R*R], gone[R*R];       /* windows */
byte joined[R*R], jnext[R*R];                                /* one word: generation, next epoch */
byte mask[GENS], base[GENS];                                 /* decision: lives in the first rank's window, outlives it */
byte view[GENS], vbase[GENS];                                /* ghost: what the first adopter took */
byte dead, closed;
byte deaths = DEATHS, lates = LATES;

#define DIE  atomic { deaths > 0 -> deaths--; dead = dead | (1 << me); goto stop }
#define LATE atomic { lates > 0 -> lates-- }
#define PEER (q < R && q != me && IN(q,mem))
#define LEFT (gone[AT(me,q)] >= e && returned[AT(me,q)] != e)
// label regroup_asked = src/ep/regroup.cpp asks_to_regroup
#define OVER (IN(q,dead) || IN(q,closed) || joined[AT(me,q)] > gen)

inline raise(f) {
	q = 0;
	do
	:: q == R -> break
	:: q == me || (q < R && !IN(q,mem)) -> q++
	:: PEER -> f[AT(q,me)] = e; q++
	:: DIE
	od
}

proctype rank(byte me) {
	byte e = 1, from = 1, gen = 0, mem = ALL, q, set, top;
epoch:
	if
	:: e > NE -> atomic { closed = closed | (1 << me); goto stop }
	:: e <= NE -> q = 0
	fi;
	do                                                       /* gate */
	:: q == R -> break
	:: q == me || (q < R && !IN(q,mem)) -> q++
	:: PEER && (e - 1 < from || returned[AT(me,q)] == e - 1 || gone[AT(me,q)] >= e - 1) -> q++
	:: PEER && OVER -> goto leave
	:: LATE -> goto leave
	:: DIE
	od;
	atomic { q = 0; do :: q == R -> break :: q < R -> if :: PEER -> CELL(q,me) = TORN :: else -> skip fi; q++ od; q = 0 };
	do                                                       /* rows, then the flag */
	:: q == R -> break
	:: q == me || (q < R && !IN(q,mem)) -> q++
	:: PEER -> d_step { CELL(q,me) = e; arrived[AT(q,me)] = e; q++ }
	:: DIE
	od;
	q = 0;
	do
	:: q == R -> break
	:: q == me || (q < R && !IN(q,mem)) -> q++
	:: PEER && arrived[AT(me,q)] == e -> assert(CELL(me,q) == e); q++
	:: PEER && arrived[AT(me,q)] > e -> assert(false)
	:: PEER && arrived[AT(me,q)] < e && (LEFT || OVER) -> goto leave
	:: LATE -> goto leave
	:: DIE
	od;
	atomic { q = 0; do :: q == R -> break :: q < R -> assert(!PEER || CELL(me,q) == e); q++ od; q = 0 };
	do
	:: q == R -> break
	:: q == me || (q < R && !IN(q,mem)) -> q++
	:: PEER -> returned[AT(q,me)] = e; q++
	:: DIE
	od;
	q = 0;
	do
	:: q == R -> e++; goto epoch
	:: q == me || (q < R && !IN(q,mem)) -> q++
	:: PEER && returned[AT(me,q)] == e -> q++
	:: PEER && returned[AT(me,q)] < e && (LEFT || OVER) -> e++; goto shrink
	:: LATE -> e++; goto shrink
	:: DIE
	od;
leave:
#ifdef EARLY_JOIN
	q = 0; do :: q == R -> break :: q < R -> joined[AT(q,me)] = gen + 1; jnext[AT(q,me)] = e + 1; q++ od;
	q = 0; do :: q == R -> break :: q < R -> if :: PEER -> CELL(q,me) = TORN :: else -> skip fi; q++ od;
#endif
	q = 0;
	do
	:: q == R -> break
	:: q == me || (q < R && !IN(q,mem)) -> q++
	:: PEER -> gone[AT(q,me)] = e; q++
	:: DIE
	od;
	e++;
shrink:
	q = 0;
	// label ask = src/ep/regroup.cpp ask
	// label ask_first = src/ep/regroup.cpp RegroupStep::start
	do
	:: q == R -> break
	:: q < R -> d_step { joined[AT(q,me)] = gen + 1; jnext[AT(q,me)] = e; q++ }
	:: DIE
	od;
	q = 0; set = 1 << me; top = e;
	// label regroup_looks = src/ep/regroup.cpp RegroupStep::poll
	// label regroup_turn = src/ep/regroup.cpp turn_of
	// label regroup_stands = src/ep/regroup.cpp RegroupStep::poll
	do                                                       /* who is left? */
	:: q == R || mask[gen+1] != 0 -> break
	:: q == me || (q < R && !IN(q,mem)) -> q++
	:: PEER && joined[AT(me,q)] > gen ->
		d_step { set = set | (1 << q); if :: jnext[AT(me,q)] > top -> top = jnext[AT(me,q)] :: else -> skip fi; q++ }
	:: PEER && (IN(q,dead) || IN(q,closed)) -> q++
#ifdef EXCLUDE
	:: PEER && lates > 0 -> lates--; q++
#endif
	:: DIE
	od;
#ifdef NO_MAX
	top = e;
#endif
#ifdef LOCAL_VIEW
	if :: q == R -> skip :: else -> set = mask[gen+1]; top = base[gen+1] fi;
	d_step { if :: mask[gen+1] == 0 -> mask[gen+1] = set; base[gen+1] = top :: else -> skip fi };
#else
	// label decide = src/ep/regroup.cpp RegroupStep::poll
	// label wake_others = src/ep/regroup.cpp RegroupStep::poll
	atomic {                                                 /* compare-and-swap: the first offer stands */
		if :: mask[gen+1] == 0 -> mask[gen+1] = set; base[gen+1] = top :: else -> skip fi;
		set = mask[gen+1]; top = base[gen+1]
	};
#endif
	d_step {
		gen++; mem = set; e = top; from = top;
		if :: view[gen] == 0 -> view[gen] = mem; vbase[gen] = e :: else -> skip fi;
		assert(view[gen] == mem && vbase[gen] == e);         /* all adopt the same */
		assert(IN(me,mem))                                   /* nobody alive is left out */
	};
	goto epoch;
stop:
	skip
}
init { byte p; atomic { p = 0; do :: p < R -> run rank(p); p++ :: else -> break od } }
