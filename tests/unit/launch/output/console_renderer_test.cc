#include "lockstep/launch/output/console_renderer.h"

#include <gtest/gtest.h>

namespace lockstep::launcher {
namespace {

const std::string kErase = "\r\x1b[K";

Piece piece(const std::string& text, PieceEnd end = PieceEnd::kNewline, bool over_bar = false) {
  return {text, end, false, over_bar};
}

TEST(Screen, LinesHaveThePrefix) {
  Screen screen(false);
  EXPECT_EQ(screen.show("[0] ", 0, piece("a")), "[0] a\n");
  EXPECT_EQ(screen.show("[12] ", 24, piece("")), "[12] \n");
}

TEST(Screen, TheRestOfACutLineIsMarked) {
  Screen screen(false);
  EXPECT_EQ(screen.show("[3] ", 6, {"head", PieceEnd::kCut, false, false}), "[3] head\n");
  EXPECT_EQ(screen.show("[3] ", 6, {"rest", PieceEnd::kNewline, true, false}), "[3]+rest\n");
}

TEST(Screen, WithoutATerminalReturnsAreKept) {
  Screen screen(false);
  EXPECT_EQ(screen.show("[0] ", 0, piece("10%", PieceEnd::kReturn)), "[0] 10%\r");
  EXPECT_EQ(screen.show("[0] ", 0, piece("20%", PieceEnd::kOpen, true)), "");
  EXPECT_EQ(screen.show("[0] ", 0, piece("", PieceEnd::kNewline, true)), "\n");
  EXPECT_EQ(screen.leave(), "");
}

TEST(Screen, OnATerminalTheBarStaysBelowOtherLines) {
  Screen screen(true);
  EXPECT_EQ(screen.show("[0] ", 0, piece("10%", PieceEnd::kReturn)), kErase + "[0] 10%");
  EXPECT_EQ(screen.show("[1] ", 2, piece("hello")), kErase + "[1] hello\n[0] 10%");
  EXPECT_EQ(screen.show("lockstep: note\n"), kErase + "lockstep: note\n[0] 10%");
  EXPECT_EQ(screen.show("[0] ", 0, piece("20%", PieceEnd::kOpen, true)), kErase + "[0] 20%");
  EXPECT_EQ(screen.show("[0] ", 0, piece("done", PieceEnd::kNewline, true)), kErase + "[0] done\n");
  EXPECT_EQ(screen.show("[1] ", 2, piece("bye")), "[1] bye\n");
}

TEST(Screen, ABarThatOnlyGetsANewlineBecomesALine) {
  Screen screen(true);
  screen.show("[0] ", 0, piece("100%", PieceEnd::kReturn));
  EXPECT_EQ(screen.show("[0] ", 0, piece("", PieceEnd::kNewline, true)), kErase + "[0] 100%\n");
  EXPECT_EQ(screen.leave(), "");
}

TEST(Screen, TheNewestBarWins) {
  Screen screen(true);
  screen.show("[0] ", 0, piece("zero", PieceEnd::kReturn));
  EXPECT_EQ(screen.show("[1] ", 2, piece("one", PieceEnd::kReturn)), kErase + "[1] one");
  // The newline of a bar that no longer shows is nothing to see.
  EXPECT_EQ(screen.show("[0] ", 0, piece("", PieceEnd::kNewline, true)), "");
  EXPECT_EQ(screen.show("[0] ", 0, piece("text", PieceEnd::kNewline, true)), kErase + "[0] text\n[1] one");
  EXPECT_EQ(screen.leave(), "\n");
  EXPECT_EQ(screen.leave(), "");
}

TEST(Screen, ABarHasRoomInARow) {
  Screen screen(true);
  screen.resize(10);
  EXPECT_EQ(screen.show("[0] ", 0, piece("\u2501\u2501\u2501 123", PieceEnd::kReturn)),
            kErase + "[0] \u2501\u2501\u2501 1");
  screen.resize(7);
  EXPECT_EQ(screen.show("[1] ", 2, piece("a long line is not cut")),
            kErase + "[1] a long line is not cut\n[0] \u2501\u2501");
  screen.resize(80);
  EXPECT_EQ(screen.show("[0] ", 0, piece("", PieceEnd::kNewline, true)), kErase + "[0] \u2501\u2501\u2501 123\n");
}

TEST(Screen, ColoursTakeNoRoom) {
  EXPECT_EQ(cut_to_row("\x1b[1;32mgreen\x1b[0m", 6), "\x1b[1;32mgreen\x1b[0m");
  EXPECT_EQ(cut_to_row("\x1b[1;32mgreen\x1b[0m", 4), "\x1b[1;32mgre\x1b[0m");
  EXPECT_EQ(cut_to_row("ab\x1b[", 3), "ab\x1b[");
  EXPECT_EQ(cut_to_row("abc", 1), "");
}

}  // namespace
}  // namespace lockstep::launcher
