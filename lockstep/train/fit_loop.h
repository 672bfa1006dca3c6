// The loop that a Trainer runs.
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

namespace lockstep::train {

/// What a training is made of.
struct FitComponents {
  torch::nn::Module& module;
  std::function<std::vector<OptimizerConfig>(TrainingSetup&)> configure_optimizers;  ///< null: nothing is trained
  std::unique_ptr<Batches> train;                                                    ///< null likewise
  std::unique_ptr<Batches> val;                                                      ///< null: no validation
  std::vector<std::shared_ptr<Callback>> callbacks;
  std::vector<std::pair<std::string, checkpoint::Stateful*>> states;  ///< a user's own, by name
  int fit_number = 1;                                                 ///< of this training among those of its Trainer
};

struct FitResult {
  StopReason reason = StopReason::kCompleted;
  std::int64_t epochs = 0;  ///< that came to their end
  std::int64_t steps = 0;
  NamedValues train_values;  ///< means over all ranks of the last epoch, or of what there was of it
  NamedValues val_values;    ///< of the last validation
  std::string folder;        ///< of this run: "runs/mnist"; empty when it wrote nothing
  /// What main() should return: 0, and base's code for a job that was asked to leave, 75.
  int exit_code() const;
};

/// `options` have gone through settle(). All ranks call it alike.
FitResult run_fit(comm::Group world, const TrainerOptions& options, FitComponents parts);
/// One validation. Means over all ranks, each sample counted once.
NamedValues run_validation(comm::Group world, const TrainerOptions& options, FitComponents parts);

}  // namespace lockstep::train
