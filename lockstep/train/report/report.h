// The report of a run: one HTML page that needs no network.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/report/curve_logger.h"
#include "lockstep/train/report/rank_record.h"

namespace lockstep::training::inline report {

/// The contents of a report.
struct Report {
  std::string title;                                       ///< name of the run
  std::vector<std::pair<std::string, std::string>> facts;  ///< at the top of the page: {"ranks", "4"}, {"command", ...}
  CurveLogger::Curves curves;                              ///< logged scalars; names with the same last part, such as
                                                           ///< train/loss and val/loss, share a chart
  std::vector<RankRecord> ranks;  ///< of all ranks, may be empty; times are on the first one's clock
};

/// Returns the page as HTML that is also well-formed XML, with SVG charts and no scripts. Its size is bounded (hundreds
/// of kilobytes) for runs of any length. It follows the light or dark mode of the system and fits screens from 320
/// pixels of width. User text is escaped. Pure.
std::string report_html(const Report& report);

/// Writes the page to `path`, atomically. Throws SystemError.
void write_report(const std::string& path, const Report& report);

}  // namespace lockstep::training::inline report
