// The program of docs/how-to/own-all-reduce.md: a loop over the gradients, and what takes its place.
//   lockstep run -n 2 docs_own_all_reduce
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <vector>

#include "docs/programs/small_training.h"

namespace {

constexpr int kSteps = 10;

std::vector<torch::Tensor> train_with_loop(const lockstep::Group& world) {
  auto net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    net->forward(batch(world, step)).pow(2).mean().backward();
    // docs: begin keep
    for (const auto& parameter : net->parameters()) world.all_reduce(parameter.grad(), lockstep::ReduceOp::kMean);
    // docs: end keep
    optimizer.step();
  }
  return net->parameters();
}

std::vector<torch::Tensor> train(const lockstep::Group& world) {
  auto net = make_net();
  // docs: begin ddp
  lockstep::DistributedDataParallel ddp(net, world);
  lockstep::optim::SGD optimizer(ddp, {.lr = 0.1});
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    auto loss = net->forward(batch(world, step)).pow(2).mean();
    loss.backward();
    optimizer.step();
  }
  // docs: end ddp
  std::vector<torch::Tensor> weights;
  for (const auto& parameter : net->parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

}  // namespace

int main() {
  const lockstep::Group world = lockstep::init();
  const auto expected = train_with_loop(world);
  const auto found = train(world);
  for (std::size_t i = 0; i < found.size(); ++i)
    expect(torch::allclose(found[i], expected[i], 1e-5, 1e-6), "the weights of the loop");
}
