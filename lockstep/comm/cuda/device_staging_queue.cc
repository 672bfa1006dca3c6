#include "lockstep/comm/cuda/device_staging_queue.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

namespace lockstep::comm {
namespace {

using base::Deadline;

constexpr auto kFirstPause = std::chrono::microseconds(20);
constexpr auto kLongestPause = std::chrono::microseconds(500);

at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()).pinned_memory(true));
}

bool on_gpu(const Collective& op) {
  const at::Tensor& tensor = op.input.defined() ? op.input : op.output;
  return tensor.defined() && !tensor.is_cpu();
}

}  // namespace

class Line::Item final : public Pending {
 public:
  Item(std::shared_ptr<Line> line, const Collective& op) : line_(std::move(line)), op_(op), host_(op) {
    if (!on_gpu(op)) return;
    const at::NoGradGuard no_grad;
    if (op.input.defined()) {
      host_.input = pinned_like(op.input);
      host_.input.copy_(op.input, /*non_blocking=*/true);
      copied_.emplace(op.input.device().type());
      copied_->record(c10::impl::VirtualGuardImpl(op.input.device().type()).getStream(op.input.device()));
    }
    if (op.output.defined()) host_.output = op.output.is_same(op.input) ? host_.input : pinned_like(op.output);
  }

  bool done() override {
    if (is_finished()) return true;
    line_->advance();
    const PendingPtr way = line_->way_of(*this);
    if (way && way->done()) end(way->error());
    return is_finished();
  }

  bool wait_until(Deadline deadline) override {
    for (auto pause = kFirstPause; !done(); pause = std::min(pause * 2, kLongestPause)) {
      if (deadline.expired()) return false;
      if (const PendingPtr way = line_->way_of(*this))
        way->wait_until(deadline);
      else
        std::this_thread::sleep_for(pause);
    }
    return true;
  }

 private:
  friend class Line;

  void end(std::exception_ptr error) {
    try {
      const at::NoGradGuard no_grad;
      if (!error && on_gpu(op_) && op_.output.defined()) op_.output.copy_(host_.output, /*non_blocking=*/true);
    } catch (...) {
      error = std::current_exception();
    }
    finish(error);
  }

  const std::shared_ptr<Line> line_;
  const Collective op_;
  Collective host_;
  std::optional<c10::Event> copied_;
  PendingPtr way_;  // what the host's transport has returned
};

PendingPtr Line::start(const Collective& op) {
  if (!on_gpu(op)) {
    const std::lock_guard lock(mutex_);
    if (items_.empty()) return host_->start(op);
  }
  auto item = std::make_shared<Item>(shared_from_this(), op);
  {
    const std::lock_guard lock(mutex_);
    items_.push_back(item);
  }
  advance();
  return item;
}

bool Line::empty() const {
  const std::lock_guard lock(mutex_);
  return items_.empty();
}

PendingPtr Line::way_of(const Item& item) {
  const std::lock_guard lock(mutex_);
  return item.way_;
}

void Line::advance() {
  const std::lock_guard lock(mutex_);
  while (!items_.empty()) {
    Item& first = *items_.front();
    try {
      if (first.copied_ && !first.copied_->query()) return;
      first.way_ = host_->start(first.host_);
    } catch (...) {
      first.way_ = std::make_shared<Pending>();
      first.way_->finish(std::current_exception());
    }
    items_.pop_front();
  }
}

void Line::abort(const std::exception_ptr& cause) {
  const std::lock_guard lock(mutex_);
  for (const auto& item : items_) item->finish(cause);
  items_.clear();
}

}  // namespace lockstep::comm
