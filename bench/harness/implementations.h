// How each implementation is started.
#pragma once

#include <string>
#include <vector>

#include "bench/harness/baselines.h"
#include "bench/harness/benchmark_job.h"
#include "bench/harness/options.h"
#include "bench/harness/result_printer.h"

namespace lockstep::bench {

/// Every rank copies from a buffer of its own to another of `max_bytes`: the yardstick.
Implementation memcpy_implementation(int ranks, std::size_t max_bytes);

/// lockstep, lockstep-ordinary (memory that neighbours cannot read), gloo, and every MPI, whose programs are compiled
/// into `folder`. Those that are missing are reported. Throws UsageError when --impl names one that there is not.
std::vector<Implementation> all_reduce_implementations(const Options& options, std::size_t max_bytes,
                                                       const std::string& folder, ResultPrinter& report);

/// The implementations of a training step, those with "-tuned" with malloc told to keep its memory.
std::vector<Implementation> step_implementations(const Options& options, const std::string& model,
                                                 ResultPrinter& report);

/// The two whose memory is compared, training mlp-50m with AdamW.
std::vector<Implementation> memory_implementations(const Options& options, ResultPrinter& report);

/// Forward and backward in one process: with the arena, with malloc, and with malloc told to keep its memory.
std::vector<Implementation> arena_implementations(const std::string& model);
/// The process whose arena is watched.
Implementation arena_growth_implementation();

/// Commands that start and end ranks which do nothing.
std::vector<Implementation> launch_implementations(const Options& options, const std::string& folder,
                                                   ResultPrinter& report);

}  // namespace lockstep::bench
