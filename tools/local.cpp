// switchyard verify --local: the routing of a case without any communication, rank by rank; verify --landings: every landing on
// threads of this process, against the reference and against each other.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "commands.hpp"
#include "switchyard/exchange.hpp"
#include "switchyard/reference.hpp"
#include "switchyard/session.hpp"

namespace switchyard::tools {
namespace {

Input input_of(const Case& c, int rank) {
    return c.folder.empty() ? make_input(c, rank) : read_input(c, rank);
}

// What is wrong with the routing of one rank, or "": ids in range, and packing by expert and unpacking give the ids back.
std::string wrong_routing(const Case& c, const Input& in, std::vector<int64_t>& counts) {
    const int64_t topk = c.options.topk, experts = c.options.experts;
    for (size_t i = 0; i < in.topk_ids.size(); ++i)
        if (in.topk_ids[i] < -1 || in.topk_ids[i] >= experts)
            return fmt::format("topk_ids[{}][{}] is {}; experts are 0..{}, or -1 for an unused slot",
                               static_cast<int64_t>(i) / topk, static_cast<int64_t>(i) % topk, in.topk_ids[i], experts - 1);
    counts.resize(static_cast<size_t>(experts));
    std::vector<int64_t> offsets(counts.size() + 1);
    count_experts(in.topk_ids, counts);
    offsets_of(counts, offsets);
    std::vector<int64_t> permutation(static_cast<size_t>(offsets.back()));
    permutation_of(in.topk_ids, offsets, permutation);
    std::vector<int32_t> packed(permutation.size()), back(in.topk_ids.size(), -1);
    reorder(in.topk_ids.data(), static_cast<int64_t>(in.topk_ids.size()), 4, permutation, 1, packed.data());
    for (size_t i = 0; i < permutation.size(); ++i) back[static_cast<size_t>(permutation[i])] = packed[i];
    if (!std::is_sorted(packed.begin(), packed.end())) return "the rows are not in the order of their experts";
    if (back != in.topk_ids) return "unpacking does not give back what was packed";
    return {};
}

}  // namespace

int verify_local(const Case& c, bool json) {
    const auto ranks = static_cast<size_t>(c.ranks);
    std::vector<std::vector<int64_t>> rows(ranks, std::vector<int64_t>(ranks));  // [from][to]
    bool right = true;
    for (size_t r = 0; r < ranks; ++r) {
        const Input in = input_of(c, static_cast<int>(r));
        std::vector<int64_t> counts;
        const std::string wrong = wrong_routing(c, in, counts);
        right = right && wrong.empty();
        for (size_t to = 0; to < ranks && wrong.empty(); ++to) {
            const ExpertRange of = experts_of(static_cast<int64_t>(to), c.ranks, c.options.experts);
            for (int64_t e = of.first; e < of.last; ++e) rows[r][to] += counts[static_cast<size_t>(e)];
        }
        const auto unused = std::count(in.topk_ids.begin(), in.topk_ids.end(), -1);
        if (json)
            fmt::print("{}\n", nlohmann::json{{"rank", r},
                                              {"tokens", c.tokens[r]},
                                              {"unused", unused},
                                              {"counts", counts},
                                              {"rows_to", rows[r]},
                                              {"wrong", wrong}}
                                   .dump());
        else if (!wrong.empty())
            fmt::print("rank {}: {}\n", r, wrong);
    }
    if (json) return right ? 0 : 1;
    if (right) {
        fmt::print("rows from (down) to (across)\n{:>6}", "");
        for (size_t to = 0; to < ranks; ++to) fmt::print(" {:>8}", to);
        fmt::print("\n");
        for (size_t from = 0; from < ranks; ++from) {
            fmt::print("{:>6}", from);
            for (const int64_t n : rows[from]) fmt::print(" {:>8}", n);
            fmt::print("\n");
        }
    }
    fmt::print("routing of {} ranks, {} experts, without communication: {}\n", c.ranks, c.options.experts,
               right ? "right" : "WRONG");
    return right ? 0 : 1;
}

namespace {

// One dispatch and its combine on one landing against the reference: what differs, or "".
std::string play_round(Session& session, const Input& in, int64_t tokens, const reference::Received& want,
                       const MadeUpExperts& experts, const std::vector<std::byte>& right_out) {
    ExpertBatch batch = session.dispatch(
        {.x = in.x.data(), .tokens = tokens, .topk_ids = in.topk_ids.data(), .topk_weights = in.topk_weights.data()});
    if (batch.rows() != want.rows) return fmt::format("{} rows, the reference has {}", batch.rows(), want.rows);
    const std::vector<float> none;
    struct Part {
        const char* name;
        const void *got, *right;
        size_t bytes;
    };
    const auto part = [](const char* name, const void* got, const auto& right) {
        return Part{name, got, right.data(), right.size() * sizeof right[0]};
    };
    for (const Part& p : {part("expand_x", batch.expand_x(), want.expand_x),
                          part("dynamic_scales", batch.dynamic_scales(), want.dynamic_scales),
                          part("source info", batch.assist_info_for_combine().data(), want.assist_info_for_combine),
                          part("ep_recv_count", batch.ep_recv_count().data(), want.ep_recv_count),
                          part("expert_token_nums", batch.expert_token_nums().data(), want.expert_token_nums),
                          part("weights", batch.weights(), batch.weights() ? want.weights : none)})
        if (p.bytes > 0 && std::memcmp(p.got, p.right, p.bytes) != 0)
            return fmt::format("{} of dispatch: other than the reference", p.name);

    const Options& o = session.options();
    const int64_t row_bytes = o.hidden * (o.dtype == TokenType::f32 ? 4 : 2);
    const int64_t first = experts_of(session.rank(), session.size(), o.experts).first;
    const std::span<const int32_t> info = batch.assist_info_for_combine();
    for (int64_t e = 0; e < session.experts_local(); ++e)
        for (int64_t i = batch.expert_offsets()[static_cast<size_t>(e)]; i < batch.expert_offsets()[static_cast<size_t>(e) + 1];
             ++i) {
            const int32_t* source = info.data() + 3 * i;
            if (source[0] < 0) continue;  // a pad row
            std::memcpy(static_cast<std::byte*>(batch.y()) + i * row_bytes,
                        experts.row(source[0], source[1], source[2], static_cast<int32_t>(first + e)),
                        static_cast<size_t>(row_bytes));
        }
    std::vector<std::byte> out(right_out.size());
    session.combine(batch, {.topk_weights = in.topk_weights.data(), .out = out.data()});
    return out == right_out ? "" : "out of combine: other than the reference";
}

}  // namespace

int verify_landings(const Case& c, bool json) {
    const auto ranks = static_cast<size_t>(c.ranks);
    const MadeUpExperts experts(c);
    std::vector<Input> in;
    std::vector<reference::RankInput> views;
    for (size_t r = 0; r < ranks; ++r) in.push_back(input_of(c, static_cast<int>(r)));
    for (size_t r = 0; r < ranks; ++r) views.push_back(in[r].view(c.tokens[r]));
    std::vector<reference::Received> right(ranks);
    std::vector<std::vector<std::byte>> right_out(ranks);
    for (size_t r = 0; r < ranks; ++r) {
        right[r] = reference::dispatch(c.options, views, static_cast<int>(r));
        right_out[r] = reference::combine(c.options, views[r], static_cast<int>(r),
                                          [&](int s, int64_t t, int64_t k, int32_t e) { return experts.row(s, t, k, e); });
    }

    bool all_right = true;
    for (const Landing landing :
         {Landing::packed, Landing::padded, Landing::in_place, Landing::allgather, Landing::two_level, Landing::alltoallv}) {
        Options o = c.options;
        o.landing = landing;
        std::vector<Session> sessions = Session::open_local(o, c.ranks);
        std::vector<std::string> wrong(ranks);
        std::vector<std::thread> threads;
        for (size_t r = 0; r < ranks; ++r)
            threads.emplace_back([&, r] {
                try {
                    wrong[r] = play_round(sessions[r], in[r], c.tokens[r], right[r], experts, right_out[r]);
                } catch (const std::exception& e) {
                    wrong[r] = e.what();
                }
            });
        for (std::thread& t : threads) t.join();
        int64_t bytes = 0;
        for (const Session& s : sessions) bytes += static_cast<int64_t>(s.stats().bytes_sent);
        const std::string name = option_text(*find_option("landing"), o);
        for (size_t r = 0; r < ranks; ++r) {
            if (wrong[r].empty()) continue;
            all_right = false;
            if (!json) fmt::print("{}: rank {}: {}\n", name, r, wrong[r]);
        }
        const bool equal = std::all_of(wrong.begin(), wrong.end(), [](const std::string& w) { return w.empty(); });
        if (json)
            fmt::print("{}\n",
                       nlohmann::json{{"landing", name}, {"equal", equal}, {"bytes_sent", bytes}, {"wrong", wrong}}.dump());
        else
            fmt::print("{:<10} {:>14} bytes sent   {}\n", name, bytes,
                       equal ? "dispatch and combine: every byte equals the reference" : "WRONG");
    }
    return all_right ? 0 : 1;
}

}  // namespace switchyard::tools
