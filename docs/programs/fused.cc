// The program of docs/how-to/fused-optimizers.md: the use of lockstep::optim, and an error that it reports.
//   lockstep run -n 2 docs_fused
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

#include "docs/programs/small_training.h"

namespace {

/// Different writes to a parameter that all ranks share are an error in the next step.
void write_differently(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer, const lockstep::Group& world) {
  {
    const torch::NoGradGuard no_grad;
    net->parameters()[0].fill_(world.rank());
  }
  net->zero_grad();
  net->forward(batch(world, 21)).pow(2).mean().backward();
  try {
    optimizer.step();
    expect(false, "an error for different writes");
  } catch (const lockstep::UsageError& error) {
    if (world.rank() == 0) std::cout << error.what() << '\n' << error.hint() << '\n';
  }
}

int end_of_step(const lockstep::Group& world, torch::nn::Sequential& net) {
  // docs: begin leave
  if (world.stop_requested()) {
    if (world.rank() == 0) lockstep::save(net, "net.safetensors");
    return lockstep::kPreemptedExitCode;  // 75, which lockstep run returns as well
  }
  // docs: end leave
  return 0;
}

void shard_optimizer_state(lockstep::Group world) {
  auto divided = make_net();
  lockstep::DistributedDataParallel divided_ddp(divided, world);
  // docs: begin shards
  lockstep::optim::AdamW sharded(divided_ddp, {.lr = 1e-2}, {}, {.shard_state = true});
  // docs: end shards
  divided->forward(batch(world, 22)).pow(2).mean().backward();
  sharded.step();
  expect(sharded.state_dict().size() == 4 * 3, "the complete state");
}

void use_groups(const lockstep::Group& world) {
  // docs: begin groups
  auto other = make_net();
  lockstep::DistributedDataParallel other_ddp(other, world);
  lockstep::optim::SGD by_groups(
      other_ddp, {.lr = 0.1, .momentum = 0.9},
      {{.parameters = other[2]->as<torch::nn::Linear>()->parameters(), .options = {.lr = 0.01}}});
  torch::optim::StepLR schedule(by_groups, 10, 0.5);
  // docs: end groups
  schedule.step();
  expect(by_groups.param_groups().size() == 2, "two groups");
}

}  // namespace

int train(int, char**) {
  lockstep::Group world = lockstep::init();
  auto net = make_net();
  // docs: begin optimizer
  lockstep::DistributedDataParallel ddp(net, world);
  lockstep::optim::AdamW optimizer(ddp, {.lr = 1e-2, .weight_decay = 0.1});

  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    auto loss = net->forward(batch(world, step)).pow(2).mean();
    loss.backward();
    lockstep::clip_grad_norm(optimizer, 1.0);  // the norm of the averaged gradients
    optimizer.step();
  }
  // docs: end optimizer

  expect(end_of_step(world, net) == 0, "no stop request");
  // docs: begin average
  net->forward(batch(world, 20)).pow(2).mean().backward();
  optimizer.average_gradients();
  net->parameters()[0].mutable_grad().div_(2);  // modifies the mean, equally on all ranks
  optimizer.step();
  // docs: end average

  // docs: begin backward
  optimizer.update_in_backward();
  optimizer.zero_grad();
  net->forward(batch(world, 21)).pow(2).mean().backward();  // parameters are updated when it returns
  optimizer.step();                                         // ends the step
  // docs: end backward
  optimizer.update_in_backward(false);

  // docs: begin change
  optimizer.change_parameters([&] {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.clamp_(-1, 1);
  });
  // docs: end change
  for (const auto& parameter : net->parameters())
    expect(parameter.abs().max().item<double>() <= 1, "the change was made");

  use_groups(world);

  // docs: begin state
  const auto state = optimizer.state_dict();  // "0.weight.exp_avg", "0.weight.exp_avg_sq", "0.weight.step", ...
  optimizer.load_state_dict(state);
  // docs: end state
  expect(state.size() == 4 * 3, "three entries per parameter");

  shard_optimizer_state(world);
  if (optimizer.shares_parameters()) write_differently(net, optimizer, world);
  return 0;
}

// docs: begin main
int main(int argc, char** argv) { return lockstep::main(argc, argv, train); }
// docs: end main
