// The pipeline over gloo: what PyTorch's all_to_all_single does on CPUs. gloo has no transport for one host but TCP.
#include <gloo/alltoall.h>
#include <gloo/alltoallv.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <chrono>

#include "collective.hpp"
#include "processes.hpp"

namespace switchyard::bench {
namespace {

class Gloo final : public Collective {
 public:
    explicit Gloo(const Task& task) : Collective(task) {
        // Ranks find each other by files, in a folder of this contestant alone.
        std::string name = task.group.name;
        std::replace_if(
            name.begin(), name.end(), [](char c) { return c == '/' || c == ':'; }, '_');
        const std::filesystem::path folder = meeting_folder() / ("gloo_" + name);
        std::filesystem::create_directories(folder);
        ::gloo::transport::tcp::attr where;
        where.iface = "lo";
        auto device = ::gloo::transport::tcp::CreateDevice(where);
        ::gloo::rendezvous::FileStore store(folder.string());
        auto context = std::make_shared<::gloo::rendezvous::Context>(task.rank(), task.ranks());
        context->setTimeout(std::chrono::seconds(120));
        context->connectFullMesh(store, device);
        context_ = context;
    }

    std::string settings() const override { return "TCP on lo, one device; pack and reorder as Switchyard moves rows"; }

 protected:
    void exchange_counts(const int32_t* send, int32_t* received, int64_t block) override {
        ::gloo::AlltoallOptions options(context_);
        const auto n = static_cast<size_t>(block * task_.ranks());
        options.setInput(const_cast<int32_t*>(send), n);
        options.setOutput(received, n);
        options.setTag(tag_++);
        ::gloo::alltoall(options);
    }

    void exchange_rows(const std::byte* send, std::span<const int64_t> send_rows, std::byte* received,
                       std::span<const int64_t> received_rows, int64_t row_bytes) override {
        const auto bytes_of = [&](std::span<const int64_t> rows) {
            std::vector<int64_t> bytes;
            for (const int64_t n : rows) bytes.push_back(n * row_bytes);
            return bytes;
        };
        ::gloo::AlltoallvOptions options(context_);
        options.setInput(reinterpret_cast<uint8_t*>(const_cast<std::byte*>(send)), bytes_of(send_rows));
        options.setOutput(reinterpret_cast<uint8_t*>(received), bytes_of(received_rows));
        options.setTag(tag_++);
        ::gloo::alltoallv(options);
    }

 private:
    std::shared_ptr<::gloo::Context> context_;
    uint32_t tag_ = 0;
};

}  // namespace

std::unique_ptr<Contestant> make_gloo(const Task& task) {
    return std::make_unique<Gloo>(task);
}

}  // namespace switchyard::bench
