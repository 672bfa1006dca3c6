// Where an optimizer gets its gradients from.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::ddp {

/// The gradients of a DistributedDataParallel, for one optimizer that updates parameters in the pass that reads all ranks' gradients. After the
/// DistributedDataParallel has gone, every call but detach() is a UsageError.
class GradientSource {
 public:
  virtual ~GradientSource() = default;

  struct Parameter {
    std::string name;
    at::Tensor tensor;
  };
  /// All whose gradients are averaged; their place in this list is a piece's `part`.
  virtual std::vector<Parameter> parameters() const = 0;
  virtual comm::Group& group() = 0;

  /// True: the ranks reach each other's memory, and from now on backward() leaves each rank its own gradients and waits for nobody, until
  /// give(); `updated.taken()` is called for the updates of others in which this rank only keeps company. False: backward() averages as ever,
  /// and what follows detach() is of no use. Throws UsageError when there is an optimizer already.
  virtual bool attach(comm::PieceSink& updated) = 0;
  /// How many calls of backward() have reached a parameter.
  virtual std::uint64_t backwards() const = 0;
  /// backward() averages again.
  virtual void detach() noexcept = 0;

  // All ranks call these alike, and wait for each other. They throw CommError.
  /// Memory that all ranks see.
  virtual comm::CommonMemory make_common(std::size_t bytes) = 0;
  /// Makes every gradient the mean over the ranks, as backward() does without an optimizer attached.
  virtual void average() = 0;
  /// Gives the pieces of all gradients to the ranks' sinks. `options` is a fingerprint of what the sinks do; ranks that differ in it get a
  /// DesyncError, and no sink anything. Throws UsageError when a gradient has been changed since backward(): it is not the mean that one may
  /// think; after average() they may be changed, on all ranks alike.
  virtual void give(comm::Use use, std::uint64_t options, comm::PieceSink& sink) = 0;
};

}  // namespace lockstep::ddp
