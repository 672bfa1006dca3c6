// Operations that are carried out one after another, by whoever waits for one, or by a thread when they are long.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "lockstep/comm/interface/pending.h"

namespace lockstep::comm {

/// Short operations advance while somebody waits for one: that is the quickest way. A long one, which must go on while
/// this rank computes, is advanced by the driver's thread, and so is all that was added before it. The thread is made
/// by the first long one.
class ProgressEngine {
 public:
  /// Advances until the deadline; true when it is finished. May take longer only if it is long. What it throws is the
  /// Pending's error.
  using AdvanceFn = std::function<bool(base::Deadline)>;

  ProgressEngine() = default;
  ~ProgressEngine();
  ProgressEngine(const ProgressEngine&) = delete;
  ProgressEngine& operator=(const ProgressEngine&) = delete;

  /// Returns at once. One thread at a time.
  PendingPtr add(AdvanceFn advance_fn, bool is_background);
  /// Ends what is there and what comes later with `cause`; nothing of it is advanced any more, but a step that runs
  /// goes on to its end.
  void abort(const std::exception_ptr& cause);

 private:
  class QueuedOp;
  bool advance(base::Deadline deadline);
  void run();
  std::shared_ptr<QueuedOp> front() const;

  std::mutex advance_mutex_;  // held while a step runs; taken before mutex_
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<QueuedOp>> items_;
  std::exception_ptr abort_cause_;
  bool stop_ = false;
  std::atomic<int> num_background_{0};  // of items_; changes under mutex_
  std::thread thread_;
};

}  // namespace lockstep::comm
