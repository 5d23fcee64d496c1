// Whether this is still the process that made an object, or a child forked since.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace switchyard {

/// A page that the system empties in a forked child: asking costs one load, where getpid() is a call into the system of about
/// a microsecond on some machines, and is asked once per row.
class Birthplace {
 public:
    Birthplace() : page_(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
        if (page_ == MAP_FAILED) throw std::bad_alloc();
        is_marked_ = madvise(page_, 4096, MADV_WIPEONFORK) == 0;  // Linux 4.14
        *static_cast<volatile char*>(page_) = 1;
    }
    ~Birthplace() { munmap(page_, 4096); }
    Birthplace(const Birthplace&) = delete;
    Birthplace& operator=(const Birthplace&) = delete;

    bool here() const { return is_marked_ ? *static_cast<const volatile char*>(page_) != 0 : getpid() == process_; }
    int process() const { return process_; }

 private:
    void* page_;
    bool is_marked_ = false;
    const int process_ = getpid();
};

}  // namespace switchyard
