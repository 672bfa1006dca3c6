// The measurements.
#pragma once

#include "bench/driver/options.h"
#include "bench/driver/report.h"

namespace lockstep::bench {

/// Does what the options say and reports it. Throws UsageError, SystemError, and CommError when an implementation
/// fails.
void run_benchmarks(const Options& options, Report& report);

}  // namespace lockstep::bench
