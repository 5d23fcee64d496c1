/* Switchyard from C, and from everything that calls C: session.hpp and exchange.hpp, call for call, but for the parts of a
 * dispatch that is under way (counts, rows of one expert), the trace, the pipeline and expert memory.
 *
 *   sy_options options;
 *   sy_options_init(&options, sizeof options);
 *   options.hidden = 7168; options.topk = 8; options.experts = 256; options.tokens_max = 4096; options.dtype = SY_BF16;
 *   sy_session* session = NULL;
 *   if (sy_open_from_environment(&options, "", &session) != SY_OK) puts(sy_last_error());
 *
 *   sy_batch batch;
 *   sy_dispatch_args out = {.struct_size = sizeof out, .x = x, .tokens = tokens, .topk_ids = ids};
 *   sy_dispatch(session, &out, &batch);
 *   sy_batch_view view = {.struct_size = sizeof view};
 *   sy_batch_get(&batch, &view);      ... the experts of this rank sy_batch_gather_f32() their rows and write view.y ...
 *   sy_combine_args home = {.struct_size = sizeof home, .topk_weights = weights, .out = result};
 *   sy_combine(session, &batch, &home);
 *   sy_free(&session);
 *
 * Conventions
 *
 * 1. Every function that can fail returns an int32_t code: SY_OK, or why not. sy_last_error() then holds the text: what
 *    happened, expected against found, what to do next. No exception leaves a call.
 * 2. A struct starts with `struct_size`, which the caller sets to sizeof its type. Structs only ever grow at their end. What a
 *    caller with an older header does not know takes its default; what a library older than its caller does not know must be
 *    zero, and is refused otherwise.
 * 3. Null is refused with a text wherever something is needed. Pointers to rows may be null where there are no rows.
 * 4. T tokens, H hidden, K topk, E experts, R ranks, L experts of this rank, N rows received, S scales of a row. [N,H] is
 *    row-major and dense. Sizes and strides count what their names say; `bytes` are bytes.
 * 5. All ranks make the same calls in the same order. Calls of one session, its batches included, come from one thread at a
 *    time; different sessions are independent.
 * 6. Opening allocates everything. sy_dispatch, sy_combine and the functions of a batch allocate nothing unless they fail.
 *    Only sy_open*, sy_session_x, sy_dispatch, sy_combine, sy_wait, sy_take, sy_shrink, and of an exchange sy_exchange_open*,
 *    sy_exchange_send, sy_exchange_alltoallv and sy_exchange_send_back wait, until their deadline at most.
 * 7. After an error of sy_dispatch or sy_combine every rank of the group gets one too, at the latest in its next dispatch, and
 *    (except after SY_PEER_LOST and SY_PEER_CLOSED) the session goes on with the next dispatch. SY_STALE and SY_DEPTH are about
 *    this rank's call alone.
 */
#ifndef SWITCHYARD_SWITCHYARD_H
#define SWITCHYARD_SWITCHYARD_H

#include <stddef.h>
#include <stdint.h>

/* Part of the library's interface: visible to those who link it. */
#ifndef SY_API
#ifdef __cplusplus
#define SY_API [[gnu::visibility("default")]]
#else
#define SY_API __attribute__((visibility("default")))
#endif
#endif

#define SY_VERSION_MAJOR 0
#define SY_VERSION_MINOR 1
#define SY_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------------- errors */

/* Kinds of trouble; the numbers of switchyard::Code. */
enum {
    SY_OK = 0,
    SY_BAD_INPUT = 1,   /* an argument, id, shape or option is outside what is allowed; the text names it */
    SY_MISMATCH = 2,    /* ranks disagree about an option, a shape or a version; the text names the pair and the field */
    SY_CAPACITY = 3,    /* more rows than the window holds; the text gives the number needed */
    SY_STALE = 4,       /* a batch used twice, after its session closed, or with another session */
    SY_DEPTH = 5,       /* one dispatch more in flight than the session's depth */
    SY_PEER_LOST = 6,   /* a rank's process ended */
    SY_PEER_CLOSED = 7, /* a rank closed its session */
    SY_PEER_LEFT = 8,   /* a rank gave this epoch up, for a reason of its own */
    SY_TIMED_OUT = 9,   /* the deadline of the call passed; the text says who was awaited */
    SY_SYSTEM = 10,     /* the operating system refused something, memory included */
    SY_CORRUPT = 11     /* a peer's window or message holds what no correct peer writes */
};

/* The name of a code as it stands in texts, "bad_input"; "unknown" for other numbers. Never null. */
SY_API const char* sy_code_name(int32_t code);

/* The text of the last call of this thread that failed; "" before the first. Calls that succeed leave it alone. Never null;
 * valid until a call of this thread fails again or the thread ends. */
SY_API const char* sy_last_error(void);

/* The version of the library that runs, "0.1.0"; SY_VERSION_* are those of the header. */
SY_API const char* sy_version(void);

/* ------------------------------------------------------------------------------------------------------------ options */

/* Values of the choices among the options. dtype: */
enum { SY_F16 = 0, SY_BF16 = 1, SY_F32 = 2 };

/* dispatch_quant: 0..4; combine_quant: 0, 5, 6 */
enum {
    SY_NONE = 0,
    SY_INT8_TOKEN = 1,
    SY_MXFP8_E5M2 = 2,
    SY_MXFP8_E4M3 = 3,
    SY_FP8_E4M3_BLOCK128 = 4,
    SY_INT8_BLOCK8 = 5,
    SY_INT8_BLOCK128 = 6
};

/* mx_rule, mx_overflow, fp8_scale, expert_token_nums, landing, huge_pages, combine_path, in this order */
enum { SY_MX_FLOOR = 0, SY_MX_CEIL = 1 };
enum { SY_MX_SATURATE = 0, SY_MX_INF = 1 };
enum { SY_FP8_SCALE_F32 = 0, SY_FP8_SCALE_UE8M0 = 1 };
enum { SY_NUMS_CUMSUM = 0, SY_NUMS_COUNT = 1 };
enum {
    SY_LANDING_AUTO = 0,
    SY_LANDING_PACKED = 1,
    SY_LANDING_PADDED = 2,
    SY_LANDING_IN_PLACE = 3,
    SY_LANDING_ALLGATHER = 4,
    SY_LANDING_TWO_LEVEL = 5,
    SY_LANDING_ALLTOALLV = 6
};
enum { SY_HUGE_PAGES_AUTO = 0, SY_HUGE_PAGES_NO = 1, SY_HUGE_PAGES_YES = 2 };
enum { SY_COMBINE_AUTO = 0, SY_COMBINE_READ = 1, SY_COMBINE_PUSH = 2 };

/* progress: who moves what sy_dispatch_async and sy_combine_async began */
enum { SY_PROGRESS_CALLER = 0, SY_PROGRESS_WORKER = 1 };

/* simd */
enum {
    SY_SIMD_AUTO = 0,
    SY_SIMD_SCALAR = 1,
    SY_SIMD_SSSE3 = 2,
    SY_SIMD_SSE4 = 3,
    SY_SIMD_AVX2 = 4,
    SY_SIMD_AVX512 = 5,
    SY_SIMD_AVX512_DL = 6,
    SY_SIMD_NEON = 7
};

/* The options of a session. Meaning, unit and limits of each field: options.hpp, or sy_option_at(). deliver_weights: 0 = no,
 * anything else = yes. */
typedef struct sy_options {
    size_t struct_size;
    /* shape: equal on all ranks */
    int64_t hidden;
    int64_t topk;
    int64_t experts;
    int64_t tokens_max;
    int64_t dtype;
    /* number formats: equal on all ranks */
    int64_t dispatch_quant;
    int64_t combine_quant;
    int64_t mx_rule;
    int64_t mx_overflow;
    int64_t fp8_scale;
    /* form of the results: equal on all ranks */
    int64_t expert_token_nums;
    int64_t expert_alignment;
    int64_t deliver_weights;
    /* how it is done: equal on all ranks, never changes a result */
    int64_t landing;
    int64_t combine_path;
    int64_t depth;
    int64_t rows_max;
    int64_t partial; /* 0 = no, anything else = yes */
    /* this rank only */
    int64_t workers;
    int64_t simd;
    int64_t timeout_ms;
    int64_t huge_pages;
    int64_t pin;         /* 0 = no, anything else = yes */
    int64_t jitter_us;   /* for tests */
    int64_t group_ranks; /* of landing two_level; equal on all ranks, never changes a result; 0 = as the machine is built */
    int64_t progress;
    int64_t cell_rows; /* of landing padded: rows a rank can send to one expert; equal on all ranks; 0 = the worst case */
} sy_options;

/* One line of the table of options. The texts live as long as the library. */
typedef struct sy_option_info {
    size_t struct_size;
    const char* name;   /* field of sy_options */
    const char* flags;  /* on the command line, aliases after a comma; for timeout_ms that is --timeout, in seconds */
    const char* unit;   /* "rows", "ms", or "" for a choice */
    const char* values; /* names of a choice, "f16=0 bf16=1 f32=2"; "" for a number */
    const char* help;
    int64_t low, high; /* allowed, both included */
    int64_t agreed;    /* 1: must be equal on all ranks */
} sy_option_info;

/* Sets struct_size and every field to its default. struct_size: sizeof(sy_options) as the caller knows it. The defaults of
 * hidden, topk and experts are 0 and must be replaced. */
SY_API int32_t sy_options_init(sy_options* options, size_t struct_size);

/* Sets an option by name from text, a number or the name of a choice: ("dispatch_quant", "mxfp8_e5m2"). On error, which names
 * what is allowed, nothing has changed. */
SY_API int32_t sy_options_set(sy_options* options, const char* name, const char* text);

/* Writes an option as such a text, with its final 0, to text [text_bytes]. SY_BAD_INPUT when it does not fit; 32 bytes
 * are enough for every option of today. */
SY_API int32_t sy_options_get(const sy_options* options, const char* name, char* text, size_t text_bytes);

/* Sets options from the environment: SWITCHYARD_<NAME>, e.g. SWITCHYARD_TIMEOUT_MS=5000. On error nothing has changed. */
SY_API int32_t sy_options_from_environment(sy_options* options);

/* Everything that can be found wrong with one rank's options, in a group of `ranks`, without asking another rank. */
SY_API int32_t sy_options_check(const sy_options* options, int64_t ranks);

/* The table of options: how many, and line `index`, 0..count-1. */
SY_API int64_t sy_option_count(void);
SY_API int32_t sy_option_at(int64_t index, sy_option_info* info);

/* First, and last + 1, expert that a rank owns. */
SY_API int32_t sy_experts_of(int64_t rank, int64_t ranks, int64_t experts, int64_t* first, int64_t* last);

/* ------------------------------------------------------------------------------------------------------------ session */

/* One rank's membership in a group. */
typedef struct sy_session sy_session;

/* Who belongs together: the ranks of one group are processes of one user on one host. */
typedef struct sy_group {
    size_t struct_size;
    int32_t rank;
    int32_t size;
    const char* name;  /* equal on all ranks; groups that open at the same time on one host have different names, sessions of
                          one group may have the same if all ranks open them in the same order; null = "default" */
    const char* token; /* equal on all ranks; a process without it is refused; null = "" */
} sy_group;

/* What is fixed once a session is open. */
typedef struct sy_session_info {
    size_t struct_size;
    int64_t rank;
    int64_t size;          /* R */
    int64_t experts_local; /* L */
    int64_t window_bytes;  /* address space reserved per rank; only touched pages cost memory */
    const char* simd_name; /* instruction set of the kernels in use; lives as long as the library */
} sy_session_info;

/* What a session has done since it opened, on this rank. */
typedef struct sy_stats {
    size_t struct_size;
    uint64_t dispatches;
    uint64_t combines;
    uint64_t rows_sent;        /* (token, k) pairs sent by dispatch, own rank included */
    uint64_t rows_received;    /* without pad rows */
    uint64_t bytes_sent;       /* written by dispatch, own rank included: with packed and padded payload, scales, source info
                                  and weights of every row, with alltoallv whole places of its blocks, with in_place, allgather
                                  and two_level each token once per group that reads it, and its ids */
    uint64_t bytes_sent_peers; /* the part of it that went to other ranks */
    uint64_t bytes_home;       /* bytes of experts' rows read (or pushed) by combine */
    int64_t wait_ns_counts;    /* waiting for the peers' counts (and for a slot) */
    int64_t wait_ns_rows;      /* waiting for the peers' rows */
    int64_t wait_ns_returned;  /* waiting for the experts' output */
} sy_stats;

/* Opens this rank's session: meets the others, compares every agreed option, maps the windows. Every rank of the group gets the
 * same outcome. Waits at most options.timeout_ms. On error *session is null. The caller frees it with sy_free(). */
SY_API int32_t sy_open(const sy_options* options, const sy_group* group, sy_session** session);

/* The same; the group is what RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (as torchrun sets them) and SWITCHYARD_TOKEN say.
 * `label` tells groups of one job apart; null = "". */
SY_API int32_t sy_open_from_environment(const sy_options* options, const char* label, sy_session** session);

/* Ranks as threads of this process: fills sessions [ranks]; sessions[r] belongs to the thread that plays rank r. On error
 * every element is null. Each is freed on its own. */
SY_API int32_t sy_open_local(const sy_options* options, int32_t ranks, sy_session** sessions);

/* The same with each rank's own options [ranks]; they are compared as between processes. */
SY_API int32_t sy_open_local_each(const sy_options* const* options, int32_t ranks, sy_session** sessions);

/* Experts with replicas. A rank's experts lie in slots; slot s of `slots` lies on the rank that sy_experts_of says of expert s
 * of so many. See plan.hpp for what each field and choice means. */
enum { SY_CHOICE_ROUND_ROBIN = 0, SY_CHOICE_NEAREST = 1, SY_CHOICE_LEAST_LOADED = 2 };
typedef struct sy_placement {
    size_t struct_size;
    int64_t ranks;
    int64_t experts;
    int64_t slots;
    const int32_t* expert_of; /* [slots] */
    const int32_t* parts;     /* [slots] 1..4096, or null: equal shares */
    int64_t choice;
} sy_placement;

/* Whether every expert has a slot, no rank holds one twice, and all is in range; and the number that ranks compare. */
SY_API int32_t sy_placement_check(const sy_placement* placement);
SY_API int32_t sy_placement_hash(const sy_placement* placement, uint64_t* hash);

/* Plans a placement for loads [experts], and fills expert_of [slots] and parts [slots] (all 1 for equal shares).
 * ranks_per_group: 0 = one group of all ranks; expert_groups: 0 = each expert its own. The same on every rank that asks with
 * the same loads. */
SY_API int32_t sy_plan_placement(const uint64_t* loads, int64_t experts, int64_t ranks, int64_t slots, int64_t ranks_per_group,
                                 int64_t expert_groups, int64_t choice, int32_t* expert_of, int32_t* parts);

/* sy_open and sy_open_local with experts placed by a table, of which every rank gives the same. topk_ids go on naming experts,
 * results are those of any other placement; what a batch calls an expert of this rank is one of its slots. The placement is
 * read during the call only. sy_open_local_placed fills sessions [placement->ranks]. */
SY_API int32_t sy_open_placed(const sy_options* options, const sy_group* group, const sy_placement* placement,
                              sy_session** session);
SY_API int32_t sy_open_local_placed(const sy_options* options, const sy_placement* placement, sy_session** sessions);

/* Leaves the group: the other ranks' calls that need this rank fail with SY_PEER_CLOSED, this session's further calls and those
 * of its batches with SY_STALE. Never waits. Closing again does nothing. */
SY_API int32_t sy_close(sy_session* session);

/* Closes, gives all memory back and sets *session to null; does nothing when it is null already. Ends the views of all its
 * batches, whose functions, like those of any copy of the handle, must not be called any more: they cannot tell. */
SY_API int32_t sy_free(sy_session** session);

/* These three also work on a closed session. `options`: with every automatic and 0 replaced by what is used. */
SY_API int32_t sy_session_get(const sy_session* session, sy_session_info* info);
SY_API int32_t sy_session_options(const sy_session* session, sy_options* options);
SY_API int32_t sy_session_stats(const sy_session* session, sy_stats* stats);

/* Fills wait_ns [R] with the nanoseconds this rank has stood waiting while that rank was the next one it lacked, since the
 * session opened. SY_BAD_INPUT when `count` is not R. Works on a closed session. */
SY_API int32_t sy_session_waits(const sy_session* session, int64_t* wait_ns, int64_t count);

/* Writes why the session has the landing it has, in lines of text with a final 0, to text [text_bytes]: with landing auto what
 * each was expected to cost, cheapest first. SY_BAD_INPUT, which says how many bytes it takes, when it does not fit; 4096 are
 * enough today. Works on a closed session. */
SY_API int32_t sy_session_explain(const sy_session* session, char* text, size_t text_bytes);

/* Rows counted since the session opened or sy_session_reset_loads(): from this rank to each expert [E]; from all ranks to each
 * expert [E], to each slot [S] (experts again without a placement), to each rank [R]. Always on. */
enum { SY_LOADS_SENT = 0, SY_LOADS_EXPERTS = 1, SY_LOADS_SLOTS = 2, SY_LOADS_RANKS = 3 };

/* Fills loads [count]; SY_BAD_INPUT names the right count. Works on a closed session. */
SY_API int32_t sy_session_loads(const sy_session* session, int32_t which, uint64_t* loads, int64_t count);
SY_API int32_t sy_session_reset_loads(sy_session* session);

/* ----------------------------------------------------------------------------------------------------- dispatch, combine */

/* The rows this rank received in one dispatch: a ticket, to be handed on and copied as it is. All copies end together, with
 * sy_combine, sy_drop or sy_close; one that has ended is refused with SY_STALE until its session is freed. */
typedef struct sy_batch {
    sy_session* session; /* null = none */
    uint64_t epoch;      /* number of the dispatch */
} sy_batch;

typedef struct sy_dispatch_args {
    size_t struct_size;
    const void* x;              /* [T,H] of options.dtype; rows are dense inside, at any address */
    int64_t tokens;             /* T, 0..tokens_max; may differ between ranks */
    int64_t row_stride;         /* elements from one row of x to the next; 0 = hidden */
    const int32_t* topk_ids;    /* [T,K], 0..experts-1, or -1 for an unused slot */
    const float* topk_weights;  /* [T,K]; needed only with options.deliver_weights */
    uint64_t tag;               /* if set, must be equal on all ranks: (layer, step), say */
    int64_t timeout_ms;         /* deadline of this call; 0 = the session's */
    const int64_t* send_counts; /* [E] if set: rows this rank sends to each expert; what topk_ids do not say is a mismatch on
                                   all ranks */
    const int64_t* recv_counts; /* [R] if set: rows this rank expects from each rank; anything else is a mismatch on all ranks
                                   that names the pair */
} sy_dispatch_args;

typedef struct sy_combine_args {
    size_t struct_size;
    const void* y;             /* [N,H] of options.dtype, rows in the batch's order; null = view.y was filled */
    const float* topk_weights; /* [T,K] of the tokens dispatched; null = weight 1 */
    const void* shared;        /* [T,H] output of shared experts, added unweighted; null = none */
    void* out;                 /* [T,H] of options.dtype, dense, written whole; may be null when T = 0 */
    int64_t timeout_ms;        /* deadline of this call; 0 = the session's */
    int32_t* missing;          /* [T] if set: slots of each token that contributed nothing because their expert's rank has
                                  died (option partial) */
    void* rows;                /* instead of out: [T,K,H] of options.dtype, each slot's row as its expert left it, not summed:
                                  without topk_weights and shared. Unused slots are left alone */
} sy_combine_args;

/* Views of a batch into the window, no copy: valid until sy_combine, sy_drop, sy_close or sy_free. */
typedef struct sy_batch_view {
    size_t struct_size;
    uint64_t epoch;
    int64_t rows;                           /* N, pad rows of expert_alignment included */
    int64_t tokens;                         /* T of this rank's own dispatch */
    int64_t experts_local;                  /* L */
    int64_t payload_bytes;                  /* of one row in its wire format */
    int64_t scale_bytes;                    /* of its scales; 0 without quantisation */
    const int32_t* assist_info_for_combine; /* [N,3] (source rank, token, k); -1 in pad rows */
    const int64_t* expert_token_nums;       /* [L] rows of each local expert, or their running sum */
    const int64_t* expert_offsets;          /* [L+1] first row of each local expert, pad rows counted */
    const int32_t* ep_recv_count;           /* [L,R] running sum over (local expert, source rank) */
    const float* weights;                   /* [N] topk weights; null unless options.deliver_weights */
    void* y;                                /* [N,H] of options.dtype: write the experts' output here and combine copies
                                               nothing. Streaming stores must be fenced by the thread that made them. */
} sy_batch_view;

/* Sends each token to the ranks of its experts; *batch is what this rank's experts received, or {null, 0} on error. Waits for
 * the counts and rows of all ranks. No batch exists anywhere when the input of any rank was bad; arguments that cannot be
 * read (null, or by their struct_size) are bad input that the other ranks hear of like any other. */
SY_API int32_t sy_dispatch(sy_session* session, const sy_dispatch_args* args, sy_batch* batch);

/* Where the next dispatch's tokens may be written, [tokens_max,H] of dtype: with landing in_place and no quantisation a
 * dispatch whose x is this place copies nothing. *x is null otherwise. Waits until every rank has finished reading the epoch
 * that used the slot before (at once after a combine); the place is good for the very next dispatch. */
SY_API int32_t sy_session_x(sy_session* session, void** x);

/* Sums each token's rows: out[t] = sum over k of weights[t,k] * y(row of t,k), in k order, in f32, rounded once. Waits for the
 * experts' output of all ranks. Uses the batch up and sets *batch to {null, 0}, whatever happens, unless the call is refused
 * with SY_STALE. Arguments that cannot be read drop the batch. */
SY_API int32_t sy_combine(sy_session* session, sy_batch* batch, const sy_combine_args* args);

/* The two halves of sy_dispatch and sy_combine. Beginning never waits; everything the arguments point to must stay until the
 * end. *pending is a ticket like sy_batch: its end is given out once, by sy_poll, sy_wait or sy_take, and it is {null} then,
 * but for a dispatch that has ended well: its batch waits for sy_take. Tickets may be waited for in any order. A slot is taken
 * from sy_dispatch_async until the end of its combine was given out; one dispatch too many is refused with SY_DEPTH. Who moves
 * what was begun on: option progress. */
typedef struct sy_pending {
    sy_session* session; /* null = none */
    uint64_t epoch;      /* number of the dispatch */
    int64_t is_dispatch; /* 1: of a dispatch, 0: of a combine */
} sy_pending;

SY_API int32_t sy_dispatch_async(sy_session* session, const sy_dispatch_args* args, sy_pending* pending);
/* Uses the batch up as sy_combine does. */
SY_API int32_t sy_combine_async(sy_session* session, sy_batch* batch, const sy_combine_args* args, sy_pending* pending);

/* One look, never waiting: *done = 1 when it has ended well, 0 when it goes on; the code of the call when it has failed. */
SY_API int32_t sy_poll(sy_pending* pending, int32_t* done);
/* Waits until it has ended, at most timeout_ms (0: until its own deadline ends it). *done as above; null when timeout_ms is 0.
 */
SY_API int32_t sy_wait(sy_pending* pending, int64_t timeout_ms, int32_t* done);
/* Waits for a dispatch and hands its batch out. */
SY_API int32_t sy_take(sy_pending* pending, sy_batch* batch);
/* Gives it up without waiting: a dispatch for all ranks (SY_PEER_LEFT), of a combine this rank's result only. */
SY_API int32_t sy_abandon(sy_pending* pending);
/* Moves everything that was begun as far as it goes without waiting. */
SY_API int32_t sy_progress(sy_session* session);

/* Goes on with the ranks that are left: after SY_PEER_LOST, SY_PEER_CLOSED or SY_TIMED_OUT, called on all of them. Ends all
 * open batches, agrees with the others on who is left and on the next epoch, and makes no memory; ranks keep their numbers and
 * experts. kill_missing != 0: a member that has not come by the deadline (timeout_ms; 0 = the session's) is killed and its end
 * awaited. is_member [count = R] gets 1 for each rank that is left; null when not wanted. SY_TIMED_OUT names who did not
 * come; then only sy_shrink, sy_close and sy_free are allowed. */
SY_API int32_t sy_shrink(sy_session* session, int64_t timeout_ms, int32_t kill_missing, int32_t* is_member, int64_t count);

/* Gives a batch up: the other ranks' combine of it fails at once with SY_PEER_LEFT. Sets *batch to {null, 0}. Never waits. */
SY_API int32_t sy_drop(sy_batch* batch);

/* Fills the view. */
SY_API int32_t sy_batch_get(const sy_batch* batch, sy_batch_view* view);

/* The rows in one piece, in their wire format: *expand_x [N,H], rows by (local expert, source rank, token, k); *dynamic_scales
 * [N,S], null without quantisation. dynamic_scales may be null when they are not wanted. With landing in_place, allgather and
 * two_level the first call copies all rows here: prefer sy_batch_row() or sy_batch_gather(). */
SY_API int32_t sy_batch_expand_x(const sy_batch* batch, const void** expand_x, const void** dynamic_scales);

/* Row i of 0..N-1 in its wire format, wherever the landing keeps it: *payload [H] elements, *scales [S] or null. `scales` may
 * be null when they are not wanted. */
SY_API int32_t sy_batch_row(const sy_batch* batch, int64_t i, const void** payload, const void** scales);

/* Copies rows first..first+count-1 of a local expert, in wire format, to tile [count, payload_bytes] and, when quantised and
 * wanted (not null), tile_scales [count, scale_bytes]. */
SY_API int32_t sy_batch_gather(const sy_batch* batch, int64_t expert, int64_t first, int64_t count, void* tile,
                               void* tile_scales);

/* The same decoded: tile [count,H] f32. */
SY_API int32_t sy_batch_gather_f32(const sy_batch* batch, int64_t expert, int64_t first, int64_t count, float* tile);

/* ------------------------------------------------------------------------------------------------------------ exchange */

/* The index-driven sparse all-to-all by itself: items of up to eight payloads of bytes. exchange.hpp has the words; the rules
 * of sessions hold: all ranks make the same calls in the same order, and bad input of one is an error on all in the same call.
 */
typedef struct sy_exchange sy_exchange;

/* What one rank received in one send: views into the window, until it is sent back or freed. */
typedef struct sy_received sy_received;

enum { SY_PAYLOADS_MAX = 8 };

typedef struct sy_exchange_options {
    size_t struct_size;
    int64_t payloads;                       /* how many, 1..8 */
    int64_t payload_bytes[SY_PAYLOADS_MAX]; /* bytes of one item in each */
    int64_t experts;                        /* E, destinations; 0 = one per rank */
    int64_t topk;                           /* K, destinations per item */
    int64_t items_max;                      /* the most items any rank passes to one send */
    int64_t rows_max;                       /* rows a rank can receive in one send; 0 = the worst case */
    int64_t strategy;                       /* SY_LANDING_*; never changes a byte of the result */
    int64_t group_ranks;                    /* of SY_LANDING_TWO_LEVEL */
    int64_t depth;                          /* sends in flight */
    int64_t workers;                        /* this rank only */
    int64_t timeout_ms;                     /* this rank only */
} sy_exchange_options;

typedef struct sy_send_args {
    size_t struct_size;
    const void* payloads[SY_PAYLOADS_MAX]; /* [n, payload_bytes[p]] each, dense */
    int64_t items;                         /* n, 0..items_max */
    const int32_t* expert_indices;         /* [n,K], 0..E-1, or -1 for an unused one */
    const int64_t* send_counts;            /* [E] or null: must be what the indices say */
    const int64_t* recv_counts;            /* [R] or null: rows expected from each rank */
    uint64_t tag;                          /* if set, must be equal on all ranks */
    int64_t timeout_ms;                    /* 0 = the exchange's */
} sy_send_args;

typedef struct sy_alltoallv_args {
    size_t struct_size;
    const void* payloads[SY_PAYLOADS_MAX]; /* [sum of send_counts, payload_bytes[p]] each, by the rank they go to */
    const int64_t* send_counts;            /* [R] items for each rank */
    const int64_t* recv_counts;            /* [R] or null: items expected from each rank */
    uint64_t tag;
    int64_t timeout_ms;
} sy_alltoallv_args;

typedef struct sy_send_back_args {
    size_t struct_size;
    void* payloads[SY_PAYLOADS_MAX]; /* [n,K, payload_bytes[p]] each; null, where there are several: not wanted */
    int64_t timeout_ms;
} sy_send_back_args;

typedef struct sy_received_view {
    size_t struct_size;
    uint64_t epoch;
    int64_t rows;                          /* N, by (local expert, source rank, item, k) */
    int64_t stride;                        /* bytes from one row to the next, of payloads and answers */
    const void* payloads[SY_PAYLOADS_MAX]; /* row i of payload p at payloads[p] + i * stride */
    void* answers[SY_PAYLOADS_MAX];        /* where the answers of sy_exchange_send_back go */
    const int32_t* source_info;            /* [N,3] (source rank, item, k) */
    const int64_t* recv_counts;            /* [L,R] rows of each local expert from each rank */
    const int64_t* recv_offsets;           /* [L+1] first row of each local expert */
    const int64_t* send_counts;            /* [E] rows of mine for each expert */
    const int64_t* send_offsets;           /* [E+1] their running sum */
    const int64_t* permutation;            /* [send_offsets[E]] index item*K+k at each place of the order by expert */
} sy_received_view;

/* Sets struct_size and every field to its default. payloads, payload_bytes and items_max must be replaced. */
SY_API int32_t sy_exchange_options_init(sy_exchange_options* options, size_t struct_size);

/* As sy_open and sy_open_local. The caller frees an exchange with sy_exchange_free(). */
SY_API int32_t sy_exchange_open(const sy_exchange_options* options, const sy_group* group, sy_exchange** exchange);
SY_API int32_t sy_exchange_open_local(const sy_exchange_options* options, int32_t ranks, sy_exchange** exchanges);

/* Leaves the group and gives the memory back; sets *exchange to null. What it received must have been freed or sent back. */
SY_API int32_t sy_exchange_free(sy_exchange** exchange);

/* Sends each item to the owners of its indices; *received is what this rank's experts received, or null on error. Waits for all
 * ranks. Arguments that cannot be read are bad input that the other ranks hear of like any other. */
SY_API int32_t sy_exchange_send(sy_exchange* exchange, const sy_send_args* args, sy_received** received);

/* The same with counts instead of indices, of an exchange with one expert per rank and topk 1. */
SY_API int32_t sy_exchange_alltoallv(sy_exchange* exchange, const sy_alltoallv_args* args, sy_received** received);

/* Fills the view. The first call may copy rows to where `payloads` point. */
SY_API int32_t sy_received_get(const sy_received* received, sy_received_view* view);

/* Brings the answers home. Waits for all ranks. Frees *received and sets it to null, whatever happens, unless SY_STALE. */
SY_API int32_t sy_exchange_send_back(sy_exchange* exchange, sy_received** received, const sy_send_back_args* args);

/* Gives the rows up, if they were not sent back: the other ranks' send_back fails at once with SY_PEER_LEFT. Sets *received to
 * null; does nothing when it is null already. */
SY_API int32_t sy_received_free(sy_received** received);

#ifdef __cplusplus
}
#endif

#endif
