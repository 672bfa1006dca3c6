#include "lockstep/comm/gpu/device_transport.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/interface/transport.h"

namespace lockstep::comm::gpu {
namespace {

using base::Deadline;

constexpr auto kMinPollInterval = std::chrono::microseconds(20);
constexpr auto kMaxPollInterval = std::chrono::microseconds(500);

at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()).pinned_memory(true));
}

bool is_on_cpu(const Collective& op) {
  const at::Tensor& tensor = op.input.defined() ? op.input : op.output;
  return !tensor.defined() || tensor.is_cpu();
}

/// Starts operations on a host transport in the order of start(). Each starts when its input has been copied from the
/// GPU. Only callers that wait for an operation block on the copy. Thread-safe.
class DeviceStagingQueue : public std::enable_shared_from_this<DeviceStagingQueue> {
 public:
  explicit DeviceStagingQueue(std::shared_ptr<Transport> host) : host_(std::move(host)) {}

  /// Queues an operation on tensors on the CPU or on a GPU; does not wait. The thread whose done() or wait_until()
  /// completes the operation copies the result to the GPU, on its current stream.
  PendingPtr start(const Collective& op) {
    if (is_on_cpu(op)) {
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

  /// Returns true if all operations have been passed to the host transport.
  bool empty() const {
    const std::lock_guard lock(mutex_);
    return items_.empty();
  }

  /// Finishes the queued operations with `cause`.
  void abort(const std::exception_ptr& cause) {
    const std::lock_guard lock(mutex_);
    for (const auto& item : items_) item->finish(cause);
    items_.clear();
  }

 private:
  class StagedOp final : public Pending {
   public:
    StagedOp(std::shared_ptr<DeviceStagingQueue> queue, const Collective& op)
        : queue_(std::move(queue)), op_(op), host_op_(op) {
      if (is_on_cpu(op)) return;
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
        if (!error && !is_on_cpu(op_) && op_.output.defined()) op_.output.copy_(host_op_.output, /*non_blocking=*/true);
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

  PendingPtr host_pending_of(const StagedOp& item) {
    const std::lock_guard lock(mutex_);
    return item.host_pending_;
  }

  void advance() {
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

  const std::shared_ptr<Transport> host_;
  mutable std::mutex mutex_;                     // guards items_ and StagedOp::host_pending_
  std::deque<std::shared_ptr<StagedOp>> items_;  // the operations that have not been started on the host transport
};

bool is_point_to_point(const Collective& op) {
  return op.kind == CollectiveKind::kSend || op.kind == CollectiveKind::kRecv;
}

class DeviceTransport final : public Transport {
 public:
  explicit DeviceTransport(DeviceTransportOptions options)
      : options_(std::move(options)),
        capabilities_(options_.host->capabilities()),
        collectives_(std::make_shared<DeviceStagingQueue>(options_.host)),
        nccl_(options_.nccl) {
    capabilities_.devices.push_back(at::kCUDA);
  }

  ~DeviceTransport() override {
    // abort() breaks the reference cycle between a queue and its operations.
    const std::exception_ptr closed = closed_error("gpu", options_.rank);
    collectives_->abort(closed);
    for (const auto& [key, queue] : queues_) queue->abort(closed);
  }

  std::string_view name() const override { return options_.host->name(); }
  const Capabilities& capabilities() const override { return capabilities_; }

  PendingPtr start(const Collective& op) override {
    const bool uses_nccl =
        !is_on_cpu(op) && options_.make_nccl && (op.wire_dtype == at::kFloat || !options_.spans_hosts);
    if (!uses_nccl) return queue_for(op)->start(op);
    if (!is_point_to_point(op)) return nccl_for_all()->start(op);
    Collective pair_op = op;
    const auto transport = nccl_for_pair(op, pair_op.root);
    return transport->start(pair_op);
  }

  PendingPtr start_checked(const Collective& op, const SignatureView& signature) override {
    if (!is_on_cpu(op)) return nullptr;
    LOCKSTEP_CHECK(collectives_->empty());  // the caller waits for each operation before it starts the next
    return options_.host->start_checked(op, signature);
  }

  std::shared_ptr<shm::GradientTable> make_gradient_table(const std::vector<at::Tensor>& gradients) override {
    const bool on_cpu =
        std::all_of(gradients.begin(), gradients.end(), [](const at::Tensor& gradient) { return gradient.is_cpu(); });
    return on_cpu ? options_.host->make_gradient_table(gradients) : nullptr;
  }

  void abort(std::exception_ptr cause) noexcept override {
    options_.host->abort(cause);
    const std::lock_guard lock(mutex_);
    if (!aborted_) aborted_ = cause;
    collectives_->abort(cause);
    for (const auto& [key, queue] : queues_) queue->abort(cause);
    if (nccl_) nccl_->abort(cause);
    for (const auto& [key, transport] : pairs_) transport->abort(cause);
  }

  std::shared_ptr<Transport> nccl() {
    const std::lock_guard lock(mutex_);
    return nccl_;
  }

 private:
  std::shared_ptr<DeviceStagingQueue> queue_for(const Collective& op) {
    if (!is_point_to_point(op)) return collectives_;
    const std::lock_guard lock(mutex_);
    auto& queue = queues_[{op.kind == CollectiveKind::kSend, op.root}];
    if (!queue) queue = std::make_shared<DeviceStagingQueue>(options_.host);
    return queue;
  }

  std::shared_ptr<Transport> nccl_for_all() {
    const std::lock_guard lock(mutex_);
    if (!nccl_) {
      std::vector<int> all(static_cast<std::size_t>(options_.size));
      for (int rank = 0; rank < options_.size; ++rank) all[static_cast<std::size_t>(rank)] = rank;
      nccl_ = create_nccl("", all);
    }
    return nccl_;
  }

  /// The NCCL transport of one direction. Sets `peer` to the index of the peer in it.
  std::shared_ptr<Transport> nccl_for_pair(const Collective& op, int& peer) {
    const int from = op.kind == CollectiveKind::kSend ? options_.rank : op.root;
    const int to = op.kind == CollectiveKind::kSend ? op.root : options_.rank;
    peer = op.kind == CollectiveKind::kSend ? 1 : 0;
    const std::lock_guard lock(mutex_);
    auto& transport = pairs_[{from, to}];
    if (!transport) transport = create_nccl("/" + std::to_string(from) + ">" + std::to_string(to), {from, to});
    return transport;
  }

  std::shared_ptr<Transport> create_nccl(const std::string& part, const std::vector<int>& ranks) const {
    auto transport = options_.make_nccl(part, ranks);
    if (aborted_) transport->abort(aborted_);
    return transport;
  }

  const DeviceTransportOptions options_;
  Capabilities capabilities_;
  const std::shared_ptr<DeviceStagingQueue> collectives_;
  std::mutex mutex_;  // guards the members below
  std::exception_ptr aborted_;
  std::map<std::pair<bool, int>, std::shared_ptr<DeviceStagingQueue>> queues_;  // (sending, peer)
  std::shared_ptr<Transport> nccl_;
  std::map<std::pair<int, int>, std::shared_ptr<Transport>> pairs_;  // (from, to)
};

}  // namespace

std::shared_ptr<Transport> make_device_transport(DeviceTransportOptions options) {
  return std::make_shared<DeviceTransport>(std::move(options));
}

std::shared_ptr<Transport> nccl_transport_of(Transport& transport) {
  auto* device = dynamic_cast<DeviceTransport*>(&transport);
  return device ? device->nccl() : nullptr;
}

}  // namespace lockstep::comm::gpu
