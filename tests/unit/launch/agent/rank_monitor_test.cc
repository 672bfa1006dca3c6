#include "lockstep/launch/agent/rank_monitor.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

namespace lockstep::launcher::agent {
namespace {

using namespace std::chrono_literals;
using base::telemetry::RankPage;

/// A rank that does nothing, whose page and CPU time the tests write.
class FakeRank {
 public:
  FakeRank()
      : pid_(::fork()),
        page_(static_cast<RankPage*>(
            ::mmap(nullptr, sizeof(RankPage), PROT_READ | PROT_WRITE, MAP_SHARED, monitor_.descriptor(), 0))) {
    if (pid_ == 0)
      for (;;) ::pause();
    base::telemetry::publish_to(*page_, {.rank = 0, .world_size = 2, .job = "job", .transport = "shm"});
    page_->pid.store(pid_);
  }
  ~FakeRank() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    ::munmap(page_, sizeof(RankPage));
  }
  FakeRank(const FakeRank&) = delete;
  FakeRank& operator=(const FakeRank&) = delete;

  RankPage& page() { return *page_; }
  job::health::RankHealth health(std::chrono::seconds at) { return monitor_.health(pid_, start_ + at); }
  /// As the agent does once per second. Returns whether the rank works.
  bool works(std::chrono::seconds at, std::chrono::milliseconds cpu_time) {
    const auto now = start_ + at;
    job::health::RankHealth health = monitor_.health(pid_, now);
    if (monitor_.needs_activity()) monitor_.add_activity(pid_, {{{pid_, {1, cpu_time}}}, {}}, now, health);
    return page_->works != 0;
  }

 private:
  RankMonitor monitor_{0, job::JobKey()};
  const pid_t pid_;
  RankPage* const page_;
  const job::health::StallTimer::Clock::time_point start_ = job::health::StallTimer::Clock::now();
};

TEST(RankMonitor, WorksIfItUsesTheCpuWithoutAReport) {
  FakeRank rank;
  for (int second = 0; second < 3; ++second) EXPECT_FALSE(rank.works(std::chrono::seconds(second), second * 900ms));
  EXPECT_TRUE(rank.works(3s, 2700ms));
  EXPECT_FALSE(rank.works(4s, 2710ms));
  EXPECT_TRUE(rank.works(5s, 3600ms));
  rank.page().steps.store(1);
  EXPECT_FALSE(rank.works(6s, 4500ms));
}

// A rank that was measured just before it reported a step, and hangs after it: the step is not work that goes on.
TEST(RankMonitor, WorkBeforeAReportDoesNotCount) {
  FakeRank rank;
  for (int second = 0; second < 3; ++second) EXPECT_FALSE(rank.works(std::chrono::seconds(second), 0ms));
  rank.page().steps.store(1);
  for (int second = 3; second < 8; ++second) EXPECT_FALSE(rank.works(std::chrono::seconds(second), 900ms)) << second;
}

TEST(RankMonitor, MainThreadThatWaitsDoesNotWorkWhateverCpuTimeItUses) {
  FakeRank rank;
  rank.page().waiting.store(1);
  rank.page().main_waiting.store(1);
  for (int second = 0; second < 6; ++second) EXPECT_FALSE(rank.works(std::chrono::seconds(second), second * 900ms));
  EXPECT_TRUE(rank.health(6s).is_waiting);
}

TEST(RankMonitor, ThreadThatWaitsDoesNotKeepTheOthersFromWorking) {
  FakeRank rank;
  rank.page().waiting.store(1);
  for (int second = 0; second < 4; ++second) rank.works(std::chrono::seconds(second), second * 900ms);
  EXPECT_TRUE(rank.page().works != 0);
  EXPECT_FALSE(rank.health(4s).is_waiting);
  rank.works(5s, 2700ms);
  rank.works(6s, 2700ms);
  EXPECT_TRUE(rank.health(7s).is_waiting);
}

// As with DistributedDataParallel of torch, of whose wait only the operation is seen.
TEST(RankMonitor, RankWithARunningOperationThatDoesNoWorkWaits) {
  FakeRank rank;
  rank.page().flight.begin({.channel = rank.page().flight.add_channel("world"), .seq = 1, .kind = "all_reduce"});
  for (int second = 0; second < 4; ++second) rank.works(std::chrono::seconds(second), second * 900ms);
  EXPECT_FALSE(rank.health(4s).is_waiting);
  for (int second = 5; second < 7; ++second) rank.works(std::chrono::seconds(second), 2700ms);
  EXPECT_TRUE(rank.health(7s).is_waiting);
}

TEST(RankMonitor, RankThatHasLeftItsWorldMakesProgressWhileItWorks) {
  FakeRank rank;
  rank.page().has_left.store(1);
  for (int second = 0; second < 6; ++second) rank.works(std::chrono::seconds(second), second * 900ms);
  EXPECT_EQ(rank.health(6s).phase, job::health::RankPhase::kAfterWorld);
  EXPECT_LE(rank.health(6s).since_progress, 1s);
  EXPECT_GE(rank.health(6s).since_report, 5s);
  for (int second = 7; second < 12; ++second) rank.works(std::chrono::seconds(second), 4500ms);
  EXPECT_GE(rank.health(12s).since_progress, 4s);
}

}  // namespace
}  // namespace lockstep::launcher::agent
