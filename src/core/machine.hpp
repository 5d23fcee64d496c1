// What this process may use of its machine: CPUs, NUMA nodes, and how memory and threads are bound to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "switchyard/status.hpp"

namespace switchyard {

/// CPUs this process may run on, ascending. Empty when the system does not tell.
std::vector<int> allowed_cpus();

/// How many of them it can use at the same time: cut by a cgroup quota. At least 1.
int usable_cpus();

/// Version of the interface of the hwloc that runs, "2.8.0", and the most files that a NumaMap has open while it is made.
std::string hwloc_version();
inline constexpr int topology_descriptors = 3;

/// The NUMA nodes of a machine; the one this process runs on, or one described as hwloc does ("node:4 core:2 pu:1"), for tests.
class NumaMap {
 public:
    explicit NumaMap(const char* synthetic = nullptr);
    ~NumaMap();
    NumaMap(const NumaMap&) = delete;
    NumaMap& operator=(const NumaMap&) = delete;

    /// Nodes whose CPUs are among `cpus`, when these are some of the machine's and not all; empty otherwise, and where the
    /// machine has one node: then there is nothing to choose.
    std::vector<int> nodes_near(const std::vector<int>& cpus) const;

    /// How many there are; 1 when the machine does not tell.
    int nodes() const;

    /// Asks the system to take the pages of this memory from those nodes, whoever touches them first. False on refusal.
    bool bind(void* start, size_t bytes, const std::vector<int>& nodes) const;

 private:
    void* topology_;  // hwloc_topology_t; null when hwloc could not look
};

/// Which CPUs belong to the `index`th of `count` processes that may all run on `cpus`: equal shares in order, at least one each
/// (shared when there are too few).
std::vector<int> share_of(const std::vector<int>& cpus, int64_t index, int64_t count);

/// Binds the calling thread to one CPU. False on refusal.
bool pin_this_thread(int cpu);

}  // namespace switchyard
