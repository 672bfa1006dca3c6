// The training loop that Trainer::fit() runs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/batch_runner.h"
#include "lockstep/train/callback.h"
#include "lockstep/train/trainer_options.h"
#include "lockstep/train/training_setup.h"

namespace lockstep::training {

/// The inputs of a training run, with the types of the user's module erased.
struct FitComponents {
  torch::nn::Module& module;
  std::function<std::vector<OptimizerConfig>(TrainingSetup&)> configure_optimizers;  ///< null: validation only
  std::unique_ptr<BatchRunner> train;                                                ///< null: validation only
  std::unique_ptr<BatchRunner> val;                                                  ///< null: no validation
  std::vector<std::shared_ptr<Callback>> callbacks;
  std::vector<std::pair<std::string, checkpoint::Stateful*>> states;  ///< registered by the user, by name
  int fit_number = 1;                                                 ///< counts the fit() calls of the Trainer, from 1
};

struct FitResult {
  StopReason reason = StopReason::kCompleted;
  std::int64_t epochs = 0;  ///< completed
  std::int64_t steps = 0;
  NamedValues train_values;  ///< means over all ranks of the last, possibly partial, epoch
  NamedValues val_values;    ///< of the last validation
  std::string folder;        ///< directory of the run, such as "runs/mnist"; empty when nothing was written
  /// The exit code for main(): 75 (comm::kPreemptedExitCode) after kStopRequested, else 0.
  int exit_code() const;
};

/// Runs training from the start or from a checkpoint, until it ends. `options` must come from resolve_options().
/// Collective: all ranks call it with equal options.
FitResult run_fit(comm::Group world, const TrainerOptions& options, FitComponents components);
/// Runs one validation and returns means over all ranks, with each sample counted once. Collective.
NamedValues run_validation(comm::Group world, const TrainerOptions& options, FitComponents components);

}  // namespace lockstep::training
