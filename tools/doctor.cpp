// switchyard doctor: can this machine, or this container, run a group well? Each finding says what was seen, why it matters,
// and the command that cures it. `--group` looks at the groups that are open (groups.cpp).
#include "doctor.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "case.hpp"
#include "commands.hpp"
#include "launch.hpp"
#include "switchyard/inspect.hpp"
#include "switchyard/strategy.hpp"
#include "switchyard/switchyard.h"

namespace switchyard::tools {

const char* level_name(Finding::Level level) {
    switch (level) {
        case Finding::Level::ok: return "ok";
        case Finding::Level::note: return "note";
        case Finding::Level::finding: return "finding";
    }
    return "";
}

std::string json_line(const nlohmann::json& json) {
    return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string line_of_file(const std::string& path) {
    std::ifstream in(path);
    std::string line;
    std::getline(in, line);
    return line;
}

int64_t number_of_file(const std::string& path, int64_t otherwise) {
    std::ifstream in(path);
    int64_t n = otherwise;
    return in >> n ? n : otherwise;
}

namespace {

using Level = Finding::Level;

std::string bytes_text(double bytes) {
    constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    size_t unit = 0;
    for (; bytes >= 1024 && unit + 1 < std::size(units); ++unit) bytes /= 1024;
    return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, units[unit]);
}
std::string bytes_text(int64_t bytes) {
    return bytes_text(static_cast<double>(bytes));
}

// The number behind "KEY" in a file of "KEY: NUMBER unit" lines (meminfo, status) or "KEY NUMBER" lines (memory.stat).
int64_t field_of(const std::string& path, const std::string& key, int64_t otherwise) {
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) {
        std::istringstream words(line);
        std::string name;
        int64_t n = 0;
        if (words >> name && (name == key || name == key + ":") && words >> n) return n;
    }
    return otherwise;
}

// "0-3,8" as numbers.
std::vector<int> list_of(const std::string& text) {
    std::vector<int> numbers;
    std::istringstream in(text);
    for (std::string item; std::getline(in, item, ',');) {
        int first = 0, last = 0;
        const int n = std::sscanf(item.c_str(), "%d-%d", &first, &last);
        if (n < 1) continue;
        for (int i = first; i <= (n == 2 ? last : first); ++i) numbers.push_back(i);
    }
    return numbers;
}
std::string list_text(const std::vector<int>& numbers) {
    std::string text;
    for (size_t i = 0; i < numbers.size();) {
        size_t end = i;
        while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1) ++end;
        text += fmt::format("{}{}", text.empty() ? "" : ",", numbers[i]);
        if (end > i) text += fmt::format("-{}", numbers[end]);
        i = end + 1;
    }
    return text;
}

// ---------------------------------------------------------------------------------------------------------------- cgroups

// The folders that limit this process through one controller, its own first, up to the root that is visible here.
struct Cgroup {
    std::vector<std::filesystem::path> folders;
    bool v2 = false;
};

Cgroup cgroup_of(const std::string& controller) {
    // Of /proc/self/cgroup: "0::/path" for version 2, "4:memory:/path" for version 1.
    std::string path1, path2;
    std::ifstream mine("/proc/self/cgroup");
    for (std::string line; std::getline(mine, line);) {
        const size_t a = line.find(':'), b = line.find(':', a + 1);
        if (b == std::string::npos) continue;
        const std::string names = "," + line.substr(a + 1, b - a - 1) + ",";
        if (names == ",,") path2 = line.substr(b + 1);
        if (names.find("," + controller + ",") != std::string::npos) path1 = line.substr(b + 1);
    }
    Cgroup found;
    std::ifstream mounts("/proc/self/mountinfo");
    for (std::string line; std::getline(mounts, line);) {
        std::istringstream words(line);
        std::string skip, root, point, word, type, source, options;
        words >> skip >> skip >> skip >> root >> point;
        while (words >> word && word != "-") {
        }
        words >> type >> source >> options;
        const bool v2 = type == "cgroup2";
        const bool v1 = type == "cgroup" && ("," + options + ",").find("," + controller + ",") != std::string::npos;
        if ((!v1 && !v2) || (v1 ? path1 : path2).empty()) continue;
        if (v2 && !path1.empty()) continue;  // version 1 has this controller
        std::string path = v1 ? path1 : path2;
        // In a container the mount may show a part of the tree only, and the path be that of the host.
        if (root != "/" && path.starts_with(root)) path = path.substr(root.size());
        std::filesystem::path folder =
            std::filesystem::path(point) / path.substr(std::min(path.find_first_not_of('/'), path.size()));
        std::error_code none;
        if (!std::filesystem::is_directory(folder, none)) folder = point;
        found = {};
        found.v2 = v2;
        for (;; folder = folder.parent_path()) {
            if (folder.filename().empty()) folder = folder.parent_path();
            found.folders.push_back(folder);
            if (folder == std::filesystem::path(point) || !folder.has_relative_path()) break;
        }
    }
    return found;
}

// The least of what the folders grant, and the file that says so.
struct Grant {
    double amount = INFINITY;
    std::string file;
    void take(double a, const std::filesystem::path& path) {
        if (a < amount) amount = a, file = path.string();
    }
};

Grant cpu_quota() {
    Grant g;
    const Cgroup cgroup = cgroup_of("cpu");
    for (const std::filesystem::path& folder : cgroup.folders) {
        double quota = -1, period = 0;
        if (cgroup.v2)
            std::ifstream(folder / "cpu.max") >> quota >> period;  // "max 100000" fails, and leaves the period 0
        else
            quota = static_cast<double>(number_of_file(folder / "cpu.cfs_quota_us", -1)),
            period = static_cast<double>(number_of_file(folder / "cpu.cfs_period_us", 0));
        if (quota > 0 && period > 0) g.take(quota / period, folder / (cgroup.v2 ? "cpu.max" : "cpu.cfs_quota_us"));
    }
    return g;
}

Grant memory_left() {
    Grant g;
    const Cgroup cgroup = cgroup_of("memory");
    for (const std::filesystem::path& folder : cgroup.folders) {
        const int64_t limit = number_of_file(folder / (cgroup.v2 ? "memory.max" : "memory.limit_in_bytes"), INT64_MAX);
        if (limit > int64_t{1} << 60) continue;
        const int64_t used = number_of_file(folder / (cgroup.v2 ? "memory.current" : "memory.usage_in_bytes"), 0);
        // Pages of files that nobody has touched lately go before anybody is killed.
        const int64_t cache = field_of(folder / "memory.stat", cgroup.v2 ? "inactive_file" : "total_inactive_file", 0);
        g.take(static_cast<double>(std::max<int64_t>(limit - used + cache, 0)),
               folder / (cgroup.v2 ? "memory.max" : "memory.limit_in_bytes"));
    }
    return g;
}

Grant threads_left() {
    Grant g;
    const Cgroup cgroup = cgroup_of("pids");
    for (const std::filesystem::path& folder : cgroup.folders) {
        const int64_t limit = number_of_file(folder / "pids.max", INT64_MAX);
        if (limit == INT64_MAX) continue;
        g.take(static_cast<double>(std::max<int64_t>(limit - number_of_file(folder / "pids.current", 0), 0)),
               folder / "pids.max");
    }
    return g;
}

// Threads of this user on this host, as far as /proc shows them.
int64_t threads_of_this_user() {
    int64_t threads = 0;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", none)) {
        const std::string name = entry.path().filename();
        struct stat owner = {};
        if (name.find_first_not_of("0123456789") != std::string::npos || stat(entry.path().c_str(), &owner) != 0 ||
            owner.st_uid != getuid())
            continue;
        threads += field_of(entry.path() / "status", "Threads", 0);
    }
    return threads;
}

// ------------------------------------------------------------------------------------------------------------- the checks

// What is asked about.
struct Wish {
    Case c;
    inspect::Needs needs;
    int64_t threads() const { return c.ranks * c.options.workers; }
    int64_t touched() const { return c.ranks * needs.touched_bytes; }
};

std::vector<int> allowed_cpus() {
    std::vector<int> cpus;
    constexpr int most = 8192;
    cpu_set_t* set = CPU_ALLOC(most);
    const size_t bytes = CPU_ALLOC_SIZE(most);
    if (set && sched_getaffinity(0, bytes, set) == 0)
        for (int i = 0; i < most; ++i)
            if (CPU_ISSET_S(static_cast<size_t>(i), bytes, set)) cpus.push_back(i);
    CPU_FREE(set);
    return cpus;
}

double usable_cpus() {
    return std::min(static_cast<double>(std::max<size_t>(allowed_cpus().size(), 1)), cpu_quota().amount);
}

Finding check_cpus(const Wish& w) {
    Finding f{.check = "cpus"};
    const std::vector<int> allowed = allowed_cpus();
    const Grant quota = cpu_quota();
    const auto online = std::max<int64_t>(sysconf(_SC_NPROCESSORS_ONLN), 1);
    const double usable = usable_cpus();
    const int64_t wanted = w.threads();
    f.seen =
        fmt::format("{} of {} allowed ({}), {}; {} ranks x {} workers want {}", allowed.size(), online, list_text(allowed),
                    std::isinf(quota.amount) ? "no cgroup quota" : fmt::format("quota {:.2f} ({})", quota.amount, quota.file),
                    w.c.ranks, w.c.options.workers, wanted);
    f.facts = {{"allowed", allowed}, {"online", online}, {"wanted", wanted}, {"usable", usable}};
    if (!std::isinf(quota.amount)) f.facts["quota"] = quota.amount;
    if (usable >= static_cast<double>(wanted)) return f;
    f.level = Level::finding;
    f.why =
        "ranks that share CPUs cannot spin for each other's flags: they yield and sleep, and a wait takes what the scheduler "
        "takes";
    const auto fits = std::max<int64_t>(static_cast<int64_t>(usable) / w.c.options.workers, 1);
    std::vector<std::string> cures;
    if (quota.amount < static_cast<double>(wanted)) {
        f.why += ". A quota also stops all of them for the rest of its period when it is used up";
        cures.push_back(
            fmt::format("docker update --cpus {} CONTAINER (or: resources.limits.cpu: {} in Kubernetes)", wanted, wanted));
    }
    if (static_cast<int64_t>(allowed.size()) < wanted && online >= wanted)
        cures.push_back(fmt::format("taskset -pc 0-{} $$ (in a container: docker update --cpuset-cpus 0-{} CONTAINER)",
                                    online - 1, online - 1));
    if (fits < w.c.ranks || w.c.options.workers > 1)
        cures.push_back(fmt::format("or run --ranks {} --workers {}", fits,
                                    fits == 1 && usable < static_cast<double>(w.c.options.workers) ? 1 : w.c.options.workers));
    f.cure = fmt::format("{}", fmt::join(cures, "; "));
    return f;
}

Finding check_kernels(const Wish& w, const inspect::Build& build) {
    Finding f{.check = "kernels"};
    f.seen = fmt::format("{} (best first)", fmt::join(build.kernels, ", "));
    f.facts["kernels"] = build.kernels;
    const std::string asked = option_text(*find_option("simd"), w.c.options);
    if (w.c.options.simd != Simd::automatic &&
        std::find(build.kernels.begin(), build.kernels.end(), asked) == build.kernels.end()) {
        f.level = Level::finding;
        f.why = fmt::format("--simd {} is not among them: a session does not open", asked);
        f.cure = "--simd auto";
    } else if (build.kernels.size() == 1) {
        f.level = Level::finding;
        f.why = "number formats are converted one column at a time: right, and several times slower";
        f.cure = "cmake -B build -DSWITCHYARD_SCALAR=OFF && cmake --build build, on a processor with SSSE3 or NEON";
    }
    return f;
}

Finding check_memory(const Wish& w) {
    Finding f{.check = "memory"};
    const int64_t available = field_of("/proc/meminfo", "MemAvailable", 0) * 1024;
    const Grant cgroup = memory_left();
    const auto left = static_cast<int64_t>(std::min(static_cast<double>(available), cgroup.amount));
    const int64_t most = w.needs.mapped_bytes;  // all windows are as many bytes as one process maps
    f.seen =
        fmt::format("{} available{}; {} windows of {} touch about {} with balanced routing, {} at most", bytes_text(available),
                    std::isinf(cgroup.amount) ? std::string(", no cgroup limit")
                                              : fmt::format(", cgroup leaves {} ({})", bytes_text(cgroup.amount), cgroup.file),
                    w.c.ranks, bytes_text(w.needs.window_bytes), bytes_text(w.touched()), bytes_text(most));
    f.facts = {{"available_bytes", left},
               {"touched_bytes", w.touched()},
               {"window_bytes", w.needs.window_bytes},
               {"mapped_bytes", most}};
    if (!std::isinf(cgroup.amount)) f.facts["cgroup_left_bytes"] = cgroup.amount;
    if (w.touched() > left) {
        f.level = Level::finding;
        f.why =
            "a page is taken when it is touched first; where none is left the system kills a rank, in the middle of a dispatch";
        f.cure = fmt::format(
            "run --tokens-max {} (or more ranks on another host); in a container: docker update --memory {}m CONTAINER",
            std::max<int64_t>(static_cast<int64_t>(static_cast<double>(w.c.options.tokens_max) * static_cast<double>(left) /
                                                   static_cast<double>(w.touched()) / 2),
                              1),
            (2 * w.touched() >> 20) + 1);
    } else if (most > left) {
        f.level = Level::note;
        f.why = "untouched pages cost nothing; only routing that sends everything to one rank would need more than is there";
        f.cure = fmt::format("--rows-max {} bounds a rank's rows, and turns the worst case into an error (capacity)",
                             std::max<int64_t>(2 * w.c.options.tokens_max * w.c.options.topk, 1));
    }
    return f;
}

Finding check_overcommit(const Wish& w) {
    Finding f{.check = "overcommit"};
    const int64_t mode = number_of_file("/proc/sys/vm/overcommit_memory", 0);
    f.seen = fmt::format("vm.overcommit_memory {}", mode);
    f.facts["mode"] = mode;
    if (mode != 2) return f;
    const int64_t left = (field_of("/proc/meminfo", "CommitLimit", 0) - field_of("/proc/meminfo", "Committed_AS", 0)) * 1024;
    f.seen += fmt::format(", {} left to commit", bytes_text(left));
    if (w.touched() <= left) return f;
    f.level = Level::finding;
    f.why =
        "with strict accounting every touched page of a window is charged, and where the charge is refused the rank gets "
        "SIGBUS";
    f.cure = "sysctl vm.overcommit_memory=0";
    return f;
}

// The limits of this process; ranks inherit them.
void check_limits(const Wish& w, std::vector<Finding>& all) {
    struct Limit {
        int resource;
        const char* check;
        const char* flag;    // of ulimit
        const char* docker;  // of docker run --ulimit, or ""
        int64_t unit;        // of ulimit's number
        int64_t need;
        const char* what;
        const char* why;
    };
    const int64_t size = field_of("/proc/self/status", "VmSize", 0) * 1024;
    // A helper thread reserves its stack, and an arena of malloc.
    rlimit stack = {};
    getrlimit(RLIMIT_STACK, &stack);
    const int64_t stack_bytes = stack.rlim_cur == RLIM_INFINITY ? 2 << 20 : static_cast<int64_t>(stack.rlim_cur);
    const int64_t helpers = (w.c.options.workers - 1) * (stack_bytes + (int64_t{64} << 20));
    constexpr int64_t own_files = 8;  // standard streams, a log, and what a program has open besides
    const Limit limits[] = {
        {RLIMIT_NOFILE, "open files", "-n", "nofile", 1, w.needs.descriptors + own_files, "files",
         "while a group opens, rank 0 holds a window, a process and a connection of every rank"},
        {RLIMIT_AS, "address space", "-v", "", 1024, size + w.needs.mapped_bytes + helpers, "",
         "every rank maps the windows of all ranks; only touched pages cost memory, but address space is reserved for all of "
         "them"},
        {RLIMIT_FSIZE, "file size", "-f", "fsize", 1024, w.needs.window_bytes, "",
         "a window is a memory file, and this limit holds for it"},
    };
    for (const Limit& l : limits) {
        Finding f{.check = l.check};
        rlimit limit = {};
        getrlimit(static_cast<__rlimit_resource_t>(l.resource), &limit);
        const auto text = [&](int64_t n) { return l.what[0] ? fmt::format("{} {}", n, l.what) : bytes_text(n); };
        const auto value = [](rlim_t n) { return n > static_cast<rlim_t>(INT64_MAX) ? INT64_MAX : static_cast<int64_t>(n); };
        const int64_t soft = value(limit.rlim_cur), hard = value(limit.rlim_max);
        f.seen = fmt::format("limit {}; a rank needs {}", soft == INT64_MAX ? "none" : text(soft), text(l.need));
        f.facts = {{"need", l.need}};
        if (soft != INT64_MAX) f.facts["limit"] = soft;
        if (soft < l.need) {
            f.level = Level::finding;
            f.why = l.why;
            const int64_t n = (l.need + l.unit - 1) / l.unit;
            f.cure = hard >= l.need
                         ? fmt::format("ulimit {} {}", l.flag, n)
                         : fmt::format("the hard limit is in the way too: prlimit --{}={} --pid $$ as root, then again",
                                       l.resource == RLIMIT_NOFILE ? "nofile"
                                       : l.resource == RLIMIT_AS   ? "as"
                                                                   : "fsize",
                                       l.need);
            if (l.docker[0]) f.cure += fmt::format("; in a container: docker run --ulimit {}={}", l.docker, l.need);
        }
        all.push_back(std::move(f));
    }
    Finding locked{.check = "locked memory"};
    rlimit limit = {};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    locked.seen = fmt::format("limit {}; not needed: nothing is locked",
                              limit.rlim_cur == RLIM_INFINITY ? "none" : bytes_text(static_cast<double>(limit.rlim_cur)));
    all.push_back(std::move(locked));

    Finding threads{.check = "threads"};
    const Grant left = threads_left();
    threads.seen = std::isinf(left.amount) ? std::string("no cgroup limit")
                                           : fmt::format("cgroup leaves {:.0f} ({})", left.amount, left.file);
    threads.facts = {{"wanted", w.threads()}};
    std::vector<std::string> cures;
    if (left.amount < static_cast<double>(w.threads()))
        cures.push_back(fmt::format("docker update --pids-limit {} CONTAINER", 2 * w.threads() + 64));
    getrlimit(RLIMIT_NPROC, &limit);
    // The system does not hold root to it.
    if (getuid() != 0 && limit.rlim_cur != RLIM_INFINITY) {
        const int64_t used = threads_of_this_user(), most = static_cast<int64_t>(limit.rlim_cur);
        threads.seen += fmt::format(", limit {} of this user, who has {}", most, used);
        threads.facts["limit"] = most;
        if (most - used < w.threads()) cures.push_back(fmt::format("ulimit -u {}", used + 2 * w.threads() + 64));
    }
    threads.seen += fmt::format("; {} ranks x {} workers", w.c.ranks, w.c.options.workers);
    if (!cures.empty()) {
        threads.level = Level::finding;
        threads.why = "a rank or its helpers could not be started";
        threads.cure = fmt::format("{}", fmt::join(cures, "; "));
    }
    all.push_back(std::move(threads));
}

Finding check_shared_memory() {
    Finding f{.check = "/dev/shm"};
    struct statvfs s = {};
    f.seen = statvfs("/dev/shm", &s) == 0
                 ? fmt::format("{} large", bytes_text(static_cast<double>(s.f_blocks) * static_cast<double>(s.f_frsize)))
                 : "not there";
    f.seen += "; not needed: windows are memory files without a name. Their pages count in the cgroup's memory";
    return f;
}

Finding check_huge_pages(const Wish& w) {
    Finding f{.check = "huge pages"};
    const std::string pool = "/sys/kernel/mm/hugepages/hugepages-2048kB/";
    const int64_t total = number_of_file(pool + "nr_hugepages", 0);
    const int64_t free =
        std::max<int64_t>(number_of_file(pool + "free_hugepages", 0) - number_of_file(pool + "resv_hugepages", 0), 0);
    const int64_t each = (w.needs.window_bytes + (2 << 20) - 1) >> 21, all = each * w.c.ranks;
    std::string transparent = line_of_file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    const size_t open = transparent.find('['), close = transparent.find(']');
    transparent = open < close && close != std::string::npos ? transparent.substr(open + 1, close - open - 1) : "";
    f.seen = fmt::format("{} reserved, {} free (2 MiB); all windows would take {}; transparent ones for shared memory: {}",
                         total, free, all, transparent.empty() ? "not in this kernel" : transparent);
    f.facts = {{"reserved", total}, {"free", free}, {"wanted", all}, {"shmem_enabled", transparent}};
    if (w.c.options.huge_pages == HugePages::yes && free < all) {
        f.level = Level::finding;
        f.why = "with --huge-pages yes a session does not open without them";
        f.cure = fmt::format("sysctl vm.nr_hugepages={}", total - free + all);
    } else if (transparent == "never" && free < all && w.c.options.huge_pages != HugePages::no) {
        f.level = Level::note;
        f.why = "windows lie in pages of 4 KiB; large batches then spend time in page faults and TLB misses";
        f.cure = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";
    }
    return f;
}

Finding check_numa() {
    Finding f{.check = "NUMA"};
    const std::string base = "/sys/devices/system/node/";
    const std::vector<int> nodes = list_of(line_of_file(base + "online"));
    const std::vector<int> allowed = allowed_cpus();
    std::vector<int> mine;
    for (const int node : nodes)
        for (const int cpu : list_of(line_of_file(fmt::format("{}node{}/cpulist", base, node))))
            if (std::binary_search(allowed.begin(), allowed.end(), cpu)) {
                mine.push_back(node);
                break;
            }
    f.seen =
        nodes.size() < 2 ? "one node" : fmt::format("nodes {}; this process may run on {}", list_text(nodes), list_text(mine));
    f.facts = {{"nodes", nodes}, {"allowed", mine}};
    if (mine.size() > 1) {
        f.level = Level::note;
        f.why =
            "a rank that may run on several nodes may leave the one where its window lies; one that may run on a single node "
            "has its window there";
        f.cure = fmt::format("numactl --cpunodebind={0} for a rank of node {0}, and so on for each", mine.front());
    }
    return f;
}

// One call that the library makes, tried: 0 or errno.
struct Try {
    const char* name;
    int error;
    bool needed;
    const char* since;
};

int try_shared_memory() {
    const int fd = memfd_create("switchyard-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return errno;
    int error = 0;
    if (ftruncate(fd, 4096) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) error = errno;
    if (error == 0 && (ftruncate(fd, 0) == 0 || errno != EPERM)) error = ENOTSUP;  // the seal must hold
    void* p = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (p == MAP_FAILED && error == 0) error = errno;
    if (p != MAP_FAILED) {
        if (error == 0 && madvise(p, 4096, MADV_DONTFORK) != 0) error = errno;
        munmap(p, 4096);
    }
    close(fd);
    return error;
}

int try_process_descriptor() {
    const int fd = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
    if (fd < 0) return errno;
    int error = syscall(SYS_pidfd_send_signal, fd, 0, nullptr, 0) == 0 ? 0 : errno;
    const int ends = epoll_create1(EPOLL_CLOEXEC);
    epoll_event event = {};
    event.events = EPOLLIN;
    if (error == 0 && (ends < 0 || epoll_ctl(ends, EPOLL_CTL_ADD, fd, &event) != 0)) error = errno;
    if (ends >= 0) close(ends);
    close(fd);
    return error;
}

int try_futex() {
    void* p = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return errno;
    int error = 0;
    const timespec at_once = {0, 1};
    if (syscall(SYS_futex, p, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0) < 0) error = errno;
    // The word is 0 and not 1: it must not sleep.
    if (error == 0 && (syscall(SYS_futex, p, FUTEX_WAIT, 1, &at_once, nullptr, 0) == 0 || errno != EAGAIN))
        error = errno ? errno : ENOTSUP;
    munmap(p, 4096);
    return error;
}

// Two ends of a meeting in this process: the name, who is at the other end, and a descriptor that travels.
int try_meeting() {
    const std::string name = fmt::format("switchyard-doctor-{}-{}", geteuid(), random_hex(8));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    const auto* to = reinterpret_cast<const sockaddr*>(&address);
    int fds[4] = {-1, -1, -1, -1};  // door, guest, host, one that travelled
    const auto meet = [&] {
        fds[0] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        fds[1] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (fds[0] < 0 || fds[1] < 0 || bind(fds[0], to, length) != 0 || listen(fds[0], 1) != 0 ||
            connect(fds[1], to, length) != 0)
            return errno;
        fds[2] = accept4(fds[0], nullptr, nullptr, SOCK_CLOEXEC);
        ucred peer = {};
        socklen_t bytes = sizeof peer;
        if (fds[2] < 0 || getsockopt(fds[2], SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return errno;
        if (peer.uid != geteuid()) return EPERM;
        char text = 'x';
        iovec part = {&text, 1};
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
        msghdr message = {};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(c), &fds[0], sizeof(int));
        if (sendmsg(fds[1], &message, MSG_NOSIGNAL) != 1 || recvmsg(fds[2], &message, MSG_CMSG_CLOEXEC) != 1) return errno;
        c = CMSG_FIRSTHDR(&message);
        if (!c || c->cmsg_type != SCM_RIGHTS) return EMFILE;
        std::memcpy(&fds[3], CMSG_DATA(c), sizeof(int));
        return 0;
    };
    const int error = meet();
    for (const int fd : fds)
        if (fd >= 0) close(fd);
    return error;
}

int try_wipe_on_fork() {
    void* p = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return errno;
    const int error = madvise(p, 4096, MADV_WIPEONFORK) == 0 ? 0 : errno;
    munmap(p, 4096);
    return error;
}

Finding check_kernel() {
    Finding f{.check = "kernel"};
    utsname u = {};
    uname(&u);
    const int64_t seccomp = field_of("/proc/self/status", "Seccomp", 0);
    const Try tries[] = {{"memfd_create and seals", try_shared_memory(), true, "3.17"},
                         {"pidfd_open, pidfd_send_signal, epoll", try_process_descriptor(), true, "5.3"},
                         {"futex", try_futex(), true, "2.6"},
                         {"abstract socket and SCM_RIGHTS", try_meeting(), true, "2.6"},
                         {"MADV_WIPEONFORK", try_wipe_on_fork(), false, "4.14"}};
    std::vector<std::string> good, bad, names;
    for (const Try& t : tries) {
        f.facts["calls"][t.name] = t.error == 0 ? "ok" : std::strerror(t.error);
        if (t.error == 0) {
            good.emplace_back(t.name);
            continue;
        }
        bad.push_back(fmt::format("{}: {} (Linux {})", t.name, std::strerror(t.error), t.since));
        if (t.needed) f.level = Level::finding;
        if (f.level == Level::ok) f.level = Level::note;
    }
    f.seen = fmt::format("Linux {}, seccomp {}; work: {}{}", u.release, seccomp == 0 ? "off" : "on", fmt::join(good, ", "),
                         bad.empty() ? "" : fmt::format("; FAIL: {}", fmt::join(bad, ", ")));
    f.facts["release"] = u.release;
    f.facts["seccomp"] = seccomp;
    if (f.level == Level::note) f.why = "without it each row asks the system which process it is in, about a microsecond each";
    if (f.level == Level::finding) {
        f.why = "the library makes these calls when a session opens";
        f.cure = seccomp != 0 ? "to see whether the container's profile forbids them: docker run --security-opt "
                                "seccomp=unconfined; then allow "
                                "them in the profile"
                              : "Linux 5.3 or newer; for \"Too many open files\" see the limits above";
    }
    return f;
}

Finding check_namespaces() {
    Finding f{.check = "namespaces"};
    std::vector<std::string> ids;
    for (const char* kind : {"net", "user", "pid"}) {
        char text[64] = "";
        if (readlink(fmt::format("/proc/self/ns/{}", kind).c_str(), text, sizeof text - 1) > 0) ids.emplace_back(text);
        f.facts[kind] = text;
    }
    f.seen = fmt::format("{}; ranks with different net or user numbers cannot meet, a different pid one is fine",
                         fmt::join(ids, " "));
    return f;
}

Finding check_job() {
    Finding f{.check = "job"};
    const char* world = std::getenv("WORLD_SIZE");
    const char* local = std::getenv("LOCAL_WORLD_SIZE");
    f.seen = world ? fmt::format("WORLD_SIZE {}, LOCAL_WORLD_SIZE {}", world, local ? local : "not set")
                   : "no torchrun variables here";
    if (world && local && std::strcmp(world, local) != 0) {
        f.level = Level::finding;
        f.why = "the job spans several hosts; this build joins the ranks of one host";
        f.cure = "torchrun --nnodes 1, or one group per host";
    }
    return f;
}

Finding check_build(const inspect::Build& build) {
    Finding f{.check = "build"};
    f.seen = fmt::format("switchyard {}, window format {}, {}, {}; UCX: not in this build, a group is of one host",
                         sy_version(), build.window_format, build.compiler, build.libraries);
    f.facts = {{"version", sy_version()},
               {"window_format", build.window_format},
               {"compiler", build.compiler},
               {"libraries", build.libraries},
               {"ucx", false}};
    return f;
}

// The probe takes as many ranks as there are CPUs for, of those wished for, and two at least: one alone has nobody to wait for.
Finding check_by_probe(const Wish& w, char** argv) {
    const double cpus = usable_cpus();
    const int ranks = std::clamp(std::min(w.c.ranks, static_cast<int>(cpus)), 2, probe_ranks_max);
    const auto left = std::min(static_cast<double>(field_of("/proc/meminfo", "MemAvailable", 0)) * 1024, memory_left().amount);
    if (static_cast<double>(2 * probe_bytes(ranks)) > left) {
        Finding f{.level = Level::note, .check = "probe"};
        f.seen = fmt::format("not run: it touches {}", bytes_text(probe_bytes(ranks)));
        f.why = "the little memory that is left is not worth a measurement";
        return f;
    }
    return probe(ranks, cpus, argv);
}

void print(const Finding& f) {
    fmt::print("{:14} {:8} {}\n", f.check, f.level == Level::finding ? "FINDING" : level_name(f.level), f.seen);
    if (!f.why.empty()) fmt::print("{:23} why:  {}\n", "", f.why);
    if (!f.cure.empty()) fmt::print("{:23} cure: {}\n", "", f.cure);
}

nlohmann::json json_of(const Finding& f) {
    nlohmann::json json = {
        {"check", f.check}, {"level", level_name(f.level)}, {"seen", f.seen}, {"why", f.why}, {"cure", f.cure}};
    if (!f.facts.empty()) json["facts"] = f.facts;
    return json;
}

}  // namespace

int doctor_command(int argc, char** argv) {
    CaseFlags flags;
    bool json = false, group = false, no_probe = false;
    CLI::App app(
        "Says within two seconds whether this machine or container can run a group of a given shape well: what was seen, why "
        "it matters, and the command that cures it. Exit code 0 without findings, 1 with some, 2 for bad arguments.",
        "switchyard doctor");
    app.add_flag("--group", group, "look at the groups open on this host instead: which rank is where, and who waits for whom");
    app.add_flag("--no-probe", no_probe, "measure nothing");
    app.add_flag("--json", json, "one JSON object per line");
    flags.add_to(app);
    if (const int code = parse(app, argc, argv); code >= 0) return code;
    if (is_rank()) return probe_rank();
    if (group) return show_groups(json);

    if (flags.ranks.empty()) flags.ranks = std::to_string(std::clamp(static_cast<int>(usable_cpus()), 1, ranks_max));
    Wish w{.c = read_case("", flags), .needs = {}};
    try {
        choose_landing(w.c.options, w.c.ranks);
    } catch (const Error& e) {
        throw Mistake(e.what());
    }
    if (const Status s = inspect::needs_of(w.c.options, w.c.ranks, &w.needs); !s.ok()) throw Mistake(s.text());
    const inspect::Build build = inspect::build();

    const Options& o = w.c.options;
    const auto name = [&](const char* option) { return option_text(*find_option(option), o); };
    if (!json)
        fmt::print(
            "{} rank{}, {} worker{} each   H {}  K {}  E {}  {} tokens  {}  dispatch {}  combine {}  landing {}  depth {}\n\n",
            w.c.ranks, w.c.ranks > 1 ? "s" : "", o.workers, o.workers > 1 ? "s" : "", o.hidden, o.topk, o.experts, o.tokens_max,
            name("dtype"), name("dispatch_quant"), name("combine_quant"), name("landing"), o.depth);
    size_t findings = 0, notes = 0;
    const auto show = [&](const Finding& f) {
        findings += f.level == Level::finding;
        notes += f.level == Level::note;
        if (json)
            fmt::print("{}\n", json_line(json_of(f)));
        else
            print(f);
    };
    show(check_build(build));
    show(check_cpus(w));
    show(check_kernels(w, build));
    show(check_memory(w));
    show(check_overcommit(w));
    std::vector<Finding> limits;
    check_limits(w, limits);
    for (const Finding& f : limits) show(f);
    show(check_shared_memory());
    show(check_huge_pages(w));
    show(check_numa());
    show(check_kernel());
    show(check_namespaces());
    show(check_job());
    if (!no_probe) {
        std::fflush(stdout);
        show(check_by_probe(w, argv));
    }
    if (json)
        fmt::print("{}\n", json_line({{"ranks", w.c.ranks}, {"findings", findings}, {"notes", notes}}));
    else
        fmt::print("\n{}\n", findings == 0
                                 ? "nothing stands in the way of this group"
                                 : fmt::format("{} finding{}; docs/troubleshooting.md has more about each kind of error",
                                               findings, findings > 1 ? "s" : ""));
    return findings > 0 ? 1 : 0;
}

}  // namespace switchyard::tools
