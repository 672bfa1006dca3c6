// How gradients travel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/comm/gradient_hook.h"

namespace lockstep::comm {

/// The first three of these are for gradients that are packed into buckets; where they are reduced in place there is none.
struct ExchangeOptions {
  /// Buckets have at least this many bytes: the first, and all others. Empty: measured when the exchange is made, and printed.
  std::vector<std::int64_t> bucket_bytes;
  std::shared_ptr<GradientHook> hook;  ///< what happens to a bucket on its way; null: summed as it is
  /// Gradients are divided by this before they are added, and the sum by what is left of the number of ranks; 0: by that number at once.
  double predivide = 0;
  at::ScalarType wire = at::kFloat;    ///< as Collective::wire
  bool check_finite = false;           ///< a gradient with an infinity or a NaN ends the job, by name
};

}  // namespace lockstep::comm
