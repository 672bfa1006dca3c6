// What a user's step throws, with the place where it was.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/train/batch_runner.h"

namespace lockstep::train {

/// training_step() or validation_step() has thrown. what() is "training_step() of step 57 (epoch 1, batch 6, samples 3,
/// 17, 88): " and the first line of what it threw, which is nested. The cause is that of an error of Lockstep, else
/// kRankExited.
class StepError : public base::Error {
 public:
  using base::Error::Error;
};

struct StepLocation {
  std::int64_t epoch = 0, batch = 0, step = 0;
};

/// "training_step() of step 57 (epoch 1, batch 6, samples 3, 17, 88)": of the batch that was drawn last; of many
/// samples the first ones. The step is the one that the batch belongs to, from 1.
std::string describe_batch(const std::string& what, const StepLocation& location, const Batches& batches);

/// Inside a catch block: throws StepError with what was caught, but an error of communication as it is.
[[noreturn]] void rethrow_as_step_error(const std::string& what, const StepLocation& location, const Batches& batches);

/// Calls `step`, the user's.
template <typename Step>
auto call_user_step(const char* what, const StepLocation& location, const Batches& batches, Step step) {
  try {
    return step();
  } catch (...) {
    rethrow_as_step_error(what, location, batches);
  }
}

}  // namespace lockstep::train
