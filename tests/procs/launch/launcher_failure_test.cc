// Tests what the launcher reports and returns when a rank fails, and how soon.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>

#include "lockstep/base/net/socket.h"
#include "tests/support/lockstep_run.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(LauncherFailure, SuccessReturnsZero) {
  const ProcessResult exit = run_process(shell_ranks(3, "exit 0"));
  EXPECT_EQ(exit.code, 0);
  EXPECT_EQ(exit.out + exit.err, "");
}

TEST(LauncherFailure, ReturnsExitCodeOfFirstFailure) {
  const ProcessResult exit = run_process(shell_ranks(3, "[ $RANK = 1 ] && exit 7; sleep 100"));
  EXPECT_EQ(exit.code, 7);
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(fatal.cause, base::Cause::kRankExited);
  EXPECT_EQ(fatal.rank, 1);
  EXPECT_EQ(fatal.host, base::net::host_name());
  EXPECT_GT(fatal.pid, 1);
  EXPECT_EQ(fatal.detail, "exited with code 7");
  EXPECT_LT(exit.elapsed, 2s);
}

TEST(LauncherFailure, DeathBySignalIsReported) {
  for (const auto& [name, number] :
       std::map<std::string, int>{{"KILL", SIGKILL}, {"SEGV", SIGSEGV}, {"TERM", SIGTERM}, {"ABRT", SIGABRT}}) {
    const ProcessResult exit =
        run_process(shell_ranks(2, "ulimit -c 0; [ $RANK = 0 ] && kill -" + name + " $$; sleep 100"));
    EXPECT_EQ(exit.code, 128 + number);
    const job::Fatal fatal = fatal_in(exit.err);
    EXPECT_EQ(fatal.cause, base::Cause::kRankDied);
    EXPECT_EQ(fatal.rank, 0);
    EXPECT_EQ(fatal.detail, "killed by SIG" + name);
    EXPECT_LT(exit.elapsed, 5s);
  }
}

TEST(LauncherFailure, FatalNamesPidOfRank) {
  Process process(shell_ranks(2, "echo pid$RANK=$$; [ $RANK = 1 ] && exit 3; sleep 100"));
  const ProcessResult exit = process.wait(Deadline::in(30s));
  EXPECT_THAT(exit.out, HasSubstr("pid1=" + std::to_string(fatal_in(exit.err).pid) + "\n"));
}

TEST(LauncherFailure, DeathOutranksEarlierExit) {
  // Rank 0 exits, as if it had detected the death of rank 1. Rank 1 dies only after the agent has detected that exit.
  const TempDir folder;
  const ProcessResult exit = run_process(shell_ranks(
      2, "cd " + folder.path() +
             "; if [ $RANK = 0 ]; then echo $$ > new; mv new pid; sleep 0.2; exit 1; fi; while [ ! -e pid ]; do sleep "
             "0.01; done; read p < pid; while kill -0 $p; do :; done; kill -KILL $$"));
  EXPECT_EQ(exit.code, 137);
  EXPECT_EQ(fatal_in(exit.err).rank, 1);
}

TEST(LauncherFailure, PrintsLastTwentyStderrLinesAboveFatal) {
  const ProcessResult exit = run_process(shell_ranks(
      2, "[ $RANK = 1 ] || exec sleep 100; for i in $(seq 30); do echo line$i >&2; done; printf rest >&2; exit 5"));
  EXPECT_EQ(exit.code, 5);
  const std::size_t begin = exit.err.rfind("lockstep: the last lines that rank 1 wrote to stderr:\n");
  ASSERT_NE(begin, std::string::npos) << exit.err;
  const std::string tail = exit.err.substr(begin);
  EXPECT_THAT(tail, AllOf(HasSubstr("[1] line12\n[1] line13\n"), HasSubstr("[1] line30\n[1] rest\nFATAL ")));
  EXPECT_THAT(tail, Not(HasSubstr("line11\n")));
  EXPECT_EQ(fatal_in(exit.err).rank, 1);
}

TEST(LauncherFailure, OtherRanksGetSigtermThenSigkill) {
  const ProcessResult handling_sigterm = run_process(shell_ranks(
      2, "[ $RANK = 0 ] && { sleep 0.2; exit 4; }; trap 'echo asked; exit 0' TERM; while :; do sleep 0.01; done"));
  EXPECT_EQ(handling_sigterm.code, 4);
  EXPECT_THAT(handling_sigterm.out, HasSubstr("[1] asked\n"));
  EXPECT_LT(handling_sigterm.elapsed, 2s);

  const ProcessResult ignoring_sigterm =
      run_process(shell_ranks(2, "[ $RANK = 0 ] && { sleep 0.2; exit 4; }; trap '' TERM; while :; do sleep 0.01; done",
                              {"--fail-grace", "0.3"}));
  EXPECT_EQ(ignoring_sigterm.code, 4);
  EXPECT_GE(ignoring_sigterm.elapsed, 500ms);
  EXPECT_LT(ignoring_sigterm.elapsed, 3s);
}

TEST(LauncherFailure, StoppedRankIsTerminated) {
  const ProcessResult exit = run_process(shell_ranks(2, "[ $RANK = 0 ] && kill -STOP $$; sleep 0.3; exit 6"));
  EXPECT_EQ(exit.code, 6);
  EXPECT_LT(exit.elapsed, 2s);
}

TEST(LauncherFailure, OutputUpToDeathIsShown) {
  const ProcessResult exit = run_process(shell_ranks(1, "seq 20000; printf last; kill -KILL $$"));
  EXPECT_EQ(exit.code, 137);
  EXPECT_THAT(exit.out, AllOf(HasSubstr("[0] 1\n"), HasSubstr("[0] 20000\n[0] last\n")));
}

TEST(LauncherFailure, MessageOfAnErrorFileIsTheDetail) {
  const ProcessResult exit = run_process(
      shell_ranks(2,
                  "[ $RANK = 1 ] || exec sleep 100; echo $TORCHELASTIC_ERROR_FILE; echo '{\"message\": {\"message\": "
                  "\"ValueError: x\"}}' >$TORCHELASTIC_ERROR_FILE; exit 3"));
  EXPECT_EQ(exit.code, 3);
  EXPECT_EQ(fatal_in(exit.err).detail, "exited with code 3: ValueError: x");
  ASSERT_THAT(exit.out, StartsWith("[1] /"));
  EXPECT_FALSE(std::filesystem::exists(exit.out.substr(4, exit.out.size() - 5)));
}

TEST(LauncherFailure, DescendantsOfRanksEndWithJob) {
  // The destructor of Process fails the test if a process is left.
  const ProcessResult good = run_process(shell_ranks(2, "sleep 100 & setsid sleep 100 & exit 0"));
  EXPECT_EQ(good.code, 0);
  EXPECT_LT(good.elapsed, 2s);
  // A process name that contains the end marker of the name in /proc/PID/stat.
  const ProcessResult odd =
      run_process(shell_ranks(1,
                              "setsid sh -c 'printf \"x) y\" > /proc/$$/comm; echo named; sleep 100; :' & while ! grep "
                              "-q y /proc/$!/comm; do :; done; exit 0"));
  EXPECT_EQ(odd.code, 0);
  EXPECT_LT(odd.elapsed, 2s);
  const ProcessResult bad = run_process(shell_ranks(
      2, "setsid sh -c 'trap \"\" TERM; sleep 100; sleep 100' & sleep 0.1; exit 3", {"--fail-grace", "0.2"}));
  EXPECT_EQ(bad.code, 3);
}

TEST(LauncherFailure, UnkillableProcessIsReportedAndNotWaitedFor) {
  // This test traces the process. A traced process stays a zombie until its tracer waits for it, so for its parent it
  // never ends.
  Process process(shell_ranks(1, "echo pid=$$; kill -STOP $$; exit 0", {"--grace", "0"}));
  ASSERT_TRUE(process.wait_for("pid=", Deadline::in(10s)));
  ASSERT_TRUE(process.wait_for("\n", Deadline::in(10s)));
  const pid_t rank = std::stoi(process.out().substr(process.out().find("pid=") + 4));
  ASSERT_EQ(::ptrace(PTRACE_SEIZE, rank, 0, 0), 0);
  process.signal(SIGINT);
  const ProcessResult exit = process.wait(Deadline::in(20s));
  EXPECT_EQ(exit.code, 70);
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(fatal.cause, base::Cause::kUnkillable);
  EXPECT_EQ(fatal.pid, rank);
  EXPECT_EQ(fatal.rank, 0);
  EXPECT_GE(exit.elapsed, 5s);
  EXPECT_LT(exit.elapsed, 8s);
  eventually(Deadline::in(5s), [&] { return ::waitpid(rank, nullptr, WNOHANG | __WALL) == rank; });
}

TEST(LauncherFailure, UnkillableProcessIsNotTheCause) {
  const TempDir folder;
  const std::string go = folder.path() + "/go";
  Process process(shell_ranks(2,
                              "[ $RANK = 0 ] && { while [ ! -e " + go +
                                  " ]; do sleep 0.02; done; exit 3; }; echo pid=$$; kill -STOP $$; exit 0",
                              {"--fail-grace", "0"}));
  ASSERT_TRUE(process.wait_for("pid=", Deadline::in(10s)));
  ASSERT_TRUE(process.wait_for("\n", Deadline::in(10s)));
  const pid_t rank = std::stoi(process.out().substr(process.out().find("pid=") + 4));
  ASSERT_EQ(::ptrace(PTRACE_SEIZE, rank, 0, 0), 0);
  std::ofstream(go) << "go";
  const ProcessResult exit = process.wait(Deadline::in(20s));
  EXPECT_EQ(exit.code, 3);
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(fatal.cause, base::Cause::kRankExited);
  EXPECT_EQ(fatal.rank, 0);
  EXPECT_THAT(fatal.detail, AllOf(HasSubstr("exited with code 3"),
                                  HasSubstr("process " + std::to_string(rank) + " of rank 1 on host "),
                                  HasSubstr(" did not exit within 5 s of SIGKILL")));
  eventually(Deadline::in(5s), [&] { return ::waitpid(rank, nullptr, WNOHANG | __WALL) == rank; });
}

}  // namespace
}  // namespace lockstep::tests
