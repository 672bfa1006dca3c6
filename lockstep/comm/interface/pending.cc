#include "lockstep/comm/interface/pending.h"

#include <mutex>

namespace lockstep::comm::inline interface {

void Pending::finish(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (done_.load(std::memory_order_relaxed)) return;
  error_ = std::move(error);
  done_.store(true, std::memory_order_release);
  changed_.notify_all();
}

bool Pending::wait_until(base::Deadline deadline) {
  if (done()) return true;
  std::unique_lock<base::Mutex> lock(mutex_);
  const auto ready = [this] { return done_.load(std::memory_order_relaxed); };
  if (deadline.is_never()) {
    changed_.wait(lock, ready);  // bounded: the caller chose no deadline
    return true;
  }
  return changed_.wait_until(lock, deadline.when(), ready);
}

PendingPtr make_finished_pending() {
  auto pending = std::make_shared<Pending>();
  pending->finish();
  return pending;
}

}  // namespace lockstep::comm::inline interface
