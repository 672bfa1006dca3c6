#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "bench/ranks/c10d_baselines.h"
#include "bench/ranks/models.h"
#include "bench/ranks/rank.h"
#include "bench/ranks/harness_channel.h"

namespace lockstep::bench {
namespace {

/// What makes an implementation: calls around forward() and backward(), and the optimizer.
struct Way {
  std::function<void()> before_forward = [] {};
  std::function<void(const at::Tensor& output)> before_backward = [](const at::Tensor&) {};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::shared_ptr<void> kept = nullptr;  // what must live as long
};

std::unique_ptr<torch::optim::Optimizer> torch_optimizer(torch::nn::Module& net, const std::string& name) {
  if (name == "sgd")
    return std::make_unique<torch::optim::SGD>(net.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  if (name == "adamw") return std::make_unique<torch::optim::AdamW>(net.parameters(), torch::optim::AdamWOptions(1e-4));
  throw UsageError("the optimizer is " + name + "; allowed are sgd and adamw");
}

std::unique_ptr<torch::optim::Optimizer> fused_optimizer(DistributedDataParallel& ddp, const std::string& name,
                                                         bool in_backward) {
  const auto ready = [&](auto optimizer) {
    optimizer->update_in_backward(in_backward);
    return optimizer;
  };
  if (name == "sgd") return ready(std::make_unique<optim::SGD>(ddp, optim::SGDOptions{.lr = 0.01, .momentum = 0.9}));
  if (name == "adamw") return ready(std::make_unique<optim::AdamW>(ddp, optim::AdamWOptions{.lr = 1e-4}));
  throw UsageError("the optimizer is " + name + "; allowed are sgd and adamw");
}

/// Every implementation of a step; bench/harness/implementations.cc starts them under their names.
Way make_way(const std::string& impl, torch::nn::Module& net, const std::string& optimizer) {
  if (impl == "lockstep" || impl == "lockstep-uncompared" || impl == "lockstep-compared" || impl == "lockstep-finite") {
    DdpOptions options{.check_finite = impl == "lockstep-finite"};
    if (impl == "lockstep-uncompared") options.compare_every = 0;
    if (impl == "lockstep-compared") options.compare_every = 1;
    auto ddp = std::make_shared<DistributedDataParallel>(net, init(), options);
    return {.optimizer = torch_optimizer(net, optimizer), .kept = ddp};
  }
  if (impl == "lockstep-fused" || impl == "lockstep-fused-early") {
    auto ddp = std::make_shared<DistributedDataParallel>(net, init());
    return {.optimizer = fused_optimizer(*ddp, optimizer, impl == "lockstep-fused-early"), .kept = ddp};
  }
  if (impl == "reducer" || impl == "reducer-views") {
    auto reducer = std::make_shared<ReducerPeer>(net, impl == "reducer-views");
    return {.before_forward = [reducer] { reducer->before_forward(); },
            .before_backward = [reducer](const at::Tensor& output) { reducer->before_backward(output); },
            .optimizer = torch_optimizer(net, optimizer)};
  }
  if (impl == "unsynchronised") return {.optimizer = torch_optimizer(net, optimizer)};
  if (impl == "backward-only") {  // one process: init() installs the arena when LOCKSTEP_ARENA says so
    const Group world = init();
    return {.kept = std::make_shared<Group>(world)};
  }
  throw UsageError("lockstep-bench rank step: the implementation is " + impl +
                   "; allowed are lockstep, lockstep-uncompared, lockstep-compared, lockstep-finite, lockstep-fused, "
                   "lockstep-fused-early, reducer, reducer-views, unsynchronised and backward-only");
}

double step(Task& task, Way& way, std::int64_t batch) {
  const double begin = now();
  task.net().zero_grad();  // Optimizer::zero_grad() would detach the reducer's bucket views, which throws
  way.before_forward();
  const at::Tensor output = task.forward(batch);
  way.before_backward(output);
  task.loss(output).backward();
  if (way.optimizer) way.optimizer->step();
  return now() - begin;
}

}  // namespace

void step_rank(const std::string& impl, const std::string& model, const std::string& optimizer,
               const std::string& prefix) {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  // Before the model, so that it is born where the implementation wants it; init() again gives the same group.
  std::optional<Group> world;
  if (impl.rfind("lockstep", 0) == 0 || impl == "backward-only") world = init();
  const std::unique_ptr<Task> task = make_task(model);
  Way way = make_way(impl, task->net(), optimizer);
  double parameters = 0;
  for (const at::Tensor& parameter : task->net().parameters()) parameters += static_cast<double>(parameter.numel());
  Turns turns(prefix, rank_here());
  turns.answer({parameters});
  while (const auto order = turns.next()) {
    for (std::int64_t i = 0; i < order->at(0); ++i) step(*task, way, task->batch());
    std::vector<double> seconds;
    for (std::int64_t i = 0; i < order->at(1); ++i) seconds.push_back(step(*task, way, task->batch()));
    turns.answer(seconds);
  }
}

void growth_rank(const std::string& prefix) {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  const Group world = init();
  const std::unique_ptr<Task> task = make_task("mlp-6m");
  Way way{.optimizer = torch_optimizer(task->net(), "sgd")};
  Turns turns(prefix, rank_here());
  turns.answer({});
  while (const auto order = turns.next()) {
    const std::int64_t steps = order->at(0);
    const at::Tensor batches = torch::randint(1, task->batch() + 1, {steps}, torch::kLong);
    std::vector<double> answer;
    for (std::int64_t i = 0; i < steps; ++i) {
      step(*task, way, batches[i].item<std::int64_t>());
      if (i + 1 != steps / 10 && i + 1 != steps) continue;
      const ArenaStats stats = arena_stats();
      answer.push_back(static_cast<double>(stats.high_water_bytes));
      answer.push_back(static_cast<double>(stats.peak_live_bytes));
    }
    turns.answer(answer);
  }
}

}  // namespace lockstep::bench
