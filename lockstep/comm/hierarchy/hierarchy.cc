#include "lockstep/comm/hierarchy/hierarchy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "lockstep/base/error.h"
#include "lockstep/comm/arena/quarantine.h"
#include "lockstep/comm/hierarchy/cross_host_group.h"
#include "lockstep/comm/hierarchy/host_plan.h"
#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/shm/control_block.h"
#include "lockstep/comm/shm/progress_engine.h"
#include "lockstep/comm/shm/reduce.h"
#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm::hierarchy {
namespace {

using base::Deadline;

void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

/// The buffer in which the first rank of a host stores the blocks of all hosts, for its local peers to read. Small
/// operations reuse it.
struct ResultBuffer {
  void* data = nullptr;  // in the arena; never freed at the end, because a peer may be reading it
  std::size_t bytes = 0;
};

/// all_reduce, reduce, reduce_scatter, all_gather, broadcast or barrier. Each rank publishes its data in its control
/// block. The first rank of each host combines the data of its host into a block, and the first ranks exchange their
/// blocks. Each rank then computes its result from all blocks, in the same order.
///
/// Memory ordering, as in SyncOp: the first rank reads the data of a peer after it has loaded the operation's number
/// from the peer's `published` counter (acquire). It stores the blocks and their offset and then the number to its
/// `completed` counter (release), which the peers load (acquire) before they read the blocks. It overwrites the buffer
/// in the next operation, after all local peers have published that operation, which they do after they have read the
/// blocks.
class SmallCollective {
 public:
  /// `leaders` connects the first ranks of the hosts and is null on the other ranks.
  SmallCollective(const Collective& op, const shm::ControlBlocks& control_blocks, std::uint32_t number,
                  const HostPlan& plan, int rank, Transport* leaders, ResultBuffer& result_buffer)
      : op_(op),
        control_blocks_(control_blocks),
        number_(number),
        plan_(plan),
        rank_(rank),
        leaders_(leaders),
        result_buffer_(result_buffer) {}

  /// Returns true if `op` is small enough. The answer is the same on all ranks.
  static bool accepts(const Collective& op) { return !op.input.defined() || op.input.nbytes() <= shm::kInlineBytes; }

  /// Makes progress until `deadline`. Returns true when the operation is finished. Throws the error of the cross-host
  /// transport, and std::runtime_error if the process of a local peer has ended.
  bool advance(base::Deadline deadline) {
    const std::size_t parity = number_ % 2;
    if (phase_ == Phase::kPublish) {
      publish();
      control_blocks_.advance(control_blocks_.own().published[parity], number_);
      phase_ = control_blocks_.rank() == 0 ? Phase::kWaitPublished : Phase::kWaitResult;
    }
    if (phase_ == Phase::kWaitPublished) {
      if (!have_all_published(deadline)) return false;
      start_cross_host();
      phase_ = Phase::kWaitCrossHost;
    }
    if (phase_ == Phase::kWaitCrossHost) {
      if (!cross_host_pending_->wait_until(deadline)) return false;
      if (const auto error = cross_host_pending_->error()) std::rethrow_exception(error);
      control_blocks_.own().offset[parity] = control_blocks_.arena().offset_of(result_buffer_.data);
      control_blocks_.advance(control_blocks_.own().completed, number_);
      write_output(static_cast<const char*>(result_buffer_.data));
      phase_ = Phase::kFinished;
    }
    if (phase_ == Phase::kWaitResult) {
      if (!control_blocks_.wait(0, control_blocks_.of(0).completed, number_, deadline)) return false;
      write_output(control_blocks_.arena_of(0) + control_blocks_.of(0).offset[parity]);
      phase_ = Phase::kFinished;
    }
    return true;
  }

 private:
  void publish() {
    if (!op_.input.defined() || (op_.kind == CollectiveKind::kBroadcast && op_.root != rank_)) return;
    copy(control_blocks_.own().inline_data[number_ % 2], op_.input.const_data_ptr(), op_.input.nbytes());
  }

  bool have_all_published(base::Deadline deadline) {
    for (; next_member_ < control_blocks_.size(); ++next_member_)
      if (!control_blocks_.wait(next_member_, control_blocks_.of(next_member_).published[number_ % 2], number_,
                                deadline))
        return false;
    return true;
  }

  void start_cross_host() {
    const std::size_t bytes = block_bytes();
    const bool from_root = op_.kind == CollectiveKind::kBroadcast;
    const std::size_t needed = from_root ? bytes : bytes * plan_.hosts.size();
    if (result_buffer_.bytes < needed) {
      // All local peers have published this operation, so they have read the blocks of the last one.
      control_blocks_.arena().free(result_buffer_.data);
      result_buffer_ = {control_blocks_.arena().allocate(needed), needed};
    }
    host_block_ = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
    all_blocks_ = at::from_blob(result_buffer_.data, {static_cast<std::int64_t>(needed)}, at::kByte);
    auto* block = static_cast<char*>(from_root ? result_buffer_.data : host_block_.mutable_data_ptr());
    c10::SmallVector<const char*, 16> inline_inputs;
    for (int local_rank = 0; local_rank < control_blocks_.size(); ++local_rank)
      inline_inputs.push_back(control_blocks_.of(local_rank).inline_data[number_ % 2]);
    if (reduces()) {
      reduce_into(block, inline_inputs, {0, static_cast<std::size_t>(op_.input.numel())}, 1);
    } else if (op_.kind == CollectiveKind::kAllGather) {
      std::memset(block, 0, bytes);
      for (std::size_t local_rank = 0; local_rank < inline_inputs.size(); ++local_rank)
        copy(block + local_rank * op_.input.nbytes(), inline_inputs[local_rank], op_.input.nbytes());
    } else {
      *block = 0;
    }
    if (!from_root) {
      cross_host_pending_ = leaders_->start(
          {.kind = CollectiveKind::kAllGather, .input = host_block_, .output = all_blocks_, .seq = number_});
      return;
    }
    const auto root = plan_.locations[static_cast<std::size_t>(op_.root)];
    if (root.host == plan_.locations[static_cast<std::size_t>(rank_)].host)
      copy(block, inline_inputs[static_cast<std::size_t>(root.local_rank)], op_.input.nbytes());
    cross_host_pending_ = leaders_->start({.kind = CollectiveKind::kBroadcast,
                                           .input = all_blocks_,
                                           .output = all_blocks_,
                                           .root = root.host,
                                           .seq = number_});
  }

  /// Computes this rank's result from the blocks of all hosts.
  void write_output(const char* blocks) const {
    if (!op_.output.defined()) return;
    auto* output = static_cast<char*>(op_.output.mutable_data_ptr());
    const std::size_t bytes = block_bytes();
    if (op_.kind == CollectiveKind::kBroadcast) {
      if (op_.root != rank_) copy(output, blocks, op_.output.nbytes());
    } else if (op_.kind == CollectiveKind::kAllGather) {
      const std::size_t part = op_.input.nbytes();
      for (std::size_t member = 0; member < plan_.locations.size(); ++member) {
        const auto location = plan_.locations[member];
        copy(output + member * part,
             blocks + static_cast<std::size_t>(location.host) * bytes +
                 static_cast<std::size_t>(location.local_rank) * part,
             part);
      }
    } else if (reduces()) {
      c10::SmallVector<const char*, 16> hosts;
      for (std::size_t host = 0; host < plan_.hosts.size(); ++host) hosts.push_back(blocks + host * bytes);
      const auto count = static_cast<std::size_t>(op_.output.numel());
      const std::size_t first =
          op_.kind == CollectiveKind::kReduceScatter ? count * static_cast<std::size_t>(rank_) : 0;
      reduce_into(output, hosts, {first, count},
                  op_.op == ReduceOp::kMean ? static_cast<int>(plan_.locations.size()) : 1);
    }
  }

  /// The size of the block of one host; at least one byte, because a barrier must send a message, too.
  std::size_t block_bytes() const {
    const std::size_t bytes = op_.input.defined() ? op_.input.nbytes() : 0;
    return std::max<std::size_t>(1, op_.kind == CollectiveKind::kAllGather ? bytes * plan_.max_host_size : bytes);
  }

  bool reduces() const {
    return op_.kind == CollectiveKind::kAllReduce || op_.kind == CollectiveKind::kReduce ||
           op_.kind == CollectiveKind::kReduceScatter;
  }
  /// Reduces the elements of `slice` of all `inputs` into `output`.
  void reduce_into(void* output, c10::ArrayRef<const char*> inputs, ElementRange slice, int divisor) const {
    c10::SmallVector<const void*, 16> parts;
    for (const char* input : inputs) parts.push_back(input + slice.first * op_.input.element_size());
    shm::reduce_to(output, parts, op_.input.scalar_type(), op_.op, slice.count, divisor);
  }

  enum class Phase { kPublish, kWaitPublished, kWaitCrossHost, kWaitResult, kFinished };

  const Collective op_;
  const shm::ControlBlocks& control_blocks_;
  const std::uint32_t number_;
  const HostPlan& plan_;
  const int rank_;
  Transport* const leaders_;
  ResultBuffer& result_buffer_;
  Phase phase_ = Phase::kPublish;
  int next_member_ = 1;  // the local peer that this operation waits for
  at::Tensor host_block_;
  at::Tensor all_blocks_;
  PendingPtr cross_host_pending_;
};

/// all_reduce, reduce, reduce_scatter or broadcast. compute() blocks until the cross-host exchange is done, so the
/// operation needs a thread of its own.
class LargeCollective final : public shm::SyncOp {
 public:
  /// `rank` is the index of this rank in the group that `plan` describes. `cross_host_group` is null for a rank that is
  /// in none. `control_blocks` and `plan` must outlive this object.
  LargeCollective(const Collective& op, const shm::ControlBlocks& control_blocks, std::uint32_t number,
                  const HostPlan& plan, int rank, CrossHostGroup* cross_host_group)
      : shm::SyncOp(control_blocks, number), op_(op), plan_(plan), rank_(rank), cross_host_group_(cross_host_group) {}

  ~LargeCollective() override {
    if (!is_exposed())
      control_blocks_.arena().free(staged_);
    else if (!staged_)
      arena::quarantine_tensor(op_.input);  // the operation was abandoned while peers may still write there
  }

 private:
  void publish() override {
    arena::Arena& arena = control_blocks_.arena();
    const void* data = op_.input.const_data_ptr();
    if (op_.kind == CollectiveKind::kReduceScatter || !arena.contains(data)) {
      staged_ = arena.allocate(op_.input.nbytes());
      std::memcpy(staged_, data, op_.input.nbytes());
      data = staged_;
    }
    control_blocks_.own().offset[number_ % 2] = arena.offset_of(data);
  }

  void compute() override {
    if (!cross_host_group_) return;
    const auto location = plan_.locations[static_cast<std::size_t>(rank_)];
    const auto count = static_cast<std::size_t>(op_.input.numel());
    // Where each host needs other elements, a cross-host group exchanges a part of each of them, instead of a slice.
    const ElementRange slice =
        op_.needed ? ElementRange{0, count} : slice_of(count, plan_.num_cross_host_groups, location.local_rank);
    LocalSlices slices{.dtype = op_.input.scalar_type(), .count = slice.count};
    for (int local_rank = 0; local_rank < control_blocks_.size(); ++local_rank)
      slices.locals.push_back(control_blocks_.arena_of(local_rank) +
                              control_blocks_.of(local_rank).offset[number_ % 2] +
                              slice.first * op_.input.element_size());
    if (op_.kind == CollectiveKind::kBroadcast) {
      const auto root = plan_.locations[static_cast<std::size_t>(op_.root)];
      return cross_host_group_->broadcast(slices, root.host, static_cast<std::size_t>(root.local_rank));
    }
    const int divisor = op_.op == ReduceOp::kMean ? static_cast<int>(plan_.locations.size()) : 1;
    if (op_.needed)
      cross_host_group_->reduce_scatter(slices, share_of(*op_.needed, plan_.num_cross_host_groups, location.local_rank),
                                        op_.op, divisor, op_.wire_dtype);
    else
      cross_host_group_->all_reduce(slices, op_.op, divisor, {op_.wire_dtype, op_.error_feedback.get()});
  }

  void complete() override {
    if (!staged_) return;
    const auto* result = static_cast<const char*>(staged_);
    if (op_.kind == CollectiveKind::kReduceScatter)
      std::memcpy(op_.output.mutable_data_ptr(), result + op_.output.nbytes() * static_cast<std::size_t>(rank_),
                  op_.output.nbytes());
    else if (receives_result())
      std::memcpy(op_.output.mutable_data_ptr(), result, op_.output.nbytes());
    control_blocks_.arena().free(std::exchange(staged_, nullptr));
  }

  bool is_complete_after_compute() const override { return false; }

  /// True if complete() must copy the result to this rank's tensor: a reduce writes it at the root, a broadcast
  /// everywhere but at the root.
  bool receives_result() const {
    return op_.kind == CollectiveKind::kAllReduce || (op_.kind == CollectiveKind::kReduce) == (op_.root == rank_);
  }

  const Collective op_;
  const HostPlan& plan_;
  const int rank_;
  CrossHostGroup* const cross_host_group_;
  void* staged_ = nullptr;  // copy in the arena if the tensor is outside it or must not change
};

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
    abort_engines(closed_error("hierarchy", rank_));
  }

  std::string_view name() const override { return "hierarchy"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all{.wire_dtypes = {at::kFloat, at::kBFloat16, at::kHalf, at::kChar}};
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
