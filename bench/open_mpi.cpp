// The pipeline over Open MPI. Its ranks must have been started by mpirun.
#include <fmt/format.h>
#include <mpi.h>

#include "collective.hpp"

namespace switchyard::bench {
namespace {

void check(int code, const char* call) {
    if (code != MPI_SUCCESS) throw std::runtime_error(fmt::format("{} failed with code {}", call, code));
}

// MPI can be started and ended once per process.
class Mpi {
 public:
    static Mpi& get() {
        static Mpi mpi;
        return mpi;
    }

 private:
    Mpi() { check(MPI_Init(nullptr, nullptr), "MPI_Init"); }
    ~Mpi() { MPI_Finalize(); }
};

class OpenMpi final : public Collective {
 public:
    explicit OpenMpi(const Task& task)
        : Collective(task), counts_out_(ranks()), counts_in_(ranks()), first_out_(ranks()), first_in_(ranks()) {
        Mpi::get();
        for (const int64_t bytes : {row_bytes_out(), row_bytes_home()})
            if (find(bytes) == MPI_DATATYPE_NULL) {
                MPI_Datatype row = MPI_DATATYPE_NULL;
                check(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &row), "MPI_Type_contiguous");
                check(MPI_Type_commit(&row), "MPI_Type_commit");
                types_.push_back({bytes, row});
            }
    }
    ~OpenMpi() override {
        for (auto& [bytes, row] : types_) MPI_Type_free(&row);
    }

    std::string settings() const override {
        char version[MPI_MAX_LIBRARY_VERSION_STRING];
        int length = 0;
        MPI_Get_library_version(version, &length);
        const std::string text(version, static_cast<size_t>(length));
        return fmt::format("{}; pack and reorder as Switchyard moves rows", text.substr(0, text.find(',')));
    }

 protected:
    void exchange_counts(const int32_t* send, int32_t* received, int64_t block) override {
        const auto n = static_cast<int>(block);
        check(MPI_Alltoall(send, n, MPI_INT32_T, received, n, MPI_INT32_T, MPI_COMM_WORLD), "MPI_Alltoall");
    }

    void exchange_rows(const std::byte* send, std::span<const int64_t> send_rows, std::byte* received,
                       std::span<const int64_t> received_rows, int64_t row_bytes) override {
        const MPI_Datatype row = find(row_bytes);
        int sent = 0, got = 0;
        for (size_t p = 0; p < send_rows.size(); ++p) {
            counts_out_[p] = static_cast<int>(send_rows[p]);
            counts_in_[p] = static_cast<int>(received_rows[p]);
            first_out_[p] = sent;
            first_in_[p] = got;
            sent += counts_out_[p];
            got += counts_in_[p];
        }
        check(MPI_Alltoallv(send, counts_out_.data(), first_out_.data(), row, received, counts_in_.data(), first_in_.data(),
                            row, MPI_COMM_WORLD),
              "MPI_Alltoallv");
    }

 private:
    size_t ranks() const { return static_cast<size_t>(task_.ranks()); }
    MPI_Datatype find(int64_t bytes) const {
        for (const auto& [known, row] : types_)
            if (known == bytes) return row;
        return MPI_DATATYPE_NULL;
    }

    std::vector<std::pair<int64_t, MPI_Datatype>> types_;
    std::vector<int> counts_out_, counts_in_, first_out_, first_in_;
};

}  // namespace

std::unique_ptr<Contestant> make_open_mpi(const Task& task) {
    return std::make_unique<OpenMpi>(task);
}

}  // namespace switchyard::bench
