#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/launch/cli/option_table.h"
#include "lockstep/launch/plan/job_plan.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::plan {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using tests::message_of;

std::string error_of(const std::string& variable) {
  return message_of<base::UsageError>([&] { check_variables({"PATH=/bin", variable}); });
}

TEST(CheckVariables, AcceptsValidValues) {
  EXPECT_THAT(check_variables({"LOCKSTEP_TRANSPORT=shm", "LOCKSTEP_DEVICE=cuda:1", "LOCKSTEP_TIMEOUT=0",
                               "LOCKSTEP_JOIN_TIMEOUT=0.5", "LOCKSTEP_HOST_TIMEOUT=20",
                               "LOCKSTEP_ARENA=", "LOCKSTEP_INJECT=kill@rank=1,step=2", "LOCKSTEP_LOG=quiet",
                               "LOCKSTEP_TEST_ANYTHING=1", "LOCKSTEP_NAME=any thing", "OTHER=x"}),
              ElementsAre());
}

TEST(CheckVariables, RefusesWhatARankWouldRefuse) {
  EXPECT_EQ(error_of("LOCKSTEP_TRANSPORT=tcpp"),
            "LOCKSTEP_TRANSPORT is \"tcpp\"; expected auto, self, shm, hierarchy, tcp, mpi or nccl");
  EXPECT_EQ(error_of("LOCKSTEP_ARENA=yes"), "LOCKSTEP_ARENA is \"yes\"; expected on or off");
  EXPECT_THAT(error_of("LOCKSTEP_DEVICE=cuda:x"), HasSubstr("expected auto, cpu, cuda or cuda:N"));
  for (const char* value : {"-1", "5s", "1e9", "nan"})
    EXPECT_THAT(error_of("LOCKSTEP_TIMEOUT=" + std::string(value)), HasSubstr("expected seconds, from 0")) << value;
  EXPECT_THAT(error_of("LOCKSTEP_JOIN_TIMEOUT=0"), HasSubstr("expected seconds, more than 0"));
  EXPECT_THAT(error_of("LOCKSTEP_HOST_TIMEOUT=0"), HasSubstr("LOCKSTEP_HOST_TIMEOUT"));
  EXPECT_THAT(error_of("LOCKSTEP_INJECT=burn@rank=1"), HasSubstr("LOCKSTEP_INJECT"));
  EXPECT_THAT(error_of("LOCKSTEP_TRACE=true"), HasSubstr("expected 0 or 1"));
}

TEST(CheckVariables, WarnsAboutVariablesThatDoNotExist) {
  EXPECT_THAT(check_variables({"LOCKSTEP_TRANSPROT=shm", "LOCKSTEP_XYZZY=1"}),
              ElementsAre("the variable \"LOCKSTEP_TRANSPROT\" does not exist; did you mean LOCKSTEP_TRANSPORT?",
                          "the variable \"LOCKSTEP_XYZZY\" does not exist"));
}

TEST(Suggestion, IsTheMostSimilarName) {
  const std::vector<std::string> known = {"--ranks", "--restart-pause", "--name"};
  EXPECT_EQ(cli::suggestion("--rank", known), "; did you mean --ranks?");
  EXPECT_EQ(cli::suggestion("--nmae", known), "; did you mean --name?");
  EXPECT_EQ(cli::suggestion("rnu", {"run", "submit"}), "; did you mean run?") << "a swap is one change";
  EXPECT_EQ(cli::suggestion("--something-else", known), "");
  EXPECT_EQ(cli::suggestion("", known), "");
  EXPECT_EQ(cli::suggestion(std::string(1000, 'x'), known), "");
}

}  // namespace
}  // namespace lockstep::launcher::plan
