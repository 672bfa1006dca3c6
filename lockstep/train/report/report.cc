#include "lockstep/train/report/report.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <limits>
#include <string_view>

#include "lockstep/train/loggers/record_file.h"
#include "lockstep/train/loggers/text_format.h"
#include "lockstep/train/report/chart.h"
#include "lockstep/train/report/timeline.h"

namespace lockstep::training::inline report {
namespace {

/// Colors are CSS variables, with other values in dark mode. Contains no characters that XML requires to be escaped.
inline constexpr std::string_view kReportCss = R"(
:root { color-scheme: light dark; --back: #f6f7f9; --card: #ffffff; --text: #1c2430; --dim: #5b6675; --edge: #dde1e7;
  --grid: #e8ebf0; --bad: #c62828;
  --c0: #0b6bb5; --c1: #cf5b00; --c2: #0a8a63; --c3: #b4508f; --c4: #b58a00; --c5: #3c9bd6; --c6: #6a47a8;
  --c7: #77808c; }
@media (prefers-color-scheme: dark) { :root { --back: #12161c; --card: #1b212a; --text: #e4e8ee; --dim: #9aa5b4;
  --edge: #2c3541; --grid: #2a323d; --bad: #ff6b6b;
  --c0: #5ab0f0; --c1: #ff9a4d; --c2: #3fcf9f; --c3: #e58cc4; --c4: #e8c14a; --c5: #8fd0ff; --c6: #b69cf0;
  --c7: #98a2b0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px 12px 40px; max-width: 1200px; background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 4px 4px 10px; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0 4px 16px; font-size: 14px; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 12px; }
section { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 12px; min-width: 0; }
section.wide { grid-column: 1 / -1; }
p { margin: 2px 0 8px; color: var(--dim); font-size: 13px; overflow-wrap: anywhere; }
p.bad { color: var(--bad); }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--dim); font-size: 10.5px; }
.scroll { overflow-x: auto; } .scroll svg { min-width: 560px; }
.grid { stroke: var(--grid); stroke-width: 1; fill: none; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .band { stroke: none; opacity: 0.18; }
.area { stroke: none; opacity: 0.85; } .bad { stroke: var(--bad); stroke-width: 2; }
.operation { fill: var(--c6); }
.c0 { stroke: var(--c0); fill: var(--c0); } .c1 { stroke: var(--c1); fill: var(--c1); }
.c2 { stroke: var(--c2); fill: var(--c2); } .c3 { stroke: var(--c3); fill: var(--c3); }
.c4 { stroke: var(--c4); fill: var(--c4); } .c5 { stroke: var(--c5); fill: var(--c5); }
.c6 { stroke: var(--c6); fill: var(--c6); } .c7 { stroke: var(--c7); fill: var(--c7); }
.line.c0, .line.c1, .line.c2, .line.c3, .line.c4, .line.c5, .line.c6, .line.c7 { fill: none; }
.band, .area, .phase, .dot { stroke: none !important; }
.key { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 13px; color: var(--dim); margin: 4px 0 0; }
.key span { overflow-wrap: anywhere; } .key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 5px; }
i.c0 { background: var(--c0); } i.c1 { background: var(--c1); } i.c2 { background: var(--c2); }
i.c3 { background: var(--c3); }
i.c4 { background: var(--c4); } i.c5 { background: var(--c5); } i.c6 { background: var(--c6); }
i.c7 { background: var(--c7); }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; width: 100%; }
th, td { text-align: right; padding: 3px 10px 3px 0; border-bottom: 1px solid var(--grid); }
th { color: var(--dim); font-weight: 500; }
th:nth-child(2), td:nth-child(2) { text-align: left; }
.bar { display: flex; height: 12px; min-width: 120px; border-radius: 4px; overflow: hidden; background: var(--grid); }
.bar i { display: block; height: 100%; }
)";

constexpr std::size_t kMaxSeries = 8;  // per chart, one for each color
constexpr std::size_t kMaxTimelineRows = 16;
constexpr std::size_t kMaxTableRows = 256;

std::string card(const std::string& title, const std::string& content, bool wide = false) {
  return std::string("<section") + (wide ? " class=\"wide\"" : "") + "><h2>" + escape_xml(title) + "</h2>" + content +
         "</section>\n";
}

std::string paragraph(const std::string& text, bool bad = false) {
  return std::string(bad ? "<p class=\"bad\">" : "<p>") + escape_xml(text) + "</p>";
}

/// Says how many ranks are shown, unless all are.
std::string shown_ranks_paragraph(std::size_t shown, std::size_t all) {
  return shown < all ? paragraph(std::to_string(shown) + " of " + std::to_string(all) + " ranks") : "";
}

double mean_step_ms(const RankRecord& record) {
  return record.num_steps > 0 ? record.seconds * 1e3 / static_cast<double>(record.num_steps) : 0;
}

std::string make_legend(const std::vector<ChartSeries>& series) {
  if (series.size() < 2) return "";
  std::string key;
  for (std::size_t i = 0; i < series.size(); ++i)
    key += "<span><i class=\"" + color_class(i) + "\"></i>" + escape_xml(series[i].name) + "</span>";
  return "<div class=\"key\">" + key + "</div>";
}

struct CurveSummary {
  double last = 0;
  double min = std::numeric_limits<double>::infinity();
  double max = -std::numeric_limits<double>::infinity();
  std::int64_t num_non_finite = 0;
  const CurvePoint* first_non_finite = nullptr;
};

CurveSummary summarize(const ChartSeries& series) {
  CurveSummary all;
  for (const CurvePoint& point : series.points) {
    all.num_non_finite += point.num_non_finite;
    if (point.num_non_finite > 0 && !all.first_non_finite) all.first_non_finite = &point;
    if (point.num_finite == 0) continue;
    all.last = point.mean();
    all.min = std::min(all.min, point.min);
    all.max = std::max(all.max, point.max);
  }
  return all;
}

std::string summary_paragraph(const ChartSeries& series) {
  const CurveSummary all = summarize(series);
  return paragraph(all.min <= all.max ? "last " + format_short(all.last) + ", min " + format_short(all.min) + ", max " +
                                            format_short(all.max)
                                      : "no finite values");
}

/// The first step with NaN or infinity; empty if all values are finite.
std::string non_finite_paragraph(const ChartSeries& series) {
  const CurveSummary all = summarize(series);
  if (!all.first_non_finite) return "";
  const std::string first = std::to_string(static_cast<std::int64_t>(all.first_non_finite->first_step)),
                    last = std::to_string(static_cast<std::int64_t>(all.first_non_finite->last_step));
  return paragraph(series.name + " is NaN or infinite " + std::to_string(all.num_non_finite) +
                       (all.num_non_finite == 1 ? " time" : " times") + ", first " +
                       (first == last ? "at step " + first : "between steps " + first + " and " + last),
                   true);
}

/// One card per last part of a name, so that train/loss and val/loss share a chart.
std::string scalar_cards(const CurveLogger::Curves& curves) {
  std::vector<std::pair<std::string, std::vector<ChartSeries>>> drawings;
  for (const auto& [name, curve] : curves) {
    const std::string last_part = name.substr(name.rfind('/') + 1);
    auto found = std::find_if(drawings.begin(), drawings.end(), [&](const auto& drawing) {
      return drawing.first == last_part && drawing.second.size() < kMaxSeries;
    });
    if (found == drawings.end()) {
      drawings.emplace_back(last_part, std::vector<ChartSeries>());
      found = std::prev(drawings.end());
    }
    found->second.push_back({name, curve.points()});
  }
  std::string html;
  for (const auto& [title, series] : drawings) {
    std::string notes = series.size() == 1 ? summary_paragraph(series.front()) : "";
    for (const ChartSeries& curve : series) notes += non_finite_paragraph(curve);
    html += card(series.size() == 1 ? series.front().name : title, notes + line_chart(series) + make_legend(series));
  }
  return html;
}

std::string phase_card(const RankRecord& record) {
  std::vector<ChartSeries> series;
  for (std::size_t i = 0; i < kNumPhases; ++i)
    series.push_back({std::string(kPhaseNames[i]), record.phase_ms[i].points()});
  ChartSeries other{"other", record.step_ms.points()};
  for (std::size_t p = 0; p < other.points.size(); ++p)
    for (const Curve& curve : record.phase_ms)
      if (p < curve.points().size()) other.points[p].sum -= curve.points()[p].sum;
  series.push_back(std::move(other));
  return card("step time, ms",
              paragraph("rank " + std::to_string(record.rank) + ", mean " + format_short(mean_step_ms(record))) +
                  stacked_chart(series) + make_legend(series));
}

std::string rank_chart_card(const std::string& title, const std::vector<RankRecord>& ranks, Curve RankRecord::* curve) {
  std::vector<ChartSeries> series;
  const std::size_t every = (ranks.size() + kMaxSeries - 1) / kMaxSeries;
  for (std::size_t i = 0; i < ranks.size(); i += every)
    if (!(ranks[i].*curve).points().empty())
      series.push_back({"rank " + std::to_string(ranks[i].rank), (ranks[i].*curve).points()});
  if (series.empty()) return "";
  return card(title, shown_ranks_paragraph(series.size(), ranks.size()) + line_chart(series) + make_legend(series));
}

std::string percent_of_steps(const RankRecord& record, double seconds) {
  const double part = record.seconds > 0 ? seconds / record.seconds : 0;
  char text[16];
  std::snprintf(text, sizeof text, "%.1f%%", std::clamp(part, 0.0, 1.0) * 100);
  return text;
}

std::string table_row(const RankRecord& record, bool has_comm) {
  std::string bar, percents;
  for (std::size_t i = 0; i < kNumPhases; ++i) {
    const std::string percent = percent_of_steps(record, record.phase_seconds[i]);
    bar += "<i class=\"" + color_class(i) + "\" style=\"width: " + percent + "\"></i>";
    percents += "<td>" + percent + "</td>";
  }
  if (has_comm) percents += "<td>" + percent_of_steps(record, record.comm_seconds) + "</td>";
  double cores = 0, count = 0;
  for (const CurvePoint& point : record.cpu_cores.points()) {
    cores += point.sum;
    count += static_cast<double>(point.num_finite);
  }
  return "<tr><td>" + std::to_string(record.rank) + "</td><td>" + escape_xml(record.host) + "</td><td>" +
         format_short(mean_step_ms(record)) + "</td><td><div class=\"bar\">" + bar + "</div></td>" + percents + "<td>" +
         (count > 0 ? format_short(cores / count) : "-") + "</td><td>" +
         format_short(static_cast<double>(record.peak_bytes >> 20)) + "</td></tr>";
}

std::string rank_table_card(const std::vector<RankRecord>& ranks) {
  const bool has_comm =
      std::any_of(ranks.begin(), ranks.end(), [](const RankRecord& record) { return record.comm_seconds > 0; });
  const std::size_t shown = std::min(kMaxTableRows, ranks.size());
  std::string rows;
  for (std::size_t i = 0; i < shown; ++i) rows += table_row(ranks[i], has_comm);
  std::string head = "<tr><th>rank</th><th>host</th><th>ms per step</th><th>phases</th>";
  for (const std::string_view name : kPhaseNames) head += "<th>" + std::string(name) + "</th>";
  if (has_comm) head += "<th>comm</th>";
  return card("ranks",
              shown_ranks_paragraph(shown, ranks.size()) + "<div class=\"scroll\"><table>" + head +
                  "<th>cores used</th><th>peak MiB</th></tr>" + rows + "</table></div>",
              true);
}

std::string step_timeline_card(const std::vector<RankRecord>& ranks) {
  const auto step = median_step(ranks);
  if (!step) return "";
  std::vector<ChartSeries> series;
  for (const std::string_view name : kPhaseNames) series.push_back({std::string(name), {}});
  std::string key = make_legend(series);
  key.insert(key.rfind("</div>"), "<span><i class=\"c6\"></i>operations between ranks</span>");
  return card("step " + std::to_string(*step),
              shown_ranks_paragraph(std::min(kMaxTimelineRows, ranks.size()), ranks.size()) + "<div class=\"scroll\">" +
                  timeline(ranks, clock_offsets(ranks), *step, kMaxTimelineRows) + "</div>" + key,
              true);
}

}  // namespace

std::string report_html(const Report& report) {
  std::string html =
      "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\"><head><meta charset=\"utf-8\"/>"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/><meta name=\"color-scheme\" "
      "content=\"light dark\"/><title>";
  html += escape_xml(report.title) + "</title><style>" + std::string(kReportCss) + "</style></head>\n<body><h1>" +
          escape_xml(report.title) + "</h1>\n";
  std::string facts;
  for (const auto& [name, value] : report.facts)
    facts += "<dt>" + escape_xml(name) + "</dt><dd>" + escape_xml(value) + "</dd>";
  if (!facts.empty()) html += "<dl>" + facts + "</dl>\n";
  html += "<main>\n" + scalar_cards(report.curves);
  if (!report.ranks.empty())
    html += phase_card(report.ranks.front()) +
            rank_chart_card("step time by rank, ms", report.ranks, &RankRecord::step_ms) +
            rank_chart_card("CPU use, cores", report.ranks, &RankRecord::cpu_cores) +
            rank_chart_card("memory, MiB", report.ranks, &RankRecord::memory_mib) +
            rank_chart_card("GPU memory, MiB", report.ranks, &RankRecord::device_mib) +
            step_timeline_card(report.ranks) + rank_table_card(report.ranks);
  return html + "</main></body></html>\n";
}

void write_report(const std::string& path, const Report& report) { replace_file(path, report_html(report)); }

}  // namespace lockstep::training::inline report
