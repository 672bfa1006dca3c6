#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <ctime>
#include <vector>

#include "lockstep/launch/process/activity.h"

namespace lockstep::launcher::process {
namespace {

using namespace std::chrono_literals;

ProcessSample sample_at(std::chrono::milliseconds time, std::chrono::milliseconds cpu_time, pid_t pid = 7) {
  return {.pid = pid, .cpu_time = cpu_time, .taken = std::chrono::steady_clock::time_point(time)};
}

TEST(ProcessSample, ThisProcessIsMeasured) {
  ::prctl(PR_SET_NAME, "a) S 1 (b");  // a name that looks like the fields after it
  const ProcessSample before = sample_process(::getpid());
  EXPECT_EQ(before.pid, ::getpid());
  EXPECT_EQ(before.state, 'R');
  const std::vector<char> memory(100 << 20, 'x');
  const std::clock_t begun = std::clock();
  while (std::clock() - begun < CLOCKS_PER_SEC * 3 / 10) {
  }
  const ProcessSample after = sample_process(::getpid());
  EXPECT_GE(after.cpu_time - before.cpu_time, 280ms);
  EXPECT_GE(after.resident_bytes, before.resident_bytes + (99u << 20));
  EXPECT_GT(cpu_percent(before, after).value_or(0), 0);
}

TEST(ProcessSample, MissingProcessHasNoState) {
  const ProcessSample sample = sample_process(1 << 30);
  EXPECT_EQ(sample.state, '?');
  EXPECT_EQ(sample.resident_bytes, 0u);
}

TEST(ProcessSample, CpuPercentIsOfOneCore) {
  EXPECT_EQ(cpu_percent(sample_at(1s, 100ms), sample_at(3s, 2100ms)), 100);
  EXPECT_EQ(cpu_percent(sample_at(1s, 100ms), sample_at(3s, 100ms)), 0);
  EXPECT_EQ(cpu_percent(sample_at(1s, 0ms), sample_at(2s, 4s)), 400);
  EXPECT_EQ(cpu_percent(sample_at(1s, 0ms), sample_at(1150ms, 10ms)), std::nullopt) << "too short to tell";
  EXPECT_EQ(cpu_percent(sample_at(1s, 0ms, 7), sample_at(2s, 10ms, 8)), std::nullopt);
  EXPECT_EQ(cpu_percent(ProcessSample(), sample_at(2s, 10ms)), std::nullopt);
}

}  // namespace
}  // namespace lockstep::launcher::process
