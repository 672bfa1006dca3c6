#include "lockstep/train/batch_runner.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>

#include "lockstep/amp/autocast.h"

namespace lockstep::training {
namespace {

constexpr std::size_t kMaxIndices = 16;

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// Puts the module in eval() mode and restores the mode of each submodule.
class EvalModeGuard {
 public:
  explicit EvalModeGuard(torch::nn::Module& module) : module_(module), was_training_(module.is_training()) {
    for (const auto& part : module.modules(/*include_self=*/false)) submodules_.emplace_back(part, part->is_training());
    module.eval();
  }
  ~EvalModeGuard() {
    module_.train(was_training_);
    for (const auto& [part, was_training] : submodules_)
      part->train(was_training);  // parents first, so that each child ends in its own mode
  }
  EvalModeGuard(const EvalModeGuard&) = delete;
  EvalModeGuard& operator=(const EvalModeGuard&) = delete;

 private:
  torch::nn::Module& module_;
  const bool was_training_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> submodules_;
};

/// Stops the loader's threads, including after an exception.
struct EndEpochGuard {
  BatchRunner& batches;
  ~EndEpochGuard() { batches.end_epoch(); }
};

}  // namespace

std::string describe_batch(const std::string& what, const StepLocation& location, const BatchRunner& batches) {
  const std::vector<std::size_t> indices = batches.indices();
  std::string samples;
  for (std::size_t i = 0; i < std::min(indices.size(), kMaxIndices); ++i)
    samples += (i == 0 ? "" : ", ") + std::to_string(indices[i]);
  if (indices.size() > kMaxIndices) samples += " and " + std::to_string(indices.size() - kMaxIndices) + " more";
  return what + " of step " + std::to_string(location.step + 1) + " (epoch " + std::to_string(location.epoch + 1) +
         ", batch " + std::to_string(location.batch + 1) + ", samples " + samples + ")";
}

at::Tensor BatchRunner::run_step(const char* what, StepLog& log) const {
  const auto where = [&] { return describe_batch(what, log, *this) + ": "; };
  try {
    return step_(batch_.get(), log);
  } catch (const base::CommError&) {
    throw;
  } catch (const base::Error& error) {
    std::throw_with_nested(StepError(error.cause(), where() + error.what(), error.hint()));
  } catch (const c10::Error& error) {
    std::throw_with_nested(StepError(base::Cause::kRankExited, where() + first_line(error.what_without_backtrace())));
  } catch (const std::exception& error) {
    std::throw_with_nested(StepError(base::Cause::kRankExited, where() + first_line(error.what())));
  } catch (...) {
    std::throw_with_nested(StepError(base::Cause::kRankExited, where() + "an exception that is not a std::exception"));
  }
}

void require_exact_sharding(const BatchRunner& batches) {
  if (!batches.loader().is_exact())
    throw base::UsageError(
        "the validation loader has mode kPad, which repeats samples, so that means would count them twice; expected "
        "kExact or kDrop",
        "Use make_loader(dataset, world, {.shuffle = false, .mode = lockstep::data::ShardMode::kExact})");
}

NamedValues validate(const comm::Group& world, torch::nn::Module& module, BatchRunner& batches,
                     std::int64_t num_batches, const amp::Precision& precision, const StepLocation& location) {
  Metrics metrics;
  {
    const EvalModeGuard eval_guard(module);
    const at::NoGradGuard no_grad;
    const EndEpochGuard epoch_guard{batches};
    StepLog log(metrics, "");
    log.epoch = location.epoch;
    log.step = location.step;
    batches.begin_epoch(0);
    for (log.batch = 0; log.batch < num_batches && batches.fetch_next(); ++log.batch) {
      log.num_samples = batches.num_samples();
      if (precision.weights != at::kFloat) batches.cast_batch(precision.weights);
      const amp::Autocast autocast(
          {.device = world.device().type(), .dtype = precision.autocast, .enabled = precision.autocast.has_value()});
      const at::Tensor loss = batches.run_step("validation_step()", log);
      if (loss.defined()) log.log("val_loss", loss);
    }
  }
  return mean_over_ranks(metrics, world);
}

}  // namespace lockstep::training
