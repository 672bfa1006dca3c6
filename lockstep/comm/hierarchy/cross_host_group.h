// What the members of a column do between hosts: exchange their slices.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "lockstep/comm/interface/transport.h"

namespace lockstep::comm {

/// A run of elements in the memory of each member of this host, in their order.
struct LocalSlices {
  at::ScalarType dtype = at::kFloat;
  std::vector<char*> locals;
  std::size_t count = 0;
};

/// Calls block until they are done, stop is set or the wire fails; then they throw. One thread at a time; all members
/// of the column make the same calls in the same order.
class CrossHostGroup {
 public:
  /// Member `host` of `outer`, which has one on each of `num_hosts` hosts. `stop` ends all waits within 20 ms.
  CrossHostGroup(std::shared_ptr<Transport> cross_host_transport, int host, int num_hosts,
                 const std::atomic<bool>& stop);

  /// Every local slice becomes the reduction of all slices of all hosts, the same bits everywhere. The slices of a host
  /// are reduced, rounded to `wire` if they are float32, and sent, each part to the host that owns it, which adds them
  /// in the order of the hosts, divides by `divisor`, rounds once, and sends the result to all. In pieces, several of
  /// which are under way.
  void all_reduce(const LocalSlices& slices, ReduceOp op, int divisor, at::ScalarType wire_dtype);
  /// Every local slice becomes local 0's of `root`, a host; there it is slice `source` of the locals.
  void broadcast(const LocalSlices& slices, int root, std::size_t source);

 private:
  /// Memory for one piece on its way: what this host sends, what it gets of its own part from all, that part, and all
  /// parts.
  struct PipelineSlot {
    at::Tensor sent, received, part, all;
    PendingPtr scatter_pending, gather_pending;
    std::size_t first = 0;
    std::size_t count = 0;
    std::size_t part_count = 0;
  };
  void start_scatter(const LocalSlices& slices, ReduceOp op, at::ScalarType wire_dtype, PipelineSlot& piece);
  void start_gather(const LocalSlices& slices, ReduceOp op, int divisor, at::ScalarType wire_dtype,
                    PipelineSlot& piece);
  void store_result(const LocalSlices& slices, at::ScalarType wire_dtype, PipelineSlot& piece);
  void allocate_slots(std::size_t chunk_bytes);
  void wait(const PendingPtr& pending) const;
  PendingPtr start(CollectiveKind kind, const at::Tensor& input, const at::Tensor& output, int root = 0);

  const std::shared_ptr<Transport> cross_host_transport_;
  const int host_;
  const std::size_t num_hosts_;
  const std::atomic<bool>& stop_;
  std::uint64_t seq_ = 0;
  std::vector<PipelineSlot> slots_;
  at::Tensor unrounded_;  // a host's sum before it is rounded
};

}  // namespace lockstep::comm
