#include "lockstep/launch/output/console_renderer.h"

#include <gtest/gtest.h>

namespace lockstep::launcher::output {
namespace {

const std::string kErase = "\r\x1b[K";

LineSegment segment(const std::string& text, SegmentEnd end = SegmentEnd::kNewline, bool overwrites_bar = false) {
  return {text, end, false, overwrites_bar};
}

TEST(ConsoleRenderer, LinesHaveThePrefix) {
  ConsoleRenderer renderer(false);
  EXPECT_EQ(renderer.render("[0] ", 0, segment("a")), "[0] a\n");
  EXPECT_EQ(renderer.render("[12] ", 24, segment("")), "[12] \n");
}

TEST(ConsoleRenderer, ContinuationOfACutLineIsMarked) {
  ConsoleRenderer renderer(false);
  EXPECT_EQ(renderer.render("[3] ", 6, {"head", SegmentEnd::kCut, false, false}), "[3] head\n");
  EXPECT_EQ(renderer.render("[3] ", 6, {"rest", SegmentEnd::kNewline, true, false}), "[3]+rest\n");
}

TEST(ConsoleRenderer, ReturnsAreKeptWithoutATerminal) {
  ConsoleRenderer renderer(false);
  EXPECT_EQ(renderer.render("[0] ", 0, segment("10%", SegmentEnd::kReturn)), "[0] 10%\r");
  EXPECT_EQ(renderer.render("[0] ", 0, segment("20%", SegmentEnd::kOpen, true)), "");
  EXPECT_EQ(renderer.render("[0] ", 0, segment("", SegmentEnd::kNewline, true)), "\n");
  EXPECT_EQ(renderer.close_bar(), "");
}

TEST(ConsoleRenderer, BarStaysBelowOtherLines) {
  ConsoleRenderer renderer(true);
  EXPECT_EQ(renderer.render("[0] ", 0, segment("10%", SegmentEnd::kReturn)), kErase + "[0] 10%");
  EXPECT_EQ(renderer.render("[1] ", 2, segment("hello")), kErase + "[1] hello\n[0] 10%");
  EXPECT_EQ(renderer.render("lockstep: note\n"), kErase + "lockstep: note\n[0] 10%");
  EXPECT_EQ(renderer.render("[0] ", 0, segment("20%", SegmentEnd::kOpen, true)), kErase + "[0] 20%");
  EXPECT_EQ(renderer.render("[0] ", 0, segment("done", SegmentEnd::kNewline, true)), kErase + "[0] done\n");
  EXPECT_EQ(renderer.render("[1] ", 2, segment("bye")), "[1] bye\n");
}

TEST(ConsoleRenderer, BarEndedByNewlineBecomesALine) {
  ConsoleRenderer renderer(true);
  renderer.render("[0] ", 0, segment("100%", SegmentEnd::kReturn));
  EXPECT_EQ(renderer.render("[0] ", 0, segment("", SegmentEnd::kNewline, true)), kErase + "[0] 100%\n");
  EXPECT_EQ(renderer.close_bar(), "");
}

TEST(ConsoleRenderer, NewestBarIsShown) {
  ConsoleRenderer renderer(true);
  renderer.render("[0] ", 0, segment("zero", SegmentEnd::kReturn));
  EXPECT_EQ(renderer.render("[1] ", 2, segment("one", SegmentEnd::kReturn)), kErase + "[1] one");
  // The newline of a bar that is no longer displayed prints nothing.
  EXPECT_EQ(renderer.render("[0] ", 0, segment("", SegmentEnd::kNewline, true)), "");
  EXPECT_EQ(renderer.render("[0] ", 0, segment("text", SegmentEnd::kNewline, true)), kErase + "[0] text\n[1] one");
  EXPECT_EQ(renderer.close_bar(), "\n");
  EXPECT_EQ(renderer.close_bar(), "");
}

TEST(ConsoleRenderer, BarIsClippedToTheTerminal) {
  ConsoleRenderer renderer(true);
  renderer.resize(10);
  EXPECT_EQ(renderer.render("[0] ", 0, segment("\u2501\u2501\u2501 123", SegmentEnd::kReturn)),
            kErase + "[0] \u2501\u2501\u2501 1");
  renderer.resize(7);
  EXPECT_EQ(renderer.render("[1] ", 2, segment("a long line is not cut")),
            kErase + "[1] a long line is not cut\n[0] \u2501\u2501");
  renderer.resize(80);
  EXPECT_EQ(renderer.render("[0] ", 0, segment("", SegmentEnd::kNewline, true)),
            kErase + "[0] \u2501\u2501\u2501 123\n");
}

TEST(ConsoleRenderer, ColourCodesHaveNoWidth) {
  EXPECT_EQ(clip_to_columns("\x1b[1;32mgreen\x1b[0m", 6), "\x1b[1;32mgreen\x1b[0m");
  EXPECT_EQ(clip_to_columns("\x1b[1;32mgreen\x1b[0m", 4), "\x1b[1;32mgre\x1b[0m");
  EXPECT_EQ(clip_to_columns("ab\x1b[", 3), "ab\x1b[");
  EXPECT_EQ(clip_to_columns("abc", 1), "");
}

}  // namespace
}  // namespace lockstep::launcher::output
