#include "core/machine.hpp"

#include <hwloc.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>

namespace switchyard {

std::vector<int> allowed_cpus() {
    // Room for machines with more CPUs than a cpu_set_t has bits.
    constexpr int most = 8192;
    std::vector<int> cpus;
    cpu_set_t* set = CPU_ALLOC(most);
    if (!set) return cpus;
    const size_t bytes = CPU_ALLOC_SIZE(most);
    if (sched_getaffinity(0, bytes, set) == 0)
        for (int i = 0; i < most; ++i)
            if (CPU_ISSET_S(static_cast<size_t>(i), bytes, set)) cpus.push_back(i);
    CPU_FREE(set);
    return cpus;
}

int usable_cpus() {
    auto cpus = static_cast<int>(allowed_cpus().size());
    if (std::FILE* f = std::fopen("/sys/fs/cgroup/cpu.max", "re")) {
        long long quota = 0, period = 0;
        if (std::fscanf(f, "%lld %lld", &quota, &period) == 2 && period > 0)
            cpus = std::min(cpus, static_cast<int>((quota + period - 1) / period));
        std::fclose(f);
    }
    return std::max(cpus, 1);
}

std::string hwloc_version() {
    const unsigned v = hwloc_get_api_version();
    return std::to_string(v >> 16) + '.' + std::to_string(v >> 8 & 0xFF) + '.' + std::to_string(v & 0xFF);
}

NumaMap::NumaMap(const char* synthetic) : topology_(nullptr) {
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology) != 0) return;
    // Only what gives nodes and CPUs their places: looking for devices takes long on large machines.
    hwloc_topology_set_all_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_STRUCTURE);
    if ((synthetic && hwloc_topology_set_synthetic(topology, synthetic) != 0) || hwloc_topology_load(topology) != 0)
        hwloc_topology_destroy(topology);
    else
        topology_ = topology;
}

NumaMap::~NumaMap() {
    if (topology_) hwloc_topology_destroy(static_cast<hwloc_topology_t>(topology_));
}

std::vector<int> NumaMap::nodes_near(const std::vector<int>& cpus) const {
    std::vector<int> nodes;
    if (!topology_ || cpus.empty()) return nodes;
    auto* topology = static_cast<hwloc_topology_t>(topology_);
    hwloc_bitmap_t cpuset = hwloc_bitmap_alloc(), nodeset = hwloc_bitmap_alloc();
    for (const int cpu : cpus) hwloc_bitmap_set(cpuset, static_cast<unsigned>(cpu));
    hwloc_cpuset_to_nodeset(topology, cpuset, nodeset);
    if (hwloc_bitmap_weight(nodeset) < hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE))
        for (int n = hwloc_bitmap_first(nodeset); n >= 0; n = hwloc_bitmap_next(nodeset, n)) nodes.push_back(n);
    hwloc_bitmap_free(cpuset);
    hwloc_bitmap_free(nodeset);
    return nodes;
}

int NumaMap::nodes() const {
    if (!topology_) return 1;
    auto* topology = static_cast<hwloc_topology_t>(topology_);
    int with_cpus = 0;  // some hold memory only
    for (hwloc_obj_t node = nullptr; (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node));)
        with_cpus += node->cpuset && !hwloc_bitmap_iszero(node->cpuset);
    return std::max(1, with_cpus);
}

bool NumaMap::bind(void* start, size_t bytes, const std::vector<int>& nodes) const {
    if (!topology_ || nodes.empty()) return false;
    hwloc_bitmap_t nodeset = hwloc_bitmap_alloc();
    for (const int n : nodes) hwloc_bitmap_set(nodeset, static_cast<unsigned>(n));
    // Not strict: a full node is no reason to fail.
    const int refused = hwloc_set_area_membind(static_cast<hwloc_topology_t>(topology_), start, bytes, nodeset,
                                               HWLOC_MEMBIND_BIND, HWLOC_MEMBIND_BYNODESET);
    hwloc_bitmap_free(nodeset);
    return refused == 0;
}

std::vector<int> share_of(const std::vector<int>& cpus, int64_t index, int64_t count) {
    const auto n = static_cast<int64_t>(cpus.size());
    if (n == 0 || count < 1) return {};
    if (n < count) return {cpus[static_cast<size_t>(index % n)]};
    return {cpus.begin() + index * n / count, cpus.begin() + (index + 1) * n / count};
}

bool pin_this_thread(int cpu) {
    if (cpu < 0) return false;
    const auto n = static_cast<size_t>(cpu) + 1;
    cpu_set_t* set = CPU_ALLOC(n);
    if (!set) return false;
    const size_t bytes = CPU_ALLOC_SIZE(n);
    CPU_ZERO_S(bytes, set);
    CPU_SET_S(static_cast<size_t>(cpu), bytes, set);
    const int refused = pthread_setaffinity_np(pthread_self(), bytes, set);
    CPU_FREE(set);
    return refused == 0;
}

}  // namespace switchyard
