#include "lockstep/comm/hierarchy/hierarchy.h"

#include <atomic>
#include <mutex>

#include "lockstep/base/error.h"
#include "lockstep/comm/hierarchy/cross_host_group.h"
#include "lockstep/comm/hierarchy/host_plan.h"
#include "lockstep/comm/hierarchy/large_collective.h"
#include "lockstep/comm/hierarchy/small_collective.h"
#include "lockstep/comm/shm/control_block.h"
#include "lockstep/comm/shm/progress_engine.h"

namespace lockstep::comm::hierarchy {
namespace {

using base::Deadline;

class HierarchyTransport final : public Transport {
 public:
  explicit HierarchyTransport(const HierarchyOptions& options)
      : rank_(options.rank),
        plan_(plan_hosts(options.hosts)),
        location_(plan_.locations[static_cast<std::size_t>(rank_)]) {
    const auto to_world_ranks = [&](std::vector<int> members) {
      for (int& member : members) member = options.members[static_cast<std::size_t>(member)];
      return members;
    };
    const auto connect = [&](const std::string& name) {
      job::PrefixStore store(name, options.store);
      const auto& local_members = plan_.hosts[static_cast<std::size_t>(location_.host)];
      return shm::ControlBlocks::connect(options.local_peers, store, to_world_ranks(local_members),
                                         location_.local_rank, Deadline::in(options.timeout));
    };
    small_.control_blocks = connect("short");
    for (std::size_t i = 0; i < kNumLargeQueues; ++i) large_[i].control_blocks = connect("long" + std::to_string(i));
    // Each connection blocks until all its members connect. All ranks make their connections in this order, so no wait
    // is circular.
    if (location_.local_rank == 0)
      leaders_ = options.make_cross_host(Scope::kSmall, "leaders", to_world_ranks(plan_.cross_host_group(0)));
    for (std::size_t i = 0; i < kNumLargeQueues && location_.local_rank < plan_.num_cross_host_groups; ++i) {
      OperationQueue& queue = large_[i];
      const std::string name = "cross_host" + std::to_string(location_.local_rank) + "." + std::to_string(i);
      queue.cross_host_transport =
          options.make_cross_host(Scope::kAny, name, to_world_ranks(plan_.cross_host_group(location_.local_rank)));
      queue.cross_host_group = std::make_unique<CrossHostGroup>(queue.cross_host_transport, location_.host,
                                                                static_cast<int>(plan_.hosts.size()), aborted_);
    }
    flat_ = options.make_cross_host(Scope::kAny, "flat", options.members);
  }
  /// Does not abort the cross-host transports: their own destructors abort the operations that are still in flight.
  ~HierarchyTransport() override {
    aborted_ = true;
    abort_engines(std::make_exception_ptr(
        base::PeerLostError(base::Cause::kPeerUnreachable, "hierarchy", rank_, rank_, "the transport was closed")));
  }

  std::string_view name() const override { return "hierarchy"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all = full_cpu_capabilities({at::kFloat, at::kBFloat16, at::kHalf});
    return all;
  }

  PendingPtr start(const Collective& op) override {
    switch (op.kind) {
      case CollectiveKind::kAllReduce:
      case CollectiveKind::kReduce:
      case CollectiveKind::kReduceScatter:
      case CollectiveKind::kBroadcast:
      case CollectiveKind::kBarrier: return SmallCollective::accepts(op) ? start_small(op) : start_large(op);
      case CollectiveKind::kAllGather: return SmallCollective::accepts(op) ? start_small(op) : flat_->start(op);
      case CollectiveKind::kGather:
      case CollectiveKind::kScatter:
      case CollectiveKind::kAllToAll:
      case CollectiveKind::kSend:
      case CollectiveKind::kRecv: return flat_->start(op);
    }
    throw base::UsageError("hierarchy: unknown operation " + std::to_string(static_cast<int>(op.kind)));
  }

  void abort(std::exception_ptr cause) noexcept override {
    const std::lock_guard lock(abort_mutex_);
    if (aborted_.exchange(true)) return;
    abort_engines(cause);
    for (OperationQueue& queue : large_)
      if (queue.cross_host_transport) queue.cross_host_transport->abort(cause);
    if (leaders_) leaders_->abort(cause);
    if (flat_) flat_->abort(cause);
  }

 private:
  /// Runs its operations in order.
  struct OperationQueue {
    std::unique_ptr<shm::ControlBlocks> control_blocks;
    std::uint32_t number = 0;  // of the last operation; the same on all ranks of a host
    // Only for large operations, and only if this rank is in a cross-host group.
    std::shared_ptr<Transport> cross_host_transport;
    std::unique_ptr<CrossHostGroup> cross_host_group;
    shm::ProgressEngine engine{"hierarchy"};  // last, so that its thread ends before the members that it uses
  };
  // Large operations alternate between the queues, so that the network stays busy between the last chunks of one
  // operation and the first chunks of the next.
  static constexpr std::size_t kNumLargeQueues = 2;

  void abort_engines(const std::exception_ptr& cause) noexcept {
    small_.engine.abort(cause);
    for (OperationQueue& queue : large_) queue.engine.abort(cause);
  }

  PendingPtr start_small(const Collective& op) {
    auto operation = std::make_shared<SmallCollective>(op, *small_.control_blocks, ++small_.number, plan_, rank_,
                                                       leaders_.get(), result_buffer_);
    return small_.engine.add([operation](Deadline deadline) { return operation->advance(deadline); });
  }
  PendingPtr start_large(const Collective& op) {
    OperationQueue& queue = large_[num_large_++ % kNumLargeQueues];
    auto operation = std::make_shared<LargeCollective>(op, *queue.control_blocks, ++queue.number, plan_, rank_,
                                                       queue.cross_host_group.get());
    return queue.engine.add_background([operation](Deadline deadline) { return operation->advance(deadline); });
  }

  const int rank_;
  const HostPlan plan_;
  const HostPlan::Location location_;
  std::shared_ptr<Transport> leaders_;  // connects the first ranks of the hosts; null on other ranks
  std::shared_ptr<Transport> flat_;
  std::atomic<bool> aborted_{false};
  ResultBuffer result_buffer_;
  std::size_t num_large_ = 0;  // the number of large operations; the same on all ranks
  std::mutex abort_mutex_;     // held by abort()
  // Last, so that their threads end before the members that they use.
  OperationQueue small_;
  OperationQueue large_[kNumLargeQueues];
};

}  // namespace

std::shared_ptr<Transport> make_hierarchy_transport(const HierarchyOptions& options) {
  return std::make_shared<HierarchyTransport>(options);
}

}  // namespace lockstep::comm::hierarchy
