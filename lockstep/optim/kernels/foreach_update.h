// What optimizers do to whole tensors by ATen's operations: where there is no loop of loops.h, on a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim {

/// Tensors of one device and one dtype, float or double, each list in the same order; a gradient and state have their
/// parameter's shape and strides.
struct ForeachArgs {
  std::vector<at::Tensor> parameters, gradients;
  std::vector<std::vector<at::Tensor>> states;  ///< of each kind of state
  std::vector<at::Tensor> steps;                ///< float, of one element: how many updates each has had; counted here
  at::Tensor found_inf;  ///< undefined, or float of one element on the same device: not 0, and nothing changes
};

// The results are those of the loops within rounding. Nothing is read on the host. The counts in `steps` are what
// corrections of bias and decays of rates come from, not those of the rule.
void update(const ForeachArgs& args, const SgdScalars& scalars);
void update(const ForeachArgs& args, const AdamScalars& scalars);
void update(const ForeachArgs& args, const AdagradScalars& scalars);
// These need the norms of whole parameters. With `skip`, copies of what they change.
void update(const ForeachArgs& args, const LambScalars& scalars);
void update(const ForeachArgs& args, const LarsScalars& scalars);

}  // namespace lockstep::optim
