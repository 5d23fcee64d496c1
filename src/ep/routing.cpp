#include "ep/routing.hpp"

#include <algorithm>

namespace switchyard::ep {

Placement Placement::contiguous(int64_t ranks, int64_t experts) {
    Placement p;
    p.ranks = ranks;
    p.experts = experts;
    p.owner.resize(static_cast<size_t>(experts));
    for (int64_t r = 0; r < ranks; ++r) {
        const ExpertRange range = experts_of(r, ranks, experts);
        p.of_rank.push_back(range);
        std::fill(p.owner.begin() + range.first, p.owner.begin() + range.last, static_cast<int32_t>(r));
    }
    return p;
}

int64_t find_bad_id(const int32_t* ids, int64_t n, int64_t experts) {
    // -1 becomes 0 and every good id stays below experts + 1; all else, INT32_MIN included, is above. One comparison per
    // id, without a branch, in blocks that the compiler turns into vectors.
    const auto limit = static_cast<uint32_t>(experts);
    constexpr int64_t block = 256;
    for (int64_t start = 0; start < n; start += block) {
        const int64_t end = std::min(n, start + block);
        uint32_t bad = 0;
        for (int64_t i = start; i < end; ++i) bad |= static_cast<uint32_t>(static_cast<uint32_t>(ids[i]) + 1U > limit);
        if (bad)
            for (int64_t i = start; i < end; ++i)
                if (static_cast<uint32_t>(ids[i]) + 1U > limit) return i;
    }
    return n;
}

void take_turns(const Turns& turns, const Placement& placement, std::span<const uint8_t> left, const int32_t* ids, int64_t n,
                std::span<int32_t> next, int32_t* slots) {
    const auto has_left = [&](int32_t slot) {
        return left[static_cast<size_t>(placement.owner[static_cast<size_t>(slot)])] != 0;
    };
    if (turns.empty()) {
        for (int64_t i = 0; i < n; ++i) slots[i] = ids[i] >= 0 && has_left(ids[i]) ? -1 : ids[i];
        return;
    }
    for (int64_t e = 0; e < turns.experts(); ++e) {
        const int64_t length = turns.first[static_cast<size_t>(e) + 1] - turns.first[static_cast<size_t>(e)];
        next[static_cast<size_t>(e)] = static_cast<int32_t>(turns.start % length);
    }
    for (int64_t i = 0; i < n; ++i) {
        if (ids[i] < 0) {
            slots[i] = -1;
            continue;
        }
        const auto e = static_cast<size_t>(ids[i]);
        const int32_t* turn = turns.slots.data() + turns.first[e];
        const int32_t length = turns.first[e + 1] - turns.first[e];
        int32_t slot = -1;
        for (int32_t tries = 0; tries < length && slot < 0; ++tries) {
            if (const int32_t at = turn[next[e]]; !has_left(at)) slot = at;
            if (++next[e] == length) next[e] = 0;
        }
        slots[i] = slot;
    }
}

int32_t living_owner(const Turns& turns, const Placement& placement, std::span<const uint8_t> left, int32_t expert) {
    const auto owner_of = [&](int32_t slot) {
        const int32_t owner = placement.owner[static_cast<size_t>(slot)];
        return left[static_cast<size_t>(owner)] ? -1 : owner;
    };
    if (turns.empty()) return owner_of(expert);
    for (int32_t i = turns.first[static_cast<size_t>(expert)]; i < turns.first[static_cast<size_t>(expert) + 1]; ++i)
        if (const int32_t owner = owner_of(turns.slots[static_cast<size_t>(i)]); owner >= 0) return owner;
    return -1;
}

void count_rows(const int32_t* ids, int64_t n, std::span<int32_t> counts) {
    std::fill(counts.begin(), counts.end(), 0);
    for (int64_t i = 0; i < n; ++i)
        if (ids[i] >= 0) ++counts[static_cast<size_t>(ids[i])];
}

void place_experts(const Placement& placement, std::span<const int32_t> counts, int64_t alignment,
                   std::span<int64_t> expert_first, std::span<int64_t> rows_of) {
    const auto experts = static_cast<size_t>(placement.experts);
    // Totals first, source by source, so that the inner loop runs along a count row.
    std::fill(expert_first.begin(), expert_first.end(), 0);
    for (size_t q = 0; q < static_cast<size_t>(placement.ranks); ++q)
        for (size_t e = 0; e < experts; ++e) expert_first[e] += counts[q * experts + e];
    for (size_t p = 0; p < static_cast<size_t>(placement.ranks); ++p) {
        int64_t at = 0;
        for (int64_t e = placement.of_rank[p].first; e < placement.of_rank[p].last; ++e) {
            const int64_t rows = expert_first[static_cast<size_t>(e)];
            expert_first[static_cast<size_t>(e)] = at;
            at += (rows + alignment - 1) / alignment * alignment;
        }
        rows_of[p] = at;
    }
}

void number_rows(const Placement& placement, const int32_t* ids, int64_t n, std::span<int32_t> next, RowPlace* places) {
    for (int64_t i = 0; i < n; ++i) {
        const int32_t e = ids[i];
        places[i] = e < 0 ? RowPlace{-1, 0} : RowPlace{placement.owner[static_cast<size_t>(e)], next[static_cast<size_t>(e)]++};
    }
}

void place_rows(const Placement& placement, std::span<const int32_t> counts, std::span<const int64_t> expert_first, int64_t me,
                const int32_t* ids, int64_t n, std::span<int32_t> next, RowPlace* places) {
    const auto experts = static_cast<size_t>(placement.experts);
    for (size_t e = 0; e < experts; ++e) next[e] = static_cast<int32_t>(expert_first[e]);
    for (size_t q = 0; q < static_cast<size_t>(me); ++q)
        for (size_t e = 0; e < experts; ++e) next[e] += counts[q * experts + e];
    number_rows(placement, ids, n, next, places);
}

}  // namespace switchyard::ep
