// What landings are estimated to cost and to write, and how one is chosen.
#include "switchyard/strategy.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "testing.hpp"

namespace switchyard {
namespace {

using namespace test;

/// A folder of its own, removed at the end; the library's cache folder while it lives.
class Folder {
 public:
    Folder() {
        char name[] = "/tmp/switchyard_strategy_XXXXXX";
        path_ = mkdtemp(name);
        setenv("XDG_CACHE_HOME", path_.c_str(), 1);
    }
    ~Folder() {
        std::filesystem::remove_all(path_);
        unsetenv("XDG_CACHE_HOME");
    }
    const std::string& path() const { return path_; }

 private:
    std::string path_;
};

/// Everything free but `price`.
Calibration only(double Calibration::*price) {
    Calibration c;
    for (double Calibration::*p :
         {&Calibration::call, &Calibration::peer, &Calibration::row, &Calibration::row_apart, &Calibration::look,
          &Calibration::write_cache, &Calibration::write_memory, &Calibration::read_cache, &Calibration::read_memory})
        c.*p = 0;
    c.*price = 1000;  // 1 us
    c.cpus = 64;
    return c;
}

double us_of(const std::vector<Estimate>& all, Landing landing) {
    for (const Estimate& e : all)
        if (e.landing == landing) return e.us;
    ADD_FAILURE() << "no estimate of landing " << static_cast<int>(landing);
    return -1;
}

Options shape() {
    Options o;
    o.hidden = 512;  // rows of 1 KiB
    o.topk = 2;
    o.experts = 8;
    o.tokens_max = 16;
    o.group_ranks = 2;
    return o;
}

TEST(Estimates, CountHopsPeersRowsAndBytesByHand) {
    const Options o = shape();
    auto all = estimate_landings(o, 4, 16, only(&Calibration::call));
    EXPECT_EQ(all.size(), 6U);
    for (const Landing l : every_landing)
        EXPECT_DOUBLE_EQ(us_of(all, l), l == Landing::packed || l == Landing::alltoallv ? 2 : 1) << "hops";
    all = estimate_landings(o, 4, 16, only(&Calibration::peer));
    EXPECT_DOUBLE_EQ(us_of(all, Landing::packed), 8);
    EXPECT_DOUBLE_EQ(us_of(all, Landing::in_place), 4);
    // 16 tokens of 2 experts: of 4 ranks 4 (1 - (3/4)^2) = 1.75 are hit, of 2 groups 1.5.
    all = estimate_landings(o, 4, 16, only(&Calibration::row));
    EXPECT_DOUBLE_EQ(us_of(all, Landing::packed), 32);
    EXPECT_DOUBLE_EQ(us_of(all, Landing::padded), 64);
    EXPECT_DOUBLE_EQ(us_of(all, Landing::in_place), 16);
    EXPECT_DOUBLE_EQ(us_of(all, Landing::allgather), 28);
    EXPECT_DOUBLE_EQ(us_of(all, Landing::two_level), 24);
    all = estimate_landings(o, 4, 16, only(&Calibration::write_cache));  // 1 KiB each
    EXPECT_DOUBLE_EQ(us_of(all, Landing::packed), 32);
    EXPECT_DOUBLE_EQ(us_of(all, Landing::alltoallv), 96);
    EXPECT_DOUBLE_EQ(us_of(all, Landing::allgather), 28);
    all = estimate_landings(o, 4, 16, only(&Calibration::look));  // every id of every rank
    EXPECT_DOUBLE_EQ(us_of(all, Landing::in_place), 128);
    EXPECT_DOUBLE_EQ(us_of(all, Landing::packed), 0);
    EXPECT_EQ(all.front().us, 0) << "the cheapest first";
    Calibration without_cache;  // no machine has none, but a file may say so
    without_cache.cache_bytes = 0;
    for (const Estimate& e : estimate_landings(o, 4, 0, without_cache)) EXPECT_TRUE(std::isfinite(e.us)) << e.why;
    // Ranks that share CPUs take turns.
    Calibration one = only(&Calibration::row);
    one.cpus = 1;
    EXPECT_DOUBLE_EQ(us_of(estimate_landings(o, 4, 16, one), Landing::packed), 128);
}

TEST(Estimates, BytesAreThoseOfRowsIdsAndWeightsByHand) {
    // 32 rows of 1 KiB with 12 bytes of source info, 16 with weights; 64 bytes more in a cell. Or 16 tokens to 1, 1.75 and 1.5
    // places, and 32 ids (and weights) to 1, 4 and 2.
    const std::map<Landing, std::pair<int64_t, int64_t>> bytes = {
        {Landing::packed, {33152, 33280}},   {Landing::padded, {33152, 33280}},    {Landing::alltoallv, {34816, 34816}},
        {Landing::in_place, {16512, 16640}}, {Landing::allgather, {29184, 29696}}, {Landing::two_level, {24832, 25088}}};
    for (const bool weights : {false, true}) {
        Options o = shape();
        o.deliver_weights = weights;
        const auto all = estimate_landings(o, 4, 16, {});
        EXPECT_EQ(all.size(), bytes.size());
        for (const Estimate& e : all) {
            const auto& [without, with] = bytes.at(e.landing);
            EXPECT_EQ(e.bytes, weights ? with : without) << e.why;
        }
    }
}

TEST(Estimates, WindowsThatCannotBeLoadedRuleTwoOut) {
    for (const Estimate& e : estimate_landings(shape(), 4, 16, {}, false)) {
        EXPECT_NE(e.landing, Landing::in_place);
        EXPECT_NE(e.landing, Landing::two_level);
    }
}

TEST(Estimates, BadShapesAreRefused) {
    Options o = shape();
    EXPECT_TRUE(is_error(outcome_of([&] { estimate_landings(o, 4, 17, {}); }), Code::bad_input, {"17", "0..16"}));
    o.hidden = 0;
    EXPECT_TRUE(is_error(outcome_of([&] { estimate_landings(o, 4, 1, {}); }), Code::bad_input, {"hidden"}));
}

TEST(PredictedBytes, AreThoseThatTheRunCounts) {
    Random random;
    for (int n = 0; n < scaled(150); ++n) {
        Options o;
        const int ranks = 1 + static_cast<int>(random.below(6));
        o.hidden = 1 + random.below(300);
        o.topk = 1 + random.below(5);
        o.experts = 1 + random.below(12);
        o.tokens_max = random.below(20);
        o.dispatch_quant = random.pick({Format::none, Format::int8_token, Format::mxfp8_e5m2, Format::fp8_e4m3_block128});
        o.deliver_weights = random.one_in(3);
        o.landing = every_landing[random.below(6)];
        o.group_ranks = o.landing == Landing::two_level ? random.below(ranks + 1) : 0;
        SCOPED_TRACE("landing " + std::to_string(static_cast<int>(o.landing)) + ", " + std::to_string(ranks) + " ranks");
        std::vector<Session> sessions = Session::open_local(o, ranks);
        std::vector<std::vector<int32_t>> ids(static_cast<size_t>(ranks));
        for (auto& of : ids)
            for (int64_t i = random.below(o.tokens_max + 1) * o.topk; i > 0; --i)
                of.push_back(static_cast<int32_t>(random.below(o.experts + 1)) - 1);
        on_ranks(ranks, [&](int r) {
            Session& s = sessions[static_cast<size_t>(r)];
            const std::vector<int32_t>& mine = ids[static_cast<size_t>(r)];
            const std::vector<uint16_t> x(mine.size() * static_cast<size_t>(o.hidden));
            const std::vector<float> weights(mine.size());
            ExpertBatch batch = s.dispatch({.x = x.data(),
                                            .tokens = static_cast<int64_t>(mine.size()) / o.topk,
                                            .topk_ids = mine.data(),
                                            .topk_weights = weights.data()});
            EXPECT_EQ(static_cast<int64_t>(s.stats().bytes_sent), predicted_bytes(o, ranks, r, mine)) << "rank " << r;
        });
    }
}

TEST(PredictedBytes, WhatCannotBeIsRefused) {
    Options o = shape();
    const std::vector<int32_t> ids = {0, 1}, bad = {0, 8}, half = {0};
    EXPECT_TRUE(is_error(outcome_of([&] { predicted_bytes(o, 4, 0, ids); }), Code::bad_input, {"auto"}));
    o.landing = Landing::packed;
    EXPECT_TRUE(is_error(outcome_of([&] { predicted_bytes(o, 4, 0, bad); }), Code::bad_input, {"topk_ids[1]", "8"}));
    EXPECT_TRUE(is_error(outcome_of([&] { predicted_bytes(o, 4, 0, half); }), Code::bad_input, {"whole tokens"}));
    EXPECT_TRUE(is_error(outcome_of([&] { predicted_bytes(o, 4, 4, ids); }), Code::bad_input, {"rank 4 of 4"}));
}

TEST(Automatic, TakesTheCheapestOfTheCalibrationAndSaysWhy) {
    const Folder folder;
    Options o = shape();
    o.group_ranks = 0;
    // Where only the looks cost, rows that lie apart are dear; where only writing does, in_place is cheapest.
    save_calibration(only(&Calibration::look), calibration_path());
    Session looks = std::move(Session::open_local(o, 2).front());
    EXPECT_EQ(looks.options().landing, Landing::packed);
    save_calibration(only(&Calibration::write_cache), calibration_path());
    Session writes = std::move(Session::open_local(o, 2).front());
    EXPECT_EQ(writes.options().landing, Landing::in_place);
    const std::string why = writes.explain();
    for (const char* word :
         {"landing in_place", "packed", "padded", "allgather", "two_level", "alltoallv", "16 tokens once", "us", "bytes"})
        EXPECT_NE(why.find(word), std::string::npos) << word << " is missing in:\n" << why;
    EXPECT_NE(why.find(calibration_path()), std::string::npos) << why;
    o.landing = Landing::padded;
    EXPECT_NE(Session::open_local(o, 1)[0].explain().find("as asked for"), std::string::npos);
}

TEST(CalibrationFile, IsWrittenAndReadBack) {
    const Folder folder;
    const std::string path = calibration_path();
    EXPECT_EQ(path, folder.path() + "/switchyard/calibration");
    EXPECT_EQ(load_calibration(path).source, "built in");
    Calibration c;
    c.call = 1234.5, c.row_apart = 0, c.read_memory = 0.125;
    save_calibration(c, path);
    const Calibration back = load_calibration(path);
    EXPECT_EQ(back.source, path);
    EXPECT_DOUBLE_EQ(back.call, 1234.5);
    EXPECT_DOUBLE_EQ(back.row_apart, 0);
    EXPECT_DOUBLE_EQ(back.read_memory, 0.125);
    for (const auto& entry : std::filesystem::directory_iterator(folder.path() + "/switchyard"))
        EXPECT_EQ(entry.path().filename(), "calibration") << "nothing half written stays";
}

TEST(CalibrationFile, WhatIsNoneIsRefusedWithTheNextStep) {
    const Folder folder;
    const std::string path = folder.path() + "/file";
    for (const char* text :
         {"", "switchyard calibration 2\n", "switchyard calibration 1\n", "switchyard calibration 1\ncall_ns -1\n",
          "switchyard calibration 1\ncall_ns nan\n", "switchyard calibration 1\ncall_ns\n"}) {
        std::ofstream(path) << text;
        EXPECT_TRUE(is_error(outcome_of([&] { load_calibration(path); }), Code::bad_input, {path, "--calibrate"})) << text;
    }
    EXPECT_TRUE(is_error(outcome_of([&] { save_calibration({}, "/proc/none/calibration"); }), Code::system, {"/proc/none"}));
}

TEST(Calibrate, GivesFiguresByWhichThreeCopiesCostMoreThanOne) {
    const Calibration c = calibrate();
    for (double Calibration::*p :
         {&Calibration::call, &Calibration::peer, &Calibration::row, &Calibration::row_apart, &Calibration::look,
          &Calibration::write_cache, &Calibration::write_memory, &Calibration::read_cache, &Calibration::read_memory})
        EXPECT_TRUE(std::isfinite(c.*p) && c.*p >= 0);
    // Three copies of everything are never faster than one write: true on every machine.
    Options o = shape();
    o.hidden = 4096;
    o.tokens_max = 1024;
    const std::vector<Estimate> all = estimate_landings(o, 2, 1024, c);
    EXPECT_GT(us_of(all, Landing::alltoallv), us_of(all, Landing::in_place));
}

}  // namespace
}  // namespace switchyard
