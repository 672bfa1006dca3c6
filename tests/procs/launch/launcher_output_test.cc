// Tests where the output of the ranks goes, and in which form.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <pty.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "lockstep/base/parse.h"
#include "tests/support/lockstep_run.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines = base::split(text, '\n');
  std::sort(lines.begin(), lines.end());
  return lines;
}

TEST(LauncherOutput, StreamsAreSeparateAndPrefixed) {
  const ProcessResult exit = run_process(shell_ranks(2, "echo out; echo err >&2"));
  EXPECT_THAT(sorted_lines(exit.out), ElementsAre("", "[0] out", "[1] out"));
  EXPECT_THAT(sorted_lines(exit.err), ElementsAre("", "[0] err", "[1] err"));
}

TEST(LauncherOutput, LinesAreNotInterleaved) {
  const ProcessResult exit =
      run_process(shell_ranks(4, "for i in $(seq 300); do printf $RANK$RANK$RANK; printf \"$RANK\\n\"; done"));
  std::map<std::string, int> count;
  for (const std::string& line : sorted_lines(exit.out)) ++count[line];
  for (const char* line : {"[0] 0000", "[1] 1111", "[2] 2222", "[3] 3333"}) EXPECT_EQ(count[line], 300);
  EXPECT_EQ(count.size(), 5u);  // and the empty one after the last newline
}

TEST(LauncherOutput, LastLineWithoutNewlineIsShown) {
  EXPECT_EQ(run_process(shell_ranks(1, "printf 'a\\nrest'")).out, "[0] a\n[0] rest\n");
}

TEST(LauncherOutput, CarriageReturnsAreKept) {
  Process process(shell_ranks(1, "printf '10%%\\r'; sleep 300"));
  EXPECT_TRUE(process.wait_for("[0] 10%\r", Deadline::in(5s))) << "shown at once, before the line has ended";
  process.signal(SIGTERM);
  process.wait(Deadline::in(10s));
}

TEST(LauncherOutput, LargeOutputIsComplete) {
  const ProcessResult exit = run_process(lockstep_run({"-n", "2", kProbe, "flood", "20000"}));
  EXPECT_EQ(exit.out.size(), 2u * 20000 * 104);
  EXPECT_EQ(exit.err, "");
}

TEST(LauncherOutput, OutputFilesHaveRawBytes) {
  const TempDir folder;
  const ProcessResult exit =
      run_process(shell_ranks(2, "echo out$RANK; printf 'err\\r' >&2", {"--output", folder / "a/b"}));
  EXPECT_EQ(exit.code, 0);
  EXPECT_THAT(exit.out, HasSubstr("[1] out1\n"));
  EXPECT_EQ(read_file(folder / "a/b/rank.0.out"), "out0\n");
  EXPECT_EQ(read_file(folder / "a/b/rank.1.out"), "out1\n");
  EXPECT_EQ(read_file(folder / "a/b/rank.1.err"), "err\r");
}

TEST(LauncherOutput, InvalidOutputFolderIsRejectedBeforeStart) {
  const ProcessResult exit = run_process(shell_ranks(2, "echo started", {"--output", "/proc/no"}));
  EXPECT_EQ(exit.code, 64);
  EXPECT_EQ(exit.out, "");
  EXPECT_THAT(fatal_in(exit.err).detail, AllOf(HasSubstr("--output"), HasSubstr("/proc/no")));
}

TEST(LauncherOutput, FullDiskIsReportedAndRunContinues) {
  const TempDir folder;
  std::filesystem::create_symlink("/dev/full", folder / "rank.0.out");
  const ProcessResult exit = run_process(shell_ranks(1, "echo x", {"--output", folder.path()}));
  EXPECT_EQ(exit.code, 74);
  EXPECT_EQ(exit.out, "[0] x\n");
  EXPECT_THAT(exit.err, AllOf(HasSubstr("--output"), HasSubstr("No space left")));
}

TEST(LauncherOutput, QuietRanksShowOnlyRankZeroAndFailures) {
  const ProcessResult exit = run_process(shell_ranks(2, "echo out; echo err >&2", {"--quiet-ranks"}));
  EXPECT_EQ(exit.out, "[0] out\n");
  EXPECT_EQ(exit.err, "[0] err\n");
  const ProcessResult bad =
      run_process(shell_ranks(2, "[ $RANK = 1 ] || exec sleep 300; echo why >&2; exit 2", {"--quiet-ranks"}));
  EXPECT_THAT(bad.err, AllOf(HasSubstr("[1] why\n"), HasSubstr("FATAL cause=RANK_EXITED rank=1")));
}

TEST(LauncherOutput, RanksWaitForAPipeThatIsNotRead) {
  const TempDir folder;
  const std::string pipeline = "\"$@\" | (sleep 2; ls " + folder.path() + " >&2; cat)";
  const std::string script = kProbe + " flood 100000; touch " + (folder / "done");
  const ProcessResult exit =
      run_process({.argv = {"sh", "-c", pipeline, "sh", kLockstep, "run", "-n", "2", "sh", "-c", script}});
  EXPECT_EQ(exit.code, 0);
  EXPECT_EQ(exit.out.size(), 2u * 100000 * 104);
  EXPECT_THAT(exit.err, Not(HasSubstr("done"))) << "no rank has ended while nobody reads";
}

TEST(LauncherOutput, TheEndWaitsForTheReaderUntilCtrlC) {
  SpawnOptions options = lockstep_run({"-n", "1", kProbe, "flood", "1500"});  // more than a pipe, less than a window
  options.read_out = false;
  Process process(options);
  EXPECT_TRUE(process.wait_for("waiting until the rest of the output has been read", Deadline::in(10s)));
  process.signal(SIGINT);
  const ProcessResult exit = process.wait(Deadline::in(10s));
  EXPECT_EQ(exit.code, 130);
  EXPECT_THAT(exit.err, HasSubstr("lines were dropped"));
}

TEST(LauncherOutput, StdinGoesToTheRanksThatReadIt) {
  const auto run = [](const std::string& ranks) {
    return run_process(
        {.argv = {"sh", "-c",
                  "printf 'a\\nb\\n' | " + kLockstep + " run -n 3 --stdin " + ranks + " sh -c 'cat; echo end'"}});
  };
  EXPECT_THAT(sorted_lines(run("none").out), ElementsAre("", "[0] end", "[1] end", "[2] end"));
  EXPECT_THAT(sorted_lines(run("0").out), ElementsAre("", "[0] a", "[0] b", "[0] end", "[1] end", "[2] end"));
  EXPECT_THAT(sorted_lines(run("all").out),
              ElementsAre("", "[0] a", "[0] b", "[0] end", "[1] a", "[1] b", "[1] end", "[2] a", "[2] b", "[2] end"));
  const ProcessResult exit = run("1");
  EXPECT_EQ(exit.code, 64);
  EXPECT_THAT(fatal_in(exit.err).detail, AllOf(HasSubstr("--stdin"), HasSubstr("none, 0 or all")));
}

TEST(LauncherOutput, AFullDiskIsAWarningAndAnExitCode) {
  const ProcessResult exit = run_process({.argv = {"sh", "-c", "exec " + kLockstep + " run -n 2 echo hi > /dev/full"}});
  EXPECT_EQ(exit.code, 74);
  EXPECT_EQ(exit.err, "lockstep: warning: cannot write to stdout: No space left on device; its end is missing\n");
}

TEST(LauncherOutput, FilesOfAnEarlierRunAreNotOverwritten) {
  const TempDir folder;
  const auto run = [&] { return run_process(lockstep_run({"-n", "2", "--output", folder / "logs", "echo", "hi"})); };
  EXPECT_EQ(run().code, 0);
  const ProcessResult exit = run();
  EXPECT_EQ(exit.code, 64);
  EXPECT_EQ(exit.out, "");
  EXPECT_THAT(fatal_in(exit.err).detail, HasSubstr("logs/rank.0.out\" exists, probably from an earlier run"));
  EXPECT_EQ(read_file(folder / "logs/rank.0.out"), "hi\n");
}

TEST(LauncherOutput, LongLinesAreWhole) {
  const ProcessResult exit =
      run_process(lockstep_run({"-n", "2", "sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x; echo; echo end$RANK"}));
  EXPECT_EQ(exit.code, 0);
  for (const char* rank : {"[0] ", "[1] "}) EXPECT_THAT(exit.out, HasSubstr(rank + std::string(1000000, 'x') + "\n"));
}

/// A terminal whose output the test may read or leave unread.
struct PseudoTerminal {
  base::Fd master, slave;
  PseudoTerminal() {
    int m = -1, s = -1;
    winsize size{24, 80, 0, 0};
    if (::openpty(&m, &s, nullptr, nullptr, &size) != 0) ADD_FAILURE() << "cannot open a pseudo-terminal";
    master.reset(m);
    slave.reset(s);
    ::fcntl(m, F_SETFD, FD_CLOEXEC);
    ::fcntl(s, F_SETFD, FD_CLOEXEC);
    base::set_nonblocking(m);
  }
  /// Returns the output so far.
  std::string read_all() const {
    std::string all;
    char bytes[4096];
    for (ssize_t size; (size = ::read(master.get(), bytes, sizeof bytes)) > 0;)
      all.append(bytes, static_cast<std::size_t>(size));
    return all;
  }
};

TEST(LauncherOutput, BlockedTerminalDoesNotBlockRanks) {
  const TempDir folder;
  const PseudoTerminal terminal;
  SpawnOptions options =
      lockstep_run({"-n", "2", "sh", "-c", kProbe + " flood 200000; echo done >> " + (folder / "done")});
  options.out = options.err = terminal.slave.get();
  Process process(options);
  EXPECT_EQ(process.wait(Deadline::in(30s)).code, 0);
  EXPECT_EQ(read_file(folder / "done"), "done\ndone\n");
}

TEST(LauncherOutput, ProgressBarIsErasedOnTerminal) {
  const PseudoTerminal terminal;
  const TempDir folder;
  // Rank 1 prints while the bar of rank 0 is on the screen.
  SpawnOptions options = lockstep_run(
      {"-n", "2", "sh", "-c",
       "cd " + folder.path() +
           "; if [ $RANK = 0 ]; then echo columns $LOCKSTEP_TERMINAL; printf 'a long bar 10%%\\r'; touch bar; while [ "
           "! -e printed ]; do sleep 0.01; done; sleep 0.2; printf '\\rdone\\n'; else while [ ! -e bar ]; do sleep "
           "0.01; done; sleep 0.2; echo hi; touch printed; fi"},
      {{"TERM", "xterm"}});
  options.out = options.err = terminal.slave.get();
  Process process(options);
  EXPECT_EQ(process.wait(Deadline::in(30s)).code, 0);
  const std::string erase = "\r\x1b[K";
  EXPECT_EQ(terminal.read_all(), "[0] columns 76\r\n" + erase + "[0] a long bar 10%" + erase +
                                     "[1] hi\r\n[0] a long bar 10%" + erase + "[0] done\r\n");
}

TEST(LauncherOutput, NoTerminalVariableWithoutTerminal) {
  EXPECT_EQ(run_process(shell_ranks(1, "echo \"<$LOCKSTEP_TERMINAL>\"")).out, "[0] <>\n");
}

}  // namespace
}  // namespace lockstep::tests
