#include "lockstep/launch/output/line_splitter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// "text|" newline, "text<" return, "text+" cut, "text~" open; '^' in front: over a bar.
std::vector<std::string> shown(const std::vector<Piece>& pieces) {
  std::vector<std::string> all;
  for (const Piece& piece : pieces)
    all.push_back((piece.over_bar ? "^" : "") + piece.text + "|<+~"[static_cast<int>(piece.end)]);
  return all;
}

TEST(LineSplitter, WholeLinesOnly) {
  LineSplitter lines;
  EXPECT_THAT(shown(lines.feed("one\ntwo\nth")), ElementsAre("one|", "two|"));
  EXPECT_THAT(shown(lines.feed("ree")), IsEmpty());
  EXPECT_THAT(shown(lines.feed("\n\n")), ElementsAre("three|", "|"));
  EXPECT_THAT(shown(lines.finish()), IsEmpty());
}

TEST(LineSplitter, TheLastLineNeedsNoNewline) {
  LineSplitter lines;
  lines.feed("a\nrest");
  EXPECT_THAT(shown(lines.finish()), ElementsAre("rest|"));
  EXPECT_THAT(shown(lines.finish()), IsEmpty());
}

TEST(LineSplitter, BarsThatEndInReturn) {
  LineSplitter lines;
  EXPECT_THAT(shown(lines.feed("10%\r")), ElementsAre("10%<"));
  EXPECT_THAT(shown(lines.feed("20%\r")), ElementsAre("^20%<"));
  EXPECT_THAT(shown(lines.feed("\n")), ElementsAre("^|"));
  EXPECT_THAT(shown(lines.feed("next\n")), ElementsAre("next|"));
}

TEST(LineSplitter, BarsThatBeginWithReturn) {
  LineSplitter lines;
  EXPECT_THAT(shown(lines.feed("\r10%")), ElementsAre("^10%~"));
  EXPECT_THAT(shown(lines.feed("\r20%")), ElementsAre("^10%<", "^20%~"));
  EXPECT_THAT(shown(lines.feed(" done\n")), ElementsAre("^20% done|"));
}

TEST(LineSplitter, WindowsLines) {
  LineSplitter lines;
  EXPECT_THAT(shown(lines.feed("a\r\nb\r\n")), ElementsAre("a|", "b|"));
  // Cut between the two: a bar that then becomes a line.
  EXPECT_THAT(shown(lines.feed("c\r")), ElementsAre("c<"));
  EXPECT_THAT(shown(lines.feed("\nd\n")), ElementsAre("^|", "d|"));
}

TEST(LineSplitter, ABarIsLeftBehindAtTheEnd) {
  LineSplitter lines;
  lines.feed("100%\r");
  EXPECT_THAT(shown(lines.finish()), ElementsAre("^|"));
}

TEST(LineSplitter, LongLinesAreCutAndNothingIsLost) {
  LineSplitter lines;
  const std::string text(3 * LineSplitter::kMaxLine + 10, 'x');
  std::vector<Piece> pieces;
  for (std::size_t at = 0; at < text.size(); at += 1000)
    for (Piece& piece : lines.feed(text.substr(at, 1000))) pieces.push_back(piece);
  for (Piece& piece : lines.feed("\nshort\n")) pieces.push_back(piece);
  ASSERT_EQ(pieces.size(), 5u);
  std::string joined;
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(pieces[i].continues, i > 0);
    EXPECT_EQ(pieces[i].end, i < 3 ? PieceEnd::kCut : PieceEnd::kNewline);
    joined += pieces[i].text;
  }
  EXPECT_EQ(joined, text);
  EXPECT_FALSE(pieces[4].continues);
}

TEST(LineSplitter, ACutSparesCharacters) {
  LineSplitter lines;
  std::string text(LineSplitter::kMaxLine - 1, 'x');
  text += "\xe2\x82\xac";  // the euro sign would be cut after its first byte
  const std::vector<Piece> pieces = lines.feed(text + "\n");
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].text.size(), LineSplitter::kMaxLine - 1);
  EXPECT_EQ(pieces[1].text, "\xe2\x82\xac");
}

TEST(LineSplitter, BytesThatAreNoTextPass) {
  LineSplitter lines;
  const std::string bytes("a\0\xff\x80z", 5);
  EXPECT_EQ(lines.feed(bytes + "\n")[0].text, bytes);
  // No character begins anywhere here, and still it is cut.
  EXPECT_EQ(lines.feed(std::string(LineSplitter::kMaxLine + 5, '\x80')).size(), 1u);
}

}  // namespace
}  // namespace lockstep::launcher
