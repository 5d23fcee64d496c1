#include "processes.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include "case.hpp"
#include "launch.hpp"

namespace switchyard::bench {
namespace {

constexpr const char* tree_variable = "SWITCHYARD_BENCH_TREE";
constexpr const char* folder_variable = "SWITCHYARD_BENCH_FOLDER";
constexpr const char* mpi_rank_variable = "OMPI_COMM_WORLD_RANK";

class TemporaryFolder {
 public:
    TemporaryFolder() {
        std::string pattern = (std::filesystem::temp_directory_path() / "switchyard-bench-XXXXXX").string();
        if (!mkdtemp(pattern.data()))
            throw tools::Mistake(fmt::format("no temporary folder {}: {}", pattern, std::strerror(errno)));
        path_ = pattern;
    }
    ~TemporaryFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    const std::filesystem::path& path() const { return path_; }

 private:
    std::filesystem::path path_;
};

int usable_cpus() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// Best for one host: shared memory with single copies (CMA), no binding, so that ranks and kernels may use any CPU; ranks that
// share CPUs give theirs away while they wait.
std::vector<std::string> mpirun_arguments(int ranks) {
    std::vector<std::string> a = {"mpirun",    "-n",  std::to_string(ranks), "--oversubscribe", "--allow-run-as-root",
                                  "--bind-to", "none"};
    const auto set = [&](const char* name, const char* value) { a.insert(a.end(), {"--mca", name, value}); };
    set("plm", "isolated");  // no look for ssh
    set("pml", "ob1");
    set("btl", "self,vader");
    set("btl_vader_single_copy_mechanism", "cma");
    set("mpi_yield_when_idle", ranks > usable_cpus() ? "1" : "0");
    return a;
}

std::filesystem::path lines_of(const std::filesystem::path& folder, int rank) {
    return folder / fmt::format("rank_{}.jsonl", rank);
}

// Reads what has been appended to each rank's file since the last look.
class Lines {
 public:
    Lines(const std::filesystem::path& folder, int ranks) : folder_(folder), read_(static_cast<size_t>(ranks)) {}
    void look(const Heard& heard) {
        for (size_t r = 0; r < read_.size(); ++r) {
            std::ifstream in(lines_of(folder_, static_cast<int>(r)), std::ios::binary);
            if (!in) continue;
            in.seekg(read_[r]);
            std::string line;
            // A line without its end is still being written.
            while (std::getline(in, line) && !in.eof()) {
                read_[r] = in.tellg();
                const auto message = nlohmann::json::parse(line, nullptr, false);
                if (!message.is_discarded()) heard(static_cast<int>(r), message);
            }
        }
    }

 private:
    const std::filesystem::path folder_;
    std::vector<std::streamoff> read_;
};

std::string play_by_mpirun(const std::filesystem::path& folder, int ranks, char** argv, const Heard& heard) {
    std::vector<std::string> text = mpirun_arguments(ranks);
    text.push_back(std::filesystem::read_symlink("/proc/self/exe").string());
    for (int i = 1; argv[i]; ++i) text.push_back(argv[i]);
    std::vector<char*> arguments;
    for (std::string& t : text) arguments.push_back(t.data());
    arguments.push_back(nullptr);

    const std::filesystem::path log = folder / "mpirun.log";
    const pid_t parent = getpid();
    const pid_t process = fork();
    if (process < 0) return fmt::format("no process for mpirun: {}", std::strerror(errno));
    if (process == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);  // it died before the line above
        setenv("MASTER_ADDR", "127.0.0.1", 1);
        setenv("MASTER_PORT", tools::random_hex(8).c_str(), 1);
        setenv("SWITCHYARD_TOKEN", tools::random_hex(16).c_str(), 1);
        const int in = open("/dev/null", O_RDONLY), out = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(in, 0);
        dup2(out, 1);
        dup2(out, 2);
        execvp("mpirun", arguments.data());
        dprintf(2, "mpirun cannot be started: %s. Install openmpi-bin.\n", std::strerror(errno));
        _exit(127);
    }
    Lines lines(folder, ranks);
    int status = 0;
    while (waitpid(process, &status, WNOHANG) == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        lines.look(heard);
    }
    lines.look(heard);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "";
    std::ifstream in(log);
    const std::string said((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    return fmt::format("the ranks under mpirun failed:\n{}", said.size() > 2000 ? said.substr(said.size() - 2000) : said);
}

}  // namespace

int tree_of_rank() {
    const char* tree = std::getenv(tree_variable);
    return tree && (tools::is_rank() || std::getenv(mpi_rank_variable)) ? std::atoi(tree) : -1;
}

void prepare_rank() {
    if (tools::is_rank()) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setenv("RANK", std::getenv(mpi_rank_variable), 1);
    setenv("WORLD_SIZE", std::getenv("OMPI_COMM_WORLD_SIZE"), 1);
    setenv("LOCAL_WORLD_SIZE", std::getenv("OMPI_COMM_WORLD_SIZE"), 1);
}

void tell(const nlohmann::json& message) {
    if (tools::is_rank()) return tools::report(message);
    static std::ofstream out(lines_of(meeting_folder(), std::atoi(std::getenv(mpi_rank_variable))),
                             std::ios::binary | std::ios::app);
    out << message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n' << std::flush;
}

std::filesystem::path meeting_folder() {
    return std::getenv(folder_variable);
}

std::string mpirun_text(int ranks) {
    const std::vector<std::string> arguments = mpirun_arguments(ranks);
    return fmt::format("{}", fmt::join(arguments, " "));
}

std::string play_tree(int tree, int ranks, bool by_mpirun, char** argv, const Heard& heard) {
    const TemporaryFolder folder;
    setenv(tree_variable, std::to_string(tree).c_str(), 1);
    setenv(folder_variable, folder.path().c_str(), 1);
    if (by_mpirun) return play_by_mpirun(folder.path(), ranks, argv, heard);
    const tools::Patience patience{.after_failure_ms = [](int) { return int64_t{10'000}; }, .after_end_ms = 60'000};
    const std::vector<tools::RankEnd> ends = tools::launch(ranks, argv, patience, heard);
    std::string text;
    for (size_t r = 0; r < ends.size(); ++r) {
        if (ends[r].signal && !ends[r].stopped_by_us)
            text += fmt::format("rank {} was killed by signal {}. ", r, ends[r].signal);
        if (ends[r].exit_code && !ends[r].signal) text += fmt::format("rank {} failed. ", r);
    }
    return text;
}

}  // namespace switchyard::bench
