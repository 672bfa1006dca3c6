#include "lockstep/launch/slurm/follow_job.h"

#include <gtest/gtest.h>

namespace lockstep::launcher {
namespace {

TEST(Follow, ReadsWhatScontrolSays) {
  const JobState waits = state_in_scontrol(
      "JobId=7 JobName=train UserId=ada(1000) JobState=PENDING Reason=Resources Dependency=(null) ExitCode=0:0 "
      "RunTime=00:00:00\n");
  EXPECT_EQ(waits.state, "PENDING");
  EXPECT_EQ(waits.reason, "Resources");
  EXPECT_FALSE(has_ended(waits));
  const JobState failed =
      state_in_scontrol("JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=7:0 DerivedExitCode=0:0");
  EXPECT_TRUE(has_ended(failed));
  EXPECT_EQ(exit_code_of(failed), 7);
  EXPECT_EQ(state_in_scontrol("").state, "");
}

TEST(Follow, ReadsWhatSacctSays) {
  const JobState cancelled = state_in_sacct("CANCELLED by 1000|0:15\n");
  EXPECT_EQ(cancelled.state, "CANCELLED");
  EXPECT_EQ(exit_code_of(cancelled), 143);
  EXPECT_EQ(exit_code_of(state_in_sacct("COMPLETED|0:0\n")), 0);
  EXPECT_EQ(state_in_sacct("").state, "");
}

TEST(Follow, OnlyACompletedJobIsAZero) {
  EXPECT_EQ(exit_code_of({"COMPLETED", "", 0}), 0);
  EXPECT_EQ(exit_code_of({"CANCELLED", "", 0}), 1);
  EXPECT_EQ(exit_code_of({"TIMEOUT", "", 0}), 1);
}

TEST(Follow, AJobOnItsWayHasNotEnded) {
  for (const char* state : {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STOPPED", ""})
    EXPECT_FALSE(has_ended({state, "", 0})) << state;
  for (const char* state : {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY",
                            "BOOT_FAIL", "DEADLINE"})
    EXPECT_TRUE(has_ended({state, "", 0})) << state;
}

}  // namespace
}  // namespace lockstep::launcher
