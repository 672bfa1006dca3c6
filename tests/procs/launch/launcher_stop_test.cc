// Tests that no process is left when a user or the system ends the launcher or the agent.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>

#include "tests/support/lockstep_run.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// Each rank starts a child in its own process group, a child in a new session, and a child in a new session that has
// children of its own.
const char* const kProcessTreeScript =
    "sleep 300 & setsid sleep 300 & setsid sh -c 'sleep 300 & sleep 300' & echo up$RANK; wait";
constexpr std::size_t kProcessTreeSize = 6;  // the shell, two sleeps, and the second shell with two sleeps

pid_t agent_of(const Process& launcher) {
  const auto children = children_of(launcher.pid());
  const auto agent =
      std::find_if(children.begin(), children.end(), [](pid_t pid) { return command_of(pid) == "lockstep agent "; });
  return agent == children.end() ? -1 : *agent;
}

void wait_for_process_trees(Process& process, std::size_t ranks) {
  ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)));
  // 2: the launcher and the agent.
  ASSERT_TRUE(process.wait_for_live_count(2 + ranks * kProcessTreeSize, Deadline::in(10s)))
      << process.live_processes().size();
}

TEST(LauncherStop, FirstCtrlCSendsSigint) {
  Process process(shell_ranks(2, "trap 'echo asked$RANK; exit 0' INT; echo up$RANK; while :; do sleep 0.01; done"));
  ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)) && process.wait_for("up1", Deadline::in(10s)));
  process.signal(SIGINT);
  const ProcessResult exit = process.wait(Deadline::in(10s));
  EXPECT_EQ(exit.code, 130);
  EXPECT_EQ(exit.signal, 0);
  EXPECT_THAT(exit.out, HasSubstr("asked0"));
  EXPECT_THAT(exit.out, HasSubstr("asked1"));
  EXPECT_EQ(fatal_in(exit.err).cause, base::Cause::kInterrupted);
}

TEST(LauncherStop, SigtermFollowsCtrlCAfterHalfOfTheGracePeriod) {
  Process process(shell_ranks(1,
                              "trap 'echo first' INT; trap 'echo second; exit 0' TERM; echo up$RANK; while :; do sleep "
                              "0.01; done",
                              {"--grace", "2"}));
  ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)));
  const auto begun = Deadline::Clock::now();
  process.signal(SIGINT);
  const ProcessResult exit = process.wait(Deadline::in(10s));
  EXPECT_EQ(exit.code, 130);
  EXPECT_THAT(exit.out, HasSubstr("first\n[0] second\n"));
  EXPECT_THAT(exit.err, HasSubstr("stopping all ranks: SIGINT, SIGTERM in 1 s, and SIGKILL in 2 s"));
  EXPECT_GE(Deadline::Clock::now() - begun, 1s);
  EXPECT_LT(Deadline::Clock::now() - begun, 2s);
}

TEST(LauncherStop, CtrlBackslashWritesTheStacksOfAllRanks) {
  const tests::TempDir folder;
  Process process({.argv = {"sh", "-c",
                            "cd " + folder.path() + " && exec " + kLockstep +
                                " run -n 2 --name it sh -c 'echo up$RANK; exec sleep 300'"}});
  ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)) && process.wait_for("up1", Deadline::in(10s)));
  process.signal(SIGQUIT);
  const ProcessResult exit = process.wait(Deadline::in(20s));
  EXPECT_EQ(exit.code, 128 + SIGQUIT);
  EXPECT_THAT(fatal_in(exit.err).detail, HasSubstr("stopped by SIGQUIT"));
  EXPECT_THAT(fatal_in(exit.err).hint, HasSubstr("the stacks of all ranks are in runs/it/stack.RANK.txt"));
  for (const char* rank : {"0", "1"})
    EXPECT_NE(tests::read_file(folder / ("runs/it/stack." + std::string(rank) + ".txt")), "") << rank;
}

TEST(LauncherStop, AReaderThatClosesEndsTheJobWithoutAnError) {
  Process process({.argv = {"sh", "-c",
                            "{ " + kLockstep +
                                " run -n 2 sh -c 'while :; do echo line; sleep 0.01; done'; echo code $? >&2; } | head "
                                "-1"}});
  const ProcessResult exit = process.wait(Deadline::in(10s));
  EXPECT_THAT(exit.out, testing::MatchesRegex("\\[[01]\\] line\n"));
  EXPECT_EQ(exit.err, "code 141\n");
}

TEST(LauncherStop, KeyboardInterruptsOfPythonRanksAreNotPrinted) {
  const std::string program =
      "import os, time\ntry:\n    print('up', os.environ['RANK'], flush=True)\n    time.sleep(300)\n"
      "finally:\n    print('finally', flush=True)";
  Process process({.argv = {kLockstep, "run", "-n", "3", LOCKSTEP_TEST_PYTHON[0] ? LOCKSTEP_TEST_PYTHON : "python3",
                            "-c", program}});
  for (const char* up : {"up 0", "up 1", "up 2"}) ASSERT_TRUE(process.wait_for(up, Deadline::in(20s)));
  process.signal(SIGINT);
  const ProcessResult exit = process.wait(Deadline::in(10s));
  EXPECT_EQ(exit.code, 130);
  for (const char* line : {"[0] finally\n", "[1] finally\n", "[2] finally\n"}) EXPECT_THAT(exit.out, HasSubstr(line));
  EXPECT_EQ(exit.err.find("Traceback"), std::string::npos) << exit.err;
  EXPECT_EQ(exit.err.find("KeyboardInterrupt"), std::string::npos) << exit.err;
}

TEST(LauncherStop, StopUsesItsOwnGracePeriod) {
  Process process(shell_ranks(1, "trap '' INT TERM; echo up$RANK; while :; do sleep 0.01; done",
                              {"--grace", "0.3", "--fail-grace", "60"}));
  ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)));
  process.signal(SIGINT);
  EXPECT_EQ(process.wait(Deadline::in(5s)).code, 130);
}

TEST(LauncherStop, SecondCtrlCKills) {
  Process process(shell_ranks(2, "trap '' INT TERM; echo up$RANK; while :; do sleep 0.01; done", {"--grace", "60"}));
  ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)) && process.wait_for("up1", Deadline::in(10s)));
  process.signal(SIGINT);
  ASSERT_TRUE(process.wait_for("stopping all ranks", Deadline::in(10s)));
  const auto second = Deadline::Clock::now();
  process.signal(SIGINT);
  EXPECT_EQ(process.wait(Deadline::in(10s)).code, 130);
  EXPECT_LT(Deadline::Clock::now() - second, 1s);
}

TEST(LauncherStop, SigtermAndSighupHaveTheirOwnExitCodes) {
  for (const int signal : {SIGTERM, SIGHUP}) {
    Process process(shell_ranks(1, "echo up$RANK; sleep 300"));
    ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)));
    process.signal(signal);
    const ProcessResult exit = process.wait(Deadline::in(10s));
    EXPECT_EQ(exit.code, 128 + signal);
    EXPECT_EQ(fatal_in(exit.err).cause, base::Cause::kInterrupted);
  }
}

TEST(LauncherStop, IgnoredSighupStaysIgnored) {
  Process process(
      {.argv = {"sh", "-c", "trap '' HUP; exec " + kLockstep + " run -n 1 sh -c 'echo up; sleep 0.5; echo done'"}});
  ASSERT_TRUE(process.wait_for("up", Deadline::in(10s)));
  process.signal(SIGHUP);
  const ProcessResult exit = process.wait(Deadline::in(10s));
  EXPECT_EQ(exit.code, 0);
  EXPECT_THAT(exit.out, HasSubstr("done"));
}

TEST(LauncherStop, UserSignalsReachRanks) {
  for (const std::string name : {"USR1", "USR2"}) {
    Process process(shell_ranks(2, "trap 'echo got; exit 0' " + name + "; echo up$RANK; while :; do sleep 0.01; done"));
    ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)) && process.wait_for("up1", Deadline::in(10s)));
    process.signal(name == "USR1" ? SIGUSR1 : SIGUSR2);
    const ProcessResult exit = process.wait(Deadline::in(10s));
    EXPECT_EQ(exit.code, 0);
    EXPECT_THAT(exit.out, HasSubstr("[0] got\n"));
    EXPECT_THAT(exit.out, HasSubstr("[1] got\n"));
  }
}

// SLURM sends SIGUSR1 before the time limit, which would end a program that does not ask for it. A program that a shell
// has started gets it, if the shell does not handle it.
TEST(LauncherStop, UserSignalsEndNoProgramThatDoesNotHandleThem) {
  Process process(
      shell_ranks(2,
                  "[ $RANK = 0 ] && { echo up0; sleep 2; echo done; exit; }\n"
                  "sh -c 'trap \"echo got; exit 0\" USR1; echo up1; while :; do sleep 0.01; done'; echo end"));
  ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)) && process.wait_for("up1", Deadline::in(10s)));
  process.signal(SIGUSR1);
  const ProcessResult exit = process.wait(Deadline::in(10s));
  EXPECT_EQ(exit.code, 0) << exit.err;
  for (const char* line : {"[0] done\n", "[1] got\n", "[1] end\n"}) EXPECT_THAT(exit.out, HasSubstr(line));
}

// A program that needs a helper, `cat`, to save when it is asked to stop. Its other helper writes a file when it gets
// the same signal after the program has saved.
const char* const kProgramWithHelpers = R"(
import os, signal, subprocess, sys, time
file = sys.argv[1] + '/' + os.environ['RANK']
stop = []
for number in signal.SIGTERM, signal.SIGINT: signal.signal(number, lambda *_: stop.append(1))
start = lambda *words: subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
cat = start('cat')
loop = 'echo up; while :; do sleep 0.01; done'
end = f'[ -e {file}.saved ] && : >{file}.asked; exit'  # no other program, which a second signal could end
start('sh', '-c', f'trap exit TERM INT; trap "{end}" {sys.argv[2]}; {loop}').stdout.readline()
print('ready', flush=True)
while not stop: time.sleep(0.01)
assert cat.communicate(b'weights')[0] == b'weights'
open(file + '.saved', 'w').close()
)";

TEST(LauncherStop, HelpersOfAProgramThatHandlesTheSignalGetItWhenTheRankHasEnded) {
  const std::string python = LOCKSTEP_TEST_PYTHON[0] ? LOCKSTEP_TEST_PYTHON : "python3";
  for (const int signal : {SIGTERM, SIGINT})
    for (int ranks = 1; ranks <= 3; ++ranks)
      for (const bool below_shell : {false, true}) {
        SCOPED_TRACE(std::to_string(signal) + " " + std::to_string(ranks) + " " + std::to_string(below_shell));
        const TempDir folder;
        Words words = {"-n", std::to_string(ranks), "--bind", "none"};
        if (below_shell) words.insert(words.end(), {"sh", "-c", "\"$@\"; echo end", "sh"});
        words.insert(words.end(), {python, "-c", kProgramWithHelpers, folder.path(), std::to_string(signal)});
        Process process(lockstep_run(words));
        for (int rank = 0; rank < ranks; ++rank)
          ASSERT_TRUE(process.wait_for("[" + std::to_string(rank) + "] ready", Deadline::in(20s))) << process.err();
        process.signal(signal);
        EXPECT_EQ(process.wait(Deadline::in(20s)).code, 128 + signal);
        for (int rank = 0; rank < ranks; ++rank) {
          EXPECT_TRUE(std::filesystem::exists(folder / (std::to_string(rank) + ".asked"))) << process.err();
          EXPECT_EQ(process.out().find("[" + std::to_string(rank) + "] end") != std::string::npos,
                    below_shell && signal == SIGTERM);  // a shell ends after SIGINT
        }
      }
}

TEST(LauncherStop, ProcessesThatARankLeavesBehindAreNamed) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const ProcessResult exit = run_process(shell_ranks(ranks, "sleep 300 & setsid sleep 300 & exit 0"));
    EXPECT_EQ(exit.code, 0);
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_THAT(exit.err, ContainsRegex("warning: rank " + std::to_string(rank) +
                                          " ended while these processes of it still ran: [0-9]+ \\(sleep\\), [0-9]+ "
                                          "\\(sleep\\); they get SIGTERM now, and SIGKILL in 2 s"));
  }
}

TEST(LauncherStop, ProcessesThatEndWithTheirRankAreNotNamed) {
  EXPECT_EQ(run_process(shell_ranks(2, "sleep 0.01 & exit 0")).err, "");
  // The job has failed: its cause is what matters.
  EXPECT_THAT(run_process(shell_ranks(2, "sleep 300 & exit 3")).err, Not(HasSubstr("warning")));
}

TEST(LauncherStop, NoProcessesLeftAfterCtrlC) {
  Process process(shell_ranks(2, kProcessTreeScript));
  wait_for_process_trees(process, 2);
  process.signal(SIGINT);
  EXPECT_EQ(process.wait(Deadline::in(10s)).code, 130);
  EXPECT_EQ(process.live_processes().size(), 0u);
}

TEST(LauncherStop, KillingLauncherEndsAllProcesses) {
  for (int round = 0; round < 5; ++round) {
    Process process(shell_ranks(2, kProcessTreeScript));
    wait_for_process_trees(process, 2);
    process.signal(SIGKILL);
    EXPECT_TRUE(process.wait_for_live_count(0, Deadline::in(2s))) << process.live_processes().size();
    EXPECT_EQ(process.wait(Deadline::in(5s)).signal, SIGKILL);
  }
}

TEST(LauncherStop, KillingLauncherDuringStartEndsAllProcesses) {
  for (int round = 0; round < 20; ++round) {
    Process process(shell_ranks(8, kProcessTreeScript));
    // Each round kills later: before the launcher, the agent or some of the ranks have started.
    const Deadline deadline = Deadline::in(std::chrono::milliseconds(round));
    eventually(deadline, [] { return false; });
    process.signal(SIGKILL);
    process.wait(Deadline::in(5s));
    EXPECT_TRUE(process.wait_for_live_count(0, Deadline::in(2s))) << process.live_processes().size();
  }
}

TEST(LauncherStop, KillingAgentIsReportedAndEndsAllProcesses) {
  for (int round = 0; round < 5; ++round) {
    Process process(shell_ranks(2, kProcessTreeScript));
    wait_for_process_trees(process, 2);
    const pid_t agent = agent_of(process);
    ASSERT_GT(agent, 1);
    ::kill(agent, SIGKILL);
    const ProcessResult exit = process.wait(Deadline::in(10s));
    EXPECT_EQ(process.live_processes().size(), 0u);
    EXPECT_EQ(exit.code, 70);
    const job::Fatal fatal = fatal_in(exit.err);
    EXPECT_EQ(fatal.cause, base::Cause::kInternal);
    EXPECT_EQ(fatal.pid, agent);
    EXPECT_THAT(fatal.detail, HasSubstr("killed by SIGKILL"));
  }
}

TEST(LauncherStop, StoppedAgentDoesNotBlockShutdown) {
  Process process(shell_ranks(1, "echo up$RANK; sleep 300", {"--grace", "0"}));
  ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)));
  const pid_t agent = agent_of(process);
  ASSERT_GT(agent, 1);
  ::kill(agent, SIGSTOP);
  process.signal(SIGINT);
  EXPECT_EQ(process.wait(Deadline::in(20s)).code, 130);
}

TEST(LauncherStop, StoppedAgentEndsJob) {
  Process process(shell_ranks(2, "echo up$RANK; sleep 300", {"--stall-timeout", "5"}));
  ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)));
  ASSERT_TRUE(process.wait_for("up1", Deadline::in(10s)));
  const pid_t agent = agent_of(process);
  ASSERT_GT(agent, 1);
  ::kill(agent, SIGSTOP);
  const ProcessResult exit = process.wait(Deadline::in(20s));
  EXPECT_EQ(exit.code, 70);
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(fatal.cause, base::Cause::kInternal);
  EXPECT_EQ(fatal.pid, agent);
  EXPECT_THAT(fatal.detail, HasSubstr("has sent nothing for 5 s"));
  EXPECT_EQ(process.live_processes().size(), 0u);
}

TEST(LauncherStop, SuspendedLauncherDoesNotBlameAgent) {
  Process process(shell_ranks(1, "echo up$RANK; sleep 12", {"--stall-timeout", "5"}));
  ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)));
  const pid_t agent = agent_of(process);
  ASSERT_GT(agent, 1);
  ::kill(agent, SIGSTOP);
  process.signal(SIGSTOP);
  const auto since = std::chrono::steady_clock::now();
  ASSERT_TRUE(eventually(Deadline::in(20s), [&] { return std::chrono::steady_clock::now() - since > 8s; }));
  process.signal(SIGCONT);
  ::kill(agent, SIGCONT);
  EXPECT_EQ(process.wait(Deadline::in(20s)).code, 0);
}

TEST(LauncherStop, ExistingChildrenAreNotKilled) {
  Process process(
      {.argv = {"sh", "-c",
                "sleep 300 & echo before=$!; exec " + kLockstep + " run -n 1 sh -c 'echo up0; sleep 300'"}});
  ASSERT_TRUE(process.wait_for("up0", Deadline::in(10s)));
  const pid_t before = std::stoi(process.out().substr(process.out().find("before=") + 7));
  ::kill(agent_of(process), SIGKILL);
  EXPECT_EQ(process.wait(Deadline::in(10s)).code, 70);
  EXPECT_EQ(::kill(before, SIGKILL), 0) << "the shell's own child was killed";
}

}  // namespace
}  // namespace lockstep::tests
