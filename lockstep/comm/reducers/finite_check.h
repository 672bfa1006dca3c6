// A GradientReducer decorator that rejects gradients with infinities or NaNs before they are reduced.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/interface/gradient_reducer.h"

namespace lockstep::comm::reducers {

/// Wraps `inner` so that ready() checks each gradient in one pass (minimum and maximum, which propagate a NaN). For a
/// gradient that is not finite, calls `fail` with a CommError kNonFinite that names `rank` and the gradient; `fail`
/// must throw.
std::unique_ptr<GradientReducer> with_finite_check(std::unique_ptr<GradientReducer> inner,
                                                   std::vector<std::string> names, int rank,
                                                   std::function<void(const base::CommError&)> fail);

}  // namespace lockstep::comm::reducers
