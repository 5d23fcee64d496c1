#include "transport/sim.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

namespace switchyard::sim {

void Log::add(const void* data, size_t bytes) {
    const auto* at = static_cast<const std::byte*>(data);
    uint64_t h = bytes;
    for (; bytes >= 8; at += 8, bytes -= 8) {
        uint64_t word;
        std::memcpy(&word, at, 8);
        h = (h ^ word) * 0x9E3779B97F4A7C15U;
        h ^= h >> 29;
    }
    for (; bytes > 0; ++at, --bytes) h = (h ^ std::to_integer<uint64_t>(*at)) * 0x100000001B3U;
    add(h);
}

// One rank's end of the world: every call tells `between`, checks its arguments, and passes on.
class World::Link final : public Transport {
 public:
    Link(World& world, int rank, int size) : Transport(rank, size), world_(world) {}

    Status attach(const AttachRequest& request, Deadline, std::vector<std::vector<std::byte>>* cards) override {
        if (attached_)
            return {Code::bad_input, fmt::format("attach on rank {} was called before; a transport attaches once.", rank())};
        if (request.window_bytes != world_.shape_.window_bytes || request.bell_offset != world_.shape_.bell_offset)
            return {
                Code::bad_input,
                fmt::format("attach on rank {}: {} bytes with the bell at {}; this world was made for {} with {}.", rank(),
                            request.window_bytes, request.bell_offset, world_.shape_.window_bytes, world_.shape_.bell_offset)};
        attached_ = true;
        cards->assign(static_cast<size_t>(size()), {request.card.begin(), request.card.end()});  // everybody brings the same
        return {};
    }

    std::byte* window() override { return attached_ ? world_.window(rank()) : nullptr; }
    const WindowMemory& memory() const override { return memory_; }
    std::byte* reach(int peer) override {
        const bool known = attached_ && peer >= 0 && peer < size() && (peer == rank() || world_.shape_.reachable);
        return known ? world_.window(peer) : nullptr;
    }
    void put(std::span<const Place> places, const void* data, size_t bytes) override {
        enter("put");
        for (const Place& place : places) world_.check_place("put", rank(), place.rank, place.offset, bytes);
        for (const Place& place : places) world_.put(rank(), place, static_cast<const std::byte*>(data), bytes);
        world_.arrive();
    }
    void raise(int peer, uint64_t offset, uint64_t value) override {
        enter("raise");
        world_.check_place("raise", rank(), peer, offset, 8);
        if (offset % 8 != 0) throw CallerBug{fmt::format("raise on rank {} at offset {}, not a multiple of 8", rank(), offset)};
        world_.raise(rank(), peer, offset, value);
        world_.arrive();
    }
    void ring() override {
        enter("ring");
        world_.ring(rank());
        world_.arrive();
    }
    void poll() override { enter("poll"); }
    bool lost(int peer) override {
        enter("lost");
        return world_.lost_[static_cast<size_t>(rank() * size() + peer)] != 0;
    }
    uint32_t announce() override {
        uint32_t* words = world_.bell(rank());
        ++words[1];
        enter("announce");  // between the announcement and the look at the bell
        return words[0];
    }
    void sleep(uint32_t ticket, int64_t slice_ns) override {
        enter("sleep");
        if (world_.bell(rank())[0] != ticket || slice_ns <= 0) return;
        Random& random = world_.random_;
        const int64_t until = world_.now_ + (random.one_in(8) ? random.below(slice_ns) : slice_ns);  // some wake for nothing
        world_.sleep_until_[static_cast<size_t>(rank())] = until;
        world_.log_.note(world_.now_, "rank {} sleeps, at most until {}", rank(), until);
    }
    void awake() override {
        enter("awake");
        --world_.bell(rank())[1];
    }

 private:
    void enter(const char* verb) {
        if (!attached_) throw CallerBug{fmt::format("{} on rank {} before attach", verb, rank())};
        if (world_.between) world_.between(rank());
    }

    const WindowMemory memory_;
    World& world_;
    bool attached_ = false;
};

World::World(uint64_t seed, const WorldShape& shape, Log& log)
    : shape_(shape), random_(seed), log_(log), memory_(nullptr, std::free) {
    const auto ranks = static_cast<size_t>(shape.ranks);
    const size_t each = guard_bytes + (shape.window_bytes + guard_bytes - 1) / guard_bytes * guard_bytes + guard_bytes;
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(guard_bytes, each * ranks)));
    if (!memory_) throw std::bad_alloc();
    for (int r = 0; r < shape.ranks; ++r) {
        std::byte* start = memory_.get() + static_cast<size_t>(r) * each;
        std::memset(start, std::to_integer<int>(guard_value), guard_bytes);
        std::memset(start + guard_bytes, 0, shape.window_bytes);
        std::memset(start + guard_bytes + shape.window_bytes, std::to_integer<int>(guard_value),
                    each - guard_bytes - shape.window_bytes);
        windows_.push_back(start + guard_bytes);
        links_.push_back(std::make_unique<Link>(*this, r, shape.ranks));
    }
    streams_.resize(ranks * ranks);
    lost_.resize(ranks * ranks);
    raised_.resize(ranks * ranks);
    dead_.resize(ranks);
    sleep_until_.resize(ranks);
}

World::~World() = default;

Transport& World::link(int rank) {
    return *links_[static_cast<size_t>(rank)];
}

bool World::guards_are_whole(int rank) const {
    const auto whole = [](const std::byte* at, size_t bytes) {
        return std::all_of(at, at + bytes, [](std::byte b) { return b == guard_value; });
    };
    const std::byte* start = window(rank);
    return whole(start - guard_bytes, guard_bytes) && whole(start + shape_.window_bytes, guard_bytes);
}

void World::pass(int64_t ns) {
    now_ += ns;
    arrive();
}

int64_t World::next_ns() const {
    int64_t next = under_way_.empty() ? std::numeric_limits<int64_t>::max() : under_way_.front().due;
    for (size_t r = 0; r < sleep_until_.size(); ++r)
        if (!dead_[r] && sleep_until_[r] > now_) next = std::min(next, sleep_until_[r]);
    return next;
}

int64_t World::delay() {
    return random_.one_in(shape_.late_one_in) ? random_.between(0, shape_.late_ns) : random_.between(0, shape_.delay_ns);
}

void World::send(Event event) {
    event.number = sent_++;
    under_way_.push_back(std::move(event));
    std::push_heap(under_way_.begin(), under_way_.end(), Later());
}

void World::arrive() {
    while (!under_way_.empty() && under_way_.front().due <= now_) {
        std::pop_heap(under_way_.begin(), under_way_.end(), Later());
        const Event event = std::move(under_way_.back());
        under_way_.pop_back();
        happen(event);
    }
}

void World::check_place(const char* verb, int from, int to, uint64_t offset, uint64_t bytes) const {
    if (to < 0 || to >= shape_.ranks)
        throw CallerBug{fmt::format("{} on rank {} to rank {} of {}", verb, from, to, shape_.ranks)};
    if (bytes > shape_.window_bytes || offset > shape_.window_bytes - bytes)
        throw CallerBug{fmt::format("{} on rank {} to rank {}: {} bytes at {} do not lie in a window of {}", verb, from, to,
                                    bytes, offset, shape_.window_bytes)};
}

// When all has arrived that one rank has sent another for these bytes.
int64_t World::due_at(int from, int to, uint64_t first, uint64_t last) const {
    int64_t due = 0;
    for (const Event& e : under_way_)
        if (e.from == from && e.to == to && e.offset < last && e.offset + e.bytes.size() > first) due = std::max(due, e.due);
    return due;
}

void World::put(int from, const Place& place, const std::byte* data, size_t bytes) {
    if (bytes == 0) return;
    uint64_t offset = place.offset;
    if (breaks(Broken::misplaced_put, 16) && offset + bytes + shape_.misplaced_by <= shape_.window_bytes)
        offset += shape_.misplaced_by;
    Stream& s = stream(from, place.rank);
    log_.note(now_, "rank {} puts {} bytes to rank {} at {}", from, bytes, place.rank, offset);
    const auto pieces = static_cast<size_t>(random_.one_in(4) ? random_.between(2, 4) : 1);
    for (size_t i = 0; i < pieces; ++i) {
        const size_t first = bytes * i / pieces;
        const size_t last = bytes * (i + 1) / pieces;
        const int64_t copies = random_.one_in(16) ? 2 : 1;
        for (int64_t c = 0; c < copies; ++c) {
            int64_t due = now_ + (from == place.rank && shape_.reachable ? 0 : delay());
            if (!breaks(Broken::puts_overtake, 4)) due = std::max(due, due_at(from, place.rank, offset + first, offset + last));
            s.puts_due = std::max(s.puts_due, due);
            send({Event::Kind::bytes, due, 0, from, place.rank, offset + first, 0, {data + first, data + last}});
        }
    }
}

void World::raise(int from, int to, uint64_t offset, uint64_t value) {
    Stream& s = stream(from, to);
    int64_t due = now_ + (from == to && shape_.reachable ? 0 : delay());
    if (!breaks(Broken::flag_before_puts, 4)) due = std::max(due, s.puts_due);
    due = std::max(due, s.flags_due);
    log_.note(now_, "rank {} raises {} for rank {} at {}", from, value, to, offset);
    if (breaks(Broken::flags_overtake, 4))
        due += shape_.late_ns * 2;  // and those behind do not wait for it
    else
        s.flags_due = due;
    send({Event::Kind::flag, due, 0, from, to, offset, value, {}});
    raised_[static_cast<size_t>(from * shape_.ranks + to)] = 1;
}

void World::ring(int from) {
    for (int to = 0; to < shape_.ranks; ++to) {
        uint8_t& raised = raised_[static_cast<size_t>(from * shape_.ranks + to)];
        if (!raised) continue;
        raised = 0;
        const int64_t due = std::max(now_ + (from == to ? 0 : delay()), stream(from, to).flags_due);
        send({Event::Kind::ring, due, 0, from, to, 0, 0, {}});
    }
}

void World::happen(const Event& e) {
    const auto to = static_cast<size_t>(e.to);
    switch (e.kind) {
        case Event::Kind::bytes:
            std::copy(e.bytes.begin(), e.bytes.end(), windows_[to] + e.offset);
            log_.note(e.due, "{} bytes of rank {} arrive at rank {} at {}", e.bytes.size(), e.from, e.to, e.offset);
            log_.add(e.bytes.data(), e.bytes.size());
            return;
        case Event::Kind::flag: {
            // Pairs with the acquire load of whoever looks at the flag; on one thread it is the order of arrivals that counts.
            std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(windows_[to] + e.offset));
            const uint64_t before = word.load(std::memory_order_relaxed);
            word.store(e.value, std::memory_order_release);
            log_.note(e.due, "flag {} of rank {} arrives at rank {} at {}", e.value, e.from, e.to, e.offset);
            if (before != 0 && before != e.value && breaks(Broken::old_flag, 4))
                send({Event::Kind::flag, now_ + random_.between(0, shape_.late_ns), 0, e.from, e.to, e.offset, before, {}});
            return;
        }
        case Event::Kind::ring: {
            uint32_t* words = bell(e.to);
            if (words[1] == 0 || breaks(Broken::lost_wake_up, 4)) return;
            ++words[0];
            if (sleep_until_[to] > now_) {
                sleep_until_[to] = std::min(sleep_until_[to], now_ + delay());
                log_.note(e.due, "rank {} wakes rank {}, which is up at {}", e.from, e.to, sleep_until_[to]);
            }
            return;
        }
        case Event::Kind::loss:
            lost_[to * static_cast<size_t>(shape_.ranks) + static_cast<size_t>(e.from)] = 1;
            log_.note(e.due, "rank {} can know that rank {} is lost", e.to, e.from);
            return;
    }
}

void World::kill(int rank) {
    dead_[static_cast<size_t>(rank)] = 1;
    log_.note(now_, "rank {} dies", rank);
    // What is under way to a peer ends somewhere in the order in which it was sent: a flag never comes without what it
    // publishes.
    std::vector<uint64_t> cut(static_cast<size_t>(shape_.ranks), std::numeric_limits<uint64_t>::max());
    for (int to = 0; to < shape_.ranks; ++to) {
        std::vector<uint64_t> numbers;
        for (const Event& e : under_way_)
            if (e.from == rank && e.to == to) numbers.push_back(e.number);
        if (numbers.empty() || random_.one_in(3)) continue;  // all of it arrives
        std::sort(numbers.begin(), numbers.end());
        cut[static_cast<size_t>(to)] = numbers[static_cast<size_t>(random_.below(static_cast<int64_t>(numbers.size())))];
    }
    std::erase_if(under_way_, [&](const Event& e) { return e.from == rank && e.number >= cut[static_cast<size_t>(e.to)]; });
    std::make_heap(under_way_.begin(), under_way_.end(), Later());
    for (int to = 0; to < shape_.ranks; ++to) {
        if (to == rank) continue;
        int64_t due = now_ + random_.between(0, shape_.late_ns);
        for (const Event& e : under_way_)
            if (e.from == rank && e.to == to) due = std::max(due, e.due);
        send({Event::Kind::loss, due, 0, rank, to, 0, 0, {}});
    }
}

}  // namespace switchyard::sim
