// The ranks of lockstep-bench: lockstep-bench rank WHAT IMPL ...
#pragma once

#include <string>
#include <vector>

namespace lockstep::bench {

/// Runs a rank. `words` are the arguments after "rank". Returns when the harness has no more requests. Throws
/// UsageError for unknown arguments.
void run_rank(const std::vector<std::string>& words);

/// Measures an all-reduce. `impl` is lockstep (Group::all_reduce), gloo (c10d's ProcessGroupGloo) or memcpy (all ranks
/// copy between two private buffers at the same time). A request is {bytes, repetitions per sample, samples}; the
/// result is the seconds per repetition of each sample.
void run_all_reduce_rank(const std::string& impl, const std::string& prefix, std::size_t max_bytes);

/// Measures training steps of the models in bench/ranks/models.h. The first result is the number of parameters. A
/// request is {warm-up steps, measured steps}; the result is the seconds of each measured step.
void run_step_rank(const std::string& impl, const std::string& model, const std::string& optimizer,
                   const std::string& prefix);

/// Measures the growth of the arena in steps with a varying batch size. A request is {steps}; the result is {high
/// water, peak live} bytes of the arena after a tenth of the steps, and again after all steps.
void run_growth_rank(const std::string& prefix);

}  // namespace lockstep::bench
