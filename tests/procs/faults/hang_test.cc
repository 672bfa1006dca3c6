// Tests the detection of ranks without progress: the agent detects and reports them, writes their stacks, and all ranks
// receive the cause. Ranks that announce long work are not reported.
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/support/lockstep_run.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Returns the options that start `lockstep run OPTIONS... fault_probe WORDS...` in `folder`.
SpawnOptions fault_probe_job(const TempDir& folder, const Words& options, const Words& words) {
  SpawnOptions spawn = lockstep_run(options);
  spawn.argv.insert(spawn.argv.end(), {"--", LOCKSTEP_FAULT_PROBE_PATH});
  spawn.argv.insert(spawn.argv.end(), words.begin(), words.end());
  spawn.argv.insert(spawn.argv.begin(), {"sh", "-c", "cd " + folder.path() + " && exec \"$@\"", "sh"});
  return spawn;
}

std::string content(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

struct HangCase {
  const char* what;
  const char* function;  // must be in the reported stack
  const char* limit;
  const char* detail;
  friend void PrintTo(const HangCase& one, std::ostream* out) { *out << one.what; }
};

class Hang : public ::testing::TestWithParam<HangCase> {};

TEST_P(Hang, StuckRankIsReportedWithStack) {
  const TempDir folder;
  const ProcessResult exit = run_process(fault_probe_job(
      folder, {"-n", "3", "--bind", "none", GetParam().limit, "3", "--name", "it"}, {GetParam().what, "1"}));
  EXPECT_EQ(exit.code, 124);
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(fatal.cause, base::Cause::kRankStuck);
  EXPECT_EQ(fatal.rank, 1);
  EXPECT_THAT(
      fatal.detail,
      AllOf(HasSubstr(GetParam().detail + std::string("; ranks 0,2 wait in all_reduce(votes)#4 of world, 4096 bytes of "
                                                      "float32")),
            HasSubstr("rank 1 finished 0 steps and is in user code")));
  EXPECT_THAT(fatal.hint, HasSubstr("runs/it/stack.1.txt"));
  EXPECT_THAT(content(folder.path() + "/runs/it/stack.1.txt"),
              AllOf(HasSubstr("rank 1, process " + std::to_string(fatal.pid)), HasSubstr(GetParam().function)));
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/runs/it/stack.0.txt"));
  EXPECT_THAT(exit.err, AllOf(HasSubstr("lockstep: where the ranks were:"),
                              HasSubstr("ranks 0,2, step 0: waits in all_reduce(votes)#4"),
                              HasSubstr("rank 1, step 0: in user code; last finished all_reduce(votes)#3"),
                              HasSubstr("rank 1 has not reached all_reduce(votes)#4")));
  EXPECT_EQ(count(exit.out, "error: RANK_STUCK all_reduce(votes)#4: " + std::string(GetParam().detail)), 2u)
      << exit.out;
  EXPECT_LT(exit.elapsed, 11s);
}

INSTANTIATE_TEST_SUITE_P(All, Hang,
                         ::testing::Values(HangCase{"loop", "loop_forever", "--work-timeout",
                                                    "it has worked for 3 s without reporting progress"},
                                           HangCase{"deadlock", "self_deadlock", "--hang-timeout",
                                                    "no progress for 3 s"}),
                         [](const auto& one) { return std::string(one.param.what); });

TEST(Stall, StoppedRankIsReportedWithStack) {
  const TempDir folder;
  const ProcessResult exit = run_process(
      fault_probe_job(folder, {"-n", "3", "--bind", "none", "--stall-timeout", "6", "--name", "it"}, {"stop", "2"}));
  EXPECT_EQ(exit.code, 124);
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(fatal.cause, base::Cause::kRankStalled);
  EXPECT_EQ(fatal.rank, 2);
  EXPECT_THAT(fatal.detail, AllOf(HasSubstr("no heartbeat for 6 s; the process is stopped by a signal (state T)"),
                                  HasSubstr("ranks 0,1 wait in all_reduce(votes)#4")));
  EXPECT_THAT(content(folder.path() + "/runs/it/stack.2.txt"), AllOf(HasSubstr("state T"), HasSubstr("raise")));
  EXPECT_THAT(exit.err, HasSubstr("WARN cause=RANK_STALLED rank=2"));
  EXPECT_LT(exit.elapsed, 14s);
}

TEST(Stall, ShortStopIsTolerated) {
  const TempDir folder;
  Process process(fault_probe_job(folder, {"-n", "3", "--bind", "none", "--stall-timeout", "6"}, {"stop", "2"}));
  std::vector<pid_t> stopped;
  ASSERT_TRUE(eventually(Deadline::in(20s), [&] {
    for (const pid_t pid : process.live_processes())
      if (content("/proc/" + std::to_string(pid) + "/stat").find(") T ") != std::string::npos) stopped.push_back(pid);
    return !stopped.empty();
  }));
  const auto since = std::chrono::steady_clock::now();
  ASSERT_TRUE(eventually(Deadline::in(3s), [&] { return std::chrono::steady_clock::now() - since > 2s; }));
  ::kill(stopped[0], SIGCONT);
  const ProcessResult exit = process.wait(Deadline::in(20s));
  EXPECT_EQ(exit.code, 0) << exit.err;
  EXPECT_EQ(count(exit.out, "sum 3072"), 3u) << exit.out;
}

class AnnouncedWork : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, AnnouncedWork, ::testing::Values("alive", "busy"));

TEST_P(AnnouncedWork, IsNotAHang) {
  const TempDir folder;  // the end of a process with libtorch may take seconds on a busy machine
  const ProcessResult exit = run_process(
      fault_probe_job(folder, {"-n", "2", "--bind", "none", "--hang-timeout", "5"}, {GetParam(), "0", "15"}));
  EXPECT_EQ(exit.code, 0) << exit.err;
  EXPECT_EQ(count(exit.out, "sum 2048"), 2u) << exit.out;
}

TEST(LongWork, EvaluationOnOneRankIsNotAHang) {
  const auto hashes_of = [](const char* seconds) {
    SpawnOptions spawn = lockstep_run({"-n", "3", "--bind", "none", "--hang-timeout", "5"});
    spawn.argv.insert(spawn.argv.end(), {"--", LOCKSTEP_TRAIN_PROBE_PATH, "evaluate", seconds});
    const ProcessResult exit = run_process(spawn);
    EXPECT_EQ(exit.code, 0) << exit.err;
    const std::size_t at = exit.out.find("hash ");
    const std::string hash = at == std::string::npos ? "none" : exit.out.substr(at, 21);
    EXPECT_EQ(count(exit.out, hash), 3u) << exit.out;
    return std::pair(hash, exit.elapsed);
  };
  const auto [hash_without, quick] = hashes_of("0");
  const auto [hash_with, slow] = hashes_of("20");
  EXPECT_EQ(hash_with, hash_without);
  EXPECT_GE(slow, 20s);
}

TEST(LongWork, WorkTimeoutAppliesToLastRank) {
  for (const char* ranks : {"1", "3"}) {
    const TempDir folder;
    const ProcessResult exit = run_process(fault_probe_job(
        folder, {"-n", ranks, "--bind", "none", "--work-timeout", "2", "--name", "it"}, {"after", "0"}));
    EXPECT_EQ(fatal_in(exit.err).cause, base::Cause::kRankStuck) << exit.err;
    EXPECT_EQ(fatal_in(exit.err).rank, 0);
    EXPECT_THAT(content(folder.path() + "/runs/it/stack.0.txt"), HasSubstr("loop_forever"));
    EXPECT_THAT(exit.out, HasSubstr("[0] loops\n"))
        << "a line is written at once, so that a rank that is killed shows it";
    EXPECT_LT(exit.elapsed, 10s);
  }
}

TEST(LongWork, SilentSleepIsAHang) {
  const TempDir folder;
  const ProcessResult exit =
      run_process(fault_probe_job(folder, {"-n", "2", "--bind", "none", "--hang-timeout", "2"}, {"work", "0", "20"}));
  EXPECT_EQ(fatal_in(exit.err).cause, base::Cause::kRankStuck);
  EXPECT_EQ(fatal_in(exit.err).rank, 0);
  EXPECT_THAT(fatal_in(exit.err).hint, HasSubstr("world.busy()"));
}

TEST(LongWork, SilentWorkIsNoHang) {
  const TempDir folder;
  const ProcessResult exit = run_process(
      fault_probe_job(folder, {"-n", "2", "--bind", "none", "--hang-timeout", "4"}, {"compute", "0", "14"}));
  EXPECT_EQ(exit.code, 0) << exit.err;
}

TEST(LongWork, HangTimeoutZeroDisablesDetection) {
  const TempDir folder;
  const ProcessResult exit =
      run_process(fault_probe_job(folder, {"-n", "2", "--bind", "none", "--hang-timeout", "0"}, {"work", "0", "4"}));
  EXPECT_EQ(exit.code, 0) << exit.err;
}

TEST(Hang, RankStuckInKernelEndsJob) {
  const TempDir folder;
  const ProcessResult exit = run_process(
      fault_probe_job(folder, {"-n", "3", "--bind", "none", "--hang-timeout", "3", "--name", "it"}, {"kernel", "1"}));
  EXPECT_EQ(exit.code, 124);
  EXPECT_EQ(fatal_in(exit.err).cause, base::Cause::kRankStuck);
  EXPECT_EQ(fatal_in(exit.err).rank, 1);
  EXPECT_THAT(content(folder.path() + "/runs/it/stack.1.txt"), HasSubstr("state D"));
  EXPECT_LT(exit.elapsed, 15s);
}

TEST(Hang, StackIsWrittenWhenOthersTimeOut) {
  const TempDir folder;
  const ProcessResult exit = run_process(
      fault_probe_job(folder, {"-n", "3", "--bind", "none", "--name", "it"}, {"short_deadline", "1", "1.5"}));
  EXPECT_EQ(exit.code, 124);
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(fatal.cause, base::Cause::kRankStuck);
  EXPECT_EQ(fatal.rank, 1);
  EXPECT_THAT(fatal.detail, HasSubstr("absent ranks: 1"));
  EXPECT_THAT(fatal.hint, HasSubstr("its stack is in runs/it/stack.1.txt"));
  EXPECT_THAT(content(folder.path() + "/runs/it/stack.1.txt"), HasSubstr("loop_forever"));
  EXPECT_LT(exit.elapsed, 10s);
}

TEST(Hang, StoppedLauncherIsTolerated) {
  const TempDir folder;
  Process process(fault_probe_job(folder, {"-n", "3", "--bind", "none", "--hang-timeout", "60"}, {"busy", "0", "16"}));
  ASSERT_TRUE(
      eventually(Deadline::in(20s), [&] { return process.live_processes().size() >= 5; }));  // launcher, agent, ranks
  const auto since = std::chrono::steady_clock::now();
  const auto passed = [&](auto time) { return [=] { return std::chrono::steady_clock::now() - since > time; }; };
  ASSERT_TRUE(eventually(Deadline::in(5s), passed(2s)));
  process.signal(SIGSTOP);
  ASSERT_TRUE(eventually(Deadline::in(20s), passed(15s)));  // longer than the deadline of requests to the store
  process.signal(SIGCONT);
  const ProcessResult exit = process.wait(Deadline::in(20s));
  EXPECT_EQ(exit.code, 0) << exit.err;
  EXPECT_EQ(count(exit.out, "sum 3072"), 3u) << exit.out;
}

TEST(SharedMemoryOfRanks, NeedsNoTemporaryFolder) {
  for (const std::string& temporary : {std::string("/nowhere"), std::string("/proc"), "/" + std::string(200, 'x')}) {
    const TempDir folder;
    SpawnOptions spawn = fault_probe_job(folder, {"-n", "2", "--bind", "none"}, {"none", "0"});
    spawn.env["TMPDIR"] = temporary;
    const ProcessResult exit = run_process(spawn);
    EXPECT_EQ(exit.code, 0) << exit.err;
    EXPECT_THAT(exit.err, HasSubstr("transport shm"));
  }
}

TEST(Loopback, ThatIsDownIsNamedAtOnce) {
  if (run_process({.argv = {"unshare", "--net", "true"}}).code != 0)
    GTEST_SKIP() << "no network namespace can be made here";
  const TempDir folder;
  SpawnOptions spawn = fault_probe_job(folder, {"-n", "2", "--bind", "none"}, {"none", "0"});
  spawn.argv.insert(spawn.argv.begin(), {"unshare", "--net"});
  const ProcessResult exit = run_process(spawn);
  EXPECT_EQ(exit.code, 74) << exit.err;
  EXPECT_THAT(exit.err, HasSubstr("Network is unreachable; the interface lo is down: ip link set lo up"));
  EXPECT_LT(exit.elapsed, 15s);
}

struct ExitCase {
  const char* what;
  int code;
  base::Cause cause;
  const char* detail;
  friend void PrintTo(const ExitCase& one, std::ostream* out) { *out << one.what; }
};

class FirstCause : public ::testing::TestWithParam<ExitCase> {};

TEST_P(FirstCause, IsTheSameOnAllRanks) {
  const ExitCase& end = GetParam();
  const TempDir folder;
  SpawnOptions spawn = fault_probe_job(folder, {"-n", "4", "--bind", "none"}, {end.what, "2"});
  spawn.argv[2] = "ulimit -c 0; " + spawn.argv[2];
  const ProcessResult exit = run_process(spawn);
  EXPECT_EQ(exit.code, end.code);
  const job::Fatal fatal = fatal_in(exit.err);
  EXPECT_EQ(fatal.cause, end.cause);
  EXPECT_EQ(fatal.rank, 2);
  EXPECT_THAT(fatal.detail, HasSubstr(end.detail));
  if (fatal.detail.find("no such thing") != std::string::npos) {  // all lines of what()
    EXPECT_THAT(fatal.detail, HasSubstr("no such thing\nand more of it"));
  }
  EXPECT_EQ(fatal.step, 0);
  EXPECT_EQ(count(exit.out, "error: " + std::string(name(end.cause)) + " all_reduce(votes)#4: "), 3u) << exit.out;
  EXPECT_EQ(count(exit.out, end.detail), 3u) << exit.out;
  EXPECT_LT(exit.elapsed, 5s);
}

INSTANTIATE_TEST_SUITE_P(
    All, FirstCause,
    ::testing::Values(ExitCase{"throw", 1, base::Cause::kRankExited, "std::runtime_error: no such thing"},
                      ExitCase{"nested", 1, base::Cause::kRankExited,
                               "std::runtime_error: no such label; then cannot load the batch"},
                      ExitCase{"odd", 1, base::Cause::kRankExited, "an exception of type "},
                      ExitCase{"usage", 78, base::Cause::kBadArg, "that is not allowed"},
                      ExitCase{"memory", 74, base::Cause::kResource, "std::bad_alloc"},
                      ExitCase{"allocate", 74, base::Cause::kResource, "arena: "},
                      ExitCase{"bare", 134, base::Cause::kRankDied,
                               "uncaught exception: std::runtime_error: no such thing"},
                      ExitCase{"segv", 139, base::Cause::kRankDied, "killed by SIGSEGV"},
                      ExitCase{"abort", 134, base::Cause::kRankDied, "killed by SIGABRT; its last message: a reason"},
                      ExitCase{"exit", 9, base::Cause::kRankExited, "exited with code 9"}),
    [](const auto& one) { return std::string(one.param.what); });

// The handler makes a call that the other ranks do not make, which they report first.
TEST(FirstCause, IsTheExceptionWhoseHandlerWaitsForTheOthers) {
  for (const char* rank : {"0", "2"}) {
    const TempDir folder;
    const ProcessResult exit = run_process(fault_probe_job(folder, {"-n", "3", "--bind", "none"}, {"clean_up", rank}));
    const job::Fatal fatal = fatal_in(exit.err);
    EXPECT_EQ(fatal.cause, base::Cause::kRankExited) << exit.err;
    EXPECT_EQ(fatal.rank, std::atoi(rank));
    EXPECT_THAT(fatal.detail, HasSubstr("std::runtime_error: no such label; then "));
    EXPECT_THAT(fatal.detail, HasSubstr("barrier()"));
    EXPECT_EQ(exit.code, 1);
  }
}

// Also of an error of the program's own in the words of one that has only lost another rank.
TEST(FirstCause, HasTheRemedyOfAKnownError) {
  for (const auto& [text, remedy] : {std::pair{"x: No space left on device", "see df"},
                                     std::pair{"x: Connection reset by peer", "another rank ended first"}}) {
    const TempDir folder;
    const ProcessResult exit =
        run_process(fault_probe_job(folder, {"-n", "2", "--bind", "none"}, {"text", "1", "0", text}));
    EXPECT_EQ(fatal_in(exit.err).rank, 1);
    EXPECT_THAT(fatal_in(exit.err).detail, HasSubstr(text));
    EXPECT_THAT(fatal_in(exit.err).hint, HasSubstr(remedy));
  }
}

}  // namespace
}  // namespace lockstep::tests
