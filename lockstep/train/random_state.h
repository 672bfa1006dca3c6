// The random number generators of a rank, as a part of a checkpoint.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/checkpoint/stateful.h"

namespace lockstep::training {

/// libtorch's default generators of the CPU and of a device. Holds no state of its own.
class RandomState final : public checkpoint::Stateful {
 public:
  explicit RandomState(at::Device device) : device_(device) {}

  /// Returns the state of the generators: "cpu" and, unless the device is the CPU, "device".
  checkpoint::StateDict state_dict() const override;
  /// Restores that state. A generator that the state does not contain is not changed. Throws UsageError for an invalid
  /// state.
  void load_state_dict(const checkpoint::StateDict& state) override;
  /// Seeds the generators of a rank that did not exist in the previous job. The result is a function of `state` and
  /// `rank`, and differs from the state of the rank that saved `state`.
  void derive(const checkpoint::StateDict& state, std::uint64_t rank);

 private:
  at::Device device_;
};

}  // namespace lockstep::training
