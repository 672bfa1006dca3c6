// Precisions below float32, loss scaling, and gradients that are sent or updated in unusual ways.
#include <limits>
#include <optional>

#include "tests/training/programs/program.h"

namespace lockstep::tests::programs::precision {
namespace {

torch::nn::Sequential make_net(const Run& run, int width = 32) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  return torch::nn::Sequential(torch::nn::Linear(6, width), torch::nn::GELU(), torch::nn::Linear(width, 1));
}

torch::Tensor inputs(const Run& run, int step, at::ScalarType dtype = torch::kFloat) {
  return run.part(uniform(step, {kGlobalBatch, 6})).to(dtype);
}

torch::Tensor targets(const torch::Tensor& x) { return (x.to(torch::kFloat64).prod(1, true) * 8).to(x.scalar_type()); }

// bfloat16 weights with float32 master weights.
void bfloat16_master_weights(Run& run) {
  auto net = make_net(run);
  amp::cast(*net, amp::parse_precision("bf16", {.master_weights = true}));
  DistributedDataParallel ddp(net, run.world);
  amp::MasterWeights master(net->parameters());
  torch::optim::SGD optimizer(master.parameters(), 0.05);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = inputs(run, step, torch::kBFloat16);
    net->zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(x), targets(x));
    loss.backward();
    master.copy_gradients_from_model();
    clip_grad_norm(master.parameters(), 1.0);
    optimizer.step();
    master.copy_values_to_model();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// bfloat16 weights without master weights.
void bfloat16_weights(Run& run) {
  auto net = make_net(run);
  net->to(torch::kBFloat16);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.01);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = inputs(run, step, torch::kBFloat16);
    optimizer->zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(x), targets(x));
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// Autocast with loss scaling. In one step the gradient of one rank is infinite: all ranks skip that step.
void train_scaled(Run& run, torch::nn::Sequential& net, at::ScalarType dtype, bool autocast) {
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.01);
  GradScaler scaler({.init_scale = 1024, .growth_interval = 3});
  int skipped = 0;
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = inputs(run, step, dtype);
    torch::Tensor weight = torch::ones({kGlobalBatch, 1}, dtype);
    if (step == 4) weight[kGlobalBatch - 1] = std::numeric_limits<double>::infinity();
    optimizer->zero_grad();
    torch::Tensor loss;
    {
      std::optional<Autocast> guard;
      if (autocast) guard.emplace();
      loss = (run.part(weight) * (net->forward(x).to(dtype) - targets(x)).pow(2)).mean();
    }
    scaler.scale(loss).backward();
    scaler.unscale_(*optimizer);
    clip_grad_norm(*optimizer, 0.5);
    skipped += scaler.step(*optimizer) ? 0 : 1;
    scaler.update();
    if (step != 4) run.add_loss(loss);
  }
  run.add("skipped", skipped);
  run.add("scale", scaler.get_scale());
  run.add("net", *net);
}

void autocast_scaled(Run& run) {
  auto net = make_net(run);
  train_scaled(run, net, torch::kFloat, true);
}

void float64_scaled(Run& run) {
  auto net = make_net(run);
  net->to(torch::kFloat64);
  train_scaled(run, net, torch::kFloat64, false);
}

// Parameters of several dtypes in one module, of which the float32 ones are larger than a bucket.

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    wide->to(torch::kFloat64);
    half->to(torch::kBFloat16);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = torch::tanh(first(x)).to(torch::kFloat64);
    return wide(y).to(torch::kFloat) + half(x.to(torch::kBFloat16)).to(torch::kFloat);
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 700));
  torch::nn::Linear wide = register_module("wide", torch::nn::Linear(700, 1));
  torch::nn::Linear half = register_module("half", torch::nn::Linear(6, 1));
};
TORCH_MODULE(Mixed);

void mixed_dtypes(Run& run) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  Mixed net;
  DistributedDataParallel ddp(net, run.world, {.bucket_bytes = {2048}});
  const auto optimizer = make_sgd(run, ddp, net->parameters(), 0.02, 0.9);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = inputs(run, step);
    optimizer->zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(x), targets(x));
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// Gradients sent as bfloat16, with a hook and with a dtype for the way between hosts.
void train_compressed(Run& run, const DdpOptions& options) {
  auto net = make_net(run, 600);  // more than the 4 KiB up to which nothing is rounded between hosts
  DistributedDataParallel ddp(net, run.world, options);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = inputs(run, step);
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(x), targets(x));
    loss.backward();
    optimizer.step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

void compressed_by_hook(Run& run) { train_compressed(run, {.hook = std::make_shared<ddp::Bf16CompressHook>()}); }
// TCP and MPI alone do not distinguish hosts, and refuse it.
void compressed_between_hosts(Run& run) {
  if (run.world.transport() == "tcp" || run.world.transport() == "mpi") {
    auto net = make_net(run);
    const std::string refusal =
        usage_error_of([&] { DistributedDataParallel ddp(net, run.world, {.wire_dtype = torch::kBFloat16}); });
    expect(refusal.find("does not send float32 as BFloat16") != std::string::npos, refusal);
    return train_compressed(run, {});
  }
  train_compressed(run, {.wire_dtype = torch::kBFloat16});
}

// A fused optimizer that updates parameters in the backward pass, and one whose state is divided between the ranks.

struct LayersImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::silu(first(x))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 20));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(20, 1));
};
TORCH_MODULE(Layers);

void train_layers(Run& run, Layers& net, torch::optim::Optimizer& optimizer) {
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = inputs(run, step, torch::kFloat64);
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(x), targets(x));
    loss.backward();
    optimizer.step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

void adamw_layers(Run& run) {
  auto net = make_module<Layers>(run);
  DistributedDataParallel ddp(net, run.world);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02));
  train_layers(run, net, optimizer);
}

void adamw_in_backward(Run& run) {
  auto net = make_module<Layers>(run);
  DistributedDataParallel ddp(net, run.world);
  optim::AdamW optimizer(ddp, {.lr = 0.02});
  optimizer.update_in_backward();
  train_layers(run, net, optimizer);
}

void adamw_sharded(Run& run) {
  auto net = make_module<Layers>(run);
  DistributedDataParallel ddp(net, run.world);
  optim::AdamW optimizer(ddp, {.lr = 0.02}, {}, {.shard_state = true});
  train_layers(run, net, optimizer);
  for (const auto& [name, value] : optimizer.state_dict())
    if (const auto* const tensor = std::get_if<torch::Tensor>(&value)) run.add("state." + name, *tensor);
}

void lamb(Run& run) {
  auto net = make_module<Layers>(run);
  DistributedDataParallel ddp(net, run.world);
  optim::LAMB optimizer(ddp, {.lr = 0.02, .weight_decay = 0.1});
  train_layers(run, net, optimizer);
}

void lars(Run& run) {
  auto net = make_module<Layers>(run);
  DistributedDataParallel ddp(net, run.world);
  optim::LARS optimizer(ddp, {.lr = 2, .momentum = 0.9});
  train_layers(run, net, optimizer);
}

}  // namespace
}  // namespace lockstep::tests::programs::precision

namespace lockstep::tests::programs {

std::vector<Program> precision_programs() {
  std::vector<Program> programs = {
      {.name = "bfloat16_master_weights", .train = precision::bfloat16_master_weights, .tolerance = 0.02},
      {.name = "compressed_by_hook", .train = precision::compressed_by_hook, .tolerance = 0.01},
      {.name = "compressed_between_hosts", .train = precision::compressed_between_hosts, .tolerance = 0.01},
      {.name = "adamw_layers", .train = precision::adamw_layers},
      {.name = "adamw_in_backward", .train = precision::adamw_in_backward, .reference = "adamw_layers"},
      {.name = "adamw_sharded", .train = precision::adamw_sharded},
      {.name = "lamb", .train = precision::lamb},
      {.name = "lars", .train = precision::lars}};
  const auto add = [&](const std::vector<Program>& more) { programs.insert(programs.end(), more.begin(), more.end()); };
  add(with_both_optimizers("bfloat16_weights", precision::bfloat16_weights, 0.05));
  add(with_both_optimizers("autocast_scaled", precision::autocast_scaled, 0.02));
  add(with_both_optimizers("float64_scaled", precision::float64_scaled));
  add(with_both_optimizers("mixed_dtypes", precision::mixed_dtypes, 0.02));
  return programs;
}

}  // namespace lockstep::tests::programs
