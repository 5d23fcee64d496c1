// How ranks and sizes are named in the error texts of the transports.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace switchyard {

/// "rank 2", "ranks 2 and 3", "ranks 0, 2 and 3"; of a long list the first ones and how many more.
std::string ranks_text(std::span<const int> ranks);

/// "640 bytes", "78 MiB", "1.5 TiB": at most four digits.
std::string bytes_text(uint64_t bytes);

}  // namespace switchyard
