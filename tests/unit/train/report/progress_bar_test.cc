#include "lockstep/train/report/progress_bar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <string>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::training {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const ProgressBarState kState{.epoch = 1,
                              .num_epochs = 3,
                              .step = 612,
                              .num_steps = 900,
                              .values = {{"loss", 1.4824}, {"acc", 0.5512}},
                              .samples_per_second = 3120,
                              .seconds_left = 41.2};

std::size_t display_width(const std::string& line) {
  std::size_t width = 0;
  for (const char c : line) width += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return width;
}

base::Env env_of(const std::map<std::string, std::string>& values) {
  return base::Env([&](const char* name) -> base::Env::Value {
    const auto found = values.find(name);
    return found == values.end() ? base::Env::Value() : found->second;
  });
}

TEST(FormatProgressLine, ShowsAllFieldsWhenTheyFit) {
  EXPECT_EQ(format_progress_line(kState, 120),
            "epoch 2/3  ━━━━━━━━━━━━━━━━━━━━──────────  68%  612/900  loss 1.482  acc 0.551  3.1k samples/s  ETA 0:41");
}

TEST(FormatProgressLine, OmitsTheBarWithoutATerminal) {
  EXPECT_EQ(format_progress_line(kState, 0),
            "epoch 2/3  68%  612/900  loss 1.482  acc 0.551  3.1k samples/s  ETA 0:41");
}

TEST(FormatProgressLine, ShowsTheTimeBetweenRanksIfThereIsRoom) {
  ProgressBarState state = kState;
  state.comm_fraction = 0.123;
  EXPECT_THAT(format_progress_line(state, 0), HasSubstr("3.1k samples/s  comm 12%  ETA 0:41"));
  EXPECT_EQ(format_progress_line(state, 90), format_progress_line(kState, 90)) << "it is dropped first";
}

TEST(FormatProgressLine, IsNarrowerThanTheTerminal) {
  for (int columns = 1; columns <= 200; ++columns)
    EXPECT_LT(display_width(format_progress_line(kState, columns)), static_cast<std::size_t>(columns))
        << columns << " columns";
}

TEST(FormatProgressLine, DropsTheLeastImportantFieldsFirst) {
  EXPECT_THAT(format_progress_line(kState, 80), Not(HasSubstr("samples/s")));
  EXPECT_THAT(format_progress_line(kState, 80), HasSubstr("ETA 0:41"));
  EXPECT_EQ(format_progress_line(kState, 40), "epoch 2/3  68%  612/900  ETA 0:41");
  EXPECT_EQ(format_progress_line(kState, 6), "68%");
}

TEST(FormatProgressLine, DrawsHalfCharacters) {
  ProgressBarState state{.step = 0, .num_steps = 60};
  EXPECT_EQ(format_progress_line(state, 80), "──────────────────────────────  0%  0/60");
  state.step = 1;
  EXPECT_EQ(format_progress_line(state, 80), "╸─────────────────────────────  1%  1/60");
  state.step = 59;
  EXPECT_EQ(format_progress_line(state, 80), "━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸  98%  59/60");
  state.step = 60;
  EXPECT_EQ(format_progress_line(state, 80), "━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  100%  60/60");
}

TEST(FormatProgressLine, FormatsNumbersOfAnyMagnitude) {
  const auto line = [](double value, double rate, double seconds) {
    return format_progress_line(
        {.step = 1, .num_steps = 2, .values = {{"x", value}}, .samples_per_second = rate, .seconds_left = seconds}, 0);
  };
  EXPECT_EQ(line(0, 0.5, 0.2), "50%  1/2  x 0.000  0.5 samples/s  ETA 0:00");
  EXPECT_EQ(line(1.5e-5, 999, 59.7), "50%  1/2  x 1.5e-05  999 samples/s  ETA 1:00");
  EXPECT_EQ(line(-123456, 99960, 3601), "50%  1/2  x -1.23e+05  100k samples/s  ETA 1:00:01");
  EXPECT_EQ(line(NAN, 2.5e6, 360000), "50%  1/2  x nan  2.5M samples/s  ETA 100:00:00");
}

TEST(TerminalColumns, AreReadFromTheLauncher) {
  EXPECT_EQ(terminal_columns(env_of({{"LOCKSTEP_TERMINAL", "72"}})), 72);
  EXPECT_EQ(terminal_columns(env_of({{"LOCKSTEP_TERMINAL", "72"}, {"TERM", "dumb"}})), 0);
  EXPECT_EQ(terminal_columns(env_of({{"LOCKSTEP_TERMINAL", "wide"}})), 0);
  EXPECT_EQ(terminal_columns(env_of({{"LOCKSTEP_TERMINAL", "-3"}})), 0);
}

TEST(ProgressBar, WritesLinesWithoutATerminal) {
  testing::internal::CaptureStdout();
  {
    ProgressBar progress(0, {.num_epochs = 2, .steps_per_epoch = 3});
    for (int i = 0; i < 6; ++i) progress.step({{"loss", i}});
  }
  const std::string text = testing::internal::GetCapturedStdout();
  EXPECT_THAT(text, testing::MatchesRegex("epoch 1/2  100%  3/3  loss 2.000  [0-9.kM]* steps/s  ETA 0:00\n"
                                          "epoch 2/2  100%  3/3  loss 5.000  [0-9.kM]* steps/s  ETA 0:00\n"));
}

TEST(ProgressBar, WritesALinePerStepOnRequest) {
  testing::internal::CaptureStdout();
  ProgressBar(0, {.steps_per_epoch = 2, .line_interval = std::chrono::milliseconds(0)}).step();
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "50%  1/2\n");
}

TEST(ProgressBar, IsSilentOnOtherRanks) {
  testing::internal::CaptureStdout();
  ProgressBar(1, {.line_interval = std::chrono::milliseconds(0)}).step();
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

TEST(ProgressBar, ResumesAtAnEarlierStep) {
  testing::internal::CaptureStdout();
  ProgressBar(0, {.label = "again",
                  .num_epochs = 3,
                  .steps_per_epoch = 10,
                  .steps_done = 14,
                  .line_interval = std::chrono::milliseconds(0)})
      .step();
  EXPECT_THAT(testing::internal::GetCapturedStdout(), testing::StartsWith("again  epoch 2/3  50%  5/10"));
}

TEST(ProgressBar, EvaluatesValuesOnlyWhenDrawing) {
  testing::internal::CaptureStdout();
  int evaluations = 0;
  {
    ProgressBar progress(0, {.steps_per_epoch = 10});
    for (int i = 0; i < 10; ++i)
      progress.step([&] {
        ++evaluations;
        return NamedValues{{"loss", 2}};
      });
  }
  EXPECT_THAT(testing::internal::GetCapturedStdout(), HasSubstr("loss 2.000"));
  EXPECT_EQ(evaluations, 1);
}

TEST(ProgressBar, IsCheapWhenNothingIsDrawn) {
  ProgressBar progress(0, {.steps_per_epoch = 10'000'000});
  auto best = std::chrono::nanoseconds::max();
  for (int round = 0; round < 20; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 1000; ++i) progress.step([] { return NamedValues{{"loss", 1}}; });
    best = std::min(
        best, std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin) / 1000);
  }
  EXPECT_LT(best.count(), 1000);
  RecordProperty("nanoseconds_per_step", static_cast<int>(best.count()));
}

TEST(ProgressBar, RejectsInvalidOptions) {
  const auto error_of = [](const ProgressBarOptions& options) {
    return tests::message_of<base::UsageError>([&] { ProgressBar(0, options); });
  };
  EXPECT_EQ(error_of({.steps_per_epoch = 0}),
            "ProgressBarOptions: num_epochs is 1 and steps_per_epoch is 0; expected at least 1 for each");
  EXPECT_EQ(error_of({.steps_done = -1}),
            "ProgressBarOptions: steps_done is -1 and samples_per_step is 0; expected 0 or more for each");
  EXPECT_EQ(error_of({.line_interval = std::chrono::milliseconds(-5)}),
            "ProgressBarOptions: redraw_interval is 200 ms and line_interval is -5 ms; expected 0 or more for each");
}

}  // namespace
}  // namespace lockstep::training
