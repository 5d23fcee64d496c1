// Facts about the table of options: names, texts, limits, environment, and what one rank can refuse alone.
#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <sstream>

#include "testing.hpp"

namespace switchyard::test {
namespace {

/// Sets an environment variable for as long as it lives.
class Variable {
 public:
    Variable(std::string name, const std::string& value) : name_(std::move(name)) { setenv(name_.c_str(), value.c_str(), 1); }
    ~Variable() { unsetenv(name_.c_str()); }
    Variable(const Variable&) = delete;
    Variable& operator=(const Variable&) = delete;

 private:
    std::string name_;
};

std::string variable_of(const OptionInfo& info) {
    std::string name = "SWITCHYARD_";
    for (const char* c = info.name; *c; ++c) name += static_cast<char>(std::toupper(static_cast<unsigned char>(*c)));
    return name;
}

std::vector<std::pair<std::string, int64_t>> choices_of(const OptionInfo& info) {
    std::vector<std::pair<std::string, int64_t>> all;
    std::istringstream words(info.values);
    for (std::string word; words >> word;) {
        const size_t equals = word.find('=');
        all.emplace_back(word.substr(0, equals), std::stoll(word.substr(equals + 1)));
    }
    return all;
}

Options sound_options() {
    Options o;
    o.hidden = 64;
    o.topk = 2;
    o.experts = 8;
    o.tokens_max = 16;
    return o;
}

testing::AssertionResult refused(const Status& status, std::initializer_list<std::string> words) {
    return is_error({status.code(), status.text()}, Code::bad_input, words);
}

// ------------------------------------------------------------------------------------------------------------------ table

TEST(OptionTable, NamesAndFlagsAreUnique) {
    std::set<std::string> names, flags;
    for (const OptionInfo& info : option_table()) {
        EXPECT_TRUE(names.insert(info.name).second) << info.name;
        std::istringstream list(info.flags);
        int count = 0;
        for (std::string flag; std::getline(list, flag, ','); ++count) {
            EXPECT_TRUE(flags.insert(flag).second) << flag;
            EXPECT_EQ(flag.substr(0, 2), "--") << flag;
        }
        EXPECT_GT(count, 0) << info.name;
        EXPECT_STRNE(info.help, "") << info.name;
        EXPECT_LE(info.low, info.high) << info.name;
    }
}

TEST(OptionTable, HasEveryFieldOfOptions) {
    // Each line reads and writes a field of its own: writing one changes no other.
    std::set<std::string> names;
    for (const OptionInfo& info : option_table()) {
        names.insert(info.name);
        Options o = sound_options();
        std::map<std::string, int64_t> before;
        for (const OptionInfo& other : option_table()) before[other.name] = other.get(o);
        const int64_t value = before[info.name] == info.low ? info.high : info.low;
        info.set(o, value);
        for (const OptionInfo& other : option_table())
            EXPECT_EQ(other.get(o), &other == &info ? value : before[other.name]) << info.name << " writes " << other.name;
    }
    for (const char* field : {"hidden",
                              "topk",
                              "experts",
                              "tokens_max",
                              "dtype",
                              "dispatch_quant",
                              "combine_quant",
                              "mx_rule",
                              "mx_overflow",
                              "fp8_scale",
                              "expert_token_nums",
                              "expert_alignment",
                              "deliver_weights",
                              "landing",
                              "combine_path",
                              "depth",
                              "rows_max",
                              "cell_rows",
                              "partial",
                              "workers",
                              "simd",
                              "huge_pages",
                              "pin",
                              "jitter_us",
                              "timeout_ms"})
        EXPECT_TRUE(names.contains(field)) << field;
}

TEST(OptionTable, OnlyWhatConcernsOneRankMayDiffer) {
    std::set<std::string> own;
    for (const OptionInfo& info : option_table())
        if (!info.agreed) own.insert(info.name);
    EXPECT_EQ(own, (std::set<std::string>{"workers", "simd", "huge_pages", "pin", "jitter_us", "timeout_ms", "progress"}));
}

TEST(OptionTable, IsFoundByNameOnly) {
    for (const OptionInfo& info : option_table()) EXPECT_EQ(find_option(info.name), &info);
    for (const char* name : {"", "hidde", "hiddenn", "Hidden", "--h", "seed"}) EXPECT_EQ(find_option(name), nullptr) << name;
}

TEST(OptionTable, CommandLineNamesAreThere) {
    // The sample's names with numbers of their own (--quant-mode 4 ...) are the command line's business.
    std::set<std::string> flags;
    for (const OptionInfo& info : option_table()) {
        std::istringstream list(info.flags);
        for (std::string flag; std::getline(list, flag, ',');) flags.insert(flag);
    }
    for (const char* flag : {"--h", "--k", "--experts", "--moe-expert-num", "--dtype", "--mx-rule", "--mx-overflow",
                             "--combine-quant", "--landing", "--combine-path", "--workers", "--simd"})
        EXPECT_TRUE(flags.contains(flag)) << flag;
}

TEST(OptionTable, EveryChoiceReadsBackAsItWasSet) {
    for (const OptionInfo& info : option_table()) {
        std::map<int64_t, std::string> printed;
        for (const auto& [name, value] : choices_of(info)) {
            Options o;
            ASSERT_TRUE(set_option(o, info, name).ok()) << info.name << " " << name;
            EXPECT_EQ(info.get(o), value) << info.name << " " << name;
            EXPECT_GE(value, info.low);
            EXPECT_LE(value, info.high);
            printed.emplace(value, name);  // the first name of a value is the one printed
            EXPECT_EQ(option_text(info, o), printed[value]) << info.name;
            Options again;
            ASSERT_TRUE(set_option(again, info, option_text(info, o)).ok());
            EXPECT_EQ(info.get(again), value);
        }
    }
}

TEST(OptionTable, EveryNumberReadsBackAsItWasSet) {
    for (const OptionInfo& info : option_table()) {
        if (*info.values) continue;
        for (const int64_t value : {info.low, info.low + 1, (info.low + info.high) / 2, info.high}) {
            Options o;
            ASSERT_TRUE(set_option(o, info, std::to_string(value)).ok()) << info.name << " " << value;
            EXPECT_EQ(info.get(o), value);
            EXPECT_EQ(option_text(info, o), std::to_string(value));
        }
    }
}

TEST(OptionTable, RefusalNamesOptionTextAndWhatIsAllowedAndChangesNothing) {
    for (const OptionInfo& info : option_table()) {
        const Options untouched = sound_options();
        std::vector<std::string> bad{"", " ", "nonsense", "-", "0x10", "1e3", "99999999999999999999", "1 ", " 1", "1.5", "+1"};
        if (*info.values) {
            bad.push_back(choices_of(info).front().first + "x");
            bad.push_back("-1");
        } else {
            bad.push_back(std::to_string(info.low - 1));
            bad.push_back(std::to_string(info.high + 1));
        }
        for (const std::string& text : bad) {
            Options o = untouched;
            const Status s = set_option(o, info, text);
            EXPECT_TRUE(refused(s, {info.name, "\"" + text + "\""})) << info.name;
            if (*info.values)
                for (const auto& [name, value] : choices_of(info))
                    EXPECT_NE(s.text().find(name), std::string::npos) << s.text();
            else
                EXPECT_TRUE(refused(s, {std::to_string(info.low) + ".." + std::to_string(info.high), info.unit}));
            for (const OptionInfo& each : option_table()) EXPECT_EQ(each.get(o), each.get(untouched));
        }
    }
}

TEST(OptionTable, AliasesOfCaseFilesAreKnown) {
    Options o;
    ASSERT_TRUE(set_option(o, *find_option("mx_overflow"), "inf").ok());
    ASSERT_TRUE(set_option(o, *find_option("mx_overflow"), "sat").ok());
    EXPECT_EQ(o.mx_overflow, MxOverflow::saturate);
    EXPECT_EQ(option_text(*find_option("mx_overflow"), o), "saturate");
    ASSERT_TRUE(set_option(o, *find_option("landing"), "auto").ok());
    EXPECT_EQ(o.landing, Landing::automatic);
}

TEST(OptionTable, DefaultsAreThoseOfTheDocuments) {
    const Options o;
    EXPECT_EQ(o.dispatch_quant, Format::none);
    EXPECT_EQ(o.combine_quant, Format::none);
    EXPECT_EQ(o.mx_rule, MxRule::floor);
    EXPECT_EQ(o.mx_overflow, MxOverflow::saturate);
    EXPECT_EQ(o.expert_token_nums, TokenNums::count);
    EXPECT_EQ(o.expert_alignment, 1);
    EXPECT_EQ(o.depth, 2);
    EXPECT_EQ(o.rows_max, 0);
    EXPECT_EQ(o.cell_rows, 0);
    EXPECT_EQ(o.timeout_ms, 30000);
}

// ------------------------------------------------------------------------------------------------------------ environment

TEST(OptionEnvironment, SetsEveryOption) {
    for (const OptionInfo& info : option_table()) {
        Options o;
        const int64_t other = *info.values ? choices_of(info).back().second : info.high;
        Options target;
        info.set(target, other);
        const Variable v(variable_of(info), option_text(info, target));
        ASSERT_TRUE(set_options_from_environment(o).ok()) << variable_of(info);
        EXPECT_EQ(info.get(o), other) << variable_of(info);
    }
}

TEST(OptionEnvironment, LeavesTheRestAlone) {
    Options o = sound_options();
    ASSERT_TRUE(set_options_from_environment(o).ok());
    EXPECT_EQ(o.hidden, 64);
    const Variable v("SWITCHYARD_TIMEOUT_MS", "5000");
    ASSERT_TRUE(set_options_from_environment(o).ok());
    EXPECT_EQ(o.timeout_ms, 5000);
    EXPECT_EQ(o.hidden, 64);
}

TEST(OptionEnvironment, RefusalNamesTheVariable) {
    const Variable v("SWITCHYARD_TIMEOUT_MS", "soon");
    Options o;
    EXPECT_TRUE(refused(set_options_from_environment(o), {"SWITCHYARD_TIMEOUT_MS", "\"soon\"", "timeout_ms"}));
    const Variable w("SWITCHYARD_DISPATCH_QUANT", "");
    EXPECT_FALSE(set_options_from_environment(o).ok());
}

// -------------------------------------------------------------------------------------------------------------- one rank

TEST(CheckOptions, AcceptsWhatIsSound) {
    Options o = sound_options();
    EXPECT_TRUE(check_options(o, 1).ok());
    EXPECT_TRUE(check_options(o, 4095).ok());
    o.tokens_max = 0;
    EXPECT_TRUE(check_options(o, 3).ok());
    o = sound_options();
    o.hidden = 1;
    o.experts = 1;
    o.topk = 64;  // K may exceed E
    EXPECT_TRUE(check_options(o, 7).ok());
    for (const Format out :
         {Format::none, Format::int8_token, Format::mxfp8_e5m2, Format::mxfp8_e4m3, Format::fp8_e4m3_block128})
        for (const Format home : {Format::none, Format::int8_block8, Format::int8_block128})
            for (const TokenType type : {TokenType::f16, TokenType::bf16}) {
                o = sound_options();
                o.dispatch_quant = out;
                o.combine_quant = home;
                o.dtype = type;
                EXPECT_TRUE(check_options(o, 2).ok());
            }
    o = sound_options();
    o.dtype = TokenType::f32;
    EXPECT_TRUE(check_options(o, 2).ok());
    o = sound_options();
    o.dispatch_quant = Format::mxfp8_e5m2;
    o.mx_overflow = MxOverflow::inf;
    EXPECT_TRUE(check_options(o, 2).ok());
}

TEST(CheckOptions, RefusesEveryValueOutsideItsLimitsNamingOptionAndValue) {
    for (const OptionInfo& info : option_table())
        for (const int64_t value : {info.low - 1, info.high + 1}) {
            Options o = sound_options();
            info.set(o, value);
            if (info.get(o) != value) continue;  // a field that cannot hold it, such as deliver_weights
            EXPECT_TRUE(refused(check_options(o, 2), {info.name, std::to_string(value)})) << info.name;
        }
}

TEST(CheckOptions, RefusesNumbersBetweenTheNamesOfAChoice) {
    for (const int64_t alignment : {2, 8, 15, 17, 64, 127}) {
        Options o = sound_options();
        o.expert_alignment = alignment;
        EXPECT_TRUE(refused(check_options(o, 2), {"expert_alignment", std::to_string(alignment), "1, 16, 32, 128"}));
    }
    for (const Format format : {Format::int8_token, Format::mxfp8_e5m2, Format::mxfp8_e4m3, Format::fp8_e4m3_block128}) {
        Options o = sound_options();
        o.combine_quant = format;
        EXPECT_TRUE(refused(check_options(o, 2), {"combine_quant", "int8_block8"}));
    }
    for (const Format format : {Format::int8_block8, Format::int8_block128}) {
        Options o = sound_options();
        o.dispatch_quant = format;
        EXPECT_TRUE(refused(check_options(o, 2), {"dispatch_quant", "mxfp8_e5m2"}));
    }
}

TEST(CheckOptions, RefusesQuantisedF32) {
    for (const Format format : {Format::int8_token, Format::mxfp8_e5m2, Format::mxfp8_e4m3, Format::fp8_e4m3_block128}) {
        Options o = sound_options();
        o.dtype = TokenType::f32;
        o.dispatch_quant = format;
        EXPECT_TRUE(refused(check_options(o, 2), {"f32", option_text(*find_option("dispatch_quant"), o)}));
    }
    for (const Format format : {Format::int8_block8, Format::int8_block128}) {
        Options o = sound_options();
        o.dtype = TokenType::f32;
        o.combine_quant = format;
        EXPECT_TRUE(refused(check_options(o, 2), {"f32", option_text(*find_option("combine_quant"), o)}));
    }
}

TEST(CheckOptions, RefusesInfinityInE4M3) {
    Options o = sound_options();
    o.dispatch_quant = Format::mxfp8_e4m3;
    o.mx_overflow = MxOverflow::inf;
    EXPECT_TRUE(refused(check_options(o, 2), {"mx_overflow", "mxfp8_e4m3", "saturate"}));
    o.dispatch_quant = Format::none;
    EXPECT_TRUE(check_options(o, 2).ok()) << "a rule that no format uses does not matter";
}

TEST(CheckOptions, RefusesMoreRowsThanANumberOfARowCanSay) {
    Options o = sound_options();
    o.topk = 4096;
    o.tokens_max = (int64_t{1} << 31) / 4096;
    EXPECT_TRUE(refused(check_options(o, 2), {"tokens_max", "topk", "2147483648"}));
    o.tokens_max -= 1;
    EXPECT_TRUE(check_options(o, 2).ok());
}

TEST(CheckOptions, RefusesGroupsOfNoSize) {
    for (const int64_t ranks : {int64_t{0}, int64_t{-1}, int64_t{4096}, INT64_MAX})
        EXPECT_TRUE(refused(check_options(sound_options(), ranks), {std::to_string(ranks), "1..4095"}));
}

// ----------------------------------------------------------------------------------------------------------------- status

TEST(Status, CodesHaveNamesAndSuccessHasNone) {
    std::set<std::string> names;
    for (int32_t c = 0; c <= static_cast<int32_t>(Code::corrupt); ++c) {
        const std::string name = code_name(static_cast<Code>(c));
        EXPECT_NE(name, "unknown") << c;
        EXPECT_TRUE(names.insert(name).second) << name;
    }
    EXPECT_TRUE(Status().ok());
    EXPECT_EQ(Status().text(), "");
    const Status s(Code::depth, "one too many");
    EXPECT_FALSE(s.ok());
    const Error e(s);
    EXPECT_EQ(e.code(), Code::depth);
    EXPECT_STREQ(e.what(), "one too many");
}

}  // namespace
}  // namespace switchyard::test
