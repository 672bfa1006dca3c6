// Parameters averaged between hosts now and then, instead of gradients in every step.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/ddp/replicas.h"

namespace lockstep::ddp {

/// Local SGD between hosts (Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD, 2018;
/// https://arxiv.org/abs/1808.07217).
class HostAverager {
 public:
  /// Splits `group`: its operations are apart from the user's. Of `tensors` those of floating point are averaged. All
  /// ranks of a host hold the same values, so that each byte crosses once a host (comm/hierarchy); with one host
  /// nothing is ever sent.
  HostAverager(comm::Group& group, const NamedTensors& tensors, int period, at::ScalarType wire);

  /// Counts an exchange of gradients; the last of each `every` averages. True when the hosts have met in it; then
  /// `wish` is that of any rank.
  bool average_if_due(bool& stop_requested);
  /// Makes all ranks' tensors their mean, the same bits everywhere. Waits for all ranks.
  void average();

 private:
  void average_bucket(const std::vector<at::Tensor>& tensors);

  comm::Group group_;
  const int period_;
  const at::ScalarType wire_dtype_;
  bool has_several_hosts_ = false;
  int num_reductions_ = 0;
  std::vector<std::vector<at::Tensor>> buckets_;  // of one dtype each, of about kBucketBytes
};

}  // namespace lockstep::ddp
