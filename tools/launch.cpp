#include "launch.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace switchyard::tools {
namespace {

constexpr const char* report_variable = "SWITCHYARD_REPORT_FD";

struct Child {
    pid_t process = -1;
    int pipe = -1;
    std::string heard;
    bool ended = false;
};

[[noreturn]] void become_rank(int rank, int ranks, const std::string& port, const std::string& token, int pipe, char** argv,
                              pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);  // it died before the line above
    setenv("RANK", std::to_string(rank).c_str(), 1);
    setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
    setenv("WORLD_SIZE", std::to_string(ranks).c_str(), 1);
    setenv("LOCAL_WORLD_SIZE", std::to_string(ranks).c_str(), 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", port.c_str(), 1);
    setenv("SWITCHYARD_TOKEN", token.c_str(), 1);
    setenv(report_variable, std::to_string(pipe).c_str(), 1);
    fcntl(pipe, F_SETFD, 0);  // this one end survives the exec
    execv("/proc/self/exe", argv);
    std::fprintf(stderr, "switchyard: cannot start rank %d: %s\n", rank, std::strerror(errno));
    _exit(127);
}

}  // namespace

std::string random_hex(size_t bytes) {
    std::string text;
    unsigned char data[32];
    if (getrandom(data, bytes, 0) != static_cast<ssize_t>(bytes)) throw std::runtime_error("getrandom failed");
    for (size_t i = 0; i < bytes; ++i) text += fmt::format("{:02x}", data[i]);
    return text;
}

bool is_rank() {
    return std::getenv(report_variable) != nullptr;
}

void report(const nlohmann::json& message) {
    const char* number = std::getenv(report_variable);
    if (number == nullptr) return;  // not started by launch(): nobody listens
    static const int pipe = std::atoi(number);
    const std::string line = message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    for (size_t at = 0; at < line.size();) {
        const ssize_t n = write(pipe, line.data() + at, line.size() - at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return;  // the parent is gone, and this process with it
        at += static_cast<size_t>(n);
    }
}

std::vector<RankEnd> launch(int ranks, char** argv, const Patience& patience,
                            const std::function<void(int, const nlohmann::json&)>& heard) {
    const std::string port = random_hex(8), token = random_hex(16);
    const pid_t parent = getpid();
    std::vector<Child> children(static_cast<size_t>(ranks));
    std::vector<RankEnd> ends(children.size());
    for (int r = 0; r < ranks; ++r) {
        int ends_of_pipe[2];
        if (pipe2(ends_of_pipe, O_CLOEXEC) != 0)
            throw std::runtime_error(fmt::format("no pipe for rank {}: {}", r, std::strerror(errno)));
        const pid_t process = fork();
        if (process == 0) become_rank(r, ranks, port, token, ends_of_pipe[1], argv, parent);
        close(ends_of_pipe[1]);
        if (process < 0) throw std::runtime_error(fmt::format("no process for rank {}: {}", r, std::strerror(errno)));
        children[static_cast<size_t>(r)].process = process;
        children[static_cast<size_t>(r)].pipe = ends_of_pipe[0];
    }

    using Clock = std::chrono::steady_clock;
    auto kill_at = Clock::time_point::max();
    size_t ended = 0;
    while (ended < children.size()) {
        std::vector<pollfd> polls;
        std::vector<size_t> of;
        for (size_t r = 0; r < children.size(); ++r)
            if (children[r].pipe >= 0) polls.push_back({children[r].pipe, POLLIN, 0}), of.push_back(r);
        poll(polls.data(), polls.size(), polls.empty() ? 1 : 100);
        for (size_t i = 0; i < polls.size(); ++i) {
            if (!polls[i].revents) continue;
            Child& child = children[of[i]];
            char data[65536];
            const ssize_t n = read(child.pipe, data, sizeof data);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) {
                close(std::exchange(child.pipe, -1));
                continue;
            }
            child.heard.append(data, static_cast<size_t>(n));
            size_t end;
            while ((end = child.heard.find('\n')) != std::string::npos) {
                const auto message = nlohmann::json::parse(child.heard.substr(0, end), nullptr, false);
                child.heard.erase(0, end + 1);
                if (!message.is_discarded()) heard(static_cast<int>(of[i]), message);
            }
        }
        for (size_t r = 0; r < children.size(); ++r) {
            Child& child = children[r];
            int status = 0;
            // Only once its pipe is read to the end: nothing it reported gets lost.
            if (child.ended || child.pipe >= 0 || waitpid(child.process, &status, WNOHANG) != child.process) continue;
            child.ended = true;
            ++ended;
            ends[r].exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
            if (WIFSIGNALED(status)) ends[r].signal = WTERMSIG(status);
            const int64_t wait_ms =
                ends[r].exit_code != 0 ? patience.after_failure_ms(static_cast<int>(r)) : patience.after_end_ms;
            kill_at = std::min(kill_at, Clock::now() + std::chrono::milliseconds(std::min(wait_ms, int64_t{1} << 40)));
        }
        if (Clock::now() >= kill_at)
            for (size_t r = 0; r < children.size(); ++r)
                if (!children[r].ended) {
                    ends[r].stopped_by_us = true;
                    kill(children[r].process, SIGKILL);
                }
    }
    return ends;
}

}  // namespace switchyard::tools
