#include "lockstep/train/report/timeline.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>

#include "lockstep/train/loggers/text_format.h"
#include "lockstep/train/report/chart.h"

namespace lockstep::training::inline report {
namespace {

// In units of the viewBox.
constexpr double kTimelineWidth = 720, kTimelineLeft = 62, kTimelineRight = 12;
constexpr double kPhaseHeight = 16, kOperationHeight = 9, kRowGap = 10, kAxisHeight = 22;
constexpr std::size_t kMaxOperations = 200;  // drawn per rank

std::string position_text(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", number);
  return text;
}

std::string milliseconds(std::int64_t ns) { return format_short(static_cast<double>(ns) / 1e6) + " ms"; }

const StepRecord* find_step(const RankRecord& record, std::int64_t step) {
  const auto found = std::find_if(record.steps.begin(), record.steps.end(),
                                  [&](const StepRecord& recorded) { return recorded.step == step; });
  return found == record.steps.end() ? nullptr : &*found;
}

struct TimeAxis {
  std::int64_t begin = 0, end = 1;  // on the clock of the first record
  double position(std::int64_t ns) const {
    const double part = static_cast<double>(ns - begin) / static_cast<double>(end - begin);
    return kTimelineLeft + std::clamp(part, 0.0, 1.0) * (kTimelineWidth - kTimelineLeft - kTimelineRight);
  }
};

std::string draw_box(const TimeAxis& axis, std::int64_t begin, std::int64_t end, double y, double height,
                     const std::string& css, const std::string& title) {
  const double x = axis.position(begin);
  return "<rect class=\"" + css + "\" x=\"" + position_text(x) + "\" y=\"" + position_text(y) + "\" width=\"" +
         position_text(std::max(0.6, axis.position(end) - x)) + "\" height=\"" + position_text(height) + "\"><title>" +
         escape_xml(title + ", " + milliseconds(end - begin)) + "</title></rect>";
}

std::string draw_operations(const RankRecord& record, std::int64_t offset, const TimeAxis& axis, double& y) {
  std::vector<const OperationSpan*> shown;
  std::vector<std::pair<std::int64_t, std::int64_t>> spans;
  for (const OperationSpan& operation : record.operations) {
    if (operation.end_ns + offset < axis.begin || operation.begin_ns + offset > axis.end ||
        shown.size() == kMaxOperations)
      continue;
    shown.push_back(&operation);
    spans.emplace_back(operation.begin_ns, operation.end_ns);
  }
  const std::vector<int> row_of = assign_rows(spans);
  std::string svg;
  int used = 0;
  for (std::size_t i = 0; i < shown.size(); ++i) {
    const OperationSpan& o = *shown[i];
    used = std::max(used, row_of[i] + 1);
    svg += draw_box(
        axis, o.begin_ns + offset, o.end_ns + offset, y + kOperationHeight * row_of[i], kOperationHeight - 2,
        "operation",
        o.kind + (o.name.empty() ? "" : " " + o.name) + ", " + format_short(static_cast<double>(o.bytes)) + " bytes");
  }
  y += kOperationHeight * used;
  return svg;
}

std::int64_t estimate_offset(const RankRecord& reference, const RankRecord& other) {
  std::map<std::pair<std::string, std::uint64_t>, std::int64_t> ends;
  for (const OperationSpan& span : reference.operations)
    if (!span.channel.empty() && span.kind != "send" && span.kind != "recv")
      ends[{span.channel, span.seq}] = span.end_ns;
  std::vector<std::int64_t> differences;
  for (const OperationSpan& span : other.operations) {
    const auto found = ends.find({span.channel, span.seq});
    if (found != ends.end()) differences.push_back(found->second - span.end_ns);
  }
  if (differences.empty()) return (other.unix_ns - other.monotonic_ns) - (reference.unix_ns - reference.monotonic_ns);
  const auto middle = differences.begin() + static_cast<std::ptrdiff_t>(differences.size() / 2);
  std::nth_element(differences.begin(), middle, differences.end());
  return *middle;
}

}  // namespace

std::vector<std::int64_t> clock_offsets(const std::vector<RankRecord>& records) {
  std::map<std::string, std::int64_t> known;  // by clock, so that all ranks of a host have the same offset
  std::vector<std::int64_t> offsets;
  for (const RankRecord& record : records) {
    auto found = known.find(record.clock);
    if (found == known.end())
      found = known.emplace(record.clock, known.empty() ? 0 : estimate_offset(records.front(), record)).first;
    offsets.push_back(found->second);
  }
  return offsets;
}

std::vector<int> assign_rows(const std::vector<std::pair<std::int64_t, std::int64_t>>& spans) {
  std::vector<std::size_t> order(spans.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return spans[a].first < spans[b].first; });
  std::vector<std::int64_t> ends;  // end of the last span in each row
  std::vector<int> row_of(spans.size());
  for (const std::size_t i : order) {
    const auto free = std::find_if(ends.begin(), ends.end(), [&](std::int64_t end) { return end <= spans[i].first; });
    row_of[i] = static_cast<int>(free - ends.begin());
    if (free == ends.end())
      ends.push_back(spans[i].second);
    else
      *free = spans[i].second;
  }
  return row_of;
}

std::optional<std::int64_t> median_step(const std::vector<RankRecord>& records) {
  if (records.empty()) return std::nullopt;
  std::vector<std::pair<double, std::int64_t>> common;
  for (const StepRecord& step : records.front().steps)
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
  TimeAxis axis{INT64_MAX, INT64_MIN};
  std::vector<std::size_t> rows;
  for (std::size_t i = 0; i < records.size() && rows.size() < max_rows; ++i) {
    const StepRecord* recorded = find_step(records[i], step);
    if (!recorded) continue;
    rows.push_back(i);
    axis.begin = std::min(axis.begin, recorded->times.begin_ns + offsets[i]);
    axis.end = std::max(axis.end, recorded->times.end_ns + offsets[i]);
  }
  if (rows.empty()) return "";
  axis.end = std::max(axis.end, axis.begin + 1);
  std::string svg;
  double y = 4;
  for (const std::size_t i : rows) {
    svg += "<text x=\"" + position_text(kTimelineLeft - 6) + "\" y=\"" + position_text(y + 12) +
           "\" text-anchor=\"end\">rank " + std::to_string(records[i].rank) + "</text>";
    for (const PhaseSpan& span : find_step(records[i], step)->times.spans)
      svg += draw_box(axis, span.begin_ns + offsets[i], span.end_ns + offsets[i], y, kPhaseHeight,
                      "phase " + color_class(static_cast<std::size_t>(span.phase)),
                      std::string(kPhaseNames[static_cast<std::size_t>(span.phase)]));
    y += kPhaseHeight + 2;
    svg += draw_operations(records[i], offsets[i], axis, y);
    y += kRowGap;
  }
  for (const double tick : axis_ticks(0, static_cast<double>(axis.end - axis.begin) / 1e6, 6)) {
    const double x = axis.position(axis.begin + static_cast<std::int64_t>(tick * 1e6));
    if (tick * 1e6 > static_cast<double>(axis.end - axis.begin)) continue;
    svg = "<path class=\"grid\" d=\"M" + position_text(x) + " 0V" + position_text(y) + "\"/>" + svg + "<text x=\"" +
          position_text(x) + "\" y=\"" + position_text(y + 12) + "\" text-anchor=\"" +
          (x > kTimelineWidth - 30 ? "end" : "middle") + "\">" + format_short(tick) + " ms</text>";
  }
  return "<svg viewBox=\"0 0 " + position_text(kTimelineWidth) + " " + position_text(y + kAxisHeight) +
         "\" role=\"img\" aria-label=\"Step " + std::to_string(step) + " of all ranks\">" + svg + "</svg>";
}

}  // namespace lockstep::training::inline report
