#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/job/join.h"

namespace lockstep::job {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(Arguments, SkipsTheProgramName) {
  EXPECT_THAT(comparable_arguments({"./train", "--lr", "0.1", "", "data"}), ElementsAre("--lr", "0.1", "", "data"));
  EXPECT_THAT(comparable_arguments({"./train"}), IsEmpty());
  EXPECT_THAT(comparable_arguments({}), IsEmpty());
}

TEST(Arguments, IgnoresRankArguments) {
  EXPECT_THAT(comparable_arguments({"t", "--local_rank=3", "--rank", "2", "--lr", "1", "--node-rank"}),
              ElementsAre("--lr", "1"));
}

TEST(Arguments, AreBoundedAndOnOneLine) {
  std::vector<std::string> command_line = {"t", "a\tb\nc", std::string(1000, 'x')};
  command_line.resize(100, "w");
  const auto words = comparable_arguments(command_line);
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
  EXPECT_EQ(own_arguments(), all);
  const std::vector<std::string> own = comparable_arguments(own_arguments());
  ASSERT_EQ(own.size(), all.size() - 1);
  for (std::size_t i = 0; i < own.size(); ++i) EXPECT_EQ(own[i], all[i + 1].substr(0, 100));
}

}  // namespace
}  // namespace lockstep::job
