// An update of parameters on a device: lists of tensors instead of pieces.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/optim/fused/parameter_storage.h"
#include "lockstep/optim/fused/update_rule.h"

namespace lockstep::optim {

/// From gradients that are means already. What is alike (one group of options, dtype and device, as many updates) is
/// updated by one operation on all its tensors; of bfloat16 and half sums and state are in float.
class TensorPass {
 public:
  /// Both outlive this. Throws UsageError when an option of `rule` has no such update.
  TensorPass(const ParameterHome& home, Rule& rule, bool divided);

  /// After rule.prepare(). Calls updated(part) for each that has a gradient. With `skip`, a tensor of one element,
  /// nothing changes where it is not 0, and nobody waits to know; the rule's counts are behind then until settle().
  template <typename Updated>
  void update(const at::Tensor& skip, const Updated& updated) {
    for (const std::size_t part : run_all(skip)) updated(part);
  }
  /// The rule's counts of steps become those of updates that were made. Waits for the device, if they can differ.
  void settle();
  /// The reverse, after the rule's counts were set.
  void recount();

 private:
  struct Alike;
  std::vector<std::size_t> run_all(const at::Tensor& skip);
  void run(std::size_t part, const Alike& alike, const at::Tensor& skip);
  at::Tensor gradient_like(std::size_t part) const;
  at::Tensor own(std::size_t part, const at::Tensor& whole) const;

  const ParameterHome& home_;
  Rule& rule_;
  const bool divided_;             // states are of a part of the elements
  std::vector<at::Tensor> steps_;  // of each part, on its device
  bool behind_ = false;
};

}  // namespace lockstep::optim
