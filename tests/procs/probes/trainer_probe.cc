// A training with the Trainer whose gradients take a known time on a slow link.
//   procs_trainer_probe FOLDER STEPS WIDTH
// Repeats one batch; the model has 3 * WIDTH^2 parameters, in float32. Writes metrics.csv and report.html below FOLDER.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>
#include <string>

namespace {

using lockstep::data::Example;
constexpr std::int64_t kBatch = 64;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t width) {
    for (int i = 0; i < 3; ++i)
      layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
    register_module("layers", layers);
  }
  torch::Tensor training_step(Example& batch, lockstep::training::StepLog&) {
    return torch::mse_loss(layers->forward(batch.data), batch.target);
  }
  std::vector<lockstep::training::OptimizerConfig> configure_optimizers(lockstep::training::TrainingSetup& setup) {
    return {{std::make_shared<lockstep::optim::SGD>(setup.ddp(), lockstep::optim::SGDOptions{.lr = 0.01})}};
  }
  torch::nn::Sequential layers;
};
TORCH_MODULE(Net);

struct RepeatedBatch {
  Example batch;
  std::size_t num_samples;
  Example get_batch(const std::vector<std::size_t>&) { return batch; }
  std::size_t size() const { return num_samples; }
};

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) throw lockstep::UsageError("expected FOLDER, STEPS and WIDTH");
  const std::int64_t steps = std::stoll(argv[2]), width = std::stoll(argv[3]);
  lockstep::Trainer trainer({.max_steps = steps, .folder = argv[1], .save_every_n_epochs = 0, .log_every_n_steps = 10});
  const auto samples = static_cast<std::size_t>(steps * kBatch * trainer.world().size());
  auto loader = lockstep::data::make_loader(
      RepeatedBatch{{torch::randn({kBatch, width}), torch::randn({kBatch, width})}, samples}, trainer.world(),
      {.batch_size = kBatch});
  Net net(width);
  return trainer.fit(net, loader).exit_code();
} catch (const lockstep::Error& error) {
  std::cerr << error.what() << std::endl;
  return lockstep::base::exit_code(error.cause());
}
