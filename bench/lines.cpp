#include "lines.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "case.hpp"

namespace switchyard::bench::lines {

using nlohmann::json;
using tools::Mistake;

// The fields of one line, each asked for by name and kind.
class Fields {
 public:
    Fields(const json& line, size_t number) : line_(line), number_(number) {}

    std::string text(const char* name) const { return get(name, "a text", &json::is_string).get<std::string>(); }
    double number(const char* name) const { return get(name, "a number", &json::is_number).get<double>(); }
    int64_t whole(const char* name) const { return get(name, "a whole number", &json::is_number_integer).get<int64_t>(); }
    bool truth(const char* name) const { return get(name, "true or false", &json::is_boolean).get<bool>(); }
    std::optional<double> maybe(const char* name) const {
        if (!line_.contains(name) || line_[name].is_null()) return {};
        return number(name);
    }
    std::vector<double> numbers(const char* name) const {
        return numbers(get(name, "a list of numbers", &json::is_array), name);
    }
    std::vector<std::vector<double>> square(const char* name, size_t side) const {
        std::vector<std::vector<double>> rows;
        if (!line_.contains(name) || line_[name].is_null()) return rows;
        for (const json& row : get(name, "a list of rows", &json::is_array)) {
            if (!row.is_array() || row.size() != side) wrong(name, fmt::format("rows of {} numbers", side), row);
            rows.push_back(numbers(row, name));
        }
        if (rows.size() != side) wrong(name, fmt::format("{} rows", side), line_[name]);
        return rows;
    }
    [[noreturn]] void wrong(const char* name, const std::string& expected, const json& found) const {
        std::string shown = found.dump(-1, ' ', false, json::error_handler_t::replace);
        if (shown.size() > 60) shown = shown.substr(0, 57) + "...";
        throw Mistake(
            fmt::format("line {}: \"{}\": expected {}, found {}; a page is made from what switchyard bench --json prints",
                        number_, name, expected, shown));
    }

 private:
    const json& get(const char* name, const char* expected, bool (json::*is)() const noexcept) const {
        static const json none;
        const json& value = line_.contains(name) ? line_[name] : none;
        if (!(value.*is)()) wrong(name, expected, value);
        return value;
    }
    std::vector<double> numbers(const json& list, const char* name) const {
        std::vector<double> out;
        for (const json& value : list) {
            if (!value.is_number()) wrong(name, "numbers", value);
            out.push_back(value.get<double>());
        }
        return out;
    }
    const json& line_;
    const size_t number_;
};

Row::Row(const Fields& f)
    : scenario(f.text("scenario")),
      cell(f.text("cell")),
      dtype(f.text("dtype")),
      routing(f.text("routing")),
      contestant(f.text("contestant")),
      label(f.text("label")),
      call(f.text("call")),
      settings(f.text("settings")),
      ranks(f.whole("ranks")),
      hidden(f.whole("hidden")),
      topk(f.whole("topk")),
      experts(f.whole("experts")),
      rounds(f.whole("rounds")),
      allocations(f.whole("allocations")),
      tokens(f.numbers("tokens")),
      p50(f.number("p50_us")),
      p99(f.number("p99_us")),
      min(f.number("min_us")),
      max(f.number("max_us")),
      bytes(f.number("bytes_per_rank")),
      gb_per_s(f.number("gb_per_s")),
      own(f.maybe("own_us")),
      wait(f.maybe("wait_us")),
      of_limit(f.maybe("of_limit")),
      rows_per_rank(f.maybe("rows_per_rank")),
      cost_ns(f.maybe("cost_ns")) {
    const std::string out = f.text("dispatch_quant"), home = f.text("combine_quant");
    formats = out == "none" && home == "none" ? "" : home == "none" ? out : out + "/" + home;
    if (ranks < 1 || ranks > 1024) f.wrong("ranks", "1 to 1024", ranks);
    if (tokens.size() != static_cast<size_t>(ranks)) f.wrong("tokens", fmt::format("{} numbers", ranks), tokens);
    if (!(p50 > 0)) f.wrong("p50_us", "more than 0", p50);
    waits = f.square("wait_by_rank_us", static_cast<size_t>(ranks));
}

bool Row::same_tokens() const {
    return std::all_of(tokens.begin(), tokens.end(), [&](double t) { return t == tokens[0]; });
}
bool Row::ours() const {
    return contestant == "packed" || contestant == "in_place" || contestant == "padded";
}
std::string Row::ranks_text() const {
    return fmt::format("{} {}", ranks, ranks == 1 ? "rank" : "ranks");
}
std::string Row::name() const {
    return fmt::format("{}, {}", scenario, ranks_text());
}
std::string Row::tokens_text() const {
    if (same_tokens()) return fmt::format("{:g}", tokens[0]);
    const auto end = tokens.begin() + std::min<std::ptrdiff_t>(8, std::ssize(tokens));
    return fmt::format("{:g}{}", fmt::join(tokens.begin(), end, ","), end == tokens.end() ? "" : ",…");
}
std::string Row::task() const {
    return fmt::format("K {} · E {} · H {} · {} · routing {}", topk, experts, hidden, dtype, routing);
}
std::string Row::shape() const {
    return fmt::format("T {} · {}{}", tokens_text(), task(), formats.empty() ? "" : " · " + formats);
}

namespace {

void take_curve(Row& row, const Fields& f, const json& line) {
    row.curve = f.text("curve");
    if (line.contains("at") && line["at"].is_number()) {
        row.at = line["at"].get<double>();
        row.at_text = fmt::format("{:g}", *row.at);
    } else {
        row.at_text = f.text("at");
    }
}

}  // namespace

Run::Run(const std::vector<json>& lines) {
    for (size_t i = 0; i < lines.size(); ++i) {
        const json& line = lines[i];
        const Fields f(line, i + 1);
        if (!line.is_object()) throw Mistake(fmt::format("line {}: expected an object of JSON", i + 1));
        if (line.contains("switchyard") != (i == 0))
            throw Mistake(fmt::format("line {}: {}", i + 1,
                                      i == 0 ? "expected the machine's, with \"switchyard\", as the first that "
                                               "switchyard bench --json prints"
                                             : "a second run begins here; times compare within one run "
                                               "only: one page for each"));
        if (i == 0) {
            f.text("switchyard");
            machine = line;
        } else if (line.contains("contestant")) {
            rows.emplace_back(f);
            if (line.contains("curve")) take_curve(rows.back(), f, line);
        } else if (line.contains("bar")) {
            bars.push_back({f.text("bar"), f.text("cell"), f.number("bound"), f.number("measured"), f.number("of_best"),
                            f.number("from_own_start"), f.truth("at_most"), f.truth("missing"), f.truth("reached")});
        } else if (line.contains("seed_table")) {
            SeedLine s{f.text("seed_table"), f.text("cell"), f.text("format"), f.number("published_us_other_machine"), {}};
            for (size_t c = 0; c < std::size(s.us); ++c) s.us[c] = f.number(fmt::format("{}_us", seed_contestants[c]).c_str());
            seeds.push_back(s);
        } else if (line.contains("step")) {
            continue;  // of a curve: the page finds the steps itself
        } else {
            throw Mistake(fmt::format("line {}: neither a result, a bar nor a line of the sample's table", i + 1));
        }
    }
    if (rows.empty() && bars.empty() && seeds.empty()) throw Mistake("there is no result among the lines");
}

std::vector<json> read(const std::string& path) {
    std::ifstream in(path);
    if (!in) throw Mistake(fmt::format("--from {}: cannot be opened: {}", path, std::strerror(errno)));
    std::vector<json> lines;
    for (std::string line; std::getline(in, line);) {
        try {
            lines.push_back(json::parse(line));
        } catch (const json::exception&) {
            throw Mistake(fmt::format("--from {}: line {} is not JSON; give what switchyard bench --json printed", path,
                                      lines.size() + 1));
        }
    }
    if (in.bad()) throw Mistake(fmt::format("--from {}: cannot be read: {}", path, std::strerror(errno)));
    if (lines.empty())
        throw Mistake(fmt::format("--from {}: the file is empty; give what switchyard bench --json printed", path));
    return lines;
}

}  // namespace switchyard::bench::lines
