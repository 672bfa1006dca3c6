// The measurements.
#pragma once

#include "bench/harness/options.h"
#include "bench/harness/result_printer.h"

namespace lockstep::bench {

/// Does what the options say and reports it. Throws UsageError, SystemError, and CommError when an implementation
/// fails.
void run_benchmarks(const Options& options, ResultPrinter& report);

}  // namespace lockstep::bench
