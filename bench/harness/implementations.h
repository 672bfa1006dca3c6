// How each implementation is started.
#pragma once

#include <string>
#include <vector>

#include "bench/harness/benchmark_job.h"
#include "bench/harness/options.h"
#include "bench/harness/baselines.h"
#include "bench/harness/result_printer.h"

namespace lockstep::bench {

/// Every rank copies from a buffer of its own to another of `max_bytes`: the yardstick.
Entrant memcpy_entrant(int ranks, std::size_t max_bytes);

/// lockstep, lockstep-ordinary (memory that neighbours cannot read), gloo, and every MPI, whose programs are compiled
/// into `folder`. Those that are missing are reported. Throws UsageError when --impl names one that there is not.
std::vector<Entrant> all_reduce_entrants(const Options& options, std::size_t max_bytes, const std::string& folder,
                                         Report& report);

/// The implementations of a training step, those with "-tuned" with malloc told to keep its memory.
std::vector<Entrant> step_entrants(const Options& options, const std::string& model, Report& report);

/// The two whose memory is compared, training mlp-50m with AdamW.
std::vector<Entrant> memory_entrants(const Options& options, Report& report);

/// Forward and backward in one process: with the arena, with malloc, and with malloc told to keep its memory.
std::vector<Entrant> arena_entrants(const std::string& model);
/// The process whose arena is watched.
Entrant growth_entrant();

/// Commands that start and end ranks which do nothing.
std::vector<Entrant> launch_entrants(const Options& options, const std::string& folder, Report& report);

}  // namespace lockstep::bench
