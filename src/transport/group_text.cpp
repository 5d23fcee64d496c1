#include "transport/group_text.hpp"

#include <fmt/format.h>

#include <array>
#include <cstddef>

namespace switchyard {

namespace {

// More names than this are no help to a reader; the count of the rest is.
constexpr size_t ranks_named_max = 16;

}  // namespace

std::string ranks_text(std::span<const int> ranks) {
    if (ranks.empty()) return "no rank";
    if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
    std::string text = "ranks ";
    const size_t named = ranks.size() <= ranks_named_max ? ranks.size() - 1 : ranks_named_max;
    for (size_t i = 0; i < named; ++i) text += fmt::format("{}{}", i == 0 ? "" : ", ", ranks[i]);
    if (named == ranks.size() - 1) return text + fmt::format(" and {}", ranks.back());
    return text + fmt::format(" and {} more", ranks.size() - named);
}

std::string bytes_text(uint64_t bytes) {
    constexpr std::array<const char*, 6> units = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (bytes < 1024) return fmt::format("{} byte{}", bytes, bytes == 1 ? "" : "s");
    double value = static_cast<double>(bytes) / 1024.0;
    size_t unit = 0;
    while (value >= 1024.0 && unit + 1 < units.size()) {
        value /= 1024.0;
        ++unit;
    }
    return fmt::format("{:.4g} {}", value, units[unit]);
}

}  // namespace switchyard
