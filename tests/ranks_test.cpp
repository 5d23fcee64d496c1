// Facts about ranks that are processes: results, deaths, stops, and what is left behind (nothing).
//
// Every test forks its ranks before it has a thread of its own. A rank tells the test lines over a pipe and waits for words
// from it; a rank that throws, or that a watchdog ends, fails the test. What right results are is known before the fork.
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>

#include "switchyard/weights.hpp"
#include "testing.hpp"

namespace switchyard::test {
namespace {

constexpr int64_t never_ms = 30000 * slowness;       // the usual deadline; nothing here may wait for it
constexpr unsigned rank_watchdog_s = 15 * slowness;  // half of it
constexpr int64_t short_ms = slowness > 1 ? 500 : 150;

std::string test_name() {
    const testing::TestInfo* info = testing::UnitTest::GetInstance()->current_test_info();
    return std::string(info->test_suite_name()) + "." + info->name();
}

// --------------------------------------------------------------------------------------------------------------- processes

/// What a rank can do beside its session.
class Part {
 public:
    Part(int rank, int say_fd, int hear_fd) : rank_(rank), say_fd_(say_fd), hear_fd_(hear_fd) {}
    int rank() const { return rank_; }

    /// Tells the test a line.
    void say(std::string line) const {
        std::replace(line.begin(), line.end(), '\n', ' ');
        line += '\n';
        for (size_t at = 0; at < line.size();) {
            const ssize_t n = write(say_fd_, line.data() + at, line.size() - at);
            if (n <= 0) _exit(3);
            at += static_cast<size_t>(n);
        }
    }
    /// Waits until the test says go.
    void wait() const {
        char c;
        if (read(hear_fd_, &c, 1) != 1) _exit(3);
    }
    /// Ends the rank with a failure unless `text` is empty.
    void expect_nothing(const std::string& text) const {
        if (!text.empty()) throw std::runtime_error(text);
    }
    void expect(bool fact, const std::string& text) const {
        if (!fact) throw std::runtime_error(text);
    }
    /// The call must end with that code and name that rank.
    template <class F>
    void expect_error(Code code, int named, F&& f) const {
        const Outcome end = outcome_of(std::forward<F>(f));
        expect(end.code == code, std::string("expected ") + code_name(code) + ", got " + code_name(end.code) + ": " + end.text);
        expect(names_rank(end.text, named), "rank " + std::to_string(named) + " is not named in: " + end.text);
    }
    void stop_here() const { raise(SIGSTOP); }
    void die_here() const { kill(getpid(), SIGKILL); }

 private:
    int rank_, say_fd_, hear_fd_;
};

/// Ranks as processes, from their fork to their end.
class Processes {
 public:
    template <class Play>
    Processes(int ranks, Play play) {
        const std::string name = test_name();
        for (int r = 0; r < ranks; ++r) {
            int say[2], hear[2];
            if (pipe(say) != 0 || pipe(hear) != 0) throw std::runtime_error("pipe");
            const pid_t parent = getpid();
            const pid_t pid = fork();
            if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                if (getppid() != parent) _exit(4);
                for (const Process& p : all_) close(p.hears), close(p.says);
                close(say[0]), close(hear[1]);
                Watchdog::watch(name + ", rank " + std::to_string(r), rank_watchdog_s);
                const Part part(r, say[1], hear[0]);
                try {
                    play(part);
                } catch (const std::exception& error) {
                    part.say(std::string("FAILED: ") + error.what());
                    _exit(1);
                }
                _exit(0);
            }
            close(say[1]), close(hear[0]);
            all_.push_back({pid, say[0], hear[1], {}, {}, std::nullopt});
        }
    }
    ~Processes() {
        for (Process& p : all_) {
            if (!p.status) kill(p.pid, SIGKILL), waitpid(p.pid, nullptr, 0);
            close(p.says), close(p.hears);
        }
    }
    Processes(const Processes&) = delete;
    Processes& operator=(const Processes&) = delete;

    void go(int rank) const {
        const char c = 'g';
        EXPECT_EQ(write(at(rank).hears, &c, 1), 1);
    }
    void signal_to(int rank, int signal) const { kill(at(rank).pid, signal); }
    pid_t pid(int rank) const { return at(rank).pid; }

    /// Waits until a rank has said this line, or has ended.
    void await(int rank, const std::string& line) {
        Process& p = at(rank);
        while (std::find(p.lines.begin(), p.lines.end(), line) == p.lines.end())
            if (!hear(p)) {
                ADD_FAILURE() << "rank " << rank << " ended without saying \"" << line << "\": " << text(p);
                return;
            }
    }
    /// Waits until a rank has stopped itself.
    void await_stop(int rank) const {
        int status = 0;
        waitpid(at(rank).pid, &status, WUNTRACED);
        EXPECT_TRUE(WIFSTOPPED(status));
    }
    /// Waits for the end of a rank. `killed`: it is to die of SIGKILL; else it must end well.
    void end_of(int rank, bool killed = false) {
        Process& p = at(rank);
        while (hear(p)) {
        }
        int status = 0;
        waitpid(p.pid, &status, 0);
        p.status = status;
        if (killed)
            EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "rank " << rank << ": " << text(p);
        else
            EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
                << "rank " << rank << " ended with status " << status << ": " << text(p);
    }
    void end_of_all(int killed = -1) {
        for (int r = 0; r < static_cast<int>(all_.size()); ++r) end_of(r, r == killed);
    }
    const std::vector<std::string>& lines(int rank) const { return at(rank).lines; }

 private:
    struct Process {
        pid_t pid;
        int says, hears;
        std::string unfinished;
        std::vector<std::string> lines;
        std::optional<int> status;
    };
    Process& at(int rank) { return all_[static_cast<size_t>(rank)]; }
    const Process& at(int rank) const { return all_[static_cast<size_t>(rank)]; }

    /// Reads what a rank says; false at its end.
    static bool hear(Process& p) {
        char buffer[4096];
        const ssize_t n = read(p.says, buffer, sizeof buffer);
        if (n <= 0) return false;
        p.unfinished.append(buffer, static_cast<size_t>(n));
        for (size_t end; (end = p.unfinished.find('\n')) != std::string::npos; p.unfinished.erase(0, end + 1))
            p.lines.push_back(p.unfinished.substr(0, end));
        return true;
    }
    static std::string text(const Process& p) {
        std::string all;
        for (const std::string& line : p.lines) all += "\n  " + line;
        return all;
    }

    std::vector<Process> all_;
};

/// A group that no other test, here or elsewhere on the host, uses.
Group group_of(int rank, int size, const std::string& label = "") {
    const std::string pid = std::to_string(getppid());
    return {.rank = rank, .size = size, .name = "ranks_test-" + pid + "-" + test_name() + label, .token = "secret-" + pid};
}

Options options_of(int ranks, Landing landing = Landing::automatic, CombinePath path = CombinePath::automatic) {
    Options o;
    o.hidden = 33;
    o.topk = 2;
    o.experts = 2 * ranks + 1;
    o.tokens_max = 5;
    o.landing = landing;
    o.combine_path = path;
    o.timeout_ms = never_ms;
    return o;
}

Problem problem_of(const Options& o, int ranks, uint64_t seed = 1) {
    Random random(seed);
    std::vector<int64_t> tokens;
    for (int r = 0; r < ranks; ++r) tokens.push_back(o.tokens_max - r % 3);
    return make_problem(random, o, tokens);
}

int64_t files_open() {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
}

constexpr std::pair<Landing, CombinePath> every_way[] = {
    {Landing::packed, CombinePath::read},    {Landing::packed, CombinePath::push},    {Landing::padded, CombinePath::read},
    {Landing::padded, CombinePath::push},    {Landing::in_place, CombinePath::read},  {Landing::in_place, CombinePath::push},
    {Landing::allgather, CombinePath::read}, {Landing::two_level, CombinePath::read}, {Landing::alltoallv, CombinePath::push}};

// ----------------------------------------------------------------------------------------------------------------- results

TEST(Ranks, RoundsGiveTheBytesOfTheReferenceInEveryWay) {
    Random random;
    for (const auto& [landing, path] : every_way)
        for (const int ranks : {1, 2, 3, 6}) {
            Options o = options_of(ranks, landing, path);
            o.dispatch_quant = random.pick({Format::none, Format::int8_token, Format::mxfp8_e5m2, Format::fp8_e4m3_block128});
            o.combine_quant = random.pick({Format::none, Format::int8_block8, Format::int8_block128});
            o.expert_alignment = random.pick<int64_t>({1, 16});
            o.deliver_weights = random.one_in(2);
            o.depth = 1 + random.below(3);
            o.workers = 1 + random.below(2);
            SCOPED_TRACE(std::to_string(ranks) + " ranks: " + text_of(o));
            std::vector<Problem> problems;
            for (int i = 0; i < 3; ++i) {
                std::vector<int64_t> tokens;
                for (int r = 0; r < ranks; ++r) tokens.push_back(random.below(o.tokens_max + 1));
                problems.push_back(
                    make_problem(random, o, tokens, random.pick({Routing::uniform, Routing::sparse, Routing::skewed})));
            }
            const std::string label = std::to_string(random());
            Processes all(ranks, [&](const Part& part) {
                Session session = Session::open(o, group_of(part.rank(), ranks, label));
                part.expect(session.rank() == part.rank() && session.size() == ranks, "rank and size");
                std::deque<std::pair<const Problem*, ExpertBatch>> open;
                const auto finish_oldest = [&] {
                    auto [p, batch] = std::move(open.front());
                    open.pop_front();
                    part.expect_nothing(difference_of_batch(batch, *p, part.rank()));
                    fill_y(batch, *p, part.rank(), batch.y());
                    Output out = output_of(*p, part.rank());
                    session.combine(batch, combine_args(*p, part.rank(), out.data()));
                    part.expect_nothing(out.difference_from("x", p->combined[static_cast<size_t>(part.rank())]));
                };
                for (size_t i = 0; i < static_cast<size_t>(scaled(30)); ++i) {
                    if (static_cast<int64_t>(open.size()) == o.depth) finish_oldest();
                    open.emplace_back(&problems[i % 3], session.dispatch(dispatch_args(problems[i % 3], part.rank())));
                }
                while (!open.empty()) finish_oldest();
            });
            all.end_of_all();
            if (HasFailure()) return;
        }
}

TEST(Ranks, FastRankMayEndWhileTheOthersFinishTheSameRound) {
    for (int64_t again = 0; again < scaled(15); ++again) {
        const Options o = options_of(4);
        const Problem p = problem_of(o, 4);
        Processes all(4, [&](const Part& part) {
            Session session = Session::open(o, group_of(part.rank(), 4, std::to_string(again)));
            part.expect_nothing(difference_of_round(session, p));
        });
        all.end_of_all();
        if (HasFailure()) return;
    }
}

TEST(Ranks, SessionsOfOneGroupAndOfSeveralLiveSideBySide) {
    const Options o = options_of(3);
    const Problem p = problem_of(o, 3);
    Options wide = options_of(2);
    wide.hidden = 257;
    wide.dispatch_quant = Format::mxfp8_e4m3;
    const Problem of_two = problem_of(wide, 2);
    Processes all(3, [&](const Part& part) {
        const int r = part.rank();
        Session first = Session::open(o, group_of(r, 3));
        Session second = Session::open(o, group_of(r, 3));  // the same name again
        std::optional<Session> two;
        if (r < 2) two = Session::open(wide, group_of(r, 2, "-two"));
        for (int i = 0; i < 5; ++i) {
            part.expect_nothing(difference_of_round(first, p));
            if (two) part.expect_nothing(difference_of_round(*two, of_two));
            part.expect_nothing(difference_of_round(second, p));
        }
        first.close();
        Session third = Session::open(o, group_of(r, 3));
        part.expect_nothing(difference_of_round(third, p));
        part.expect_nothing(difference_of_round(second, p));
    });
    all.end_of_all();
}

// ------------------------------------------------------------------------------------------------------------------ deaths

enum class Moment { before_dispatch, while_others_wait, before_combine, while_others_wait_in_combine };

class Death : public testing::TestWithParam<Moment> {};

TEST_P(Death, SurvivorsReportTheRankThatDied) {
    const Moment moment = GetParam();
    for (const Landing landing : every_landing)
        for (const int victim : {0, 1, 3}) {
            constexpr int ranks = 4;
            const Options o = options_of(ranks, landing);
            const Problem p = problem_of(o, ranks);
            SCOPED_TRACE("victim " + std::to_string(victim) + ", " + text_of(o));
            const std::string label = std::to_string(victim) + "-" + std::to_string(static_cast<int>(landing));
            Processes all(ranks, [&](const Part& part) {
                Session session = Session::open(o, group_of(part.rank(), ranks, label));
                for (int i = 0; i < 3; ++i) part.expect_nothing(difference_of_round(session, p));
                const DispatchArgs args = dispatch_args(p, part.rank());
                if (part.rank() == victim) {
                    if (moment == Moment::before_dispatch) part.die_here();
                    if (moment == Moment::while_others_wait) sleep_ms(100), part.die_here();
                    ExpertBatch batch = session.dispatch(args);
                    part.wait();  // until the others have their batches
                    if (moment == Moment::while_others_wait_in_combine) sleep_ms(100);
                    part.die_here();
                }
                if (moment == Moment::before_combine || moment == Moment::while_others_wait_in_combine) {
                    ExpertBatch batch = session.dispatch(args);
                    part.expect_nothing(difference_of_batch(batch, p, part.rank()));
                    part.say("dispatched");
                    Output out = output_of(p, part.rank());
                    part.expect_error(Code::peer_lost, victim,
                                      [&] { session.combine(batch, combine_args(p, part.rank(), out.data())); });
                } else {
                    part.expect_error(Code::peer_lost, victim, [&] { session.dispatch(args); });
                }
                for (int i = 0; i < 3; ++i) part.expect_error(Code::peer_lost, victim, [&] { session.dispatch(args); });
            });
            if (moment == Moment::before_combine || moment == Moment::while_others_wait_in_combine) {
                for (int r = 0; r < ranks; ++r)
                    if (r != victim) all.await(r, "dispatched");
                all.go(victim);
            }
            all.end_of_all(victim);
            if (HasFailure()) return;
        }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Death,
                         testing::Values(Moment::before_dispatch, Moment::while_others_wait, Moment::before_combine,
                                         Moment::while_others_wait_in_combine),
                         [](const auto& named) {
                             switch (named.param) {
                                 case Moment::before_dispatch: return "BeforeDispatch";
                                 case Moment::while_others_wait: return "WhileOthersWait";
                                 case Moment::before_combine: return "BeforeCombine";
                                 case Moment::while_others_wait_in_combine: break;
                             }
                             return "WhileOthersWaitInCombine";
                         });

TEST(Ranks, DeathIsNoticedAlsoByARankThatWaitsForAnother) {
    // Rank 0 dies with its counts sent. Rank 1 waits for rank 2, which is stopped: it must hear of the death, not of the
    // deadline.
    const Options o = options_of(3, Landing::packed);
    const Problem p = problem_of(o, 3);
    Processes all(3, [&](const Part& part) {
        Session session = Session::open(o, group_of(part.rank(), 3));
        part.expect_nothing(difference_of_round(session, p));
        const DispatchArgs args = dispatch_args(p, part.rank());
        part.say("ready");
        if (part.rank() == 2) part.stop_here();
        part.wait();
        if (part.rank() == 1)
            part.expect_error(Code::peer_lost, 0, [&] { session.dispatch(args); });
        else
            session.dispatch(args);  // in which rank 0 is killed
    });
    for (const int r : {0, 1, 2}) all.await(r, "ready");
    all.await_stop(2);
    all.go(0);
    sleep_ms(100);  // its counts are out
    all.go(1);
    sleep_ms(50);
    all.signal_to(0, SIGKILL);
    all.end_of(0, true);
    all.end_of(1);
    all.signal_to(2, SIGKILL);
    all.end_of(2, true);
}

TEST(Ranks, HandlesReportTheRankThatDied) {
    for (const ProgressBy progress : {ProgressBy::caller, ProgressBy::worker})
        for (const bool in_combine : {false, true}) {
            Options o = options_of(3);
            o.progress = progress;
            const Problem p = problem_of(o, 3);
            Processes all(3, [&](const Part& part) {
                Session session = Session::open(o, group_of(part.rank(), 3, std::to_string(in_combine) + text_of(o)));
                part.expect_nothing(difference_of_round(session, p));
                PendingDispatch going;
                ExpertBatch batch;
                Output out = output_of(p, part.rank());
                if (in_combine) {
                    batch = session.dispatch(dispatch_args(p, part.rank()));
                    fill_y(batch, p, part.rank(), batch.y());
                }
                part.say("ready");
                if (part.rank() == 1) part.wait();  // and is killed there
                if (in_combine) {
                    PendingCombine coming = session.combine_async(batch, combine_args(p, part.rank(), out.data()));
                    part.expect_error(Code::peer_lost, 1, [&] {
                        while (!coming.poll()) sleep_ms(1);
                    });
                } else {
                    going = session.dispatch_async(dispatch_args(p, part.rank()));
                    part.expect_error(Code::peer_lost, 1, [&] { going.wait(); });
                }
                session.shrink();
                part.expect_nothing(difference_of_round(session, without(p, {1})));
            });
            for (int r = 0; r < 3; ++r) all.await(r, "ready");
            all.signal_to(1, SIGKILL);
            all.end_of_all(1);
        }
}

TEST(Ranks, RankThatExitsWithoutClosingIsReported) {
    const Options o = options_of(3);
    const Problem p = problem_of(o, 3);
    Processes all(3, [&](const Part& part) {
        auto* session = new Session(Session::open(o, group_of(part.rank(), 3)));
        part.expect_nothing(difference_of_round(*session, p));
        if (part.rank() == 1) _exit(0);
        part.expect_error(Code::peer_lost, 1, [&] { session->dispatch(dispatch_args(p, part.rank())); });
        delete session;
    });
    all.end_of_all();
}

TEST(Ranks, RankThatClosesIsReported) {
    const Options o = options_of(3);
    const Problem p = problem_of(o, 3);
    Processes all(3, [&](const Part& part) {
        Session session = Session::open(o, group_of(part.rank(), 3));
        part.expect_nothing(difference_of_round(session, p));
        if (part.rank() == 1) {
            session.close();
            part.say("closed");
            part.wait();
            return;
        }
        part.expect_error(Code::peer_closed, 1, [&] { session.dispatch(dispatch_args(p, part.rank())); });
    });
    all.await(1, "closed");
    all.end_of(0);
    all.end_of(2);
    all.go(1);
    all.end_of(1);
}

// ------------------------------------------------------------------------------------------------------------------- stops

// A rank that waits gives its CPU back. Half of the bound is what a wait may take before it sleeps, on the slowest machine.
TEST(Ranks, WaitingTakesNextToNoCpu) {
    const Options o = options_of(2);
    const Problem p = problem_of(o, 2);
    Processes all(2, [&](const Part& part) {
        Session session = Session::open(o, group_of(part.rank(), 2));
        part.expect_nothing(difference_of_round(session, p));
        constexpr int64_t wait_ms = 1500;
        if (part.rank() == 1) sleep_ms(wait_ms);
        rusage before{}, after{};
        getrusage(RUSAGE_SELF, &before);
        part.expect_nothing(difference_of_round(session, p));
        getrusage(RUSAGE_SELF, &after);
        const auto ms = [](const rusage& u) {
            return (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000 + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1000;
        };
        const int64_t used = ms(after) - ms(before);
        if (part.rank() == 0) part.say("used " + std::to_string(used) + " ms of CPU");
        part.expect(used < wait_ms / 10 * slowness,
                    "a wait of " + std::to_string(wait_ms) + " ms took " + std::to_string(used) + " ms of CPU");
    });
    all.end_of_all();
    for (const std::string& line : all.lines(0)) std::printf("%s\n", line.c_str());
}

// ------------------------------------------------------------------------------------------------------------------ shrink

class Shrink : public testing::TestWithParam<Moment> {};

TEST_P(Shrink, SurvivorsGoOnWithoutTheDeadAgainAndAgain) {
    const Moment moment = GetParam();
    for (const auto& [landing, path] : every_way)
        for (const int victim : {0, 2}) {
            constexpr int ranks = 4, second = 3;
            const Options o = options_of(ranks, landing, path);
            const Problem p = problem_of(o, ranks), q = without(p, {victim}), last = without(p, {victim, second});
            SCOPED_TRACE("victim " + std::to_string(victim) + ", " + text_of(o));
            const std::string label = std::to_string(victim) + "-" + std::to_string(static_cast<int>(landing)) +
                                      std::to_string(static_cast<int>(path));
            Processes all(ranks, [&](const Part& part) {
                Session session = Session::open(o, group_of(part.rank(), ranks, label));
                for (int i = 0; i < 2; ++i) part.expect_nothing(difference_of_round(session, p));
                if (part.rank() == victim && moment == Moment::before_dispatch) part.die_here();
                const Outcome end = outcome_of([&] {
                    ExpertBatch batch = session.dispatch(dispatch_args(p, part.rank()));
                    if (part.rank() == victim) {
                        part.wait();
                        part.die_here();
                    }
                    part.say("dispatched");
                    Output out = output_of(p, part.rank());
                    session.combine(batch, combine_args(p, part.rank(), out.data()));
                });
                part.expect(end.code == Code::peer_lost && names_rank(end.text, victim), end.text);
                part.expect(session.shrink() == others(ranks, {victim}), "wrong members");
                for (int i = 0; i < 5; ++i) part.expect_nothing(difference_of_round(session, q));

                // An expert of the dead rank is bad input on all ranks, and the session goes on.
                Problem bad = q;
                if (part.rank() == 1) bad.ranks[1].ids[0] = static_cast<int32_t>(experts_of(victim, ranks, o.experts).first);
                part.expect_error(Code::bad_input, victim, [&] { session.dispatch(dispatch_args(bad, part.rank())); });
                part.expect_nothing(difference_of_round(session, q));

                if (part.rank() == second) part.die_here();
                part.expect_error(Code::peer_lost, second, [&] { session.dispatch(dispatch_args(q, part.rank())); });
                part.expect(session.shrink() == others(ranks, {victim, second}), "wrong members");
                for (int i = 0; i < 5; ++i) part.expect_nothing(difference_of_round(session, last));
            });
            if (moment == Moment::before_combine) {
                for (const int r : others(ranks, {victim})) all.await(r, "dispatched");
                all.go(victim);
            }
            for (int r = 0; r < ranks; ++r) all.end_of(r, r == victim || r == second);
            if (HasFailure()) return;
        }
}
INSTANTIATE_TEST_SUITE_P(Ranks, Shrink, testing::Values(Moment::before_dispatch, Moment::before_combine),
                         [](const auto& named) {
                             return named.param == Moment::before_dispatch ? "BeforeDispatch" : "BeforeCombine";
                         });

TEST(Shrink, StoppedRankIsNamedAndKilledOnlyWhenAskedFor) {
    constexpr int ranks = 3, stopped = 1;
    const Options o = options_of(ranks);
    const Problem p = problem_of(o, ranks), q = without(p, {stopped});
    Processes all(ranks, [&](const Part& part) {
        Session session = Session::open(o, group_of(part.rank(), ranks));
        part.expect_nothing(difference_of_round(session, p));
        if (part.rank() == stopped) part.stop_here();
        DispatchArgs args = dispatch_args(p, part.rank());
        args.timeout_ms = short_ms;
        part.expect(outcome_of([&] { session.dispatch(args); }).code != Code::ok, "dispatched without a rank");
        part.expect_error(Code::timed_out, stopped, [&] { session.shrink({.timeout_ms = short_ms}); });
        const Outcome end = outcome_of([&] { session.dispatch(args); });
        part.expect(end.code == Code::stale && end.text.find("shrink") != std::string::npos, end.text);
        part.expect(session.shrink({.timeout_ms = short_ms, .kill_missing = true}) == others(ranks, {stopped}), "members");
        for (int i = 0; i < 5; ++i) part.expect_nothing(difference_of_round(session, q));
    });
    all.await_stop(stopped);
    all.end_of_all(stopped);
}

TEST(Shrink, BringsRanksTogetherThatHaveLostCountWithNobodyDead) {
    constexpr int ranks = 3, absent = 2;
    const Options o = options_of(ranks);
    const Problem p = problem_of(o, ranks);
    Processes all(ranks, [&](const Part& part) {
        Session session = Session::open(o, group_of(part.rank(), ranks));
        part.expect_nothing(difference_of_round(session, p));
        ExpertBatch batch;
        if (part.rank() != absent) {
            DispatchArgs args = dispatch_args(p, part.rank());
            args.timeout_ms = short_ms;
            for (int i = 0; i < 3; ++i)
                part.expect(outcome_of([&] { session.dispatch(args); }).code != Code::ok, "dispatched without a rank");
        }
        part.expect(session.shrink() == others(ranks, {}), "somebody is missing");
        for (int i = 0; i < 5; ++i) part.expect_nothing(difference_of_round(session, p));
    });
    all.end_of_all();
}

TEST(Shrink, RankThatWaitsInAnEpochHearsThatAnotherRegroups) {
    constexpr int ranks = 3;
    const Options o = options_of(ranks);
    const Problem p = problem_of(o, ranks);
    Processes all(ranks, [&](const Part& part) {
        Session session = Session::open(o, group_of(part.rank(), ranks));
        ExpertBatch open = session.dispatch(dispatch_args(p, part.rank()));
        if (part.rank() != 0) {
            Output out = output_of(p, part.rank());
            part.expect_error(Code::peer_left, 0, [&] { session.combine(open, combine_args(p, part.rank(), out.data())); });
        }
        part.expect(session.shrink() == others(ranks, {}), "somebody is missing");
        if (part.rank() == 0)
            part.expect(outcome_of([&] { open.rows(); }).code == Code::stale, "a batch outlived its generation");
        for (int i = 0; i < 5; ++i) part.expect_nothing(difference_of_round(session, p));
    });
    all.end_of_all();
}

TEST(Partial, DeadRanksContributeNothingAndAreCounted) {
    for (const auto& [landing, path] : every_way) {
        constexpr int ranks = 4, victim = 1;
        Options o = options_of(ranks, landing, path);
        o.partial = true;
        const Problem p = problem_of(o, ranks), q = without(p, {victim});
        SCOPED_TRACE(text_of(o));
        const std::string label = std::to_string(static_cast<int>(landing)) + std::to_string(static_cast<int>(path));
        Processes all(ranks, [&](const Part& part) {
            Session session = Session::open(o, group_of(part.rank(), ranks, label));
            part.expect_nothing(difference_of_round(session, p));
            const RankData& before = p.ranks[static_cast<size_t>(part.rank())];
            const RankData& after = q.ranks[static_cast<size_t>(part.rank())];
            // Combines with weights of p: those of missing slots must not matter.
            const auto combine_without = [&](ExpertBatch& batch) {
                std::vector<int32_t> missing(static_cast<size_t>(before.tokens), -1);
                Output out = output_of(p, part.rank());
                CombineArgs args = combine_args(p, part.rank(), out.data());
                args.missing = missing.data();
                session.combine(batch, args);
                part.expect_nothing(out.difference_from("x", q.combined[static_cast<size_t>(part.rank())]));
                for (size_t t = 0; t < missing.size(); ++t) {
                    int32_t expected = 0;
                    for (size_t i = 2 * t; i < 2 * t + 2; ++i) expected += before.ids[i] != after.ids[i];
                    part.expect(missing[t] == expected, "token " + std::to_string(t) + " misses " + std::to_string(missing[t]));
                }
            };
            ExpertBatch batch = session.dispatch(dispatch_args(p, part.rank()));
            part.expect_nothing(difference_of_batch(batch, p, part.rank()));
            fill_y(batch, p, part.rank(), batch.y());
            part.say("dispatched");
            part.wait();
            if (part.rank() == victim) part.die_here();
            combine_without(batch);

            part.expect_error(Code::peer_lost, victim, [&] { session.dispatch(dispatch_args(p, part.rank())); });
            part.expect(session.shrink() == others(ranks, {victim}), "wrong members");
            for (int i = 0; i < 3; ++i) {  // ids of dead experts are no error now
                batch = session.dispatch(dispatch_args(p, part.rank()));
                part.expect_nothing(difference_of_batch(batch, q, part.rank()));
                fill_y(batch, q, part.rank(), batch.y());
                combine_without(batch);
            }
        });
        for (int r = 0; r < ranks; ++r) all.await(r, "dispatched");
        for (int r = 0; r < ranks; ++r) all.go(r);
        all.end_of_all(victim);
        if (HasFailure()) return;
    }
}

TEST(Ranks, StoppedRankIsNamedAtTheDeadlineAndGoesOnLater) {
    for (const Landing landing : every_landing) {
        constexpr int ranks = 3, stopped = 2;
        const Options o = options_of(ranks, landing);
        const Problem p = problem_of(o, ranks);
        SCOPED_TRACE(text_of(o));
        const std::string label = std::to_string(static_cast<int>(landing));
        Processes all(ranks, [&](const Part& part) {
            Session session = Session::open(o, group_of(part.rank(), ranks, label));
            part.expect_nothing(difference_of_round(session, p));
            DispatchArgs args = dispatch_args(p, part.rank());
            if (part.rank() == stopped) {
                part.stop_here();
                const Outcome end = outcome_of([&] { session.dispatch(args); });
                part.expect(end.code == Code::peer_left,
                            std::string("after the stop: ") + code_name(end.code) + ": " + end.text);
            } else {
                args.timeout_ms = short_ms;
                const Outcome end = outcome_of([&] { session.dispatch(args); });
                // The second of them may hear that the first gave up; that text names the stopped rank, too.
                part.expect(end.code == Code::timed_out || end.code == Code::peer_left,
                            code_name(end.code) + (": " + end.text));
                part.expect(names_rank(end.text, stopped), end.text);
                part.say("lost");
                part.wait();
            }
            for (int i = 0; i < 3; ++i) part.expect_nothing(difference_of_round(session, p));
        });
        all.await_stop(stopped);
        all.await(0, "lost");
        all.await(1, "lost");
        all.signal_to(stopped, SIGCONT);
        all.go(0);
        all.go(1);
        all.end_of_all();
        if (HasFailure()) return;
    }
}

TEST(Ranks, RankStoppedBeforeCombineIsNamedAndGoesOnLater) {
    constexpr int ranks = 3, stopped = 0;
    const Options o = options_of(ranks);
    const Problem p = problem_of(o, ranks);
    Processes all(ranks, [&](const Part& part) {
        Session session = Session::open(o, group_of(part.rank(), ranks));
        ExpertBatch batch = session.dispatch(dispatch_args(p, part.rank()));
        fill_y(batch, p, part.rank(), batch.y());
        Output out = output_of(p, part.rank());
        CombineArgs args = combine_args(p, part.rank(), out.data());
        if (part.rank() == stopped) {
            part.stop_here();
            // The others' rows lie ready, so this may succeed.
            if (outcome_of([&] { session.combine(batch, args); }).code == Code::ok)
                part.expect_nothing(out.difference_from("x", p.combined[static_cast<size_t>(part.rank())]));
        } else {
            args.timeout_ms = short_ms;
            part.expect_error(Code::timed_out, stopped, [&] { session.combine(batch, args); });
            part.say("lost");
            part.wait();
        }
        // Everybody hears of the lost combine, then all is well.
        const Outcome told = outcome_of([&] { session.dispatch(dispatch_args(p, part.rank())); });
        part.expect(told.code != Code::ok, "nobody told of the lost combine");
        for (int i = 0; i < 3; ++i) part.expect_nothing(difference_of_round(session, p));
    });
    all.await_stop(stopped);
    all.await(1, "lost");
    all.await(2, "lost");
    all.signal_to(stopped, SIGCONT);
    all.go(1);
    all.go(2);
    all.end_of_all();
}

// ------------------------------------------------------------------------------------------------------------------ opening

TEST(RanksOpen, DifferentOptionsGiveEveryRankTheSameError) {
    Processes all(3, [&](const Part& part) {
        Options o = options_of(3);
        if (part.rank() == 2) o.hidden = 64, o.depth = 5;
        const Outcome end = outcome_of([&] { Session::open(o, group_of(part.rank(), 3)); });
        part.say(code_name(end.code) + (" " + end.text));
    });
    all.end_of_all();
    const std::string first = all.lines(0).at(0);
    for (const char* word : {"mismatch", "hidden", "rank 0", "33", "rank 2", "64"})
        EXPECT_NE(first.find(word), std::string::npos) << word << " is missing in: " << first;
    for (int r = 1; r < 3; ++r) EXPECT_EQ(all.lines(r).at(0), first);
}

TEST(RanksOpen, OneRanksInvalidOptionsFailForAllNamingIt) {
    struct Bad {
        const char* name;
        void (*spoil)(Options&);
    };
    const Bad all_bad[] = {{"hidden", [](Options& o) { o.hidden = 0; }},
                           {"workers", [](Options& o) { o.workers = 65; }},
                           {"timeout_ms", [](Options& o) { o.timeout_ms = 0; }}};
    for (const Bad& bad : all_bad)
        for (const int who : {0, 1}) {
            SCOPED_TRACE(std::string(bad.name) + " of rank " + std::to_string(who));
            Processes all(3, [&](const Part& part) {
                Options o = options_of(3);
                if (part.rank() == who)
                    bad.spoil(o);
                else
                    sleep_ms(100);  // the rank that refuses is there first
                const std::string label = bad.name + std::to_string(who);
                const Outcome end = outcome_of([&] { Session::open(o, group_of(part.rank(), 3, label)); });
                part.say(code_name(end.code) + (" " + end.text));
            });
            all.end_of_all();
            for (int r = 0; r < 3; ++r)
                for (const std::string& word : {std::string("bad_input"), std::string(bad.name), "rank " + std::to_string(who)})
                    EXPECT_NE(all.lines(r).at(0).find(word), std::string::npos)
                        << word << " is missing on rank " << r << ": " << all.lines(r).at(0);
        }
}

TEST(RanksOpen, RankThatDoesNotComeIsNamedAtTheDeadline) {
    for (const int missing : {0, 1, 2}) {
        SCOPED_TRACE("missing: " + std::to_string(missing));
        // They begin together, or a rank whose deadline comes long before that of rank 0 would not hear from it who is missing.
        const auto begin = std::chrono::steady_clock::now() + std::chrono::milliseconds(2 * short_ms);
        Processes all(3, [&](const Part& part) {
            if (part.rank() == missing) return;
            std::this_thread::sleep_until(begin);
            Options o = options_of(3);
            o.timeout_ms = 3 * short_ms;
            part.expect_error(Code::timed_out, missing,
                              [&] { Session::open(o, group_of(part.rank(), 3, std::to_string(missing))); });
        });
        all.end_of_all();
    }
}

TEST(RanksOpen, RankThatDiesWhileTheOthersStillComeIsReported) {
    for (const int victim : {0, 1}) {
        Processes all(2, [&](const Part& part) {
            // Three are awaited, so these two are inside open() when one dies.
            part.say("opening");
            if (part.rank() == victim) {
                Session::open(options_of(3), group_of(part.rank(), 3, std::to_string(victim)));
                return;
            }
            part.expect_error(Code::peer_lost, victim,
                              [&] { Session::open(options_of(3), group_of(part.rank(), 3, std::to_string(victim))); });
        });
        all.await(0, "opening");
        all.await(1, "opening");
        sleep_ms(200);
        all.signal_to(victim, SIGKILL);
        all.end_of_all(victim);
    }
}

// A name is a meeting place: what a process has opened before, or tried to, does not keep it from meeting the others there.
TEST(RanksOpen, RanksMeetAgainAfterOneHasFailedAlone) {
    const Options o = options_of(2);
    const Problem p = problem_of(o, 2);
    Processes all(2, [&](const Part& part) {
        if (part.rank() == 0) {
            Options hurried = o;
            hurried.timeout_ms = 50;
            part.expect(outcome_of([&] { Session::open(hurried, group_of(0, 2)); }).code == Code::timed_out, "nobody came");
            part.say("failed");
        } else {
            part.wait();
        }
        Session session = Session::open(o, group_of(part.rank(), 2));
        part.expect_nothing(difference_of_round(session, p));
    });
    all.await(0, "failed");
    all.go(1);
    all.end_of(0);
    all.end_of(1);
}

TEST(RanksOpen, SurvivorsOfADeathMeetUnderTheSameNameWithNewRanks) {
    const Options o = options_of(3);
    const Problem p = problem_of(o, 3), p2 = problem_of(options_of(2), 2);
    Processes all(3, [&](const Part& part) {
        {
            Session session = Session::open(o, group_of(part.rank(), 3));
            part.expect_nothing(difference_of_round(session, p));
            if (part.rank() == 1) part.die_here();
            part.expect_error(Code::peer_lost, 1, [&] { session.dispatch(dispatch_args(p, part.rank())); });
        }
        Session session = Session::open(options_of(2), group_of(part.rank() == 0 ? 0 : 1, 2));
        part.expect_nothing(difference_of_round(session, p2));
    });
    all.end_of(0);
    all.end_of(2);
}

TEST(RanksOpen, ARestartedRankTakesTheNumberOfTheDeadOneAgain) {
    const Options o = options_of(3);
    const Problem p = problem_of(o, 3);
    Processes all(4, [&](const Part& part) {
        const int rank = part.rank() == 3 ? 1 : part.rank();  // process 3 is rank 1, started anew
        if (part.rank() == 3) {
            part.wait();
        } else {
            Session session = Session::open(o, group_of(rank, 3));
            part.expect_nothing(difference_of_round(session, p));
            if (rank == 1) part.die_here();
            part.expect_error(Code::peer_lost, 1, [&] { session.dispatch(dispatch_args(p, rank)); });
            part.say("lost");
        }
        Session session = Session::open(o, group_of(rank, 3));
        for (int i = 0; i < 3; ++i) part.expect_nothing(difference_of_round(session, p));
    });
    all.await(0, "lost");
    all.await(2, "lost");
    all.go(3);
    for (const int process : {0, 2, 3}) all.end_of(process);
}

TEST(RanksOpen, WrongTokenIsRefusedAndDoesNotJoin) {
    Processes all(2, [&](const Part& part) {
        Options o = options_of(2);
        Group group = group_of(part.rank(), 2);
        if (part.rank() == 1) {
            group.token = "guessed";
            const Outcome end = outcome_of([&] { Session::open(o, group); });
            part.expect(end.code == Code::mismatch && end.text.find("token") != std::string::npos,
                        std::string(code_name(end.code)) + ": " + end.text);
            part.expect(end.text.find(group_of(0, 2).token) == std::string::npos, "the text gives the token away");
        } else {
            o.timeout_ms = 10 * short_ms;
            part.expect_error(Code::timed_out, 1, [&] { Session::open(o, group); });
        }
    });
    all.end_of_all();
}

TEST(RanksOpen, StrangerWithAWrongTokenDoesNotKeepTheGroupFromMeeting) {
    const Options o = options_of(2);
    const Problem p = problem_of(o, 2);
    Processes all(3, [&](const Part& part) {
        Group group = group_of(part.rank(), 2);
        if (part.rank() == 2) {  // poses as rank 1
            group.rank = 1;
            group.token = "guessed";
            Options mine = o;
            mine.timeout_ms = 10 * short_ms;
            part.expect(outcome_of([&] { Session::open(mine, group); }).code != Code::ok, "a stranger got in");
            part.say("refused");
            return;
        }
        if (part.rank() == 1) part.wait();
        Session session = Session::open(o, group);
        for (int i = 0; i < 3; ++i) part.expect_nothing(difference_of_round(session, p));
    });
    all.await(2, "refused");
    all.go(1);
    all.end_of_all();
}

TEST(RanksOpen, RanksOutsideTheGroupAreRefused) {
    const std::pair<int, int> bad[] = {{-1, 2}, {2, 2}, {0, 0}, {0, -1}, {5, 3}};
    for (const auto& [rank, size] : bad) {
        Options o = options_of(2);
        o.timeout_ms = short_ms;
        EXPECT_TRUE(
            is_error(outcome_of([&] { Session::open(o, {.rank = rank, .size = size, .name = "ranks_test", .token = ""}); }),
                     Code::bad_input, {std::to_string(rank)}));
    }
}

TEST(RanksOpen, GroupOfOneNeedsNobody) {
    Processes all(1, [&](const Part& part) {
        const Options o = options_of(1);
        Session session = Session::open(o, group_of(0, 1));
        for (int i = 0; i < 5; ++i) part.expect_nothing(difference_of_round(session, problem_of(o, 1)));
    });
    all.end_of_all();
}

// -------------------------------------------------------------------------------------------------------------- environment

/// The variables of torchrun, set for as long as it lives.
class Environment {
 public:
    explicit Environment(std::vector<std::pair<std::string, std::string>> values) : values_(std::move(values)) {
        for (const char* name : names) unsetenv(name);
        for (const auto& [name, value] : values_) setenv(name.c_str(), value.c_str(), 1);
    }
    ~Environment() {
        for (const char* name : names) unsetenv(name);
    }

 private:
    static constexpr const char* names[] = {"RANK",        "WORLD_SIZE",       "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                                            "MASTER_PORT", "SWITCHYARD_TOKEN", "LOCAL_RANK"};
    std::vector<std::pair<std::string, std::string>> values_;
};

using Variables = std::vector<std::pair<std::string, std::string>>;
const Variables sound_variables{{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};

Variables with(std::string name, std::string value) {
    Variables v = sound_variables;
    std::erase_if(v, [&](const auto& each) { return each.first == name; });
    v.emplace_back(std::move(name), std::move(value));
    return v;
}
Variables without(const std::string& name) {
    Variables v = sound_variables;
    std::erase_if(v, [&](const auto& each) { return each.first == name; });
    return v;
}

TEST(GroupFromEnvironment, ReadsWhatTorchrunSets) {
    const Environment e(sound_variables);
    const Group g = Group::from_environment();
    EXPECT_EQ(g.rank, 2);
    EXPECT_EQ(g.size, 4);
    EXPECT_EQ(g.token, "");
    EXPECT_FALSE(g.name.empty());
}

TEST(GroupFromEnvironment, NameTellsJobsAndLabelsApartAndIsEqualOnAllRanks) {
    const auto name = [](const Variables& variables, const std::string& label = "") {
        const Environment e(variables);
        return Group::from_environment(label).name;
    };
    const std::string usual = name(sound_variables);
    EXPECT_EQ(name(with("RANK", "0")), usual);
    EXPECT_NE(name(with("MASTER_PORT", "29501")), usual);
    EXPECT_NE(name(with("MASTER_ADDR", "10.0.0.1")), usual);
    EXPECT_NE(name(sound_variables, "other"), usual);
}

TEST(GroupFromEnvironment, TakesTheToken) {
    const Environment e(with("SWITCHYARD_TOKEN", "yard-7f2a"));
    EXPECT_EQ(Group::from_environment().token, "yard-7f2a");
}

TEST(GroupFromEnvironment, MissingVariablesAreNamed) {
    for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
        const Environment e(without(name));
        EXPECT_TRUE(is_error(outcome_of([] { Group::from_environment(); }), Code::bad_input, {name}));
    }
}

TEST(GroupFromEnvironment, BadNumbersAreNamedWithTheirValue) {
    for (const char* name : {"RANK", "WORLD_SIZE"})
        for (const char* value : {"", "two", "1x", "-1", "1.5", "99999999999999999999", "0x1"}) {
            const Environment e(with(name, value));
            EXPECT_TRUE(is_error(outcome_of([] { Group::from_environment(); }), Code::bad_input, {name, value}));
        }
    const Environment e(with("RANK", "4"));
    EXPECT_TRUE(is_error(outcome_of([] { Group::from_environment(); }), Code::bad_input, {"RANK", "4", "0..3"}));
    const Environment f(with("WORLD_SIZE", "0"));
    EXPECT_TRUE(is_error(outcome_of([] { Group::from_environment(); }), Code::bad_input, {"WORLD_SIZE"}));
}

TEST(GroupFromEnvironment, JobOverSeveralHostsIsRefused) {
    {
        const Environment e(with("LOCAL_WORLD_SIZE", "2"));
        EXPECT_TRUE(is_error(outcome_of([] { Group::from_environment(); }), Code::bad_input, {"LOCAL_WORLD_SIZE", "2", "4"}));
    }
    const Environment e(with("LOCAL_WORLD_SIZE", "4"));
    EXPECT_EQ(Group::from_environment().size, 4);
}

TEST(GroupFromEnvironment, OpensASession) {
    const Options o = options_of(2);
    const Problem p = problem_of(o, 2);
    const std::string port = std::to_string(getpid());
    Processes all(2, [&](const Part& part) {
        const Environment e({{"RANK", std::to_string(part.rank())},
                             {"WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "localhost"},
                             {"MASTER_PORT", port},
                             {"SWITCHYARD_TOKEN", "t" + port}});
        Session session = Session::open(o, Group::from_environment("ranks_test"));
        part.expect_nothing(difference_of_round(session, p));
    });
    all.end_of_all();
}

// ------------------------------------------------------------------------------------------------------- nothing left behind

/// Abstract sockets whose name holds `part`.
int64_t sockets_named(const std::string& part) {
    std::ifstream table("/proc/net/unix");
    int64_t n = 0;
    for (std::string line; std::getline(table, line);) n += line.find(part) != std::string::npos;
    return n;
}

int64_t shared_memory_files() {
    std::error_code none;
    int64_t n = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", none))
        n += entry.path().filename().string().find("witchyard") != std::string::npos;
    return n;
}

TEST(Ranks, LeaveNothingBehindHoweverTheyEnd) {
    const Options o = options_of(3);
    const Problem p = problem_of(o, 3);
    const std::string pid = std::to_string(getpid());
    enum class End { close, death, mismatch };
    for (const End end : {End::close, End::death, End::mismatch}) {
        Processes all(3, [&](const Part& part) {
            const std::string label = std::to_string(static_cast<int>(end));
            Options mine = o;
            if (end == End::mismatch && part.rank() == 1) mine.topk = 3;
            const int64_t before = files_open();
            for (int i = 0; i < 3; ++i) {
                std::optional<Session> session;
                const Outcome opened = outcome_of([&] { session = Session::open(mine, group_of(part.rank(), 3, label)); });
                part.expect((opened.code == Code::ok) == (end != End::mismatch), opened.text);
                if (!session) continue;
                part.expect_nothing(difference_of_round(*session, p));
                if (end != End::death || i < 2) continue;
                if (part.rank() == 1) part.die_here();
                part.expect_error(Code::peer_lost, 1, [&] { session->dispatch(dispatch_args(p, part.rank())); });
            }
            part.expect(files_open() == before,
                        std::to_string(files_open()) + " files are open, " + std::to_string(before) + " before the sessions");
        });
        all.end_of_all(end == End::death ? 1 : -1);
        EXPECT_EQ(sockets_named("ranks_test-" + pid), 0);
        EXPECT_EQ(shared_memory_files(), 0);
    }
}

TEST(Ranks, OpenSessionHoldsNoSocket) {
    const Options o = options_of(2);
    Processes all(2, [&](const Part& part) {
        Session session = Session::open(o, group_of(part.rank(), 2));
        part.say("open");
        part.wait();
    });
    all.await(0, "open");
    all.await(1, "open");
    EXPECT_EQ(sockets_named("ranks_test-" + std::to_string(getpid())), 0);
    all.go(0);
    all.go(1);
    all.end_of_all();
}

TEST(Ranks, ForkedChildOfARankDoesNoHarm) {
    // A library may fork (a data loader, a shell command). The child ends through the session's destructor.
    for (const int64_t workers : {1, 2}) {
        Options o = options_of(2);
        o.workers = workers;
        const Problem p = problem_of(o, 2);
        Processes all(2, [&](const Part& part) {
            auto session = std::make_unique<Session>(Session::open(o, group_of(part.rank(), 2, std::to_string(workers))));
            part.expect_nothing(difference_of_round(*session, p));
            const pid_t child = fork();
            if (child == 0) {
                Watchdog::watch("a rank's child after fork()", 5 * static_cast<unsigned>(slowness));
                session.reset();
                _exit(0);
            }
            int status = 0;
            waitpid(child, &status, 0);
            // The parent is as it was, whatever became of the child.
            for (int i = 0; i < 5; ++i) part.expect_nothing(difference_of_round(*session, p));
            part.expect(WIFEXITED(status) && WEXITSTATUS(status) == 0,
                        std::to_string(workers) + " workers: the child ended with status " + std::to_string(status) +
                            (WIFSIGNALED(status) ? ", signal " + std::to_string(WTERMSIG(status)) : ""));
        });
        all.end_of_all();
    }
}

// -------------------------------------------------------------------------------------------------------------- placement

TEST(Placement, WeightsMoveAndReplicasAnswerBetweenProcesses) {
    constexpr int ranks = 4;
    constexpr int64_t experts = 6, expert_bytes = 70'001;
    const std::vector<uint64_t> loads = {40, 3, 9, 1, 1, 2};
    const PlacementTable from = PlacementTable::contiguous(ranks, experts);
    const PlacementTable to = plan_placement(loads, {.ranks = ranks, .slots = 9});
    const auto weights_of = [&](const PlacementTable& t, int rank) {
        std::vector<std::byte> all;
        for (int64_t s = 0; s < t.slots(); ++s)
            for (int64_t i = 0; t.rank_of(s) == rank && i < expert_bytes; ++i)
                all.push_back(static_cast<std::byte>(
                    mix(static_cast<uint64_t>(t.expert_of[static_cast<size_t>(s)]), static_cast<uint64_t>(i))));
        return all;
    };
    Options o = options_of(ranks);
    o.experts = experts;
    Problem p = problem_of(o, ranks);
    p.table = to;
    solve(p);
    Processes all(ranks, [&](const Part& part) {
        const std::vector<std::byte> old = weights_of(from, part.rank()), right = weights_of(to, part.rank());
        std::vector<std::byte> got(right.size());
        Session mover = Session::open(weight_session_options(to, expert_bytes, 4096, 8), group_of(part.rank(), ranks, "mover"));
        const WeightTransfer done = move_weights(mover, from, to, expert_bytes, old.data(), got.data());
        part.expect_nothing(difference("weights", got, right));
        part.expect(done.rounds > 1, "it took one round");
        Session session = Session::open(o, group_of(part.rank(), ranks), to);
        for (int i = 0; i < 5; ++i) part.expect_nothing(difference_of_round(session, p));
    });
    all.end_of_all();
}

TEST(Placement, ALivingReplicaAnswersForADeadOne) {
    for (const auto& [landing, path] : every_way) {
        constexpr int ranks = 3, victim = 1;
        Options o = options_of(ranks, landing, path);
        o.experts = 3;
        o.partial = true;
        PlacementTable table;  // rank 0: 0 1, rank 1: 2 0, rank 2: 2 1; every expert lives on without any one rank
        table.ranks = ranks;
        table.experts = o.experts;
        table.expert_of = {0, 1, 2, 0, 2, 1};
        const Problem p = problem_of(o, ranks);
        Problem q = p;  // without the victim's tokens
        q.ranks[victim] = RankData();
        q.ranks[victim].stride = o.hidden;
        solve(q);
        SCOPED_TRACE(text_of(o));
        const std::string label = std::to_string(static_cast<int>(landing)) + std::to_string(static_cast<int>(path));
        Processes all(ranks, [&](const Part& part) {
            Session session = Session::open(o, group_of(part.rank(), ranks, label), table);
            if (part.rank() == victim) part.die_here();
            part.expect_error(Code::peer_lost, victim, [&] {
                ExpertBatch batch = session.dispatch(dispatch_args(p, part.rank()));
                session.combine(batch, {.out = output_of(p, part.rank()).data()});
            });
            part.expect(session.shrink() == others(ranks, {victim}), "the members are others");
            Problem placed = q;
            placed.table = table;
            for (int i = 0; i < 3; ++i) {
                ExpertBatch batch = session.dispatch(dispatch_args(q, part.rank()));
                fill_y(batch, placed, part.rank(), batch.y());
                Output out = output_of(q, part.rank());
                std::vector<int32_t> missing(static_cast<size_t>(q.ranks[static_cast<size_t>(part.rank())].tokens), -1);
                CombineArgs args = combine_args(q, part.rank(), out.data());
                args.missing = missing.data();
                session.combine(batch, args);
                part.expect_nothing(out.difference_from("x", q.combined[static_cast<size_t>(part.rank())]));
                part.expect(missing == std::vector<int32_t>(missing.size()), "something is missing");
            }
        });
        all.end_of_all(victim);
        if (testing::Test::HasFailure()) return;
    }
}

}  // namespace
}  // namespace switchyard::test
