// Line charts and stacked charts as SVG.
#pragma once

#include <string>
#include <vector>

#include "lockstep/train/report/curve.h"

namespace lockstep::training::inline report {

struct ChartSeries {
  std::string name;
  std::vector<CurvePoint> points;
};

/// A chart of values over steps. A band shows the minimum and maximum of points that stand for several values; NaN and
/// infinities are marks at the bottom. The vertical axis is logarithmic when all values are positive and the largest is
/// more than 50 times the smallest. Pure.
std::string line_chart(const std::vector<ChartSeries>& all_series);

/// A chart of the means of all series, stacked. The series must have the same steps. Pure.
std::string stacked_chart(const std::vector<ChartSeries>& all_series);

/// Formats a number with at most four significant digits: "1.48", "31.2k", "1e-05".
std::string format_short(double number);

/// Round axis labels, at least two and at most about `count`, from the last one not above `low` to the first one not
/// below `high`. Pure.
std::vector<double> axis_ticks(double low, double high, int count);

/// CSS class with the color of series `number`, in light and dark mode: "c0" to "c7", then from "c0" again.
std::string color_class(std::size_t number);

}  // namespace lockstep::training::inline report
