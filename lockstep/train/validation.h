// A pass over the validation's batches.
#pragma once

#include "lockstep/amp/precision.h"
#include "lockstep/train/batch_runner.h"

namespace torch::nn {
class Module;
}

namespace lockstep::train {

struct ValidationLocation {
  std::int64_t epoch = 0, step = 0;
};

/// Means over all ranks of what the module's validation_step() logs in the first `num_batches` of this rank, and
/// "val_loss" of what it returns, if it returns something. Without gradients and with the module in eval(), which is
/// put back as it was, also after an exception. All ranks call it alike; it waits for them once, at its end.
NamedValues validate(comm::Group& world, torch::nn::Module& module, Batches& batches, std::int64_t num_batches,
                     const amp::Precision& precision, ValidationLocation location);

/// Throws UsageError for a loader that gives some samples twice so that ranks have equally many: means would count
/// those twice.
void require_exact_sharding(const Batches& batches);

}  // namespace lockstep::train
