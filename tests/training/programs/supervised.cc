// Classifiers and regressions with a plain loop.
#include <cmath>

#include "tests/training/programs/program.h"

namespace lockstep::tests::programs::supervised {
namespace {

// A classifier of points, with the loop of the README.

data::Example point(std::size_t index) {
  const auto angle = static_cast<double>(index);
  const torch::Tensor data =
      torch::tensor({std::sin(angle), std::cos(1.7 * angle), std::sin(0.3 * angle), 1.0}, torch::kFloat64);
  return {data, torch::tensor(static_cast<std::int64_t>((data[0] * data[1]).item<double>() > 0))};
}

void train_classifier(Run& run, bool averages) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  torch::nn::Sequential net(torch::nn::Linear(4, 16), torch::nn::ReLU(), torch::nn::Linear(16, 2),
                            torch::nn::LogSoftmax(1));
  net->to(torch::kFloat64);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_sgd(run, ddp, net->parameters(), 0.5, 0.9);
  auto loader = data::make_loader(60, point, run.world, {.batch_size = kGlobalBatch / run.world.size(), .seed = 3});
  for (int epoch = 0; epoch < 2; ++epoch)
    for (auto& batch : loader) {
      optimizer->zero_grad();
      const torch::Tensor loss = torch::nll_loss(net->forward(batch.data), batch.target);
      if (averages) {
        loss.backward();
      } else {
        const auto guard = ddp.no_sync();
        loss.backward();
      }
      optimizer->step();
      run.add_loss(loss);
    }
  if (averages) run.add("net", *net);
}

void mlp_classifier(Run& run) { train_classifier(run, true); }

// The same with the reduction left out.
void no_reduction(Run& run) {
  train_classifier(run, false);
  run.world.barrier();
}

// A regression of a function of two variables, in float64, with batch normalisation over all ranks and weight decay.

struct RegressionImpl : torch::nn::Module {
  RegressionImpl() {
    // Without a bias: its gradient is 0 before the norm, and Adam would enlarge what rounding leaves of it.
    input = register_module("input", torch::nn::Linear(torch::nn::LinearOptions(2, 24).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm1d(24));
    output = register_module("output", torch::nn::Linear(24, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::tanh(norm(input(x)))); }
  torch::nn::Linear input{nullptr}, output{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Regression);

void float64_regression(Run& run) {
  auto net = make_module<Regression>(run);
  convert_sync_batch_norm(net, run.world);
  DistributedDataParallel ddp(net, run.world);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (run.fused)
    optimizer = std::make_unique<optim::AdamW>(ddp, optim::AdamWOptions{.lr = 0.05, .amsgrad = true});
  else
    optimizer =
        std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(0.05).amsgrad(true));
  optim::Scheduler schedule(*optimizer, optim::one_cycle({.steps = kSteps}));
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(uniform(step, {kGlobalBatch, 2}));
    const torch::Tensor y = torch::sin(3 * x.select(1, 0)) * x.select(1, 1);
    optimizer->zero_grad();
    const torch::Tensor loss = torch::smooth_l1_loss(net->forward(x).squeeze(1), y);
    loss.backward();
    clip_grad_norm(*optimizer, 0.5);
    optimizer->step();
    schedule.step();
    run.add_loss(loss);
  }
  net->eval();
  run.add("prediction", net->forward(uniform(99, {5, 2})));
  run.add("net", *net);
}

// Super-resolution as in pytorch/examples: sub-pixel convolution. The weights of convolutions are channels-last.

struct SuperResolutionImpl : torch::nn::Module {
  SuperResolutionImpl() {
    const auto conv = [](int in, int out, int size) {
      return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, size).padding(size / 2));
    };
    layers = register_module("layers", torch::nn::Sequential(conv(1, 8, 5), torch::nn::ReLU(), conv(8, 8, 3),
                                                             torch::nn::ReLU(), conv(8, 4, 3)));
    shuffle = register_module("shuffle", torch::nn::PixelShuffle(2));
  }
  torch::Tensor forward(const torch::Tensor& x) { return shuffle(layers->forward(x)); }
  torch::nn::Sequential layers{nullptr};
  torch::nn::PixelShuffle shuffle{nullptr};
};
TORCH_MODULE(SuperResolution);

void super_resolution(Run& run) {
  auto net = make_module<SuperResolution>(run);
  for (torch::Tensor& parameter : net->parameters())
    if (parameter.dim() == 4) parameter.set_data(parameter.contiguous(torch::MemoryFormat::ChannelsLast));
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.01);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor images = run.part(uniform(step, {kGlobalBatch, 1, 12, 12}));
    const torch::Tensor small = torch::avg_pool2d(images, 2).contiguous(torch::MemoryFormat::ChannelsLast);
    optimizer->zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(small), images);
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// Factorisation of a matrix of ratings. The gradient of `items` is computed transposed, that of `offset` is expanded
// from one number, and the items are stored as a transposed matrix.

struct FactorisationImpl : torch::nn::Module {
  FactorisationImpl() {
    users = register_parameter("users", 0.3 * torch::randn({kGlobalBatch, 4}));
    items = register_parameter("items", 0.3 * torch::randn({4, 9}).t());
    offset = register_parameter("offset", torch::zeros({4}));
  }
  /// Returns the ratings of all items by the users from `first` on.
  torch::Tensor forward(std::int64_t first, std::int64_t count) const {
    return users.narrow(0, first, count).matmul(items.t()) + offset.sum();
  }
  torch::Tensor users, items, offset;
};
TORCH_MODULE(Factorisation);

void matrix_factorisation(Run& run) {
  auto net = make_module<Factorisation>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_sgd(run, ddp, net->parameters(), 0.3, 0.5);
  const std::int64_t count = kGlobalBatch / run.world.size(), first = run.world.rank() * count;
  const torch::Tensor ratings = normal(0, {kGlobalBatch, 3}).matmul(normal(1, {3, 9}));
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor known = uniform(step, {kGlobalBatch, 9}).lt(0.7).to(torch::kFloat64);
    optimizer->zero_grad();
    const torch::Tensor difference = (net->forward(first, count) - run.part(ratings)) * run.part(known);
    const torch::Tensor loss = difference.pow(2).mean();
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// A siamese network: two forward passes of one network, and one backward pass. Batch normalisation sees both.

struct EmbeddingNetImpl : torch::nn::Module {
  EmbeddingNetImpl() {
    conv = register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(2, 6, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    output = register_module("output", torch::nn::Linear(6 * 8, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::prelu(norm(conv(x)), slope).flatten(1)); }
  torch::nn::Conv1d conv{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear output{nullptr};
  torch::Tensor slope = register_parameter("slope", torch::full({1}, 0.25));
};
TORCH_MODULE(EmbeddingNet);

void siamese(Run& run) {
  auto net = make_module<EmbeddingNet>(run);
  DistributedDataParallel ddp(net, run.world);
  convert_sync_batch_norm(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.02);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor left = run.part(normal(2 * step, {kGlobalBatch, 2, 8}));
    const torch::Tensor noise = run.part(normal(2 * step + 1, {kGlobalBatch, 2, 8}));
    const torch::Tensor same = run.part(integers(step, 2, {kGlobalBatch}).to(torch::kFloat64));
    const torch::Tensor right = torch::where(same.view({-1, 1, 1}) > 0, left + 0.1 * noise, noise);
    optimizer->zero_grad();
    const torch::Tensor distance = torch::pairwise_distance(net->forward(left), net->forward(right));
    const torch::Tensor loss = (same * distance.pow(2) + (1 - same) * torch::relu(1 - distance).pow(2)).mean();
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

}  // namespace
}  // namespace lockstep::tests::programs::supervised

namespace lockstep::tests::programs {

std::vector<Program> supervised_programs() {
  std::vector<Program> programs = {{.name = "no_reduction",
                                    .train = supervised::no_reduction,
                                    .warning = "its ranks have never exchanged gradients",
                                    .must_differ = true}};
  const auto add = [&](const std::vector<Program>& more) { programs.insert(programs.end(), more.begin(), more.end()); };
  add(with_all_optimizers("mlp_classifier", supervised::mlp_classifier));
  add(with_both_optimizers("float64_regression", supervised::float64_regression));
  add(with_all_optimizers("super_resolution", supervised::super_resolution));
  add(with_all_optimizers("matrix_factorisation", supervised::matrix_factorisation));
  add(with_both_optimizers("siamese", supervised::siamese));
  return programs;
}

}  // namespace lockstep::tests::programs
