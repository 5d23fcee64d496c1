// switchyard gen: makes a case with golden data. The work is done by the independent numpy reference (tools/reference.py),
// which this program carries inside and hands to a Python interpreter.
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "case.hpp"
#include "commands.hpp"

namespace switchyard::tools {

extern const char* const reference_script;  // generated from reference.py by the build

namespace {

// True when `python -c "import numpy"` works.
bool has_numpy(const std::string& python) {
    const pid_t child = fork();
    if (child == 0) {
        if (!std::freopen("/dev/null", "w", stderr)) _exit(1);
        execlp(python.c_str(), python.c_str(), "-c", "import numpy", static_cast<char*>(nullptr));
        _exit(127);
    }
    int status = 0;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::string find_python() {
    std::vector<std::string> candidates = {"/usr/bin/python3", "python3"};
    if (const char* chosen = std::getenv("SWITCHYARD_PYTHON")) candidates = {chosen};
    for (const std::string& python : candidates)
        if (has_numpy(python)) return python;
    throw Mistake(
        fmt::format("gen needs Python 3 with numpy; tried {}. Install it (apt install python3-numpy), or name an "
                    "interpreter that has it in SWITCHYARD_PYTHON",
                    fmt::join(candidates, ", ")));
}

}  // namespace

int gen_command(int argc, char** argv) {
    const std::string python = find_python();
    const int script = memfd_create("reference.py", 0);  // stays open across exec: Python reads it there
    const size_t bytes = std::strlen(reference_script);
    errno = EFBIG;  // when only a part could be written: a limit of file sizes (ulimit -f)
    if (script < 0 || write(script, reference_script, bytes) != static_cast<ssize_t>(bytes))
        throw Mistake(fmt::format("no memory file for the reference script: {}", std::strerror(errno)));
    std::string path = fmt::format("/proc/self/fd/{}", script);
    std::vector<char*> arguments = {const_cast<char*>(python.c_str()), path.data()};
    for (int i = 1; i < argc; ++i) arguments.push_back(argv[i]);  // "gen DIR ..."
    arguments.push_back(nullptr);
    setenv("PYTHONDONTWRITEBYTECODE", "1", 1);
    setenv("SWITCHYARD_PROGRAM", "switchyard", 1);
    execvp(python.c_str(), arguments.data());
    throw Mistake(fmt::format("{} cannot be started: {}", python, std::strerror(errno)));
}

}  // namespace switchyard::tools
