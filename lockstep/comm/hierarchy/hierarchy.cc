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

namespace lockstep::comm {
namespace {

using base::Deadline;

class HierarchyTransport final : public Transport {
 public:
  explicit HierarchyTransport(const HierarchyOptions& options)
      : store_(options.store),
        rank_(options.rank),
        plan_(plan_hosts(options.hosts)),
        location_(plan_.locations[static_cast<std::size_t>(rank_)]) {
    const auto to_world_ranks = [&](std::vector<int> members) {
      for (int& member : members) member = options.members[static_cast<std::size_t>(member)];
      return members;
    };
    const auto connect = [&](const std::string& name) {
      job::PrefixStore store(name, store_);
      const auto& here = plan_.hosts[static_cast<std::size_t>(location_.host)];
      return ControlBlocks::connect(options.neighbours, store, to_world_ranks(here), location_.local_rank,
                                    Deadline::in(options.timeout));
    };
    small_.control_blocks = connect("short");
    for (std::size_t i = 0; i < kNumLargeQueues; ++i) large_[i].control_blocks = connect("long" + std::to_string(i));
    // Nobody waits for a neighbour any more: where the first connection is MPI's, all ranks must come to it.
    if (location_.local_rank == 0)
      leaders_ = options.make_cross_host(Scope::kSmall, "leaders", to_world_ranks(plan_.cross_host_group(0)));
    for (std::size_t i = 0; i < kNumLargeQueues && location_.local_rank < plan_.num_cross_host_groups; ++i) {
      OperationQueue& queue = large_[i];
      const std::string name = "column" + std::to_string(location_.local_rank) + "." + std::to_string(i);
      queue.cross_host_transport =
          options.make_cross_host(Scope::kLarge, name, to_world_ranks(plan_.cross_host_group(location_.local_rank)));
      queue.cross_host_group = std::make_unique<CrossHostGroup>(queue.cross_host_transport, location_.host,
                                                                static_cast<int>(plan_.hosts.size()), aborted_);
    }
    flat_ = options.make_cross_host(Scope::kAllRanks, "flat", options.members);
  }
  /// What is under this one is not aborted, which would leave threads of it behind: it aborts what is still under way
  /// by itself.
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
      default: return flat_->start(op);
    }
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
  /// Operations that go one after another.
  struct OperationQueue {
    std::unique_ptr<ControlBlocks> control_blocks;
    std::uint32_t number = 0;  // of operations that have been started, the same on all ranks of a host
    std::shared_ptr<Transport>
        cross_host_transport;  // of this rank's column, when it is in one; of long operations only
    std::unique_ptr<CrossHostGroup> cross_host_group;  // likewise
    ProgressEngine engine;                             // last: its thread ends before what it uses
  };
  // Long operations take turns: while the last pieces of one travel, the first of the next do too, and the wire is not
  // idle in between.
  static constexpr std::size_t kNumLargeQueues = 2;

  void abort_engines(const std::exception_ptr& cause) noexcept {
    small_.engine.abort(cause);
    for (OperationQueue& queue : large_) queue.engine.abort(cause);
  }

  PendingPtr start_small(const Collective& op) {
    auto operation = std::make_shared<SmallCollective>(op, *small_.control_blocks, ++small_.number, plan_, rank_,
                                                       leaders_.get(), result_buffer_);
    return small_.engine.add([operation](Deadline deadline) { return operation->advance(deadline); },
                             /*is_long=*/false);
  }
  PendingPtr start_large(const Collective& op) {
    OperationQueue& queue = large_[num_large_++ % kNumLargeQueues];
    auto operation = std::make_shared<LargeCollective>(op, *queue.control_blocks, ++queue.number, plan_, rank_,
                                                       queue.cross_host_group.get());
    return queue.engine.add([operation](Deadline deadline) { return operation->advance(deadline); }, /*is_long=*/true);
  }

  const std::shared_ptr<job::Store> store_;
  const int rank_;
  const HostPlan plan_;
  const HostPlan::Location location_;
  std::shared_ptr<Transport> leaders_;  // of the first ranks of the hosts, when it is one
  std::shared_ptr<Transport> flat_;
  std::atomic<bool> aborted_{false};
  ResultBuffer result_buffer_;
  std::size_t num_large_ = 0;  // operations, the same on all ranks
  std::mutex abort_mutex_;     // held by abort()
  // Last: their threads end before what they use.
  OperationQueue small_;
  OperationQueue large_[kNumLargeQueues];
};

}  // namespace

std::shared_ptr<Transport> make_hierarchy_transport(const HierarchyOptions& options) {
  return std::make_shared<HierarchyTransport>(options);
}

}  // namespace lockstep::comm
