// The program of docs/how-to/mixed-precision.md: the use of lockstep::amp, and an error that it reports.
//   lockstep run -n 2 docs_mixed_precision
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>
#include <limits>

#include "docs/programs/small_training.h"

namespace {

void train_in_bfloat16(const lockstep::Group& world) {
  auto net = make_net();
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  // docs: begin autocast
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      const lockstep::Autocast autocast;  // bfloat16 on a CPU
      const auto out = net->forward(batch(world, step));
      loss = torch::mse_loss(out, torch::zeros_like(out));
    }
    loss.backward();
    optimizer.step();
  }
  // docs: end autocast
  expect(net->parameters()[0].grad().scalar_type() == torch::kFloat, "gradients are float32");

  // docs: begin keep
  const lockstep::Autocast autocast;
  auto out = net->forward(batch(world, 20));
  {
    const lockstep::amp::DisableAutocast keep;
    out = out.to(torch::kFloat).matmul(out.to(torch::kFloat).t());
  }
  // docs: end keep
  expect(out.scalar_type() == torch::kFloat, "kept in float32");

  // docs: begin finite
  const lockstep::amp::FiniteChecker finite(*net);
  const auto loss = net->forward(batch(world, 21)).pow(2).mean();
  finite.check(loss);  // "the output of module '2' (aten::addmm) is not finite, [16, 1]: min -inf, max 3.1; its inputs
                       // were finite"
  // docs: end finite
}

void train_with_a_scaler(const lockstep::Group& world) {
  auto net = make_net();
  // docs: begin scaler
  lockstep::DistributedDataParallel ddp(net, world);
  lockstep::optim::AdamW optimizer(ddp, {.lr = 1e-2});  // or an optimizer of torch
  lockstep::GradScaler scaler;

  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    const auto loss = net->forward(batch(world, step)).pow(2).mean();
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);                // only before an access to gradients
    lockstep::clip_grad_norm(optimizer, 1.0);  // the norm of the unscaled gradients
    scaler.step(optimizer);
    scaler.update();
  }
  // docs: end scaler

  // The gradient of one rank is infinite: no rank updates its parameters, and all ranks halve the scale.
  const auto before = net->parameters()[0].detach().clone();
  const double scale = scaler.get_scale();
  optimizer.zero_grad();
  const double factor = world.rank() == world.size() - 1 ? std::numeric_limits<double>::infinity() : 1;
  scaler.scale(net->forward(batch(world, 20)).pow(2).mean() * factor).backward();
  expect(!scaler.step(optimizer), "the step is skipped");
  scaler.update();
  expect(torch::equal(before, net->parameters()[0]), "parameters are not updated");
  expect(scaler.get_scale() == scale / 2, "the scale is halved");

  // docs: begin state
  const lockstep::checkpoint::StateDict state = scaler.state_dict();  // the entries of scaler.state_dict() in Python
  scaler.load_state_dict(state);
  // docs: end state
}

void agree_without_ddp(const lockstep::Group& world) {
  auto net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  // docs: begin group
  lockstep::GradScaler scaler({.group = world});
  // docs: end group
  const double factor = world.rank() == 0 ? std::numeric_limits<double>::infinity() : 1;
  scaler.scale(net->forward(batch(world, 0)).pow(2).mean() * factor).backward();
  expect(!scaler.step(optimizer), "all ranks skip");
  scaler.update();
}

void train_by_a_preset(const lockstep::Group& world) {
  // docs: begin preset
  const auto precision = lockstep::amp::parse_precision("bf16", {.master_weights = true});
  auto net = make_net();
  lockstep::amp::cast(*net, precision);  // weights become bfloat16
  lockstep::DistributedDataParallel ddp(net, world);
  lockstep::amp::MasterWeights master(net->parameters());
  torch::optim::SGD optimizer(master.parameters(), 0.01);

  for (int step = 0; step < 20; ++step) {
    net->zero_grad();
    net->forward(batch(world, step).to(precision.weights)).pow(2).mean().backward();
    master.copy_gradients_from_model();
    optimizer.step();
    master.copy_values_to_model();
  }
  // docs: end preset
  expect(
      net->parameters()[0].scalar_type() == torch::kBFloat16 && master.parameters()[0].scalar_type() == torch::kFloat,
      "two dtypes");
  try {
    lockstep::amp::parse_precision("fp16-mixed", {.loss_scaling = false});
    expect(false, "an error for float16 without loss scaling");
  } catch (const lockstep::UsageError& error) {
    if (world.rank() == 0) std::cout << error.what() << '\n';
  }
}

int train(int, char**) {
  lockstep::Group world = lockstep::init();
  train_in_bfloat16(world);
  train_with_a_scaler(world);
  agree_without_ddp(world);
  train_by_a_preset(world);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return lockstep::main(argc, argv, train); }
