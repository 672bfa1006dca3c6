#include "bench/harness/benchmark_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::bench {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using tests::message_of;
using tests::TempDir;
using namespace std::chrono_literals;

base::Deadline soon() { return base::Deadline::in(20s); }

Implementation shell(const std::string& script, int ranks = 1) {
  return {.name = "sh", .argv = {"/bin/sh", "-c", script, "sh", kPrefix}, .ranks = ranks};
}

TEST(BenchmarkJob, MeasuresAndStopsWhenRequestsEnd) {
  const TempDir folder;
  // Two ranks in one shell, which reads the requests of both.
  BenchmarkJob job(
      shell("exec 3>$1.answers 4<$1.0 5<$1.1; echo >&3; while read a b <&4 && read c d <&5; do echo $a.5 $((b + d)) "
            ">&3; done; echo done >$1.end",
            2),
      folder.path());
  EXPECT_THAT(job.wait_until_ready(soon()), IsEmpty());
  EXPECT_THAT(job.measure({3, 4}, soon()), ElementsAre(3.5, 8));
  EXPECT_THAT(job.measure({5, -1}, soon()), ElementsAre(5.5, -2));
  job.end(soon());
  EXPECT_EQ(tests::read_file(folder / "sh.end"), "done\n");
}

TEST(BenchmarkJob, EarlyExitIsAnErrorWithItsOutput) {
  const TempDir folder;
  BenchmarkJob job(shell("echo the reason; exit 3"), folder.path());
  EXPECT_THAT(message_of<base::CommError>([&] { job.wait_until_ready(soon()); }),
              AllOf(HasSubstr("sh exited with 3"), HasSubstr("the reason")));
}

TEST(BenchmarkJob, SilenceIsAnErrorAtTheDeadline) {
  const TempDir folder;
  BenchmarkJob job(shell("exec sleep 100"), folder.path());
  EXPECT_THAT(message_of<base::CommError>([&] { job.wait_until_ready(base::Deadline::in(100ms)); }),
              HasSubstr("sent no result in time"));
}

TEST(BenchmarkJob, NonNumericResultIsAnError) {
  const TempDir folder;
  BenchmarkJob job(shell("echo 1 two 3 >$1.answers; exec sleep 100"), folder.path());
  EXPECT_THAT(message_of<base::CommError>([&] { job.wait_until_ready(soon()); }), HasSubstr("not a list of numbers"));
}

TEST(BenchmarkJob, VariablesAreSetAndUnset) {
  const TempDir folder;
  ::setenv("BENCH_TEST_UNSET", "1", 1);
  Implementation implementation = shell("echo ${BENCH_TEST_SET:-0} ${BENCH_TEST_UNSET:-0} >$1.answers; read x <$1.0");
  implementation.env = {{"BENCH_TEST_SET", "7"}, {"BENCH_TEST_UNSET", ""}};
  BenchmarkJob job(implementation, folder.path());
  EXPECT_THAT(job.wait_until_ready(soon()), ElementsAre(7, 0));
}

TEST(BenchmarkJob, ReadsMemoryOfTheRanks) {
  const TempDir folder;
  BenchmarkJob job(shell("echo $$ >$1.0.pid; echo >$1.answers; read x <$1.0"), folder.path());
  job.wait_until_ready(soon());
  EXPECT_GT(job.pss_bytes(), 50'000u);
  EXPECT_LT(job.pss_bytes(), 10'000'000u);
}

TEST(BenchmarkJob, SignalInterruptsAWait) {
  const TempDir folder;
  throw_on_signals();
  BenchmarkJob job(shell("kill -TERM $PPID; exec sleep 100"), folder.path());
  EXPECT_THAT(message_of<base::Error>([&] { job.wait_until_ready(soon()); }), HasSubstr("stopped by SIGTERM"));
}

}  // namespace
}  // namespace lockstep::bench
