// Averages parameters between hosts every N reductions, instead of gradients in every step.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/ddp/replicas.h"

namespace lockstep::ddp {

/// Local SGD between hosts (Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD, 2018;
/// https://arxiv.org/abs/1808.07217).
class HostAverager {
 public:
  /// Splits `group`, so that its operations are independent of the user's; a collective of all ranks. Averages the
  /// floating-point tensors among `tensors` every `period` reductions, sent between hosts as `wire_dtype`. All ranks of
  /// a host hold the same values, so each byte is sent once per host (comm/hierarchy); with one host nothing is sent.
  /// `memory_of` returns the tensor into which the mean of one of `tensors` is written.
  using MemoryOf = std::function<const at::Tensor&(const at::Tensor&)>;
  HostAverager(const comm::Group& group, const NamedTensors& tensors, int period, at::ScalarType wire_dtype,
               MemoryOf memory_of);

  /// Counts a reduction of gradients, and averages in every `period`-th call, which blocks until all ranks have called
  /// it. Returns true if it averaged; then `stop_requested` is true on all ranks if it was true on any.
  bool average_if_due(bool& stop_requested);
  /// Replaces each tensor by its mean over all ranks, with the same bits everywhere. Blocks until all ranks have called
  /// it.
  void average();

 private:
  void average_bucket(const std::vector<at::Tensor>& tensors);

  comm::Group group_;
  const int period_;
  const at::ScalarType wire_dtype_;
  const MemoryOf memory_of_;
  bool has_several_hosts_ = false;
  int num_reductions_ = 0;
  std::vector<std::vector<at::Tensor>> buckets_;  // each of one dtype and at most about kBucketBytes
};

}  // namespace lockstep::ddp
