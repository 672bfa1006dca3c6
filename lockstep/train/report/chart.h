// Curves as SVG.
#pragma once

#include <string>
#include <vector>

#include "lockstep/train/report/curve.h"

namespace lockstep::train {

struct ChartSeries {
  std::string name;
  std::vector<CurvePoint> points;
};

/// Steps to the right, numbers upwards. Where one point stands for many numbers, a band shows the least and the most of
/// them; NaN and infinities are marks at the bottom. The axis is logarithmic when all numbers are positive and lie
/// further apart than 1 : 50.
std::string line_chart(const std::vector<ChartSeries>& lines);

/// The means of all lines on top of each other; they have the same steps.
std::string stacked_chart(const std::vector<ChartSeries>& lines);

/// "1.48", "31.2k", "1e-05": at most four digits.
std::string format_short(double number);

/// Round numbers, at least two and at most about `count`, from the first one not above `low` to the first one not below
/// `high`. Pure.
std::vector<double> axis_ticks(double low, double high, int count);

/// "class=...": the colour that the number has, in light and dark. Eight of them, then again from the first.
std::string color_class(std::size_t number);

}  // namespace lockstep::train
