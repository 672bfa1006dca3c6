// The Trainer: a training loop with validation, checkpoints, logging and restarts.
#pragma once

#include <concepts>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"
#include "lockstep/data/loader.h"
#include "lockstep/nn/module_ref.h"
#include "lockstep/train/batch_runner.h"
#include "lockstep/train/fit_loop.h"

namespace lockstep::training {

/// A module that fit() can train: an ordinary torch module with
///
///   torch::Tensor training_step(Batch& batch, StepLog& log);         // the mean loss of this rank's batch
///   std::vector<OptimizerConfig> configure_optimizers(TrainingSetup& setup);
///
/// and, for validation, one of
///
///   torch::Tensor validation_step(Batch& batch, StepLog& log);       // the mean loss; logged as "val_loss"
///   void validation_step(Batch& batch, StepLog& log);
template <typename M, typename Batch>
concept Trainable =
    std::derived_from<M, torch::nn::Module> && requires(M& module, Batch& batch, StepLog& log, TrainingSetup& setup) {
      { module.training_step(batch, log) } -> std::convertible_to<at::Tensor>;
      { module.configure_optimizers(setup) } -> std::convertible_to<std::vector<OptimizerConfig>>;
    };
template <typename M, typename Batch>
concept Validatable = requires(M& module, Batch& batch, StepLog& log) { module.validation_step(batch, log); };

/// Trains modules, one fit() after another. All ranks construct it and call its functions in the same order. Used by
/// one thread.
///
///   lockstep::Trainer trainer({.max_epochs = 5, .precision = "bf16-mixed"});
///   auto loader = lockstep::data::make_loader(dataset, trainer.world(), {.batch_size = 64});
///   const auto result = trainer.fit(net, loader, validation_loader);
///   return result.exit_code();
///
/// With several optimizers, training_step() is called once for each, with its index in StepLog::optimizer, and only the
/// parameters of that optimizer receive gradients. A module in eval() mode is set to training mode; submodules that
/// were in eval() inside a module in training mode stay there. If training_step() or validation_step() throws, fit()
/// throws a StepError that names the step and the samples, with the exception nested; the other ranks fail when this
/// rank exits.
class Trainer {
 public:
  /// In a program without a launcher, starts `options.devices` ranks of this program, with the same arguments, on each
  /// of `options.nodes` hosts and does not return in the calling process: construct it first in main(). In a rank,
  /// joins the other ranks and blocks until all are connected. Throws UsageError.
  explicit Trainer(const TrainerOptions& options = {});

  comm::Group& world() { return world_; }
  /// The options after resolve_options().
  const TrainerOptions& options() const { return options_; }

  /// Adds a callback. Call it before fit().
  void add(std::shared_ptr<Callback> callback) { callbacks_.push_back(std::move(callback)); }
  /// Adds `state` of each rank to the checkpoints. It must outlive the Trainer. A run that resumes loads it before its
  /// first step; a rank that did not exist in the previous job loads that of rank 0. A name has 1 to 50 characters of
  /// a-z, A-Z, 0-9, _ and - and is used once; all ranks must register the same names. Throws UsageError.
  void register_for_checkpointing(const std::string& name, checkpoint::Stateful& state);

  /// Trains until a limit of the options is reached, a callback stops it, or the job receives a stop signal. All ranks
  /// call it, and it blocks until training ends. The runs of later fit() calls of the same Trainer are named NAME.2,
  /// NAME.3 and so on. Throws UsageError, StepError, and CommError when another rank fails.
  template <typename H, typename Batch>
    requires Trainable<nn::ModuleOf<H>, Batch>
  FitResult fit(H&& module_or_handle, data::Loader<Batch> loader) {
    auto& module = nn::module_of(module_or_handle);
    return run_fit(world_, options_, make_components(module, loader));
  }
  /// The same with validation. The validation loader must not repeat samples: ShardMode::kExact or kDrop.
  template <typename H, typename Batch, typename ValBatch>
    requires Trainable<nn::ModuleOf<H>, Batch> && Validatable<nn::ModuleOf<H>, ValBatch>
  FitResult fit(H&& module_or_handle, data::Loader<Batch> loader, data::Loader<ValBatch> validation) {
    auto& module = nn::module_of(module_or_handle);
    FitComponents all = make_components(module, loader);
    all.val = make_validation_runner(module, validation);
    return run_fit(world_, options_, std::move(all));
  }
  /// Runs one validation of at most `limit_val_batches` and returns means over the samples of all ranks.
  template <typename H, typename ValBatch>
    requires Validatable<nn::ModuleOf<H>, ValBatch>
  NamedValues validate(H&& module_or_handle, data::Loader<ValBatch> validation) {
    auto& module = nn::module_of(module_or_handle);
    FitComponents all{.module = module};
    all.val = make_validation_runner(module, validation);
    return run_validation(world_, options_, std::move(all));
  }

 private:
  template <typename M, typename Batch>
  FitComponents make_components(M& module, const data::Loader<Batch>& loader) {
    FitComponents all{.module = module, .callbacks = callbacks_, .states = states_, .fit_number = ++num_fits_};
    all.configure_optimizers = [&module](TrainingSetup& setup) -> std::vector<OptimizerConfig> {
      return module.configure_optimizers(setup);
    };
    all.train = std::make_unique<BatchRunner>(
        loader, [&module](Batch& batch, StepLog& log) -> at::Tensor { return module.training_step(batch, log); });
    return all;
  }
  template <typename M, typename Batch>
  static std::unique_ptr<BatchRunner> make_validation_runner(M& module, const data::Loader<Batch>& loader) {
    return std::make_unique<BatchRunner>(
        loader, [&module](Batch& batch, StepLog& log) { return module.validation_step(batch, log); });
  }

  const TrainerOptions options_;
  comm::Group world_;
  std::vector<std::shared_ptr<Callback>> callbacks_;
  std::vector<std::pair<std::string, checkpoint::Stateful*>> states_;
  int num_fits_ = 0;
};

}  // namespace lockstep::training
