// The C interface: right values, every refusal, structs of older and newer callers, and no allocation in the steady state.
//
// Ranks are threads. Values are small whole numbers, exact in every type used, so that results can be worked out by hand;
// where formats come in, switchyard::reference is the judge.
#include "switchyard/switchyard.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "switchyard/reference.hpp"
#include "switchyard/session.hpp"
#include "testing.hpp"

// Allocations of the whole process are counted where malloc can be replaced; operator new ends there too.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define SY_COUNTS_ALLOCATIONS 1
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
}
static std::atomic<int64_t> allocations{0};
extern "C" {
void* malloc(size_t bytes) {
    return ++allocations, __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
    return ++allocations, __libc_calloc(count, bytes);
}
void* realloc(void* old, size_t bytes) {
    return ++allocations, __libc_realloc(old, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
    return ++allocations, __libc_memalign(alignment, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
    return ++allocations, __libc_memalign(alignment, bytes);
}
int posix_memalign(void** place, size_t alignment, size_t bytes) {
    ++allocations;
    *place = __libc_memalign(alignment, bytes);
    return *place ? 0 : 12;  // ENOMEM
}
}
#endif

extern "C" int c_caller_round(void);

namespace {

using namespace switchyard;

// The text of the last error holds this.
#define EXPECT_TEXT(part) EXPECT_NE(std::string(sy_last_error()).find(part), std::string::npos) << sy_last_error()
#define EXPECT_REFUSED(code, part, call) \
    do {                                 \
        EXPECT_EQ(call, code) << #call;  \
        EXPECT_TEXT(part);               \
    } while (false)
#define ASSERT_DONE(call) ASSERT_EQ(call, SY_OK) << #call << ": " << sy_last_error()
#define EXPECT_DONE(call) EXPECT_EQ(call, SY_OK) << #call << ": " << sy_last_error()

template <class T>
T sized() {
    T value{};
    value.struct_size = sizeof value;
    return value;
}

sy_options small_options() {
    sy_options options;
    EXPECT_EQ(sy_options_init(&options, sizeof options), SY_OK);
    options.hidden = 8;
    options.topk = 2;
    options.experts = 4;
    options.tokens_max = 4;
    options.dtype = SY_F32;
    options.timeout_ms = 20000;
    return options;
}

// Ranks as threads, from open to free.
class Ranks {
 public:
    explicit Ranks(const sy_options& options, int32_t count = 2) : sessions_(static_cast<size_t>(count)) {
        EXPECT_EQ(sy_open_local(&options, count, sessions_.data()), SY_OK) << sy_last_error();
    }
    ~Ranks() {
        for (sy_session*& session : sessions_) sy_free(&session);
    }
    sy_session*& operator[](size_t rank) { return sessions_[rank]; }
    size_t size() const { return sessions_.size(); }

    // Plays every rank at once.
    void play(const std::function<void(size_t rank, sy_session* session)>& part) {
        std::vector<std::thread> threads;
        for (size_t r = 0; r < sessions_.size(); ++r) threads.emplace_back([&, r] { part(r, sessions_[r]); });
        for (std::thread& thread : threads) thread.join();
    }

 private:
    std::vector<sy_session*> sessions_;
};

// One token of one rank, to experts 0 and 3: of two ranks with four experts, rank 0 owns 0 and 1, rank 1 owns 2 and 3.
struct OneToken {
    explicit OneToken(size_t rank) {
        for (size_t i = 0; i < 8; ++i) x[i] = static_cast<float>(10 * rank + i);
    }
    sy_dispatch_args args() const {
        sy_dispatch_args a = sized<sy_dispatch_args>();
        a.x = x;
        a.tokens = 1;
        a.topk_ids = ids;
        return a;
    }
    sy_combine_args home() {
        sy_combine_args a = sized<sy_combine_args>();
        a.topk_weights = weights;
        a.out = out;
        return a;
    }
    float x[8];
    int32_t ids[2] = {0, 3};
    float weights[2] = {2, 0.5F};
    float out[8] = {};
};

// The experts' work in these tests: y = x.
void echo(const sy_batch& batch) {
    sy_batch_view view = sized<sy_batch_view>();
    ASSERT_DONE(sy_batch_get(&batch, &view));
    const void* rows = nullptr;
    ASSERT_DONE(sy_batch_expand_x(&batch, &rows, nullptr));
    if (view.rows > 0) std::memcpy(view.y, rows, static_cast<size_t>(view.rows * view.payload_bytes));
}

// A whole round that must succeed: the session is usable.
void round_trip(size_t rank, sy_session* session) {
    OneToken token(rank);
    const sy_dispatch_args args = token.args();
    const sy_combine_args home = token.home();
    sy_batch batch;
    ASSERT_DONE(sy_dispatch(session, &args, &batch));
    echo(batch);
    ASSERT_DONE(sy_combine(session, &batch, &home));
    for (size_t i = 0; i < 8; ++i) EXPECT_EQ(token.out[i], 2.5F * token.x[i]);
}

// ------------------------------------------------------------------------------------------------------------ errors

TEST(CApi, WorksFromC) {
    EXPECT_EQ(c_caller_round(), 0) << sy_last_error();
}

TEST(CApi, VersionIsThatOfTheHeader) {
    EXPECT_EQ(std::string(sy_version()), std::to_string(SY_VERSION_MAJOR) + "." + std::to_string(SY_VERSION_MINOR) + "." +
                                             std::to_string(SY_VERSION_PATCH));
}

TEST(CApi, CodesHaveNames) {
    EXPECT_STREQ(sy_code_name(SY_OK), "ok");
    EXPECT_STREQ(sy_code_name(SY_CORRUPT), "corrupt");
    EXPECT_STREQ(sy_code_name(SY_CORRUPT + 1), "unknown");
    EXPECT_STREQ(sy_code_name(-1), "unknown");
}

TEST(CApi, LastErrorBelongsToTheThreadAndSurvivesSuccess) {
    EXPECT_REFUSED(SY_BAD_INPUT, "sy_close: session", sy_close(nullptr));
    std::thread([] {
        EXPECT_STREQ(sy_last_error(), "");
        EXPECT_REFUSED(SY_BAD_INPUT, "sy_free: session", sy_free(nullptr));
    }).join();
    EXPECT_TEXT("sy_close: session is null.");
    sy_options options;
    EXPECT_DONE(sy_options_init(&options, sizeof options));
    EXPECT_TEXT("sy_close: session is null.");
}

TEST(CApi, VeryLongTextsAreCutNotOverrun) {
    sy_options options = small_options();
    const std::string name(100'000, 'n');
    EXPECT_EQ(sy_options_set(&options, name.c_str(), "1"), SY_BAD_INPUT);
    EXPECT_EQ(std::strlen(sy_last_error()), 4095U);
}

// ----------------------------------------------------------------------------------------------------------- options

TEST(CApi, InitGivesTheDefaultsOfCpp) {
    sy_options options;
    std::memset(&options, 0xAB, sizeof options);
    ASSERT_DONE(sy_options_init(&options, sizeof options));
    EXPECT_EQ(options.struct_size, sizeof options);
    EXPECT_EQ(options.hidden, 0);
    EXPECT_EQ(options.dtype, SY_F16);
    EXPECT_EQ(options.expert_token_nums, SY_NUMS_COUNT);
    EXPECT_EQ(options.expert_alignment, 1);
    EXPECT_EQ(options.depth, 2);
    EXPECT_EQ(options.timeout_ms, 30000);
    const Options cpp;
    for (const OptionInfo& info : option_table()) {
        char text[32];
        ASSERT_DONE(sy_options_get(&options, info.name, text, sizeof text));
        EXPECT_EQ(text, option_text(info, cpp)) << info.name;
    }
}

TEST(CApi, EveryOptionCanBeSetAndReadByName) {
    sy_options options = small_options();
    ASSERT_EQ(sy_option_count(), static_cast<int64_t>(option_table().size()));
    // One field of 8 bytes for every line of the table: a new option must get one.
    ASSERT_EQ(sizeof(sy_options), sizeof(size_t) + static_cast<size_t>(sy_option_count()) * 8);
    for (int64_t i = 0; i < sy_option_count(); ++i) {
        sy_option_info info = sized<sy_option_info>();
        ASSERT_DONE(sy_option_at(i, &info));
        EXPECT_STREQ(info.name, option_table()[static_cast<size_t>(i)].name);
        EXPECT_STREQ(info.help, option_table()[static_cast<size_t>(i)].help);
        EXPECT_STREQ(info.flags, option_table()[static_cast<size_t>(i)].flags);
        EXPECT_STREQ(info.unit, option_table()[static_cast<size_t>(i)].unit);
        EXPECT_EQ(info.agreed != 0, option_table()[static_cast<size_t>(i)].agreed);
        EXPECT_LE(info.low, info.high);
        // The last name of a choice, or the upper limit of a number.
        std::string value = info.values;
        value = value.empty() ? std::to_string(info.high) : value.substr(value.rfind(' ') + 1);
        value = value.substr(0, value.find('='));
        ASSERT_DONE(sy_options_set(&options, info.name, value.c_str()));
        char text[32];
        ASSERT_DONE(sy_options_get(&options, info.name, text, sizeof text));
        EXPECT_TRUE(text == value || std::string(info.name) == "deliver_weights") << info.name << ": " << text;
    }
    EXPECT_EQ(options.dispatch_quant, SY_FP8_E4M3_BLOCK128);
    EXPECT_EQ(options.combine_quant, SY_INT8_BLOCK128);
    EXPECT_EQ(options.deliver_weights, 1);
    EXPECT_EQ(options.depth, 64);
    EXPECT_EQ(options.simd, SY_SIMD_NEON);
    sy_option_info info = sized<sy_option_info>();
    EXPECT_REFUSED(SY_BAD_INPUT, "index is -1", sy_option_at(-1, &info));
    EXPECT_REFUSED(SY_BAD_INPUT, "allowed: 0..", sy_option_at(sy_option_count(), &info));
    EXPECT_REFUSED(SY_BAD_INPUT, "info is null", sy_option_at(0, nullptr));
}

TEST(CApi, ARefusedTextChangesNothing) {
    sy_options options = small_options();
    const sy_options before = options;
    EXPECT_REFUSED(SY_BAD_INPUT, "mxfp8_e5m2", sy_options_set(&options, "dispatch_quant", "fp4"));
    EXPECT_REFUSED(SY_BAD_INPUT, "1..64", sy_options_set(&options, "depth", "65"));
    EXPECT_REFUSED(SY_BAD_INPUT, "no option \"deep\"; there are: hidden, topk", sy_options_set(&options, "deep", "2"));
    EXPECT_REFUSED(SY_BAD_INPUT, "name is null", sy_options_set(&options, nullptr, "2"));
    EXPECT_REFUSED(SY_BAD_INPUT, "text is null", sy_options_set(&options, "depth", nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "options is null", sy_options_set(nullptr, "depth", "2"));
    EXPECT_EQ(std::memcmp(&before, &options, sizeof options), 0);
    char text[4];
    EXPECT_REFUSED(SY_BAD_INPUT, "needs 6", sy_options_get(&options, "timeout_ms", text, sizeof text));
    EXPECT_REFUSED(SY_BAD_INPUT, "text is null", sy_options_get(&options, "timeout_ms", nullptr, 0));
    EXPECT_REFUSED(SY_BAD_INPUT, "name is null", sy_options_get(&options, nullptr, text, sizeof text));
    EXPECT_REFUSED(SY_BAD_INPUT, "options is null", sy_options_get(nullptr, "depth", text, sizeof text));
    EXPECT_REFUSED(SY_BAD_INPUT, "no option", sy_options_get(&options, "deep", text, sizeof text));
}

TEST(CApi, OptionsComeFromTheEnvironment) {
    sy_options options = small_options();
    setenv("SWITCHYARD_DISPATCH_QUANT", "mxfp8_e4m3", 1);
    setenv("SWITCHYARD_TIMEOUT_MS", "77", 1);
    EXPECT_DONE(sy_options_from_environment(&options));
    EXPECT_EQ(options.dispatch_quant, SY_MXFP8_E4M3);
    EXPECT_EQ(options.timeout_ms, 77);
    EXPECT_EQ(options.hidden, 8);
    setenv("SWITCHYARD_TIMEOUT_MS", "soon", 1);
    setenv("SWITCHYARD_DISPATCH_QUANT", "none", 1);
    EXPECT_REFUSED(SY_BAD_INPUT, "SWITCHYARD_TIMEOUT_MS", sy_options_from_environment(&options));
    EXPECT_EQ(options.dispatch_quant, SY_MXFP8_E4M3);
    unsetenv("SWITCHYARD_DISPATCH_QUANT");
    unsetenv("SWITCHYARD_TIMEOUT_MS");
    EXPECT_REFUSED(SY_BAD_INPUT, "options is null", sy_options_from_environment(nullptr));
}

TEST(CApi, OptionsAreCheckedWithoutOtherRanks) {
    sy_options options = small_options();
    EXPECT_DONE(sy_options_check(&options, 2));
    EXPECT_REFUSED(SY_BAD_INPUT, "4096 ranks", sy_options_check(&options, 4096));
    options.hidden = 0;
    EXPECT_REFUSED(SY_BAD_INPUT, "option hidden is 0", sy_options_check(&options, 2));
    EXPECT_REFUSED(SY_BAD_INPUT, "options is null", sy_options_check(nullptr, 2));
    // 2^32 + 1 must not pass for bf16 = 1.
    options = small_options();
    options.dtype = (int64_t{1} << 32) + SY_BF16;
    EXPECT_REFUSED(SY_BAD_INPUT, "option dtype", sy_options_check(&options, 2));
}

TEST(CApi, ExpertsAreContiguousAndTheFirstRanksOwnOneMore) {
    int64_t first = -1, last = -1;
    EXPECT_DONE(sy_experts_of(1, 3, 8, &first, &last));  // 3, 3, 2
    EXPECT_EQ(first, 3);
    EXPECT_EQ(last, 6);
    EXPECT_REFUSED(SY_BAD_INPUT, "rank 0 of 0", sy_experts_of(0, 0, 8, &first, &last));
    EXPECT_REFUSED(SY_BAD_INPUT, "rank 3 of 3", sy_experts_of(3, 3, 8, &first, &last));
    EXPECT_REFUSED(SY_BAD_INPUT, "first is null", sy_experts_of(0, 1, 8, nullptr, &last));
    EXPECT_REFUSED(SY_BAD_INPUT, "last is null", sy_experts_of(0, 1, 8, &first, nullptr));
}

// ------------------------------------------------------------------------------------------------- growth of structs

TEST(CApi, FieldsAnOlderCallerDoesNotKnowTakeDefaults) {
    sy_options options = small_options();
    options.rows_max = 1;  // too few: would fail if it were read
    options.depth = 99;    // not allowed
    options.struct_size = offsetof(sy_options, depth);
    EXPECT_DONE(sy_options_check(&options, 1));
    sy_session* session = nullptr;
    ASSERT_DONE(sy_open_local(&options, 1, &session));
    sy_options used = sized<sy_options>();
    ASSERT_DONE(sy_session_options(session, &used));
    EXPECT_EQ(used.depth, 2);
    EXPECT_EQ(used.hidden, 8);

    OneToken token(0);
    sy_dispatch_args args = token.args();
    args.timeout_ms = -5;
    args.tag = 3;
    args.struct_size = offsetof(sy_dispatch_args, tag);
    sy_batch batch;
    EXPECT_DONE(sy_dispatch(session, &args, &batch));
    // Results: nothing behind the caller's struct is written.
    sy_batch_view view;
    std::memset(&view, 0x5A, sizeof view);
    view.struct_size = offsetof(sy_batch_view, payload_bytes);
    EXPECT_DONE(sy_batch_get(&batch, &view));
    EXPECT_EQ(view.rows, 2);
    EXPECT_EQ(view.struct_size, offsetof(sy_batch_view, payload_bytes));
    EXPECT_EQ(view.payload_bytes, 0x5A5A5A5A5A5A5A5A);
    EXPECT_DONE(sy_drop(&batch));
    EXPECT_DONE(sy_free(&session));
}

TEST(CApi, AnOptionThatAnOlderCallerCannotHoldIsRefused) {
    sy_options options = small_options();
    options.struct_size = offsetof(sy_options, depth);
    options.depth = 7777;
    EXPECT_REFUSED(SY_BAD_INPUT, "option depth", sy_options_set(&options, "depth", "3"));
    EXPECT_DONE(sy_options_set(&options, "depth", "2"));  // the default, which it has anyway
    EXPECT_DONE(sy_options_set(&options, "topk", "3"));
    EXPECT_EQ(options.topk, 3);
    EXPECT_EQ(options.depth, 7777);
    sy_options init;
    init.depth = 7777;
    EXPECT_DONE(sy_options_init(&init, offsetof(sy_options, depth)));
    EXPECT_EQ(init.depth, 7777);
    EXPECT_EQ(init.struct_size, offsetof(sy_options, depth));
}

TEST(CApi, EveryFieldOfTheOptionsIsRefusedExactlyByCallersWhoseStructEndsBeforeIt) {
    const struct {
        const char* name;
        const char* text;
        size_t at;
    } last[] = {{"rows_max", "3", offsetof(sy_options, rows_max)},       {"partial", "yes", offsetof(sy_options, partial)},
                {"workers", "3", offsetof(sy_options, workers)},         {"jitter_us", "3", offsetof(sy_options, jitter_us)},
                {"group_ranks", "3", offsetof(sy_options, group_ranks)}, {"progress", "worker", offsetof(sy_options, progress)},
                {"cell_rows", "3", offsetof(sy_options, cell_rows)}};
    for (const auto& f : last) {
        SCOPED_TRACE(f.name);
        sy_options options = small_options();
        options.struct_size = f.at;
        EXPECT_REFUSED(SY_BAD_INPUT, "no room for it", sy_options_set(&options, f.name, f.text));
        options.struct_size = f.at + sizeof(int64_t);
        EXPECT_DONE(sy_options_set(&options, f.name, f.text));
        int64_t value = 0;
        std::memcpy(&value, reinterpret_cast<const std::byte*>(&options) + f.at, sizeof value);
        EXPECT_NE(value, 0);
    }
}

TEST(CApi, CountsAreComparedAndRowsComeHomeAsTheyAre) {
    const sy_options options = small_options();
    sy_session* session = nullptr;
    ASSERT_DONE(sy_open_local(&options, 1, &session));
    OneToken token(0);  // experts 0 and 3
    const int64_t sends[] = {1, 0, 0, 1}, wrong_sends[] = {1, 0, 1, 1}, receives[] = {2}, wrong_receives[] = {1};
    sy_dispatch_args args = token.args();
    sy_batch batch;
    args.send_counts = wrong_sends;
    EXPECT_REFUSED(SY_MISMATCH, "send_counts[2] is 1", sy_dispatch(session, &args, &batch));
    args.send_counts = sends;
    args.recv_counts = wrong_receives;
    EXPECT_REFUSED(SY_MISMATCH, "rank 0", sy_dispatch(session, &args, &batch));
    args.recv_counts = receives;
    ASSERT_DONE(sy_dispatch(session, &args, &batch));
    sy_batch_view view = sized<sy_batch_view>();
    ASSERT_DONE(sy_batch_get(&batch, &view));
    ASSERT_EQ(view.rows, 2);
    float y[2][8];
    for (int row = 0; row < 2; ++row)
        for (int i = 0; i < 8; ++i) y[row][i] = static_cast<float>(100 * row + i);
    float rows[2][8] = {};
    sy_combine_args home = sized<sy_combine_args>();
    home.y = y;
    home.rows = rows;
    ASSERT_DONE(sy_combine(session, &batch, &home));
    EXPECT_EQ(std::memcmp(rows, y, sizeof y), 0);
    EXPECT_DONE(sy_free(&session));
}

TEST(CApi, ANewerCallerMustLeaveUnknownFieldsZero) {
    struct NewerOptions {
        sy_options known;
        int64_t added;
    } options{small_options(), 0};
    options.known.struct_size = sizeof options;
    EXPECT_DONE(sy_options_check(&options.known, 1));
    EXPECT_DONE(sy_options_set(&options.known, "topk", "4"));
    EXPECT_EQ(options.known.struct_size, sizeof options);
    options.added = int64_t{1} << 56;
    EXPECT_REFUSED(SY_BAD_INPUT, "this library (version", sy_options_check(&options.known, 1));
    EXPECT_DONE(sy_options_init(&options.known, sizeof options));
    EXPECT_EQ(options.added, 0);

    struct NewerStats {
        sy_stats known;
        int64_t added;
    } stats{};
    stats.known.struct_size = sizeof stats;
    stats.added = -1;
    Ranks ranks(small_options(), 1);
    EXPECT_DONE(sy_session_stats(ranks[0], &stats.known));
    EXPECT_EQ(stats.added, 0);
}

TEST(CApi, ASizeThatWasNeverSetIsRefused) {
    sy_options options = small_options();
    for (const size_t size : {size_t{0}, size_t{8}, size_t{13}, sizeof(sy_options) - 1, size_t{1} << 20, SIZE_MAX}) {
        options.struct_size = size;
        EXPECT_REFUSED(SY_BAD_INPUT, "set it to sizeof(sy_options)", sy_options_check(&options, 1));
        EXPECT_REFUSED(SY_BAD_INPUT, "set it to sizeof(sy_options)", sy_options_init(&options, size));
    }
    Ranks ranks(small_options(), 1);
    sy_session_info info{};
    EXPECT_REFUSED(SY_BAD_INPUT, "sizeof(sy_session_info)", sy_session_get(ranks[0], &info));
    sy_options none{};
    EXPECT_REFUSED(SY_BAD_INPUT, "sizeof(sy_options)", sy_session_options(ranks[0], &none));
    sy_stats stats{};
    EXPECT_REFUSED(SY_BAD_INPUT, "sizeof(sy_stats)", sy_session_stats(ranks[0], &stats));
    sy_option_info line{};
    EXPECT_REFUSED(SY_BAD_INPUT, "sizeof(sy_option_info)", sy_option_at(0, &line));
    sy_group group{};
    sy_session* session = nullptr;
    options = small_options();
    EXPECT_REFUSED(SY_BAD_INPUT, "sizeof(sy_group)", sy_open(&options, &group, &session));
    EXPECT_EQ(session, nullptr);
}

// ----------------------------------------------------------------------------------------------------- open and close

TEST(CApi, OpensAGroupOfOneByNameAndFromTheEnvironment) {
    const sy_options options = small_options();
    sy_group group = sized<sy_group>();
    group.size = 1;
    sy_session* session = nullptr;
    ASSERT_DONE(sy_open(&options, &group, &session));
    round_trip(0, session);
    EXPECT_DONE(sy_free(&session));

    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "1", 1);
    ASSERT_DONE(sy_open_from_environment(&options, nullptr, &session));
    round_trip(0, session);
    EXPECT_DONE(sy_free(&session));
    setenv("RANK", "1", 1);
    session = reinterpret_cast<sy_session*>(&group);
    EXPECT_REFUSED(SY_BAD_INPUT, "RANK", sy_open_from_environment(&options, "", &session));
    EXPECT_EQ(session, nullptr);
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    EXPECT_REFUSED(SY_BAD_INPUT, "WORLD_SIZE is not set", sy_open_from_environment(&options, "", &session));
    EXPECT_REFUSED(SY_BAD_INPUT, "session is null", sy_open_from_environment(&options, "", nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "options is null", sy_open_from_environment(nullptr, "", &session));
}

TEST(CApi, OpensAGroupOfTwoByNameAndToken) {
    const sy_options options = small_options();
    const std::string name = "c_api_test-" + std::to_string(getpid());
    std::vector<std::thread> threads;
    for (int32_t r = 0; r < 2; ++r)
        threads.emplace_back([&, r] {
            sy_group group = sized<sy_group>();
            group.rank = r;
            group.size = 2;
            group.name = name.c_str();
            group.token = "secret";
            sy_session* session = nullptr;
            ASSERT_DONE(sy_open(&options, &group, &session));
            round_trip(static_cast<size_t>(r), session);
            EXPECT_DONE(sy_free(&session));
        });
    for (std::thread& thread : threads) thread.join();
}

TEST(CApi, OpenRefusesWhatIsNullOrImpossible) {
    sy_options options = small_options();
    sy_group group = sized<sy_group>();
    group.size = 2;
    group.rank = 2;
    sy_session* session = nullptr;
    EXPECT_REFUSED(SY_BAD_INPUT, "rank 2 of 2", sy_open(&options, &group, &session));
    EXPECT_REFUSED(SY_BAD_INPUT, "options is null", sy_open(nullptr, &group, &session));
    EXPECT_REFUSED(SY_BAD_INPUT, "group is null", sy_open(&options, nullptr, &session));
    EXPECT_REFUSED(SY_BAD_INPUT, "session is null", sy_open(&options, &group, nullptr));

    sy_session* sessions[2] = {reinterpret_cast<sy_session*>(&group), reinterpret_cast<sy_session*>(&group)};
    EXPECT_REFUSED(SY_BAD_INPUT, "0 ranks", sy_open_local(&options, 0, sessions));
    EXPECT_REFUSED(SY_BAD_INPUT, "-1 ranks", sy_open_local(&options, -1, sessions));
    EXPECT_REFUSED(SY_BAD_INPUT, "2147483647 ranks", sy_open_local(&options, INT32_MAX, sessions));
    EXPECT_REFUSED(SY_BAD_INPUT, "sessions is null", sy_open_local(&options, 2, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "options is null", sy_open_local(nullptr, 2, sessions));
    EXPECT_EQ(sessions[0], nullptr);
    EXPECT_EQ(sessions[1], nullptr);
    options.experts = 0;
    sessions[1] = reinterpret_cast<sy_session*>(&group);
    EXPECT_REFUSED(SY_BAD_INPUT, "option experts is 0", sy_open_local(&options, 2, sessions));
    EXPECT_EQ(sessions[1], nullptr);
}

TEST(CApi, OpenNamesTheOptionThatDiffersBetweenRanks) {
    const sy_options a = small_options();
    sy_options b = small_options();
    b.topk = 3;
    const sy_options* each[2] = {&a, &b};
    sy_session* sessions[2];
    EXPECT_REFUSED(SY_MISMATCH, "option topk: rank 0 has 2, rank 1 has 3", sy_open_local_each(each, 2, sessions));
    EXPECT_EQ(sessions[0], nullptr);
    EXPECT_EQ(sessions[1], nullptr);
    EXPECT_REFUSED(SY_BAD_INPUT, "options is null", sy_open_local_each(nullptr, 2, sessions));
    each[1] = nullptr;
    EXPECT_REFUSED(SY_BAD_INPUT, "options[1] is null", sy_open_local_each(each, 2, sessions));
    b = a;
    b.timeout_ms = 15000;  // need not agree
    each[1] = &b;
    ASSERT_DONE(sy_open_local_each(each, 2, sessions));
    sy_options used = sized<sy_options>();
    EXPECT_DONE(sy_session_options(sessions[1], &used));
    EXPECT_EQ(used.timeout_ms, 15000);
    for (sy_session*& session : sessions) EXPECT_DONE(sy_free(&session));
}

TEST(CApi, AGroupShrinksToTheRanksThatAreLeft) {
    sy_options options = small_options();
    options.partial = 1;
    Ranks ranks(options, 2);
    ranks.play([](size_t rank, sy_session* session) {
        OneToken token(rank);
        sy_batch batch;
        if (rank == 1) {
            EXPECT_DONE(sy_close(session));
            return;
        }
        const sy_dispatch_args args = token.args();
        EXPECT_EQ(sy_dispatch(session, &args, &batch), SY_PEER_CLOSED);
        int32_t is_member[2] = {-1, -1};
        EXPECT_REFUSED(SY_BAD_INPUT, "count is 3", sy_shrink(session, 0, 0, is_member, 3));
        EXPECT_REFUSED(SY_BAD_INPUT, "session is null", sy_shrink(nullptr, 0, 0, is_member, 2));
        EXPECT_DONE(sy_shrink(session, 0, 0, is_member, 2));
        EXPECT_EQ(is_member[0], 1);
        EXPECT_EQ(is_member[1], 0);
        EXPECT_DONE(sy_shrink(session, 0, 0, nullptr, 0));

        // Expert 3 has left with its rank: one slot of the token is missing, and 2 * y of expert 0 is what is left.
        ASSERT_DONE(sy_dispatch(session, &args, &batch));
        sy_batch_view view = sized<sy_batch_view>();
        ASSERT_DONE(sy_batch_get(&batch, &view));
        ASSERT_EQ(view.rows, 1);
        for (int i = 0; i < 8; ++i) static_cast<float*>(view.y)[i] = static_cast<float>(i);
        int32_t missing = -1;
        sy_combine_args home = token.home();
        home.missing = &missing;
        ASSERT_DONE(sy_combine(session, &batch, &home));
        EXPECT_EQ(missing, 1);
        for (int i = 0; i < 8; ++i) EXPECT_EQ(token.out[i], 2.0F * static_cast<float>(i));
    });
}

int64_t used_landing(const sy_options& options) {
    Ranks ranks(options, 1);
    sy_options used = sized<sy_options>();
    EXPECT_EQ(sy_session_options(ranks[0], &used), SY_OK);
    return used.landing;
}

TEST(CApi, ASessionTellsWhatItIsAndWhatItDid) {
    EXPECT_NE(used_landing(small_options()), SY_LANDING_AUTO);
    sy_options options = small_options();
    options.landing = SY_LANDING_PACKED;
    Ranks ranks(options, 3);
    ranks.play(round_trip);
    sy_session_info info = sized<sy_session_info>();
    ASSERT_DONE(sy_session_get(ranks[0], &info));
    EXPECT_EQ(info.rank, 0);
    EXPECT_EQ(info.size, 3);
    EXPECT_EQ(info.experts_local, 2);  // 4 experts on 3 ranks: 2, 1, 1
    EXPECT_GT(info.window_bytes, 0);
    EXPECT_STRNE(info.simd_name, "");
    sy_options used = sized<sy_options>();
    ASSERT_DONE(sy_session_options(ranks[0], &used));
    EXPECT_EQ(used.landing, SY_LANDING_PACKED);
    EXPECT_NE(used.combine_path, SY_COMBINE_AUTO);
    EXPECT_NE(used.simd, SY_SIMD_AUTO);
    EXPECT_EQ(used.rows_max, 4 * 2 * 3);
    sy_stats stats = sized<sy_stats>();
    ASSERT_DONE(sy_session_stats(ranks[0], &stats));
    EXPECT_EQ(stats.dispatches, 1U);
    EXPECT_EQ(stats.combines, 1U);
    EXPECT_EQ(stats.rows_sent, 2U);
    EXPECT_EQ(stats.rows_received, 3U);  // expert 0 of every rank
    EXPECT_GE(stats.bytes_sent, 2U * 32U);
    EXPECT_GE(stats.bytes_sent_peers, 32U);
    EXPECT_LT(stats.bytes_sent_peers, stats.bytes_sent);
    EXPECT_EQ(stats.bytes_home, 64U);
    int64_t waits[3] = {-1, -1, -1};
    ASSERT_DONE(sy_session_waits(ranks[0], waits, 3));
    EXPECT_EQ(waits[0] + waits[1] + waits[2], stats.wait_ns_counts + stats.wait_ns_rows + stats.wait_ns_returned);
    EXPECT_REFUSED(SY_BAD_INPUT, "count is 2", sy_session_waits(ranks[0], waits, 2));
    char why[4096];
    ASSERT_DONE(sy_session_explain(ranks[0], why, sizeof why));
    EXPECT_NE(std::string(why).find("packed"), std::string::npos) << why;
    const std::string needed = "needs " + std::to_string(std::strlen(why) + 1);
    EXPECT_REFUSED(SY_BAD_INPUT, needed.c_str(), sy_session_explain(ranks[0], why, std::strlen(why)));
    EXPECT_REFUSED(SY_BAD_INPUT, "text is null", sy_session_explain(ranks[0], nullptr, 4096));
    EXPECT_REFUSED(SY_BAD_INPUT, "wait_ns is null", sy_session_waits(ranks[0], nullptr, 3));
    EXPECT_REFUSED(SY_BAD_INPUT, "session is null", sy_session_waits(nullptr, waits, 3));
    EXPECT_REFUSED(SY_BAD_INPUT, "session is null", sy_session_get(nullptr, &info));
    EXPECT_REFUSED(SY_BAD_INPUT, "info is null", sy_session_get(ranks[0], nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "session is null", sy_session_options(nullptr, &used));
    EXPECT_REFUSED(SY_BAD_INPUT, "options is null", sy_session_options(ranks[0], nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "session is null", sy_session_stats(nullptr, &stats));
    EXPECT_REFUSED(SY_BAD_INPUT, "stats is null", sy_session_stats(ranks[0], nullptr));
}

TEST(CApi, CloseMayBeCalledTwiceAndEndsEverything) {
    Ranks ranks(small_options());
    std::vector<sy_batch> open(2);
    ranks.play([&](size_t r, sy_session* session) {
        const OneToken token(r);
        const sy_dispatch_args args = token.args();
        ASSERT_DONE(sy_dispatch(session, &args, &open[r]));
    });
    EXPECT_DONE(sy_close(ranks[0]));
    EXPECT_DONE(sy_close(ranks[0]));
    OneToken token(0);
    const sy_dispatch_args args = token.args();
    const sy_combine_args home = token.home();
    sy_batch batch;
    EXPECT_REFUSED(SY_STALE, "closed", sy_dispatch(ranks[0], &args, &batch));
    EXPECT_EQ(batch.session, nullptr);
    EXPECT_EQ(sy_combine(ranks[0], &open[0], &home), SY_STALE);
    EXPECT_EQ(sy_drop(&open[0]), SY_STALE);
    sy_batch_view view = sized<sy_batch_view>();
    EXPECT_EQ(sy_batch_get(&open[0], &view), SY_STALE);
    sy_stats stats = sized<sy_stats>();
    EXPECT_DONE(sy_session_stats(ranks[0], &stats));
    // Rank 1 learns of it instead of waiting: the batch has no y of rank 0, and the next dispatch no rank 0.
    EXPECT_REFUSED(SY_PEER_CLOSED, "rank 0", sy_combine(ranks[1], &open[1], &home));
    EXPECT_REFUSED(SY_PEER_CLOSED, "rank 0", sy_dispatch(ranks[1], &args, &batch));
    EXPECT_DONE(sy_free(&ranks[0]));
    EXPECT_EQ(ranks[0], nullptr);
    EXPECT_DONE(sy_free(&ranks[0]));  // null by now
    EXPECT_REFUSED(SY_BAD_INPUT, "session is null", sy_free(nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "session is null", sy_close(nullptr));
}

TEST(CApi, FreeWithOpenBatchesEndsThem) {
    Ranks ranks(small_options());
    ranks.play([](size_t r, sy_session* session) {
        const OneToken token(r);
        const sy_dispatch_args args = token.args();
        sy_batch batch;
        EXPECT_DONE(sy_dispatch(session, &args, &batch));
        EXPECT_DONE(sy_dispatch(session, &args, &batch));
    });
}

// -------------------------------------------------------------------------------------------------- dispatch, combine

// Two ranks, one token each to experts 0 and 3. Rank 0 holds expert 0 and receives both tokens there; rank 1 at expert 3.
// Expert e gives (e + 1) * x, so out = 2 * 1x + 0.5 * 4x + shared = 4x + 100.
TEST(CApi, DispatchAndCombineGiveWhatIsWorkedOutByHand) {
    sy_options options = small_options();
    options.deliver_weights = 1;
    Ranks ranks(options);
    ranks.play([](size_t r, sy_session* session) {
        OneToken token(r);
        sy_dispatch_args args = token.args();
        args.topk_weights = token.weights;
        args.tag = 5;
        sy_batch batch;
        ASSERT_DONE(sy_dispatch(session, &args, &batch));
        EXPECT_EQ(batch.session, session);
        EXPECT_EQ(batch.epoch, 1U);

        sy_batch_view view = sized<sy_batch_view>();
        ASSERT_DONE(sy_batch_get(&batch, &view));
        EXPECT_EQ(view.epoch, 1U);
        EXPECT_EQ(view.rows, 2);
        EXPECT_EQ(view.tokens, 1);
        EXPECT_EQ(view.experts_local, 2);
        EXPECT_EQ(view.payload_bytes, 32);
        EXPECT_EQ(view.scale_bytes, 0);
        const void *rows = nullptr, *scales = &view;
        ASSERT_DONE(sy_batch_expand_x(&batch, &rows, &scales));
        EXPECT_EQ(scales, nullptr);
        const auto* expand_x = static_cast<const float*>(rows);
        const size_t mine = r == 0 ? 0 : 1;  // which local expert has the rows
        const int32_t slot = r == 0 ? 0 : 1;
        EXPECT_EQ(view.expert_token_nums[mine], 2);
        EXPECT_EQ(view.expert_token_nums[1 - mine], 0);
        for (int i = 0; i < 3; ++i) EXPECT_EQ(view.expert_offsets[i], (r == 0 ? i > 0 : i > 1) ? 2 : 0);
        for (int i = 0; i < 4; ++i) EXPECT_EQ(view.ep_recv_count[i], r == 0 ? (i == 0 ? 1 : 2) : (i < 2 ? 0 : i - 1));
        for (int32_t source = 0; source < 2; ++source) {
            const int32_t* info = view.assist_info_for_combine + 3 * source;
            EXPECT_EQ(info[0], source);
            EXPECT_EQ(info[1], 0);
            EXPECT_EQ(info[2], slot);
            EXPECT_EQ(view.weights[source], token.weights[slot]);
            const OneToken sent(static_cast<size_t>(source));
            EXPECT_EQ(std::memcmp(expand_x + 8 * source, sent.x, sizeof sent.x), 0);
        }

        for (int i = 0; i < 16; ++i) static_cast<float*>(view.y)[i] = expand_x[i] * (r == 0 ? 1.0F : 4.0F);
        const std::vector<float> shared(8, 100.0F);
        sy_combine_args home = token.home();
        home.shared = shared.data();
        ASSERT_DONE(sy_combine(session, &batch, &home));
        EXPECT_EQ(batch.session, nullptr);
        EXPECT_EQ(batch.epoch, 0U);
        for (size_t i = 0; i < 8; ++i) EXPECT_EQ(token.out[i], 4 * token.x[i] + 100);
    });
}

// The same in two halves each, two dispatches in flight, their ends taken in the other order.
TEST(CApi, AsyncCallsGiveTheSameAndTellTheirEndOnce) {
    for (const int64_t progress : {SY_PROGRESS_CALLER, SY_PROGRESS_WORKER}) {
        sy_options options = small_options();
        options.progress = progress;
        Ranks ranks(options);
        ranks.play([](size_t r, sy_session* session) {
            OneToken token(r), other(r);
            const sy_dispatch_args args = token.args();
            sy_pending first, second, third;
            ASSERT_DONE(sy_dispatch_async(session, &args, &first));
            ASSERT_DONE(sy_dispatch_async(session, &args, &second));
            EXPECT_EQ(first.session, session);
            EXPECT_EQ(second.epoch, first.epoch + 1);
            EXPECT_REFUSED(SY_DEPTH, "the dispatch of epoch 1", sy_dispatch_async(session, &args, &third));
            int32_t done = 0;
            while (!done) ASSERT_DONE(sy_poll(&second, &done));
            ASSERT_DONE(sy_wait(&first, 0, nullptr));
            sy_batch batch[2];
            ASSERT_DONE(sy_take(&first, &batch[0]));
            EXPECT_REFUSED(SY_STALE, "is empty", sy_take(&first, &batch[0]));
            ASSERT_DONE(sy_take(&second, &batch[1]));
            echo(batch[0]);
            echo(batch[1]);
            const sy_combine_args home = token.home(), other_home = other.home();
            ASSERT_DONE(sy_combine_async(session, &batch[0], &home, &first));
            EXPECT_EQ(batch[0].session, nullptr);
            ASSERT_DONE(sy_combine_async(session, &batch[1], &other_home, &second));
            ASSERT_DONE(sy_wait(&second, 0, &done));
            EXPECT_EQ(done, 1);
            EXPECT_REFUSED(SY_STALE, "is empty", sy_poll(&second, &done));
            EXPECT_REFUSED(SY_BAD_INPUT, "timeout_ms is -1", sy_wait(&first, -1, &done));
            for (done = 0; !done;) {
                ASSERT_DONE(sy_progress(session));
                ASSERT_DONE(sy_wait(&first, 5, &done));
            }
            for (size_t i = 0; i < 8; ++i) EXPECT_EQ(token.out[i], 2.5F * token.x[i]);
            for (size_t i = 0; i < 8; ++i) EXPECT_EQ(other.out[i], 2.5F * token.x[i]);
            EXPECT_REFUSED(SY_BAD_INPUT, "pending is null", sy_poll(nullptr, &done));
        });
        // Bad arguments reach the other rank; so does a dispatch given up.
        std::atomic<bool> given_up = false;
        ranks.play([&](size_t r, sy_session* session) {
            OneToken token(r);
            const sy_dispatch_args args = token.args();
            sy_pending pending;
            if (r == 0) {
                EXPECT_REFUSED(SY_BAD_INPUT, "args is null", sy_dispatch_async(session, nullptr, &pending));
                EXPECT_EQ(pending.session, nullptr);
                ASSERT_DONE(sy_dispatch_async(session, &args, &pending));
                ASSERT_DONE(sy_abandon(&pending));
                EXPECT_EQ(pending.session, nullptr);
                given_up = true;
                given_up.notify_all();
            } else {
                ASSERT_DONE(sy_dispatch_async(session, &args, &pending));
                EXPECT_REFUSED(SY_BAD_INPUT, "rank 0", sy_wait(&pending, 0, nullptr));
                EXPECT_EQ(pending.session, nullptr);
                given_up.wait(false);
                ASSERT_DONE(sy_dispatch_async(session, &args, &pending));
                EXPECT_REFUSED(SY_PEER_LEFT, "rank 0", sy_wait(&pending, 0, nullptr));
            }
            round_trip(r, session);
        });
    }
}

// The same with y in the caller's memory, weight 1, rows of x 10 elements apart, and a rank without tokens.
TEST(CApi, TakesStridesOwnOutputAndARankWithoutTokens) {
    Ranks ranks(small_options());
    ranks.play([](size_t r, sy_session* session) {
        const int64_t tokens = r == 0 ? 2 : 0;
        std::vector<float> x(20), out(16, -1.0F);
        for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
        const int32_t ids[4] = {3, -1, 1, 2};  // token 0 has one expert, token 1 two
        sy_dispatch_args args = sized<sy_dispatch_args>();
        args.tokens = tokens;
        args.row_stride = 10;
        if (tokens > 0) args.x = x.data(), args.topk_ids = ids;
        sy_batch batch;
        ASSERT_DONE(sy_dispatch(session, &args, &batch));
        sy_batch_view view = sized<sy_batch_view>();
        ASSERT_DONE(sy_batch_get(&batch, &view));
        ASSERT_EQ(view.rows, r == 0 ? 1 : 2);
        const void* rows = nullptr;
        ASSERT_DONE(sy_batch_expand_x(&batch, &rows, nullptr));
        std::vector<float> y(static_cast<size_t>(8 * view.rows));
        for (size_t i = 0; i < y.size(); ++i) y[i] = static_cast<const float*>(rows)[i] + 1;
        sy_combine_args home = sized<sy_combine_args>();
        home.y = y.data();
        if (tokens > 0) home.out = out.data();
        ASSERT_DONE(sy_combine(session, &batch, &home));
        for (size_t i = 0; i < 8 && tokens > 0; ++i) {
            EXPECT_EQ(out[i], x[i] + 1);
            EXPECT_EQ(out[8 + i], 2 * (x[10 + i] + 1));
        }
    });
}

// Three ranks with 4, 0 and 3 tokens of random bf16, 5 experts (2, 2, 1), duplicates and unused slots, pad rows, quantised
// both ways: every byte of every view, and of out, against the reference.
TEST(CApi, AgreesWithTheReferenceByteForByte) {
    sy_options options = small_options();
    options.hidden = 100;
    options.topk = 3;
    options.experts = 5;
    options.dtype = SY_BF16;
    options.expert_alignment = 16;
    options.deliver_weights = 1;
    ASSERT_DONE(sy_options_set(&options, "dispatch_quant", "mxfp8_e4m3"));
    ASSERT_DONE(sy_options_set(&options, "combine_quant", "int8_block8"));
    ASSERT_DONE(sy_options_set(&options, "expert_token_nums", "cumsum"));
    Options cpp;
    for (const OptionInfo& info : option_table()) {
        char text[32];
        ASSERT_DONE(sy_options_get(&options, info.name, text, sizeof text));
        ASSERT_TRUE(set_option(cpp, info, text).ok());
    }

    std::mt19937 random(1234);
    const auto bf16 = [&] { return static_cast<uint16_t>(0x3E00 + random() % 0x300 + (random() % 2) * 0x8000); };
    struct Rank {
        std::vector<uint16_t> x;
        std::vector<int32_t> ids;
        std::vector<float> weights;
        reference::RankInput input;
    };
    std::vector<Rank> given(3);
    std::vector<reference::RankInput> inputs;
    for (size_t r = 0; r < 3; ++r) {
        Rank& rank = given[r];
        const int64_t tokens = r == 0 ? 4 : r == 1 ? 0 : 3;
        for (int64_t i = 0; i < tokens * 100; ++i) rank.x.push_back(bf16());
        for (int64_t i = 0; i < tokens * 3; ++i) {
            rank.ids.push_back(static_cast<int32_t>(random() % 6) - 1);
            rank.weights.push_back(static_cast<float>(random() % 1000) / 1000);
        }
        rank.input = {rank.x.data(), tokens, rank.ids.data(), rank.weights.data()};
        inputs.push_back(rank.input);
    }
    // y of a row follows from who sent it, so that every rank can tell what every expert answers.
    const auto answer = [](int64_t source, int64_t token, int64_t k) {
        std::vector<uint16_t> y(100);
        for (size_t i = 0; i < y.size(); ++i)
            y[i] = static_cast<uint16_t>(0x3F00 + (static_cast<size_t>(source * 31 + token * 7 + k * 3) + i) % 0x200);
        return y;
    };

    Ranks ranks(options, 3);
    ranks.play([&](size_t r, sy_session* session) {
        Rank& rank = given[r];
        for (uint64_t round = 1; round <= 5; ++round) {
            sy_dispatch_args args = sized<sy_dispatch_args>();
            args.x = rank.x.data();
            args.tokens = rank.input.tokens;
            args.topk_ids = rank.ids.data();
            args.topk_weights = rank.weights.data();
            sy_batch batch;
            ASSERT_DONE(sy_dispatch(session, &args, &batch));
            sy_batch_view view = sized<sy_batch_view>();
            ASSERT_DONE(sy_batch_get(&batch, &view));
            const reference::Received want = reference::dispatch(cpp, inputs, static_cast<int>(r));
            ASSERT_EQ(view.rows, want.rows);
            ASSERT_EQ(view.epoch, round);
            ASSERT_EQ(view.experts_local, static_cast<int64_t>(want.expert_token_nums.size()));
            ASSERT_EQ(static_cast<size_t>(view.rows * view.payload_bytes), want.expand_x.size());
            ASSERT_EQ(static_cast<size_t>(view.rows * view.scale_bytes), want.dynamic_scales.size());
            const auto same = [](const void* got, const auto& expected) {
                return expected.empty() || std::memcmp(got, expected.data(), expected.size() * sizeof expected[0]) == 0;
            };
            const void *expand_x = nullptr, *dynamic_scales = nullptr;
            ASSERT_DONE(sy_batch_expand_x(&batch, &expand_x, &dynamic_scales));
            EXPECT_TRUE(same(expand_x, want.expand_x));
            EXPECT_TRUE(same(dynamic_scales, want.dynamic_scales));
            EXPECT_TRUE(same(view.assist_info_for_combine, want.assist_info_for_combine));
            EXPECT_TRUE(same(view.expert_token_nums, want.expert_token_nums));
            EXPECT_TRUE(same(view.expert_offsets, want.expert_offsets));
            EXPECT_TRUE(same(view.ep_recv_count, want.ep_recv_count));
            EXPECT_TRUE(same(view.weights, want.weights));

            for (int64_t i = 0; i < view.rows; ++i) {
                const int32_t* info = view.assist_info_for_combine + 3 * i;
                if (info[0] < 0) continue;
                const std::vector<uint16_t> y = answer(info[0], info[1], info[2]);
                std::memcpy(static_cast<std::byte*>(view.y) + 200 * i, y.data(), 200);
            }
            std::vector<std::byte> out(static_cast<size_t>(rank.input.tokens) * 200);
            sy_combine_args home = sized<sy_combine_args>();
            home.topk_weights = rank.weights.data();
            home.out = out.data();
            ASSERT_DONE(sy_combine(session, &batch, &home));
            std::vector<std::vector<uint16_t>> rows(3);  // of one token: the reference reads them after it has asked for all
            const auto y = [&](int source, int64_t token, int64_t k, int32_t) -> const void* {
                return (rows[static_cast<size_t>(k)] = answer(source, token, k)).data();
            };
            EXPECT_EQ(out, reference::combine(cpp, rank.input, static_cast<int>(r), y));
        }
    });
}

// Tokens written where sy_session_x() says, several rounds, so that the place moves from slot to slot.
TEST(CApi, TokensCanBeWrittenInPlace) {
    sy_options options = small_options();
    ASSERT_DONE(sy_options_set(&options, "landing", "in_place"));
    Ranks ranks(options);
    ranks.play([](size_t r, sy_session* session) {
        for (int round = 0; round < 5; ++round) {
            void* place = nullptr;
            ASSERT_DONE(sy_session_x(session, &place));
            ASSERT_NE(place, nullptr);
            OneToken token(10 * r + static_cast<size_t>(round));
            std::memcpy(place, token.x, sizeof token.x);
            sy_dispatch_args args = token.args();
            args.x = place;
            const sy_combine_args home = token.home();
            sy_batch batch;
            ASSERT_DONE(sy_dispatch(session, &args, &batch));
            echo(batch);
            ASSERT_DONE(sy_combine(session, &batch, &home));
            for (size_t i = 0; i < 8; ++i) EXPECT_EQ(token.out[i], 2.5F * token.x[i]);
        }
    });
    void* place = &options;
    options = small_options();
    options.landing = SY_LANDING_PACKED;
    Ranks packed(options, 1);
    EXPECT_DONE(sy_session_x(packed[0], &place));
    EXPECT_EQ(place, nullptr);  // no such place with this landing
    EXPECT_REFUSED(SY_BAD_INPUT, "session is null", sy_session_x(nullptr, &place));
    EXPECT_REFUSED(SY_BAD_INPUT, "x is null", sy_session_x(packed[0], nullptr));
    EXPECT_DONE(sy_close(packed[0]));
    EXPECT_REFUSED(SY_STALE, "closed", sy_session_x(packed[0], &place));
}

TEST(CApi, RowAndGatherShowTheRowsOfAnExpert) {
    sy_options options = small_options();
    options.dtype = SY_F16;
    options.dispatch_quant = SY_MXFP8_E5M2;
    Ranks ranks(options, 1);
    std::vector<uint16_t> x(32, 0x3C00);               // 4 tokens of 1.0 in f16 ...
    for (size_t i = 24; i < 32; ++i) x[i] = 0x4000;    // ... the last of 2.0
    const int32_t ids[8] = {1, 2, 1, -1, 1, 2, 1, 0};  // expert 0: token 3; 1: all; 2: tokens 0, 2
    sy_dispatch_args args = sized<sy_dispatch_args>();
    args.x = x.data();
    args.tokens = 4;
    args.topk_ids = ids;
    sy_batch batch;
    ASSERT_DONE(sy_dispatch(ranks[0], &args, &batch));
    sy_batch_view view = sized<sy_batch_view>();
    ASSERT_DONE(sy_batch_get(&batch, &view));
    ASSERT_EQ(view.rows, 7);
    ASSERT_EQ(view.payload_bytes, 8);
    ASSERT_EQ(view.scale_bytes, 2);
    const void *expand_x = nullptr, *dynamic_scales = nullptr;
    ASSERT_DONE(sy_batch_expand_x(&batch, &expand_x, &dynamic_scales));
    for (int64_t i = 0; i < view.rows; ++i) {
        const void *payload = nullptr, *scales = nullptr;
        ASSERT_DONE(sy_batch_row(&batch, i, &payload, &scales));
        EXPECT_EQ(std::memcmp(payload, static_cast<const std::byte*>(expand_x) + 8 * i, 8), 0);
        EXPECT_EQ(std::memcmp(scales, static_cast<const std::byte*>(dynamic_scales) + 2 * i, 2), 0);
        ASSERT_DONE(sy_batch_row(&batch, i, &payload, nullptr));
    }
    float decoded[16];
    ASSERT_DONE(sy_batch_gather_f32(&batch, 1, 2, 2, decoded));  // tokens 2 and 3 of expert 1, rows 3 and 4 of the batch
    for (int i = 0; i < 16; ++i) EXPECT_EQ(decoded[i], i < 8 ? 1.0F : 2.0F);
    std::byte tile[16], scales[4];
    ASSERT_DONE(sy_batch_gather(&batch, 1, 2, 2, tile, scales));
    EXPECT_EQ(std::memcmp(tile, static_cast<const std::byte*>(expand_x) + 8 * 3, 16), 0);
    EXPECT_EQ(std::memcmp(scales, static_cast<const std::byte*>(dynamic_scales) + 2 * 3, 4), 0);
    ASSERT_DONE(sy_batch_gather(&batch, 1, 0, 1, tile, nullptr));
    ASSERT_DONE(sy_batch_gather(&batch, 3, 0, 0, nullptr, nullptr));  // nothing of an expert without rows
    ASSERT_DONE(sy_batch_gather_f32(&batch, 3, 0, 0, nullptr));

    const void* payload = nullptr;
    EXPECT_REFUSED(SY_BAD_INPUT, "row 7", sy_batch_row(&batch, 7, &payload, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "row -1", sy_batch_row(&batch, -1, &payload, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "payload is null", sy_batch_row(&batch, 0, nullptr, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "it has 4 rows", sy_batch_gather(&batch, 1, 3, 2, tile, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "has 4 experts", sy_batch_gather(&batch, 4, 0, 1, tile, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "it has 1 rows", sy_batch_gather_f32(&batch, 0, 0, INT64_MAX, decoded));
    EXPECT_REFUSED(SY_BAD_INPUT, "gather", sy_batch_gather_f32(&batch, 0, 0, -1, decoded));
    EXPECT_REFUSED(SY_BAD_INPUT, "tile is null", sy_batch_gather(&batch, 1, 0, 1, nullptr, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "tile is null", sy_batch_gather_f32(&batch, 1, 0, 1, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "batch is null", sy_batch_row(nullptr, 0, &payload, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "batch is null", sy_batch_gather(nullptr, 0, 0, 0, nullptr, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "batch is null", sy_batch_gather_f32(nullptr, 0, 0, 0, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "batch is null", sy_batch_get(nullptr, &view));
    EXPECT_REFUSED(SY_BAD_INPUT, "batch is null", sy_batch_expand_x(nullptr, &expand_x, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "expand_x is null", sy_batch_expand_x(&batch, nullptr, nullptr));
    EXPECT_REFUSED(SY_BAD_INPUT, "view is null", sy_batch_get(&batch, nullptr));
    view.struct_size = 0;
    EXPECT_REFUSED(SY_BAD_INPUT, "sizeof(sy_batch_view)", sy_batch_get(&batch, &view));
}

// -------------------------------------------------------------------------------------------------------- refusals

TEST(CApi, AStaleTicketIsRefusedAlsoWhenItsPlaceIsUsedAgain) {
    Ranks ranks(small_options(), 1);  // depth 2: epoch 3 lies where epoch 1 lay
    OneToken token(0);
    const sy_dispatch_args args = token.args();
    const sy_combine_args home = token.home();
    sy_batch first, batch;
    ASSERT_DONE(sy_dispatch(ranks[0], &args, &first));
    echo(first);
    const sy_batch copy = first;
    sy_batch again = copy;
    ASSERT_DONE(sy_combine(ranks[0], &first, &home));
    EXPECT_REFUSED(SY_STALE, "is empty", sy_combine(ranks[0], &first, &home));
    EXPECT_REFUSED(SY_STALE, "epoch 1 has ended", sy_combine(ranks[0], &again, &home));
    EXPECT_EQ(again.session, ranks[0]);  // refused as stale: left as it was
    EXPECT_REFUSED(SY_STALE, "is empty", sy_drop(&first));
    round_trip(0, ranks[0]);
    ASSERT_DONE(sy_dispatch(ranks[0], &args, &batch));
    ASSERT_EQ(batch.epoch, 3U);
    sy_batch_view view = sized<sy_batch_view>();
    const void* payload = nullptr;
    float tile[8];
    EXPECT_REFUSED(SY_STALE, "is of epoch 1, which has ended; its place holds epoch 3", sy_combine(ranks[0], &again, &home));
    EXPECT_EQ(sy_drop(&again), SY_STALE);
    EXPECT_EQ(sy_batch_get(&copy, &view), SY_STALE);
    EXPECT_EQ(sy_batch_expand_x(&copy, &payload, nullptr), SY_STALE);
    EXPECT_EQ(sy_batch_row(&copy, 0, &payload, nullptr), SY_STALE);
    EXPECT_EQ(sy_batch_gather(&copy, 0, 0, 1, tile, nullptr), SY_STALE);
    EXPECT_EQ(sy_batch_gather_f32(&copy, 0, 0, 1, tile), SY_STALE);
    const sy_batch future = {ranks[0], 4};  // never dispatched
    EXPECT_EQ(sy_batch_get(&future, &view), SY_STALE);
    echo(batch);
    EXPECT_DONE(sy_combine(ranks[0], &batch, &home));
}

TEST(CApi, ABatchOfAnotherSessionIsRefusedAndStaysOpen) {
    Ranks a(small_options(), 1), b(small_options(), 1);
    OneToken token(0);
    const sy_dispatch_args args = token.args();
    sy_combine_args home = token.home();
    sy_batch batch;
    ASSERT_DONE(sy_dispatch(a[0], &args, &batch));
    echo(batch);
    EXPECT_REFUSED(SY_STALE, "another session", sy_combine(b[0], &batch, &home));
    home.struct_size = 0;
    EXPECT_EQ(sy_combine(b[0], &batch, &home), SY_BAD_INPUT);
    home.struct_size = sizeof home;
    EXPECT_DONE(sy_combine(a[0], &batch, &home));
}

TEST(CApi, OneDispatchMoreThanTheDepthIsRefused) {
    Ranks ranks(small_options(), 1);
    OneToken token(0);
    const sy_dispatch_args args = token.args();
    const sy_combine_args home = token.home();
    sy_batch batches[3];
    ASSERT_DONE(sy_dispatch(ranks[0], &args, &batches[0]));
    ASSERT_DONE(sy_dispatch(ranks[0], &args, &batches[1]));
    EXPECT_REFUSED(SY_DEPTH, "depth is 2", sy_dispatch(ranks[0], &args, &batches[2]));
    EXPECT_EQ(batches[2].session, nullptr);
    for (int i = 0; i < 2; ++i) {
        echo(batches[i]);
        EXPECT_DONE(sy_combine(ranks[0], &batches[i], &home));
    }
    round_trip(0, ranks[0]);
}

TEST(CApi, DropTellsTheOtherRanks) {
    Ranks ranks(small_options());
    ranks.play([](size_t r, sy_session* session) {
        OneToken token(r);
        const sy_dispatch_args args = token.args();
        const sy_combine_args home = token.home();
        sy_batch batch;
        ASSERT_DONE(sy_dispatch(session, &args, &batch));
        if (r == 0) {
            const sy_batch copy = batch;
            EXPECT_DONE(sy_drop(&batch));
            EXPECT_EQ(batch.session, nullptr);
            sy_batch again = copy;
            EXPECT_EQ(sy_drop(&again), SY_STALE);
        } else {
            EXPECT_REFUSED(SY_PEER_LEFT, "rank 0 dropped", sy_combine(session, &batch, &home));
            EXPECT_EQ(batch.session, nullptr);
        }
        round_trip(r, session);
    });
    EXPECT_REFUSED(SY_BAD_INPUT, "batch is null", sy_drop(nullptr));
}

TEST(CApi, BadInputOfOneRankReachesEveryRankAndTheSessionGoesOn) {
    Ranks ranks(small_options());
    ranks.play([](size_t r, sy_session* session) {
        OneToken token(r);
        sy_dispatch_args args = token.args();
        sy_batch batch;
        const auto refused_everywhere = [&](const char* part) {
            EXPECT_REFUSED(SY_BAD_INPUT, part, sy_dispatch(session, &args, &batch));
            EXPECT_EQ(batch.session, nullptr);
            args = token.args();
        };
        if (r == 1) token.ids[1] = 4;
        refused_everywhere("rank 1: topk_ids[0][1] is 4; experts are 0..3");
        token.ids[1] = 3;
        if (r == 0) args.tokens = 5;
        refused_everywhere("tokens is 5");
        if (r == 0) args.x = nullptr;
        refused_everywhere("x is null");
        if (r == 1) args.row_stride = 7;
        refused_everywhere("row_stride is 7");
        if (r == 1) args.tag = 2;
        EXPECT_REFUSED(SY_MISMATCH, "tag", sy_dispatch(session, &args, &batch));
        round_trip(r, session);
    });
}

TEST(CApi, ArgumentsThatCannotBeReadReachEveryRank) {
    Ranks ranks(small_options());
    ranks.play([](size_t r, sy_session* session) {
        OneToken token(r);
        const sy_dispatch_args args = token.args();
        const sy_combine_args home = token.home();
        sy_dispatch_args bad_args = args;
        bad_args.struct_size = 3;
        sy_combine_args bad_home = home;
        bad_home.struct_size = 0;
        sy_batch batch;
        // Rank 0 calls with nothing, a struct without size, and nowhere to put the batch.
        EXPECT_REFUSED(SY_BAD_INPUT, r == 0 ? "args is null" : "rank 0",
                       sy_dispatch(session, r == 0 ? nullptr : &args, &batch));
        EXPECT_REFUSED(SY_BAD_INPUT, r == 0 ? "sizeof(sy_dispatch_args)" : "rank 0",
                       sy_dispatch(session, r == 0 ? &bad_args : &args, &batch));
        EXPECT_REFUSED(SY_BAD_INPUT, r == 0 ? "batch is null" : "rank 0",
                       sy_dispatch(session, &args, r == 0 ? nullptr : &batch));
        EXPECT_EQ(batch.session, nullptr);
        // The same at combine.
        for (const sy_combine_args* bad : {static_cast<const sy_combine_args*>(nullptr), &std::as_const(bad_home)}) {
            ASSERT_DONE(sy_dispatch(session, &args, &batch));
            if (r == 0)
                EXPECT_EQ(sy_combine(session, &batch, bad), SY_BAD_INPUT);
            else
                EXPECT_REFUSED(SY_PEER_LEFT, "rank 0", sy_combine(session, &batch, &home));
            EXPECT_EQ(batch.session, nullptr);
        }
        // A result without a place is bad input that uses the batch up.
        ASSERT_DONE(sy_dispatch(session, &args, &batch));
        sy_combine_args nowhere = home;
        if (r == 0) nowhere.out = nullptr;
        EXPECT_NE(sy_combine(session, &batch, &nowhere), SY_OK);
        EXPECT_TEXT("out is null");
        EXPECT_EQ(batch.session, nullptr);
        round_trip(r, session);
    });
    OneToken token(0);
    const sy_dispatch_args args = token.args();
    const sy_combine_args home = token.home();
    sy_batch batch = {nullptr, 0};
    EXPECT_REFUSED(SY_BAD_INPUT, "session is null", sy_dispatch(nullptr, &args, &batch));
    EXPECT_REFUSED(SY_BAD_INPUT, "session is null", sy_combine(nullptr, &batch, &home));
    EXPECT_REFUSED(SY_BAD_INPUT, "batch is null", sy_combine(ranks[0], nullptr, &home));
    EXPECT_REFUSED(SY_STALE, "batch is empty", sy_combine(ranks[0], &batch, &home));
}

TEST(CApi, ADeadlinePassesWithATextThatNamesTheRank) {
    Ranks ranks(small_options());
    OneToken token(0);
    sy_dispatch_args args = token.args();
    args.timeout_ms = 20;
    sy_batch batch;
    EXPECT_REFUSED(SY_TIMED_OUT, "rank 1", sy_dispatch(ranks[0], &args, &batch));
}

// ------------------------------------------------------------------------------------------------------- allocation

TEST(CApi, SteadyStateAllocatesNothing) {
#ifndef SY_COUNTS_ALLOCATIONS
    GTEST_SKIP() << "malloc belongs to the sanitizer here";
#else
    sy_options options = small_options();
    options.dtype = SY_BF16;
    options.dispatch_quant = SY_MXFP8_E5M2;
    options.deliver_weights = 1;
    options.workers = 2;
    Ranks ranks(options);
    EXPECT_GT(allocations, 0);  // opening allocates, and is seen to
    std::atomic<int64_t> counted{-1};
    std::atomic<int> warm{0}, ended{0};
    ranks.play([&](size_t r, sy_session* session) {
        const std::vector<uint16_t> x(32, 0x3F80);
        const int32_t ids[8] = {0, 1, 2, 3, 3, -1, 1, 1};
        const float weights[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        std::vector<uint16_t> out(32);
        sy_dispatch_args args = sized<sy_dispatch_args>();
        args.x = x.data();
        args.topk_ids = ids;
        args.topk_weights = weights;
        sy_combine_args home = sized<sy_combine_args>();
        home.topk_weights = weights;
        home.out = out.data();
        int64_t before = 0;
        bool good = true;
        for (int64_t round = 0; round < 220; ++round) {
            if (round == 20) {  // both ranks are past opening before counting starts
                ++warm;
                while (warm < 2) std::this_thread::yield();
                before = allocations;
            }
            args.tokens = 1 + (round + static_cast<int64_t>(r)) % 4;
            sy_batch batch;
            good = good && sy_dispatch(session, &args, &batch) == SY_OK;
            sy_batch_view view = sized<sy_batch_view>();
            good = good && sy_batch_get(&batch, &view) == SY_OK;
            for (int64_t e = 0; good && e < view.experts_local; ++e) {
                float tile[8 * 8];
                const int64_t rows = view.expert_offsets[e + 1] - view.expert_offsets[e];
                for (int64_t i = 0; i < rows; i += 8)
                    good = good && sy_batch_gather_f32(&batch, e, i, std::min<int64_t>(8, rows - i), tile) == SY_OK;
            }
            if (view.rows > 0) std::memset(view.y, 0, static_cast<size_t>(view.rows) * 16);
            good = good && (round % 7 == 6 ? sy_drop(&batch) : sy_combine(session, &batch, &home)) == SY_OK;
            if (!good) break;
        }
        ++ended;
        while (ended < 2) std::this_thread::yield();
        if (r == 0) counted = allocations - before;
        EXPECT_TRUE(good) << sy_last_error();
    });
    EXPECT_EQ(counted, 0);
#endif
}

// -------------------------------------------------------------------------------------------------------------- exchange

sy_exchange_options two_payloads() {
    sy_exchange_options o;
    EXPECT_EQ(sy_exchange_options_init(&o, sizeof o), SY_OK);
    o.payloads = 2;
    o.payload_bytes[0] = 4;
    o.payload_bytes[1] = 1;
    o.experts = 3;
    o.items_max = 4;
    return o;
}

TEST(CExchange, ItemsGoWhereTheIndexSaysAndAnswersComeBack) {
    for (int64_t strategy = SY_LANDING_AUTO; strategy <= SY_LANDING_ALLTOALLV; ++strategy) {
        sy_exchange_options o = two_payloads();
        o.strategy = strategy;
        sy_exchange* group[2];
        ASSERT_DONE(sy_exchange_open_local(&o, 2, group));
        switchyard::test::on_ranks(2, [&](int r) {
            // Rank r sends item i to expert i of 3; experts 0 and 1 are rank 0's.
            const int32_t numbers[] = {10 * r, 10 * r + 1, 10 * r + 2}, indices[] = {0, 1, 2};
            const uint8_t letters[] = {'a', 'b', 'c'};
            sy_send_args args{};
            args.struct_size = sizeof args;
            args.payloads[0] = numbers;
            args.payloads[1] = letters;
            args.items = 3;
            args.expert_indices = indices;
            sy_received* received = nullptr;
            ASSERT_DONE(sy_exchange_send(group[r], &args, &received));
            sy_received_view v{};
            v.struct_size = sizeof v;
            ASSERT_DONE(sy_received_get(received, &v));
            ASSERT_EQ(v.rows, r == 0 ? 4 : 2);
            for (int64_t i = 0; i < v.rows; ++i) {
                int32_t number;
                std::memcpy(&number, static_cast<const char*>(v.payloads[0]) + i * v.stride, 4);
                const char letter = static_cast<const char*>(v.payloads[1])[i * v.stride];
                const int64_t expert = r == 0 ? i / 2 : 2;
                EXPECT_EQ(number, 10 * (i % 2) + expert) << "by (expert, source)";
                EXPECT_EQ(letter, "abc"[expert]);
                EXPECT_EQ(v.source_info[i * 3], i % 2);
                number = -number;
                std::memcpy(static_cast<char*>(v.answers[0]) + i * v.stride, &number, 4);
                static_cast<char*>(v.answers[1])[i * v.stride] = static_cast<char>(letter - 'a' + 'A');
            }
            EXPECT_EQ(v.recv_offsets[r == 0 ? 2 : 1], v.rows);
            EXPECT_EQ(v.send_offsets[3], 3);
            EXPECT_EQ(v.permutation[2], 2);
            int32_t home[3] = {};
            char caps[4] = {};
            sy_send_back_args back{};
            back.struct_size = sizeof back;
            back.payloads[0] = home;
            back.payloads[1] = caps;
            ASSERT_DONE(sy_exchange_send_back(group[r], &received, &back));
            EXPECT_EQ(received, nullptr);
            for (int i = 0; i < 3; ++i) EXPECT_EQ(home[i], -numbers[i]);
            EXPECT_STREQ(caps, "ABC");
        });
        for (sy_exchange*& e : group) ASSERT_DONE(sy_exchange_free(&e));
    }
}

TEST(CExchange, BadCallsAreErrorsOnAllRanks) {
    sy_exchange_options o = two_payloads();
    o.payloads = 9;
    sy_exchange* group[2];
    EXPECT_EQ(sy_exchange_open_local(&o, 2, group), SY_BAD_INPUT);
    o = two_payloads();
    o.strategy = 7;
    EXPECT_EQ(sy_exchange_open_local(&o, 2, group), SY_BAD_INPUT);
    o = two_payloads();
    ASSERT_DONE(sy_exchange_open_local(&o, 2, group));
    switchyard::test::on_ranks(2, [&](int r) {
        sy_send_args args{};
        args.struct_size = sizeof args;
        sy_received* received = nullptr;
        EXPECT_EQ(sy_exchange_send(group[r], r == 0 ? &args : nullptr, &received), SY_BAD_INPUT) << "rank 1 passed null";
        EXPECT_EQ(received, nullptr);
        sy_alltoallv_args v{};
        v.struct_size = sizeof v;
        EXPECT_EQ(sy_exchange_alltoallv(group[r], &v, &received), SY_BAD_INPUT) << "3 experts on 2 ranks";
        ASSERT_DONE(sy_exchange_send(group[r], &args, &received));  // nothing to send, and it lives on
        if (r == 1) {
            ASSERT_DONE(sy_received_free(&received));
            return;
        }
        sy_send_back_args back{};
        back.struct_size = sizeof back;
        EXPECT_EQ(sy_exchange_send_back(group[r], &received, &back), SY_PEER_LEFT);
        EXPECT_EQ(received, nullptr);
    });
    for (sy_exchange*& e : group) ASSERT_DONE(sy_exchange_free(&e));
}

TEST(CExchange, RowsStayWithTheirExchangeWhateverElseIsWrong) {
    const sy_exchange_options o = two_payloads();
    sy_exchange *a = nullptr, *b = nullptr;
    ASSERT_DONE(sy_exchange_open_local(&o, 1, &a));
    ASSERT_DONE(sy_exchange_open_local(&o, 1, &b));
    sy_send_args args{};
    args.struct_size = sizeof args;
    sy_received* received = nullptr;
    ASSERT_DONE(sy_exchange_send(b, &args, &received));
    sy_send_back_args back{};
    back.struct_size = sizeof back;
    EXPECT_REFUSED(SY_STALE, "another exchange", sy_exchange_send_back(a, &received, &back));
    EXPECT_REFUSED(SY_STALE, "another exchange", sy_exchange_send_back(a, &received, nullptr));
    ASSERT_NE(received, nullptr);
    EXPECT_DONE(sy_exchange_send_back(b, &received, &back));
    EXPECT_EQ(received, nullptr);
    ASSERT_DONE(sy_exchange_free(&a));
    ASSERT_DONE(sy_exchange_free(&b));
}

}  // namespace
