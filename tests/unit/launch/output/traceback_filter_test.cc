#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "lockstep/launch/output/console_renderer.h"

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
  const std::vector<std::string> value_error = {"Traceback (most recent call last):", "  File \"a.py\", line 1",
                                                "    x()", "ValueError: x"};
  const std::string value_error_text =
      "Traceback (most recent call last):\n  File \"a.py\", line 1\n    x()\nValueError: x\n";
  const std::vector<std::string> link = {"", "During handling of the above exception, another exception occurred:", ""};
  const auto chain = [&](const auto& first, const auto& second) {
    std::vector<std::string> lines = first;
    lines.insert(lines.end(), link.begin(), link.end());
    lines.insert(lines.end(), second.begin(), second.end());
    return lines;
  };
  EXPECT_EQ(filtered(value_error), value_error_text);
  EXPECT_EQ(filtered(chain(value_error, kInterrupt)), "");
  EXPECT_THAT(filtered(chain(kInterrupt, value_error)), ::testing::EndsWith(value_error_text)) << "an error of its own";
  EXPECT_THAT(filtered(chain(kInterrupt, value_error)), ::testing::StartsWith("Traceback")) << "with what led to it";
  std::vector<std::string> lines = value_error;
  lines.insert(lines.end(), {"", "after"});
  EXPECT_EQ(filtered(lines), value_error_text + "\nafter\n");
  lines = kInterrupt;
  lines.insert(lines.end(), value_error.begin(), value_error.end());
  EXPECT_EQ(filtered(lines), value_error_text) << "two tracebacks without a link";
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
