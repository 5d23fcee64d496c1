#include "report.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <stdexcept>

#include "case.hpp"
#include "lines.hpp"
#include "plot.hpp"

namespace switchyard::bench {
namespace {

using lines::Bar;
using lines::Row;
using lines::Run;
using lines::SeedLine;
using nlohmann::json;
using plot::escaped;
using plot::number_text;
using plot::time_text;
using tools::Mistake;
using Rows = std::vector<const Row*>;

// ------------------------------------------------------------------------------------------------------------------ groups

// Rows with the same key, in the order in which the keys come first.
template <class Key>
std::vector<Rows> grouped(const Rows& rows, Key key) {
    std::vector<Rows> groups;
    std::map<std::string, size_t> place;
    for (const Row* r : rows) {
        const auto [found, is_new] = place.try_emplace(key(*r), groups.size());
        if (is_new) groups.emplace_back();
        groups[found->second].push_back(r);
    }
    return groups;
}
template <class Keep>
Rows chosen(const Rows& rows, Keep keep) {
    Rows out;
    for (const Row* r : rows)
        if (keep(*r)) out.push_back(r);
    return out;
}
Rows all_of(const std::vector<Row>& rows) {
    Rows out;
    for (const Row& r : rows) out.push_back(&r);
    return out;
}
// What can be compared side by side: a cell, and in it one shape.
std::vector<Rows> cells_of(const Rows& rows) {
    return grouped(chosen(rows, [](const Row& r) { return r.curve.empty(); }), [](const Row& r) {
        return fmt::format("{}|{:g}|{}|{}|{}|{}", r.cell, fmt::join(r.tokens, ","), r.topk, r.experts, r.hidden, r.routing);
    });
}

std::string call_text(const std::string& call) {
    return call == "first_touch"         ? "dispatch + first touch"
           : call == "first_touch_tiles" ? "dispatch + first touch by tiles"
                                         : call;
}

// -------------------------------------------------------------------------------------------------------------------- html

std::string figure(const std::string& drawing, const std::string& head, const std::string& note = "") {
    return fmt::format("<figure><figcaption><b>{}</b>{}</figcaption>{}</figure>\n", escaped(head),
                       note.empty() ? "" : " <span>" + escaped(note) + "</span>", drawing);
}
std::string grid(const std::string& figures, const char* kind = "grid") {
    return fmt::format("<div class=\"{}\">{}</div>\n", kind, figures);
}
std::string cell_head(const Row& r) {
    return fmt::format("<h3>{}</h3><p class=\"shape\">{}</p>\n", escaped(r.name()), escaped(r.shape()));
}
std::string scrolling(const char* name, const std::string& inside) {
    return fmt::format("<div class=\"scroll\" role=\"region\" aria-label=\"{}\" tabindex=\"0\">{}</div>\n", name, inside);
}
// A number as it is read, and exactly as the line has it.
std::string cell(double exact, const std::string& shown) {
    return fmt::format("<td class=\"n\"><data value=\"{}\">{}</data></td>", json(exact).dump(), escaped(shown));
}
std::string cell(std::optional<double> exact, std::string (*shown)(double)) {
    return exact ? cell(*exact, shown(*exact)) : "<td class=\"n\">–</td>";
}
std::string cell(const std::string& text, const char* kind = "") {
    return fmt::format("<td class=\"{}\">{}</td>", kind, escaped(text));
}
std::string head_row(const std::vector<const char*>& heads, size_t texts) {
    std::string out = "<thead><tr>";
    for (size_t i = 0; i < heads.size(); ++i)
        out += fmt::format("<th scope=\"col\" class=\"{}\">{}</th>", i < texts ? "" : "n", escaped(heads[i]));
    return out + "</tr></thead>\n";
}
std::string percent(double share) {
    return fmt::format("{:.0f} %", 100 * share);
}
std::string us_text(double us) {
    return fmt::format("{:.1f}", us);
}

// ---------------------------------------------------------------------------------------------------------------- sections

// packed in every cell, beside the limit and the quickest that is neither ours nor a limit.
std::string summary(const Run& run) {
    std::string body;
    for (const Rows& in_cell : cells_of(all_of(run.rows)))
        for (const Rows& same : grouped(in_cell, [](const Row& r) { return r.formats; })) {
            std::string calls;
            const Row* packed = nullptr;
            bool compared = false;
            for (const char* call : {"dispatch", "combine"}) {
                const Row *ours = nullptr, *peer = nullptr;
                for (const Row* r : same) {
                    if (r->call != call) continue;
                    if (r->contestant == "packed") ours = packed = r;
                    if (!r->ours() && r->contestant != "limit" && (!peer || r->p50 < peer->p50)) peer = r;
                }
                compared = compared || (ours && (peer || ours->of_limit));
                calls += ours ? cell(ours->p50, time_text(ours->p50)) + cell(ours->of_limit, percent) : "<td></td><td></td>";
                calls += ours && peer
                             ? fmt::format("<td>{} ×{}</td>", escaped(peer->contestant), number_text(peer->p50 / ours->p50))
                             : "<td></td>";
            }
            if (compared)
                body += fmt::format(
                    "<tr><th scope=\"row\">{}</th>{}{}</tr>\n", escaped(packed->name()),
                    cell("T " + packed->tokens_text() + (packed->formats.empty() ? "" : " · " + packed->formats)), calls);
        }
    if (body.empty()) return "";
    const std::string heads =
        "<th scope=\"col\" class=\"n\">p50</th><th scope=\"col\" class=\"n\">of limit</th><th "
        "scope=\"col\">quickest other</th>";
    return "<p>Switchyard with landing <b>packed</b>: median time, the limit’s time as a share of it, and how many times as "
           "long "
           "the quickest other way took.</p>" +
           scrolling("packed at a glance",
                     "<table><thead><tr><td colspan=\"2\"></td><th scope=\"colgroup\" colspan=\"3\">dispatch</th><th "
                     "scope=\"colgroup\" colspan=\"3\">combine</th></tr><tr><td colspan=\"2\"></td>" +
                         heads + heads + "</tr></thead><tbody>\n" + body + "</tbody></table>");
}

std::string name_with_formats(const Row& r) {
    return r.contestant + (r.formats.empty() ? "" : " " + r.formats);
}

std::string time_against_tokens(const Run& run) {
    std::string out;
    const Rows rows = chosen(all_of(run.rows), [](const Row& r) {
        return (r.curve.empty() || r.curve == "tokens") && r.same_tokens() && r.tokens[0] > 0 &&
               (r.call == "dispatch" || r.call == "combine");
    });
    // Formats share a plot while there is room for the names of its lines.
    const bool apart = std::any_of(rows.begin(), rows.end(), [](const Row* r) { return r->formats.size() > 12; });
    for (const Rows& panel : grouped(rows, [&](const Row& r) {
             return fmt::format("{}|{}|{}|{}", r.call, r.ranks, r.task(), apart ? r.formats : "");
         })) {
        const Row& first = *panel[0];
        plot::Lines p{.title = fmt::format("{}, {}: time against tokens per rank", first.call, first.ranks_text()),
                      .x_text = "tokens per rank",
                      .y_text = "median",
                      .x_names = {},
                      .log_x = true,
                      .log_y = true,
                      .lines = {}};
        bool rises = false;  // something was measured at two places
        for (const Rows& line : grouped(panel, name_with_formats)) {
            const Row& of = *line[0];
            plot::Line l{apart ? of.contestant : name_with_formats(of), of.contestant, !apart && !of.formats.empty(), {}};
            for (const Row* r : line) {
                const std::string told =
                    fmt::format("{}, {} tokens: {} ({})", r->label, r->tokens_text(), time_text(r->p50), r->cell);
                l.points.push_back({r->tokens[0], r->p50, told, ""});
                rises = rises || r->tokens[0] != of.tokens[0];
            }
            p.lines.push_back(std::move(l));
        }
        if (rises)
            out += figure(plot::svg(p), fmt::format("{}, {}", first.call, first.ranks_text()),
                          first.task() + (apart && !first.formats.empty() ? " · " + first.formats : ""));
    }
    if (out.empty()) return "";
    return "<p>Both axes are logarithmic. Where several cells measured the same, each has its point, and the line runs through "
           "their mean.</p>" +
           grid(out, "grid pairs");
}

std::string against_peers(const Run& run) {
    std::string out;
    for (const Rows& in_cell : cells_of(all_of(run.rows))) {
        std::string figures;
        for (const std::string call : {"dispatch", "first_touch", "combine"}) {
            Rows rows = chosen(in_cell, [&](const Row& r) {
                return r.call == call || (call == "first_touch" && r.call == "first_touch_tiles");
            });
            if (rows.size() < 2) continue;
            const Row* base = nullptr;
            for (const Row* r : rows)
                if (r->call == call && r->contestant == "packed" && (!base || r->label == "packed")) base = r;
            std::stable_sort(rows.begin(), rows.end(), [](const Row* a, const Row* b) { return a->p50 < b->p50; });
            // Bars are torn off where they would press the others together.
            double end = rows.back()->p50, marks = 0;
            if (base) end = std::min(end, 6 * base->p50);
            for (const Row* r : rows)
                if (r->p50 <= end) marks = std::max(marks, r->p99);
            end = std::max(end, std::min(marks, 1.25 * end));
            plot::Bars p{.title = fmt::format("{}: {}, median and 99th percentile of each contestant", in_cell[0]->name(),
                                              call_text(call)),
                         .end = end,
                         .heads = {"p50"},
                         .rows = {},
                         .lines = {}};
            if (base) p.heads.push_back("ratio");
            for (const Row* r : rows) {
                plot::BarRow bar{
                    .label = r->label + (r->call == "first_touch_tiles" ? ", tiles" : ""),
                    .contestant = r->contestant,
                    .parts = {r->p50},
                    .mark = r->p99,
                    .numbers = {time_text(r->p50)},
                    .tip = fmt::format("{} {}: p50 {}, p99 {}, min {}, max {}; {} rounds", r->label, r->call, time_text(r->p50),
                                       time_text(r->p99), time_text(r->min), time_text(r->max), r->rounds),
                    .strong = r == base};
                if (base) bar.numbers.push_back(r == base ? "1" : "×" + number_text(r->p50 / base->p50));
                p.rows.push_back(std::move(bar));
            }
            figures += figure(plot::svg(p), call_text(call), base ? fmt::format("ratio to {}", base->label) : "");
        }
        if (!figures.empty()) out += cell_head(*in_cell[0]) + grid(figures);
    }
    if (out.empty()) return "";
    return "<p>Shorter is better. A bar is the median, the thin line reaches to the 99th percentile (an arrow: beyond the "
           "plot). "
           "Bars with a cut end are longer than six times <b>packed</b>. The dashed outline is a limit, which delivers "
           "nothing.</p>" +
           out;
}

// Both calls of a cell in one plot, a bar for each row that `bar` knows.
template <class MakeBar>
std::string by_cell(const Run& run, const plot::Bars& empty, MakeBar make) {
    std::string figures;
    for (const Rows& in_cell : cells_of(all_of(run.rows))) {
        plot::Bars p = empty;
        p.title = fmt::format("{}: {}", in_cell[0]->name(), empty.title);
        double longest = 0;
        for (const char* call : {"dispatch", "combine"}) {
            bool headed = false;
            for (const Row* r : in_cell) {
                if (r->call != call) continue;
                std::optional<plot::BarRow> bar = make(*r);
                if (!bar) continue;
                if (!headed) p.rows.push_back({.label = call, .contestant = {}, .parts = {}, .numbers = {}, .tip = {}});
                headed = true;
                bar->label = r->label;
                bar->contestant = r->contestant;
                bar->strong = r->contestant == "packed";
                double sum = 0;
                for (const double part : bar->parts) sum += part;
                longest = std::max(longest, sum);
                p.rows.push_back(std::move(*bar));
            }
        }
        if (p.rows.empty()) continue;
        p.end = empty.end > 0 ? empty.end : longest;
        figures += figure(plot::svg(p), in_cell[0]->name(), in_cell[0]->shape());
    }
    return figures.empty() ? "" : grid(figures);
}

std::string share_of_limit(const Run& run) {
    const plot::Bars plain{.title = "share of the limit",
                           .end = 1.4,
                           .heads = {"share"},
                           .rows = {},
                           .lines = {{1 / 1.15, "1/1.15"}, {1.0, "limit"}}};
    const std::string out = by_cell(run, plain, [](const Row& r) -> std::optional<plot::BarRow> {
        if (!r.of_limit || r.contestant == "limit") return {};
        return plot::BarRow{
            .label = {},
            .contestant = {},
            .parts = {*r.of_limit},
            .numbers = {percent(*r.of_limit)},
            .tip = fmt::format("{} {}: limit / {} = {}", r.label, r.call, time_text(r.p50), percent(*r.of_limit))};
    });
    if (out.empty()) return "";
    return "<p>The limit’s time as a share of each contestant’s: longer is better. The limit streams as many bytes in memory "
           "of "
           "its own, or reads and sums them there. The first dashed line is 1/1.15, where a call takes 1.15 times as long as "
           "the "
           "limit. Beyond the second is who moves fewer bytes than the limit, or has found them in cache; a cut bar goes "
           "on.</p>" +
           out;
}

std::string own_and_waiting(const Run& run) {
    const plot::Bars plain{.title = "own work and waiting", .end = 0, .heads = {"own", "waiting"}, .rows = {}, .lines = {}};
    const std::string out = by_cell(run, plain, [](const Row& r) -> std::optional<plot::BarRow> {
        if (!r.own || !r.wait) return {};
        return plot::BarRow{
            .label = {},
            .contestant = {},
            .parts = {*r.own, *r.wait},
            .numbers = {time_text(*r.own), time_text(*r.wait)},
            .tip = fmt::format("{} {}: own work {}, waiting {}", r.label, r.call, time_text(*r.own), time_text(*r.wait))};
    });
    if (out.empty()) return "";
    return "<p>Filled: the slowest rank’s median time that was not waiting. <span class=\"wait\">Outlined</span>: the largest "
           "median of waiting. They may be those of two ranks, so their sum is not the time of a round. Only contestants that "
           "can "
           "tell them apart.</p>" +
           out;
}

std::string wait_map(const Row& r) {
    size_t from = 0, on = 0;
    for (size_t i = 0; i < r.waits.size(); ++i)
        for (size_t j = 0; j < r.waits.size(); ++j)
            if (r.waits[i][j] > r.waits[from][on]) from = i, on = j;
    const double most = r.waits[from][on];
    const std::string longest =
        most > 0 ? fmt::format("longest: rank {} for rank {}, {} a round", from, on, time_text(most)) : "nobody waited";
    const std::string drawing = plot::svg(plot::Heat{
        .title = fmt::format("{}, {} {}: how long each rank waited for each; {}", r.name(), r.label, r.call, longest),
        .rows = r.waits,
        .tip = [&](size_t i, size_t j) {
            return fmt::format("rank {} waited for rank {}: {} a round", i, j, time_text(r.waits[i][j]));
        }});
    const bool wide = r.waits.size() > 8 && r.waits.size() <= 16;
    return fmt::format("<div class=\"{}\">{}</div>", wide ? "whole" : "",
                       figure(wide ? scrolling("waiting by rank", drawing) : drawing, r.label + " " + r.call, longest));
}

std::string waiting_by_rank(const Run& run) {
    const auto maps = [](const Rows& rows) {
        std::string out;
        for (const Rows& in_cell : grouped(rows, [](const Row& r) { return r.cell + "|" + r.shape(); })) {
            std::string figures;
            for (const Row* r : in_cell) figures += wait_map(*r);
            out += cell_head(*in_cell[0]) + grid(figures);
        }
        return out;
    };
    const auto carry = [&](bool curve) {
        return chosen(all_of(run.rows), [&](const Row& r) { return r.waits.size() > 1 && r.curve.empty() != curve; });
    };
    std::string out = maps(carry(false));
    if (const std::string more = maps(carry(true)); !more.empty())
        out += out.empty() ? more : "<details><summary>Along the curves</summary>" + more + "</details>\n";
    if (out.empty()) return "";
    return "<p>Mean over the rounds, in µs a round, that the rank of a row stood waiting with the rank of the column as the "
           "one it "
           "lacked. Full colour is the longest of its map; its pair is framed and named.</p>" +
           out;
}

constexpr double steep = 1.3;

// What is compared along a curve: what the line says a row costs; where it says nothing a row's time, or where rows themselves
// grow, that of 1024 of its columns.
double cost_of(const Row& r) {
    if (r.cost_ns) return *r.cost_ns / 1000;
    return r.p50 / *r.rows_per_rank / (r.curve == "hidden" ? static_cast<double>(r.hidden) / 1024 : 1);
}

// One contestant along a curve. `names`: the places on the axis when they are no numbers, else null.
plot::Line curve_line(const Rows& rows, std::vector<std::string>* names) {
    const Row& first = *rows[0];
    plot::Line line{name_with_formats(first), first.contestant, !first.formats.empty(), {}};
    for (const Row* r : rows) {
        double x = r->at.value_or(0);
        if (names) {
            auto found = std::find(names->begin(), names->end(), r->at_text);
            if (found == names->end()) found = names->insert(found, r->at_text);
            x = static_cast<double>(found - names->begin());
        }
        line.points.push_back({x, cost_of(*r),
                               fmt::format("{}, {} {}: {} ({} for {:g} rows)", r->label, r->curve, r->at_text,
                                           time_text(cost_of(*r)), time_text(r->p50), *r->rows_per_rank),
                               ""});
    }
    std::stable_sort(line.points.begin(), line.points.end(), [](const auto& a, const auto& b) { return a.x < b.x; });
    for (size_t i = 1; i < line.points.size(); ++i) {
        const double step = line.points[i].y / line.points[i - 1].y;
        if (line.points[i].x > line.points[i - 1].x && step > steep) line.points[i].step = "×" + number_text(step);
    }
    return line;
}

std::string curves(const Run& run) {
    std::string out;
    const Rows rows = chosen(all_of(run.rows), [](const Row& r) {
        return !r.curve.empty() && r.rows_per_rank && *r.rows_per_rank > 0 && (r.call == "dispatch" || r.call == "combine");
    });
    for (const Rows& panel : grouped(
             rows, [](const Row& r) { return fmt::format("{}|{}|{}", r.curve, r.call, r.curve == "ranks" ? 0 : r.ranks); })) {
        const Row& first = *panel[0];
        const std::string where = first.curve == "ranks" ? "" : ", " + first.ranks_text();
        plot::Lines p{.title = fmt::format("{}{}: time per row against {}", first.call, where, first.curve),
                      .x_text = first.curve,
                      .y_text = first.cost_ns             ? "what a row costs"
                                : first.curve == "hidden" ? "median / rows of a rank / 1024 columns"
                                                          : "median / rows of a rank",
                      .x_names = {},
                      .lines = {}};
        const bool named = std::any_of(panel.begin(), panel.end(), [](const Row* r) { return !r->at; });
        for (const Rows& line : grouped(panel, name_with_formats))
            p.lines.push_back(curve_line(line, named ? &p.x_names : nullptr));
        std::vector<double> xs, ys;
        int64_t steps = 0;
        for (const plot::Line& line : p.lines)
            for (const plot::Point& point : line.points) {
                xs.push_back(point.x);
                ys.push_back(point.y);
                steps += !point.step.empty();
            }
        const auto [nearest, farthest] = std::minmax_element(xs.begin(), xs.end());
        const auto [least, most] = std::minmax_element(ys.begin(), ys.end());
        p.log_x = !named && *nearest > 0 && *farthest > 8 * *nearest;
        p.log_y = *most > 6 * *least;
        out += figure(
            plot::svg(p), fmt::format("{} against {}{}", first.call, first.curve, where),
            fmt::format("{} {} above ×{}", steps ? fmt::format("{}", steps) : "no", steps == 1 ? "step" : "steps", steep));
    }
    if (out.empty()) return "";
    return fmt::format(
               "<p>Time per row, as one axis of the task grows and the rest stays. A ring marks a step of more than ×{} from "
               "the point before, with its factor. Where the least and the most are far apart the axes are logarithmic, "
               "otherwise time begins at 0.</p>",
               steep) +
           grid(out, "grid pairs");
}

std::string bars_table(const Run& run) {
    if (run.bars.empty()) return "";
    const auto known = std::count_if(run.bars.begin(), run.bars.end(), [](const Bar& b) { return !b.missing; });
    const auto reached = std::count_if(run.bars.begin(), run.bars.end(), [](const Bar& b) { return b.reached; });
    std::string body;
    for (const Bar& b : run.bars) {
        const auto beside = [](double v) { return v == 0 ? std::string("<td></td>") : cell(v, number_text(v)); };
        body += fmt::format(
            "<tr class=\"{0}\"><td class=\"state\">{1}</td><th scope=\"row\">{2}</th>{3}<td class=\"n\">{4} "
            "{5:g}</td>{6}{7}{8}</tr>\n",
            b.missing   ? "absent"
            : b.reached ? "reached"
                        : "missed",
            b.missing   ? "absent"
            : b.reached ? "✓ reached"
                        : "✗ missed",
            escaped(b.text), cell(b.cell), b.at_most ? "≤" : "≥", b.bound,
            b.missing ? "<td class=\"n\">–</td>" : cell(b.measured, number_text(b.measured)), beside(b.of_best),
            beside(b.from_own_start));
    }
    return fmt::format(
               "<p><b>{} of {}</b> bars reached. Measured: medians of the time that all ranks share. Not judged: the quickest "
               "round of each, and medians of the slowest rank’s time from its own start.</p>",
               reached, known) +
           scrolling("bars", "<table class=\"bars\">" +
                                 head_row({"", "bar", "where", "bound", "measured", "best only", "own start"}, 3) +
                                 "<tbody>\n" + body + "</tbody></table>");
}

std::string seed_table(const Run& run) {
    if (run.seeds.empty()) return "";
    std::string body;
    for (const SeedLine& s : run.seeds) {
        const SeedLine* plain = nullptr;
        for (const SeedLine& other : run.seeds)
            if (other.call == s.call && other.cell == s.cell && other.format == "none") plain = &other;
        const auto pair = [&](double us, double plain_us, const char* kind) {
            return fmt::format("<td class=\"n {0}\"><data value=\"{1}\">{2}</data></td><td class=\"n {0}\">{3}</td>", kind,
                               json(us).dump(), us > 0 ? us_text(us) : "–",
                               plain && plain != &s && us > 0 ? "×" + number_text(plain_us / us) : "");
        };
        body += "<tr>" + cell(s.call) + cell(s.cell) + cell(s.format == "none" ? "unquantised" : s.format);
        body += pair(s.published, plain ? plain->published : 0, "foreign");
        for (size_t c = 0; c < std::size(s.us); ++c) body += pair(s.us[c], plain ? plain->us[c] : 0, "");
        body += "</tr>\n";
    }
    return "<p>The published figures, shaded, are <b>another machine’s</b>: 8 NPUs, from the description of the CANN sample. "
           "Their "
           "times do not compare with those measured here; what quantising gains does.</p>" +
           scrolling(
               "seed table",
               "<table><thead><tr><td colspan=\"3\"></td><th scope=\"colgroup\" colspan=\"2\" class=\"foreign\">published: "
               "another machine</th><th scope=\"colgroup\" colspan=\"2\">here: the sample’s protocol</th><th "
               "scope=\"colgroup\" "
               "colspan=\"2\">here: packed, read</th><th scope=\"colgroup\" colspan=\"2\">here: padded, push</th></tr><tr><th "
               "scope=\"col\">call</th><th scope=\"col\">cell</th><th scope=\"col\">format</th><th scope=\"col\" class=\"n "
               "foreign\">µs</th><th scope=\"col\" class=\"n foreign\">gain</th>" +
                   [] {
                       std::string heads;
                       for (size_t c = 0; c < std::size(lines::seed_contestants); ++c)
                           heads += "<th scope=\"col\" class=\"n\">µs</th><th scope=\"col\" class=\"n\">gain</th>";
                       return heads;
                   }() +
                   "</tr></thead><tbody>\n" + body + "</tbody></table>");
}

std::string everything(const Run& run, const std::vector<json>& told) {
    std::string body, raw;
    for (const Row& r : run.rows) {
        body += "<tr>" + cell(r.cell) + cell(r.tokens_text(), "n") + cell(call_text(r.call));
        body += fmt::format("<th scope=\"row\" class=\"{}\">{}</th>", plot::series_class(r.contestant), escaped(r.label));
        body += cell(static_cast<double>(r.rounds), fmt::format("{}", r.rounds));
        for (const double us : {r.p50, r.p99, r.min, r.max}) body += cell(us, us_text(us));
        body += cell(r.own, us_text) + cell(r.wait, us_text) + cell(r.of_limit, percent);
        body += cell(r.bytes, fmt::format("{:.2f}", r.bytes / 1e6)) + cell(r.gb_per_s, fmt::format("{:.1f}", r.gb_per_s));
        body += cell(static_cast<double>(r.allocations), fmt::format("{}", r.allocations)) + cell(r.settings, "settings") +
                "</tr>\n";
    }
    for (const json& line : told) raw += escaped(line.dump(-1, ' ', false, json::error_handler_t::replace)) + "\n";
    std::string out;
    if (!body.empty())
        out = fmt::format("<details><summary>Table of {} results</summary><p>Times in µs.</p>", run.rows.size()) +
              scrolling("all results",
                        "<table class=\"all\">" +
                            head_row({"cell", "T", "call", "contestant", "rounds", "p50", "p99", "min", "max", "own work",
                                      "waiting", "of limit", "MB/rank", "GB/s", "allocations", "settings"},
                                     4) +
                            "<tbody>\n" + body + "</tbody></table>") +
              "</details>\n";
    return out + "<details><summary>The lines of --json that this page was made from</summary>" +
           scrolling("lines of JSON", "<pre id=\"lines\">" + raw + "</pre>") + "</details>\n";
}

// -------------------------------------------------------------------------------------------------------------------- page

constexpr const char* style = R"(
:root{color-scheme:light dark;--paper:#fdfdfb;--ink:#1b1e23;--soft:#59616c;--grid:#e4e7ea;--tint:#f1f3f1;--good:#1c6b3c;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e7e9ec;--soft:#a3abb6;--grid:#2d333a;--tint:#1e2329;--good:#7ccf9b;--bad:#ff9d94}}
*{box-sizing:border-box}
body{margin:0 auto;padding:2.2rem 1.5rem 4rem;max-width:1200px;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%;overflow-wrap:anywhere}
h1{font-size:1.75rem;line-height:1.2;letter-spacing:-.015em;margin:0}
h2{font-size:1.25rem;letter-spacing:-.01em;margin:3rem 0 .4rem;padding-top:.9rem;border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:1.8rem 0 0}
p{max-width:72ch;margin:.4rem 0 1rem}p.lead,.shape,figcaption span{color:var(--soft)}p.lead{margin:.25rem 0 1.2rem;max-width:none}
.shape{margin:0 0 .6rem;font-size:.85rem}
nav{margin:1.2rem 0 0;font-size:.9rem}nav a{color:inherit;text-decoration-color:var(--soft);text-underline-offset:.2em;margin-right:1.1em;white-space:nowrap}
a:focus-visible,summary:focus-visible,.scroll:focus-visible{outline:2px solid var(--packed);outline-offset:2px}
.machine{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.1rem 1.2rem;margin:.6rem 0;font-size:.85rem}
.machine dt{color:var(--soft)}.machine dd{margin:0}
pre{margin:.4rem 0;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre.command{padding:.7rem .9rem;background:var(--tint);border-radius:4px;white-space:pre-wrap;max-width:100%}pre.command span{display:inline-block;max-width:100%}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:1.6rem 1.9rem;align-items:start}.pairs{grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr))}.whole{grid-column:1/-1}
figure{margin:0;min-width:0;break-inside:avoid}figcaption{font-size:.85rem;line-height:1.35;margin-bottom:.45rem}figcaption b{display:block;font-size:.95rem}
.scroll{overflow-x:auto;max-width:100%}.scroll svg.plot{width:auto;max-width:none}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
th,td{padding:.22rem .7rem .22rem 0;text-align:left;vertical-align:baseline;border-bottom:1px solid var(--grid);white-space:nowrap}
thead th{color:var(--soft);font-weight:600;border-bottom-color:var(--soft)}tbody th{font-weight:600}.n{text-align:right}
.bars tbody th{font-weight:400;white-space:normal;min-width:17rem}.state{font-weight:600}.reached .state{color:var(--good)}.missed .state{color:var(--bad)}.absent{color:var(--soft)}.missed .n data{color:var(--bad);font-weight:600}
.foreign{background:var(--tint);color:var(--soft);font-style:italic;padding-left:.7rem}
.all tbody th{color:var(--k)}.settings{color:var(--soft)}.wait{color:var(--wait);font-weight:600}
details{margin:.8rem 0}summary{cursor:pointer;font-weight:600}
footer{margin-top:3rem;padding-top:.9rem;border-top:1px solid var(--grid);color:var(--soft);font-size:.85rem}
@media(max-width:560px){body{padding:1.4rem 1rem 3rem}.machine{grid-template-columns:1fr}.machine dt{margin-top:.35rem}h1{font-size:1.4rem}}
@media print{body{max-width:none}.scroll{overflow:visible}nav{display:none}}
)";

// What the machine's line says, in words where there are some, and how the ranks were started.
std::string machine_list(const json& machine) {
    static const std::vector<std::pair<std::string, std::string>> words = {{"processor", "processor"},
                                                                           {"cpus", "CPUs"},
                                                                           {"system", "system"},
                                                                           {"compiler", "compiler"},
                                                                           {"build", "build"},
                                                                           {"kernels", "kernels"},
                                                                           {"hidden", "columns H"},
                                                                           {"topk", "experts per token K"},
                                                                           {"seed", "seed"},
                                                                           {"load_before", "load before"},
                                                                           {"huge_pages_shared", "huge pages, shared"}};
    std::string out;
    const auto say = [&](const std::string& name, const std::string& value) {
        out += fmt::format("<dt>{}</dt><dd>{}</dd>\n", escaped(name), escaped(value));
    };
    const auto text = [](const json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); };
    for (const auto& [field, word] : words)
        if (machine.contains(field)) say(word, text(machine[field]));
    for (const auto& [field, value] : machine.items()) {
        const bool known = std::any_of(words.begin(), words.end(), [&](const auto& w) { return w.first == field; });
        if (!known && field != "switchyard" && field != "command" && field != "begun" && field != "start")
            say(field, text(value));
    }
    if (machine.contains("start") && machine["start"].is_array())
        for (const json& start : machine["start"])
            if (start.is_object() && start.contains("ranks") && start.contains("by"))
                say(text(start["ranks"]) + " ranks by", text(start["by"]));
    return out;
}

// "decode, prefill on 2, 8 ranks; curves over tokens, hidden"
std::string scenarios_text(const Run& run) {
    std::vector<std::string> names, axes;
    std::vector<int64_t> ranks;
    const auto add = [](auto& list, const auto& value) {
        if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
    };
    for (const Row& r : run.rows) {
        if (!r.curve.empty()) {
            add(axes, r.curve);
            continue;
        }
        add(names, r.scenario);
        add(ranks, r.ranks);
    }
    std::sort(ranks.begin(), ranks.end());
    std::string text = fmt::format("{}", fmt::join(names, ", "));
    if (!names.empty()) text += fmt::format(" on {} {}", fmt::join(ranks, ", "), ranks.back() == 1 ? "rank" : "ranks");
    if (!axes.empty()) text += fmt::format("{}curves over {}", text.empty() ? "" : "; ", fmt::join(axes, ", "));
    return text.empty() ? "bars" : text;
}

// A command that wraps between its words.
std::string command_block(const std::string& command) {
    std::string out = "<p>To repeat it:</p><pre class=\"command\">";
    for (size_t at = 0; at < command.size();) {
        const size_t space = std::min(command.find(' ', at), command.size());
        out += fmt::format("{}<span>{}</span>", at ? " " : "", escaped(std::string_view(command).substr(at, space - at)));
        at = space + 1;
    }
    return out + "</pre>\n";
}

}  // namespace

std::string report_page(const std::vector<json>& told) {
    const Run run(told);
    const auto of_machine = [&](const char* field, const std::string& otherwise) {
        return run.machine.contains(field) && run.machine[field].is_string() ? run.machine[field].get<std::string>()
                                                                             : otherwise;
    };
    struct Section {
        const char *id, *title;
        std::string body;
    };
    const Section sections[] = {
        {"summary", "At a glance", summary(run)},
        {"tokens", "Time against tokens", time_against_tokens(run)},
        {"peers", "Against others", against_peers(run)},
        {"limit", "Share of the limit", share_of_limit(run)},
        {"waiting", "Own work and waiting", own_and_waiting(run)},
        {"pairs", "Who waits for whom", waiting_by_rank(run)},
        {"curves", "How it scales", curves(run)},
        {"bars", "Bars", bars_table(run)},
        {"seed", "The CANN sample’s table", seed_table(run)},
        {"all", "Everything measured", everything(run, told)},
    };
    const std::string title = fmt::format("switchyard bench: {}", scenarios_text(run)), begun = of_machine("begun", "");
    std::string page = fmt::format(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta http-equiv=\"Content-Security-Policy\" "
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n<meta name=\"viewport\" "
        "content=\"width=device-width,initial-scale=1\">\n<title>{0}</title>\n<style>{1}{2}</style>\n</"
        "head>\n<body>\n<header>\n"
        "<h1>{0}</h1>\n<p class=\"lead\">Switchyard {3}{4}{5}. Every result equal to the reference. Times compare within this "
        "run "
        "only.</p>\n",
        escaped(title), style, plot::style, escaped(of_machine("switchyard", "")),
        escaped(begun.empty() ? "" : ", measured " + begun),
        escaped(", on " + of_machine("processor", "an unknown processor")));
    if (const std::string command = of_machine("command", ""); !command.empty()) page += command_block(command);
    page += "<details><summary>Machine and settings</summary><dl class=\"machine\">\n" + machine_list(run.machine) +
            "</dl></details>\n<nav aria-label=\"sections\">";
    for (const Section& s : sections)
        if (!s.body.empty()) page += fmt::format("<a href=\"#{}\">{}</a> ", s.id, escaped(s.title));
    page += "</nav>\n</header>\n<main>\n";
    for (const Section& s : sections)
        if (!s.body.empty())
            page += fmt::format(
                "<section id=\"{0}\" aria-labelledby=\"{0}-title\">\n<h2 id=\"{0}-title\">{1}</h2>\n{2}</section>\n", s.id,
                escaped(s.title), s.body);
    return page +
           "</main>\n<footer>A time is from the moment the last rank came to the start, which all ranks share, to the end of "
           "the slowest "
           "rank. Contestants took turns round by round, in another order each time. MB/rank: bytes that the contestant’s own "
           "code "
           "wrote, or in combine read or wrote, every copy counted.</footer>\n</body>\n</html>\n";
}

namespace {

std::string why() {
    return std::strerror(errno);
}
// Creates the file, which must not be there, with that content. False: errno says why.
bool create(const std::string& path, const std::string& content) {
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0) return false;
    size_t done = 0;
    while (done < content.size()) {
        const ssize_t n = ::write(file, content.data() + done, content.size() - done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        done += static_cast<size_t>(n);
    }
    const int error = errno;
    const bool whole = close(file) == 0 && done == content.size();
    if (done < content.size()) errno = error;
    return whole;
}

}  // namespace

ReportFile::ReportFile(const std::string& path) : path_(path) {
    std::error_code ignored;
    const std::filesystem::file_status there = std::filesystem::status(path, ignored);
    if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there))
        throw Mistake(fmt::format("--report {}: is there and is no ordinary file; name a file", path));
    // A link stays, and what it points to is replaced.
    if (std::filesystem::is_symlink(std::filesystem::symlink_status(path, ignored)))
        path_ = std::filesystem::weakly_canonical(path, ignored).string();
    part_ = fmt::format("{}.{}.part", path_, getpid());
    if (!create(part_, ""))
        throw Mistake(
            fmt::format("--report {}: cannot be created: {}; name a file in a folder that can be written", path, why()));
    unlink(part_.c_str());
}

void ReportFile::write(const std::string& page) const {
    const bool made = create(part_, page);
    if (made && rename(part_.c_str(), path_.c_str()) == 0) return;
    const std::string error = why();
    unlink(part_.c_str());
    throw std::runtime_error(fmt::format("--report {}: could not be written: {}; the results stand above", path_, error));
}

}  // namespace switchyard::bench
