// The program of docs/how-to/schedules-clipping-averages.md: schedules, clipping and averages of weights, with any
// optimizer.
//   lockstep run -n 2 docs_schedules
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cmath>

#include "docs/programs/small_training.h"

namespace {

/// Returns the mean loss over all ranks. Collective.
double validate(const lockstep::Group& world, torch::nn::Sequential& net) {
  const torch::NoGradGuard no_grad;
  torch::Tensor loss = net->forward(batch(world, 1000)).pow(2).mean();
  world.all_reduce(loss, lockstep::ReduceOp::kMean);
  return loss.item<double>();
}

void large_batches(const lockstep::Group& world) {
  // docs: begin lamb
  auto large = make_net();
  lockstep::DistributedDataParallel large_ddp(large, world);
  std::vector<torch::Tensor> biases;
  for (const auto& parameter : large->parameters())
    if (parameter.dim() == 1) biases.push_back(parameter);
  lockstep::optim::LAMB lamb(large_ddp, {.lr = 1e-2, .weight_decay = 0.1},
                             {{.parameters = biases, .options = {.lr = 1e-2, .weight_decay = 0, .adapt = false}}});
  // docs: end lamb
  large->forward(batch(world, 0)).pow(2).mean().backward();
  lamb.step();
  expect(lamb.param_groups().size() == 2, "two groups");
}

}  // namespace

int train(int, char**) {
  lockstep::Group world = lockstep::init();
  auto net = make_net();
  // docs: begin schedule
  namespace optim = lockstep::optim;
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  optim::Scheduler scheduler(optimizer, optim::warmup(10, optim::cosine_decay({.steps = 90})));
  optim::Ema ema(*net, {.decay_schedule = optim::ema_warmup(0.999)});

  for (int step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    net->forward(batch(world, step)).pow(2).mean().backward();
    lockstep::clip_grad_norm(optimizer, 1.0);  // clips the averaged gradients
    optimizer.step();
    scheduler.step();
    ema.update();
  }
  // docs: end schedule
  expect(scheduler.rates()[0] < 1e-6, "the learning rate has decayed");

  // docs: begin compose
  const optim::Schedule hold_then_fall =
      optim::sequential(optim::constant(), 50, optim::polynomial_decay({.steps = 50, .power = 2}));
  const optim::Schedule mine =
      optim::lambda_schedule([](std::int64_t step) { return 1 / std::sqrt(1.0 + static_cast<double>(step)); });
  expect(hold_then_fall(75, 0.1) == 0.025 && mine(3, 0.1) == 0.05, "schedules are functions");
  // docs: end compose

  // docs: begin resume
  const lockstep::checkpoint::StateDict position = scheduler.state_dict();  // "step", "base_rate.0", ...
  scheduler.load_state_dict(position);
  const lockstep::checkpoint::StateDict averages = ema.state_dict();  // averages by name, "n_averaged"
  ema.load_state_dict(averages);
  // docs: end resume
  expect(lockstep::checkpoint::value_of<std::int64_t>(position, "step") == 100 && averages.size() == 4 + 1 &&
             lockstep::checkpoint::value_of<std::int64_t>(averages, "n_averaged") == 100,
         "the values for a checkpoint");

  // docs: begin plateau
  optim::ReduceLROnPlateau plateau(optimizer, {.factor = 0.5, .patience = 3});
  plateau.step(validate(world, net));  // the same value on all ranks
  // docs: end plateau

  const torch::Tensor weight = net->parameters()[0].detach().clone();
  // docs: begin ema
  {
    const auto averaged = ema.swap();
    validate(world, net);
  }  // restores the weights
  // docs: end ema
  expect(torch::equal(net->parameters()[0], weight), "the weights are restored");

  large_batches(world);
  return 0;
}

int main(int argc, char** argv) { return lockstep::main(argc, argv, train); }
