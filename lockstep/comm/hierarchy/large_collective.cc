#include "lockstep/comm/hierarchy/large_collective.h"

#include <cstring>

#include "lockstep/comm/arena/quarantine.h"

namespace lockstep::comm::hierarchy {

LargeCollective::LargeCollective(const Collective& op, const shm::ControlBlocks& control_blocks, std::uint32_t number,
                                 const HostPlan& plan, int rank, CrossHostGroup* cross_host_group)
    : shm::SyncOp(control_blocks, number), op_(op), plan_(plan), rank_(rank), cross_host_group_(cross_host_group) {}

LargeCollective::~LargeCollective() {
  if (!is_exposed())
    control_blocks_.arena().free(staged_);
  else if (!staged_)
    arena::quarantine_tensor(op_.input);  // the operation was abandoned while peers may still write there
}

void LargeCollective::publish() {
  arena::Arena& arena = control_blocks_.arena();
  const void* data = op_.input.const_data_ptr();
  if (op_.kind == CollectiveKind::kReduceScatter || !arena.contains(data)) {
    staged_ = arena.allocate(op_.input.nbytes());
    std::memcpy(staged_, data, op_.input.nbytes());
    data = staged_;
  }
  control_blocks_.own().offset[number_ % 2] = arena.offset_of(data);
}

void LargeCollective::compute() {
  if (!cross_host_group_) return;
  const auto element = op_.input.element_size();
  const auto location = plan_.locations[static_cast<std::size_t>(rank_)];
  const Slice slice =
      slice_of(static_cast<std::size_t>(op_.input.numel()), plan_.num_cross_host_groups, location.local_rank);
  LocalSlices slices{.dtype = op_.input.scalar_type(), .count = slice.count};
  for (int local_rank = 0; local_rank < control_blocks_.size(); ++local_rank)
    slices.locals.push_back(control_blocks_.arena_of(local_rank) + control_blocks_.of(local_rank).offset[number_ % 2] +
                            slice.first * element);
  if (op_.kind == CollectiveKind::kBroadcast) {
    const auto root = plan_.locations[static_cast<std::size_t>(op_.root)];
    return cross_host_group_->broadcast(slices, root.host, static_cast<std::size_t>(root.local_rank));
  }
  const int divisor = op_.op == ReduceOp::kMean ? static_cast<int>(plan_.locations.size()) : 1;
  cross_host_group_->all_reduce(slices, op_.op, divisor, op_.wire_dtype);
}

/// True if complete() must copy the result to this rank's tensor: a reduce writes it at the root, a broadcast
/// everywhere but at the root.
bool LargeCollective::receives_result() const {
  return op_.kind == CollectiveKind::kAllReduce || (op_.kind == CollectiveKind::kReduce) == (op_.root == rank_);
}

void LargeCollective::complete() {
  if (!staged_) return;
  const auto* result = static_cast<const char*>(staged_);
  if (op_.kind == CollectiveKind::kReduceScatter)
    std::memcpy(op_.output.mutable_data_ptr(), result + op_.output.nbytes() * static_cast<std::size_t>(rank_),
                op_.output.nbytes());
  else if (receives_result())
    std::memcpy(op_.output.mutable_data_ptr(), result, op_.output.nbytes());
  control_blocks_.arena().free(std::exchange(staged_, nullptr));
}

}  // namespace lockstep::comm::hierarchy
