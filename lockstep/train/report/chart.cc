#include "lockstep/train/report/chart.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string_view>
#include <utility>

#include "lockstep/base/parse.h"
#include "lockstep/train/loggers/text_format.h"

namespace lockstep::training::inline report {
namespace {

// In units of the viewBox; on a screen of 360 pixels, one unit is about one pixel.
constexpr double kWidth = 340, kHeight = 190;
constexpr double kLeft = 44, kRight = 10, kTop = 8, kBottom = 22;
constexpr double kLogScaleRatio = 50;  // above this ratio of values the axis is logarithmic

std::string format_coordinate(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", number);
  std::string_view shorter = text;
  if (shorter.ends_with(".0")) shorter.remove_suffix(2);
  return std::string(shorter);
}

std::string format_point(double x, double y) { return format_coordinate(x) + " " + format_coordinate(y); }

/// Maps values to positions in the chart.
struct Axis {
  double low, high;   // the values at its ends
  double begin, end;  // the positions of the ends
  bool logarithmic = false;

  double position(double number) const {
    const double part = logarithmic ? std::log(number / low) / std::log(high / low) : (number - low) / (high - low);
    return begin + std::clamp(part, 0.0, 1.0) * (end - begin);
  }
};

struct ValueRange {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void include(double number) {
    low = std::min(low, number);
    high = std::max(high, number);
  }
  bool empty() const { return low > high; }
};

std::vector<double> decades(double low, double high) {
  std::vector<double> ticks;
  const double first = std::floor(std::log10(low)), last = std::ceil(std::log10(high));
  const double by = std::max(1.0, std::ceil((last - first) / 5));
  for (double power = first; power <= last; power += by) ticks.push_back(std::pow(10, power));
  return ticks;
}

std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return "<text x=\"" + format_coordinate(x) + "\" y=\"" + format_coordinate(y) + "\" text-anchor=\"" + anchor + "\">" +
         escape_xml(text) + "</text>";
}

Axis steps_axis(const std::vector<ChartSeries>& all_series) {
  ValueRange range;
  for (const ChartSeries& series : all_series)
    for (const CurvePoint& point : series.points) range.include(point.step());
  if (range.empty()) range = {0, 1};
  if (range.low == range.high) range.high = range.low + 1;
  return {range.low, range.high, kLeft, kWidth - kRight};
}

/// The opening tag, the grid and the labels of the axes. `numbers`: labels of the vertical axis.
std::string begin_chart(const std::vector<ChartSeries>& all_series, const Axis& across, const Axis& up,
                        const std::vector<double>& numbers) {
  const std::string names = base::joined(all_series, ", ", [](const ChartSeries& series) { return series.name; });
  std::string svg = "<svg viewBox=\"0 0 " + format_coordinate(kWidth) + " " + format_coordinate(kHeight) +
                    "\" role=\"img\" aria-label=\"" + escape_xml(names) + "\">";
  for (const double number : numbers) {
    const double y = up.position(number);
    svg += "<path class=\"grid\" d=\"M" + format_point(kLeft, y) + "H" + format_coordinate(kWidth - kRight) + "\"/>" +
           text_at(kLeft - 5, y + 3.5, "end", format_short(number));
  }
  for (const double step : axis_ticks(across.low, across.high, 5)) {
    if (step != std::floor(step) || step < across.low || step > across.high) continue;
    const double x = across.position(step);
    const bool at_end = x > kWidth - kRight - 12;
    svg += text_at(at_end ? kWidth - 2 : x, kHeight - 7, at_end ? "end" : "middle", format_short(step));
  }
  return svg;
}

/// A closed path along the upper values and back along the lower ones.
struct AreaPoint {
  double x, low, high;
};
std::string svg_area(const std::vector<AreaPoint>& points) {
  std::string upper, lower;
  for (const auto& [x, low, high] : points) {
    upper += (upper.empty() ? "M" : "L") + format_point(x, high);
    lower = "L" + format_point(x, low) + lower;
  }
  return upper + lower + "Z";
}

/// A path through all finite points, with gaps at points without finite values.
std::string svg_path(const ChartSeries& series, const Axis& across, const Axis& up) {
  std::string path;
  bool pen_up = true;
  for (const CurvePoint& point : series.points) {
    if (point.num_finite > 0)
      path += (pen_up ? "M" : "L") + format_point(across.position(point.step()), up.position(point.mean()));
    pen_up = point.num_finite == 0;
  }
  return path;
}

std::string svg_band(const ChartSeries& series, const Axis& across, const Axis& up) {
  std::vector<AreaPoint> area;
  for (const CurvePoint& point : series.points)
    if (point.num_finite > 0)
      area.push_back({across.position(point.step()), up.position(point.min), up.position(point.max)});
  return svg_area(area);
}

std::string draw_series(const ChartSeries& series, std::size_t number, const Axis& across, const Axis& up) {
  std::string svg;
  const bool has_band = std::any_of(series.points.begin(), series.points.end(),
                                    [](const CurvePoint& p) { return p.num_finite > 0 && p.min < p.max; });
  if (has_band) svg += "<path class=\"band " + color_class(number) + "\" d=\"" + svg_band(series, across, up) + "\"/>";
  svg += "<path class=\"line " + color_class(number) + "\" d=\"" + svg_path(series, across, up) + "\"/>";
  const auto finite =
      std::count_if(series.points.begin(), series.points.end(), [](const CurvePoint& p) { return p.num_finite > 0; });
  for (const CurvePoint& point : series.points) {
    const std::string x = format_coordinate(across.position(point.step()));
    if (finite == 1 && point.num_finite > 0)
      svg += "<circle class=\"dot " + color_class(number) + "\" r=\"3\" cx=\"" + x + "\" cy=\"" +
             format_coordinate(up.position(point.mean())) + "\"/>";
    if (point.num_non_finite > 0)
      svg += "<path class=\"bad\" d=\"M" + x + " " + format_coordinate(kHeight - kBottom) + "v-6\"/>";
  }
  return svg;
}

}  // namespace

std::string color_class(std::size_t number) { return "c" + std::to_string(number % 8); }

std::string format_short(double number) {
  const double size = std::abs(number);
  char text[32];
  if (size >= 1e4 && size < 1e12) {
    const int thousands = size < 1e6 ? 1 : size < 1e9 ? 2 : 3;
    std::snprintf(text, sizeof text, "%.4g%c", number / std::pow(1e3, thousands), " kMG"[thousands]);
  } else {
    std::snprintf(text, sizeof text, "%.4g", number);
  }
  return text;
}

std::vector<double> axis_ticks(double low, double high, int count) {
  const double rough = (high - low) / count;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double by = power * 10;
  for (const double times : {5.0, 2.0, 1.0})
    if (power * times >= rough) by = power * times;
  std::vector<double> ticks;
  const double first = std::floor(low / by + 1e-9), last = std::ceil(high / by - 1e-9);
  for (double i = first; i <= last; ++i) ticks.push_back(i * by);
  return ticks;
}

std::string line_chart(const std::vector<ChartSeries>& all_series) {
  ValueRange range;
  for (const ChartSeries& series : all_series)
    for (const CurvePoint& point : series.points) {
      if (point.num_finite == 0) continue;
      range.include(point.min);
      range.include(point.max);
    }
  if (range.empty()) range = {0, 1};
  if (range.low == range.high)
    range = {range.low - (range.low == 0 ? 1 : std::abs(range.low) / 2),
             range.high + (range.high == 0 ? 1 : std::abs(range.high) / 2)};
  const bool logarithmic = range.low > 0 && range.high / range.low > kLogScaleRatio;
  const std::vector<double> numbers =
      logarithmic ? decades(range.low, range.high) : axis_ticks(range.low, range.high, 4);
  const Axis up{numbers.front(), numbers.back(), kHeight - kBottom, kTop, logarithmic};
  const Axis across = steps_axis(all_series);
  std::string svg = begin_chart(all_series, across, up, numbers);
  for (std::size_t i = 0; i < all_series.size(); ++i) svg += draw_series(all_series[i], i, across, up);
  return svg + "</svg>";
}

std::string stacked_chart(const std::vector<ChartSeries>& all_series) {
  std::size_t count = all_series.empty() ? 0 : all_series.front().points.size();
  for (const ChartSeries& series : all_series) count = std::min(count, series.points.size());
  std::vector<double> sums(count, 0);
  for (const ChartSeries& series : all_series)
    for (std::size_t i = 0; i < count; ++i) sums[i] += std::max(0.0, series.points[i].mean());
  const double max_sum = count == 0 ? 1 : *std::max_element(sums.begin(), sums.end());
  const std::vector<double> numbers = axis_ticks(0, max_sum > 0 ? max_sum : 1, 4);
  const Axis up{0, numbers.back(), kHeight - kBottom, kTop};
  const Axis across = steps_axis(all_series);
  std::string svg = begin_chart(all_series, across, up, numbers);
  std::vector<double> below(count, 0);
  for (std::size_t n = 0; n < all_series.size() && count > 0; ++n) {
    std::vector<AreaPoint> area;
    for (std::size_t i = 0; i < count; ++i) {
      const CurvePoint& point = all_series[n].points[i];
      const double low = std::exchange(below[i], below[i] + std::max(0.0, point.mean()));
      area.push_back({across.position(point.step()), up.position(low), up.position(below[i])});
    }
    svg += "<path class=\"area " + color_class(n) + "\" d=\"" + svg_area(area) + "\"/>";
  }
  return svg + "</svg>";
}

}  // namespace lockstep::training::inline report
