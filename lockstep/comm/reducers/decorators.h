// Decorators of a GradientReducer: one checks that gradients are finite, one injects a fault into a reduction, for
// tests.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/job/injection.h"

namespace lockstep::comm::reducers {

/// Wraps `inner` so that ready() checks each gradient in one pass (minimum and maximum, which propagate a NaN). For a
/// gradient that is not finite, calls `fail` with a CommError kNonFinite that names `rank` and the gradient; `fail`
/// must throw.
std::unique_ptr<GradientReducer> with_finite_check(std::unique_ptr<GradientReducer> inner,
                                                   std::vector<std::string> names, int rank,
                                                   std::function<void(const base::CommError&)> fail);

/// Wraps `inner` so that the fault of `injection` occurs in the reduction that it names. It occurs once, except that
/// kSlow also delays all later reductions. Call it only on the rank that the fault is for.
std::unique_ptr<GradientReducer> with_fault_injection(std::unique_ptr<GradientReducer> inner,
                                                      const job::Injection& injection);

}  // namespace lockstep::comm::reducers
