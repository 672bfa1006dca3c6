#include "lockstep/comm/cuda/device_staging_queue.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

namespace lockstep::comm::cuda {
namespace {

using base::Deadline;

constexpr auto kMinPollInterval = std::chrono::microseconds(20);
constexpr auto kMaxPollInterval = std::chrono::microseconds(500);

at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()).pinned_memory(true));
}

bool is_on_gpu(const Collective& op) {
  const at::Tensor& tensor = op.input.defined() ? op.input : op.output;
  return tensor.defined() && !tensor.is_cpu();
}

}  // namespace

class DeviceStagingQueue::StagedOp final : public Pending {
 public:
  StagedOp(std::shared_ptr<DeviceStagingQueue> queue, const Collective& op)
      : queue_(std::move(queue)), op_(op), host_op_(op) {
    if (!is_on_gpu(op)) return;
    const at::NoGradGuard no_grad;
    if (op.input.defined()) {
      host_op_.input = pinned_like(op.input);
      host_op_.input.copy_(op.input, /*non_blocking=*/true);
      input_copied_.emplace(op.input.device().type());
      input_copied_->record(c10::impl::VirtualGuardImpl(op.input.device().type()).getStream(op.input.device()));
    }
    if (op.output.defined()) host_op_.output = op.output.is_same(op.input) ? host_op_.input : pinned_like(op.output);
  }

  bool done() override {
    if (is_finished()) return true;
    queue_->advance();
    const PendingPtr host_pending = queue_->host_pending_of(*this);
    if (host_pending && host_pending->done()) complete(host_pending->error());
    return is_finished();
  }

  bool wait_until(Deadline deadline) override {
    for (auto interval = kMinPollInterval; !done(); interval = std::min(interval * 2, kMaxPollInterval)) {
      if (deadline.expired()) return false;
      if (const PendingPtr host_pending = queue_->host_pending_of(*this))
        host_pending->wait_until(deadline);
      else
        std::this_thread::sleep_for(interval);
    }
    return true;
  }

 private:
  friend class DeviceStagingQueue;

  void complete(std::exception_ptr error) {
    try {
      const at::NoGradGuard no_grad;
      if (!error && is_on_gpu(op_) && op_.output.defined()) op_.output.copy_(host_op_.output, /*non_blocking=*/true);
    } catch (...) {
      error = std::current_exception();
    }
    finish(error);
  }

  const std::shared_ptr<DeviceStagingQueue> queue_;
  const Collective op_;
  Collective host_op_;  // the operation on the copies in pinned memory
  std::optional<c10::Event> input_copied_;
  PendingPtr host_pending_;  // null until the operation has been started on the host transport
};

PendingPtr DeviceStagingQueue::start(const Collective& op) {
  if (!is_on_gpu(op)) {
    const std::lock_guard lock(mutex_);
    if (items_.empty()) return host_->start(op);
  }
  auto item = std::make_shared<StagedOp>(shared_from_this(), op);
  {
    const std::lock_guard lock(mutex_);
    items_.push_back(item);
  }
  advance();
  return item;
}

bool DeviceStagingQueue::empty() const {
  const std::lock_guard lock(mutex_);
  return items_.empty();
}

PendingPtr DeviceStagingQueue::host_pending_of(const StagedOp& item) {
  const std::lock_guard lock(mutex_);
  return item.host_pending_;
}

void DeviceStagingQueue::advance() {
  const std::lock_guard lock(mutex_);
  while (!items_.empty()) {
    StagedOp& first = *items_.front();
    try {
      if (first.input_copied_ && !first.input_copied_->query()) return;
      first.host_pending_ = host_->start(first.host_op_);
    } catch (...) {
      first.host_pending_ = std::make_shared<Pending>();
      first.host_pending_->finish(std::current_exception());
    }
    items_.pop_front();
  }
}

void DeviceStagingQueue::abort(const std::exception_ptr& cause) {
  const std::lock_guard lock(mutex_);
  for (const auto& item : items_) item->finish(cause);
  items_.clear();
}

}  // namespace lockstep::comm::cuda
