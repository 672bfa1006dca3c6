// A thread of a rank that publishes once per second that the process is alive and whether it makes progress.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/job/store.h"

namespace lockstep::job::health {

/// Runs a thread. Once per second it increments RankPage::heartbeats, which the agent monitors. If the process has made
/// progress since the previous heartbeat, it also publishes RankPage::progress() in the store under
/// key::progress(rank), which waiting ranks read. While RankPage::busy_depth is positive, or the agent sees that the
/// process works, each heartbeat counts as progress.
///
/// The thread blocks all signals. It ignores errors of the store; callers that need the store report them. The
/// destructor joins the thread and blocks for at most 10 s, the longest time that a request to the store takes.
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

/// Returns the progress counters that the heartbeats of `ranks` have published in the store, as one text. The text
/// changes when one of these ranks has made progress. Blocks as Store::find() does. Throws CommError kCoordinatorLost.
std::string read_progress(Store& store, const std::vector<int>& ranks, base::Deadline deadline);

}  // namespace lockstep::job::health
