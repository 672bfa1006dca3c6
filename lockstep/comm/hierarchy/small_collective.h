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
struct ResultBuffer {
  void* data = nullptr;  // in the arena; not given back: a neighbour may be reading it
  std::size_t bytes = 0;
};

/// all_reduce, reduce, reduce_scatter, all_gather, broadcast or barrier. Everybody shows its data on its board; the
/// first member of each host makes one block of them, all first members exchange their blocks, and everybody makes its
/// result of all blocks, in the same order.
class SmallCollective {
 public:
  /// `leaders` connects the first members of the hosts; null on the others.
  SmallCollective(const Collective& op, const ControlBlocks& control_blocks, std::uint32_t number, const HostPlan& plan,
                  int rank, Transport* leaders, ResultBuffer& result_buffer);
  /// Whether `op` is one. The same on all ranks.
  static bool accepts(const Collective& op);

  /// Does what can be done until `deadline`. True when it is finished. Throws what the wire throws, and when a member
  /// of this host has ended.
  bool advance(base::Deadline deadline);

 private:
  void publish();
  bool have_all_published(base::Deadline deadline);
  void start_cross_host();
  void write_output(const char* blocks) const;
  std::size_t block_bytes() const;
  bool reduces() const {
    return op_.kind == CollectiveKind::kAllReduce || op_.kind == CollectiveKind::kReduce ||
           op_.kind == CollectiveKind::kReduceScatter;
  }
  /// The parts of `inputs` that belong to `slice`.
  void reduce_into(void* output, c10::ArrayRef<const char*> inputs, Slice slice, int divisor) const;

  enum class Phase { kPublish, kWaitPublished, kWaitCrossHost, kWaitResult, kFinished };

  const Collective op_;
  const ControlBlocks& control_blocks_;
  const std::uint32_t number_;
  const HostPlan& plan_;
  const int rank_;
  Transport* const leaders_;
  ResultBuffer& result_buffer_;
  Phase phase_ = Phase::kPublish;
  int next_member_ = 1;  // the member of this host that is waited for
  at::Tensor host_block_;
  at::Tensor all_blocks_;
  PendingPtr cross_host_pending_;
};

}  // namespace lockstep::comm
