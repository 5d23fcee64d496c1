// A run as one page of HTML: the lines of --json as plots and tables, in one file that needs no network and no script.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace switchyard::bench {

/// The page of one run; see lines.hpp. A section is there when lines carry its data. Throws Mistake that names the line and the
/// field that is not as expected.
std::string report_page(const std::vector<nlohmann::json>& lines);

/// Where a page goes.
class ReportFile {
 public:
    /// Throws Mistake when the page could not be written there, before minutes of measurement.
    explicit ReportFile(const std::string& path);
    /// Written beside the file, then renamed: whole or not at all. Throws std::runtime_error.
    void write(const std::string& page) const;

 private:
    std::string path_, part_;
};

}  // namespace switchyard::bench
