#include <gtest/gtest.h>

#include "lockstep/launch/slurm/submit.h"

namespace lockstep::launcher::slurm {
namespace {

TEST(FollowJob, ParsesScontrolOutput) {
  const SlurmJobState pending = parse_scontrol(
      "JobId=7 JobName=train UserId=ada(1000) JobState=PENDING Reason=Resources Dependency=(null) ExitCode=0:0 "
      "RunTime=00:00:00\n");
  EXPECT_EQ(pending.state, "PENDING");
  EXPECT_EQ(pending.reason, "Resources");
  EXPECT_FALSE(has_ended(pending));
  const SlurmJobState failed =
      parse_scontrol("JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=7:0 DerivedExitCode=0:0");
  EXPECT_TRUE(has_ended(failed));
  EXPECT_EQ(exit_code_for(failed), 7);
  EXPECT_EQ(parse_scontrol("").state, "");
}

TEST(FollowJob, ParsesSacctOutput) {
  const SlurmJobState cancelled = parse_sacct("CANCELLED by 1000|0:15\n");
  EXPECT_EQ(cancelled.state, "CANCELLED");
  EXPECT_EQ(exit_code_for(cancelled), 143);
  EXPECT_EQ(exit_code_for(parse_sacct("COMPLETED|0:0\n")), 0);
  EXPECT_EQ(parse_sacct("").state, "");
}

TEST(FollowJob, OnlyCompletedJobsExitWithZero) {
  EXPECT_EQ(exit_code_for({"COMPLETED", "", 0}), 0);
  EXPECT_EQ(exit_code_for({"CANCELLED", "", 0}), 1);
  EXPECT_EQ(exit_code_for({"TIMEOUT", "", 0}), 1);
}

TEST(FollowJob, UnfinishedStatesAreNotFinal) {
  for (const char* state : {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STOPPED", ""})
    EXPECT_FALSE(has_ended({state, "", 0})) << state;
  for (const char* state : {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY",
                            "BOOT_FAIL", "DEADLINE"})
    EXPECT_TRUE(has_ended({state, "", 0})) << state;
}

}  // namespace
}  // namespace lockstep::launcher::slurm
