// Tests that ranks which are asked to stop leave in the same step, that injected faults are reported, and that slow
// ranks cause only a warning.
#include <gmock/gmock.h>
#include <signal.h>

#include <cstdlib>
#include <set>

#include "lockstep/base/parse.h"
#include "tests/support/lockstep_run.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

SpawnOptions train_probe_job(const Words& words, const Words& options = {"-n", "3", "--bind", "none"}) {
  SpawnOptions spawn = lockstep_run(options);
  spawn.argv.insert(spawn.argv.end(), {"--", LOCKSTEP_TRAIN_PROBE_PATH});
  spawn.argv.insert(spawn.argv.end(), words.begin(), words.end());
  return spawn;
}

/// Returns the distinct lines from "left after " on, and their number in `count`.
std::set<std::string> departure_messages(const std::string& out, int& count) {
  std::set<std::string> all;
  count = 0;
  for (const std::string& line : base::split(out, '\n')) {
    const std::size_t at = line.find("left after ");
    if (at == std::string::npos) continue;
    all.insert(line.substr(at));
    ++count;
  }
  return all;
}

void expect_all_left_in_same_step(const ProcessResult& exit) {
  EXPECT_EQ(exit.code, 75) << exit.err;
  EXPECT_EQ(fatal_in(exit.err).cause, base::Cause::kPreempted);
  int count = 0;
  EXPECT_EQ(departure_messages(exit.out, count).size(), 1u) << exit.out;
  EXPECT_EQ(count, 3);
}

TEST(StopRequest, SignalToOneRankStopsAllInSameStep) {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    Process process(train_probe_job({"until_stop"}));
    for (const char* rank : {"rank 0 pid ", "rank 1 pid ", "rank 2 pid "})
      ASSERT_TRUE(process.wait_for(rank, Deadline::in(20s)));
    const std::size_t at = process.out().find("rank 1 pid ");
    ::kill(std::atoi(process.out().c_str() + at + 11), signal);
    expect_all_left_in_same_step(process.wait(Deadline::in(20s)));
  }
}

TEST(StopRequest, EveryTransport) {
  for (const Words& how : {Words{"tcp"}, Words{"hierarchy", LOCKSTEP_FAKE_HOSTS, "0 0 1"}}) {
    SpawnOptions spawn = lockstep_run({"-n", "3", "--bind", "none", "--transport", how[0], "--"});
    spawn.argv.insert(spawn.argv.end(), how.begin() + 1, how.end());
    spawn.argv.insert(spawn.argv.end(), {LOCKSTEP_TRAIN_PROBE_PATH, "until_stop"});
    Process process(spawn);
    for (const char* rank : {"rank 0 pid ", "rank 1 pid ", "rank 2 pid "})
      ASSERT_TRUE(process.wait_for(rank, Deadline::in(20s)));
    const std::size_t at = process.out().find("rank 2 pid ");
    ::kill(std::atoi(process.out().c_str() + at + 11), SIGUSR1);
    expect_all_left_in_same_step(process.wait(Deadline::in(20s)));
  }
}

TEST(StopRequest, SignalToJoinedRankStopsAll) {
  Process process(train_probe_job({"join"}));
  ASSERT_TRUE(process.wait_for("rank 1 joins as pid ", Deadline::in(20s)));
  ASSERT_TRUE(process.wait_for("rank 0 continues alone\n", Deadline::in(20s)));
  const std::size_t at = process.out().find("rank 1 joins as pid ");
  ::kill(std::atoi(process.out().c_str() + at + 20), SIGUSR1);
  expect_all_left_in_same_step(process.wait(Deadline::in(20s)));
}

TEST(StopRequest, SignalToLauncherStopsAllInSameStep) {
  Process process(train_probe_job({"until_stop"}));
  for (const char* rank : {"rank 0 pid ", "rank 1 pid ", "rank 2 pid "})
    ASSERT_TRUE(process.wait_for(rank, Deadline::in(20s)));
  ::kill(process.pid(), SIGTERM);
  expect_all_left_in_same_step(process.wait(Deadline::in(20s)));
}

TEST(StopRequest, CtrlCStopsAllInSameStep) {
  Process process(train_probe_job({"until_stop"}));
  for (const char* rank : {"rank 0 pid ", "rank 1 pid ", "rank 2 pid "})
    ASSERT_TRUE(process.wait_for(rank, Deadline::in(20s)));
  ::kill(process.pid(), SIGINT);
  const ProcessResult exit = process.wait(Deadline::in(20s));
  EXPECT_EQ(exit.code, 130);
  EXPECT_EQ(fatal_in(exit.err).cause, base::Cause::kInterrupted);
  int count = 0;
  EXPECT_EQ(departure_messages(exit.out, count).size(), 1u) << exit.out;
  EXPECT_EQ(count, 3);
}

TEST(StopRequest, ShellAndHelperOfARankOutliveTheSignal) {
  for (const char* ranks : {"1", "2", "3"}) {
    Process process(lockstep_run({"-n", ranks, "--bind", "none", "sh", "-c",
                                  "sleep 300 & \"$@\"; code=$?; kill -0 $! && echo the helper lives; exit $code", "sh",
                                  LOCKSTEP_TRAIN_PROBE_PATH, "until_stop"}));
    for (int rank = 0; rank < std::atoi(ranks); ++rank)
      ASSERT_TRUE(process.wait_for("rank " + std::to_string(rank) + " pid ", Deadline::in(20s)));
    ::kill(process.pid(), SIGTERM);
    const ProcessResult exit = process.wait(Deadline::in(20s));
    EXPECT_EQ(exit.code, 75) << exit.err;
    for (int rank = 0; rank < std::atoi(ranks); ++rank)
      EXPECT_THAT(exit.out, HasSubstr("[" + std::to_string(rank) + "] the helper lives"));
  }
}

TEST(StopRequest, ExitCode75WithoutLeavingIsAFailure) {
  const ProcessResult exit = run_process(shell_ranks(2, "[ $RANK = 1 ] && exit 75; sleep 100"));
  EXPECT_EQ(exit.code, 75);
  EXPECT_EQ(fatal_in(exit.err).cause, base::Cause::kRankExited);
}

struct InjectionCase {
  const char* fault;
  int code;
  base::Cause cause;
  const char* detail;
  friend void PrintTo(const InjectionCase& one, std::ostream* out) { *out << one.fault; }
};

class FaultInjection : public ::testing::TestWithParam<InjectionCase> {};

TEST_P(FaultInjection, EndsJobWithExpectedCause) {
  const InjectionCase& injection = GetParam();
  SpawnOptions spawn =
      train_probe_job({"checked"}, {"-n", "3", "--bind", "none", "--work-timeout", "5", "--stall-timeout", "3",
                                    "--inject", std::string(injection.fault) + "@rank=1,step=12"});
  const TempDir folder;
  spawn.argv.insert(spawn.argv.begin(), {"sh", "-c", "ulimit -c 0; cd " + folder.path() + " && exec \"$@\"", "sh"});
  const ProcessResult exit = run_process(spawn);
  EXPECT_EQ(exit.code, injection.code) << exit.err;
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(name(fatal.cause), name(injection.cause));
  EXPECT_EQ(fatal.rank, 1);
  EXPECT_THAT(fatal.detail, HasSubstr(injection.detail));
  EXPECT_GE(fatal.step, 11);
  EXPECT_LE(fatal.step, 30);
}

INSTANTIATE_TEST_SUITE_P(
    All, FaultInjection,
    ::testing::Values(InjectionCase{"kill", 137, base::Cause::kRankDied, "killed by SIGKILL"},
                      InjectionCase{"segv", 139, base::Cause::kRankDied, "killed by SIGSEGV"},
                      InjectionCase{"stop", 124, base::Cause::kRankStalled, "stopped by a signal"},
                      InjectionCase{"loop", 124, base::Cause::kRankStuck, "is in user code"},
                      InjectionCase{"throw", 1, base::Cause::kRankExited, "the injected exception"},
                      InjectionCase{"desync", 70, base::Cause::kDesync, "rank 1 has drawn 1 batch"},
                      InjectionCase{"corrupt", 70, base::Cause::kNonFinite, "on rank 1 has values that are not finite"},
                      InjectionCase{"flip", 70, base::Cause::kReplicaDiverged, "differs between ranks"}),
    [](const auto& one) { return std::string(one.param.fault); });

TEST(FaultInjection, SlowRankIsReportedWithoutEndingJob) {
  const ProcessResult exit =
      run_process(train_probe_job({"checked"}, {"-n", "3", "--bind", "none", "--inject", "slow@rank=2,step=130"}));
  EXPECT_EQ(exit.code, 0);
  EXPECT_THAT(exit.err, HasSubstr("WARN cause=STRAGGLER rank=2"));
}

TEST(FaultInjection, NonexistentRankIsRejected) {
  const ProcessResult exit =
      run_process(train_probe_job({"checked"}, {"-n", "3", "--bind", "none", "--inject", "kill@rank=3,step=5"}));
  EXPECT_EQ(exit.code, 64);
  EXPECT_THAT(fatal_in(exit.err).detail, HasSubstr("but this job has 3 ranks; expected a rank from 0 to 2"));
}

TEST(Straggler, IsReportedByRankWithoutEndingJob) {
  const ProcessResult exit = run_process(train_probe_job({"slow", "1"}));
  EXPECT_EQ(exit.code, 0);
  EXPECT_THAT(exit.err, HasSubstr("WARN cause=STRAGGLER rank=1"));
  EXPECT_EQ(exit.err.find("STRAGGLER"), exit.err.rfind("STRAGGLER"));
}

TEST(Straggler, EqualRanksAreNotReported) {
  const ProcessResult exit = run_process(train_probe_job({"slow"}));
  EXPECT_EQ(exit.code, 0);
  EXPECT_THAT(exit.err, Not(HasSubstr("STRAGGLER")));
}

}  // namespace
}  // namespace lockstep::tests
