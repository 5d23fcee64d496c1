// The C interface: each function reads its structs, makes one call of the C++ interface and turns what was thrown into a code
// and a text. Nothing is decided here but who may be null and which fields a caller knows.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <new>
#include <string_view>
#include <type_traits>

#include "switchyard/exchange.hpp"
#include "switchyard/session.hpp"
#include "switchyard/switchyard.h"

using namespace switchyard;

// The handle owns the batches, so that a dispatch allocates nothing: the batch of epoch e lies at e mod depth. An sy_batch only
// names it, which is why a stale one can be told from its successor in the same place.
struct sy_session {
    explicit sy_session(Session&& opened) : session(std::move(opened)), batches(static_cast<size_t>(session.options().depth)) {}

    Session session;
    std::vector<ExpertBatch> batches;  // [depth]
    std::vector<PendingDispatch> going = std::vector<PendingDispatch>(batches.size());
    std::vector<PendingCombine> coming = std::vector<PendingCombine>(batches.size());
};

struct sy_exchange {
    Exchange exchange;
};
struct sy_received {
    Received rows;
    size_t payloads;
    const sy_exchange* of;
};

namespace {

// ---------------------------------------------------------------------------------------------------------------- errors

// A fixed place, because the text of "out of memory" must not need memory. Longer texts are cut.
thread_local std::array<char, 4096> last_error{};

int32_t fail(Code code, std::string_view text) noexcept {
    const size_t length = std::min(text.size(), last_error.size() - 1);
    std::memcpy(last_error.data(), text.data(), length);
    last_error[length] = 0;
    return static_cast<int32_t>(code);
}

// Runs the body of a function of the interface; what it throws becomes the function's code and text.
template <class Body>
int32_t guarded(Body body) noexcept {
    try {
        body();
        return SY_OK;
    } catch (const Error& error) {
        return fail(error.code(), error.what());
    } catch (const std::bad_alloc&) {
        return fail(Code::system, "out of memory. Lower tokens_max, rows_max or depth, or give the process more.");
    } catch (const std::exception& error) {
        return fail(Code::system, error.what());
    } catch (...) {
        return fail(Code::system, "an exception of unknown type.");
    }
}

[[noreturn]] void refuse(Code code, std::string text) {
    throw Error(Status(code, std::move(text)));
}

void throw_if(const Status& status) {
    if (!status.ok()) throw Error(status);
}

// `pointer` must not be null; `what` is where it stands: "sy_dispatch: session".
void need(const void* pointer, const char* what) {
    if (!pointer) refuse(Code::bad_input, fmt::format("{} is null.", what));
}

// A text that the caller has room for.
void store_text(const std::string& value, const char* function, char* text, size_t text_bytes) {
    if (!text) refuse(Code::bad_input, fmt::format("{}: text is null.", function));
    if (value.size() >= text_bytes)
        refuse(Code::bad_input, fmt::format("{}: text_bytes is {}; it needs {}.", function, text_bytes, value.size() + 1));
    std::memcpy(text, value.c_str(), value.size() + 1);
}

// --------------------------------------------------------------------------------------------------------------- structs

template <class T>
constexpr const char* type_name = nullptr;
template <>
constexpr const char* type_name<sy_options> = "sy_options";
template <>
constexpr const char* type_name<sy_option_info> = "sy_option_info";
template <>
constexpr const char* type_name<sy_group> = "sy_group";
template <>
constexpr const char* type_name<sy_session_info> = "sy_session_info";
template <>
constexpr const char* type_name<sy_stats> = "sy_stats";
template <>
constexpr const char* type_name<sy_dispatch_args> = "sy_dispatch_args";
template <>
constexpr const char* type_name<sy_combine_args> = "sy_combine_args";
template <>
constexpr const char* type_name<sy_placement> = "sy_placement";
template <>
constexpr const char* type_name<sy_batch_view> = "sy_batch_view";
template <>
constexpr const char* type_name<sy_exchange_options> = "sy_exchange_options";
template <>
constexpr const char* type_name<sy_send_args> = "sy_send_args";
template <>
constexpr const char* type_name<sy_alltoallv_args> = "sy_alltoallv_args";
template <>
constexpr const char* type_name<sy_send_back_args> = "sy_send_back_args";
template <>
constexpr const char* type_name<sy_received_view> = "sy_received_view";

// All structs are made of 8-byte units, so that a size that cuts a field in two can be told from an older struct.
constexpr size_t unit = 8;
constexpr size_t struct_bytes_max = 4096;  // no struct will ever be as large: a size that was never set

template <class T>
void check_struct_size(size_t size) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % unit == 0 && sizeof(T) <= struct_bytes_max);
    if (size < 2 * unit || size > struct_bytes_max || size % unit != 0)
        refuse(Code::bad_input, fmt::format("{}.struct_size is {}; set it to sizeof({}), which is {} here.", type_name<T>, size,
                                            type_name<T>, sizeof(T)));
}

// The caller's struct as this library knows it: fields that the caller does not know keep their values in `defaults`.
template <class T>
T read_struct(const T* given, const char* what, T defaults = {}) {
    need(given, what);
    const size_t size = given->struct_size;
    check_struct_size<T>(size);
    const auto* bytes = reinterpret_cast<const std::byte*>(given);
    for (size_t i = sizeof(T); i < size; ++i)
        if (bytes[i] != std::byte{0})
            refuse(Code::bad_input, fmt::format("{} of {} bytes: byte {} is set, but this library (version {}) knows {} bytes. "
                                                "Leave newer fields zero, or use a newer library.",
                                                type_name<T>, size, i, sy_version(), sizeof(T)));
    std::memcpy(&defaults, given, std::min(size, sizeof(T)));
    return defaults;
}

// Fills the caller's struct as far as the caller knows it; what only the caller knows becomes zero.
template <class T>
void write_struct(T* given, size_t size, T filled) {
    filled.struct_size = size;
    auto* bytes = reinterpret_cast<std::byte*>(given);
    std::memcpy(bytes, &filled, std::min(size, sizeof(T)));
    if (size > sizeof(T)) std::memset(bytes + sizeof(T), 0, size - sizeof(T));
}

template <class T>
size_t size_of_result(const T* given, const char* what) {
    need(given, what);
    check_struct_size<T>(given->struct_size);
    return given->struct_size;
}

// --------------------------------------------------------------------------------------------------------------- options

struct Field {
    const char* name;
    int64_t sy_options::*field;
};
constexpr Field fields[] = {
    {"hidden", &sy_options::hidden},
    {"topk", &sy_options::topk},
    {"experts", &sy_options::experts},
    {"tokens_max", &sy_options::tokens_max},
    {"dtype", &sy_options::dtype},
    {"dispatch_quant", &sy_options::dispatch_quant},
    {"combine_quant", &sy_options::combine_quant},
    {"mx_rule", &sy_options::mx_rule},
    {"mx_overflow", &sy_options::mx_overflow},
    {"fp8_scale", &sy_options::fp8_scale},
    {"expert_token_nums", &sy_options::expert_token_nums},
    {"expert_alignment", &sy_options::expert_alignment},
    {"deliver_weights", &sy_options::deliver_weights},
    {"landing", &sy_options::landing},
    {"combine_path", &sy_options::combine_path},
    {"depth", &sy_options::depth},
    {"rows_max", &sy_options::rows_max},
    {"cell_rows", &sy_options::cell_rows},
    {"partial", &sy_options::partial},
    {"workers", &sy_options::workers},
    {"simd", &sy_options::simd},
    {"timeout_ms", &sy_options::timeout_ms},
    {"huge_pages", &sy_options::huge_pages},
    {"pin", &sy_options::pin},
    {"jitter_us", &sy_options::jitter_us},
    {"group_ranks", &sy_options::group_ranks},
    {"progress", &sy_options::progress},
};
static_assert(sizeof(sy_options) == sizeof(size_t) + std::size(fields) * sizeof(int64_t));

sy_options to_c(const Options& options) {
    sy_options c{};
    for (const Field& f : fields) c.*f.field = find_option(f.name)->get(options);
    return c;
}

// Values are not judged here: an open session does, together with the other ranks.
Options from_c(const sy_options* given, const char* what) {
    const sy_options c = read_struct(given, what, to_c(Options{}));
    Options options;
    for (const Field& f : fields) {
        const OptionInfo& info = *find_option(f.name);
        constexpr int64_t low = std::numeric_limits<int32_t>::min(), high = std::numeric_limits<int32_t>::max();
        // A choice has 32 bits; a value beyond them must not become an allowed one.
        info.set(options, info.values[0] ? std::clamp(c.*f.field, low, high) : c.*f.field);
    }
    return options;
}

void store_options(sy_options* given, const Options& options) {
    const sy_options c = to_c(options);
    const sy_options defaults = to_c(Options{});
    const size_t size = given->struct_size;
    for (const Field& f : fields) {
        const auto end =
            static_cast<size_t>(reinterpret_cast<const std::byte*>(&(c.*f.field) + 1) - reinterpret_cast<const std::byte*>(&c));
        if (end > size && c.*f.field != defaults.*f.field)
            refuse(Code::bad_input,
                   fmt::format("option {}: this caller's sy_options has {} bytes and no room for it. Compile the "
                               "caller with the library's switchyard.h.",
                               f.name, size));
    }
    write_struct(given, size, c);
}

const OptionInfo& option_of(const char* name) {
    const OptionInfo* info = find_option(name);
    if (!info) {
        std::string known;
        for (const OptionInfo& each : option_table()) known += fmt::format("{}{}", known.empty() ? "" : ", ", each.name);
        refuse(Code::bad_input, fmt::format("there is no option \"{}\"; there are: {}.", name, known));
    }
    return *info;
}

// ------------------------------------------------------------------------------------------------------------- placements

// Sizes are judged before anything is read by them, all else by PlacementTable::check().
PlacementTable table_from_c(const sy_placement* given, const char* what) {
    const sy_placement c = read_struct(given, what);
    constexpr int64_t slots_max = int64_t{1} << 20;
    if (c.slots < 1 || c.slots > slots_max)
        refuse(Code::bad_input, fmt::format("{}: slots is {}; allowed: 1..{}.", what, c.slots, slots_max));
    need(c.expert_of, fmt::format("{}: expert_of", what).c_str());
    PlacementTable t;
    t.ranks = c.ranks;
    t.experts = c.experts;
    t.expert_of.assign(c.expert_of, c.expert_of + c.slots);
    if (c.parts) t.parts.assign(c.parts, c.parts + c.slots);
    t.choice = static_cast<ReplicaChoice>(std::clamp<int64_t>(c.choice, -1, 1000));  // beyond 32 bits it stays wrong
    return t;
}

// --------------------------------------------------------------------------------------------------------------- batches

// The batch that a ticket names, or stale.
ExpertBatch& open_batch(const sy_batch* batch, const char* what) {
    need(batch, what);
    if (!batch->session)
        refuse(Code::stale, fmt::format("{} is empty: it was combined or dropped, or its dispatch failed.", what));
    std::vector<ExpertBatch>& batches = batch->session->batches;
    ExpertBatch& named = batches[batch->epoch % batches.size()];
    if (named.epoch() != batch->epoch)
        refuse(Code::stale, fmt::format("{} is of epoch {}, which has ended; its place holds epoch {} now.", what, batch->epoch,
                                        named.epoch()));
    static_cast<void>(named.rows());  // throws stale when it has ended
    return named;
}

constexpr sy_batch no_batch = {nullptr, 0};

DispatchArgs dispatch_args(const sy_dispatch_args* given, const char* what) {
    const sy_dispatch_args known = read_struct(given, what);
    return {.x = known.x,
            .tokens = known.tokens,
            .row_stride = known.row_stride,
            .topk_ids = known.topk_ids,
            .topk_weights = known.topk_weights,
            .tag = known.tag,
            .timeout_ms = known.timeout_ms,
            .send_counts = known.send_counts,
            .recv_counts = known.recv_counts};
}
CombineArgs combine_args(const sy_combine_args* given, const char* what) {
    const sy_combine_args known = read_struct(given, what);
    return {.y = known.y,
            .topk_weights = known.topk_weights,
            .shared = known.shared,
            .out = known.out,
            .rows = known.rows,
            .timeout_ms = known.timeout_ms,
            .missing = known.missing};
}

// The other ranks wait in this dispatch: they must hear of a bad call as of bad input.
void tell_of_bad_dispatch(Session& session) {
    try {
        DispatchArgs bad;
        bad.tokens = -1;
        session.dispatch(bad);
    } catch (...) {
    }
}

constexpr sy_pending no_pending = {nullptr, 0, 0};

// The handle that a ticket names, or stale.
Pending& open_pending(const sy_pending* pending, const char* what) {
    need(pending, what);
    if (!pending->session) refuse(Code::stale, fmt::format("{} is empty: its end was given out, or it never began.", what));
    sy_session& s = *pending->session;
    const size_t at = pending->epoch % s.batches.size();
    Pending& named = pending->is_dispatch ? static_cast<Pending&>(s.going[at]) : s.coming[at];
    if (!named.valid() || named.epoch() != pending->epoch)
        refuse(Code::stale, fmt::format("{} is of epoch {}, whose end was given out.", what, pending->epoch));
    return named;
}

// Calls ends() -> bool; an end that was given out empties the ticket, but for that of a dispatch whose batch is there.
template <class Ends>
bool end_of(sy_pending* pending, const Pending& named, Ends ends) {
    try {
        const bool done = ends();
        if (done && !pending->is_dispatch) *pending = no_pending;
        return done;
    } catch (const Error&) {
        if (!named.valid()) *pending = no_pending;
        throw;
    }
}

void need_tile(const void* tile, int64_t count, const char* what) {
    if (count > 0) need(tile, what);
}

}  // namespace

// ------------------------------------------------------------------------------------------- the same numbers on both sides

#define SY_SAME(c, cpp) static_assert(static_cast<int64_t>(c) == static_cast<int64_t>(cpp))
SY_SAME(SY_OK, Code::ok);
SY_SAME(SY_BAD_INPUT, Code::bad_input);
SY_SAME(SY_MISMATCH, Code::mismatch);
SY_SAME(SY_CAPACITY, Code::capacity);
SY_SAME(SY_STALE, Code::stale);
SY_SAME(SY_DEPTH, Code::depth);
SY_SAME(SY_PEER_LOST, Code::peer_lost);
SY_SAME(SY_PEER_CLOSED, Code::peer_closed);
SY_SAME(SY_PEER_LEFT, Code::peer_left);
SY_SAME(SY_TIMED_OUT, Code::timed_out);
SY_SAME(SY_SYSTEM, Code::system);
SY_SAME(SY_CORRUPT, Code::corrupt);
SY_SAME(SY_F16, TokenType::f16);
SY_SAME(SY_BF16, TokenType::bf16);
SY_SAME(SY_F32, TokenType::f32);
SY_SAME(SY_NONE, Format::none);
SY_SAME(SY_INT8_TOKEN, Format::int8_token);
SY_SAME(SY_MXFP8_E5M2, Format::mxfp8_e5m2);
SY_SAME(SY_MXFP8_E4M3, Format::mxfp8_e4m3);
SY_SAME(SY_FP8_E4M3_BLOCK128, Format::fp8_e4m3_block128);
SY_SAME(SY_INT8_BLOCK8, Format::int8_block8);
SY_SAME(SY_INT8_BLOCK128, Format::int8_block128);
SY_SAME(SY_MX_FLOOR, MxRule::floor);
SY_SAME(SY_MX_CEIL, MxRule::ceil);
SY_SAME(SY_MX_SATURATE, MxOverflow::saturate);
SY_SAME(SY_MX_INF, MxOverflow::inf);
SY_SAME(SY_FP8_SCALE_F32, Fp8Scale::f32);
SY_SAME(SY_FP8_SCALE_UE8M0, Fp8Scale::ue8m0);
SY_SAME(SY_NUMS_CUMSUM, TokenNums::cumsum);
SY_SAME(SY_NUMS_COUNT, TokenNums::count);
SY_SAME(SY_LANDING_AUTO, Landing::automatic);
SY_SAME(SY_LANDING_PACKED, Landing::packed);
SY_SAME(SY_LANDING_PADDED, Landing::padded);
SY_SAME(SY_LANDING_IN_PLACE, Landing::in_place);
SY_SAME(SY_LANDING_ALLGATHER, Landing::allgather);
SY_SAME(SY_LANDING_TWO_LEVEL, Landing::two_level);
SY_SAME(SY_LANDING_ALLTOALLV, Landing::alltoallv);
SY_SAME(SY_COMBINE_AUTO, CombinePath::automatic);
SY_SAME(SY_COMBINE_READ, CombinePath::read);
SY_SAME(SY_COMBINE_PUSH, CombinePath::push);
SY_SAME(SY_PROGRESS_CALLER, ProgressBy::caller);
SY_SAME(SY_PROGRESS_WORKER, ProgressBy::worker);
SY_SAME(SY_SIMD_AUTO, Simd::automatic);
SY_SAME(SY_SIMD_SCALAR, Simd::scalar);
SY_SAME(SY_SIMD_SSSE3, Simd::ssse3);
SY_SAME(SY_SIMD_SSE4, Simd::sse4);
SY_SAME(SY_SIMD_AVX2, Simd::avx2);
SY_SAME(SY_SIMD_AVX512, Simd::avx512);
SY_SAME(SY_SIMD_AVX512_DL, Simd::avx512_dl);
SY_SAME(SY_SIMD_NEON, Simd::neon);
SY_SAME(SY_CHOICE_ROUND_ROBIN, ReplicaChoice::round_robin);
SY_SAME(SY_CHOICE_NEAREST, ReplicaChoice::nearest);
SY_SAME(SY_CHOICE_LEAST_LOADED, ReplicaChoice::least_loaded);
#undef SY_SAME

// ------------------------------------------------------------------------------------------------------------- interface

const char* sy_code_name(int32_t code) {
    return code_name(static_cast<Code>(code));
}
const char* sy_last_error(void) {
    return last_error.data();
}

#define SY_TEXT_OF(x) #x
#define SY_TEXT(x) SY_TEXT_OF(x)
const char* sy_version(void) {
    return SY_TEXT(SY_VERSION_MAJOR) "." SY_TEXT(SY_VERSION_MINOR) "." SY_TEXT(SY_VERSION_PATCH);
}

int32_t sy_options_init(sy_options* options, size_t struct_size) {
    return guarded([&] {
        need(options, "sy_options_init: options");
        check_struct_size<sy_options>(struct_size);
        write_struct(options, struct_size, to_c(Options{}));
    });
}

int32_t sy_options_set(sy_options* options, const char* name, const char* text) {
    return guarded([&] {
        Options changed = from_c(options, "sy_options_set: options");
        need(name, "sy_options_set: name");
        need(text, "sy_options_set: text");
        throw_if(set_option(changed, option_of(name), text));
        store_options(options, changed);
    });
}

int32_t sy_options_get(const sy_options* options, const char* name, char* text, size_t text_bytes) {
    return guarded([&] {
        const Options known = from_c(options, "sy_options_get: options");
        need(name, "sy_options_get: name");
        store_text(option_text(option_of(name), known), "sy_options_get", text, text_bytes);
    });
}

int32_t sy_options_from_environment(sy_options* options) {
    return guarded([&] {
        Options changed = from_c(options, "sy_options_from_environment: options");
        throw_if(set_options_from_environment(changed));
        store_options(options, changed);
    });
}

int32_t sy_options_check(const sy_options* options, int64_t ranks) {
    return guarded([&] { throw_if(check_options(from_c(options, "sy_options_check: options"), ranks)); });
}

int64_t sy_option_count(void) {
    return static_cast<int64_t>(option_table().size());
}

int32_t sy_option_at(int64_t index, sy_option_info* info) {
    return guarded([&] {
        const size_t size = size_of_result(info, "sy_option_at: info");
        if (index < 0 || index >= sy_option_count())
            refuse(Code::bad_input, fmt::format("sy_option_at: index is {}; allowed: 0..{}.", index, sy_option_count() - 1));
        const OptionInfo& line = option_table()[static_cast<size_t>(index)];
        write_struct(info, size,
                     {.struct_size = 0,
                      .name = line.name,
                      .flags = line.flags,
                      .unit = line.unit,
                      .values = line.values,
                      .help = line.help,
                      .low = line.low,
                      .high = line.high,
                      .agreed = line.agreed});
    });
}

int32_t sy_experts_of(int64_t rank, int64_t ranks, int64_t experts, int64_t* first, int64_t* last) {
    return guarded([&] {
        need(first, "sy_experts_of: first");
        need(last, "sy_experts_of: last");
        if (rank < 0 || rank >= ranks || experts < 0)
            refuse(Code::bad_input,
                   fmt::format("sy_experts_of: rank {} of {}, {} experts; allowed: rank 0..ranks-1, experts >= 0.", rank, ranks,
                               experts));
        const ExpertRange range = experts_of(rank, ranks, experts);
        *first = range.first;
        *last = range.last;
    });
}

namespace {

Group group_from_c(const sy_group* group, const char* what) {
    const sy_group known = read_struct(group, what);
    Group members;
    members.rank = known.rank;
    members.size = known.size;
    if (known.name) members.name = known.name;
    if (known.token) members.token = known.token;
    return members;
}

}  // namespace

int32_t sy_open(const sy_options* options, const sy_group* group, sy_session** session) {
    return guarded([&] {
        need(session, "sy_open: session");
        *session = nullptr;
        const Options wanted = from_c(options, "sy_open: options");
        *session = new sy_session(Session::open(wanted, group_from_c(group, "sy_open: group")));
    });
}

int32_t sy_open_placed(const sy_options* options, const sy_group* group, const sy_placement* placement, sy_session** session) {
    return guarded([&] {
        need(session, "sy_open_placed: session");
        *session = nullptr;
        const Options wanted = from_c(options, "sy_open_placed: options");
        const Group members = group_from_c(group, "sy_open_placed: group");
        const PlacementTable table = table_from_c(placement, "sy_open_placed: placement");
        *session = new sy_session(Session::open(wanted, members, table));
    });
}

int32_t sy_open_from_environment(const sy_options* options, const char* label, sy_session** session) {
    return guarded([&] {
        need(session, "sy_open_from_environment: session");
        *session = nullptr;
        const Options wanted = from_c(options, "sy_open_from_environment: options");
        *session = new sy_session(Session::open(wanted, Group::from_environment(label ? label : "")));
    });
}

namespace {

void open_local(std::span<const Options> options, sy_session** sessions, std::span<const PlacementTable> tables = {}) {
    std::vector<std::unique_ptr<sy_session>> handles;
    for (Session& session : Session::open_local(options, tables))
        handles.push_back(std::make_unique<sy_session>(std::move(session)));
    for (size_t r = 0; r < handles.size(); ++r) sessions[r] = handles[r].release();
}

void start_local(int32_t ranks, sy_session** sessions, const char* what) {
    need(sessions, what);
    if (ranks < 1 || ranks > ranks_max)
        refuse(Code::bad_input, fmt::format("{}: the group has {} ranks; allowed: 1..{}.", what, ranks, ranks_max));
    std::fill_n(sessions, ranks, nullptr);
}

}  // namespace

int32_t sy_open_local(const sy_options* options, int32_t ranks, sy_session** sessions) {
    return guarded([&] {
        start_local(ranks, sessions, "sy_open_local: sessions");
        open_local(std::vector<Options>(static_cast<size_t>(ranks), from_c(options, "sy_open_local: options")), sessions);
    });
}

int32_t sy_open_local_each(const sy_options* const* options, int32_t ranks, sy_session** sessions) {
    return guarded([&] {
        start_local(ranks, sessions, "sy_open_local_each: sessions");
        need(options, "sy_open_local_each: options");
        std::vector<Options> each;
        each.reserve(static_cast<size_t>(ranks));
        for (int32_t r = 0; r < ranks; ++r)
            each.push_back(from_c(options[r], fmt::format("sy_open_local_each: options[{}]", r).c_str()));
        open_local(each, sessions);
    });
}

int32_t sy_open_local_placed(const sy_options* options, const sy_placement* placement, sy_session** sessions) {
    return guarded([&] {
        const PlacementTable table = table_from_c(placement, "sy_open_local_placed: placement");
        throw_if(table.check());  // it says how many sessions there are
        start_local(static_cast<int32_t>(table.ranks), sessions, "sy_open_local_placed: sessions");
        const auto ranks = static_cast<size_t>(table.ranks);
        open_local(std::vector<Options>(ranks, from_c(options, "sy_open_local_placed: options")), sessions,
                   std::vector<PlacementTable>(ranks, table));
    });
}

int32_t sy_placement_check(const sy_placement* placement) {
    return guarded([&] { throw_if(table_from_c(placement, "sy_placement_check: placement").check()); });
}

int32_t sy_placement_hash(const sy_placement* placement, uint64_t* hash) {
    return guarded([&] {
        const PlacementTable table = table_from_c(placement, "sy_placement_hash: placement");
        need(hash, "sy_placement_hash: hash");
        *hash = table.hash();
    });
}

int32_t sy_plan_placement(const uint64_t* loads, int64_t experts, int64_t ranks, int64_t slots, int64_t ranks_per_group,
                          int64_t expert_groups, int64_t choice, int32_t* expert_of, int32_t* parts) {
    return guarded([&] {
        need(loads, "sy_plan_placement: loads");
        need(expert_of, "sy_plan_placement: expert_of");
        need(parts, "sy_plan_placement: parts");
        if (experts < 1 || experts > (1 << 20))
            refuse(Code::bad_input, fmt::format("sy_plan_placement: experts is {}; allowed: 1..{}.", experts, 1 << 20));
        const PlacementTable table =
            plan_placement(std::span(loads, static_cast<size_t>(experts)),
                           {.ranks = ranks,
                            .slots = slots,
                            .ranks_per_group = ranks_per_group,
                            .expert_groups = expert_groups,
                            .choice = static_cast<ReplicaChoice>(std::clamp<int64_t>(choice, -1, 1000))});
        std::copy(table.expert_of.begin(), table.expert_of.end(), expert_of);
        std::fill_n(parts, slots, 1);
        std::copy(table.parts.begin(), table.parts.end(), parts);
    });
}

int32_t sy_close(sy_session* session) {
    return guarded([&] {
        need(session, "sy_close: session");
        session->session.close();
    });
}

int32_t sy_free(sy_session** session) {
    return guarded([&] {
        need(session, "sy_free: session");
        if (!*session) return;
        // Closed first: its batches then have nothing left to tell the other ranks.
        (*session)->session.close();
        delete *session;
        *session = nullptr;
    });
}

int32_t sy_session_get(const sy_session* session, sy_session_info* info) {
    return guarded([&] {
        need(session, "sy_session_get: session");
        const size_t size = size_of_result(info, "sy_session_get: info");
        const Session& s = session->session;
        write_struct(info, size,
                     {.struct_size = 0,
                      .rank = s.rank(),
                      .size = s.size(),
                      .experts_local = s.experts_local(),
                      .window_bytes = s.window_bytes(),
                      .simd_name = s.simd_name()});
    });
}

int32_t sy_session_options(const sy_session* session, sy_options* options) {
    return guarded([&] {
        need(session, "sy_session_options: session");
        const size_t size = size_of_result(options, "sy_session_options: options");
        write_struct(options, size, to_c(session->session.options()));
    });
}

int32_t sy_session_stats(const sy_session* session, sy_stats* stats) {
    return guarded([&] {
        need(session, "sy_session_stats: session");
        const size_t size = size_of_result(stats, "sy_session_stats: stats");
        const SessionStats s = session->session.stats();
        write_struct(stats, size,
                     {.struct_size = 0,
                      .dispatches = s.dispatches,
                      .combines = s.combines,
                      .rows_sent = s.rows_sent,
                      .rows_received = s.rows_received,
                      .bytes_sent = s.bytes_sent,
                      .bytes_sent_peers = s.bytes_sent_peers,
                      .bytes_home = s.bytes_home,
                      .wait_ns_counts = s.wait_ns_counts,
                      .wait_ns_rows = s.wait_ns_rows,
                      .wait_ns_returned = s.wait_ns_returned});
    });
}

int32_t sy_session_waits(const sy_session* session, int64_t* wait_ns, int64_t count) {
    return guarded([&] {
        need(session, "sy_session_waits: session");
        need(wait_ns, "sy_session_waits: wait_ns");
        const std::vector<int64_t> waits = session->session.wait_ns_by_rank();
        if (count != static_cast<int64_t>(waits.size()))
            throw Error(Status(Code::bad_input,
                               fmt::format("sy_session_waits: count is {}; the group has {} ranks.", count, waits.size())));
        std::copy(waits.begin(), waits.end(), wait_ns);
    });
}

int32_t sy_session_explain(const sy_session* session, char* text, size_t text_bytes) {
    return guarded([&] {
        need(session, "sy_session_explain: session");
        store_text(session->session.explain(), "sy_session_explain", text, text_bytes);
    });
}

int32_t sy_session_loads(const sy_session* session, int32_t which, uint64_t* loads, int64_t count) {
    return guarded([&] {
        need(session, "sy_session_loads: session");
        need(loads, "sy_session_loads: loads");
        const SessionLoads all = session->session.loads();
        const std::vector<uint64_t>* const parts[] = {&all.sent, &all.experts, &all.slots, &all.ranks};
        if (which < 0 || which >= static_cast<int32_t>(std::size(parts)))
            refuse(Code::bad_input, fmt::format("sy_session_loads: which is {}; allowed: 0..{}.", which, std::size(parts) - 1));
        const std::vector<uint64_t>& wanted = *parts[which];
        if (count != static_cast<int64_t>(wanted.size()))
            refuse(Code::bad_input, fmt::format("sy_session_loads: count is {}; there are {} of them.", count, wanted.size()));
        std::copy(wanted.begin(), wanted.end(), loads);
    });
}

int32_t sy_session_reset_loads(sy_session* session) {
    return guarded([&] {
        need(session, "sy_session_reset_loads: session");
        session->session.reset_loads();
    });
}

int32_t sy_dispatch(sy_session* session, const sy_dispatch_args* args, sy_batch* batch) {
    return guarded([&] {
        need(session, "sy_dispatch: session");
        if (batch) *batch = no_batch;
        DispatchArgs known;
        try {
            need(batch, "sy_dispatch: batch");
            known = dispatch_args(args, "sy_dispatch: args");
        } catch (const Error&) {
            tell_of_bad_dispatch(session->session);
            throw;
        }
        ExpertBatch received = session->session.dispatch(known);
        *batch = {session, received.epoch()};
        session->batches[received.epoch() % session->batches.size()] = std::move(received);
    });
}

int32_t sy_session_x(sy_session* session, void** x) {
    return guarded([&] {
        need(session, "sy_session_x: session");
        need(x, "sy_session_x: x");
        *x = nullptr;
        *x = session->session.x();
    });
}

int32_t sy_combine(sy_session* session, sy_batch* batch, const sy_combine_args* args) {
    return guarded([&] {
        need(session, "sy_combine: session");
        ExpertBatch& used = open_batch(batch, "sy_combine: batch");
        try {
            CombineArgs known;
            try {
                known = combine_args(args, "sy_combine: args");
            } catch (const Error&) {
                // The other ranks wait in this combine: they must hear that there will be none. Another session's do not.
                if (batch->session == session) used = ExpertBatch();
                throw;
            }
            session->session.combine(used, known);
        } catch (const Error& error) {
            if (error.code() != Code::stale && batch->session == session) *batch = no_batch;
            throw;
        }
        *batch = no_batch;
    });
}

int32_t sy_dispatch_async(sy_session* session, const sy_dispatch_args* args, sy_pending* pending) {
    return guarded([&] {
        need(session, "sy_dispatch_async: session");
        if (pending) *pending = no_pending;
        DispatchArgs known;
        try {
            need(pending, "sy_dispatch_async: pending");
            known = dispatch_args(args, "sy_dispatch_async: args");
        } catch (const Error&) {
            tell_of_bad_dispatch(session->session);
            throw;
        }
        PendingDispatch begun = session->session.dispatch_async(known);
        const uint64_t epoch = begun.epoch();
        session->going[epoch % session->going.size()] = std::move(begun);
        *pending = {session, epoch, 1};
    });
}

int32_t sy_combine_async(sy_session* session, sy_batch* batch, const sy_combine_args* args, sy_pending* pending) {
    return guarded([&] {
        need(session, "sy_combine_async: session");
        if (pending) *pending = no_pending;
        ExpertBatch& used = open_batch(batch, "sy_combine_async: batch");
        try {
            CombineArgs known;
            try {
                need(pending, "sy_combine_async: pending");
                known = combine_args(args, "sy_combine_async: args");
            } catch (const Error&) {
                if (batch->session == session) used = ExpertBatch();  // as in sy_combine
                throw;
            }
            const uint64_t epoch = batch->epoch;
            session->coming[epoch % session->coming.size()] = session->session.combine_async(used, known);
            *pending = {session, epoch, 0};
        } catch (const Error& error) {
            if (error.code() != Code::stale && batch->session == session) *batch = no_batch;
            throw;
        }
        *batch = no_batch;
    });
}

int32_t sy_poll(sy_pending* pending, int32_t* done) {
    return guarded([&] {
        Pending& named = open_pending(pending, "sy_poll: pending");
        need(done, "sy_poll: done");
        *done = 0;
        *done = end_of(pending, named, [&] { return named.poll(); });
    });
}

int32_t sy_wait(sy_pending* pending, int64_t timeout_ms, int32_t* done) {
    return guarded([&] {
        Pending& named = open_pending(pending, "sy_wait: pending");
        if (timeout_ms != 0) need(done, "sy_wait: done");
        if (done) *done = 0;
        const bool ended = end_of(pending, named, [&] { return named.wait(timeout_ms); });
        if (done) *done = ended;
    });
}

int32_t sy_take(sy_pending* pending, sy_batch* batch) {
    return guarded([&] {
        Pending& named = open_pending(pending, "sy_take: pending");
        need(batch, "sy_take: batch");
        *batch = no_batch;
        if (!pending->is_dispatch) refuse(Code::bad_input, "sy_take of a combine, which has no batch; sy_wait for it.");
        sy_session* session = pending->session;
        const uint64_t epoch = pending->epoch;
        end_of(pending, named, [&] { return named.wait(); });
        const size_t at = epoch % session->batches.size();
        session->batches[at] = session->going[at].get();
        *batch = {session, epoch};
        *pending = no_pending;
    });
}

int32_t sy_abandon(sy_pending* pending) {
    return guarded([&] {
        static_cast<void>(open_pending(pending, "sy_abandon: pending"));
        sy_session& s = *pending->session;
        const size_t at = pending->epoch % s.batches.size();
        if (pending->is_dispatch)
            s.going[at] = PendingDispatch();
        else
            s.coming[at] = PendingCombine();
        *pending = no_pending;
    });
}

int32_t sy_progress(sy_session* session) {
    return guarded([&] {
        need(session, "sy_progress: session");
        session->session.progress();
    });
}

int32_t sy_shrink(sy_session* session, int64_t timeout_ms, int32_t kill_missing, int32_t* is_member, int64_t count) {
    return guarded([&] {
        need(session, "sy_shrink: session");
        const int size = session->session.size();
        if (is_member && count != size)
            throw Error(Status(Code::bad_input, fmt::format("sy_shrink: count is {}; the group has {} ranks.", count, size)));
        const std::vector<int> members = session->session.shrink({.timeout_ms = timeout_ms, .kill_missing = kill_missing != 0});
        if (!is_member) return;
        std::fill(is_member, is_member + size, 0);
        for (const int p : members) is_member[p] = 1;
    });
}

int32_t sy_drop(sy_batch* batch) {
    return guarded([&] {
        open_batch(batch, "sy_drop: batch") = ExpertBatch();
        *batch = no_batch;
    });
}

int32_t sy_batch_get(const sy_batch* batch, sy_batch_view* view) {
    return guarded([&] {
        const ExpertBatch& b = open_batch(batch, "sy_batch_get: batch");
        const size_t size = size_of_result(view, "sy_batch_get: view");
        write_struct(view, size,
                     {.struct_size = 0,
                      .epoch = b.epoch(),
                      .rows = b.rows(),
                      .tokens = b.tokens(),
                      .experts_local = static_cast<int64_t>(b.expert_token_nums().size()),
                      .payload_bytes = b.payload_bytes(),
                      .scale_bytes = b.scale_bytes(),
                      .assist_info_for_combine = b.assist_info_for_combine().data(),
                      .expert_token_nums = b.expert_token_nums().data(),
                      .expert_offsets = b.expert_offsets().data(),
                      .ep_recv_count = b.ep_recv_count().data(),
                      .weights = b.weights(),
                      .y = b.y()});
    });
}

int32_t sy_batch_expand_x(const sy_batch* batch, const void** expand_x, const void** dynamic_scales) {
    return guarded([&] {
        const ExpertBatch& b = open_batch(batch, "sy_batch_expand_x: batch");
        need(expand_x, "sy_batch_expand_x: expand_x");
        *expand_x = b.expand_x();
        if (dynamic_scales) *dynamic_scales = b.dynamic_scales();
    });
}

int32_t sy_batch_row(const sy_batch* batch, int64_t i, const void** payload, const void** scales) {
    return guarded([&] {
        const ExpertBatch& b = open_batch(batch, "sy_batch_row: batch");
        need(payload, "sy_batch_row: payload");
        const ExpertBatch::Row row = b.row(i);
        *payload = row.payload;
        if (scales) *scales = row.scales;
    });
}

int32_t sy_batch_gather(const sy_batch* batch, int64_t expert, int64_t first, int64_t count, void* tile, void* tile_scales) {
    return guarded([&] {
        const ExpertBatch& b = open_batch(batch, "sy_batch_gather: batch");
        need_tile(tile, count, "sy_batch_gather: tile");
        b.gather(expert, first, count, tile, tile_scales);
    });
}

int32_t sy_batch_gather_f32(const sy_batch* batch, int64_t expert, int64_t first, int64_t count, float* tile) {
    return guarded([&] {
        const ExpertBatch& b = open_batch(batch, "sy_batch_gather_f32: batch");
        need_tile(tile, count, "sy_batch_gather_f32: tile");
        b.gather_f32(expert, first, count, tile);
    });
}

// ------------------------------------------------------------------------------------------------------------- exchange

static_assert(SY_PAYLOADS_MAX == payloads_max);

namespace {

sy_exchange_options to_c(const ExchangeOptions& o) {
    sy_exchange_options c{};
    c.struct_size = sizeof c;
    c.experts = o.experts;
    c.topk = o.topk;
    c.items_max = o.items_max;
    c.rows_max = o.rows_max;
    c.strategy = static_cast<int64_t>(o.strategy);
    c.group_ranks = o.group_ranks;
    c.depth = o.depth;
    c.workers = o.workers;
    c.timeout_ms = o.timeout_ms;
    return c;
}

ExchangeOptions from_c(const sy_exchange_options* given, const char* what) {
    const sy_exchange_options c = read_struct(given, what, to_c(ExchangeOptions{}));
    // Values are judged by open, so that all ranks hear of them.
    ExchangeOptions o;
    o.payload_bytes.assign(static_cast<size_t>(std::clamp<int64_t>(c.payloads, 0, 1000)), 1);
    if (c.payloads >= 1 && c.payloads <= SY_PAYLOADS_MAX) o.payload_bytes.assign(c.payload_bytes, c.payload_bytes + c.payloads);
    o.experts = c.experts;
    o.topk = c.topk;
    o.items_max = c.items_max;
    o.rows_max = c.rows_max;
    o.strategy = static_cast<Landing>(std::clamp<int64_t>(c.strategy, -1, 127));
    o.group_ranks = c.group_ranks;
    o.depth = c.depth;
    o.workers = c.workers;
    o.timeout_ms = c.timeout_ms;
    return o;
}

// Reads a call's arguments; when they cannot be read the other ranks, which wait in this call, hear of it as of bad input.
template <class Args>
Args read_send(sy_exchange* exchange, const Args* args, sy_received** received, const char* what) {
    try {
        need(received, what);
        return read_struct(args, what);
    } catch (const Error&) {
        try {
            SendArgs bad;
            bad.items = -1;
            exchange->exchange.send(bad);
        } catch (...) {
        }
        throw;
    }
}

sy_received* kept(const sy_exchange* exchange, Received&& rows) {
    return new sy_received{std::move(rows), exchange->exchange.options().payload_bytes.size(), exchange};
}

}  // namespace

int32_t sy_exchange_options_init(sy_exchange_options* options, size_t struct_size) {
    return guarded([&] {
        need(options, "sy_exchange_options_init: options");
        check_struct_size<sy_exchange_options>(struct_size);
        write_struct(options, struct_size, to_c(ExchangeOptions{}));
    });
}

int32_t sy_exchange_open(const sy_exchange_options* options, const sy_group* group, sy_exchange** exchange) {
    return guarded([&] {
        need(exchange, "sy_exchange_open: exchange");
        *exchange = nullptr;
        const ExchangeOptions wanted = from_c(options, "sy_exchange_open: options");
        *exchange = new sy_exchange{Exchange::open(wanted, group_from_c(group, "sy_exchange_open: group"))};
    });
}

int32_t sy_exchange_open_local(const sy_exchange_options* options, int32_t ranks, sy_exchange** exchanges) {
    return guarded([&] {
        need(exchanges, "sy_exchange_open_local: exchanges");
        if (ranks < 1 || ranks > ranks_max)
            refuse(Code::bad_input,
                   fmt::format("sy_exchange_open_local: the group has {} ranks; allowed: 1..{}.", ranks, ranks_max));
        std::fill_n(exchanges, ranks, nullptr);
        std::vector<std::unique_ptr<sy_exchange>> handles;
        for (Exchange& e : Exchange::open_local(from_c(options, "sy_exchange_open_local: options"), ranks))
            handles.push_back(std::make_unique<sy_exchange>(sy_exchange{std::move(e)}));
        for (size_t r = 0; r < handles.size(); ++r) exchanges[r] = handles[r].release();
    });
}

int32_t sy_exchange_free(sy_exchange** exchange) {
    return guarded([&] {
        need(exchange, "sy_exchange_free: exchange");
        if (!*exchange) return;
        (*exchange)->exchange.close();
        delete *exchange;
        *exchange = nullptr;
    });
}

int32_t sy_exchange_send(sy_exchange* exchange, const sy_send_args* args, sy_received** received) {
    return guarded([&] {
        need(exchange, "sy_exchange_send: exchange");
        if (received) *received = nullptr;
        const sy_send_args known = read_send(exchange, args, received, "sy_exchange_send: args or received");
        SendArgs send{.payloads = {},
                      .items = known.items,
                      .expert_indices = known.expert_indices,
                      .send_counts = known.send_counts,
                      .recv_counts = known.recv_counts,
                      .tag = known.tag,
                      .timeout_ms = known.timeout_ms};
        std::copy(std::begin(known.payloads), std::end(known.payloads), send.payloads.begin());
        *received = kept(exchange, exchange->exchange.send(send));
    });
}

int32_t sy_exchange_alltoallv(sy_exchange* exchange, const sy_alltoallv_args* args, sy_received** received) {
    return guarded([&] {
        need(exchange, "sy_exchange_alltoallv: exchange");
        if (received) *received = nullptr;
        const sy_alltoallv_args known = read_send(exchange, args, received, "sy_exchange_alltoallv: args or received");
        AlltoallvArgs send{.payloads = {},
                           .send_counts = known.send_counts,
                           .recv_counts = known.recv_counts,
                           .tag = known.tag,
                           .timeout_ms = known.timeout_ms};
        std::copy(std::begin(known.payloads), std::end(known.payloads), send.payloads.begin());
        *received = kept(exchange, exchange->exchange.alltoallv(send));
    });
}

int32_t sy_received_get(const sy_received* received, sy_received_view* view) {
    return guarded([&] {
        need(received, "sy_received_get: received");
        const size_t size = size_of_result(view, "sy_received_get: view");
        const Received& r = received->rows;
        sy_received_view filled{};
        filled.epoch = r.epoch();
        filled.rows = r.rows();
        filled.stride = r.payload(0).stride;
        for (size_t p = 0; p < received->payloads; ++p) {
            filled.payloads[p] = r.payload(static_cast<int>(p)).data;
            filled.answers[p] = r.answer(static_cast<int>(p)).data;
        }
        filled.source_info = r.source_info().data();
        filled.recv_counts = r.recv_counts().data();
        filled.recv_offsets = r.recv_offsets().data();
        filled.send_counts = r.send_counts().data();
        filled.send_offsets = r.send_offsets().data();
        filled.permutation = r.permutation().data();
        write_struct(view, size, filled);
    });
}

int32_t sy_exchange_send_back(sy_exchange* exchange, sy_received** received, const sy_send_back_args* args) {
    return guarded([&] {
        need(exchange, "sy_exchange_send_back: exchange");
        need(received, "sy_exchange_send_back: received");
        need(*received, "sy_exchange_send_back: *received");
        if ((*received)->of != exchange)  // they stay what they are, whatever the rest of the call
            refuse(Code::stale, "sy_exchange_send_back: of rows that another exchange received.");
        const auto use_up = [&] {
            delete *received;
            *received = nullptr;
        };
        try {
            const sy_send_back_args known = read_struct(args, "sy_exchange_send_back: args");
            SendBackArgs back{.payloads = {}, .timeout_ms = known.timeout_ms};
            std::copy(std::begin(known.payloads), std::end(known.payloads), back.payloads.begin());
            exchange->exchange.send_back((*received)->rows, back);
        } catch (const Error& error) {
            if (error.code() != Code::stale) use_up();
            throw;
        }
        use_up();
    });
}

int32_t sy_received_free(sy_received** received) {
    return guarded([&] {
        need(received, "sy_received_free: received");
        delete *received;
        *received = nullptr;
    });
}
