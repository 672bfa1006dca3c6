// What a rank of lockstep-bench does: lockstep-bench rank WHAT IMPL ...
#pragma once

#include <string>
#include <vector>

namespace lockstep::bench {

/// `words` is what follows "rank". Returns when the driver has no more orders. Throws UsageError for what it does not
/// know.
void run_rank(const std::vector<std::string>& words);

/// memcpy: each rank copies from a buffer of its own to another, all at once. lockstep: Group::all_reduce. gloo: c10d's
/// ProcessGroupGloo. An order is {bytes, repetitions in a sample, samples}; the answer is the seconds of one
/// repetition, for each sample.
void run_all_reduce_rank(const std::string& impl, const std::string& prefix, std::size_t max_bytes);

/// Training steps of bench/ranks/models.h. The first answer is the number of parameters. An order is {steps not
/// counted, steps counted}; the answer is the seconds of the latter.
void run_step_rank(const std::string& impl, const std::string& model, const std::string& optimizer,
                   const std::string& prefix);

/// 2000 steps with a batch size that varies. The order is {steps}; the answer {high water, peak live} of the arena
/// after a tenth of the steps and after all.
void run_growth_rank(const std::string& prefix);

}  // namespace lockstep::bench
