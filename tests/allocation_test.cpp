// What a session takes from the system. After opening, dispatch and combine allocate nothing: every allocation of this process
// is counted while rounds run. And a thread that the system refuses is an error, whichever it is.
//
// malloc and its kin are replaced for this program, which covers operator new as well, and so is pthread_create. A sanitizer
// brings its own, so there the tests are skipped.
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>

#include <barrier>
#include <cerrno>
#include <filesystem>
#include <new>

#include "switchyard/expert_memory.hpp"
#include "switchyard/pipeline.hpp"
#include "testing.hpp"

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define SY_COUNT_ALLOCATIONS 1
#else
#define SY_COUNT_ALLOCATIONS 0
#endif

namespace {

std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};
std::atomic<int64_t> threads_until_refusal{-1};  // -1: none is refused

#if SY_COUNT_ALLOCATIONS
void count() {
    if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}
#endif

}  // namespace

#if SY_COUNT_ALLOCATIONS
extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

void* malloc(size_t bytes) {
    count();
    return __libc_malloc(bytes);
}
void* calloc(size_t n, size_t bytes) {
    count();
    return __libc_calloc(n, bytes);
}
void* realloc(void* p, size_t bytes) {
    count();
    return __libc_realloc(p, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
    count();
    return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
    count();
    return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** p, size_t alignment, size_t bytes) {
    count();
    *p = __libc_memalign(alignment, bytes);
    return *p ? 0 : ENOMEM;
}
void free(void* p) {
    __libc_free(p);
}
__attribute__((visibility("default"))) int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                                                          void* (*start)(void*), void* argument) {
    static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
    if (threads_until_refusal.load() >= 0 && threads_until_refusal.fetch_sub(1) == 0) return EAGAIN;
    return real(thread, attributes, start, argument);
}

}  // extern "C"
#endif

namespace switchyard::test {
namespace {

/// Allocations of the whole process while f runs.
template <class F>
int64_t allocations_during(F f) {
    allocations = 0;
    counting = true;
    f();
    counting = false;
    return allocations;
}

class Allocation : public testing::Test {
 protected:
    void SetUp() override {
        if (!SY_COUNT_ALLOCATIONS) GTEST_SKIP() << "a sanitizer or another C library owns malloc";
    }
};

void* volatile sink;  // keeps the compiler from leaving an allocation out

TEST_F(Allocation, EveryKindIsCounted) {
    const auto once = [](auto make, auto end) {
        return allocations_during([&] {
            void* p = make();
            sink = p;
            end(p);
        });
    };
    const auto release = [](void* p) { free(p); };
    EXPECT_EQ(once([] { return malloc(10); }, release), 1);
    EXPECT_EQ(once([] { return calloc(2, 10); }, release), 1);
    EXPECT_EQ(once([] { return realloc(nullptr, 10); }, release), 1);
    EXPECT_EQ(once([] { return aligned_alloc(64, 128); }, release), 1);
    EXPECT_EQ(once([] { return memalign(64, 128); }, release), 1);
    EXPECT_EQ(once(
                  [] {
                      void* p = nullptr;
                      return posix_memalign(&p, 64, 128) == 0 ? p : nullptr;
                  },
                  release),
              1);
    EXPECT_EQ(once([] { return static_cast<void*>(new int(1)); }, [](void* p) { delete static_cast<int*>(p); }), 1);
    struct alignas(128) Wide {
        char bytes[128];
    };
    EXPECT_EQ(once([] { return static_cast<void*>(new Wide); }, [](void* p) { delete static_cast<Wide*>(p); }), 1);
    EXPECT_EQ(allocations_during([] { sink = nullptr; }), 0);
}

TEST_F(Allocation, OfAnyThreadIsCounted) {
    std::barrier<> step(2);
    std::thread other([&] {
        step.arrive_and_wait();
        sink = malloc(10);
        free(sink);
        step.arrive_and_wait();
    });
    EXPECT_EQ(allocations_during([&] {
                  step.arrive_and_wait();
                  step.arrive_and_wait();
              }),
              1);
    other.join();
}

/// Allocations of `rounds` rounds on all ranks, after some to warm up. `spoil` allocates once, on one rank, to prove the count.
int64_t allocations_of_rounds(std::vector<Session>& sessions, const Problem& p, int rounds, bool spoil = false) {
    const auto ranks = static_cast<int64_t>(sessions.size());
    const auto depth = static_cast<size_t>(sessions[0].options().depth);
    std::barrier<> step(ranks + 1);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank)
        threads.emplace_back([&, rank]() noexcept {  // an error ends the process: the others wait at the barrier
            Session& session = sessions[static_cast<size_t>(rank)];
            Output out = output_of(p, rank);
            std::vector<std::byte> y;
            std::vector<ExpertBatch> open(depth);
            std::vector<float> tile(static_cast<size_t>(p.options.hidden));
            const auto play = [&](int n) {
                for (int i = 0; i < n; ++i) {
                    for (ExpertBatch& batch : open) batch = session.dispatch(dispatch_args(p, rank));
                    for (ExpertBatch& batch : open) {
                        if (batch.rows() > 0) static_cast<void>(batch.row(0));
                        for (int64_t e = 0; e < session.experts_local(); ++e) {
                            const size_t at = static_cast<size_t>(e);
                            if (batch.expert_offsets()[at + 1] > batch.expert_offsets()[at])
                                batch.gather_f32(e, 0, 1, tile.data());
                        }
                        static_cast<void>(batch.expand_x());
                        CombineArgs args = combine_args(p, rank, out.data());
                        if (i % 2 == 0)
                            args.y = y.data();
                        else if (!y.empty())
                            std::memcpy(batch.y(), y.data(), y.size());
                        session.combine(batch, args);
                    }
                    if (i % 3 == 0) session.dispatch(dispatch_args(p, rank));  // and dropped
                    if (i % 3 == 1) {
                        const RankData& d = p.ranks[static_cast<size_t>(rank)];
                        pipeline(session,
                                 {.x = d.x.data(),
                                  .tokens = d.tokens,
                                  .row_stride = d.stride,
                                  .topk_ids = d.ids.data(),
                                  .topk_weights = d.weights.data(),
                                  .out = out.data(),
                                  .chunks = 3},
                                 [&](ExpertBatch&, int64_t) { session.progress(); });
                    }
                }
            };
            y.resize(static_cast<size_t>(p.received[static_cast<size_t>(rank)].rows * p.options.hidden) *
                     token_bytes(p.options.dtype));
            play(5);
            step.arrive_and_wait();  // all are warm
            step.arrive_and_wait();  // the count is on
            play(rounds);
            if (spoil && rank == ranks - 1) {
                sink = malloc(1);
                free(sink);
            }
            step.arrive_and_wait();  // all are done
            step.arrive_and_wait();  // the count is off
        });
    step.arrive_and_wait();
    const int64_t n = allocations_during([&] {
        step.arrive_and_wait();
        step.arrive_and_wait();
    });
    step.arrive_and_wait();
    for (std::thread& t : threads) t.join();
    return n;
}

TEST_F(Allocation, SteadyStateHasNone) {
    Random random(31);
    struct Formats {
        Format out, home;
    };
    for (const int ranks : {2, 4})
        for (const Landing landing : every_landing)
            for (const CombinePath path : {CombinePath::read, CombinePath::push})
                for (const Formats f :
                     {Formats{Format::none, Format::none}, Formats{Format::int8_token, Format::int8_block8},
                      Formats{Format::mxfp8_e5m2, Format::int8_block128}, Formats{Format::mxfp8_e4m3, Format::none},
                      Formats{Format::fp8_e4m3_block128, Format::int8_block8}}) {
                    Options o;
                    o.hidden = 130;
                    o.topk = 3;
                    o.experts = 7;
                    o.tokens_max = 12;
                    o.landing = landing;
                    o.combine_path = path;
                    o.dispatch_quant = f.out;
                    o.combine_quant = f.home;
                    o.deliver_weights = true;
                    o.expert_alignment = 16;
                    o.workers = random.pick<int64_t>({1, 2});
                    o.progress = random.pick({ProgressBy::caller, ProgressBy::worker});
                    o.depth = 1 + random.below(3);
                    SCOPED_TRACE(std::to_string(ranks) + " ranks: " + text_of(o));
                    std::vector<int64_t> tokens(static_cast<size_t>(ranks), 12);
                    tokens.back() = 0;
                    const Problem p = make_problem(random, o, tokens, Routing::sparse);
                    std::vector<Session> sessions = Session::open_local(o, ranks);
                    EXPECT_EQ(allocations_of_rounds(sessions, p, 20), 0);
                }
}

TEST_F(Allocation, ReplicasHaveNoneEither) {
    Random random(41);
    for (const Landing landing : {Landing::packed, Landing::padded, Landing::in_place})
        for (const ReplicaChoice choice : {ReplicaChoice::round_robin, ReplicaChoice::nearest, ReplicaChoice::least_loaded}) {
            Options o;
            o.hidden = 130;
            o.topk = 3;
            o.experts = 7;
            o.tokens_max = 12;
            o.landing = landing;
            SCOPED_TRACE(text_of(o));
            Problem p = make_problem(random, o, {12, 12, 0, 12}, Routing::skewed);
            const std::vector<uint64_t> loads = {9, 1, 1, 1, 30, 1, 2};
            p.table = plan_placement(loads, {.ranks = 4, .slots = 10, .choice = choice});
            solve(p);
            std::vector<Session> sessions = Session::open_local(o, *p.table);
            EXPECT_EQ(allocations_of_rounds(sessions, p, 20), 0);
        }
}

TEST_F(Allocation, ExpertMemoryHasNoneEither) {
    const std::string path = testing::TempDir() + "experts-" + std::to_string(getpid());
    ExpertMemory::create(path, 6, 9000, [](int64_t, std::byte*) {});
    ExpertMemory memory = ExpertMemory::open(path, {.memory_bytes = 3 * 12288, .chunk_bytes = 4096});
    std::filesystem::remove(path);
    const std::vector<int64_t> counts[] = {{1, 1, 1, 1, 1, 1}, {0, 3, 0, 2, 0, 0}, {2, 0, 1, 0, 0, 5}};
    EXPECT_EQ(allocations_during([&] {
                  for (int round = 0; round < 100; ++round) {
                      const std::vector<int64_t>& now = counts[round % 3];
                      memory.prefetch(now);
                      for (const int64_t e : memory.order(now)) {
                          ExpertMemory::Lease lease = memory.acquire(e);
                          const ExpertMemory::Lease moved = std::move(lease);
                      }
                      static_cast<void>(memory.stats());
                  }
              }),
              0);
    EXPECT_EQ(memory.stats().hits + memory.stats().misses, 34U * 6 + 33 * 2 + 33 * 3);
}

TEST_F(Allocation, OneInTheRoundsWouldBeSeen) {
    Random random(37);
    Options o;
    o.hidden = 16;
    o.topk = 2;
    o.experts = 4;
    o.tokens_max = 4;
    const Problem p = make_problem(random, o, {4, 4});
    std::vector<Session> sessions = Session::open_local(o, 2);
    EXPECT_EQ(allocations_of_rounds(sessions, p, 10, true), 1);
}

// Each thread that opening starts is refused once: of open_local, of every rank's workers, and the progress worker.
TEST(Threads, EachThatIsRefusedIsAnErrorOfOpening) {
    if (!SY_COUNT_ALLOCATIONS) GTEST_SKIP() << "a sanitizer or another C library owns pthread_create";
    Options o{.hidden = 8, .topk = 1, .experts = 2, .tokens_max = 1};
    o.workers = 3;
    o.progress = ProgressBy::worker;
    int64_t refused = 0;
    for (bool opened = false; !opened; ++refused) {
        ASSERT_LE(refused, 8) << "two ranks have four helpers, two progress workers and two threads of open_local";
        threads_until_refusal = refused;
        std::vector<Session> sessions;
        const Outcome end = outcome_of([&] { sessions = Session::open_local(o, 2); });
        opened = threads_until_refusal.exchange(-1) >= 0;  // it has not come to that many
        if (!opened) {
            EXPECT_TRUE(is_error(end, Code::system, {"cannot be started"})) << "thread " << refused;
        } else {
            EXPECT_EQ(end.code, Code::ok) << end.text;
            EXPECT_EQ(refused, 8);
        }
    }
}

}  // namespace
}  // namespace switchyard::test
