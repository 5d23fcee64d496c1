// Plots as inline SVG: drawn here, without script, and coloured by the style sheet of the page they stand in.
//
// A plot is 360 units wide and is shown at about that many pixels, so that its text has the same size on a phone and on a
// desk. What belongs to whom is told by a label beside it; colour, dash and shape only help. Every plot has a title that is
// read aloud.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace switchyard::bench::plot {

/// For text and attributes of HTML.
std::string escaped(std::string_view text);

/// Three digits with the unit that fits: "812 ns", "4.03 µs", "27.3 ms".
std::string time_text(double us);
/// Three digits: "0.05", "1.15", "12.4", "163".
std::string number_text(double value);

/// The class that gives a contestant its colour and dash.
std::string series_class(std::string_view contestant);

/// Bars from 0, one below the other.
struct BarRow {
    std::string label;
    std::string contestant;            ///< gives the colour
    std::vector<double> parts;         ///< laid end to end: filled, then outlined; none: the row is a heading
    double mark = 0;                   ///< beyond the bar, as a thin line with a tick; 0: none
    std::vector<std::string> numbers;  ///< columns on the right
    std::string tip;
    bool strong = false;
};
struct Bars {
    std::string title;
    double end;  ///< of the axis; what is longer is torn off there
    std::vector<std::string> heads;
    std::vector<BarRow> rows;
    std::vector<std::pair<double, std::string>> lines;  ///< upright, across all bars
};
std::string svg(const Bars& bars);

/// Lines, each with its name at its end. Where several points of a line share an x, it runs through their mean.
struct Point {
    double x, y;
    std::string tip;
    std::string step;  ///< written above a ring around the point; "": none
};
struct Line {
    std::string name, contestant;
    bool second;  ///< drawn lighter: the same contestant with other formats
    std::vector<Point> points;
};
struct Lines {
    std::string title, x_text, y_text;
    std::vector<std::string> x_names;  ///< when x counts names
    bool log_x = false, log_y = false;
    std::vector<Line> lines;
};
/// y is a time in us.
std::string svg(const Lines& lines);

/// A square of numbers as a map; from 17 rows on without the numbers.
struct Heat {
    std::string title;
    std::vector<std::vector<double>> rows;
    std::function<std::string(size_t row, size_t column)> tip;
};
std::string svg(const Heat& heat);

/// What the plots need of the style sheet; it uses the colours --paper, --ink, --soft, --grid of the page.
extern const char* const style;

}  // namespace switchyard::bench::plot
