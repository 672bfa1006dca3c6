#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/launch/output/console_renderer.h"

namespace lockstep::launcher::output {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Describes each segment: "text|" if it ends in a newline, "text<" in a carriage return, "text+" if it was cut,
/// "text~" for an open progress bar; with '^' in front if it overwrites a bar.
std::vector<std::string> described(const std::vector<LineSegment>& segments) {
  std::vector<std::string> all;
  for (const LineSegment& segment : segments)
    all.push_back((segment.overwrites_bar ? "^" : "") + segment.text + "|<+~"[static_cast<int>(segment.end)]);
  return all;
}

TEST(LineSplitter, WholeLinesOnly) {
  LineSplitter lines;
  EXPECT_THAT(described(lines.feed("one\ntwo\nth")), ElementsAre("one|", "two|"));
  EXPECT_THAT(described(lines.feed("ree")), IsEmpty());
  EXPECT_THAT(described(lines.feed("\n\n")), ElementsAre("three|", "|"));
  EXPECT_THAT(described(lines.finish()), IsEmpty());
}

TEST(LineSplitter, LastLineNeedsNoNewline) {
  LineSplitter lines;
  lines.feed("a\nrest");
  EXPECT_THAT(described(lines.finish()), ElementsAre("rest|"));
  EXPECT_THAT(described(lines.finish()), IsEmpty());
}

TEST(LineSplitter, BarsWithTrailingReturn) {
  LineSplitter lines;
  EXPECT_THAT(described(lines.feed("10%\r")), ElementsAre("10%<"));
  EXPECT_THAT(described(lines.feed("20%\r")), ElementsAre("^20%<"));
  EXPECT_THAT(described(lines.feed("\n")), ElementsAre("^|"));
  EXPECT_THAT(described(lines.feed("next\n")), ElementsAre("next|"));
}

TEST(LineSplitter, BarsWithLeadingReturn) {
  LineSplitter lines;
  EXPECT_THAT(described(lines.feed("\r10%")), ElementsAre("^10%~"));
  EXPECT_THAT(described(lines.feed("\r20%")), ElementsAre("^10%<", "^20%~"));
  EXPECT_THAT(described(lines.feed(" done\n")), ElementsAre("^20% done|"));
}

TEST(LineSplitter, WindowsLineEndings) {
  LineSplitter lines;
  EXPECT_THAT(described(lines.feed("a\r\nb\r\n")), ElementsAre("a|", "b|"));
  // \r and \n arrive separately, so that a bar is displayed first and then becomes a line.
  EXPECT_THAT(described(lines.feed("c\r")), ElementsAre("c<"));
  EXPECT_THAT(described(lines.feed("\nd\n")), ElementsAre("^|", "d|"));
}

TEST(LineSplitter, OpenBarIsFlushedAtTheEnd) {
  LineSplitter lines;
  lines.feed("100%\r");
  EXPECT_THAT(described(lines.finish()), ElementsAre("^|"));
}

TEST(LineSplitter, LongLinesAreCutWithoutLoss) {
  LineSplitter lines;
  const std::string text(3 * LineSplitter::kMaxLineBytes + 10, 'x');
  std::vector<LineSegment> segments;
  for (std::size_t at = 0; at < text.size(); at += 1000)
    for (LineSegment& segment : lines.feed(text.substr(at, 1000))) segments.push_back(segment);
  for (LineSegment& segment : lines.feed("\nshort\n")) segments.push_back(segment);
  ASSERT_EQ(segments.size(), 5u);
  std::string joined;
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(segments[i].is_continuation, i > 0);
    EXPECT_EQ(segments[i].end, i < 3 ? SegmentEnd::kCut : SegmentEnd::kNewline);
    joined += segments[i].text;
  }
  EXPECT_EQ(joined, text);
  EXPECT_FALSE(segments[4].is_continuation);
}

TEST(LineSplitter, CutsDoNotSplitCharacters) {
  LineSplitter lines;
  std::string text(LineSplitter::kMaxLineBytes - 1, 'x');
  text += "\xe2\x82\xac";  // the euro sign would be cut after its first byte
  const std::vector<LineSegment> segments = lines.feed(text + "\n");
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_EQ(segments[0].text.size(), LineSplitter::kMaxLineBytes - 1);
  EXPECT_EQ(segments[1].text, "\xe2\x82\xac");
}

TEST(LineSplitter, BinaryBytesPass) {
  LineSplitter lines;
  const std::string bytes("a\0\xff\x80z", 5);
  EXPECT_EQ(lines.feed(bytes + "\n")[0].text, bytes);
  // The line is cut even though no byte begins a UTF-8 character.
  EXPECT_EQ(lines.feed(std::string(LineSplitter::kMaxLineBytes + 5, '\x80')).size(), 1u);
}

}  // namespace
}  // namespace lockstep::launcher::output
