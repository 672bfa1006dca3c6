// A thread of a rank that publishes that the process is alive and whether it makes progress.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/job/store.h"

namespace lockstep::job {

/// Starts a thread that once per second increments RankPage::heartbeats, which the agent watches, and, if the process
/// has made progress since the last time, publishes RankPage::progress() under key::progress(rank) in the store, which
/// waiting ranks read. While RankPage::busy_depth is positive, each beat counts as progress. The thread blocks all
/// signals, and no other thread waits for it except the destructor, which blocks for at most 5 s. Errors of the store
/// are ignored: the callers that need the store report them.
class Heartbeat {
 public:
  /// If `store` is null, the thread writes only the page.
  Heartbeat(std::shared_ptr<Store> store, int rank);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

 private:
  void run();

  std::shared_ptr<Store> store_;
  const int rank_;
  std::mutex mutex_;  // guards stop_
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;  // last, because it uses the other members
};

/// Returns the progress counters that the heartbeats of `ranks` have published in the store, as one text that changes
/// whenever one of these ranks makes progress. Throws CommError kCoordinatorLost.
std::string read_progress(Store& store, const std::vector<int>& ranks, base::Deadline deadline);

}  // namespace lockstep::job
