#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "lockstep/launch/doctor/diagnosis.h"

namespace lockstep::launcher::doctor {
namespace {

const std::vector<Finding> kFindings = {
    {"alpha", "clock", Severity::kOk, "in sync", ""},
    {"beta", "/dev/shm", Severity::kBad, "4 KiB free of 32.0 GiB: it is full",
     "remove what is left of ended jobs, and then some more words so that it does not fit in a line"},
    {"beta", "libtorch", Severity::kUnknown, "not \"known\"\\", ""},
};

TEST(FindingsTable, OneLinePerFindingWithTheRemedyBelow) {
  EXPECT_EQ(to_table(kFindings),
            "alpha  clock     ok    in sync\n"
            "beta   /dev/shm  BAD   4 KiB free of 32.0 GiB: it is full\n"
            "                       -> remove what is left of ended jobs, and then some more\n"
            "                          words so that it does not fit in a line\n"
            "beta   libtorch  ?     not \"known\"\\\n"
            "1 bad, 0 warnings, 1 unknown, 1 ok\n");
  EXPECT_TRUE(has_bad(kFindings));
  EXPECT_FALSE(has_bad({kFindings[0], kFindings[2]}));
}

TEST(FindingsTable, OverlongWordsAreNotBroken) {
  const std::string path(100, 'x');
  EXPECT_EQ(to_table({{"a", "program", Severity::kOk, path + " and more", ""}}),
            "a     program  ok    " + path + "\n                     and more\n0 bad, 0 warnings, 0 unknown, 1 ok\n");
  EXPECT_EQ(to_table({}), "0 bad, 0 warnings, 0 unknown, 0 ok\n");
}

TEST(FindingsTable, ReportIsABlockOfMarkdown) {
  EXPECT_EQ(to_report({kFindings[0]}, "Debian", "FATAL cause=DESYNC"),
            "```\nDebian\nalpha  clock  ok    in sync\n0 bad, 0 warnings, 0 unknown, 1 ok\n"
            "last failed job: FATAL cause=DESYNC\n```\n");
  EXPECT_THAT(to_report({}, "Debian", std::nullopt), ::testing::HasSubstr("last failed job: none\n"));
}

TEST(FindingsTable, JsonIsOneObject) {
  const auto all = nlohmann::json::parse(to_json(kFindings));
  EXPECT_EQ(all["bad"], 1);
  EXPECT_EQ(all["warn"], 0);
  ASSERT_EQ(all["findings"].size(), 3u);
  EXPECT_EQ(all["findings"][1]["state"], "bad");
  EXPECT_EQ(all["findings"][2]["value"], "not \"known\"\\");
  EXPECT_NO_THROW(to_json({{"a", "b", Severity::kOk, "\xff", ""}}));
}

}  // namespace
}  // namespace lockstep::launcher::doctor
