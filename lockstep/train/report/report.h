// A run on one page, which opens in any browser without a network.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/report/curve_logger.h"
#include "lockstep/train/report/rank_record.h"

namespace lockstep::train {

struct Report {
  std::string title;                                       ///< of the run
  std::vector<std::pair<std::string, std::string>> facts;  ///< at the top: {"ranks", "4"}, {"command", ...}
  CurveLogger::Curves
      curves;  ///< what was logged; names with the same last part, as train/loss and val/loss, share a drawing
  std::vector<RankRecord> ranks;  ///< of all ranks, the first one's clock is the page's; may be empty
};

/// HTML that is XML as well, with drawings as SVG and no script: some hundred kilobytes however long the run was. In
/// light and dark as the reader's system is, from 320 points of width on. Text that comes from users stands there as
/// text, whatever is in it. Pure.
std::string report_html(const Report& report);

/// Puts it in the place of `path` in one step. Throws SystemError.
void write_report(const std::string& path, const Report& report);

}  // namespace lockstep::train
