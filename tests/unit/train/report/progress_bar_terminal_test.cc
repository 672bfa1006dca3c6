#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "lockstep/base/log.h"
#include "lockstep/train/report/progress_bar.h"
#include "tests/unit/train/report/pseudo_terminal.h"

namespace lockstep::training {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using tests::PseudoTerminal;

constexpr ProgressBarOptions kAlways{
    .num_epochs = 2, .steps_per_epoch = 4, .redraw_interval = std::chrono::milliseconds(0)};

TEST(ProgressBarOnATerminal, UsesOneRowPerEpoch) {
  PseudoTerminal terminal(80);
  ProgressBar progress(0, kAlways);
  for (int step = 0; step < 6; ++step) progress.step({{"loss", 1.5}});
  ASSERT_EQ(terminal.rows().size(), 2U);
  EXPECT_THAT(terminal.rows()[0], AllOf(StartsWith("epoch 1/2  ━━━━━━━━━━"), HasSubstr("━  100%  4/4  loss 1.500")));
  EXPECT_THAT(terminal.rows()[1], AllOf(StartsWith("epoch 2/2  ━━━━━"), HasSubstr("─  50%  2/4  loss 1.500")));
}

TEST(ProgressBarOnATerminal, LeavesTheCursorOnANewRow) {
  PseudoTerminal terminal(80);
  {
    ProgressBar progress(0, kAlways);
    progress.step();
  }
  ASSERT_EQ(terminal.rows().size(), 2U);
  EXPECT_THAT(terminal.rows()[0], HasSubstr("1/4"));
  EXPECT_EQ(terminal.rows()[1], "");
}

TEST(ProgressBarOnATerminal, FitsAfterAResize) {
  PseudoTerminal terminal(120);
  ProgressBar progress(0, kAlways);
  progress.step({{"loss", 1}});
  terminal.resize(30);
  progress.step({{"loss", 1}});
  ASSERT_EQ(terminal.rows().size(), 1U);  // in 30 columns, without remains of the longer line
  EXPECT_THAT(terminal.rows()[0], Not(HasSubstr("━")));
  EXPECT_THAT(terminal.rows()[0], HasSubstr("2/4"));
  terminal.resize(200);
  progress.step({{"loss", 1}});
  ASSERT_EQ(terminal.rows().size(), 1U);
  EXPECT_THAT(terminal.rows()[0], HasSubstr("━"));
}

TEST(ProgressBarOnATerminal, PrintsLinesAboveTheBar) {
  PseudoTerminal terminal(80);
  ProgressBar progress(0, kAlways);
  progress.step();
  base::log_warning("the disk is full");
  progress.step();
  progress.print_line("epoch 1: accuracy 0.9");
  progress.step();
  const auto& rows = terminal.rows();
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0], "lockstep: warning: the disk is full");
  EXPECT_EQ(rows[1], "epoch 1: accuracy 0.9");
  EXPECT_THAT(rows[2], HasSubstr("3/4"));
}

TEST(ProgressBarOnATerminal, KeepsOutputOfOtherWriters) {
  PseudoTerminal terminal(80);
  ProgressBar progress(0, kAlways);
  progress.step();
  std::fprintf(stderr, "a warning of a library, longer than what is drawn in the row\n");
  progress.step();
  const auto& rows = terminal.rows();
  std::string all;
  for (const std::string& row : rows) all += row;
  EXPECT_THAT(all, HasSubstr("a warning of a library, longer than what is drawn in the row"));
  EXPECT_THAT(rows.back(), StartsWith("epoch 1/2  ━"));
  EXPECT_THAT(rows.back(), HasSubstr("2/4"));
}

TEST(ProgressBarOnATerminal, RestoresPlainOutputAtTheEnd) {
  PseudoTerminal terminal(80);
  {
    ProgressBar progress(0, kAlways);
    progress.step();
  }
  base::log_warning("x");
  EXPECT_THAT(terminal.rows(), ElementsAre(HasSubstr("1/4"), "lockstep: warning: x", ""));
}

TEST(ProgressBarOnATerminal, DisappearsUnlessLastLineIsKept) {
  PseudoTerminal terminal(80);
  ProgressBarOptions options = kAlways;
  options.label = "validation";
  options.num_epochs = 1;
  options.keep_last_line = false;
  {
    ProgressBar progress(0, options);
    for (int step = 0; step < 4; ++step) progress.step();
    EXPECT_THAT(terminal.rows(), ElementsAre(StartsWith("validation  ━")));
  }
  EXPECT_THAT(terminal.rows(), ElementsAre(""));
}

TEST(ProgressBarOnATerminal, HonorsTheRedrawInterval) {
  PseudoTerminal terminal(80);
  ProgressBar progress(0, {.steps_per_epoch = 1000, .redraw_interval = std::chrono::hours(1)});
  for (int step = 0; step < 999; ++step) progress.step();
  EXPECT_THAT(terminal.rows(), ElementsAre(""));
  progress.step();
  EXPECT_THAT(terminal.rows(), ElementsAre(HasSubstr("1000/1000"), ""));
}

TEST(ProgressBarOnATerminal, DoesNotBlockOnAStoppedTerminal) {
  PseudoTerminal terminal(80);
  ProgressBar progress(0, {.steps_per_epoch = 1'000'000, .redraw_interval = std::chrono::milliseconds(0)});
  for (int step = 0; step < 2000; ++step)
    progress.step({{"loss", step}});  // 160 KiB that are not read: more than a terminal buffers
  EXPECT_THAT(terminal.rows().back(), HasSubstr("/1000000"));
}

}  // namespace
}  // namespace lockstep::training
