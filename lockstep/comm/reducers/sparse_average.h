// Sparse gradients: each rank's rows, brought together.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/comm/reducers/gradient_hook.h"

namespace lockstep::comm {

/// The sum over the ranks of `mine` (sparse COO, or undefined where this rank has none) times `scale`, coalesced. All
/// ranks call it; rows are added in rank order, so all get the same bits. `like` tells shape and dtype. Three small
/// all_gathers.
at::Tensor sum_sparse(const at::Tensor& mine, const at::Tensor& like, double scale, HookContext& wire);

/// The UsageError of what takes dense gradients only.
[[noreturn]] void throw_sparse_gradient(const std::string& parameter);

}  // namespace lockstep::comm
