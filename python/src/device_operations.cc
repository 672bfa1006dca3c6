#include "python/src/device_operations.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "lockstep/base/error.h"

namespace lockstep::python {
namespace {

using std::chrono::microseconds;

/// The completion of an operation on the device, which may not have been started.
class DevicePending final : public comm::Pending {
 public:
  /// Called once, when the operation has been started.
  void set(c10::intrusive_ptr<c10d::Work> work) {
    work_ = std::move(work);
    is_started_.store(true, std::memory_order_release);
  }

  bool done() override {
    if (is_finished()) return true;
    if (!is_started_.load(std::memory_order_acquire) || !work_->isCompleted()) return false;
    finish(work_->exception());  // not isSuccess(), which that of NCCL throws from
    return true;
  }
  /// Looks more and more rarely: nothing but the detection of failures depends on it.
  bool wait_until(base::Deadline deadline) override {
    for (microseconds pause{50}; !done(); pause = std::min(2 * pause, microseconds(5000))) {
      if (deadline.expired()) return false;
      std::this_thread::sleep_for(pause);
    }
    return true;
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::atomic<bool> is_started_{false};
};

/// A Work of the other backend, whose errors are replaced by the one because of which that backend was aborted.
class WatchedWork final : public c10d::Work {
 public:
  WatchedWork(std::shared_ptr<DeviceOperations::Failure> failure, c10::intrusive_ptr<c10d::Work> inner)
      : failure_(std::move(failure)), inner_(std::move(inner)) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    try {
      const bool good = inner_->wait(timeout);
      failure_->throw_if_set();
      return good;
    } catch (const std::exception&) {
      failure_->throw_if_set();
      throw;
    }
  }
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  std::uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  const std::shared_ptr<DeviceOperations::Failure> failure_;
  const c10::intrusive_ptr<c10d::Work> inner_;
};

}  // namespace

void DeviceOperations::Failure::set(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
}

void DeviceOperations::Failure::throw_if_set() const {
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

DeviceOperations::WorkPtr DeviceOperations::run(comm::WatchedCall call, const Start& start) {
  failure_->throw_if_set();
  if (coalesced_) {
    if (call.is_compared)
      *coalesced_ += std::string(comm::name(call.kind)) + "(" + call.name + comm::describe(call.tensor) + ") ";
    return start(*inner_);
  }
  return watch(std::move(call), start);
}

void DeviceOperations::start_coalescing() {
  coalesced_.emplace();
  inner_->startCoalescing();
}

DeviceOperations::WorkPtr DeviceOperations::end_coalescing() {
  const std::string calls = std::exchange(coalesced_, std::nullopt).value_or("");
  return watch({.kind = comm::CollectiveKind::kBarrier, .name = calls, .is_compared = !calls.empty()},
               [](c10d::Backend& inner) { return inner.endCoalescing(); });
}

/// The calls are compared while `start` runs: where the ranks' calls differ or one is absent, NCCL may block in it, as
/// long as it connects the ranks.
DeviceOperations::WorkPtr DeviceOperations::watch(comm::WatchedCall call, const Start& start) {
  call.on_error = [inner = inner_, failure = failure_] {
    failure->set(std::current_exception());
    inner->abort();
  };
  const auto pending = std::make_shared<DevicePending>();
  last_ = comm::GroupAccess::watch(group_, std::move(call), pending);
  WorkPtr work;
  try {
    work = start(*inner_);
  } catch (...) {
    pending->finish();
    failure_->throw_if_set();
    throw;
  }
  if (!work) {
    pending->finish();
    return work;
  }
  pending->set(work);
  return c10::make_intrusive<WatchedWork>(failure_, std::move(work));
}

void DeviceOperations::abort() noexcept {
  comm::GroupAccess::abandon(group_, "the process group was aborted");
  inner_->abort();
}

void DeviceOperations::shutdown() {
  std::exception_ptr error;
  try {
    if (last_) last_->wait();  // bounded: by the DeadlockDetector
  } catch (...) {
    error = std::current_exception();
  }
  last_.reset();
  inner_->shutdown();
  if (error) std::rethrow_exception(error);
}

}  // namespace lockstep::python
