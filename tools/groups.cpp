// `switchyard doctor --group`: the groups that are open on this host, from outside. Windows are found in /proc/PID/maps and
// read with process_vm_readv; nothing is written, and no process is stopped for it.
#include <dirent.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "doctor.hpp"
#include "switchyard/inspect.hpp"

namespace switchyard::tools {
namespace {

using inspect::Life;

constexpr int looks = 11;
constexpr auto pause = std::chrono::milliseconds(30);

// A memory file, and where processes have it mapped.
struct Mapped {
    std::vector<std::pair<pid_t, uint64_t>> at;  // process, address of the first byte
    std::set<pid_t> processes() const {
        std::set<pid_t> ids;
        for (const auto& [id, address] : at) ids.insert(id);
        return ids;
    }
};
using Windows = std::map<std::string, Mapped>;  // by device and inode

struct Found {
    Windows windows;
    std::set<pid_t> opening;                    // have a window that is not mapped, or not marked yet
    std::map<std::string, std::string> unread;  // what is wrong with windows that cannot be understood, and the cure
};

template <class F>
void each_entry(const std::string& folder, F f) {
    DIR* dir = opendir(folder.c_str());
    if (!dir) return;
    while (const dirent* entry = readdir(dir)) f(std::string(entry->d_name));
    closedir(dir);
}

bool is_window(const char* path) {
    return std::strstr(path, (std::string("/memfd:") + inspect::window_name).c_str()) != nullptr;
}

Found find_windows() {
    Found found;
    each_entry("/proc", [&](const std::string& name) {
        if (name.find_first_not_of("0123456789") != std::string::npos) return;
        const pid_t id = std::stoi(name);
        struct stat owner = {};
        if (stat(("/proc/" + name).c_str(), &owner) != 0 || (geteuid() != 0 && owner.st_uid != geteuid())) return;
        bool maps_one = false;
        std::ifstream maps("/proc/" + name + "/maps");
        for (std::string line; std::getline(maps, line);) {
            uint64_t first = 0, offset = 0, inode = 0;
            char device[32] = "";
            int path = 0;
            if (std::sscanf(line.c_str(), "%" SCNx64 "-%*x %*s %" SCNx64 " %31s %" SCNu64 " %n", &first, &offset, device,
                            &inode, &path) < 4 ||
                path == 0 || !is_window(line.c_str() + path))
                continue;
            maps_one = true;
            if (offset == 0) found.windows[fmt::format("{}:{}", device, inode)].at.emplace_back(id, first);
        }
        if (maps_one) return;
        bool has_one = false;
        each_entry("/proc/" + name + "/fd", [&](const std::string& fd) {
            char target[256] = "";
            if (readlink(("/proc/" + name + "/fd/" + fd).c_str(), target, sizeof target - 1) > 0)
                has_one = has_one || is_window(target);
        });
        if (has_one) found.opening.insert(id);
    });
    return found;
}

// Copies from another process; errno on refusal.
bool read_process(pid_t id, uint64_t address, void* to, size_t bytes) {
    iovec local = {to, bytes};
    iovec remote = {reinterpret_cast<void*>(address), bytes};
    return process_vm_readv(id, &local, 1, &remote, 1, 0) == static_cast<ssize_t>(bytes);
}

// Any process that maps it will do: all see the same bytes, also those of a rank that has died.
bool read_window_of(const Mapped& window, uint64_t offset, void* to, size_t bytes) {
    int error = ESRCH;
    for (const auto& [id, address] : window.at) {
        if (read_process(id, address + offset, to, bytes)) return true;
        if (errno != ESRCH) error = errno;
    }
    errno = error;
    return false;
}

// The state letter of a process, 'X' when there is none.
char state_of(pid_t id) {
    const std::string line = line_of_file(fmt::format("/proc/{}/stat", id));
    const size_t close = line.rfind(')');
    return close != std::string::npos && close + 2 < line.size() ? line[close + 2] : 'X';
}

Life life_of(char state) {
    switch (state) {
        case 'T':
        case 't': return Life::stopped;
        case 'Z':
        case 'X':
        case 'x': return Life::ended;
        default: return Life::running;
    }
}

const char* state_text(char state) {
    switch (state) {
        case 'R': return "running";
        case 'S': return "sleeping";
        case 'D': return "in disk wait";
        case 'T': return "stopped";
        case 't': return "traced";
        case 'Z': return "zombie";
        case 'X':
        case 'x': return "gone";
        case 'I': return "idle";
        default: return "?";
    }
}

// The id that a process has in its own process namespace.
pid_t own_id_of(pid_t id) {
    std::ifstream in(fmt::format("/proc/{}/status", id));
    for (std::string line; std::getline(in, line);)
        if (line.starts_with("NSpid:")) {
            std::istringstream numbers(line.substr(6));
            pid_t last = id;
            while (numbers >> last) {
            }
            return last;
        }
    return id;
}

struct OpenGroup {
    inspect::Window any;
    std::vector<Mapped> windows;            // [R]; empty `at` where none was found
    std::vector<int64_t> ids;               // [R] as each process sees itself
    std::map<pid_t, pid_t> processes;       // that map the windows, and the id that each has in its own process namespace
    int alike = 1;                          // groups of the same processes and shape
    std::vector<inspect::Process> members;  // [R]
    std::vector<char> states;               // [R]
};

// Which process of this host plays each rank: of those that map the windows the one that calls itself so. A rank that none of
// them is has ended, or has closed.
void find_processes(OpenGroup& g) {
    for (size_t r = 0; r < g.windows.size(); ++r) {
        std::vector<pid_t> fitting;
        for (const auto& [id, own_id] : g.processes)
            if (own_id == g.ids[r]) fitting.push_back(id);
        inspect::Process& p = g.members[r];
        char& state = g.states[r];
        if (fitting.size() == 1) {
            p.id = fitting[0];
            state = state_of(fitting[0]);
            p.life = life_of(state);
        } else if (fitting.empty() && g.ids[r] > 0) {
            p.id = g.ids[r];
            p.life = Life::ended;
            // A zombie maps nothing any more. Another process may have the number by now.
            state = state_of(static_cast<pid_t>(g.ids[r])) == 'Z' ? 'Z' : 'X';
        } else {
            p.life = Life::unknown;
            state = '?';
        }
    }
}

inspect::Group look_at(OpenGroup& g) {
    find_processes(g);
    return inspect::look(g.any, g.members, [&](int rank, uint64_t offset, void* to, size_t bytes) {
        return read_window_of(g.windows[static_cast<size_t>(rank)], offset, to, bytes);
    });
}

std::string shape_text(const inspect::Window& w) {
    const Options& o = w.options;
    const auto name = [&](const char* option) { return option_text(*find_option(option), o); };
    return fmt::format("H {}  K {}  E {}  tokens {}  {}  dispatch {}  combine {}  landing {}  depth {}", o.hidden, o.topk,
                       o.experts, o.tokens_max, name("dtype"), name("dispatch_quant"), name("combine_quant"), name("landing"),
                       o.depth);
}

// Windows by the processes that map them and by their shape. Two sessions of the same processes and shape are told apart by
// where their windows lie in one of the processes: their flags are their own either way.
std::vector<OpenGroup> groups_of(Found& found) {
    struct Seen {
        inspect::Window window;
        const Mapped* mapped;
    };
    std::map<std::pair<std::set<pid_t>, std::string>, std::vector<Seen>> alike;
    for (const auto& [key, mapped] : found.windows) {
        std::byte header[inspect::header_bytes];
        Seen seen{{}, &mapped};
        const std::set<pid_t> processes = mapped.processes();
        if (!read_window_of(mapped, 0, header, sizeof header)) {
            if (errno == ESRCH || errno == EFAULT) continue;  // it has ended since
            found.unread[fmt::format("the windows of processes {} cannot be read: {}", fmt::join(processes, ", "),
                                     std::strerror(errno))] =
                "read them as root (sudo switchyard doctor --group), or allow it: sysctl kernel.yama.ptrace_scope=0; in a "
                "container: docker run --cap-add SYS_PTRACE";
            continue;
        }
        const Status s = inspect::read_window(header, &seen.window);
        if (s.code() == Code::stale) {
            found.opening.insert(processes.begin(), processes.end());
            continue;
        }
        if (!s.ok()) {
            found.unread[fmt::format("processes {}: {}", fmt::join(processes, ", "), s.text())] = "";
            continue;
        }
        alike[{mapped.processes(), fmt::format("{} {} {}", seen.window.ranks, seen.window.bytes, shape_text(seen.window))}]
            .push_back(seen);
    }
    std::vector<OpenGroup> groups;
    for (auto& [key, all] : alike) {
        std::sort(all.begin(), all.end(),
                  [](const Seen& a, const Seen& b) { return a.mapped->at.front().second > b.mapped->at.front().second; });
        std::vector<size_t> used(static_cast<size_t>(all.front().window.ranks));
        const size_t first = groups.size();
        for (const Seen& s : all) {
            const auto r = static_cast<size_t>(s.window.rank);
            const size_t n = first + used[r]++;
            if (n == groups.size()) {
                OpenGroup g;
                g.any = s.window;
                g.windows.resize(used.size());
                g.ids.resize(used.size());
                g.members.resize(used.size());
                g.states.resize(used.size(), '?');
                for (const pid_t id : key.first) g.processes[id] = own_id_of(id);
                groups.push_back(std::move(g));
            }
            groups[n].windows[r] = *s.mapped;
            groups[n].ids[r] = s.window.process;
        }
        for (size_t n = first; n < groups.size(); ++n) groups[n].alike = static_cast<int>(groups.size() - first);
    }
    return groups;
}

bool same(const inspect::Group& a, const inspect::Group& b) {
    return std::equal(a.members.begin(), a.members.end(), b.members.begin(), b.members.end(),
                      [](const inspect::Member& x, const inspect::Member& y) { return x.told == y.told; });
}

uint64_t newest_epoch(const inspect::Group& g) {
    uint64_t newest = 0;
    for (const inspect::Member& m : g.members) newest = std::max({newest, m.told.counted, m.told.arrived});
    return newest;
}

const char* phase_name(inspect::Phase phase) {
    using inspect::Phase;
    switch (phase) {
        case Phase::unknown: return "unknown";
        case Phase::fresh: return "fresh";
        case Phase::gate: return "gate";
        case Phase::counts: return "counts";
        case Phase::sending: return "sending";
        case Phase::rows: return "rows";
        case Phase::batch: return "batch";
        case Phase::output: return "output";
        case Phase::between: return "between";
        case Phase::departed: return "departed";
        case Phase::shrinking: return "shrinking";
        case Phase::closed: return "closed";
        case Phase::left: return "left";
        case Phase::ended: return "ended";
    }
    return "unknown";
}

nlohmann::json json_of(const OpenGroup& g, const inspect::Group& seen, const std::vector<inspect::Remark>& remarks, bool moves,
                       double epochs_per_s, double seconds) {
    nlohmann::json members = nlohmann::json::array(), said = nlohmann::json::array();
    for (const inspect::Member& m : seen.members)
        members.push_back(
            {{"rank", m.rank},
             {"process", m.process.id},
             {"state", state_text(g.states[static_cast<size_t>(m.rank)])},
             {"counted", m.told.counted},
             {"arrived", m.told.arrived},
             {"returned", m.told.returned},
             {"gone", m.told.gone},
             {"closed", m.told.closed},
             {"waited_s", m.waited_ms < 0 ? nlohmann::json() : nlohmann::json(static_cast<double>(m.waited_ms) / 1e3)},
             {"phase", phase_name(m.phase)},
             {"epoch", m.epoch},
             {"awaited", m.awaited},
             {"code", code_name(m.code)},
             {"reason", m.reason},
             {"text", inspect::phase_text(m)}});
    for (const inspect::Remark& r : remarks) said.push_back({{"trouble", r.is_trouble}, {"text", r.text}, {"cure", r.cure}});
    const Options& o = g.any.options;
    return {{"ranks", g.any.ranks},
            {"hidden", o.hidden},
            {"topk", o.topk},
            {"experts", o.experts},
            {"tokens_max", o.tokens_max},
            {"depth", o.depth},
            {"generation", seen.generation},
            {"window_bytes", g.any.bytes},
            {"landing", option_text(*find_option("landing"), o)},
            {"moves", moves},
            {"epochs_per_s", epochs_per_s},
            {"watched_s", seconds},
            {"members", members},
            {"remarks", said}};
}

void print_group(const OpenGroup& g, const inspect::Group& seen, const std::vector<inspect::Remark>& remarks, bool moves,
                 double epochs_per_s, double seconds) {
    fmt::print("group of {} rank{}   {}   windows of {:.1f} MiB{}\n\n", g.any.ranks, g.any.ranks > 1 ? "s" : "",
               shape_text(g.any), static_cast<double>(g.any.bytes) / 0x1p20,
               seen.generation > 0 ? fmt::format("   shrunk {} time{}", seen.generation, seen.generation > 1 ? "s" : "") : "");
    fmt::print("rank   process  state         counted   arrived  returned      left  in a call for  does\n");
    for (const inspect::Member& m : seen.members)
        fmt::print("{:4} {:9}  {:12} {:8} {:9} {:9} {:9} {:>14}  {}\n", m.rank, m.process.id,
                   state_text(g.states[static_cast<size_t>(m.rank)]), m.told.counted, m.told.arrived, m.told.returned,
                   m.told.gone, m.waited_ms < 0 ? "-" : fmt::format("{:.1f} s", static_cast<double>(m.waited_ms) / 1e3),
                   inspect::phase_text(m));
    if (g.alike > 1)
        fmt::print(
            "\n{} groups have these processes and this shape; which windows belong together was told by their place in "
            "memory.\n",
            g.alike);
    if (moves)
        fmt::print("\nit moves: {:.0f} epochs a second; what the ranks do is of one moment\n", epochs_per_s);
    else
        fmt::print("\nno flag has changed in {:.1f} s of looking\n", seconds);
    for (const inspect::Remark& r : remarks) {
        fmt::print("{} {}\n", r.is_trouble ? "!" : "-", r.text);
        if (!r.cure.empty()) fmt::print("  -> {}\n", r.cure);
    }
    fmt::print("\n");
}

}  // namespace

int show_groups(bool json) {
    Found found = find_windows();
    std::vector<OpenGroup> groups = groups_of(found);

    // All are watched at the same time: three tenths of a second, whatever their number.
    std::vector<inspect::Group> before, now;
    const auto start = std::chrono::steady_clock::now();
    for (OpenGroup& g : groups) before.push_back(look_at(g));
    now = before;
    for (int i = 1; i < looks && !groups.empty(); ++i) {
        std::this_thread::sleep_for(pause);
        for (size_t n = 0; n < groups.size(); ++n) now[n] = look_at(groups[n]);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

    size_t trouble = found.unread.size();
    for (size_t n = 0; n < groups.size(); ++n) {
        const bool moves = !same(before[n], now[n]);
        const uint64_t was = newest_epoch(before[n]), is = newest_epoch(now[n]);
        const double rate = static_cast<double>(is - std::min(was, is)) / seconds;
        const std::vector<inspect::Remark> said = moves ? std::vector<inspect::Remark>() : inspect::remarks(now[n]);
        for (const inspect::Remark& r : said) trouble += r.is_trouble;
        if (json)
            fmt::print("{}\n", json_line(json_of(groups[n], now[n], said, moves, rate, seconds)));
        else
            print_group(groups[n], now[n], said, moves, rate, seconds);
    }
    if (json) {
        fmt::print(
            "{}\n",
            json_line(
                {{"groups", groups.size()}, {"opening", found.opening}, {"unread", found.unread}, {"findings", trouble}}));
    } else {
        for (const auto& [text, cure] : found.unread) fmt::print("! {}{}{}\n", text, cure.empty() ? "" : "\n  -> ", cure);
        if (!found.opening.empty())
            fmt::print("process{} {} wait{} in Session::open for the other ranks\n", found.opening.size() > 1 ? "es" : "",
                       fmt::join(found.opening, ", "), found.opening.size() > 1 ? "" : "s");
        if (groups.empty() && found.unread.empty() && found.opening.empty())
            fmt::print("no group of {} is open on this host (ranks that are threads of one process do not show)\n",
                       geteuid() == 0 ? "any user" : "this user");
    }
    return trouble > 0 ? 1 : 0;
}

}  // namespace switchyard::tools
