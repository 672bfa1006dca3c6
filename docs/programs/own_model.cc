// The program of docs/guide/02-your-own-model.md: a user's own model, dataset and training loop.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <filesystem>
#include <iostream>

namespace {

// docs: begin model
struct NetImpl : torch::nn::Module {
  NetImpl() {
    hidden = register_module("hidden", torch::nn::Linear(2, 16));
    last = register_module("last", torch::nn::Linear(16, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(hidden(x))); }
  torch::Tensor loss(const torch::Tensor& x, const torch::Tensor& y) { return torch::mse_loss(forward(x), y); }
  torch::nn::Linear hidden{nullptr}, last{nullptr};
};
TORCH_MODULE(Net);
// docs: end model

// docs: begin dataset
struct Products {
  lockstep::data::Example get(std::size_t index) const {
    const double a = static_cast<double>(index % 20) / 20, b = static_cast<double>(index / 20) / 20;
    return {torch::tensor({a, b}, torch::kFloat), torch::tensor({a * b}, torch::kFloat)};
  }
  std::size_t size() const { return 400; }
};
// docs: end dataset

// docs: begin evaluate
// Runs on rank 0 only. Meanwhile the other ranks continue to their next backward(), where they wait for rank 0.
double evaluate(Net& net) {
  const torch::NoGradGuard no_grad;
  auto loader =
      lockstep::data::make_loader(Products(), lockstep::data::DataShard{}, {.batch_size = 100, .shuffle = false});
  double sum = 0;
  for (auto& batch : loader.epoch(0)) sum += net->loss(batch.data, batch.target).item<double>() / 4;
  return sum;
}
// docs: end evaluate

void train(const std::string& file) {
  // docs: begin training
  lockstep::Group world = lockstep::init();
  Net net;
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::Adam optimizer(net->parameters(), 0.01);
  auto loader = lockstep::data::make_loader(Products(), world, {.batch_size = 20, .seed = 1});

  for (int epoch = 0; epoch < 20; ++epoch) {
    for (auto& batch : loader) {
      optimizer.zero_grad();
      net->loss(batch.data, batch.target).backward();
      optimizer.step();
    }
    if (world.rank() == 0 && epoch % 5 == 4) std::cout << "epoch " << epoch << ": loss " << evaluate(net) << std::endl;
  }
  if (world.rank() == 0) lockstep::save(net, file);
  // docs: end training
  if (world.rank() != 0) return;

  // docs: begin load
  Net again;
  lockstep::load(again, file);
  // docs: end load
  if (evaluate(again) != evaluate(net)) throw std::runtime_error("the saved model differs");
  if (evaluate(net) > 0.01) throw std::runtime_error("the loss is too high");
  for (const auto& parameter : again->named_parameters()) std::cout << "saved: " << parameter.key() << std::endl;
}

}  // namespace

int main(int argc, char** argv) try {
  const bool named = argc > 1;
  const auto folder = std::filesystem::temp_directory_path();
  const std::string file = named ? argv[1] : folder / ("own_model." + std::to_string(::getpid()) + ".safetensors");
  train(file);
  if (!named) std::filesystem::remove(file);
} catch (const lockstep::Error& error) {
  std::cerr << "own_model: " << error.what() << std::endl;
  return lockstep::base::exit_code(error.cause());
}
