// Parameters and buffers of unusual kinds: frozen and unfrozen, complex, with sparse gradients, teachers, spectral
// norm.
#include "tests/training/programs/program.h"

namespace lockstep::tests::programs::parameters {
namespace {

// Fine-tuning: the backbone is frozen at first and trained later.

struct TunedImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return head(backbone->forward(x)); }
  torch::nn::Sequential backbone = register_module(
      "backbone", torch::nn::Sequential(torch::nn::Conv1d(torch::nn::Conv1dOptions(1, 4, 3)), torch::nn::Tanh(),
                                        torch::nn::Flatten(), torch::nn::LayerNorm(torch::nn::LayerNormOptions({24}))));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(24, 3));
};
TORCH_MODULE(Tuned);

void set_trained(const std::vector<torch::Tensor>& parameters, bool trained) {
  for (const torch::Tensor& parameter : parameters) parameter.requires_grad_(trained);
}

void tune(Run& run, Tuned& net, torch::optim::Optimizer& optimizer, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 1, 8}));
    optimizer.zero_grad();
    const torch::Tensor loss = torch::cross_entropy_loss(net->forward(x), x.squeeze(1).slice(1, 0, 3).argmax(1));
    loss.backward();
    optimizer.step();
    run.add_loss(loss);
  }
}

// One optimizer of all parameters from the beginning.
void frozen_then_trained(Run& run) {
  auto net = make_module<Tuned>(run);
  set_trained(net->backbone->parameters(), false);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_sgd(run, ddp, net->parameters(), 0.2, 0.9);
  tune(run, net, *optimizer, 0, 4);
  set_trained(net->backbone->parameters(), true);
  tune(run, net, *optimizer, 4, 8);
  set_trained(net->head->parameters(), false);
  tune(run, net, *optimizer, 8, kSteps);
  run.add("net", *net);
}

// The backbone becomes a parameter group of the optimizer when it is unfrozen, as fine-tuning tutorials do it.
void group_added_later(Run& run) {
  auto net = make_module<Tuned>(run);
  set_trained(net->backbone->parameters(), false);
  DistributedDataParallel ddp(net, run.world);
  torch::optim::SGD optimizer(net->head->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  tune(run, net, optimizer, 0, 5);
  set_trained(net->backbone->parameters(), true);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(
      net->backbone->parameters(), std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.05))));
  tune(run, net, optimizer, 5, kSteps);
  run.add("net", *net);
}

// Only the head has a DistributedDataParallel, then the whole network gets one.
void second_phase(Run& run) {
  auto net = make_module<Tuned>(run);
  lockstep::broadcast_parameters(net, run.world);
  set_trained(net->backbone->parameters(), false);
  {
    DistributedDataParallel ddp(net->head, run.world);
    const auto optimizer = make_sgd(run, ddp, net->head->parameters(), 0.2, 0.9);
    tune(run, net, *optimizer, 0, 5);
  }
  set_trained(net->backbone->parameters(), true);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.01);
  tune(run, net, *optimizer, 5, kSteps);
  run.add("net", *net);
}

// A filter in the frequency domain, with complex parameters.

struct SpectralFilterImpl : torch::nn::Module {
  SpectralFilterImpl() {
    filter = register_parameter("filter", torch::randn({5}, torch::kComplexDouble));
    mix = register_parameter("mix", 0.3 * torch::randn({5, 5}, torch::kComplexDouble));
    gain = register_parameter("gain", torch::ones({8}, torch::kFloat64));
    register_buffer("rotary", torch::polar(torch::ones({5}), torch::arange(5.0)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::fft_irfft(torch::fft_rfft(x).mul(filter).matmul(mix), 8) * gain;
  }
  torch::Tensor filter, mix, gain;
};
TORCH_MODULE(SpectralFilter);

void complex_parameters(Run& run) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  SpectralFilter net;
  DistributedDataParallel ddp(net, run.world);
  // Fused optimizers have no loops for complex numbers, and say so.
  const std::string refusal = usage_error_of([&] { optim::SGD refused(ddp, {.lr = 0.1}); });
  expect(refusal.find("omplex") != std::string::npos && refusal.find("filter") != std::string::npos, refusal);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.5));
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 8}));
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(x), x.roll(1, 1));
    loss.backward();
    optimizer.step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// Embeddings with sparse gradients, of which each rank reaches other rows.

struct SparseNetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& words) {
    return output(torch::tanh(words_embedding(words).mean(1)) + bags(words));
  }
  torch::nn::Embedding words_embedding =
      register_module("words_embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(40, 4).sparse(true)));
  torch::nn::EmbeddingBag bags = register_module(
      "bags", torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(40, 4).sparse(true).mode(torch::kSum)));
  torch::nn::Linear output = register_module("output", torch::nn::Linear(4, 1));
};
TORCH_MODULE(SparseNet);

void train_sparse(Run& run, SparseNet& net, torch::optim::Optimizer& optimizer) {
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor words = run.part(integers(step, 40, {kGlobalBatch, 3}));
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(words).squeeze(1), words.sum(1).to(torch::kFloat64).sin());
    loss.backward();
    expect(net->words_embedding->weight.grad().is_sparse(), "the averaged gradient is sparse");
    optimizer.step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

void sparse_embedding(Run& run) {
  auto net = make_module<SparseNet>(run);
  DistributedDataParallel ddp(net, run.world);
  torch::optim::SGD optimizer(net->parameters(), 0.3);
  train_sparse(run, net, optimizer);
}

void sparse_adagrad(Run& run) {
  auto net = make_module<SparseNet>(run);
  DistributedDataParallel ddp(net, run.world);
  torch::optim::Adagrad optimizer(net->parameters(), 0.1);
  train_sparse(run, net, optimizer);
}

// Fused optimizers refuse sparse gradients at the first step; the program then goes on with one of torch.
void sparse_refused(Run& run) {
  auto net = make_module<SparseNet>(run);
  DistributedDataParallel ddp(net, run.world);
  {
    optim::SGD optimizer(ddp, {.lr = 0.3});
    optimizer.zero_grad();
    net->forward(run.part(integers(0, 40, {kGlobalBatch, 3}))).sum().backward();
    const std::string refusal = usage_error_of([&] { optimizer.step(); });
    expect(refusal.find("sparse") != std::string::npos, refusal);
  }
  torch::optim::SGD optimizer(net->parameters(), 0.3);
  train_sparse(run, net, optimizer);
}

// A student learns from a frozen teacher, which is the moving average of the student (mean teacher).

struct StudentImpl : torch::nn::Cloneable<StudentImpl> {
  StudentImpl() { reset(); }
  void reset() override {
    hidden = register_module("hidden", torch::nn::Linear(5, 12));
    output = register_module("output", torch::nn::Linear(12, 4));
    center = register_buffer("center", torch::zeros({4}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::gelu(hidden(x))); }
  torch::nn::Linear hidden{nullptr}, output{nullptr};
  torch::Tensor center;
};
TORCH_MODULE(Student);

void mean_teacher(Run& run) {
  auto student = make_module<Student>(run);
  DistributedDataParallel ddp(student, run.world);
  Student teacher(std::dynamic_pointer_cast<StudentImpl>(student->clone()));  // after rank 0's values have come
  set_trained(teacher->parameters(), false);
  const auto optimizer = make_adam(run, ddp, student->parameters(), 0.01);
  optim::Ema ema(student, {.decay = 0.8});
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 5}));
    const torch::Tensor noise = run.part(normal(100 + step, {kGlobalBatch, 5}));
    optimizer->zero_grad();
    const torch::Tensor wanted = torch::softmax((teacher->forward(x) - teacher->center) / 0.5, 1);
    const torch::Tensor loss = -(wanted * torch::log_softmax(student->forward(x + 0.1 * noise), 1)).sum(1).mean();
    loss.backward();
    optimizer->step();
    ema.update();
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < teacher->parameters().size(); ++i)
      teacher->parameters()[i].mul_(0.9).add_(student->parameters()[i], 0.1);
    torch::Tensor center = teacher->forward(x).mean(0);
    run.world.all_reduce(center, ReduceOp::kMean);
    teacher->center.mul_(0.9).add_(center, 0.1);
    run.add_loss(loss);
  }
  run.add("student", *student);
  run.add("teacher", *teacher);
  const auto averaged = ema.swap();
  run.add("averaged", *student);
}

// Spectral normalisation: the forward pass updates buffers, and is called twice before the backward pass.

struct SpectralNormImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    if (is_training()) {
      const torch::NoGradGuard no_grad;
      const torch::Tensor next = weight.t().mv(left);
      right.copy_(next / next.norm());
      const torch::Tensor image = weight.mv(right);
      left.copy_(image / image.norm());
      updates.add_(1);
    }
    const torch::Tensor sigma = left.clone().dot(weight.mv(right.clone()));
    return torch::nn::functional::linear(x, gain * weight / sigma);
  }
  torch::Tensor weight = register_parameter("weight", torch::randn({4, 4}));
  torch::Tensor gain = register_parameter("gain", torch::ones({}));
  torch::Tensor left = register_buffer("left", torch::ones({4}) / 2);
  torch::Tensor right = register_buffer("right", torch::ones({4}) / 2);
  torch::Tensor updates = register_buffer("updates", torch::zeros({}, torch::kInt64));
};
TORCH_MODULE(SpectralNorm);

void spectral_norm(Run& run) {
  auto net = make_module<SpectralNorm>(run);
  DistributedDataParallel ddp(net, run.world, {.buffers = BufferMode::kMean});
  const auto optimizer = make_sgd(run, ddp, net->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 4})),
                        y = run.part(normal(70 + step, {kGlobalBatch, 4}));
    optimizer->zero_grad();
    const torch::Tensor loss = (net->forward(x) + net->forward(y).tanh() - x.flip(1)).pow(2).mean();
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

}  // namespace
}  // namespace lockstep::tests::programs::parameters

namespace lockstep::tests::programs {

std::vector<Program> parameter_programs() {
  std::vector<Program> programs;
  const auto add = [&](const std::vector<Program>& more) { programs.insert(programs.end(), more.begin(), more.end()); };
  add(with_both_optimizers("frozen_then_trained", parameters::frozen_then_trained));
  add({{.name = "group_added_later", .train = parameters::group_added_later}});
  add(with_both_optimizers("second_phase", parameters::second_phase));
  add({{.name = "complex_parameters", .train = parameters::complex_parameters},
       {.name = "sparse_embedding", .train = parameters::sparse_embedding},
       {.name = "sparse_adagrad", .train = parameters::sparse_adagrad},
       {.name = "sparse_refused", .train = parameters::sparse_refused, .reference = "sparse_embedding"}});
  add(with_both_optimizers("mean_teacher", parameters::mean_teacher));
  add(with_both_optimizers("spectral_norm", parameters::spectral_norm));
  return programs;
}

}  // namespace lockstep::tests::programs
