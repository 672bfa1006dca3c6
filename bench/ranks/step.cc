#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "bench/ranks/c10d_baselines.h"
#include "bench/ranks/harness_channel.h"
#include "bench/ranks/models.h"
#include "bench/ranks/rank.h"

namespace lockstep::bench {
namespace {

/// One implementation of a step: calls around forward() and backward(), and the optimizer.
struct StepImplementation {
  std::function<void()> before_forward = [] {};
  std::function<void(const at::Tensor& output)> before_backward = [](const at::Tensor&) {};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::shared_ptr<void> keep_alive = nullptr;  // objects to which the functions refer
};

std::unique_ptr<torch::optim::Optimizer> torch_optimizer(torch::nn::Module& net, const std::string& name) {
  if (name == "sgd")
    return std::make_unique<torch::optim::SGD>(net.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  if (name == "adamw") return std::make_unique<torch::optim::AdamW>(net.parameters(), torch::optim::AdamWOptions(1e-4));
  throw UsageError("lockstep-bench rank step: unknown optimizer " + name + "; expected sgd or adamw");
}

std::unique_ptr<torch::optim::Optimizer> fused_optimizer(DistributedDataParallel& ddp, const std::string& name,
                                                         bool in_backward) {
  const auto configured = [&](auto optimizer) {
    optimizer->update_in_backward(in_backward);
    return optimizer;
  };
  if (name == "sgd")
    return configured(std::make_unique<optim::SGD>(ddp, optim::SGDOptions{.lr = 0.01, .momentum = 0.9}));
  if (name == "adamw") return configured(std::make_unique<optim::AdamW>(ddp, optim::AdamWOptions{.lr = 1e-4}));
  throw UsageError("lockstep-bench rank step: unknown optimizer " + name + "; expected sgd or adamw");
}

/// Creates the implementation called `impl`; the names are those of bench/harness/implementations.cc.
StepImplementation make_step_implementation(const std::string& impl, torch::nn::Module& net,
                                            const std::string& optimizer) {
  if (impl == "lockstep" || impl == "lockstep-uncompared" || impl == "lockstep-compared" || impl == "lockstep-finite") {
    DdpOptions options{.check_finite = impl == "lockstep-finite"};
    if (impl == "lockstep-uncompared") options.compare_replicas_every = 0;
    if (impl == "lockstep-compared") options.compare_replicas_every = 1;
    auto ddp = std::make_shared<DistributedDataParallel>(net, init(), options);
    return {.optimizer = torch_optimizer(net, optimizer), .keep_alive = ddp};
  }
  if (impl == "lockstep-fused" || impl == "lockstep-fused-early") {
    auto ddp = std::make_shared<DistributedDataParallel>(net, init());
    return {.optimizer = fused_optimizer(*ddp, optimizer, impl == "lockstep-fused-early"), .keep_alive = ddp};
  }
  if (impl == "reducer" || impl == "reducer-views") {
    auto reducer = std::make_shared<ReducerBaseline>(net, impl == "reducer-views");
    return {.before_forward = [reducer] { reducer->before_forward(); },
            .before_backward = [reducer](const at::Tensor& output) { reducer->before_backward(output); },
            .optimizer = torch_optimizer(net, optimizer)};
  }
  if (impl == "unsynchronised") return {.optimizer = torch_optimizer(net, optimizer)};
  if (impl == "backward-only") {  // one process: init() installs the arena if LOCKSTEP_ARENA is on
    const Group world = init();
    return {.keep_alive = std::make_shared<Group>(world)};
  }
  throw UsageError("lockstep-bench rank step: unknown implementation " + impl +
                   "; expected lockstep, lockstep-uncompared, lockstep-compared, lockstep-finite, lockstep-fused, "
                   "lockstep-fused-early, reducer, reducer-views, unsynchronised or backward-only");
}

double step(Task& task, StepImplementation& step_implementation, std::int64_t batch) {
  const double begin = now();
  task.net().zero_grad();  // Optimizer::zero_grad() would detach the reducer's bucket views, which throws
  step_implementation.before_forward();
  const at::Tensor output = task.forward(batch);
  step_implementation.before_backward(output);
  task.loss(output).backward();
  if (step_implementation.optimizer) step_implementation.optimizer->step();
  return now() - begin;
}

}  // namespace

void run_step_rank(const std::string& impl, const std::string& model, const std::string& optimizer,
                   const std::string& prefix) {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  // Before the model, so that it is allocated in the arena; a second init() returns the same group.
  std::optional<Group> world;
  if (impl.rfind("lockstep", 0) == 0 || impl == "backward-only") world = init();
  const std::unique_ptr<Task> task = make_task(model);
  StepImplementation step_implementation = make_step_implementation(impl, task->net(), optimizer);
  double parameters = 0;
  for (const at::Tensor& parameter : task->net().parameters()) parameters += static_cast<double>(parameter.numel());
  HarnessChannel channel(prefix, own_rank());
  channel.send_result({parameters});
  while (const auto request = channel.next_request()) {
    for (std::int64_t i = 0; i < request->at(0); ++i) step(*task, step_implementation, task->batch());
    std::vector<double> seconds;
    for (std::int64_t i = 0; i < request->at(1); ++i)
      seconds.push_back(step(*task, step_implementation, task->batch()));
    channel.send_result(seconds);
  }
}

void run_growth_rank(const std::string& prefix) {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  const Group world = init();
  const std::unique_ptr<Task> task = make_task("mlp-6m");
  StepImplementation step_implementation{.optimizer = torch_optimizer(task->net(), "sgd")};
  HarnessChannel channel(prefix, own_rank());
  channel.send_result({});
  while (const auto request = channel.next_request()) {
    const std::int64_t steps = request->at(0);
    const at::Tensor batches = torch::randint(1, task->batch() + 1, {steps}, torch::kLong);
    std::vector<double> result;
    for (std::int64_t i = 0; i < steps; ++i) {
      step(*task, step_implementation, batches[i].item<std::int64_t>());
      if (i + 1 != steps / 10 && i + 1 != steps) continue;
      const ArenaStats stats = arena_stats();
      result.push_back(static_cast<double>(stats.high_water_bytes));
      result.push_back(static_cast<double>(stats.peak_live_bytes));
    }
    channel.send_result(result);
  }
}

}  // namespace lockstep::bench
