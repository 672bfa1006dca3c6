// Tests that a failed job is restarted, and ends if restarts do not help.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <fstream>

#include "tests/support/lockstep_run.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kRestartProbe = LOCKSTEP_RESTART_PROBE_PATH;

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

/// Runs lockstep run -n 1 OPTIONS... --max-restarts N sh -c SCRIPT. $LOG is a file in the folder.
ProcessResult run_restarts(const TempDir& folder, int max_restarts, const std::string& script,
                           Words options = {"--restart-pause", "0"}) {
  options.insert(options.end(), {"--max-restarts", std::to_string(max_restarts)});
  SpawnOptions spawn = shell_ranks(1, script, options);
  spawn.env["LOG"] = folder / "log";
  return run_process(spawn);
}

TEST(LauncherRestart, FailingJobIsRestartedUntilItSucceeds) {
  const TempDir folder;
  const ProcessResult exit =
      run_restarts(folder, 3,
                   "echo start $LOCKSTEP_GENERATION $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS >>$LOG; "
                   "[ $LOCKSTEP_GENERATION = 2 ] || kill -KILL $$");
  EXPECT_EQ(exit.code, 0) << exit.err;
  EXPECT_THAT(lines_of(folder / "log"), ElementsAre("start 0 0 of 3", "start 1 1 of 3", "start 2 2 of 3"));
  EXPECT_THAT(exit.err, HasSubstr("lockstep: RANK_DIED of rank 0 on "));
  EXPECT_THAT(exit.err, HasSubstr(": killed by SIGKILL; restart 1 of 3 in 0 s; no checkpoint was reported\n"));
  EXPECT_THAT(exit.err, HasSubstr("restart 2 of 3"));
  EXPECT_THAT(exit.err, Not(HasSubstr("FATAL")));
}

TEST(LauncherRestart, NoRestartByDefault) {
  const TempDir folder;
  const ProcessResult exit =
      run_process(shell_ranks(1, "echo start >>" + (folder / "log") + "; echo $TORCHELASTIC_MAX_RESTARTS; exit 7"));
  EXPECT_EQ(exit.code, 7);
  EXPECT_EQ(exit.out, "[0] 0\n");
  EXPECT_EQ(lines_of(folder / "log").size(), 1u);
  EXPECT_EQ(fatal_in(exit.err).detail, "exited with code 7");
}

TEST(LauncherRestart, LastFailureIsReportedWhenRestartsAreUsedUp) {
  const TempDir folder;
  const ProcessResult exit = run_restarts(folder, 2, "echo start >>$LOG; exit $((7 + LOCKSTEP_GENERATION))");
  EXPECT_EQ(exit.code, 9);
  EXPECT_EQ(lines_of(folder / "log").size(), 3u);
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(fatal.cause, base::Cause::kRankExited);
  EXPECT_EQ(fatal.gen, 2);
  EXPECT_EQ(fatal.detail, "exited with code 9; all 2 restarts are used up");
}

TEST(LauncherRestart, ThreeRestartsWithoutNewerCheckpointEndJob) {
  const TempDir folder;
  const ProcessResult exit = run_restarts(folder, 10, "echo start >>$LOG; echo it fails >&2; exit 7");
  EXPECT_EQ(exit.code, 70);
  EXPECT_EQ(lines_of(folder / "log").size(), 4u);
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(fatal.cause, base::Cause::kNoProgress);
  EXPECT_EQ(fatal.gen, 3);
  EXPECT_EQ(fatal.rank, 0);
  EXPECT_EQ(fatal.detail,
            "3 restarts in a row produced no newer checkpoint; the last failure was RANK_EXITED: exited with code 7");
  EXPECT_THAT(exit.err, HasSubstr("lockstep: the last lines that rank 0 wrote to stderr:\n[0] it fails\nFATAL"));
}

TEST(LauncherRestart, NewerCheckpointIsProgress) {
  const TempDir folder;
  // Each start saves one checkpoint, and fails.
  const ProcessResult exit = run_process(lockstep_run({"-n", "2", "--max-restarts", "5", "--restart-pause", "0",
                                                       kRestartProbe, folder.path(), "1000", "5", "exits", "1"}));
  EXPECT_EQ(exit.code, 7) << exit.err;
  EXPECT_EQ(fatal_in(exit.err).detail, "exited with code 7; all 5 restarts are used up");
  for (int number = 1; number <= 5; ++number)
    EXPECT_THAT(exit.err, HasSubstr("the newest checkpoint is number " + std::to_string(number) + "\n"));
  EXPECT_THAT(lines_of(folder / "checkpoint"), ElementsAre(::testing::StartsWith("6 30 ")));
}

TEST(LauncherRestart, SameCheckpointIsNotProgress) {
  const TempDir folder;
  const std::string removes_checkpoint =
      "rm -f " + (folder / "checkpoint") + "; exec " + kRestartProbe + " " + folder.path() + " 1000 5 exits 1";
  const ProcessResult exit =
      run_process(shell_ranks(1, removes_checkpoint, {"--max-restarts", "9", "--restart-pause", "0"}));
  EXPECT_EQ(exit.code, 70);
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(fatal.cause, base::Cause::kNoProgress);
  EXPECT_EQ(fatal.gen, 3);
}

TEST(LauncherRestart, UserErrorsAndStopRequestsAreNotRestarted) {
  for (const std::string end :
       {"exit 2", "exit 64", "exit 70", "exit 75", "no-such-program", "kill -TERM $$", "kill -USR1 $$"}) {
    const TempDir folder;
    const ProcessResult exit = run_restarts(folder, 5, "echo start >>$LOG; " + end);
    EXPECT_EQ(lines_of(folder / "log").size(), 1u) << end;
    EXPECT_NE(exit.code, 0) << end;
    EXPECT_THAT(fatal_in(exit.err).detail, Not(HasSubstr("restart"))) << end;
  }
  const ProcessResult exit = run_process(lockstep_run({"--max-restarts", "5", "/nowhere/prog"}));
  EXPECT_EQ(exit.code, 64);
  EXPECT_THAT(exit.err, Not(HasSubstr("restart")));
}

TEST(LauncherRestart, PausesDouble) {
  const TempDir folder;
  run_restarts(folder, 3, "date +%s%N >>$LOG; exit 7", {"--restart-pause", "0.2"});
  const auto times = lines_of(folder / "log");
  ASSERT_EQ(times.size(), 4u);
  for (std::size_t i = 0; i < 3; ++i)
    EXPECT_GE(std::stoll(times[i + 1]) - std::stoll(times[i]), 200000000LL << i) << "pause " << i + 1;
}

/// Sends `signal` to a job that pauses before its first restart, and expects its end.
void expect_end_of_pause(int signal, int code, base::Cause cause) {
  Process process(shell_ranks(1, "exit 7", {"--max-restarts", "5", "--restart-pause", "60"}));
  ASSERT_TRUE(process.wait_for("restart 1 of 5 in 60 s", Deadline::in(10s)));
  const auto signalled = Deadline::Clock::now();
  process.signal(signal);
  const ProcessResult exit = process.wait(Deadline::in(10s));
  EXPECT_LT(Deadline::Clock::now() - signalled, 2s);
  EXPECT_EQ(exit.code, code);
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(fatal.cause, cause);
  EXPECT_THAT(fatal.detail, HasSubstr("before restart 1 of 5"));
}

TEST(LauncherRestart, SignalEndsRestartPause) {
  expect_end_of_pause(SIGINT, 130, base::Cause::kInterrupted);
  expect_end_of_pause(SIGTERM, 143, base::Cause::kInterrupted);
  expect_end_of_pause(SIGUSR1, 75, base::Cause::kPreempted);
}

TEST(LauncherRestart, CtrlCIsNotAFailure) {
  Process process(shell_ranks(2, "echo up$RANK; sleep 300", {"--max-restarts", "5", "--restart-pause", "0"}));
  ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)) && process.wait_for("up1", Deadline::in(10s)));
  process.signal(SIGINT);
  const ProcessResult exit = process.wait(Deadline::in(10s));
  EXPECT_EQ(exit.code, 130);
  EXPECT_THAT(exit.err, Not(HasSubstr("restart")));
}

TEST(LauncherRestart, CtrlCDuringFailureShutdownStopsJob) {
  Process process(
      shell_ranks(2, "[ $RANK = 1 ] && { echo up; exit 7; }; trap '' TERM; echo up; while :; do sleep 0.01; done",
                  {"--max-restarts", "5", "--restart-pause", "0", "--grace", "1", "--fail-grace", "60"}));
  ASSERT_TRUE(process.wait_for("[0] up", Deadline::in(10s)) && process.wait_for("[1] up", Deadline::in(10s)));
  // Rank 1 has ended. When only rank 0 is left, the launcher has begun to terminate it.
  ASSERT_TRUE(eventually(Deadline::in(10s), [&] { return process.live_processes().size() <= 4; }));
  process.signal(SIGINT);
  const ProcessResult exit = process.wait(Deadline::in(20s));
  EXPECT_NE(exit.code, 0);
  EXPECT_THAT(exit.err, Not(HasSubstr("restart")));
}

TEST(LauncherRestart, EachRestartHasItsOwnOutputFiles) {
  const TempDir folder;
  const ProcessResult exit =
      run_restarts(folder, 1, "echo start $LOCKSTEP_GENERATION; [ $LOCKSTEP_GENERATION = 1 ] || exit 7",
                   {"--restart-pause", "0", "--output", folder / "logs"});
  EXPECT_EQ(exit.code, 0) << exit.err;
  EXPECT_EQ(exit.out, "[0] start 0\n[0] start 1\n");
  EXPECT_THAT(lines_of(folder / "logs/rank.0.out"), ElementsAre("start 0"));
  EXPECT_THAT(lines_of(folder / "logs/gen.1/rank.0.out"), ElementsAre("start 1"));
}

TEST(LauncherRestart, OldProcessesAreGoneBeforeRestart) {
  const TempDir folder;
  // A child in a session of its own, for which the rank does not wait.
  const ProcessResult exit =
      run_restarts(folder, 1,
                   "if [ $LOCKSTEP_GENERATION = 1 ]; then kill -0 $(cat $LOG) 2>/dev/null && echo there; exit 0; fi; "
                   "setsid sleep 300 & echo $! >$LOG; kill -KILL $$");
  EXPECT_EQ(exit.code, 0) << exit.err;
  EXPECT_EQ(exit.out, "");
}

TEST(LauncherRestart, HostOfDeadAgentBacksOff) {
  Process process(shell_ranks(1, "echo up; sleep 300", {"--max-restarts", "5", "--restart-pause", "0"}));
  ASSERT_TRUE(process.wait_for("up", Deadline::in(10s)));
  const auto children = children_of(process.pid());
  const auto agent =
      std::find_if(children.begin(), children.end(), [](pid_t pid) { return command_of(pid) == "lockstep agent "; });
  ASSERT_NE(agent, children.end());
  ::kill(*agent, SIGKILL);
  ASSERT_TRUE(process.wait_for("restart 1 of 5 in 10 s", Deadline::in(10s))) << process.err();
  process.signal(SIGINT);
  EXPECT_EQ(process.wait(Deadline::in(10s)).code, 130);
}

TEST(LauncherRestart, DependentOptionsAreRejectedWithoutMaxRestarts) {
  for (const Words& words : {Words{"--restart-pause", "1", "true"}, Words{"--min-hosts", "1", "true"}}) {
    const ProcessResult exit = run_process(lockstep_run(words));
    EXPECT_EQ(exit.code, 64);
    EXPECT_THAT(fatal_in(exit.err).detail, HasSubstr(words[0] + " requires --max-restarts"));
  }
  const ProcessResult exit = run_process(lockstep_run({"--max-restarts", "1", "--min-hosts", "2", "true"}));
  EXPECT_EQ(exit.code, 64);
  EXPECT_THAT(fatal_in(exit.err).detail,
              HasSubstr("--min-hosts: 2; expected at most 1, the number of hosts of the job"));
}

}  // namespace
}  // namespace lockstep::tests
