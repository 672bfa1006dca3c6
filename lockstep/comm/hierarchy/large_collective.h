// A large collective across hosts: each cross-host group exchanges its slice directly from the memory of the local
// ranks.
#pragma once

#include <cstdint>

#include "lockstep/comm/hierarchy/cross_host_group.h"
#include "lockstep/comm/hierarchy/host_plan.h"
#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm::hierarchy {

/// all_reduce, reduce, reduce_scatter or broadcast. compute() blocks until the cross-host exchange is done, so the
/// operation needs a thread of its own.
class LargeCollective final : public shm::SyncOp {
 public:
  /// `rank` is the index of this rank in the group that `plan` describes. `cross_host_group` is null for a rank that is
  /// in none. `control_blocks` and `plan` must outlive this object.
  LargeCollective(const Collective& op, const shm::ControlBlocks& control_blocks, std::uint32_t number,
                  const HostPlan& plan, int rank, CrossHostGroup* cross_host_group);
  ~LargeCollective() override;

 private:
  void publish() override;
  void compute() override;
  void complete() override;
  bool is_complete_after_compute() const override { return false; }
  bool receives_result() const;

  const Collective op_;
  const HostPlan& plan_;
  const int rank_;
  CrossHostGroup* const cross_host_group_;
  void* staged_ = nullptr;  // copy in the arena if the tensor is outside it or must not change
};

}  // namespace lockstep::comm::hierarchy
