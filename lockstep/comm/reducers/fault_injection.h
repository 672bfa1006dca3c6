// An exchange that goes wrong when it is told to.
#pragma once

#include <memory>

#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/job/injection.h"

namespace lockstep::comm {

/// `inner`, in which the fault happens once, at the time that it says. It is for this rank.
std::unique_ptr<GradientReducer> with_fault_injection(std::unique_ptr<GradientReducer> inner,
                                                      const job::Injection& injection);

}  // namespace lockstep::comm
