#include "lockstep/comm/work.h"

#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/telemetry/comm_time.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/comm/channel/deadlock_detector.h"
#include "lockstep/comm/channel/interrupt.h"

namespace lockstep::comm {

void Work::wait() {
  const channel::DeadlockDetector::ExecutorWait here(*deadlock_detector_, executor_, pending_);
  wait(base::Deadline::never());  // bounded: the operation ends at its deadline, or by the DeadlockDetector
}

void Work::wait(base::Deadline deadline) {
  const base::telemetry::CommTime::Scope time(true);
  std::optional<base::telemetry::BlockedThread> blocked;
  while (!pending_->wait_until(earlier(deadline, base::Deadline::in(base::kFailureCheckInterval)))) {
    channel::DeadlockDetector::show_blocked(blocked);
    if (deadline.expired())
      throw base::TimeoutError(base::Cause::kRankStuck, label_, rank_, -1,
                               label_ + ": not done before the deadline of wait()");
    if (channel::is_interrupted())
      throw base::CommError(base::Cause::kInterrupted, label_, rank_, -1,
                            label_ + ": interrupted on rank " + std::to_string(rank_));
  }
  if (const auto error = pending_->error()) std::rethrow_exception(error);
}

}  // namespace lockstep::comm
