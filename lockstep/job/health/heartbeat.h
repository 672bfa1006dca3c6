// A thread of a rank that does nothing but show that the process runs, and that it gets on.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/job/store.h"

namespace lockstep::job {

/// Once a second it counts on in this process's page, which its agent watches, and, when the process has got on since,
/// under key::progress(rank) in the store, where ranks that wait see it. While RankPage::busy is more than 0 it counts
/// as progress. Takes no signal, and nobody waits for it.
class Heartbeat {
 public:
  /// `store` may be null: then only the page is written.
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
  std::thread thread_;  // last: it uses the rest
};

/// How far ranks have come, as one text that differs when any of them has got on: what their heartbeats have put into
/// the store. Throws CommError kCoordinatorLost.
std::string read_progress(Store& store, const std::vector<int>& ranks, base::Deadline deadline);

}  // namespace lockstep::job
