#include "lockstep/job/arguments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::job {
namespace {

using namespace std::string_literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(Arguments, SkipsTheProgramName) {
  EXPECT_THAT(comparable_arguments("./train\0--lr\0000.1\0\0data\0"s), ElementsAre("--lr", "0.1", "", "data"));
  EXPECT_THAT(comparable_arguments("./train\0"s), IsEmpty());
  EXPECT_THAT(comparable_arguments(""), IsEmpty());
}

TEST(Arguments, IgnoresRankArguments) {
  EXPECT_THAT(comparable_arguments("t\0--local_rank=3\0--rank\0002\0--lr\0001\0--node-rank\0"s),
              ElementsAre("--lr", "1"));
}

TEST(Arguments, AreBoundedAndOnOneLine) {
  std::string cmdline = "t\0a\tb\nc\0"s + std::string(1000, 'x') + '\0';
  for (int i = 0; i < 100; ++i) cmdline += "w\0"s;
  const auto words = comparable_arguments(cmdline);
  ASSERT_EQ(words.size(), 64u);
  EXPECT_EQ(words[0], "a b c");
  EXPECT_EQ(words[1], std::string(100, 'x'));
}

TEST(Arguments, ShowsTheFirstDifferenceOfBothSides) {
  EXPECT_EQ(argument_difference({"a", "b"}, {"a", "b"}), "");
  EXPECT_EQ(argument_difference({}, {}), "");
  EXPECT_EQ(argument_difference({"--lr", "0.2", "d", "e"}, {"--lr", "0.1", "d", "e"}),
            "\"--lr\" \"0.2\" \"d\" instead of \"--lr\" \"0.1\" \"d\"");
  EXPECT_EQ(argument_difference({"a"}, {"a", "--bf16"}), "\"a\" instead of \"a\" \"--bf16\"");
  EXPECT_EQ(argument_difference({"--bf16"}, {}), "\"--bf16\" instead of none");
}

TEST(Arguments, OfThisProcessMatchMain) {
  const std::vector<std::string> all = ::testing::internal::GetArgvs();
  const std::vector<std::string> own = process_arguments();
  ASSERT_EQ(own.size(), all.size() - 1);
  for (std::size_t i = 0; i < own.size(); ++i) EXPECT_EQ(own[i], all[i + 1].substr(0, 100));
}

}  // namespace
}  // namespace lockstep::job
