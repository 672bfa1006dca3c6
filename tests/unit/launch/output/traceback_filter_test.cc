#include "lockstep/launch/output/traceback_filter.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace lockstep::launcher::output {
namespace {

/// Feeds lines one by one and returns the text that passes, with what is held back at the end.
std::string filtered(const std::vector<std::string>& lines) {
  TracebackFilter filter;
  std::string text;
  const auto append = [&](const std::vector<LineSegment>& segments) {
    for (const LineSegment& segment : segments) text += segment.text + "\n";
  };
  for (const std::string& line : lines) append(filter.filter({{.text = line}}));
  append(filter.finish());
  return text;
}

const std::vector<std::string> kInterrupt = {
    "Traceback (most recent call last):", "  File \"train.py\", line 3, in <module>", "    step()", "    ^^^^^^",
    "KeyboardInterrupt"};

TEST(TracebackFilter, LeavesOutInterrupts) {
  std::vector<std::string> lines = {"before"};
  lines.insert(lines.end(), kInterrupt.begin(), kInterrupt.end());
  lines.emplace_back("after");
  EXPECT_EQ(filtered(lines), "before\nafter\n");
  lines.insert(lines.end(), kInterrupt.begin(), kInterrupt.end());
  EXPECT_EQ(filtered(lines), "before\nafter\n") << "a second one";
}

TEST(TracebackFilter, LeavesOutAnInterruptDuringAnotherException) {
  std::vector<std::string> lines = {"Traceback (most recent call last):", "  File \"a.py\", line 1", "ValueError: x"};
  EXPECT_EQ(filtered(lines), "Traceback (most recent call last):\n  File \"a.py\", line 1\nValueError: x\n");
  lines = {"Traceback (most recent call last):",
           "  File \"a.py\", line 1",
           "    x()",
           "",
           "During handling of the above exception, another exception occurred:",
           "",
           "Traceback (most recent call last):",
           "  File \"a.py\", line 2",
           "KeyboardInterrupt: stop"};
  EXPECT_EQ(filtered(lines), "");
}

TEST(TracebackFilter, PassesOtherExceptionsAndUnfinishedTracebacks) {
  const std::string other =
      "Traceback (most recent call last):\n  File \"a.py\", line 1\nRuntimeError: KeyboardInterrupt\n";
  EXPECT_EQ(
      filtered({"Traceback (most recent call last):", "  File \"a.py\", line 1", "RuntimeError: KeyboardInterrupt"}),
      other);
  EXPECT_EQ(filtered({"Traceback (most recent call last):", "  File"}), "Traceback (most recent call last):\n  File\n");
  EXPECT_EQ(filtered({"KeyboardInterrupt"}), "KeyboardInterrupt\n");
}

}  // namespace
}  // namespace lockstep::launcher::output
