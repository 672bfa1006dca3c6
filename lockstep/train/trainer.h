// fit(): the loop that everybody writes, with what everybody expects of it.
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/module_io.h"
#include "lockstep/comm/group.h"
#include "lockstep/data/loader.h"
#include "lockstep/train/fit_loop.h"
#include "lockstep/train/step_error.h"

namespace lockstep::train {

/// A module that can be trained: an ordinary torch module with
///
///   torch::Tensor training_step(Batch& batch, StepLog& log);         // the mean loss of this rank's batch
///   std::vector<OptimizerConfig> configure_optimizers(TrainingSetup& setup);
///
/// and, for a validation, with one of
///
///   torch::Tensor validation_step(Batch& batch, StepLog& log);       // its mean loss becomes "val_loss"
///   void validation_step(Batch& batch, StepLog& log);
template <typename M, typename Batch>
concept Trainable =
    std::derived_from<M, torch::nn::Module> && requires(M& module, Batch& batch, StepLog& log, TrainingSetup& setup) {
      { module.training_step(batch, log) } -> std::convertible_to<at::Tensor>;
      { module.configure_optimizers(setup) } -> std::convertible_to<std::vector<OptimizerConfig>>;
    };
template <typename M, typename Batch>
concept Validatable = requires(M& module, Batch& batch, StepLog& log) { module.validation_step(batch, log); };

/// One training after another. All ranks make it and call it alike.
///
///   lockstep::Trainer trainer({.max_epochs = 5, .precision = "bf16-mixed"});
///   auto loader = lockstep::data::make_loader(dataset, trainer.world(), {.batch_size = 64, .device =
///   trainer.world().device()}); const auto result = trainer.fit(net, loader, validation_loader); return
///   result.exit_code();
///
/// With several optimizers training_step() is called for each in turn, with StepLog::optimizer; its gradients go to the
/// parameters of that optimizer alone. Batch norm and the like are as the module was given: in training, unless parts
/// of it were in eval(). What training_step() and validation_step() throw comes out of it as a StepError, which names
/// the step and the samples, and holds what was thrown; the other ranks learn of it when this one is gone.
class Trainer {
 public:
  /// In a program that no launcher has started it starts `options.devices` ranks on each of `options.nodes` hosts, of
  /// this program with the same arguments, and does not return: make it first in main(). Then joins the other ranks.
  /// Throws UsageError.
  explicit Trainer(const TrainerOptions& options = {});

  comm::Group& world() { return world_; }
  /// As they hold together.
  const TrainerOptions& options() const { return options_; }

  /// Before fit().
  void add(std::shared_ptr<Callback> callback) { callbacks_.push_back(std::move(callback)); }
  /// What checkpoints are to hold besides: each rank's own `state`, which outlives the Trainer. A training that goes on
  /// loads it before its first step; on a rank that the job before did not have, rank 0's. Names: of a-z, A-Z, 0-9, _
  /// and -, 50 of them at most, each once; all ranks give the same ones. Throws UsageError.
  void register_for_checkpointing(const std::string& name, checkpoint::Stateful& state);

  /// Trains until one of the options says that it is enough. A second training of the same Trainer has the name NAME.2,
  /// and so on. Throws UsageError.
  template <typename H, typename Batch>
    requires checkpoint::ModuleHandle<std::remove_reference_t<H>> &&
             Trainable<std::remove_reference_t<decltype(checkpoint::detail::module_of(std::declval<H&>()))>, Batch>
  FitResult fit(H&& holder, data::Loader<Batch> loader) {
    auto& module = checkpoint::detail::module_of(holder);
    return run_fit(world_, options_, make_components(module, loader));
  }
  /// And validates. The validation's loader gives no sample twice: ShardMode::kExact, or kDrop.
  template <typename H, typename Batch, typename ValBatch>
    requires checkpoint::ModuleHandle<std::remove_reference_t<H>> &&
             Trainable<std::remove_reference_t<decltype(checkpoint::detail::module_of(std::declval<H&>()))>, Batch> &&
             Validatable<std::remove_reference_t<decltype(checkpoint::detail::module_of(std::declval<H&>()))>, ValBatch>
  FitResult fit(H&& holder, data::Loader<Batch> loader, data::Loader<ValBatch> validation) {
    auto& module = checkpoint::detail::module_of(holder);
    FitComponents all = make_components(module, loader);
    all.val = make_validation_runner(module, std::move(validation));
    return run_fit(world_, options_, std::move(all));
  }
  /// One pass, of `limit_val_batches`: means over the samples of all ranks.
  template <typename H, typename ValBatch>
    requires checkpoint::ModuleHandle<std::remove_reference_t<H>> &&
             Validatable<std::remove_reference_t<decltype(checkpoint::detail::module_of(std::declval<H&>()))>, ValBatch>
  NamedValues validate(H&& holder, data::Loader<ValBatch> validation) {
    auto& module = checkpoint::detail::module_of(holder);
    FitComponents all{.module = module};
    all.val = make_validation_runner(module, std::move(validation));
    return run_validation(world_, options_, std::move(all));
  }

 private:
  template <typename M, typename Batch>
  FitComponents make_components(M& module, data::Loader<Batch> loader) {
    FitComponents all{.module = module, .callbacks = callbacks_, .states = states_, .fit_number = ++num_fits_};
    all.configure_optimizers = [&module](TrainingSetup& setup) -> std::vector<OptimizerConfig> {
      return module.configure_optimizers(setup);
    };
    all.train = make_batch_runner(std::move(loader), [&module](Batch& batch, StepLog& log) -> at::Tensor {
      return module.training_step(batch, log);
    });
    return all;
  }
  template <typename M, typename Batch>
  static std::unique_ptr<Batches> make_validation_runner(M& module, data::Loader<Batch> loader) {
    return make_batch_runner(std::move(loader),
                             [&module](Batch& batch, StepLog& log) { return module.validation_step(batch, log); });
  }

  const TrainerOptions options_;
  comm::Group world_;
  std::vector<std::shared_ptr<Callback>> callbacks_;
  std::vector<std::pair<std::string, checkpoint::Stateful*>> states_;
  int num_fits_ = 0;
};

}  // namespace lockstep::train
