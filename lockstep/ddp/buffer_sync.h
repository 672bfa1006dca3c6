// Synchronises a model's buffers once per reduction without invalidating graphs whose backward() is still pending.
#pragma once

#include <vector>

#include "lockstep/comm/interface/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/replicas.h"

namespace lockstep::ddp {

/// The buffers are reduced in the same operation as the gradients: pack() before it, unpack() after it. unpack() writes
/// through Tensor::data(), which does not bump version counters, because a backward() of another forward() may still be
/// pending; autograd has saved the values that it needs.
class BufferSync {
 public:
  BufferSync(NamedTensors buffers, BufferMode mode);
  /// Copies the buffers' values into staging tensors and returns the collectives to run on them.
  std::vector<comm::Collective> pack();
  /// From now on, synchronises `tensor` in the place of `buffer`, if that is one of the buffers.
  void replace(const at::Tensor& buffer, const at::Tensor& tensor);
  /// Copies the results of the collectives of pack() back into the buffers.
  void unpack(int world_size);

 private:
  NamedTensors broadcast_buffers_;  // broadcast as bytes from one rank
  NamedTensors averaged_buffers_;   // summed over the ranks, then divided
  at::Tensor bytes_;
  std::vector<at::Tensor> sums_;
};

}  // namespace lockstep::ddp
