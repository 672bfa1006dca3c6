#include "lockstep/train/report/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/train/report/chart.h"
#include "lockstep/train/report/timeline.h"
#include "lockstep/train/report/trace.h"
#include "tests/support/temp_dir.h"

namespace lockstep::training {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using tests::message_of;

constexpr std::int64_t kMs = 1'000'000;

/// A record with one step per element of `ms`, of that duration, and an operation that ends with each step. The clock
/// of this rank is `ahead_ms` ahead of that of rank 0.
RankRecord make_rank_record(int rank, const std::string& clock, std::int64_t ahead_ms,
                            const std::vector<std::int64_t>& ms) {
  RankRecord record;
  record.rank = rank;
  record.host = record.clock = clock;
  std::int64_t now = (1000 + ahead_ms) * kMs;
  for (std::size_t i = 0; i < ms.size(); ++i) {
    const std::int64_t end = now + ms[i] * kMs;
    record.steps.push_back(
        {static_cast<std::int64_t>(i), {.begin_ns = now, .end_ns = end, .spans = {{Phase::kForward, now, now + kMs}}}});
    record.operations.push_back({"world/ddp", i + 1, "gradients", "net", 4096, now + kMs, end});
    now = end;
  }
  return record;
}

TEST(Chart, HasRoundTicks) {
  EXPECT_THAT(axis_ticks(0, 1000, 5), ElementsAre(0, 200, 400, 600, 800, 1000));
  EXPECT_THAT(axis_ticks(0.13, 0.48, 4), ElementsAre(::testing::DoubleNear(0.1, 1e-9), ::testing::DoubleNear(0.2, 1e-9),
                                                     ::testing::DoubleNear(0.3, 1e-9), ::testing::DoubleNear(0.4, 1e-9),
                                                     ::testing::DoubleNear(0.5, 1e-9)));
  EXPECT_THAT(axis_ticks(-3, 2, 4), ElementsAre(-4, -2, 0, 2));
}

TEST(Chart, FormatsNumbers) {
  EXPECT_EQ(format_short(0.12345), "0.1235");
  EXPECT_EQ(format_short(9999), "9999");
  EXPECT_EQ(format_short(12300), "12.3k");
  EXPECT_EQ(format_short(-2.5e6), "-2.5M");
  EXPECT_EQ(format_short(3e10), "30G");
  EXPECT_EQ(format_short(1e-5), "1e-05");
}

TEST(Chart, DrawsPointsAndGaps) {
  const CurvePoint one{0, 0, 2, 2, 2, 1, 0}, gap{1, 1, 0, 0, 0, 0, 1}, three{2, 3, 1, 4, 5, 2, 0};
  const std::string svg = line_chart({{"x", {one, gap, three}}});
  EXPECT_THAT(svg, HasSubstr("class=\"band c0\""));
  EXPECT_THAT(svg, HasSubstr("class=\"bad\""));
  EXPECT_THAT(svg, ::testing::ContainsRegex("class=\"line c0\" d=\"M[0-9. ]*M[0-9. ]*\""));  // no line through the gap
  EXPECT_THAT(line_chart({{"x", {one}}}), HasSubstr("<circle"));
  EXPECT_THAT(line_chart({{"x", {}}}), Not(HasSubstr("nan")));
  EXPECT_THAT(line_chart({{"x", {gap}}}), Not(HasSubstr("nan")));
  EXPECT_THAT(stacked_chart({}), Not(HasSubstr("nan")));
}

TEST(Chart, IsLogarithmicOverWideRanges) {
  const auto chart = [](double low) {
    return line_chart({{"x", {{0, 0, low, low, low, 1, 0}, {1, 1, 100, 100, 100, 1, 0}}}});
  };
  EXPECT_THAT(chart(0.01), HasSubstr(">0.01<"));
  EXPECT_THAT(chart(0.01), HasSubstr(">10<"));
  EXPECT_THAT(chart(-0.01), Not(HasSubstr(">10<")));
}

TEST(ClockOffsets, AlignHostsByCommonOperations) {
  const std::vector<RankRecord> records = {
      make_rank_record(0, "a", 0, {10, 12, 10}), make_rank_record(1, "a", 0, {10, 12, 10}),
      make_rank_record(2, "b", 5000, {10, 12, 10}), make_rank_record(3, "b", 5003, {10, 12, 10})};
  EXPECT_THAT(clock_offsets(records), ElementsAre(0, 0, -5000 * kMs, -5000 * kMs));
}

TEST(ClockOffsets, FallBackToWallClocks) {
  RankRecord a = make_rank_record(0, "a", 0, {}), b = make_rank_record(1, "b", 0, {});
  a.monotonic_ns = 10, a.unix_ns = 1000;
  b.monotonic_ns = 500, b.unix_ns = 1000;
  EXPECT_THAT(clock_offsets({a, b}), ElementsAre(0, -490));
  EXPECT_TRUE(clock_offsets({}).empty());
}

TEST(Timeline, ShowsAStepOfMedianLength) {
  EXPECT_EQ(median_step({make_rank_record(0, "a", 0, {90, 10, 12, 1})}), 1);
  EXPECT_EQ(median_step({make_rank_record(0, "a", 0, {90, 10, 12, 1}), make_rank_record(1, "a", 0, {5})}), 0);
  EXPECT_EQ(median_step({make_rank_record(0, "a", 0, {90}), make_rank_record(1, "a", 0, {})}), std::nullopt);
  EXPECT_EQ(median_step({}), std::nullopt);
}

TEST(Timeline, RowsDoNotOverlap) {
  EXPECT_THAT(assign_rows({{0, 10}, {5, 7}, {8, 12}, {10, 20}}), ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(assign_rows({{5, 7}, {0, 10}}), ElementsAre(1, 0));
}

TEST(Report, EscapesAllText) {
  const std::string evil = "</script><script>alert('x')</script>\"&";
  Report report{.title = evil,
                .facts = {{evil, evil}},
                .curves = {{"train/" + evil, Curve()}, {"val/" + evil, Curve()}},
                .ranks = {make_rank_record(0, evil, 0, {10})}};
  report.ranks[0].operations[0].name = evil;
  const std::string html = report_html(report);
  EXPECT_THAT(html, Not(HasSubstr("<script")));
  EXPECT_THAT(html, HasSubstr("&lt;script&gt;alert(&#39;x&#39;)"));
}

TEST(Report, ReportsTheFirstNonFiniteStep) {
  Curve curve;
  for (int step = 0; step < 100; ++step) curve.add(step, step < 42 ? 1 : NAN);
  EXPECT_THAT(report_html({.title = "x", .facts = {}, .curves = {{"loss", curve}}, .ranks = {}}),
              HasSubstr("loss is NaN or infinite 58 times, first at step 42<"));
}

TEST(Report, IsBoundedInSize) {
  Report report{.title = "long", .facts = {}, .curves = {}, .ranks = {}};
  for (const char* name : {"train/loss", "val/loss", "lr", "throughput/steps_per_second"}) {
    Curve curve;
    for (int step = 0; step < 300'000; ++step) curve.add(step, std::sin(step) + step);
    report.curves.emplace_back(name, curve);
  }
  for (int rank = 0; rank < 64; ++rank) report.ranks.push_back(make_rank_record(rank, "a", 0, {10, 11, 12}));
  EXPECT_LT(report_html(report).size(), 400'000U);
}

TEST(Report, ReplacesTheOldFile) {
  const tests::TempDir folder;
  write_report(folder / "runs/x/report.html", {.title = "one", .facts = {}, .curves = {}, .ranks = {}});
  write_report(folder / "runs/x/report.html", {.title = "two", .facts = {}, .curves = {}, .ranks = {}});
  EXPECT_THAT(tests::read_file(folder / "runs/x/report.html"), HasSubstr("<h1>two</h1>"));
  EXPECT_EQ(
      std::distance(std::filesystem::directory_iterator(folder / "runs/x"), std::filesystem::directory_iterator()), 1);
}

TEST(RankRecord, RoundTripsThroughText) {
  RankRecord record = make_rank_record(3, "host \xff", 7, {10, 20});
  record.step_ms.add(1, NAN);
  record.step_ms.add(2, 0.1);
  record.phase_seconds = {1, 2, 3, 4};
  record.peak_bytes = std::uint64_t{1} << 63;
  const RankRecord again = rank_record_from_text(to_text(record));
  EXPECT_EQ(again.host, "host \uFFFD");
  EXPECT_EQ(again.step_ms.points(), record.step_ms.points());
  EXPECT_EQ(again.phase_seconds, record.phase_seconds);
  EXPECT_EQ(again.peak_bytes, record.peak_bytes);
  EXPECT_EQ(again.steps[1].times.spans[0].end_ns, record.steps[1].times.spans[0].end_ns);
  EXPECT_EQ(again.operations[1].channel, "world/ddp");
  EXPECT_EQ(to_text(again), to_text(rank_record_from_text(to_text(again))));
}

TEST(RankRecord, RejectsMalformedText) {
  EXPECT_THAT(message_of<base::FormatError>([] { rank_record_from_text("{}"); }), HasSubstr("rank record: "));
  std::string text = to_text(make_rank_record(0, "a", 0, {10}));
  text.replace(text.find("[[1,"), 4, "[[9,");
  EXPECT_EQ(message_of<base::FormatError>([&] { rank_record_from_text(text); }), "rank record: unknown phase 9");
}

TEST(RankRecorder, KeepsTheNewestStepsAndTotals) {
  RankRecorder recorder({.rank = 2, .keep_steps = 3, .sample_interval = std::chrono::milliseconds(1)});
  StepTimes times{.begin_ns = 0, .end_ns = 10 * kMs, .spans = {{Phase::kBackward, 0, 4 * kMs}}};
  const std::int64_t now = base::monotonic_ns();
  for (std::int64_t step = 0; step < 10; ++step) {
    times.begin_ns = now + step * 10 * kMs;
    times.end_ns = times.begin_ns + 10 * kMs;
    times.spans[0] = {Phase::kBackward, times.begin_ns, times.begin_ns + 4 * kMs};
    recorder.add(step, times, std::uint64_t{5} << 20);
  }
  const RankRecord record = recorder.record();
  EXPECT_EQ(record.rank, 2);
  EXPECT_EQ(record.num_steps, 10);
  EXPECT_NEAR(record.seconds, 0.1, 1e-9);
  EXPECT_NEAR(record.phase_seconds[2], 0.04, 1e-9);
  ASSERT_EQ(record.steps.size(), 3U);
  EXPECT_EQ(record.steps[0].step, 7);
  EXPECT_EQ(record.steps[2].step, 9);
  EXPECT_EQ(record.step_ms.points().size(), 10U);
  EXPECT_EQ(record.cpu_cores.points().size(), 10U);
  EXPECT_GT(record.memory_mib.points()[0].min, 1);
  EXPECT_EQ(record.device_mib.points()[0].min, 5);
  EXPECT_FALSE(record.host.empty());
}

TEST(RankRecorder, ReadsTheFlightRecorder) {
  base::telemetry::publish_to(base::telemetry::RankPage::this_process(), {.job = "test", .transport = "self"});
  RankRecorder recorder({});
  base::telemetry::FlightRing& flight = base::telemetry::RankPage::this_process().flight;
  const std::uint16_t channel = flight.add_channel("world/x");
  flight.end(flight.begin({.channel = channel, .seq = 1, .kind = "all_reduce", .dtype = "", .name = "before"}));
  PhaseTimer timer;
  // Times from the flight recorder have an error, which is the time that a copy of it takes.
  for (const std::int64_t begin = base::monotonic_ns(); base::monotonic_ns() < begin + 5 * kMs;) continue;
  const std::uint64_t number =
      flight.begin({.channel = channel, .seq = 2, .kind = "gradients", .dtype = "", .name = "net", .bytes = 64});
  flight.end(number);
  flight.begin({.channel = channel, .seq = 3, .kind = "all_reduce", .dtype = "", .name = "unfinished"});
  recorder.add(0, timer.end_step());
  const RankRecord record = recorder.record();
  ASSERT_GE(record.operations.size(), 1U);
  const OperationSpan& last = record.operations.back();
  EXPECT_EQ(last.name, "net");
  EXPECT_EQ(last.channel, "world/x");
  EXPECT_EQ(last.bytes, 64U);
  EXPECT_GE(last.end_ns, last.begin_ns);
  EXPECT_NEAR(static_cast<double>(last.end_ns), static_cast<double>(record.monotonic_ns), 1e9);
}

TEST(RankRecorder, RejectsInvalidOptions) {
  EXPECT_EQ(message_of<base::UsageError>([] { RankRecorder({.keep_steps = 0}); }),
            "RankRecorderOptions: keep_steps is 0, sample_interval is 1000 ms, curve_points is 100; expected at least "
            "1, 1 and 2");
}

TEST(Trace, HasAllRanksOnOneAxis) {
  const auto trace = nlohmann::json::parse(
      trace_json({make_rank_record(0, "a", 0, {10, 20}), make_rank_record(1, "b", 5000, {10, 20})}));
  std::vector<double> begins, lengths;
  std::vector<int> processes;
  for (const auto& event : trace.at("traceEvents"))
    if (event.at("ph") == "X" && event.at("name") == "gradients net") {
      processes.push_back(event.at("pid"));
      begins.push_back(event.at("ts"));
      lengths.push_back(event.at("dur"));
      EXPECT_EQ(event.at("args").at("bytes"), 4096);
    }
  EXPECT_THAT(processes, ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(begins, ElementsAre(1000, 11000, 1000, 11000));
  EXPECT_THAT(lengths, ElementsAre(9000, 19000, 9000, 19000));
}

TEST(Trace, SpansOfATrackDoNotOverlap) {
  RankRecord record = make_rank_record(0, "a", 0, {10});
  record.operations.push_back({"world", 9, "all_reduce", "\"quoted\"", 8, 1002 * kMs, 1020 * kMs});
  const auto trace = nlohmann::json::parse(trace_json({record}));
  std::map<int, double> ends;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X" || event.at("tid") < 3) continue;
    EXPECT_GE(event.at("ts").get<double>(), ends[event.at("tid")]);
    ends[event.at("tid")] = event.at("ts").get<double>() + event.at("dur").get<double>();
  }
  EXPECT_EQ(ends.size(), 2U);
  EXPECT_THAT(trace_json({record}), HasSubstr("all_reduce \\\"quoted\\\""));
}

TEST(Trace, IsValidWithoutRecords) { EXPECT_EQ(nlohmann::json::parse(trace_json({})).at("traceEvents").size(), 0U); }

}  // namespace
}  // namespace lockstep::training
