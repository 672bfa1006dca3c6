// The benchmarks of lockstep-bench.
#pragma once

#include "bench/harness/options.h"
#include "bench/harness/result_printer.h"

namespace lockstep::bench {

/// Runs the benchmark that the options select and prints its results. Throws UsageError, SystemError, and CommError
/// when an implementation fails.
void run_benchmarks(const Options& options, ResultPrinter& report);

}  // namespace lockstep::bench
