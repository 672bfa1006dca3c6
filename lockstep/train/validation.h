// One pass over the validation batches.
#pragma once

#include "lockstep/amp/precision.h"
#include "lockstep/train/batch_runner.h"

namespace torch::nn {
class Module;
}

namespace lockstep::training {

/// The epoch and step after which a validation runs.
struct ValidationLocation {
  std::int64_t epoch = 0, step = 0;
};

/// Runs validation_step() on the first `num_batches` batches of this rank and returns means over all ranks of the
/// values that it logs, and of the loss that it returns, as "val_loss". Runs without gradients and with the module in
/// eval() mode; the previous mode of each submodule is restored, including after an exception. Collective; it waits for
/// the other ranks once, at its end.
NamedValues validate(const comm::Group& world, torch::nn::Module& module, BatchRunner& batches,
                     std::int64_t num_batches, const amp::Precision& precision, ValidationLocation location);

/// Throws UsageError for a loader that repeats samples to give all ranks the same number: means would count them twice.
void require_exact_sharding(const BatchRunner& batches);

}  // namespace lockstep::training
