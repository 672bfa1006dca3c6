// A large operation between hosts: local memory is read and written where it lies, and each column carries its slice.
#pragma once

#include <cstdint>

#include "lockstep/comm/hierarchy/cross_host_group.h"
#include "lockstep/comm/hierarchy/host_plan.h"
#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm {

/// all_reduce, reduce, reduce_scatter or broadcast. Its work() blocks for as long as the wire takes: for a thread of
/// its own.
class LongOperation final : public Meeting {
 public:
  /// `rank` of the group whose members `plan` places. `column` is null for members that are in none.
  LongOperation(const Collective& op, const Boards& boards, std::uint32_t number, const HostPlan& plan, int rank,
                Column* column);
  ~LongOperation() override;

 private:
  void show() override;
  void work() override;
  void finish() override;
  bool ends_with_work() const override { return false; }
  bool written() const;

  const Collective op_;
  const HostPlan& plan_;
  const int rank_;
  Column* const column_;
  void* staged_ = nullptr;  // in the arena, when the tensor is not, or must not change
};

}  // namespace lockstep::comm
