// Optimizer updates of whole tensors by ATen's operations, for parameters on a device, where kernels.h has no kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::kernels {

/// Tensors of one device and one dtype, float or double. All lists have the same order; gradients and states have the
/// shape and strides of their parameter.
struct ForeachArgs {
  std::vector<at::Tensor> parameters, gradients;
  std::vector<std::vector<at::Tensor>> states;  ///< by kind of state, then by parameter
  std::vector<at::Tensor> steps;  ///< step counts, float tensors of one element; the update increments them
  at::Tensor found_inf;  ///< undefined, or a float of one element on the same device; if it is 1, nothing changes
  at::Tensor lr;         ///< undefined, or a float of one element there, to be used instead of the lr of the scalars
};

// The results equal those of the kernels within rounding. The host does not wait for the device. Bias corrections and
// learning rate decay use the counts in `steps`, not the values in `scalars`.
void update(const ForeachArgs& args, const SgdScalars& scalars);
void update(const ForeachArgs& args, const AdamScalars& scalars);
void update(const ForeachArgs& args, const AdagradScalars& scalars);
// These compute the norms of whole parameters. If `found_inf` is defined, they copy everything that they change.
void update(const ForeachArgs& args, const LambScalars& scalars);
void update(const ForeachArgs& args, const LarsScalars& scalars);

}  // namespace lockstep::optim::kernels
