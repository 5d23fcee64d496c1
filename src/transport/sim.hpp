// Ranks without threads: N windows in the memory of one thread, virtual time, and a seed that decides what the contract of
// transport.hpp leaves open.
//
// Promised:   the contract, at its loosest. A put travels in pieces that arrive late, twice, in any order where they do not
//             overlap; a flag arrives after every put and every flag before it to the same peer, and after nothing else; with
//             `reachable` windows, stores through reach() are there at once and flags follow. A ring arrives after its flags;
//             whom it wakes gets up late; some wake for nothing. What a rank had under way when it died arrives up to some
//             point of each peer's stream and no further; it counts as lost after that, at another time for every peer. The
//             same seed and the same calls give the same world.
// Open:       when the caller gives whom a turn. Nothing blocks here: sleep() only notes that its rank sleeps, and who runs
//             the ranks asks asleep(). `between` is called at every call of a link, and may run other ranks there.
// Relied on:  one thread. Every rank attaches with the request that the world was made with.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "switchyard/simulation.hpp"
#include "transport/transport.hpp"

namespace switchyard::sim {

using simulation::Broken;

constexpr uint64_t mix(uint64_t z) {  // splitmix64
    z += 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
}

/// Seeded numbers that are the same with every compiler and library.
class Random {
 public:
    explicit Random(uint64_t seed) : state_(mix(seed)) {}
    uint64_t next() { return mix(state_ += 0x9E3779B97F4A7C15U); }
    /// 0..n-1, n >= 1
    int64_t below(int64_t n) { return static_cast<int64_t>((next() >> 11) % static_cast<uint64_t>(n)); }
    /// low..high
    int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
    bool one_in(int64_t n) { return below(n) == 0; }

 private:
    uint64_t state_;
};

/// What has happened: a hash over all of it, and lines for people where they are wanted.
class Log {
 public:
    explicit Log(bool keep) : keep_(keep) {}

    /// One event. Arguments are numbers; the text is made only when lines are kept.
    template <class... Numbers>
    void note(int64_t now_ns, fmt::format_string<Numbers...> text, Numbers... numbers) {
        const fmt::string_view form = text;
        add(form.data(), form.size());
        add(static_cast<uint64_t>(now_ns));
        (add(static_cast<uint64_t>(numbers)), ...);
        if (keep_) say(now_ns, fmt::vformat(form, fmt::make_format_args(numbers...)));
    }
    /// Bytes that belong to an event.
    void add(const void* data, size_t bytes);
    void add(uint64_t number) { hash_ = mix(hash_ ^ number); }
    /// A line that is not part of the hash.
    void say(int64_t now_ns, std::string_view text) {
        if (keep_) lines_.push_back(fmt::format("{:12.3f} us  {}", static_cast<double>(now_ns) / 1000, text));
    }
    bool keeps() const { return keep_; }
    uint64_t hash() const { return hash_; }
    std::vector<std::string>& lines() { return lines_; }

 private:
    const bool keep_;
    uint64_t hash_ = 0;
    std::vector<std::string> lines_;
};

/// Thrown out of a call that breaks the contract: a place outside a window, a flag that is not aligned, no attach.
struct CallerBug {
    std::string text;
};

struct WorldShape {
    int ranks = 1;
    bool reachable = false;
    size_t window_bytes = 0;
    uint64_t bell_offset = 0;
    int64_t delay_ns = 1000;    ///< most puts and flags arrive within this
    int64_t late_ns = 100'000;  ///< the longest that anything travels; late wake-ups and late notice of a death too
    int64_t late_one_in = 16;   ///< how often something takes that long
    Broken broken = Broken::nothing;
    uint64_t misplaced_by = 0;  ///< bytes, for Broken::misplaced_put
};

class World {
 public:
    World(uint64_t seed, const WorldShape& shape, Log& log);
    ~World();
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    /// The link of a rank; belongs to the world.
    Transport& link(int rank);
    std::byte* window(int rank) const { return windows_[static_cast<size_t>(rank)]; }
    /// A page before and one behind every window; the world fills them once, nobody may write there.
    static constexpr size_t guard_bytes = 4096;
    static constexpr std::byte guard_value{0xA7};
    bool guards_are_whole(int rank) const;

    /// Called at the start of every call of a link of `rank`, before it has any effect.
    std::function<void(int rank)> between;

    int64_t now() const { return now_; }
    /// Time passes; what is due by then has happened when it returns.
    void pass(int64_t ns);
    /// When something happens by itself: an arrival, or a sleeper's end of sleep. INT64_MAX: never.
    int64_t next_ns() const;
    bool idle() const { return under_way_.empty(); }

    bool asleep(int rank) const { return sleep_until_[static_cast<size_t>(rank)] > now_; }

    /// The rank's process ends now.
    void kill(int rank);

 private:
    class Link;
    struct Event {
        enum class Kind { bytes, flag, ring, loss } kind;
        int64_t due;
        uint64_t number;  // in the order in which things were sent
        int from, to;
        uint64_t offset;
        uint64_t value;
        std::vector<std::byte> bytes;
    };
    struct Later {
        bool operator()(const Event& a, const Event& b) const { return a.due != b.due ? a.due > b.due : a.number > b.number; }
    };
    // What one rank has sent another.
    struct Stream {
        int64_t puts_due = 0;   // when all puts so far have arrived
        int64_t flags_due = 0;  // when all flags so far have
    };

    Stream& stream(int from, int to) { return streams_[static_cast<size_t>(from * shape_.ranks + to)]; }
    int64_t delay();
    int64_t due_at(int from, int to, uint64_t first, uint64_t last) const;
    bool breaks(Broken what, int64_t one_in) { return shape_.broken == what && random_.one_in(one_in); }
    void send(Event event);
    void arrive();
    void happen(const Event& event);
    void put(int from, const Place& place, const std::byte* data, size_t bytes);
    void raise(int from, int to, uint64_t offset, uint64_t value);
    void ring(int from);
    void check_place(const char* verb, int from, int to, uint64_t offset, uint64_t bytes) const;
    uint32_t* bell(int rank) const { return reinterpret_cast<uint32_t*>(window(rank) + shape_.bell_offset); }

    const WorldShape shape_;
    Random random_;
    Log& log_;
    int64_t now_ = 0;
    uint64_t sent_ = 0;
    std::unique_ptr<std::byte, void (*)(void*)> memory_;
    std::vector<std::byte*> windows_;
    std::vector<std::unique_ptr<Link>> links_;
    std::vector<Event> under_way_;  // a heap, the next one first
    std::vector<Stream> streams_;   // [from][to]
    std::vector<uint8_t> lost_;     // [observer][rank]
    std::vector<uint8_t> dead_;
    std::vector<uint8_t> raised_;  // [from][to] since the last ring
    std::vector<int64_t> sleep_until_;
};

}  // namespace switchyard::sim
