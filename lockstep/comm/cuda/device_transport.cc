#include "lockstep/comm/cuda/device_transport.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/cuda/device_staging_queue.h"

namespace lockstep::comm::cuda {
namespace {

bool is_point_to_point(const Collective& op) {
  return op.kind == CollectiveKind::kSend || op.kind == CollectiveKind::kRecv;
}

bool is_on_cpu(const Collective& op) {
  const at::Tensor& tensor = op.input.defined() ? op.input : op.output;
  return !tensor.defined() || tensor.is_cpu();
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
    const auto closed = std::make_exception_ptr(base::PeerLostError(base::Cause::kPeerUnreachable, "gpu", options_.rank,
                                                                    options_.rank, "the transport was closed"));
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

  std::unique_ptr<PeerMemoryReducer> make_in_place_reducer(const std::vector<at::Tensor>& parts) override {
    const bool on_cpu = std::all_of(parts.begin(), parts.end(), [](const at::Tensor& part) { return part.is_cpu(); });
    return on_cpu ? options_.host->make_in_place_reducer(parts) : nullptr;
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

}  // namespace lockstep::comm::cuda
