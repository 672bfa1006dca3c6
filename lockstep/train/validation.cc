#include "lockstep/train/validation.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

#include "lockstep/amp/autocast.h"
#include "lockstep/base/error.h"
#include "lockstep/train/step_error.h"

namespace lockstep::train {
namespace {

/// What was in eval() before stays in it.
class EvalModeGuard {
 public:
  explicit EvalModeGuard(torch::nn::Module& module) : module_(module), was_training_(module.is_training()) {
    for (const auto& part : module.modules(/*include_self=*/false)) submodules_.emplace_back(part, part->is_training());
    module.eval();
  }
  ~EvalModeGuard() {
    module_.train(was_training_);
    for (const auto& [part, was_training] : submodules_)
      part->train(was_training);  // from outside to inside: each has its own in the end
  }
  EvalModeGuard(const EvalModeGuard&) = delete;
  EvalModeGuard& operator=(const EvalModeGuard&) = delete;

 private:
  torch::nn::Module& module_;
  const bool was_training_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> submodules_;
};

/// The loader's threads stop, whatever happens.
struct EndEpochGuard {
  Batches& batches;
  ~EndEpochGuard() { batches.end(); }
};

}  // namespace

void require_exact_sharding(const Batches& batches) {
  if (!batches.is_exact())
    throw base::UsageError(
        "the loader of the validation has mode kPad, which hands some samples out twice: means would count them twice; "
        "allowed are kExact and kDrop",
        "make_loader(dataset, world, {.shuffle = false, .mode = lockstep::data::ShardMode::kExact})");
}

NamedValues validate(comm::Group& world, torch::nn::Module& module, Batches& batches, std::int64_t num_batches,
                     const amp::Precision& precision, ValidationLocation location) {
  Metrics metrics;
  {
    const EvalModeGuard eval_guard(module);
    const at::NoGradGuard no_grad;
    const EndEpochGuard epoch_guard{batches};
    StepLog log(metrics, "");
    log.epoch = location.epoch;
    log.step = location.step;
    batches.begin(0);
    for (log.batch = 0; log.batch < num_batches && batches.fetch_next(); ++log.batch) {
      log.num_samples = batches.num_samples();
      if (precision.weights != at::kFloat) batches.cast(precision.weights);
      const amp::Autocast autocast(
          {.device = world.device().type(), .dtype = precision.autocast, .enabled = precision.autocast.has_value()});
      const at::Tensor loss = call_user_step("validation_step()", {log.epoch, log.batch, log.step}, batches,
                                             [&] { return batches.step(log); });
      if (loss.defined()) log.log("val_loss", loss);
    }
  }
  return mean_over_ranks(metrics, world);
}

}  // namespace lockstep::train
