// Trainings that load weights in the middle, resume from checkpoints, or use the Trainer.
#include <cmath>
#include <functional>
#include <sstream>

#include "tests/training/programs/program.h"

namespace lockstep::tests::programs::resuming {
namespace {

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::relu(norm(input(x)))); }
  torch::nn::Linear input = register_module("input", torch::nn::Linear(3, 10));
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({10})));
  torch::nn::Linear output = register_module("output", torch::nn::Linear(10, 1));
};
TORCH_MODULE(Net);

torch::Tensor loss_of(const Run& run, Net& net, int step) {
  const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 3}));
  return torch::mse_loss(net->forward(x).squeeze(1), x.prod(1));
}

void train_steps(Run& run, Net& net, torch::optim::Optimizer& optimizer, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss = loss_of(run, net, step);
    loss.backward();
    optimizer.step();
    run.add_loss(loss);
  }
}

// The reference of the following: a training that is not interrupted, whose weights are reset once to earlier ones.
void rewound(Run& run) {
  auto net = make_module<Net>(run);
  DistributedDataParallel ddp(net, run.world);
  torch::optim::Adam optimizer(net->parameters(), 0.02);
  train_steps(run, net, optimizer, 0, 3);
  std::vector<torch::Tensor> saved;
  for (const torch::Tensor& parameter : net->parameters()) saved.push_back(parameter.detach().clone());
  train_steps(run, net, optimizer, 3, 6);
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < saved.size(); ++i) net->parameters()[i].copy_(saved[i]);
  }
  train_steps(run, net, optimizer, 6, kSteps);
  run.add("net", *net);
}

// The same with torch::save() and torch::load() in the middle.
void rewound_by_torch_load(Run& run) {
  auto net = make_module<Net>(run);
  DistributedDataParallel ddp(net, run.world);
  torch::optim::Adam optimizer(net->parameters(), 0.02);
  train_steps(run, net, optimizer, 0, 3);
  std::stringstream saved, saved_optimizer;
  torch::save(net, saved);
  train_steps(run, net, optimizer, 3, 6);
  torch::save(optimizer, saved_optimizer);
  torch::load(net, saved);
  torch::load(optimizer, saved_optimizer);
  train_steps(run, net, optimizer, 6, kSteps);
  run.add("net", *net);
}

// The same with lockstep::save() and lockstep::load(), and with either kind of optimizer.
void rewound_by_load(Run& run) {
  auto net = make_module<Net>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.02);
  const std::string file = run.folder + "/net.safetensors";
  train_steps(run, net, *optimizer, 0, 3);
  if (run.world.rank() == 0) save(net, file);
  run.world.barrier();  // all ranks read the file
  train_steps(run, net, *optimizer, 3, 6);
  if (auto* const fused = dynamic_cast<optim::FusedOptimizer*>(optimizer.get()))
    fused->change_parameters([&] { load(net, file); });
  else
    load(net, file);
  train_steps(run, net, *optimizer, 6, kSteps);
  run.add("net", *net);
}

// A training that ends after five steps, and another one with other initial values that resumes it.

void uninterrupted(Run& run) {
  auto net = make_module<Net>(run);
  DistributedDataParallel ddp(net, run.world);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02));
  optim::Scheduler schedule(optimizer, optim::cosine_decay({.steps = kSteps}));
  optim::Ema ema(net, {.decay = 0.7});
  for (int step = 0; step < kSteps; ++step) {
    train_steps(run, net, optimizer, step, step + 1);
    schedule.step();
    ema.update();
  }
  run.add("net", *net);
  const auto averaged = ema.swap();
  run.add("averaged", *net);
}

void train_until(Run& run, std::int64_t end, bool last) {
  torch::manual_seed(static_cast<std::uint64_t>(end + run.world.rank()));
  Net net;
  if (end < kSteps) net = make_module<Net>(run);
  net->to(torch::kFloat64);
  TrainingState state(run.world, run.folder, {.settings = {{"lr", 0.02}}});
  DistributedDataParallel ddp(net, run.world, {.bucket_layout = state.bucket_layout("ddp")});
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (run.fused)
    optimizer = std::make_unique<optim::AdamW>(ddp, optim::AdamWOptions{.lr = 0.02});
  else
    optimizer = std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(0.02));
  optim::Scheduler schedule(*optimizer, optim::cosine_decay({.steps = kSteps}));
  optim::Ema ema(net, {.decay = 0.7});
  state.add("model", net).add("ddp", ddp).add("schedule", schedule).add("ema", ema);
  if (auto* const fused = dynamic_cast<optim::FusedOptimizer*>(optimizer.get()))
    state.add("optimizer", *fused);
  else
    state.add("optimizer", *optimizer, *net);
  state.add_random_state().resume();
  for (std::int64_t step = state.step(); step < end; ++step) {
    train_steps(run, net, *optimizer, static_cast<int>(step), static_cast<int>(step) + 1);
    schedule.step();
    ema.update();
  }
  state.save(end, {.finished = last});
  if (!last) return;
  run.add("net", *net);
  const auto averaged = ema.swap();
  run.add("averaged", *net);
}

void resumed(Run& run) {
  train_until(run, 4, false);
  train_until(run, 7, false);
  train_until(run, kSteps, true);
}

// A Trainer with validation, clipping and accumulation; the loop by hand that it must equal.

constexpr std::size_t kSamples = 48;

data::Example sample(std::size_t index) {
  const auto i = static_cast<double>(index);
  const torch::Tensor x = torch::tensor({std::sin(i), std::cos(2.1 * i), std::sin(0.7 * i + 1)}, torch::kFloat64);
  return {x, x.prod(0, true)};
}

struct TrainedNetImpl : NetImpl {
  torch::Tensor training_step(data::Example& batch, training::StepLog&) {
    return torch::mse_loss(forward(batch.data), batch.target);
  }
  torch::Tensor validation_step(data::Example& batch, training::StepLog& log) {
    const torch::Tensor out = forward(batch.data);
    log.log("near", (out - batch.target).abs().lt(0.2).to(torch::kFloat64).mean());
    return torch::mse_loss(out, batch.target);
  }
  std::vector<training::OptimizerConfig> configure_optimizers(training::TrainingSetup& setup) {
    if (fused) {
      auto optimizer = std::make_shared<optim::Adam>(setup.ddp(), optim::AdamOptions{.lr = 0.02});
      return {{optimizer, optim::linear({.steps = setup.total_steps(), .from = 1, .to = 0.5})}};
    }
    auto optimizer = std::make_shared<torch::optim::Adam>(setup.parameters(), torch::optim::AdamOptions(0.02));
    return {{optimizer, optim::linear({.steps = setup.total_steps(), .from = 1, .to = 0.5})}};
  }
  bool fused = false;
};
TORCH_MODULE(TrainedNet);

auto make_training_loader(const Run& run) {
  return data::make_loader(kSamples, sample, run.world, {.batch_size = kGlobalBatch / run.world.size(), .seed = 4});
}

void trainer(Run& run) {
  Trainer trainer({.max_epochs = 3,
                   .accumulate_grad_batches = 2,
                   .clip_norm = 0.3,
                   .folder = run.folder,
                   .progress_bar = false,
                   .model_summary = false,
                   .tensorboard = false});
  auto net = make_module<TrainedNet>(run);
  net->fused = run.fused;
  auto loader = make_training_loader(run);
  auto validation = data::make_loader(kSamples - 1, sample, run.world,
                                      {.batch_size = 5, .shuffle = false, .mode = data::ShardMode::kExact});
  const training::FitResult result = trainer.fit(net, loader, validation);
  expect(result.steps == 6 && result.exit_code() == 0, "the Trainer made " + std::to_string(result.steps) + " steps");
  for (const auto& [name, value] : result.val_values) run.add(name, value);
  run.add("net", *net);
}

void trainer_by_hand(Run& run) {
  auto net = make_module<TrainedNet>(run);
  DistributedDataParallel ddp(net, run.world);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.02));
  optim::Scheduler schedule(optimizer, optim::linear({.steps = 6, .from = 1, .to = 0.5}));
  auto loader = make_training_loader(run);
  int batches = 0;
  for (int epoch = 0; epoch < 3; ++epoch)
    for (auto& batch : loader) {
      if (batches++ % 2 == 0) {
        optimizer.zero_grad();
        const auto guard = ddp.no_sync();
        (torch::mse_loss(net->forward(batch.data), batch.target) / 2).backward();
        continue;
      }
      (torch::mse_loss(net->forward(batch.data), batch.target) / 2).backward();
      clip_grad_norm(optimizer, 0.3);
      optimizer.step();
      schedule.step();
    }
  double loss = 0, near = 0;
  for (std::size_t i = 0; i + 1 < kSamples; ++i) {
    const data::Example one = sample(i);
    const torch::Tensor difference = net->forward(one.data.unsqueeze(0)).squeeze() - one.target.squeeze();
    loss += difference.pow(2).item<double>() / (kSamples - 1);
    near += (std::abs(difference.item<double>()) < 0.2 ? 1.0 : 0.0) / (kSamples - 1);
  }
  run.add("val_loss", loss);
  run.add("near", near);
  run.add("net", *net);
}

// A Trainer with two optimizers, batch normalisation over all ranks and averaged weights: an adversarial network.

struct AdversarialImpl : torch::nn::Module {
  AdversarialImpl() {
    generator = register_module(
        "generator", torch::nn::Sequential(torch::nn::Linear(torch::nn::LinearOptions(3, 8).bias(false)),
                                           torch::nn::BatchNorm1d(8), torch::nn::Tanh(), torch::nn::Linear(8, 3)));
    critic = register_module(
        "critic", torch::nn::Sequential(torch::nn::Linear(3, 8), torch::nn::SiLU(), torch::nn::Linear(8, 1)));
  }
  torch::Tensor training_step(data::Example& batch, training::StepLog& log) {
    const torch::Tensor generated = generator->forward(batch.data.flip(1));
    if (log.optimizer == 0) return torch::softplus(-critic->forward(generated)).mean();
    return (torch::softplus(critic->forward(generated.detach())) + torch::softplus(-critic->forward(batch.data)))
        .mean();
  }
  std::vector<training::OptimizerConfig> configure_optimizers(training::TrainingSetup& setup) {
    std::vector<training::OptimizerConfig> configs;
    for (torch::nn::Sequential& part : {std::ref(generator), std::ref(critic)}) {
      DistributedDataParallel& ddp = setup.ddp(part);
      if (fused)
        configs.push_back({std::make_shared<optim::Adam>(ddp, optim::AdamOptions{.lr = 0.01})});
      else
        configs.push_back({std::make_shared<torch::optim::Adam>(part->parameters(), torch::optim::AdamOptions(0.01))});
    }
    return configs;
  }
  bool fused = false;
  torch::nn::Sequential generator{nullptr}, critic{nullptr};
};
TORCH_MODULE(Adversarial);

void trainer_adversarial(Run& run) {
  Trainer trainer({.max_epochs = 3,
                   .sync_batch_norm = true,
                   .ema = 0.8,
                   .folder = "",
                   .progress_bar = false,
                   .model_summary = false});
  auto net = make_module<Adversarial>(run);
  net->fused = run.fused;
  const training::FitResult result = trainer.fit(net, make_training_loader(run));
  for (const auto& [name, value] : result.train_values) run.add(name, value);
  run.add("net", *net);
}

}  // namespace
}  // namespace lockstep::tests::programs::resuming

namespace lockstep::tests::programs {

std::vector<Program> resuming_programs() {
  using namespace resuming;  // NOLINT(google-build-using-namespace)
  return {
      {.name = "rewound", .train = rewound},
      {.name = "rewound_by_torch_load", .train = rewound_by_torch_load, .reference = "rewound"},
      {.name = "rewound_by_load", .train = rewound_by_load, .reference = "rewound"},
      {.name = "rewound_by_load_fused",
       .train = rewound_by_load,
       .optimizers = Optimizers::kFused,
       .reference = "rewound"},
      {.name = "uninterrupted", .train = uninterrupted},
      {.name = "resumed", .train = resumed, .reference = "uninterrupted"},
      {.name = "resumed_fused", .train = resumed, .optimizers = Optimizers::kFused, .reference = "uninterrupted"},
      {.name = "trainer_adversarial", .train = trainer_adversarial},
      {.name = "trainer_adversarial_fused",
       .train = trainer_adversarial,
       .optimizers = Optimizers::kFused,
       .reference = "trainer_adversarial"},
      {.name = "trainer_by_hand", .train = trainer_by_hand},
      {.name = "trainer", .train = trainer, .reference = "trainer_by_hand"},
      {.name = "trainer_fused", .train = trainer, .optimizers = Optimizers::kFused, .reference = "trainer_by_hand"}};
}

}  // namespace lockstep::tests::programs
