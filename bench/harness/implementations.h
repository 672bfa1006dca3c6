// The implementations that lockstep-bench compares, and how to start them.
#pragma once

#include <string>
#include <vector>

#include "bench/harness/baselines.h"
#include "bench/harness/benchmark_job.h"
#include "bench/harness/options.h"
#include "bench/harness/result_printer.h"

namespace lockstep::bench {

/// Returns the reference for the memory bandwidth: each rank copies between two private buffers of `max_bytes`.
Implementation memcpy_implementation(int ranks, std::size_t max_bytes);

/// Returns lockstep, lockstep-ordinary (on memory that other ranks cannot read), gloo, and each MPI, whose programs are
/// compiled into `folder`; on request also lockstep-tcp. Missing baselines are reported. Throws UsageError when --impl
/// has an unknown name.
std::vector<Implementation> all_reduce_implementations(const Options& options, std::size_t max_bytes,
                                                       const std::string& folder, ResultPrinter& report);

/// Returns the implementations of a training step. In those named "-tuned", malloc is configured to keep freed memory.
/// Throws UsageError when --impl has an unknown name.
std::vector<Implementation> step_implementations(const Options& options, const std::string& model,
                                                 ResultPrinter& report);

/// Returns the implementations whose memory is compared. Each trains mlp-50m with AdamW.
std::vector<Implementation> memory_implementations(const Options& options, ResultPrinter& report);

/// Returns forward and backward in one process: with the arena, with malloc, and with malloc configured to keep freed
/// memory.
std::vector<Implementation> arena_implementations(const std::string& model);
/// Returns the process that measures the growth of its arena.
Implementation arena_growth_implementation();

/// Returns the commands that start ranks of /bin/true.
std::vector<Implementation> launch_implementations(const Options& options, const std::string& folder,
                                                   ResultPrinter& report);

}  // namespace lockstep::bench
