// A small operation between hosts: one crossing, among the first members of the hosts, in one message each way.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "lockstep/comm/hierarchy/host_plan.h"
#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/shm/control_block.h"

namespace lockstep::comm {

/// What a host's first member keeps for small operations: where it puts what came from all hosts, for the others to
/// read.
struct Results {
  void* data = nullptr;  // in the arena; not given back: a neighbour may be reading it
  std::size_t bytes = 0;
};

/// all_reduce, reduce, reduce_scatter, all_gather, broadcast or barrier. Everybody shows its data on its board; the
/// first member of each host makes one block of them, all first members exchange their blocks, and everybody makes its
/// result of all blocks, in the same order.
class ShortOperation {
 public:
  /// `leaders` connects the first members of the hosts; null on the others.
  ShortOperation(const Collective& op, const Boards& boards, std::uint32_t number, const HostPlan& plan, int rank,
                 Transport* leaders, Results& results);
  /// Whether `op` is one. The same on all ranks.
  static bool takes(const Collective& op);

  /// Does what can be done until `deadline`. True when it is finished. Throws what the wire throws, and when a member
  /// of this host has ended.
  bool advance(base::Deadline deadline);

 private:
  void show();
  bool all_have_shown(base::Deadline deadline);
  void cross();
  void deliver(const char* blocks) const;
  std::size_t block_bytes() const;
  bool reduces() const {
    return op_.kind == Kind::kAllReduce || op_.kind == Kind::kReduce || op_.kind == Kind::kReduceScatter;
  }
  /// The parts of `inputs` that belong to `slice`.
  void reduce_into(void* output, c10::ArrayRef<const char*> inputs, Slice slice, int divisor) const;

  enum class Phase { kShow, kCollect, kCross, kRead, kFinished };

  const Collective op_;
  const Boards& boards_;
  const std::uint32_t number_;
  const HostPlan& plan_;
  const int rank_;
  Transport* const leaders_;
  Results& results_;
  Phase phase_ = Phase::kShow;
  int next_ = 1;  // the member of this host that is waited for
  at::Tensor block_;
  at::Tensor blocks_;
  PendingPtr crossing_;
};

}  // namespace lockstep::comm
