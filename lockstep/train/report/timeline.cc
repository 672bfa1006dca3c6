#include "lockstep/train/report/timeline.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <set>

#include "lockstep/train/report/chart.h"
#include "lockstep/train/loggers/text_escaping.h"

namespace lockstep::train {
namespace {

// Units of the drawing.
constexpr double kWidth = 720, kLeft = 62, kRight = 12;
constexpr double kPhaseHeight = 16, kLaneHeight = 9, kRowGap = 10, kAxisHeight = 22;
constexpr std::size_t kMaxOperations = 200;  // of a rank that are drawn

std::string format(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", number);
  return text;
}

std::string milliseconds(std::int64_t ns) { return short_number(static_cast<double>(ns) / 1e6) + " ms"; }

const RecordedStep* find_step(const RankRecord& record, std::int64_t step) {
  const auto found = std::find_if(record.steps.begin(), record.steps.end(),
                                  [&](const RecordedStep& recorded) { return recorded.step == step; });
  return found == record.steps.end() ? nullptr : &*found;
}

struct View {
  std::int64_t begin = 0, end = 1;  // of the first record's clock
  double place(std::int64_t ns) const {
    const double part = static_cast<double>(ns - begin) / static_cast<double>(end - begin);
    return kLeft + std::clamp(part, 0.0, 1.0) * (kWidth - kLeft - kRight);
  }
};

std::string box(const View& view, std::int64_t begin, std::int64_t end, double y, double height, const std::string& css,
                const std::string& title) {
  const double x = view.place(begin);
  return "<rect class=\"" + css + "\" x=\"" + format(x) + "\" y=\"" + format(y) + "\" width=\"" +
         format(std::max(0.6, view.place(end) - x)) + "\" height=\"" + format(height) + "\"><title>" +
         escaped(title + ", " + milliseconds(end - begin)) + "</title></rect>";
}

std::string operations_of(const RankRecord& record, std::int64_t offset, const View& view, double& y) {
  std::vector<const OperationSpan*> shown;
  std::vector<std::pair<std::int64_t, std::int64_t>> spans;
  for (const OperationSpan& operation : record.operations) {
    if (operation.end_ns + offset < view.begin || operation.begin_ns + offset > view.end ||
        shown.size() == kMaxOperations)
      continue;
    shown.push_back(&operation);
    spans.emplace_back(operation.begin_ns, operation.end_ns);
  }
  const std::vector<int> lanes = lanes_of(spans);
  std::string svg;
  int used = 0;
  for (std::size_t i = 0; i < shown.size(); ++i) {
    const OperationSpan& o = *shown[i];
    used = std::max(used, lanes[i] + 1);
    svg += box(
        view, o.begin_ns + offset, o.end_ns + offset, y + kLaneHeight * lanes[i], kLaneHeight - 2, "operation",
        o.kind + (o.name.empty() ? "" : " " + o.name) + ", " + short_number(static_cast<double>(o.bytes)) + " bytes");
  }
  y += kLaneHeight * used;
  return svg;
}

}  // namespace

std::vector<int> lanes_of(const std::vector<std::pair<std::int64_t, std::int64_t>>& spans) {
  std::vector<std::size_t> order(spans.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return spans[a].first < spans[b].first; });
  std::vector<std::int64_t> ends;  // of each lane
  std::vector<int> lanes(spans.size());
  for (const std::size_t i : order) {
    const auto free = std::find_if(ends.begin(), ends.end(), [&](std::int64_t end) { return end <= spans[i].first; });
    lanes[i] = static_cast<int>(free - ends.begin());
    if (free == ends.end())
      ends.push_back(spans[i].second);
    else
      *free = spans[i].second;
  }
  return lanes;
}

std::optional<std::int64_t> typical_step(const std::vector<RankRecord>& records) {
  if (records.empty()) return std::nullopt;
  std::vector<std::pair<double, std::int64_t>> common;
  for (const RecordedStep& step : records.front().steps)
    if (std::all_of(records.begin(), records.end(),
                    [&](const RankRecord& record) { return find_step(record, step.step) != nullptr; }))
      common.emplace_back(step.times.seconds(), step.step);
  if (common.empty()) return std::nullopt;
  const auto middle = common.begin() + static_cast<std::ptrdiff_t>((common.size() - 1) / 2);
  std::nth_element(common.begin(), middle, common.end());
  return middle->second;
}

std::string timeline(const std::vector<RankRecord>& records, const std::vector<std::int64_t>& offsets,
                     std::int64_t step, std::size_t max_rows) {
  View view{INT64_MAX, INT64_MIN};
  std::vector<std::size_t> rows;
  for (std::size_t i = 0; i < records.size() && rows.size() < max_rows; ++i) {
    const RecordedStep* recorded = find_step(records[i], step);
    if (!recorded) continue;
    rows.push_back(i);
    view.begin = std::min(view.begin, recorded->times.begin_ns + offsets[i]);
    view.end = std::max(view.end, recorded->times.end_ns + offsets[i]);
  }
  if (rows.empty()) return "";
  view.end = std::max(view.end, view.begin + 1);
  std::string svg;
  double y = 4;
  for (const std::size_t i : rows) {
    svg += "<text x=\"" + format(kLeft - 6) + "\" y=\"" + format(y + 12) + "\" text-anchor=\"end\">rank " +
           std::to_string(records[i].rank) + "</text>";
    for (const PhaseSpan& span : find_step(records[i], step)->times.spans)
      svg += box(view, span.begin_ns + offsets[i], span.end_ns + offsets[i], y, kPhaseHeight,
                 "phase " + colour_class(static_cast<std::size_t>(span.phase)),
                 std::string(kPhaseNames[static_cast<std::size_t>(span.phase)]));
    y += kPhaseHeight + 2;
    svg += operations_of(records[i], offsets[i], view, y);
    y += kRowGap;
  }
  for (const double tick : axis_ticks(0, static_cast<double>(view.end - view.begin) / 1e6, 6)) {
    const double x = view.place(view.begin + static_cast<std::int64_t>(tick * 1e6));
    if (tick * 1e6 > static_cast<double>(view.end - view.begin)) continue;
    svg = "<path class=\"grid\" d=\"M" + format(x) + " 0V" + format(y) + "\"/>" + svg + "<text x=\"" + format(x) +
          "\" y=\"" + format(y + 12) + "\" text-anchor=\"" + (x > kWidth - 30 ? "end" : "middle") + "\">" +
          short_number(tick) + " ms</text>";
  }
  return "<svg viewBox=\"0 0 " + format(kWidth) + " " + format(y + kAxisHeight) + "\" role=\"img\" aria-label=\"Step " +
         std::to_string(step) + " of all ranks\">" + svg + "</svg>";
}

}  // namespace lockstep::train
