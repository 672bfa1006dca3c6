// Updates that are more than a step of an optimizer: writes into parameters and gradients, other backward passes,
// reductions by hand.
#include <exception>
#include <optional>
#include <stdexcept>
#include <thread>

#include "tests/training/programs/program.h"

namespace lockstep::tests::programs::updates {
namespace {

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return head(torch::tanh(body(x))); }
  torch::nn::Linear body = register_module("body", torch::nn::Linear(5, 8));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(8, 2));
};
TORCH_MODULE(Net);

torch::Tensor batch(const Run& run, int step) { return run.part(normal(step, {kGlobalBatch, 5})); }

torch::Tensor loss_of(Net& net, const torch::Tensor& x) {
  return torch::mse_loss(net->forward(x), torch::stack({x.sum(1), x.prod(1)}, 1));
}

/// Calls `change`, which writes the parameters of `optimizer`, in the way that a fused optimizer asks for.
void write_parameters(torch::optim::Optimizer& optimizer, const std::function<void()>& change) {
  const auto without_grad = [&] {
    const torch::NoGradGuard no_grad;
    change();
  };
  if (auto* const fused = dynamic_cast<optim::FusedOptimizer*>(&optimizer))
    fused->change_parameters(without_grad);
  else
    without_grad();
}

/// Makes .grad() the mean over the ranks, which backward() has done for an optimizer of torch.
void average_gradients(torch::optim::Optimizer& optimizer) {
  if (auto* const fused = dynamic_cast<optim::FusedOptimizer*>(&optimizer)) fused->average_gradients();
}

// Sharpness-aware minimisation: the gradient of a step is taken at the worst point nearby.
void sharpness_aware(Run& run) {
  auto net = make_module<Net>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_sgd(run, ddp, net->parameters(), 0.05, 0.9);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = batch(run, step);
    optimizer->zero_grad();
    const torch::Tensor loss = loss_of(net, x);
    loss.backward();
    average_gradients(*optimizer);
    std::vector<torch::Tensor> moves;
    torch::Tensor norm = torch::zeros({}, torch::kFloat64);
    for (const torch::Tensor& parameter : net->parameters()) norm += parameter.grad().pow(2).sum();
    for (const torch::Tensor& parameter : net->parameters()) moves.push_back(0.05 * parameter.grad() / norm.sqrt());
    write_parameters(*optimizer, [&] {
      for (std::size_t i = 0; i < moves.size(); ++i) net->parameters()[i].add_(moves[i]);
    });
    optimizer->zero_grad();
    loss_of(net, x).backward();
    write_parameters(*optimizer, [&] {
      for (std::size_t i = 0; i < moves.size(); ++i) net->parameters()[i].sub_(moves[i]);
    });
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// Weights that are clipped after each step, as in the first WGAN, and gradients that are centred before it.
void clipped_weights(Run& run) {
  auto net = make_module<Net>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_sgd(run, ddp, net->parameters(), 0.2);
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    const torch::Tensor loss = loss_of(net, batch(run, step));
    loss.backward();
    average_gradients(*optimizer);
    for (const torch::Tensor& parameter : net->parameters())
      if (parameter.dim() > 1) parameter.mutable_grad().sub_(parameter.grad().mean(1, true));
    optimizer->step();
    write_parameters(*optimizer, [&] {
      for (torch::Tensor& parameter : net->parameters()) parameter.clamp_(-0.3, 0.3);
    });
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// Backward passes that accumulate into some parameters only: the head and the body are trained in turn.
void backward_inputs(Run& run) {
  auto net = make_module<Net>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.02);
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<torch::Tensor> inputs = step % 2 == 0 ? net->head->parameters() : net->body->parameters();
    optimizer->zero_grad();
    const torch::Tensor loss = loss_of(net, batch(run, step));
    loss.backward({}, false, false, at::TensorList(inputs));
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// Several roots, of which one is a vector with a gradient of its own.
void several_roots(Run& run) {
  auto net = make_module<Net>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.02);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = batch(run, step), weights = run.part(uniform(step, {kGlobalBatch})) / x.size(0);
    optimizer->zero_grad();
    const torch::Tensor out = net->forward(x);
    const torch::Tensor first = torch::smooth_l1_loss(out.select(1, 0), x.sum(1));
    const torch::Tensor each = (out.select(1, 1) - x.prod(1)).abs();
    torch::autograd::backward({first, each}, {torch::Tensor(), weights});
    optimizer->step();
    run.add_loss(first + (each * weights).sum());
  }
  run.add("net", *net);
}

// A backward pass on another thread in each step, and tensor hooks that scale gradients.
void other_threads(Run& run) {
  auto net = make_module<Net>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_sgd(run, ddp, net->parameters(), 0.1, 0.9);
  net->head->weight.register_hook([](const torch::Tensor& gradient) { return gradient.clamp(-1, 1) * 0.5; });
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    const torch::Tensor loss = loss_of(net, batch(run, step));
    std::exception_ptr error;
    std::thread([&] {
      try {
        (loss / 2).backward();
      } catch (...) {
        error = std::current_exception();
      }
    }).join();
    if (error) std::rethrow_exception(error);
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// Batches whose backward pass fails on all ranks, and which are skipped.

struct Failing : torch::autograd::Function<Failing> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::domain_error("a bad batch");
  }
};

/// Returns false if the backward pass fails as `Failing` does.
bool try_backward(const torch::Tensor& loss) {
  try {
    loss.backward();
    return true;
  } catch (const std::domain_error& error) {
    expect(error.what() == std::string("a bad batch"), error.what());
    return false;
  }
}

// The failure comes before the first gradient of a parameter: the training goes on.
void bad_batch(Run& run) {
  auto net = make_module<Net>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.02);
  int skipped = 0;
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = batch(run, step), out = net->forward(x);
    optimizer->zero_grad();
    const torch::Tensor loss = torch::mse_loss(step % 4 == 3 ? Failing::apply(out) : out, x.slice(1, 0, 2));
    if (try_backward(loss)) {
      optimizer->step();
      run.add_loss(loss);
    } else {
      ++skipped;
    }
  }
  run.add("skipped", skipped);
  run.add("net", *net);
}

// The failure comes when gradients of the head are being reduced: the training goes on with another
// DistributedDataParallel.
void bad_batch_midway(Run& run) {
  auto net = make_module<Net>(run);
  std::optional<DistributedDataParallel> ddp(std::in_place, net, run.world);
  torch::optim::Adam optimizer(net->parameters(), 0.02);
  int skipped = 0;
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = batch(run, step);
    optimizer.zero_grad();
    const torch::Tensor features = torch::tanh(net->body(x));
    const torch::Tensor out = net->head(step % 4 == 3 ? Failing::apply(features) : features);
    const torch::Tensor loss = torch::mse_loss(out, x.slice(1, 0, 2));
    if (try_backward(loss)) {
      optimizer.step();
      run.add_loss(loss);
    } else {
      ddp.emplace(net, run.world);
      ++skipped;
    }
  }
  run.add("skipped", skipped);
  run.add("net", *net);
}

// Only the first rank has samples in some steps: the others have batches of no sample.
void empty_batches(Run& run) {
  auto net = make_module<Net>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.02);
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t total = 1 + step % 3;
    const std::int64_t first = std::min<std::int64_t>(run.world.rank(), total);
    const std::int64_t last =
        run.world.rank() + 1 == run.world.size() ? total : std::min<std::int64_t>(first + 1, total);
    const torch::Tensor x = normal(step, {total, 5}).slice(0, first, last);
    optimizer->zero_grad();
    // The sum over this rank's samples, weighted so that the mean over the ranks is the mean over all samples.
    const torch::Tensor loss = (net->forward(x) - x.slice(1, 0, 2)).pow(2).sum() * run.world.size() / total;
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// Domain adaptation with a layer that reverses gradients, and one backward pass through two models, each with a
// DistributedDataParallel and an optimizer of its own.

struct Reversal : torch::autograd::Function<Reversal> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x.view_as(x); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0].neg() * 0.3};
  }
};

void domain_adversarial(Run& run) {
  auto net = make_module<Net>(run);
  torch::nn::Sequential domains(torch::nn::Linear(8, 6), torch::nn::ReLU(), torch::nn::Linear(6, 1));
  domains->to(torch::kFloat64);
  DistributedDataParallel ddp(net, run.world), domains_ddp(domains, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.02);
  const auto domains_optimizer = make_sgd(run, domains_ddp, domains->parameters(), 0.1, 0.9);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor domain = run.part(integers(step, 2, {kGlobalBatch}).to(torch::kFloat64));
    const torch::Tensor x = batch(run, step) + domain.unsqueeze(1);
    optimizer->zero_grad();
    domains_optimizer->zero_grad();
    const torch::Tensor features = torch::tanh(net->body(x));
    const torch::Tensor guess = domains->forward(Reversal::apply(features)).squeeze(1);
    const torch::Tensor loss =
        torch::mse_loss(net->head(features), x.slice(1, 0, 2)) + torch::binary_cross_entropy_with_logits(guess, domain);
    loss.backward();
    optimizer->step();
    domains_optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
  run.add("domains", *domains);
}

// Without DistributedDataParallel: gradients are averaged by hand, with operations that do not block.
void by_hand(Run& run) {
  auto net = make_module<Net>(run);
  broadcast_parameters(net, run.world);
  torch::optim::Adam optimizer(net->parameters(), 0.02);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss = loss_of(net, batch(run, step));
    loss.backward();
    std::vector<Work> work;
    for (const torch::Tensor& parameter : net->parameters())
      work.push_back(run.world.all_reduce_async(parameter.grad(), ReduceOp::kMean));
    for (Work& one : work) one.wait();
    optimizer.step();
    run.world.step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// Metrics of the last step are added up while the backward pass of the next one reduces gradients in the same group,
// and rank 0 evaluates and saves alone after each step.
void overlapped_metrics(Run& run) {
  auto net = make_module<Net>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.02);
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    const torch::Tensor loss = loss_of(net, batch(run, step));
    const torch::Tensor metrics = torch::stack({loss.detach(), loss.detach().pow(2)});
    Work work = run.world.all_reduce_async(metrics, ReduceOp::kMean, {.name = "metrics"});
    loss.backward();
    optimizer->step();
    work.wait();
    run.add("loss", metrics[0].item<double>());
    if (run.world.rank() != 0) continue;
    const torch::NoGradGuard no_grad;
    net->eval();
    run.add("validation_loss", loss_of(net, normal(77, {6, 5})).item<double>());
    save(net, run.folder + "/" + std::to_string(step) + ".pt");
    net->train();
  }
  run.add("net", *net);
}

}  // namespace
}  // namespace lockstep::tests::programs::updates

namespace lockstep::tests::programs {

std::vector<Program> update_programs() {
  std::vector<Program> programs = {{.name = "by_hand", .train = updates::by_hand}};
  const auto add = [&](const std::vector<Program>& more) { programs.insert(programs.end(), more.begin(), more.end()); };
  add(with_both_optimizers("sharpness_aware", updates::sharpness_aware));
  add(with_both_optimizers("clipped_weights", updates::clipped_weights));
  add(with_all_optimizers("backward_inputs", updates::backward_inputs));
  add(with_both_optimizers("several_roots", updates::several_roots));
  add(with_both_optimizers("other_threads", updates::other_threads));
  add(with_both_optimizers("bad_batch", updates::bad_batch));
  add({{.name = "bad_batch_midway", .train = updates::bad_batch_midway}});
  add(with_both_optimizers("empty_batches", updates::empty_batches));
  add(with_both_optimizers("domain_adversarial", updates::domain_adversarial));
  add(with_both_optimizers("overlapped_metrics", updates::overlapped_metrics));
  return programs;
}

}  // namespace lockstep::tests::programs
