// A cross-host group: one rank per host; these ranks exchange one slice of a large tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "lockstep/comm/interface/transport.h"

namespace lockstep::comm::hierarchy {

/// The same range of elements in the memory of each rank of this host, in the order of the ranks.
struct LocalSlices {
  at::ScalarType dtype = at::kFloat;
  std::vector<char*> locals;
  std::size_t count = 0;
};

/// How float32 is sent.
struct Wire {
  at::ScalarType dtype = at::kFloat;
  ErrorFeedback* error_feedback = nullptr;  ///< with int8; null: what rounding loses is lost
};

/// Each call blocks until the operation is done, and throws if `stop` is set or the cross-host transport fails. One
/// thread at a time may use it. All members of the group must make the same calls in the same order.
class CrossHostGroup {
 public:
  /// `cross_host_transport` has one member on each of `num_hosts` hosts; this one is member `host`. `stop` must outlive
  /// the group and ends all waits within 20 ms.
  CrossHostGroup(std::shared_ptr<Transport> cross_host_transport, int host, int num_hosts,
                 const std::atomic<bool>& stop);

  /// Replaces every local slice by the reduction of the slices of all ranks of all hosts, with the same bits
  /// everywhere. The group reduces the slices of this host, rounds float32 to `wire.dtype`, and sends each part to the
  /// host that owns it. The owner reduces the parts in the order of the hosts, divides by `divisor`, rounds once, and
  /// sends the result to all hosts. The slices are split into chunks, several of which are in flight. As int8, `op` is
  /// a sum.
  void all_reduce(const LocalSlices& slices, ReduceOp op, int divisor, Wire wire);
  /// As all_reduce(), but only the elements of needed[host], which are no other host's, reach that host; its other ones
  /// keep their values. Each host sends every other one what that needs. `wire_dtype` is not int8.
  void reduce_scatter(const LocalSlices& slices, const NeededElements& needed, ReduceOp op, int divisor,
                      at::ScalarType wire_dtype);
  /// Replaces every local slice by the one of host `root`. On that host it is slices.locals[source].
  void broadcast(const LocalSlices& slices, int root, std::size_t source);

 private:
  /// Buffers of one chunk in flight.
  struct PipelineSlot {
    at::Tensor sent;      // this host's sum
    at::Tensor received;  // this host's part from every host
    at::Tensor part;      // the result of this host's part
    at::Tensor all;       // the results of all parts
    PendingPtr scatter_pending, gather_pending;
    std::size_t first = 0;
    std::size_t count = 0;
    std::size_t part_count = 0;
    std::size_t part_bytes = 0;
  };
  void start_scatter(const LocalSlices& slices, ReduceOp op, Wire wire, PipelineSlot& slot);
  void encode_sums(PipelineSlot& slot, ErrorFeedback* error_feedback);
  void start_gather(ReduceOp op, int divisor, Wire wire, at::ScalarType dtype, PipelineSlot& slot);
  void reduce_parts(PipelineSlot& slot, ReduceOp op, int divisor, at::ScalarType wire_dtype);
  void add_encoded_parts(PipelineSlot& slot, int divisor, ErrorFeedback* error_feedback);
  void store_result(const LocalSlices& slices, Wire wire, PipelineSlot& slot);
  void start_scatter_of_needed(const LocalSlices& slices, const NeededElements& needed, ReduceOp op,
                               at::ScalarType wire_dtype, PipelineSlot& slot);
  void store_needed(const LocalSlices& slices, const std::vector<ElementRange>& needed, ReduceOp op, int divisor,
                    at::ScalarType wire_dtype, PipelineSlot& slot);
  void allocate_slots(std::size_t chunk_bytes);
  void wait(const PendingPtr& pending) const;
  PendingPtr start(CollectiveKind kind, const at::Tensor& input, const at::Tensor& output, int root = 0);

  const std::shared_ptr<Transport> cross_host_transport_;
  const int host_;
  const std::size_t num_hosts_;
  const std::atomic<bool>& stop_;
  std::uint64_t seq_ = 0;
  std::vector<PipelineSlot> slots_;
  at::Tensor unrounded_;  // this host's sum before it is rounded; of int8, then the result
  at::Tensor part_sums_;  // of this host's part, before they are sent as int8
};

}  // namespace lockstep::comm::hierarchy
