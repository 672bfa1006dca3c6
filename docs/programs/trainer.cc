// The program of docs/guide/07-trainer.md. It starts its own ranks:
//   docs_trainer
#include <lockstep/lockstep.h>
#include <lockstep/train/metrics/tensor_conversion.h>
#include <torch/torch.h>

#include <iostream>

namespace {

// docs: begin module
struct NetImpl : torch::nn::Module {
  NetImpl() {
    hidden = register_module("hidden", torch::nn::Linear(2, 16));
    last = register_module("last", torch::nn::Linear(16, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(hidden(x))); }

  torch::Tensor training_step(lockstep::data::Example& batch, lockstep::training::StepLog&) {
    return torch::mse_loss(forward(batch.data), batch.target);
  }
  torch::Tensor validation_step(lockstep::data::Example& batch, lockstep::training::StepLog& log) {
    const auto out = forward(batch.data);
    log.log("near", (out - batch.target).abs().lt(0.05).to(torch::kFloat).mean());
    return torch::mse_loss(out, batch.target);
  }
  std::vector<lockstep::training::OptimizerConfig> configure_optimizers(lockstep::training::TrainingSetup& setup) {
    auto optimizer = std::make_shared<lockstep::optim::AdamW>(setup.ddp(), lockstep::optim::AdamWOptions{.lr = 0.02});
    return {{optimizer, lockstep::optim::cosine_decay({.steps = setup.total_steps()})}};
  }
  torch::nn::Linear hidden{nullptr}, last{nullptr};
};
TORCH_MODULE(Net);
// docs: end module

// docs: begin callback
/// Logs a histogram of the first layer every ten epochs, for TensorBoard, and counts them. Checkpoints save the count.
struct Histograms : lockstep::training::Callback, lockstep::checkpoint::Stateful {
  void on_epoch_end(lockstep::training::FitContext& fit) override {
    if (fit.epoch() % 10 != 0 || !fit.loggers().is_active()) return;  // loggers are active on rank 0
    fit.loggers().log_histogram(fit.step(), "hidden", lockstep::training::make_histogram(fit.module().parameters()[0]));
    ++written;
  }
  lockstep::checkpoint::StateDict state_dict() const override { return {{"written", written}}; }
  void load_state_dict(const lockstep::checkpoint::StateDict& state) override {
    written = lockstep::checkpoint::value_of<std::int64_t>(state, "written");
  }
  std::int64_t written = 0;
};
// docs: end callback

struct Products {
  lockstep::data::Example get(std::size_t index) const {
    const double a = static_cast<double>(index % 20) / 20, b = static_cast<double>(index / 20) / 20;
    return {torch::tensor({a, b}, torch::kFloat), torch::tensor({a * b}, torch::kFloat)};
  }
  std::size_t size() const { return 400; }
};

}  // namespace

// docs: begin main
int main() try {
  lockstep::Trainer trainer(
      {.devices = 2, .max_epochs = 20, .clip_norm = 1});  // starts two ranks, unless a launcher has started ranks
  torch::manual_seed(1);
  Net net;
  auto loader = lockstep::data::make_loader(Products(), trainer.world(), {.batch_size = 20, .seed = 1});
  auto validation = lockstep::data::make_loader(
      Products(), trainer.world(), {.batch_size = 50, .shuffle = false, .mode = lockstep::data::ShardMode::kExact});
  trainer.add(
      std::make_shared<lockstep::training::EarlyStopping>(lockstep::training::EarlyStoppingOptions{.patience = 5}));
  trainer.add(std::make_shared<Histograms>());
  trainer.add(
      std::make_shared<lockstep::training::ModelCheckpoint>());  // keeps the weights with the best validation loss

  const auto result = trainer.fit(net, loader, validation);
  if (trainer.world().rank() == 0)
    std::cout << result.steps << " steps, validation loss " << result.val_values.back().second << std::endl;
  return result.exit_code();
} catch (const lockstep::Error& error) {
  std::cerr << error.what() << std::endl;
  return lockstep::base::exit_code(error.cause());
}
// docs: end main
