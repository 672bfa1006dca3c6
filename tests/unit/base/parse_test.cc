#include "lockstep/base/parse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::base {
namespace {

using ::testing::ElementsAre;
using tests::message_of;

TEST(Parse, AcceptsWholeIntegersOnly) {
  EXPECT_EQ(parse_int("0"), 0);
  EXPECT_EQ(parse_int("-17"), -17);
  EXPECT_EQ(parse_int("007"), 7);
  EXPECT_EQ(parse_int("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(parse_int("-9223372036854775808"), INT64_MIN);
  for (const char* const text : {"", " 1", "1 ", "+1", "1.0", "0x10", "12a", "--1", "-", "9223372036854775808", "1e3"})
    EXPECT_EQ(parse_int(text), std::nullopt) << text;
  EXPECT_EQ(parse_int(std::string_view("1\0", 2)), std::nullopt);
}

TEST(Parse, AcceptsFiniteDoublesOnly) {
  EXPECT_EQ(parse_double("2.5"), 2.5);
  EXPECT_EQ(parse_double("-1e-3"), -1e-3);
  for (const char* const text : {"", "inf", "-inf", "nan", "1e999", "1,5", "1.5 ", "0x1p3"})
    EXPECT_EQ(parse_double(text), std::nullopt) << text;
}

TEST(Parse, TextOfAlternativesAndTimes) {
  EXPECT_EQ(alternatives({"a"}), "a");
  EXPECT_EQ(alternatives({"a", "b", "c"}), "a, b or c");
  using std::chrono::milliseconds;
  EXPECT_EQ(seconds_text(milliseconds(0)) + ", " + seconds_text(milliseconds(250)) + ", " +
                seconds_text(milliseconds(3600000)),
            "0 s, 0.25 s, 3600 s");
}

TEST(Parse, RangeErrorNamesBounds) {
  EXPECT_EQ(parse_int_in_range("-n", "1", 1, 4), 1);
  EXPECT_EQ(parse_int_in_range("-n", "4", 1, 4), 4);
  for (const char* const text : {"0", "5", "x", ""})
    EXPECT_EQ(message_of<UsageError>([&] { parse_int_in_range("-n", text, 1, 4); }),
              "-n is \"" + std::string(text) + "\"; expected an integer from 1 to 4");
}

TEST(Parse, HexadecimalDigits) {
  using namespace std::string_literals;
  const std::string bytes = "\0\x1f\xa0\xff"s;
  EXPECT_EQ(to_hex(bytes), "001fa0ff");
  EXPECT_EQ(from_hex("001fa0ff"), bytes);
  EXPECT_EQ(to_hex(""), "");
  EXPECT_EQ(from_hex(""), "");
  for (const char* const text : {"0", "0g", "0A", " 0", "0x00", "00 "}) EXPECT_EQ(from_hex(text), std::nullopt) << text;
}

TEST(Parse, SplitsAtSeparators) {
  EXPECT_THAT(split("a,b", ','), ElementsAre("a", "b"));
  EXPECT_THAT(split("", ','), ElementsAre(""));
  EXPECT_THAT(split(",", ','), ElementsAre("", ""));
  EXPECT_THAT(split("a,,b,", ','), ElementsAre("a", "", "b", ""));
}

TEST(Parse, QuotedIsPrintableAndOnOneLine) {
  EXPECT_EQ(quoted("a b"), "\"a b\"");
  EXPECT_EQ(quoted("\"\\\n\t\r\x7f"), "\"\\\"\\\\\\n\\x09\\x0d\\x7f\"");
  EXPECT_EQ(quoted(std::string_view("\0", 1)), "\"\\x00\"");
  EXPECT_EQ(quoted("abcdef", 3), "\"abc\"");
  EXPECT_EQ(quoted("abc", 3), "\"abc\"");
  EXPECT_EQ(quoted("aé", 3), "\"aé\"");  // é is two bytes
  EXPECT_EQ(quoted("aé", 2), "\"a\"");   // a character is not split
  EXPECT_EQ(quoted("\x80\x80\x80", 2), "\"\"");
  EXPECT_EQ(quoted("a\xffz"), "\"a\\xffz\"");
  EXPECT_EQ(quoted("\xc2\x9b"
                   "31m\xc2\xa0é"),
            "\"\\xc2\\x9b31m\xc2\xa0é\"");  // U+009B begins a sequence as ESC [ does
  EXPECT_EQ(escaped("a \"b\" \x1b[2J\\"), "a \"b\" \\x1b[2J\\\\");
  EXPECT_EQ(escaped("aé", 2), "a");
}

}  // namespace
}  // namespace lockstep::base
