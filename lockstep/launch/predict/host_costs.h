// Measures what an exchange between hosts costs the CPU of this one.
#pragma once

#include "lockstep/launch/predict/step_model.h"

namespace lockstep::launcher::predict {

/// Copies 64 MiB in memory, and sends as many to itself over TCP on loopback, on one thread: some 0.2 s. Sets no
/// `shares_cores`. Throws SystemError.
HostCosts measure_host_costs();

}  // namespace lockstep::launcher::predict
