#include "shared_window.hpp"

#include <fmt/format.h>

#include <atomic>
#include <cstring>

namespace switchyard::bench {

SharedWindow::SharedWindow(const Group& group, const std::string& label, int64_t bytes, bool oversubscribed)
    : link_(make_shm_transport(
          {.rank = group.rank, .size = group.size, .name = fmt::format("{}/{}", group.name, label), .token = group.token})),
      spin_ns_(oversubscribed ? 0 : 200'000) {
    std::vector<std::vector<std::byte>> cards;
    const auto whole_pages = static_cast<size_t>((bytes + 4095) / 4096 * 4096);
    const Status status =
        link_->attach({.card = {}, .window_bytes = whole_pages, .bell_offset = 0}, Deadline::after_ms(60'000), &cards);
    if (!status.ok()) throw Error(status);
    if (!link_->window())
        throw Error(Status(Code::mismatch, fmt::format("{}: the ranks ask for windows of different sizes", label)));
}

uint64_t SharedWindow::flag(int64_t offset) const {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(own(offset))).load(std::memory_order_acquire);
}

Status SharedWindow::missing(int64_t start_ns) const {
    for (int r = 0; r < link_->size(); ++r)
        if (link_->lost(r)) return {Code::peer_lost, fmt::format("rank {} has died", r)};
    if (now_ns() - start_ns > 120'000'000'000) return {Code::timed_out, "nothing came for two minutes"};
    return {};
}

StartLine::StartLine(const Group& group, bool oversubscribed)
    : rank_(group.rank), ranks_(group.size), window_(group, "start", flag_at(group.size), oversubscribed) {}

StartLine::Start StartLine::meet(uint64_t word) {
    ++meeting_;
    const Arrival mine{now_ns(), word};
    for (int p = 0; p < ranks_; ++p) {
        std::memcpy(window_.at(p, arrival_at(rank_, meeting_)), &mine, sizeof mine);
        window_.raise(p, flag_at(rank_), meeting_);
    }
    window_.wake();
    Start start{0, 0, 0};
    for (int p = 0; p < ranks_; ++p) {
        window_.await([&] { return window_.flag(flag_at(p)) >= meeting_; });
        Arrival theirs;
        std::memcpy(&theirs, window_.own(arrival_at(p, meeting_)), sizeof theirs);
        start.at_ns = std::max(start.at_ns, theirs.at_ns);
        start.of_any |= theirs.word;
        if (p == 0) start.of_first = theirs.word;
    }
    return start;
}

}  // namespace switchyard::bench
