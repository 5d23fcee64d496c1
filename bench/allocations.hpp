// Counts calls of operator new in this process, in any thread: what "allocates nothing" is judged by.
#pragma once

#include <cstdint>

namespace switchyard::bench {

int64_t allocations();

}  // namespace switchyard::bench
