// The program of docs/how-to/sync-batch-norm.md and docs/how-to/data-parallel.md.
//   lockstep run -n 2 docs_batch_norm
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

namespace {

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { NetImpl::reset(); }
  void reset() override {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm2d(8));
    last = register_module("last", torch::nn::Linear(8, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::relu(norm(conv(x))).mean({2, 3})); }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Net);

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("expected: " + what);
}

/// Returns `count` images, which differ on each rank.
torch::Tensor images(const lockstep::Group& world, std::int64_t count) {
  torch::manual_seed(static_cast<std::uint64_t>(world.rank()));
  return torch::randn({count, 3, 6, 6});
}

void train_converted_model(const lockstep::Group& world) {
  // docs: begin convert
  Net net;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  lockstep::convert_sync_batch_norm(net, world);  // before or after the optimizer and ddp
  lockstep::DistributedDataParallel ddp(net, world);

  const torch::Tensor x = images(world, world.rank() == 0 ? 5 : 1);  // ranks may have batches of different sizes
  net->forward(x).pow(2).sum().backward();
  optimizer.step();
  // docs: end convert
  const torch::Tensor mine = net->norm->running_mean.clone(), first = mine.clone();
  world.broadcast(first, 0);
  expect(torch::equal(mine, first), "running statistics are the same bits on all ranks");
  if (world.rank() == 0) std::cout << net->norm << std::endl;
}

void use_as_a_module(const lockstep::Group& world) {
  // docs: begin module
  torch::nn::Sequential net(torch::nn::Linear(4, 8),
                            lockstep::SyncBatchNorm(world, torch::nn::BatchNormOptions(8), "norm"), torch::nn::ReLU());
  net->forward(torch::randn({world.rank() + 1, 4}));  // even with one sample per rank
  // docs: end module
  expect(net->named_buffers().contains("1.running_var"), "the names of BatchNorm");
}

void use_several_devices() {
  // docs: begin data_parallel
  Net net;
  lockstep::DataParallel parallel(
      net, {.devices = {torch::kCPU, torch::kCPU}});  // or {{torch::kCUDA, 0}, {torch::kCUDA, 1}}
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    parallel(torch::randn({7, 3, 6, 6})).pow(2).sum().backward();
    optimizer.step();
  }
  std::cout << lockstep::nn::format_device_usage(parallel.device_usage());
  // docs: end data_parallel

  // docs: begin call
  const auto loss = [](NetImpl& replica, const torch::Tensor& x) { return replica.forward(x).pow(2).sum(); };
  lockstep::DataParallel parallel_loss(net, loss, {.devices = {torch::kCPU, torch::kCPU}});
  parallel_loss(torch::randn({8, 3, 6, 6})).sum().backward();  // one loss per replica
  // docs: end call
}

int run(int, char**) {
  lockstep::Group world = lockstep::init();
  train_converted_model(world);
  use_as_a_module(world);
  if (world.rank() == 0) use_several_devices();
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return lockstep::main(argc, argv, run); }
