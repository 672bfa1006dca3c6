// A large operation between hosts: local memory is read and written where it lies, and each column carries its slice.
#pragma once

#include <cstdint>

#include "lockstep/comm/hierarchy/cross_host_group.h"
#include "lockstep/comm/hierarchy/host_plan.h"
#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm {

/// all_reduce, reduce, reduce_scatter or broadcast. Its work() blocks for as long as the wire takes: for a thread of
/// its own.
class LargeCollective final : public SyncOp {
 public:
  /// `rank` of the group whose members `plan` places. `column` is null for members that are in none.
  LargeCollective(const Collective& op, const ControlBlocks& control_blocks, std::uint32_t number, const HostPlan& plan,
                  int rank, CrossHostGroup* cross_host_group);
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
  void* staged_ = nullptr;  // in the arena, when the tensor is not, or must not change
};

}  // namespace lockstep::comm
