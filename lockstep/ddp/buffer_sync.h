// A model's buffers, kept equal once a step without disturbing a graph that waits for its backward().
#pragma once

#include <vector>

#include "lockstep/comm/interface/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/replicas.h"

namespace lockstep::ddp {

/// The values travel with the gradients: pack() before, unpack() after. Written through Tensor::data(), which leaves
/// version counters alone: autograd has saved what it needs of them, and another forward may be waiting for its
/// backward().
class BufferSync {
 public:
  BufferSync(NamedTensors buffers, BufferMode mode);
  /// Copies the buffers' values and returns what must travel.
  std::vector<comm::Collective> pack();
  void unpack(int world_size);

 private:
  NamedTensors broadcast_buffers_;  // travel as bytes from one rank
  NamedTensors averaged_buffers_;   // travel as numbers, summed
  at::Tensor bytes_;
  std::vector<at::Tensor> sums_;
};

}  // namespace lockstep::ddp
