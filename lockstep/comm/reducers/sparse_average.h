// Reduces sparse gradients by gathering the rows of all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/comm/interface/gradient_hook.h"

namespace lockstep::comm::reducers {

/// Returns the sum over the ranks of `mine` (sparse COO, or undefined if this rank has none) times `scale`, coalesced,
/// with the shape and dtype of `example`. Rows are added in rank order, so all ranks get the same bits. All ranks must
/// call it; blocks for three all_gathers.
at::Tensor sum_sparse(const at::Tensor& mine, const at::Tensor& example, double scale, HookContext& context);

/// Throws the UsageError of a fused optimizer, which requires dense gradients.
[[noreturn]] void throw_sparse_gradient(const std::string& parameter);

}  // namespace lockstep::comm::reducers
