// StepError, which wraps an exception of a user's step and names the step and its samples.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/train/batch_runner.h"

namespace lockstep::training {

/// Thrown when training_step() or validation_step() throws. what() is "training_step() of step 57 (epoch 1, batch 6,
/// samples 3, 17, 88): " and the first line of the original message; the original exception is nested. The cause is
/// that of the original exception if that is a lockstep::Error, otherwise kRankExited.
class StepError : public base::Error {
 public:
  using base::Error::Error;
};

struct StepLocation {
  std::int64_t epoch = 0, batch = 0, step = 0;
};

/// Describes the current batch: "training_step() of step 57 (epoch 1, batch 6, samples 3, 17, 88)". At most the first
/// 16 samples are listed. The step is the one that the batch belongs to, counted from 1.
std::string describe_batch(const std::string& what, const StepLocation& location, const BatchRunner& batches);

/// Call it inside a catch block. Throws a StepError with the caught exception nested; rethrows a CommError unchanged.
[[noreturn]] void rethrow_as_step_error(const std::string& what, const StepLocation& location,
                                        const BatchRunner& batches);

/// Calls the user's `step` and converts its exceptions to StepError.
template <typename Step>
auto call_user_step(const char* what, const StepLocation& location, const BatchRunner& batches, Step step) {
  try {
    return step();
  } catch (...) {
    rethrow_as_step_error(what, location, batches);
  }
}

}  // namespace lockstep::training
