// Parameters averaged between hosts now and then, instead of gradients in every step.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/ddp/replicas.h"

namespace lockstep::ddp {

/// Local SGD between hosts (Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD, 2018;
/// https://arxiv.org/abs/1808.07217).
class HostSync {
 public:
  /// Splits `group`: its operations are apart from the user's. Of `tensors` those of floating point are averaged. All
  /// ranks of a host hold the same values, so that each byte crosses once a host (comm/hierarchy); with one host
  /// nothing is ever sent.
  HostSync(comm::Group& group, const NamedTensors& tensors, int every, at::ScalarType wire);

  /// Counts an exchange of gradients; the last of each `every` averages. True when the hosts have met in it; then
  /// `wish` is that of any rank.
  bool exchanged(bool& wish);
  /// Makes all ranks' tensors their mean, the same bits everywhere. Waits for all ranks.
  void average();

 private:
  void average_together(const std::vector<at::Tensor>& tensors);

  comm::Group group_;
  const int every_;
  const at::ScalarType wire_;
  bool several_hosts_ = false;
  int exchanges_ = 0;
  std::vector<std::vector<at::Tensor>> packs_;  // of one dtype each, of about kPackBytes
};

}  // namespace lockstep::ddp
