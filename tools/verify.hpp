// Golden against output, file by file: exact, or the first difference.
#pragma once

#include "case.hpp"

namespace switchyard::tools {

/// One file of golden.
struct FileVerdict {
    std::string name;  ///< chip_0/x_0.bin
    bool equal = false;
    std::string text;  ///< what differs: first difference with row, column, both values, and the largest distance in ulp
};

/// Compares every file under `golden` with its namesake under `output`. Throws Mistake when there is no golden.
std::vector<FileVerdict> compare_folders(const Case& c, const std::filesystem::path& golden,
                                         const std::filesystem::path& output);

}  // namespace switchyard::tools
