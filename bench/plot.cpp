#include "plot.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace switchyard::bench::plot {

// Cool colours: Switchyard; warm: others; grey: a limit. --wait is the colour of waiting, here and in the page.
const char* const style = R"(
:root{--packed:#0b5cad;--in_place:#0c7f80;--padded:#5d62c4;--limit:#5b6470;--sample:#8a6100;--allgather:#7c5540;--open_mpi:#bc4318;--gloo:#9c2f62;--wait:#a8480a}
@media(prefers-color-scheme:dark){:root{--packed:#6db3f8;--in_place:#4fc6bd;--padded:#a9acf5;--limit:#a0a8b3;--sample:#dcb154;--allgather:#cfa48c;--open_mpi:#f58d63;--gloo:#ee8fb8;--wait:#f0a35e}}
.k-packed{--k:var(--packed)}.k-in_place{--k:var(--in_place);--dash:7 2}.k-padded{--k:var(--padded);--dash:2 2}.k-limit{--k:var(--limit);--dash:1 3}
.k-sample{--k:var(--sample);--dash:9 3 2 3}.k-allgather{--k:var(--allgather);--dash:4 2}.k-open_mpi{--k:var(--open_mpi);--dash:12 3}.k-gloo{--k:var(--gloo);--dash:5 2 1 2 1 2}.k-other{--k:var(--limit)}
svg.plot{display:block;width:100%;height:auto;max-width:480px;font-size:11px;font-variant-numeric:tabular-nums}
svg.plot text{fill:var(--ink)}svg.plot .soft{fill:var(--soft)}svg.plot .name{fill:var(--k)}
.e{text-anchor:end}.m{text-anchor:middle}.b{font-weight:700}
.rule{stroke:var(--grid);stroke-width:1;fill:none}.axis{stroke:var(--soft);stroke-width:1;fill:none}
.bar{fill:var(--k)}.k-limit .bar,.rest{fill:none;stroke:var(--k);stroke-width:1}.k-limit .bar{stroke-dasharray:3 2}.rest{stroke:var(--wait)}
.mark{stroke:var(--soft);stroke-width:1;fill:none}.torn{stroke:var(--paper);stroke-width:2;fill:none}.edge{stroke:var(--ink);stroke-width:1;stroke-dasharray:3 2}
.line{fill:none;stroke:var(--k);stroke-width:1.6;stroke-dasharray:var(--dash,none);stroke-linejoin:round}.k-packed .line{stroke-width:2.2}svg.plot .second{stroke-width:1}
.dot{fill:var(--k);stroke:var(--paper);stroke-width:.8}.open{fill:var(--paper);stroke:var(--k);stroke-width:1.4}.cross{fill:none;stroke:var(--k);stroke-width:1.6}
.leader{stroke:var(--k);stroke-width:.6;opacity:.6;fill:none}.ring{fill:none;stroke:var(--ink);stroke-width:1.2}
.halo{paint-order:stroke;stroke:var(--paper);stroke-width:3px;font-weight:700}
.heat{fill:var(--wait)}.self{fill:var(--grid);opacity:.45}svg.plot .over{fill:var(--paper)}.most{fill:none;stroke:var(--ink);stroke-width:1.6}
)";

std::string escaped(std::string_view text) {
    std::string out;
    for (const char c : text) switch (c) {
            case '&': out += "&amp;"; break;
            case '<': out += "&lt;"; break;
            case '>': out += "&gt;"; break;
            case '"': out += "&quot;"; break;
            case '\'': out += "&#39;"; break;
            default: out += c;
        }
    return out;
}

namespace {

// {factor, unit} in which a time is written.
std::pair<double, const char*> unit_of(double us) {
    if (us < 0.9995 && us > 0) return {1000, "ns"};
    if (us < 999.5) return {1, "µs"};
    if (us < 999'500) return {1e-3, "ms"};
    return {1e-6, "s"};
}

}  // namespace

std::string number_text(double value) {
    const double size = std::abs(value);
    if (value == 0) return "0";
    if (size < 0.01) return fmt::format("{:.2g}", value);
    return fmt::format("{:.{}f}", value, size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

std::string time_text(double us) {
    const auto [factor, unit] = unit_of(us);
    return fmt::format("{} {}", number_text(us * factor), unit);
}

namespace {

constexpr double width = 360, font = 11;

struct SeriesStyle {
    std::string_view contestant;
    const char* shape;  ///< class of the marker
    const char* path;   ///< around 0, 0
};
constexpr SeriesStyle series[] = {
    {"packed", "dot", "M-3.8,0a3.8,3.8 0 1,0 7.6,0a3.8,3.8 0 1,0 -7.6,0z"},
    {"in_place", "dot", "M-3.3,-3.3h6.6v6.6h-6.6z"},
    {"padded", "dot", "M0,-4.6l4.2,4.6l-4.2,4.6l-4.2,-4.6z"},
    {"limit", "cross", "M-3,-3l6,6M-3,3l6,-6"},
    {"sample", "dot", "M0,-4.2l4.4,7.6h-8.8z"},
    {"allgather", "open", "M0,4.2l4.2,-7.4h-8.4z"},
    {"open_mpi", "cross", "M-4,0h8M0,-4v8"},
    {"gloo", "open", "M-3.3,0a3.3,3.3 0 1,0 6.6,0a3.3,3.3 0 1,0 -6.6,0z"},
    {"other", "open", "M-3,-3h6v6h-6z"},
};
const SeriesStyle& style_of(std::string_view contestant) {
    for (const SeriesStyle& s : series)
        if (s.contestant == contestant) return s;
    return series[std::size(series) - 1];
}

// About the width of a text, for the wider fonts.
double text_width(std::string_view text) {
    double em = 0;
    for (const char c : text) {
        if ((c & 0xC0) == 0x80) continue;  // the rest of a UTF-8 character
        em += std::string_view(" .,:;'|!iIjl/()").find(c) != text.npos ? 0.36
              : std::string_view("mwMW%").find(c) != text.npos         ? 0.96
                                                                       : 0.64;
    }
    return em * font;
}

class Drawing {
 public:
    Drawing(std::string_view title, double wide, double high)
        : out_(fmt::format("<svg class=\"plot\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
                           "role=\"img\" aria-label=\"{2}\"><title>{2}</title>\n",
                           wide, high, escaped(title))) {}

    void line(double x1, double y1, double x2, double y2, const char* kind) {
        out_ += fmt::format("<path class=\"{}\" d=\"M{:.1f},{:.1f}L{:.1f},{:.1f}\"/>", kind, x1, y1, x2, y2);
    }
    void rect(double x, double y, double w, double h, std::string_view kind, double opacity = 1) {
        out_ += fmt::format("<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"", kind, x, y,
                            std::max(w, 0.0), std::max(h, 0.0));
        out_ += opacity < 1 ? fmt::format(" fill-opacity=\"{:.3f}\"/>", opacity) : "/>";
    }
    void text(double x, double y, std::string_view words, std::string_view kind = "") {
        out_ += fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", kind, x, y, escaped(words));
    }
    void path(const std::string& d, const char* kind) { out_ += fmt::format("<path class=\"{}\" d=\"{}\"/>", kind, d); }
    void marker(const SeriesStyle& s, bool second, double x, double y) {
        out_ += fmt::format("<path class=\"{}\" transform=\"translate({:.1f},{:.1f})\" d=\"{}\"/>", second ? "open" : s.shape,
                            x, y, s.path);
    }
    /// Everything until close() belongs together and is explained by `tip` under the pointer.
    void open(std::string_view kind, std::string_view tip = "") {
        out_ += fmt::format("<g class=\"{}\">", kind);
        if (!tip.empty()) out_ += fmt::format("<title>{}</title>", escaped(tip));
    }
    void close() { out_ += "</g>\n"; }
    std::string done() { return std::move(out_) + "</svg>\n"; }

 private:
    std::string out_;
};

}  // namespace

std::string series_class(std::string_view contestant) {
    return fmt::format("k-{}", style_of(contestant).contestant);
}

// -------------------------------------------------------------------------------------------------------------------- bars

std::string svg(const Bars& b) {
    double labels = 0;
    std::vector<double> columns(b.heads.size());
    for (size_t c = 0; c < columns.size(); ++c) columns[c] = text_width(b.heads[c]);
    for (const BarRow& r : b.rows) {
        if (!r.parts.empty()) labels = std::max(labels, text_width(r.label) * (r.strong ? 1.1 : 1));
        for (size_t c = 0; c < r.numbers.size(); ++c) columns[c] = std::max(columns[c], text_width(r.numbers[c]));
    }
    double x1 = width;
    for (const double c : columns) x1 -= c + 8;
    const bool labels_above = labels > 118;  // long labels get a line of their own
    const double x0 = labels_above ? 0 : labels + 7, step = labels_above ? 31 : 19, bar = 11;
    const double top = b.heads.empty() ? 4 : 17, bottom = b.lines.empty() ? 2 : 16;
    double high = top + bottom;
    for (const BarRow& r : b.rows) high += r.parts.empty() ? 22 : step;

    const auto at = [&](double v) { return x0 + (x1 - x0) * std::min(v / b.end, 1.0); };
    Drawing d(b.title, width, high);
    double column = width;
    for (size_t c = columns.size(); c-- > 0; column -= columns[c] + 8) d.text(column, 10, b.heads[c], "soft e");
    double y = top;
    for (const BarRow& r : b.rows) {
        if (r.parts.empty()) {
            d.text(0, y + 15, r.label, "soft b");
            y += 22;
            continue;
        }
        d.open(series_class(r.contestant), r.tip);
        if (labels_above) d.text(4, y + 11, r.label, r.strong ? "b" : "");
        y += step;
        const double middle = y - 9;
        if (!labels_above) d.text(x0 - 7, middle + 4, r.label, r.strong ? "e b" : "e");
        double sum = 0;
        for (size_t p = 0; p < r.parts.size(); ++p) {
            const double from = at(sum);
            sum += r.parts[p];
            d.rect(from, middle - bar / 2, std::max(at(sum) - from, p == 0 ? 1.0 : 0.0), bar, p == 0 ? "bar" : "rest");
        }
        if (sum > b.end)
            for (const double back : {10.0, 5.0}) d.line(x1 - back - 2, middle + 7, x1 - back + 2, middle - 7, "torn");
        if (r.mark > sum && sum <= b.end) {
            d.line(at(sum), middle, at(r.mark), middle, "mark");
            const double x = at(r.mark);
            if (r.mark <= b.end)
                d.line(x, middle - 4, x, middle + 4, "mark");
            else
                d.path(fmt::format("M{:.1f},{:.1f}l4,3l-4,3", x - 4, middle - 3), "mark");
        }
        column = width;
        for (size_t c = columns.size(); c-- > 0; column -= columns[c] + 8)
            if (c < r.numbers.size()) d.text(column, middle + 4, r.numbers[c], r.strong ? "e b" : "e");
        d.close();
    }
    d.line(x0, top, x0, y, "axis");
    double taken = width;  // by the text further right
    for (size_t l = b.lines.size(); l-- > 0;) {
        const auto& [value, words] = b.lines[l];
        d.line(at(value), top, at(value), y + 2, "edge");
        const double right = std::min({at(value) + text_width(words) / 2, taken});
        d.text(right, y + 13, words, "soft e");
        taken = right - text_width(words) - 8;
    }
    return d.done();
}

// ------------------------------------------------------------------------------------------------------------------- lines

namespace {

class Scale {
 public:
    Scale(std::vector<double> values, bool log, double from, double to) : log_(log), from_(from), to_(to) {
        const auto [least, most] = std::minmax_element(values.begin(), values.end());
        low_ = log ? *least / 1.2 : 0;
        high_ = log ? *most * 1.2 : *most * 1.08;
        if (!log && high_ <= low_) high_ = low_ + 1;
    }
    /// For x: from the first to the last value.
    void fit(double low, double high) {
        low_ = low;
        high_ = high > low ? high : log_ ? low * 2 : low + 1;
    }
    double operator()(double v) const {
        const double share = log_ ? std::log(v / low_) / std::log(high_ / low_) : (v - low_) / (high_ - low_);
        return from_ + (to_ - from_) * share;
    }
    std::vector<double> ticks() const {
        std::vector<double> out;
        if (!log_) {
            const double rough = (high_ - low_) / 5, ten = std::pow(10, std::floor(std::log10(rough)));
            const double step = ten * (rough / ten > 5 ? 10 : rough / ten > 2 ? 5 : rough / ten > 1 ? 2 : 1);
            for (int i = 0; low_ + step * i <= high_; ++i) out.push_back(low_ + step * i);
            return out;
        }
        for (const auto& digits : {std::vector<double>{1}, {1, 3}, {1, 2, 5}, {1, 1.5, 2, 3, 4, 5, 7}}) {
            out.clear();
            for (double ten = std::pow(10, std::floor(std::log10(low_))); ten <= high_; ten *= 10)
                for (const double digit : digits)
                    if (digit * ten >= low_ && digit * ten <= high_) out.push_back(digit * ten);
            if (out.size() >= 3) break;
        }
        return out;
    }

 private:
    bool log_;
    double from_, to_, low_, high_;
};

std::string tick_text(double us) {
    const auto [factor, unit] = unit_of(us);
    return us == 0 ? "0" : fmt::format("{:.3g} {}", us * factor, unit);
}

// Rings around steps, each with its factor where that covers neither a ring nor another factor; the tip has it anyway.
void mark_steps(Drawing& d, const Lines& p, const Scale& x, const Scale& y, double bottom) {
    struct Box {
        double x, y, wide, high;
    };
    std::vector<Box> taken;
    std::vector<std::pair<const Line*, const Point*>> steps;
    for (const Line& line : p.lines)
        for (const Point& point : line.points) {
            if (point.step.empty()) continue;
            steps.push_back({&line, &point});
            taken.push_back({x(point.x) - 7, y(point.y) - 7, 14, 14});
        }
    for (const auto& [line, point] : steps) {
        const double px = x(point->x), py = y(point->y), wide = text_width(point->step) * 1.1;
        d.open("", fmt::format("{}: {} from the point before", line->name, point->step));
        d.path(fmt::format("M{:.1f},{:.1f}m-7,0a7,7 0 1,0 14,0a7,7 0 1,0 -14,0", px, py), "ring");
        for (const auto& [dx, dy] : {std::pair{4.0, -10.0}, {-10.0, 4.0}, {4.0, 18.0}, {-8.0, -10.0}, {-8.0, 18.0}}) {
            const Box box{px + dx - wide, py + dy - 9, wide, 11};
            const bool free = std::none_of(taken.begin(), taken.end(), [&](const Box& b) {
                return b.x < box.x + box.wide && box.x < b.x + b.wide && b.y < box.y + box.high && box.y < b.y + b.high;
            });
            if (!free || box.x < 40 || box.y < 12 || box.y + box.high > bottom) continue;
            d.text(px + dx, py + dy, point->step, "halo e");
            taken.push_back(box);
            break;
        }
        d.close();
    }
}

struct EndLabel {
    size_t line;
    double x, wanted, y = 0;
};
// Moves labels apart, as little as it takes, and none below `lowest`.
void spread(std::vector<EndLabel>& labels, double highest, double lowest) {
    constexpr double apart = 13;
    std::stable_sort(labels.begin(), labels.end(), [](const EndLabel& a, const EndLabel& b) { return a.wanted < b.wanted; });
    double free = highest;
    for (EndLabel& l : labels) {
        l.y = std::max(l.wanted, free);
        free = l.y + apart;
    }
    for (size_t i = labels.size(); i-- > 0; lowest = labels[i].y - apart) labels[i].y = std::min(labels[i].y, lowest);
}

bool is_bold(const Line& line) {
    return line.contestant == "packed" && !line.second;
}

}  // namespace

std::string svg(const Lines& p) {
    constexpr double left = 46, top = 22;
    std::vector<double> xs, ys;
    double names = 0;
    for (const Line& line : p.lines) {
        names = std::max(names, text_width(line.name) * (is_bold(line) ? 1.1 : 1));
        for (const Point& point : line.points) {
            xs.push_back(point.x);
            ys.push_back(point.y);
        }
    }
    std::sort(xs.begin(), xs.end());
    xs.erase(std::unique(xs.begin(), xs.end()), xs.end());
    const double bottom = std::max(220.0, top + 13.0 * static_cast<double>(p.lines.size()) + 10), right = width - names - 18;
    Scale x(xs, p.log_x, left + 8, right), y(ys, p.log_y, bottom, top + 6);
    x.fit(xs.front(), xs.back());

    Drawing d(p.title, width, bottom + 34);
    d.text(0, 10, p.y_text, "soft");
    for (const double tick : y.ticks()) {
        d.line(left, y(tick), right + 4, y(tick), "rule");
        d.text(left - 5, y(tick) + 4, tick_text(tick), "soft e");
    }
    d.line(left, bottom, right + 4, bottom, "axis");
    double taken = -100;
    for (const double value : xs) {
        const std::string words = p.x_names.empty() ? fmt::format("{:g}", value) : p.x_names.at(static_cast<size_t>(value));
        d.line(x(value), bottom, x(value), bottom + 4, "axis");
        const double half = text_width(words) / 2, middle = std::max(x(value), half);
        if (middle - half < taken + 4) continue;
        d.text(middle, bottom + 16, words, "soft m");
        taken = middle + half;
    }
    d.text((left + right) / 2, bottom + 30, p.x_text, "soft m");

    std::vector<EndLabel> ends;
    for (size_t i = 0; i < p.lines.size(); ++i) {
        const Line& line = p.lines[i];
        std::map<double, std::pair<double, int>> through;  // x -> sum of y, how many
        for (const Point& point : line.points) {
            through[point.x].first += point.y;
            ++through[point.x].second;
        }
        std::string way;
        double end = 0;
        for (const auto& [at, sum] : through) {
            end = y(sum.first / sum.second);
            way += fmt::format("{}{:.1f},{:.1f}", way.empty() ? "M" : "L", x(at), end);
        }
        d.open(series_class(line.contestant), line.name);
        d.path(way, line.second ? "line second" : "line");
        d.close();
        for (const Point& point : line.points) {
            d.open(series_class(line.contestant), point.tip);
            d.marker(style_of(line.contestant), line.second, x(point.x), y(point.y));
            d.close();
        }
        ends.push_back({i, x(through.rbegin()->first), end});
    }
    mark_steps(d, p, x, y, bottom);
    spread(ends, top + 4, bottom - 2);
    for (const EndLabel& l : ends) {
        const Line& line = p.lines[l.line];
        d.open(series_class(line.contestant));
        d.line(l.x + 5, l.wanted, right + 11, l.y, "leader");
        d.text(right + 14, l.y + 4, line.name, is_bold(line) ? "name b" : "name");
        d.close();
    }
    return d.done();
}

// -------------------------------------------------------------------------------------------------------------------- heat

std::string svg(const Heat& h) {
    constexpr double left = 46, top = 32;
    const size_t n = h.rows.size();
    const bool numbers = n <= 16;
    // With numbers a cell has room for them, however many there are; the page lets a wide map scroll in its own box.
    const double cell = n <= 8    ? std::min(44.0, (width - left - 2) / static_cast<double>(n))
                        : numbers ? 38
                                  : std::max(2.0, (width - left - 2) / static_cast<double>(n));
    const double side = cell * static_cast<double>(n), wide = std::max(width, left + side + 2);
    double most = 0;
    std::pair<size_t, size_t> longest{0, 0};
    for (size_t i = 0; i < n; ++i)
        for (size_t j = 0; j < n; ++j)
            if (h.rows[i][j] > most) {
                most = h.rows[i][j];
                longest = {i, j};
            }
    const auto at = [&](size_t i) { return cell * static_cast<double>(i); };
    Drawing d(h.title, wide, top + std::max(side, 60.0) + 4);
    d.text(left, 10, "lacked rank \u2192", "soft");
    d.text(0, 26, "waits \u2193", "soft");
    const size_t every = n > 64 ? 16 : numbers ? 1 : 8;
    for (size_t i = 0; i < n; i += every) {
        if (n > 1 && (i > 0 || numbers == false || cell > 20))
            d.text(left + at(i) + cell / 2, top - 6, fmt::format("{}", i), "soft m");
        d.text(left - 5, top + at(i) + cell / 2 + 4, fmt::format("{}", i), "soft e");
    }
    for (size_t i = 0; i < n; ++i)
        for (size_t j = 0; j < n; ++j) {
            const double value = h.rows[i][j], share = most > 0 ? value / most : 0;
            if (!numbers && value == 0) continue;
            d.open("", h.tip(i, j));
            const double gap = numbers ? 1 : 0;
            if (i == j && value == 0)
                d.rect(left + at(j) + 1, top + at(i) + 1, cell - 2, cell - 2, "self");
            else
                d.rect(left + at(j), top + at(i), cell - gap, cell - gap, "heat", 0.06 + 0.94 * share);
            if (numbers && (i != j || value > 0))
                d.text(left + at(j) + cell / 2, top + at(i) + cell / 2 + 4, number_text(value), share > 0.84 ? "over m" : "m");
            d.close();
        }
    d.rect(left - 0.5, top - 0.5, side, side, "rule");
    if (most > 0 && numbers) d.rect(left + at(longest.second), top + at(longest.first), cell - 1, cell - 1, "most");
    return d.done();
}

}  // namespace switchyard::bench::plot
