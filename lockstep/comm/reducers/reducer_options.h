// ReducerOptions: how gradients are reduced.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/interface/gradient_hook.h"

namespace lockstep::comm::reducers {

/// bucket_bytes, gradient_predivide_factor, wire_dtype and layout apply to reducers that pack gradients into buckets;
/// in-place reducers ignore them. A hook forces buckets.
struct ReducerOptions {
  /// Minimum size in bytes of the first bucket and of all other buckets. If empty, the sizes are measured when the
  /// reducer is made, and logged.
  std::vector<std::int64_t> bucket_bytes = {};
  std::shared_ptr<GradientHook> hook = nullptr;  ///< reduces buckets; if null, all_reduce sums them
  /// Gradients are divided by this factor before they are added, and their sum by the number of ranks over the factor.
  /// 0 means the number of ranks: everything is divided before the addition.
  double gradient_predivide_factor = 0;
  at::ScalarType wire_dtype = at::kFloat;  ///< as Collective::wire_dtype, for float32 buckets without a hook
  /// ReducerStats.layout of a reducer of the same gradients whose run this one continues: buckets have that layout from
  /// the first reduction on. If empty, the order in which the first backward() computes gradients determines the
  /// layout.
  std::string layout = {};
  bool check_finite = false;  ///< a gradient with an infinity or a NaN ends the job; the error has its name
};

}  // namespace lockstep::comm::reducers
