// Calibration: measures this machine by playing groups of threads, and keeps the figures in the user's cache folder.
#include "switchyard/strategy.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/clock.hpp"
#include "core/machine.hpp"
#include "plan/cost.hpp"
#include "switchyard/session.hpp"

namespace switchyard {
namespace {

// The cache that a rank has for itself.
int64_t cache_of_a_rank() {
    const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return std::max<int64_t>(bytes, 1 << 20);
}

Calibration built_in() {
    Calibration c;
    c.cpus = usable_cpus();
    c.cache_bytes = cache_of_a_rank();
    return c;
}

// ------------------------------------------------------------------------------------------------------------ measuring

uint64_t read_row(const std::byte* row, int64_t bytes) {
    uint64_t sum = 0, word;
    for (int64_t i = 0; i + 8 <= bytes; i += 8) {
        std::memcpy(&word, row + i, 8);
        sum += word;
    }
    return sum;
}

// Median microseconds of the slowest rank for a dispatch and one read of every row.
double measure(const Options& options, int ranks) {
    std::vector<Session> sessions = Session::open_local(options, ranks);
    constexpr int rounds_max = 200, rounds_min = 7, warm_up = 2;
    constexpr int64_t enough_ns = 60'000'000;
    std::vector<std::vector<double>> us(static_cast<size_t>(ranks));
    std::vector<std::exception_ptr> errors(static_cast<size_t>(ranks) + 1);  // the last one: of starting the threads
    std::vector<std::thread> threads;
    std::atomic<int> go{0};         // rounds that rank 0 has opened; -1: enough
    std::atomic<int> first{-1};     // rank that failed first: the others fail because of it
    std::atomic<uint64_t> seen{0};  // so that reading is not left out
    const auto play = [&](int r) {
        try {
            Session& session = sessions[static_cast<size_t>(r)];
            const auto slots = static_cast<size_t>(options.tokens_max * options.topk);
            std::vector<std::byte> x(static_cast<size_t>(options.tokens_max * options.hidden) * 2, std::byte{1}), out(x.size());
            std::vector<int32_t> ids(slots);
            for (size_t i = 0; i < slots; ++i)
                ids[i] = static_cast<int32_t>((i * 2654435761U + static_cast<size_t>(r) * 40503U) >> 7 & 0xFFFF) %
                         static_cast<int32_t>(options.experts);
            const int64_t start = now_ns();
            for (int round = 0;; ++round) {
                // All ranks stop after the same round: rank 0 says so before it opens the next one.
                if (r == 0) {
                    const bool more = round < warm_up + rounds_min || (round < rounds_max && now_ns() - start < enough_ns);
                    go.store(more ? round + 1 : -1, std::memory_order_release);
                    go.notify_all();
                    if (!more) break;
                } else {
                    for (int open = go.load(std::memory_order_acquire); open != -1 && open <= round;
                         open = go.load(std::memory_order_acquire))
                        go.wait(open, std::memory_order_acquire);
                    if (go.load(std::memory_order_acquire) == -1) break;
                }
                const int64_t begin = now_ns();
                ExpertBatch batch = session.dispatch({.x = x.data(), .tokens = options.tokens_max, .topk_ids = ids.data()});
                uint64_t sum = 0;
                for (int64_t i = 0; i < batch.rows(); ++i) sum += read_row(batch.row(i).payload, batch.payload_bytes());
                if (round >= warm_up) us[static_cast<size_t>(r)].push_back(static_cast<double>(now_ns() - begin) / 1000);
                seen.fetch_add(sum, std::memory_order_relaxed);
                session.combine(batch, {.out = out.data()});
            }
        } catch (...) {
            int nobody = -1;
            first.compare_exchange_strong(nobody, r);
            errors[static_cast<size_t>(r)] = std::current_exception();
            sessions[static_cast<size_t>(r)].close();  // the others, rank 0 too, hear of it in their next call
            if (r != 0) return;
            go.store(-1);
            go.notify_all();
        }
    };
    try {
        for (int r = 0; r < ranks; ++r) threads.emplace_back(play, r);
    } catch (const std::system_error& e) {
        first = ranks;
        errors.back() = std::make_exception_ptr(Error(Status(
            Code::system, fmt::format("calibrate: thread {} of {} cannot be started: {}.", threads.size(), ranks, e.what()))));
        go.store(-1);
        go.notify_all();
        // Of the ranks that nobody plays, so that the others stop waiting for them; a session is its own thread's to close.
        for (size_t r = threads.size(); r < sessions.size(); ++r) sessions[r].close();
    }
    for (std::thread& t : threads) t.join();
    if (first >= 0) std::rethrow_exception(errors[static_cast<size_t>(first)]);
    std::vector<double> slowest;
    for (size_t i = 0; i < us[0].size(); ++i) {
        double most = 0;
        for (const std::vector<double>& of : us)
            if (i < of.size()) most = std::max(most, of[i]);
        slowest.push_back(most);
    }
    if (slowest.empty()) throw Error(Status(Code::system, "calibrate: no round was timed; run it on a quieter machine."));
    std::nth_element(slowest.begin(), slowest.begin() + static_cast<std::ptrdiff_t>(slowest.size() / 2), slowest.end());
    return slowest[slowest.size() / 2];
}

// Prices, none below 0, with the least squared relative error: one at a time, around and around.
void fit(Calibration& c, const std::vector<plan::Amounts>& amounts, const std::vector<double>& ns) {
    plan::Amounts prices = plan::prices_of(c);
    for (int sweep = 0; sweep < 4000; ++sweep)
        for (size_t p = 0; p < plan::prices; ++p) {
            double over = 0, under = 0;
            for (size_t i = 0; i < ns.size(); ++i) {
                double rest = ns[i];
                for (size_t q = 0; q < plan::prices; ++q)
                    if (q != p) rest -= prices[q] * amounts[i][q];
                over += amounts[i][p] * rest / (ns[i] * ns[i]);
                under += amounts[i][p] * amounts[i][p] / (ns[i] * ns[i]);
            }
            if (under > 0) prices[p] = std::max(0.0, over / under);
        }
    plan::set_prices(c, prices);
}

// ---------------------------------------------------------------------------------------------------------------- file

struct Line {
    const char* name;
    double Calibration::*price;
};
constexpr Line lines[] = {{"call_ns", &Calibration::call},
                          {"peer_ns", &Calibration::peer},
                          {"row_ns", &Calibration::row},
                          {"row_apart_ns", &Calibration::row_apart},
                          {"look_ns", &Calibration::look},
                          {"write_cache_ns_per_kib", &Calibration::write_cache},
                          {"write_memory_ns_per_kib", &Calibration::write_memory},
                          {"read_cache_ns_per_kib", &Calibration::read_cache},
                          {"read_memory_ns_per_kib", &Calibration::read_memory}};
constexpr const char* head = "switchyard calibration 1";
static_assert(std::size(lines) == plan::prices);

}  // namespace

Calibration calibrate() {
    Calibration c = built_in();
    std::vector<plan::Amounts> amounts;
    std::vector<double> ns;
    for (const int ranks : {2, 4})
        for (const int64_t hidden : {int64_t{512}, int64_t{4096}})
            for (const int64_t tokens : {int64_t{2}, int64_t{32}, int64_t{384}})
                for (const plan::Way way : plan::ways(ranks, 0, true)) {
                    Options o;
                    o.hidden = hidden;
                    o.topk = 8;
                    o.experts = 8 * ranks;
                    o.tokens_max = tokens;
                    o.landing = way.landing;
                    o.group_ranks = way.group_ranks;
                    o.depth = 1;
                    ns.push_back(1000 * measure(o, ranks));
                    amounts.push_back(plan::amounts_of(o, ranks, tokens, way, c));
                }
    fit(c, amounts, ns);
    c.source = "measured";
    return c;
}

Chosen choose_landing(Options& options, int64_t ranks) {
    if (options.landing != Landing::automatic) return {};
    const Calibration calibration = load_calibration(calibration_path());
    Chosen chosen{estimate_landings(options, ranks, options.tokens_max, calibration), calibration.source};
    options.landing = chosen.estimates.front().landing;
    options.group_ranks = chosen.estimates.front().group_ranks;
    return chosen;
}

std::string calibration_path() {
    if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && *cache)
        return fmt::format("{}/switchyard/calibration", cache);
    if (const char* home = std::getenv("HOME"); home && *home) return fmt::format("{}/.cache/switchyard/calibration", home);
    return "";
}

Calibration load_calibration(const std::string& path) {
    Calibration c = built_in();
    std::ifstream file(path);
    if (path.empty() || !file) return c;
    const auto bad = [&](const std::string& what) {
        return Error(
            Status(Code::bad_input,
                   fmt::format("{}: {}. Remove it, or write it anew with `switchyard plan --calibrate`.", path, what)));
    };
    std::string text;
    if (!std::getline(file, text) || text != head) throw bad(fmt::format("it does not begin with \"{}\"", head));
    std::array<bool, std::size(lines)> found{};
    while (std::getline(file, text)) {
        const size_t space = std::min(text.find(' '), text.size());
        double value = 0;
        const char* end = text.data() + text.size();
        const auto [after, error] = std::from_chars(text.data() + std::min(space + 1, text.size()), end, value);
        if (error != std::errc() || after != end || !std::isfinite(value) || value < 0)
            throw bad(fmt::format("\"{}\" is no name and number", text));
        // Others (cpus) only tell where it was measured: how many ranks work at a time is that of today.
        for (size_t i = 0; i < found.size(); ++i)
            if (text.compare(0, space, lines[i].name) == 0) c.*lines[i].price = value, found[i] = true;
    }
    if (const auto missing = std::find(found.begin(), found.end(), false); missing != found.end())
        throw bad(fmt::format("it has no {}", lines[missing - found.begin()].name));
    c.source = path;
    return c;
}

void save_calibration(const Calibration& c, const std::string& path) {
    const auto failed = [&](const char* what) {
        return Error(Status(Code::system, fmt::format("{}: {}: {}.", path, what, std::strerror(errno))));
    };
    if (path.empty())
        throw Error(Status(Code::system, "no place for the calibration: neither XDG_CACHE_HOME nor HOME is set."));
    std::error_code ignored;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
    std::string text = fmt::format("{}\ncpus {}\n", head, c.cpus);
    for (const Line& line : lines) text += fmt::format("{} {:.6g}\n", line.name, c.*line.price);
    const std::string fresh = fmt::format("{}.{}", path, getpid());
    const int file = ::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) throw failed("cannot be made");
    const bool written = ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
    if (::close(file) != 0 || !written || std::rename(fresh.c_str(), path.c_str()) != 0) {
        const int why = errno;
        ::unlink(fresh.c_str());
        errno = why;
        throw failed("cannot be written");
    }
}

}  // namespace switchyard
