#include "lockstep/comm/interface/pending.h"

#include <mutex>

#include "lockstep/base/deadline.h"

namespace lockstep::comm::inline interface {

void Pending::finish(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (done_.load(std::memory_order_relaxed)) return;
  error_ = std::move(error);
  done_.store(true, std::memory_order_release);
  changed_.notify_all();
}

bool Pending::wait_until(base::Deadline deadline) { return done() || sleep_until(deadline); }

bool Pending::sleep_until(base::Deadline deadline) {
  std::unique_lock<base::Mutex> lock(mutex_);
  return base::wait_until(changed_, lock, deadline, [this] { return done_.load(std::memory_order_relaxed); });
}

PendingPtr make_finished_pending() {
  auto pending = std::make_shared<Pending>();
  pending->finish();
  return pending;
}

}  // namespace lockstep::comm::inline interface
