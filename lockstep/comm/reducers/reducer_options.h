// ReducerOptions: how gradients are reduced.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/interface/gradient_hook.h"

namespace lockstep::comm::reducers {

/// Members of ddp::DdpOptions (ddp/ddp.h), which explains them. bucket_bytes, gradient_predivide_factor, wire_dtype and
/// layout apply to reducers that pack gradients into buckets; in-place reducers ignore them. A hook forces buckets.
struct ReducerOptions {
  std::vector<std::int64_t> bucket_bytes = {};
  std::shared_ptr<GradientHook> hook = nullptr;
  double gradient_predivide_factor = 0;
  at::ScalarType wire_dtype = at::kFloat;
  std::string layout = {};  ///< bucket_layout
  bool check_finite = false;
};

}  // namespace lockstep::comm::reducers
