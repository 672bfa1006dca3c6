// The module, loaders and runs that the suites about resuming a training share.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/optim/schedules/schedule.h"
#include "lockstep/train/trainer.h"
#include "tests/conformance/ddp/test_models.h"

namespace lockstep::tests {

/// Returns a sample whose values depend only on its index.
inline data::Example sample(std::size_t index) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(index + 1);
  return {at::randn({7}, generator), at::randn({5}, generator)};
}

inline data::Loader<data::Example> loader_of() {
  return data::make_loader(52, sample, world(), {.batch_size = 4, .seed = 3});
}
inline data::Loader<data::Example> exact_loader() {
  return data::make_loader(11, sample, world(), {.batch_size = 2, .shuffle = false, .mode = data::ShardMode::kExact});
}

using MakeOptimizers =
    std::function<std::vector<training::OptimizerConfig>(torch::nn::Module& net, training::TrainingSetup& setup)>;

/// A module with dropout, which draws random numbers in each step, and with buffers.
struct NetImpl : MlpImpl {
  explicit NetImpl(MakeOptimizers make_optimizers) : make(std::move(make_optimizers)) {
    norm = register_module("norm", torch::nn::BatchNorm1d(7));
  }
  at::Tensor loss(const data::Example& batch) {
    const at::Tensor x = norm(batch.data.to(first->weight.scalar_type()));
    return torch::mse_loss(forward(torch::dropout(x, 0.2, is_training())).to(torch::kFloat),
                           batch.target.to(torch::kFloat));
  }
  at::Tensor training_step(data::Example& batch, training::StepLog&) { return loss(batch); }
  at::Tensor validation_step(data::Example& batch, training::StepLog& log) {
    log.log("near", 0.5);
    return loss(batch);
  }
  std::vector<training::OptimizerConfig> configure_optimizers(training::TrainingSetup& setup) {
    return make(*this, setup);
  }
  MakeOptimizers make;
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

inline MakeOptimizers sgd() {
  return [](torch::nn::Module&, training::TrainingSetup& setup) -> std::vector<training::OptimizerConfig> {
    return {{std::make_shared<torch::optim::SGD>(setup.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
             optim::cosine_decay({.steps = setup.total_steps()})}};
  };
}

/// A user's object in the checkpoint, with a different count on each rank.
struct StepCounter : checkpoint::Stateful {
  std::int64_t count = 0;
  checkpoint::StateDict state_dict() const override { return {{"count", count}}; }
  void load_state_dict(const checkpoint::StateDict& state) override {
    count = checkpoint::value_of<std::int64_t>(state, "count");
  }
};

/// Adds rank + 1 to the count in each step, and stops the training after step `step`, as a signal does.
struct StopAtStep : training::Callback {
  StopAtStep(std::int64_t step, StepCounter& count) : at(step), drawn(count) {}
  void on_step(training::FitContext& fit) override {
    drawn.count += fit.world().rank() + 1;
    if (fit.step() == at) fit.stop(training::StopReason::kStopRequested);
  }
  std::int64_t at;
  StepCounter& drawn;
};

struct RunResult {
  std::vector<at::Tensor> weights;
  training::FitResult result;
  std::int64_t drawn = 0;
  double best = 0;
};

/// Runs a training up to step `stop_at` (-1: to the end), as a process of its own would. A run that resumes begins with
/// different weights and random numbers, so that it must restore those of the checkpoint.
inline RunResult run(const MakeOptimizers& make, training::TrainerOptions options, std::int64_t stop_at) {
  options.progress_bar = options.model_summary = false;
  torch::manual_seed(options.resume.empty() ? 1 : 77);
  Net net(make);
  torch::manual_seed(options.resume.empty() ? 10 + static_cast<std::uint64_t>(world().rank()) : 5);
  training::Trainer trainer(options);
  StepCounter drawn;
  const auto early = std::make_shared<training::EarlyStopping>(training::EarlyStoppingOptions{.patience = 100});
  trainer.add(early);
  trainer.add(std::make_shared<StopAtStep>(stop_at, drawn));
  trainer.register_for_checkpointing("drawn", drawn);
  RunResult ran;
  ran.result = trainer.fit(net, loader_of(), exact_loader());
  for (const at::Tensor& tensor : net->parameters()) ran.weights.push_back(tensor.detach().clone());
  for (const at::Tensor& tensor : net->buffers()) ran.weights.push_back(tensor.clone());
  ran.drawn = drawn.count;
  ran.best = early->best();
  return ran;
}

}  // namespace lockstep::tests
