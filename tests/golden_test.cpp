// The golden cases, byte for byte: the reference by itself, then the session in every way it can be run.
//
// Every folder of SY_TEST_GOLDEN_DIR with a case.json is a case; its keys that name options are set as options. Right values
// come from the files alone.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "quant/quant.hpp"
#include "testing.hpp"

namespace switchyard::test {
namespace {

using nlohmann::json;
using Bytes = std::vector<std::byte>;
namespace fs = std::filesystem;

fs::path golden_dir() {
    return SY_TEST_GOLDEN_DIR;
}

std::vector<std::string> case_names() {
    std::vector<std::string> names;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(golden_dir(), ignored))
        if (fs::exists(entry.path() / "case.json")) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
}

Bytes file_bytes(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw std::runtime_error("cannot read " + path.string());
    const std::vector<char> chars((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    Bytes bytes(chars.size());
    if (!chars.empty()) std::memcpy(bytes.data(), chars.data(), chars.size());
    return bytes;
}

template <class T>
std::vector<T> numbers(const Bytes& bytes) {
    std::vector<T> out(bytes.size() / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
    return out;
}

/// One rank's files.
struct RankFiles {
    int64_t tokens = 0;
    Bytes x, y;  // input
    std::vector<int32_t> ids;
    std::vector<float> weights;
    Bytes expand_x, dynamic_scales, assist_info, expert_token_nums, ep_recv_count, out;  // golden
    std::vector<int64_t> offsets;                                                        // only with expert_alignment > 1

    reference::RankInput input() const { return {x.data(), tokens, ids.data(), weights.data()}; }
};

struct Case {
    Options options;
    std::vector<RankFiles> ranks;
};

/// Keys of case.json that are no options.
bool is_remark(const std::string& key) {
    for (const char* name : {"ranks", "tokens_per_rank", "routing", "values", "seed"})
        if (key == name) return true;
    return false;
}

Case read_case(const std::string& name) {
    const fs::path dir = golden_dir() / name;
    const json about = json::parse(std::ifstream(dir / "case.json"));
    Case c;
    for (const auto& [key, value] : about.items()) {
        const OptionInfo* info = find_option(key);
        if (info == nullptr) {
            if (!is_remark(key)) throw std::runtime_error(name + "/case.json has the unknown key " + key);
            continue;
        }
        const Status s = set_option(c.options, *info, value.is_string() ? value.get<std::string>() : value.dump());
        if (!s.ok()) throw Error(s);
    }
    c.options.tokens_max = 0;
    for (int r = 0; r < about.at("ranks").get<int>(); ++r) {
        const std::string number = std::to_string(r), chip = "chip_" + number, end = '_' + number + ".bin";
        const auto input = [&](const char* what) { return file_bytes(dir / "input" / chip / (what + end)); };
        const auto golden_path = [&](const char* what) { return dir / "golden" / chip / (what + end); };
        const auto golden = [&](const char* what) { return file_bytes(golden_path(what)); };
        RankFiles f;
        f.tokens = about.at("tokens_per_rank").at(static_cast<size_t>(r)).get<int64_t>();
        f.x = input("x");
        f.y = input("expand_x");
        f.ids = numbers<int32_t>(input("expert_ids"));
        f.weights = numbers<float>(input("expert_scales"));
        f.expand_x = golden("expand_x");
        if (c.options.dispatch_quant != Format::none) f.dynamic_scales = golden("dynamic_scales");
        f.assist_info = golden("assist_info_for_combine");
        f.expert_token_nums = golden("expert_token_nums");
        f.ep_recv_count = golden("ep_recv_count");
        f.out = golden("x");
        if (c.options.expert_alignment > 1) f.offsets = numbers<int64_t>(golden("expert_offsets"));
        c.options.tokens_max = std::max(c.options.tokens_max, f.tokens);
        c.ranks.push_back(std::move(f));
    }
    return c;
}

std::string difference_of_offsets(const RankFiles& f, std::span<const int64_t> got) {
    if (!f.offsets.empty()) return difference("expert_offsets", std::as_bytes(got), bytes_of(f.offsets));
    // Without alignment they follow from the counts: rows lie without gaps.
    return got.back() * 12 == static_cast<int64_t>(f.assist_info.size()) ? "" : "expert_offsets do not end at the last row";
}

TEST(Golden, HasAtLeastElevenCases) {
    EXPECT_GE(case_names().size(), 11U) << "in " << golden_dir();
}

class GoldenCase : public testing::TestWithParam<std::string> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GoldenCase);

TEST_P(GoldenCase, FilesHaveTheSizesThatTheOptionsSay) {
    const Case c = read_case(GetParam());
    for (const RankFiles& f : c.ranks) {
        const auto pairs = static_cast<size_t>(f.tokens * c.options.topk);
        const size_t row = static_cast<size_t>(c.options.hidden) * token_bytes(c.options.dtype);
        EXPECT_EQ(f.ids.size(), pairs);
        EXPECT_EQ(f.weights.size(), pairs);
        EXPECT_EQ(f.x.size(), static_cast<size_t>(f.tokens) * row);
        EXPECT_EQ(f.out.size(), f.x.size());
        EXPECT_GE(f.y.size(), f.assist_info.size() / 12 * row);
    }
}

TEST_P(GoldenCase, ReferenceGivesTheSameBytes) {
    const Case c = read_case(GetParam());
    const size_t row_bytes = static_cast<size_t>(c.options.hidden) * token_bytes(c.options.dtype);
    std::vector<reference::RankInput> inputs;
    for (const RankFiles& f : c.ranks) inputs.push_back(f.input());

    // Where each (source, token, k) was delivered, read from golden, not from the reference.
    std::vector<std::vector<const std::byte*>> delivered;
    for (const RankFiles& f : c.ranks) delivered.emplace_back(static_cast<size_t>(f.tokens * c.options.topk));
    for (const RankFiles& f : c.ranks) {
        const std::vector<int32_t> info = numbers<int32_t>(f.assist_info);
        for (size_t i = 0; 3 * i < info.size(); ++i)
            if (info[3 * i] >= 0)
                delivered[static_cast<size_t>(info[3 * i])]
                         [static_cast<size_t>(info[3 * i + 1] * c.options.topk + info[3 * i + 2])] = f.y.data() + i * row_bytes;
    }

    for (size_t r = 0; r < c.ranks.size(); ++r) {
        SCOPED_TRACE("rank " + std::to_string(r));
        const RankFiles& f = c.ranks[r];
        const reference::Received got = reference::dispatch(c.options, inputs, static_cast<int>(r));
        EXPECT_EQ(static_cast<size_t>(got.rows) * 12, f.assist_info.size());
        EXPECT_EQ(difference("expand_x", got.expand_x, f.expand_x), "");
        EXPECT_EQ(difference("dynamic_scales", got.dynamic_scales, f.dynamic_scales), "");
        EXPECT_EQ(difference("assist_info_for_combine", bytes_of(got.assist_info_for_combine), f.assist_info), "");
        EXPECT_EQ(difference("expert_token_nums", bytes_of(got.expert_token_nums), f.expert_token_nums), "");
        EXPECT_EQ(difference("ep_recv_count", bytes_of(got.ep_recv_count), f.ep_recv_count), "");
        EXPECT_EQ(difference_of_offsets(f, got.expert_offsets), "");
        const Bytes out =
            reference::combine(c.options, inputs[r], static_cast<int>(r), [&](int source, int64_t token, int64_t k, int32_t) {
                return delivered[static_cast<size_t>(source)][static_cast<size_t>(token * c.options.topk + k)];
            });
        EXPECT_EQ(difference("x", out, f.out), "");
    }
}

/// One rank, `rounds` rounds without a barrier; a difference does not stop it, because the others wait for it. Returns the
/// first difference.
std::string play(Session& session, const RankFiles& f, int rounds) {
    const Options& o = session.options();
    std::string first;
    const auto note = [&](int round, const std::string& found) {
        if (first.empty() && !found.empty()) first = "round " + std::to_string(round) + ": " + found;
    };
    Output out(f.out.size());
    for (int round = 0; round < rounds; ++round) {
        ExpertBatch batch =
            session
                .dispatch_async(
                    {.x = f.tokens ? f.x.data() : nullptr, .tokens = f.tokens, .topk_ids = f.tokens ? f.ids.data() : nullptr})
                .get();
        const auto rows = static_cast<size_t>(batch.rows());
        // Views into this rank's own window, so that they can be poisoned when the round is over.
        const auto view = [&](const void* at, int64_t bytes) {
            return std::span(static_cast<std::byte*>(const_cast<void*>(at)), rows * static_cast<size_t>(bytes));
        };
        const std::span<std::byte> expand_x = view(batch.expand_x(), batch.payload_bytes());
        const std::span<std::byte> scales = view(batch.dynamic_scales(), batch.scale_bytes());
        const std::span<std::byte> info = view(batch.assist_info_for_combine().data(), 12);
        const std::span<std::byte> y = view(batch.y(), o.hidden * static_cast<int64_t>(token_bytes(o.dtype)));
        if ((batch.dynamic_scales() == nullptr) != (o.dispatch_quant == Format::none))
            note(round, "dynamic_scales: there or not");
        for (const std::string& found :
             {difference("expand_x", expand_x, f.expand_x), difference("dynamic_scales", scales, f.dynamic_scales),
              difference("assist_info_for_combine", info, f.assist_info),
              difference("expert_token_nums", std::as_bytes(batch.expert_token_nums()), f.expert_token_nums),
              difference("ep_recv_count", std::as_bytes(batch.ep_recv_count()), f.ep_recv_count),
              difference_of_offsets(f, batch.expert_offsets())})
            note(round, found);

        // y in place in odd rounds, copied by combine in even ones.
        CombineArgs args{.topk_weights = f.tokens ? f.weights.data() : nullptr, .out = f.tokens ? out.data() : nullptr};
        if (round % 2 == 1 && !y.empty())
            std::memcpy(y.data(), f.y.data(), y.size());
        else if (round % 2 == 0)
            args.y = f.y.data();
        out.poison();
        if (round % 3 == 0)
            session.combine(batch, args);
        else
            session.combine_async(batch, args).wait();
        note(round, out.difference_from("x", f.out));
        // Nobody reads or writes these before this rank's next dispatch into the slot (y is different: peers read it still).
        // What a round leaves out shows in a later one.
        for (const std::span<std::byte> part : {expand_x, scales, info}) std::fill(part.begin(), part.end(), std::byte{0xA5});
    }
    return first;
}

TEST_P(GoldenCase, SessionGivesTheSameBytesInEveryRound) {
    const Case c = read_case(GetParam());
    const auto rounds = static_cast<int>(scaled(20));
    for (const quant::Kernels* kernels : quant::available_kernels())
        for (const Landing landing : every_landing)
            for (const CombinePath path : {CombinePath::read, CombinePath::push})
                for (const int64_t workers : {1, 3}) {
                    Options o = c.options;
                    o.simd = kernels->simd;
                    o.landing = landing;
                    o.combine_path = path;
                    o.workers = workers;
                    o.progress = workers == 3 ? ProgressBy::worker : ProgressBy::caller;
                    o.timeout_ms = 20000 * slowness;
                    SCOPED_TRACE(text_of(o));
                    std::vector<Session> sessions = Session::open_local(o, static_cast<int>(c.ranks.size()));
                    on_ranks(static_cast<int64_t>(c.ranks.size()), [&](int r) {
                        Session& session = sessions[static_cast<size_t>(r)];
                        EXPECT_STREQ(session.simd_name(), kernels->name);
                        EXPECT_EQ(play(session, c.ranks[static_cast<size_t>(r)], rounds), "") << "rank " << r;
                    });
                    if (HasFailure()) return;
                }
}

// A replica is the same expert: to whichever the rows go, combine gives the golden bytes, and the rows are the golden ones.
TEST_P(GoldenCase, SessionWithReplicasCombinesToTheSameBytes) {
    const Case c = read_case(GetParam());
    const size_t row_bytes = static_cast<size_t>(c.options.hidden) * token_bytes(c.options.dtype);
    struct Row {
        const std::byte *y = nullptr, *payload = nullptr;
    };
    std::vector<std::vector<Row>> rows;  // of each (source, token, k), from golden
    std::vector<uint64_t> loads(static_cast<size_t>(c.options.experts));
    for (const RankFiles& f : c.ranks) {
        rows.emplace_back(static_cast<size_t>(f.tokens * c.options.topk));
        for (const int32_t id : f.ids)
            if (id >= 0) ++loads[static_cast<size_t>(id)];
    }
    for (const RankFiles& f : c.ranks) {
        const std::vector<int32_t> info = numbers<int32_t>(f.assist_info);
        const size_t payload = info.empty() ? 0 : f.expand_x.size() / (info.size() / 3);
        for (size_t i = 0; 3 * i < info.size(); ++i)
            if (info[3 * i] >= 0)
                rows[static_cast<size_t>(info[3 * i])]
                    [static_cast<size_t>(info[3 * i + 1] * c.options.topk + info[3 * i + 2])] = {
                        f.y.data() + i * row_bytes, f.expand_x.data() + i * payload};
    }
    const auto ranks = static_cast<int64_t>(c.ranks.size());
    const int64_t slots = std::min(ranks * c.options.experts, c.options.experts + std::max<int64_t>(1, c.options.experts / 4));
    for (const ReplicaChoice choice : {ReplicaChoice::round_robin, ReplicaChoice::nearest, ReplicaChoice::least_loaded})
        for (const Landing landing : {Landing::packed, Landing::padded, Landing::in_place})
            for (const CombinePath path : {CombinePath::read, CombinePath::push}) {
                Options o = c.options;
                o.landing = landing;
                o.combine_path = path;
                o.timeout_ms = 20000 * slowness;
                SCOPED_TRACE(text_of(o));
                const PlacementTable table = plan_placement(loads, {.ranks = ranks, .slots = slots, .choice = choice});
                std::vector<Session> sessions = Session::open_local(o, table);
                on_ranks(ranks, [&](int r) {
                    const RankFiles& f = c.ranks[static_cast<size_t>(r)];
                    Session& session = sessions[static_cast<size_t>(r)];
                    for (int round = 0; round < 3; ++round) {
                        ExpertBatch batch = session.dispatch({.x = f.x.data(), .tokens = f.tokens, .topk_ids = f.ids.data()});
                        const std::span<const int32_t> info = batch.assist_info_for_combine();
                        auto* y = static_cast<std::byte*>(batch.y());
                        auto slot = static_cast<size_t>(experts_of(r, ranks, slots).first);
                        for (int64_t i = 0, e = 0; i < batch.rows(); ++i) {
                            for (; i >= batch.expert_offsets()[static_cast<size_t>(e) + 1]; ++e) ++slot;
                            const int32_t* of = info.data() + 3 * i;
                            if (of[0] < 0) continue;
                            const auto k = static_cast<size_t>(of[1] * o.topk + of[2]);
                            const Row& right = rows[static_cast<size_t>(of[0])][k];
                            ASSERT_NE(right.y, nullptr);
                            EXPECT_EQ(table.expert_of[slot], c.ranks[static_cast<size_t>(of[0])].ids[k]);
                            EXPECT_EQ(
                                std::memcmp(batch.row(i).payload, right.payload, static_cast<size_t>(batch.payload_bytes())),
                                0);
                            std::memcpy(y + static_cast<size_t>(i) * row_bytes, right.y, row_bytes);
                        }
                        Output out(f.out.size());
                        session.combine(batch, {.topk_weights = f.weights.data(), .out = out.data()});
                        EXPECT_EQ(out.difference_from("x", f.out), "") << "rank " << r;
                    }
                });
                if (HasFailure()) return;
            }
}

INSTANTIATE_TEST_SUITE_P(Golden, GoldenCase, testing::ValuesIn(case_names()), [](const auto& named) { return named.param; });

TEST(Golden, AutomaticTakesTheFirstKernelSet) {
    Options o;
    o.hidden = o.topk = o.experts = o.tokens_max = 1;
    EXPECT_STREQ(Session::open_local(o, 1)[0].simd_name(), quant::available_kernels().front()->name);
}

}  // namespace
}  // namespace switchyard::test
