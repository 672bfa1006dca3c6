// Tests the process state with which ranks start, and errors that are reported before any rank starts.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>

#include "lockstep/base/parse.h"
#include "tests/support/lockstep_run.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LauncherStart, TheEnvironmentIsComplete) {
  const ProcessResult exit =
      run_process(lockstep_run({"-n", "2", "--transport", "tcp", "--hang-timeout", "12", "--join-timeout", "9", "env"},
                               {{"TORCHELASTIC_RUN_ID", "outer"}, {"RANK", "9"}, {"KEPT", "a b"}}));
  ASSERT_EQ(exit.code, 0) << exit.err;
  for (const char* line : {"LOCKSTEP_RANK=1",
                           "LOCKSTEP_LOCAL_RANK=1",
                           "LOCKSTEP_WORLD_SIZE=2",
                           "LOCKSTEP_LOCAL_WORLD_SIZE=2",
                           "LOCKSTEP_NODE_RANK=0",
                           "LOCKSTEP_NUM_NODES=1",
                           "LOCKSTEP_STORE=127.0.0.1:",
                           "LOCKSTEP_JOB=",
                           "RANK=1",
                           "LOCAL_RANK=1",
                           "WORLD_SIZE=2",
                           "LOCAL_WORLD_SIZE=2",
                           "GROUP_RANK=0",
                           "NODE_RANK=0",
                           "ROLE_RANK=1",
                           "ROLE_WORLD_SIZE=2",
                           "TORCHELASTIC_RUN_ID=",
                           "TORCHELASTIC_USE_AGENT_STORE=False",
                           "TORCHELASTIC_ERROR_FILE=/",
                           "MASTER_ADDR=127.0.0.1",
                           "MASTER_PORT=",
                           "OMP_NUM_THREADS=",
                           "LOCKSTEP_TRANSPORT=tcp",
                           "LOCKSTEP_TIMEOUT=22",
                           "LOCKSTEP_PAGE=",
                           "LOCKSTEP_JOIN_TIMEOUT=9",
                           "KEPT=a b"})
    EXPECT_THAT(exit.out, HasSubstr("\n[1] " + std::string(line)));
  EXPECT_THAT(exit.out, Not(HasSubstr("TORCHELASTIC_RUN_ID=outer")));
  EXPECT_THAT(exit.out, Not(HasSubstr("] RANK=9")));
}

TEST(LauncherStart, UserOmpNumThreadsIsKept) {
  EXPECT_EQ(
      run_process(lockstep_run({"-n", "1", "sh", "-c", "echo $OMP_NUM_THREADS"}, {{"OMP_NUM_THREADS", "17"}})).out,
      "[0] 17\n");
}

TEST(LauncherStart, ArgumentsAreUnchanged) {
  const TempDir folder;
  const std::string script =
      folder.write("show", "#!/bin/sh\nfor a; do printf '%s' \"$a\" | od -An -tx1 | tr -d ' \\n'; echo; done\n");
  ::chmod(script.c_str(), 0755);
  const ProcessResult exit =
      run_process(lockstep_run({"-n", "1", script, "", "a b", "'\"$HOME`;", "\n", "\xff\x80", "-n", "--"}));
  EXPECT_EQ(exit.out, "[0] \n[0] 612062\n[0] 272224484f4d45603b\n[0] 0a\n[0] ff80\n[0] 2d6e\n[0] 2d2d\n");
}

TEST(LauncherStart, PassLocalRankAppendsArgument) {
  EXPECT_THAT(run_process(lockstep_run({"-n", "2", "--pass-local-rank", "echo", "a"})).out,
              HasSubstr("[1] a --local_rank=1\n"));
  EXPECT_THAT(run_process(lockstep_run({"-n", "2", "--pass-local-rank=lr", "echo", "a"})).out,
              HasSubstr("[1] a --lr=1\n"));
}

TEST(LauncherStart, NoDescriptorIsInherited) {
  // The shell passes descriptor 7, which is not close-on-exec, to the launcher.
  const ProcessResult exit =
      run_process({.argv = {"sh", "-c", "exec 7</dev/null; exec " + kLockstep + " run -n 2 " + kProbe + " fds"}});
  EXPECT_EQ(exit.code, 0);
  for (int rank = 0; rank < 2; ++rank)
    for (int fd = 0; fd < 20; ++fd) {
      const auto line = "[" + std::to_string(rank) + "] fd " + std::to_string(fd) + "\n";
      if (fd <= 2)
        EXPECT_THAT(exit.out, HasSubstr(line));
      else
        EXPECT_THAT(exit.out, Not(HasSubstr(line)));
    }
  for (const char* page : {"[0] page\n", "[1] page\n"}) {
    EXPECT_THAT(exit.out, HasSubstr(page));
    EXPECT_EQ(exit.out.find(page), exit.out.rfind(page));
  }
}

TEST(LauncherStart, RanksLeadSessionsAndDieWithAgent) {
  EXPECT_EQ(run_process(lockstep_run({"-n", "1", kProbe, "session"})).out, "[0] leader 1 group 1 deathsig 9\n");
  EXPECT_EQ(run_process(lockstep_run({"-n", "1", kProbe, "stdin"})).out, "[0] stdin 0\n");
}

TEST(LauncherStart, SignalDispositionsAreReset) {
  const ProcessResult exit = run_process(
      {.argv = {"sh", "-c", "trap '' INT PIPE TERM USR1; exec " + kLockstep + " run -n 1 " + kProbe + " signals"}});
  EXPECT_EQ(exit.out, "[0] signals blocked or ignored: 0\n");
}

std::set<std::string> words_of(const std::string& line) {
  const auto words = base::split(line, ' ');
  return {words.begin() + 2, words.end()};
}

TEST(LauncherStart, CoresAreDividedBetweenRanks) {
  cpu_set_t mask;
  ASSERT_EQ(::sched_getaffinity(0, sizeof mask, &mask), 0);
  const auto lines_of = [](const Words& words) { return base::split(run_process(lockstep_run(words)).out, '\n'); };
  const auto all = lines_of({"-n", "2", "--bind", "none", kProbe, "cpus"});
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(words_of(all[0]).size(), static_cast<std::size_t>(CPU_COUNT(&mask)));
  if (CPU_COUNT(&mask) < 2) GTEST_SKIP() << "one CPU cannot be divided";
  const auto half = lines_of({"-n", "2", kProbe, "cpus"});
  ASSERT_EQ(half.size(), 3u);
  std::set<std::string> both = words_of(half[0]);
  for (const std::string& cpu : words_of(half[1]))
    EXPECT_TRUE(both.insert(cpu).second) << "two ranks share CPU " << cpu;
  EXPECT_EQ(both.size(), static_cast<std::size_t>(CPU_COUNT(&mask)));
}

TEST(LauncherStart, InheritedCpuMaskIsRespected) {
  const ProcessResult exit = run_process(
      {.argv = {"sh", "-c",
                "taskset -c $(taskset -cp $$ | sed 's/.*[ ,-]//') " + kLockstep + " run " + kProbe + " cpus"}});
  EXPECT_EQ(words_of(base::split(exit.out, '\n')[0]).size(), 1u) << exit.out << exit.err;
}

TEST(LauncherStart, InvalidArgumentsAreOneLineAndStartNothing) {
  const TempDir folder;
  const std::string mark = folder / "started";
  const std::string plain = folder.write("plain", "text");
  const std::vector<std::pair<Words, std::string>> cases = {
      {{"-n", "0", "touch", mark}, "-n is \"0\""},
      {{"-np", "12a", "touch", mark}, "-n is \"12a\""},
      {{"-n", "4097", "touch", mark}, "1 to 4096"},
      {{"--transport", "tcpp", "touch", mark}, "--transport is \"tcpp\""},
      {{"--bind", "x", "touch", mark}, "--bind is \"x\""},
      {{"--grace", "-1", "touch", mark}, "--grace is \"-1\""},
      {{"--what", "touch", mark}, "unknown option \"--what\""},
      {{"-n", "2"}, "no program"},
      {{"-n", "2", folder / "nowhere"}, "No such file"},
      {{"-n", "2", "no-such-program-anywhere"}, "not found in PATH"},
      {{"-n", "2", plain}, "not executable"},
      {{"-n", "2", folder.path()}, "not a file"},
  };
  for (const auto& [words, text] : cases) {
    const ProcessResult exit = run_process(lockstep_run(words));
    EXPECT_EQ(exit.code, 64) << text;
    EXPECT_EQ(exit.out, "");
    EXPECT_EQ(std::count(exit.err.begin(), exit.err.end(), '\n'), 1) << exit.err;
    const job::Fatal fatal = fatal_in(exit.err);
    EXPECT_EQ(fatal.cause, base::Cause::kBadArg);
    EXPECT_THAT(fatal.detail, HasSubstr(text));
  }
  EXPECT_FALSE(std::filesystem::exists(mark));
}

TEST(LauncherStart, ExecFormatErrorIsABadArgument) {
  const TempDir folder;
  const std::string script = folder.write("script", "echo no first line\n");
  ::chmod(script.c_str(), 0755);
  const ProcessResult exit = run_process(lockstep_run({"-n", "3", script}));
  EXPECT_EQ(exit.code, 64);
  EXPECT_EQ(fatal_in(exit.err).cause, base::Cause::kBadArg);
  EXPECT_THAT(fatal_in(exit.err).detail, AllOf(HasSubstr(script), HasSubstr("Exec format error")));
}

TEST(LauncherStart, ProgramsThatCannotStartAreRefusedBeforeAnyRank) {
  const TempDir folder;
  const auto refused = [&](const std::string& program) {
    const ProcessResult exit = run_process(lockstep_run({"-n", "2", program}));
    EXPECT_EQ(exit.code, 64) << exit.err;
    EXPECT_EQ(exit.out, "");
    EXPECT_EQ(std::count(exit.err.begin(), exit.err.end(), '\n'), 1) << exit.err;
    return fatal_in(exit.err).detail;
  };
  const auto executable = [&](const std::string& name, const std::string& content) {
    const std::string path = folder.write(name, content);
    ::chmod(path.c_str(), 0755);
    return path;
  };
  EXPECT_THAT(refused(executable("script", "#!/no/such/shell -e\necho hi\n")),
              HasSubstr("its first line names the interpreter \"/no/such/shell\""));
  if (std::filesystem::exists("/proc/sys/fs/binfmt_misc/status")) return;  // it may start programs of other machines
  std::string program = read_file("/proc/self/exe").substr(0, 4096);
  const bool is_aarch64 = static_cast<unsigned char>(program[18]) == 0xb7;  // e_machine
  program[18] = static_cast<char>(is_aarch64 ? 0x3e : 0xb7), program[19] = 0;
  EXPECT_THAT(refused(executable("foreign", program)),
              HasSubstr(is_aarch64 ? "it is built for x86_64, and this host is aarch64"
                                   : "it is built for aarch64, and this host is "));
}

TEST(LauncherStart, WhatAShellPrintsInsteadOfTheAgentIsQuoted) {
  const TempDir folder;
  const std::string ssh = folder / "ssh";
  for (const auto& [script, expected] :
       {std::pair<std::string, std::string>{"echo 'Welcome to node17!'; exec cat", "Welcome to node17!"},
        {"echo 'This account is currently not available.'; exit 1", "This account is currently not available."},
        {"echo bye; exit 3", "bye"}}) {
    folder.write("ssh", "#!/bin/sh\n[ \"$1\" = -V ] && { echo OpenSSH_9.2p1 >&2; exit; }\n" + script + "\n");
    ::chmod(ssh.c_str(), 0755);
    const ProcessResult exit = run_process(
        {.argv = {"sh", "-c", "PATH=" + folder.path() + ":$PATH exec " + kLockstep + " run -H alpha:1,beta:1 true"}});
    EXPECT_EQ(exit.code, 64);
    EXPECT_THAT(exit.err, HasSubstr(expected));
  }
}

TEST(LauncherStart, DeletedCurrentDirectoryIsNamed) {
  const ProcessResult exit =
      run_process({.argv = {"sh", "-c", "d=$(mktemp -d); cd $d; rmdir $d; exec " + kLockstep + " run -n 1 true"}});
  EXPECT_EQ(exit.code, 64);
  EXPECT_THAT(fatal_in(exit.err).detail, HasSubstr("the current directory cannot be used: No such file or directory"));
  const ProcessResult elsewhere = run_process(
      {.argv = {"sh", "-c", "d=$(mktemp -d); cd $d; rmdir $d; exec " + kLockstep + " run -n 1 --cwd / pwd"}});
  EXPECT_EQ(elsewhere.code, 0) << elsewhere.err;
  EXPECT_THAT(elsewhere.out, HasSubstr("/\n"));
}

// The agent would kill the processes that have these numbers here.
TEST(LauncherStart, ProcOfAnotherPidNamespaceIsRefused) {
  if (run_process({.argv = {"unshare", "--pid", "--fork", "true"}}).code != 0)
    GTEST_SKIP() << "no PID namespace can be made here";
  const ProcessResult exit = run_process({.argv = {"unshare", "--pid", "--fork", kLockstep, "run", "-n", "1", "true"}});
  EXPECT_EQ(exit.code, 64);
  EXPECT_THAT(fatal_in(exit.err).detail, HasSubstr("/proc does not show the processes of this PID namespace"));
  EXPECT_THAT(fatal_in(exit.err).hint, HasSubstr("mount -t proc"));
}

TEST(LauncherStart, VariablesOfRanksAreCheckedFirst) {
  for (const Words& options : {Words{"-n", "2"}, Words{"-n", "2", "-x", "LOCKSTEP_ARENA=maybe"}}) {
    Words words = options;
    words.insert(words.end(), {"echo", "ran"});
    const bool by_option = options.size() > 2;
    std::map<std::string, std::string> environment;
    if (!by_option) environment["LOCKSTEP_ARENA"] = "maybe";
    const ProcessResult exit = run_process(lockstep_run(words, environment));
    EXPECT_EQ(exit.code, 64);
    EXPECT_EQ(exit.out, "");
    EXPECT_EQ(fatal_in(exit.err).detail, "LOCKSTEP_ARENA is \"maybe\"; expected on or off");
  }
  const ProcessResult exit = run_process(lockstep_run({"-n", "2", "echo", "ran"}, {{"LOCKSTEP_TRANSPROT", "shm"}}));
  EXPECT_EQ(exit.code, 0);
  EXPECT_EQ(
      exit.err,
      "lockstep: warning: the variable \"LOCKSTEP_TRANSPROT\" does not exist; did you mean LOCKSTEP_TRANSPORT?\n");
}

TEST(LauncherStart, TooFewDescriptorsAreReportedBeforeStart) {
  const TempDir folder;
  const ProcessResult exit = run_process(
      {.argv = {"sh", "-c", "ulimit -n 100; exec " + kLockstep + " run -n 64 touch " + (folder / "started")}});
  EXPECT_EQ(exit.code, 74);
  EXPECT_EQ(fatal_in(exit.err).cause, base::Cause::kResource);
  EXPECT_THAT(fatal_in(exit.err).detail, AllOf(HasSubstr("512"), HasSubstr("100")));
  EXPECT_FALSE(std::filesystem::exists(folder / "started"));
}

TEST(LauncherStart, SoftDescriptorLimitIsRaisedForLauncherOnly) {
  const ProcessResult exit =
      run_process({.argv = {"sh", "-c", "ulimit -Sn 70; exec " + kLockstep + " run -n 8 sh -c 'ulimit -Sn'"}});
  EXPECT_EQ(exit.code, 0) << exit.err;
  EXPECT_THAT(exit.out, HasSubstr("[7] 70\n"));
}

TEST(LauncherStart, ClosedStandardDescriptorsAreTolerated) {
  const TempDir folder;
  const ProcessResult exit = run_process({.argv = {"sh", "-c",
                                                   "exec " + kLockstep + " run -n 2 sh -c 'echo x; echo y >&2; touch " +
                                                       (folder / "ran") + "' <&- >&- 2>&-"}});
  EXPECT_EQ(exit.code, 0);
  EXPECT_TRUE(std::filesystem::exists(folder / "ran"));
}

TEST(LauncherStart, ManyRanks) {
  const ProcessResult exit = run_process(lockstep_run({"-n", "64", "sh", "-c", "echo $RANK"}));
  EXPECT_EQ(exit.code, 0);
  for (int rank = 0; rank < 64; ++rank) {
    const std::string number = std::to_string(rank);
    EXPECT_THAT(exit.out, HasSubstr("[" + number + "] " + number + "\n"));
  }
}

TEST(LauncherStart, StartsTwoRanksWithin100Milliseconds) {
  // The minimum of several runs, because the machine may be busy.
  std::chrono::milliseconds best = 10s;
  for (int i = 0; i < 10; ++i) best = std::min(best, run_process(lockstep_run({"-n", "2", "/bin/true"})).elapsed);
  EXPECT_LE(best, 100ms);
}

TEST(LauncherStart, TorchDistributedWorksUnchanged) {
  const std::string python = LOCKSTEP_TEST_PYTHON;
  if (python.empty()) GTEST_SKIP() << "no .deps/python: scripts/setup.sh installs it";
  const ProcessResult exit = run_process(
      lockstep_run({"-n", "2", python, std::string(LOCKSTEP_TEST_SUPPORT_DIR) + "/torch_all_reduce.py"}), 100s);
  EXPECT_EQ(exit.code, 0) << exit.err;
  EXPECT_THAT(exit.out, AllOf(HasSubstr("[0] rank 0 of 2: sum 3\n"), HasSubstr("[1] rank 1 of 2: sum 3\n")));
}

TEST(LauncherStart, LaunchStartsTheProgram) {
  const ProcessResult exit =
      run_process({.argv = {kProbe, "launch", "2", "a b", "--"}, .env = {{"LOCKSTEP_PROGRAM", kLockstep}}});
  EXPECT_EQ(exit.code, 0) << exit.err;
  EXPECT_THAT(exit.out, AllOf(HasSubstr("[0] rank 0: <a b> <-->\n"), HasSubstr("[1] rank 1: <a b> <-->\n")));
  const ProcessResult bad =
      run_process({.argv = {kProbe, "launch", "2", "fail"}, .env = {{"LOCKSTEP_PROGRAM", kLockstep}}});
  EXPECT_EQ(bad.code, 9);
}

TEST(LauncherStart, LaunchReturnsInARank) {
  EXPECT_EQ(run_process({.argv = {kProbe, "launch", "2"}, .env = {{"LOCKSTEP_RANK", "5"}}}).out, "rank 5:\n");
  EXPECT_EQ(run_process({.argv = {kProbe, "launch", "2"}, .env = {{"RANK", "0"}, {"WORLD_SIZE", "4"}}}).out,
            "rank none:\n");
}

TEST(LauncherStart, LaunchReportsErrors) {
  EXPECT_THAT(run_process({.argv = {kProbe, "launch", "2"}, .env = {{"LOCKSTEP_PROGRAM", "/nowhere"}}}).out,
              HasSubstr("LOCKSTEP_PROGRAM is \"/nowhere\""));
  EXPECT_THAT(run_process({.argv = {kProbe, "launch", "5000"}}).out, HasSubstr("ranks is 5000; expected"));
  const TempDir folder;
  const std::string copy = folder / "program";
  std::filesystem::copy_file(kProbe, copy);
  EXPECT_THAT(run_process({.argv = {copy, "launch", "2"}, .env = {{"PATH", "/nowhere"}}}).out,
              AllOf(HasSubstr("was not found"), HasSubstr(folder.path()), HasSubstr("/nowhere")));
  std::filesystem::create_symlink(kLockstep, folder / "lockstep");
  EXPECT_EQ(run_process({.argv = {copy, "launch", "1", "x"}, .env = {{"PATH", "/usr/bin"}}}).out, "[0] rank 0: <x>\n");
}

}  // namespace
}  // namespace lockstep::tests
