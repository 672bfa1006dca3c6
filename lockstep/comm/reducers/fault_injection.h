// A GradientReducer decorator that injects a fault into a reduction, for tests.
#pragma once

#include <memory>

#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/job/injection.h"

namespace lockstep::comm::reducers {

/// Wraps `inner` so that the fault of `injection` occurs in the reduction that it names. It occurs once, except that
/// kSlow also delays all later reductions. Call it only on the rank that the fault is for.
std::unique_ptr<GradientReducer> with_fault_injection(std::unique_ptr<GradientReducer> inner,
                                                      const job::Injection& injection);

}  // namespace lockstep::comm::reducers
