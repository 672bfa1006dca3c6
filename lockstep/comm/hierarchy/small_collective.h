// A small collective across hosts: the first ranks of the hosts exchange one message each way.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "lockstep/comm/hierarchy/host_plan.h"
#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/shm/control_block.h"

namespace lockstep::comm::hierarchy {

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
                  const HostPlan& plan, int rank, Transport* leaders, ResultBuffer& result_buffer);
  /// Returns true if `op` is small enough. The answer is the same on all ranks.
  static bool accepts(const Collective& op);

  /// Makes progress until `deadline`. Returns true when the operation is finished. Throws the error of the cross-host
  /// transport, and std::runtime_error if the process of a local peer has ended.
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
  /// Reduces the elements of `slice` of all `inputs` into `output`.
  void reduce_into(void* output, c10::ArrayRef<const char*> inputs, Slice slice, int divisor) const;

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

}  // namespace lockstep::comm::hierarchy
