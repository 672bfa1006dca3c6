#include "lockstep/launch/supervise/agent_verdict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cerrno>

#include "tests/support/temp_dir.h"

namespace lockstep::launcher::supervise {
namespace {

using ::testing::HasSubstr;

TEST(AgentVerdict, StepOfAFailedStartDecides) {
  const Verdict exec = judge_start_failure(process::StartStep::kExec, ENOEXEC, 2, "beta", "./train");
  EXPECT_EQ(exec.fatal.cause, base::Cause::kBadArg);
  EXPECT_EQ(exec.fatal.detail, "program \"./train\": cannot be executed: Exec format error");
  EXPECT_THAT(exec.fatal.hint, HasSubstr("#!/bin/sh"));
  const Verdict fork = judge_start_failure(process::StartStep::kFork, EAGAIN, 2, "beta", "./train");
  EXPECT_EQ(fork.fatal.cause, base::Cause::kResource);
  EXPECT_EQ(fork.fatal.rank, 2);
  EXPECT_EQ(fork.fatal.host, "beta");
  EXPECT_EQ(fork.fatal.detail, "cannot start rank 2: Resource temporarily unavailable");
  EXPECT_THAT(judge_start_failure(process::StartStep::kBind, EINVAL, 2, "beta", "./train").fatal.hint,
              HasSubstr("--bind none"));
}

TEST(AgentVerdict, UnknownStartStepIsAnError) {
  EXPECT_EQ(to_start_step(2), process::StartStep::kExec);
  for (const std::int64_t number : {-1, 3})
    EXPECT_EQ(tests::thrown<base::Error>([&] { to_start_step(number); }).cause(), base::Cause::kProtocol);
}

TEST(AgentVerdict, LostAgentIsDistinguishedFromLostConnection) {
  const Verdict local =
      judge_lost_agent({.host = "alpha", .via = "", .end = {.pid = 7, .signal = SIGKILL}, .text = ""});
  EXPECT_EQ(local.fatal.cause, base::Cause::kInternal);
  EXPECT_THAT(local.fatal.detail, HasSubstr("was killed by SIGKILL"));
  const auto remote = [](protocol::RankExit end) {
    return judge_lost_agent({.host = "beta", .is_local = false, .via = "ssh", .end = end, .text = "broken pipe"}).fatal;
  };
  EXPECT_EQ(remote({.code = 255}).cause, base::Cause::kPeerUnreachable);
  EXPECT_THAT(remote({.code = 255}).detail, HasSubstr("host beta ended: ssh exited with code 255: \"broken pipe\""));
  EXPECT_EQ(remote({.code = 137}).cause, base::Cause::kInternal);  // the guard reports its agent's signal
  EXPECT_THAT(remote({.code = 137}).detail, HasSubstr("was killed by SIGKILL"));
}

TEST(AgentVerdict, UserStopHasTheExitCodeOfItsSignal) {
  EXPECT_EQ(judge_user_stop(SIGINT).exit_code, 130);
  EXPECT_EQ(judge_user_stop(SIGTERM).exit_code, 143);
  EXPECT_EQ(judge_user_stop(SIGTERM).fatal.detail, "stopped by SIGTERM");
  EXPECT_EQ(judge_user_stop(SIGTERM, "another").fatal.host, "another");
  EXPECT_EQ(judge_user_stop(SIGTERM, "another").fatal.pid, -1) << "that of a process on another host";
}

TEST(AgentVerdict, PreemptionReplacesTheDetailOfTheOperation) {
  base::telemetry::RankSnapshot snapshot;
  snapshot.rank = 1;
  snapshot.steps = 12;
  const Verdict verdict = judge_preemption({.rank = 1, .pid = 40, .code = 75}, "beta", {snapshot});
  EXPECT_EQ(verdict.fatal.step, 12);
  EXPECT_EQ(verdict.fatal.op, "");
  EXPECT_THAT(verdict.fatal.detail, HasSubstr("all ranks exited together"));
}

}  // namespace
}  // namespace lockstep::launcher::supervise
