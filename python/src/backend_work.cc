#include "python/src/backend_work.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/channel/deadlock_detector.h"
#include "lockstep/comm/channel/interrupt.h"

namespace lockstep::python {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kInterruptPeriod(100);

}  // namespace

CollectiveWork::CollectiveWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                               std::vector<at::Tensor> results)
    : c10d::Work(rank, type, title, inputs),
      results_(std::move(results)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

void CollectiveWork::execute(const std::function<void()>& operation) noexcept {
  std::exception_ptr error;
  try {
    const at::ThreadLocalStateGuard state(state_);
    const at::NoGradGuard no_grad;
    operation();
  } catch (...) {
    error = std::current_exception();
  }
  try {
    if (error)
      future_->setError(error);
    else
      future_->markCompleted(c10::IValue(results_));
  } catch (...) {  // a callback of the future has thrown; waiting for the future reports it
  }
  finish(error);  // after the future, which a program may read when wait() has returned
}

bool CollectiveWork::wait(milliseconds timeout) {
  const auto limit = timeout == kNoTimeout ? base::Deadline::never() : base::Deadline::in(timeout);
  std::optional<base::telemetry::BlockedThread> blocked;
  std::unique_lock lock(mutex_);
  // bounded: by the operation, which ends at its deadline or when the awaited ranks make no progress
  while (!cv_.wait_for(lock, std::min(kInterruptPeriod, limit.remaining()), [&] { return completed_; })) {
    lock.unlock();
    comm::channel::DeadlockDetector::show_blocked(blocked);
    if (comm::channel::is_interrupted())
      throw base::CommError(base::Cause::kInterrupted, "wait", rank_, -1, "interrupted");
    TORCH_CHECK(!limit.expired(), "Operation timed out!");
    lock.lock();
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

bool PointToPointWork::wait(milliseconds timeout) {
  try {
    if (timeout == kNoTimeout)
      work_.wait();  // bounded: by the deadline of the operation
    else
      work_.wait(base::Deadline::in(timeout));
    const at::NoGradGuard no_grad;
    if (const auto complete = std::exchange(complete_, nullptr)) complete();
  } catch (...) {
    if (work_.done()) finish(std::current_exception());
    throw;
  }
  finish();
  return true;
}

bool JoinedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool JoinedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
}

void JoinedWork::synchronize() {
  for (const auto& work : works_) work->synchronize();
}

bool JoinedWork::wait(milliseconds timeout) {
  for (const auto& work : works_) work->wait(timeout);  // bounded: each by its own limit
  return true;
}

}  // namespace lockstep::python
