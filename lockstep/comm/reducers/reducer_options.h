// How gradients travel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/reducers/gradient_hook.h"

namespace lockstep::comm {

/// The first three of these are for gradients that are packed into buckets; where they are reduced in place there is
/// none.
struct ReducerOptions {
  /// Buckets have at least this many bytes: the first, and all others. Empty: measured when the exchange is made, and
  /// printed.
  std::vector<std::int64_t> bucket_bytes;
  std::shared_ptr<GradientHook> hook;  ///< what happens to a bucket on its way; null: summed as it is
  /// Gradients are divided by this before they are added, and the sum by what is left of the number of ranks; 0: by
  /// that number at once.
  double gradient_predivide_factor = 0;
  at::ScalarType wire = at::kFloat;  ///< as Collective::wire
  /// As ReducerStats.layout of an exchange of the same parts, from which this one goes on: buckets are laid out so
  /// from the first exchange on. Empty: in the order in which gradients are born in the first one.
  std::string layout;
  bool check_finite = false;  ///< a gradient with an infinity or a NaN ends the job, by name
};

}  // namespace lockstep::comm
