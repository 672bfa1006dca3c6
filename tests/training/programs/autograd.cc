// Unusual graphs and several backward passes per step: checkpointing, branches, several losses, accumulation, closures,
// derivatives of updates.
#include <array>

#include "tests/training/programs/program.h"

namespace lockstep::tests::programs::autograd {
namespace {

struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return x + second(torch::tanh(first(x))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 10));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(10, 6));
};
TORCH_MODULE(Block);

/// Re-entrant activation checkpointing, as torch.utils.checkpoint does it: the forward pass keeps only the input, and
/// the backward pass computes the block again and runs a backward pass of its own.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x, BlockImpl* block) {
    context->save_for_backward({x});
    context->saved_data["block"] = reinterpret_cast<std::int64_t>(block);
    return block->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* const block = reinterpret_cast<BlockImpl*>(context->saved_data["block"].toInt());
    const torch::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const torch::AutoGradMode with_grad(true);
    torch::autograd::backward({block->forward(x)}, {gradients[0]});
    return {x.grad(), torch::Tensor()};
  }
};

struct DeepImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y = torch::tanh(input(x));
    y = Checkpoint::apply(y, blocks[0].get());
    y = blocks[1](y);
    y = Checkpoint::apply(y, blocks[2].get());
    if (twice) y = Checkpoint::apply(y, blocks[2].get());
    return output(y);
  }
  bool twice = false;
  torch::nn::Linear input = register_module("input", torch::nn::Linear(4, 6));
  std::array<Block, 3> blocks = {register_module("block0", Block()), register_module("block1", Block()),
                                 register_module("block2", Block())};
  torch::nn::Linear output = register_module("output", torch::nn::Linear(6, 1));
};
TORCH_MODULE(Deep);

void train_checkpointed(Run& run, bool twice) {
  auto net = make_module<Deep>(run);
  net->twice = twice;
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_sgd(run, ddp, net->parameters(), 0.05, 0.9);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 4}));
    optimizer->zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(x).squeeze(1), x.prod(1));
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

void reentrant_checkpoint(Run& run) { train_checkpointed(run, false); }
// PyTorch's DistributedDataParallel refuses this: "Expected to mark a variable ready only once".
void reentrant_checkpoint_twice(Run& run) { train_checkpointed(run, true); }

// A mixture of experts. Which branch a sample takes depends on its index and the step: with three ranks each rank uses
// another branch, and in some steps one branch is used by no sample of any rank.

struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    for (int i = 0; i < 3; ++i)
      experts->push_back(
          torch::nn::Sequential(torch::nn::Linear(3, 5 + i), torch::nn::Tanh(), torch::nn::Linear(5 + i, 2)));
    register_module("experts", experts);
  }
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& choice) {
    torch::Tensor result = torch::zeros({x.size(0), 2}, x.options());
    for (std::size_t i = 0; i < 3; ++i) {
      const torch::Tensor chosen = choice.eq(static_cast<std::int64_t>(i)).nonzero().squeeze(1);
      if (chosen.numel() > 0)
        result =
            result.index_add(0, chosen, experts[i]->as<torch::nn::Sequential>()->forward(x.index_select(0, chosen)));
    }
    return result;
  }
  torch::nn::ModuleList experts;
};
TORCH_MODULE(Experts);

void train_branches(Run& run, bool set_to_none) {
  auto net = make_module<Experts>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.02);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 3}));
    torch::Tensor choice = (torch::arange(kGlobalBatch).div(4, "floor") + step).remainder(3);
    if (step % 4 == 3) choice = choice.clamp_max(1);  // nobody uses the last branch
    optimizer->zero_grad(set_to_none);
    const torch::Tensor loss = (net->forward(x, run.part(choice)) - x.slice(1, 0, 2).sin()).pow(2).sum(1).mean();
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

void branches(Run& run) { train_branches(run, true); }
// Gradients of branches that are not used are zeros, so Adam continues with its averages.
void branches_zeroed(Run& run) { train_branches(run, false); }

// Two tasks with a shared trunk, and a backward pass for each of their losses.

struct TasksImpl : torch::nn::Module {
  torch::nn::Linear trunk = register_module("trunk", torch::nn::Linear(4, 8));
  torch::nn::Linear classes = register_module("classes", torch::nn::Linear(8, 3));
  torch::nn::Linear value = register_module("value", torch::nn::Linear(8, 1));
  torch::Tensor log_variances = register_parameter("log_variances", torch::zeros({2}));
};
TORCH_MODULE(Tasks);

void multi_task(Run& run) {
  auto net = make_module<Tasks>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.02);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 4}));
    optimizer->zero_grad();
    const torch::Tensor features = torch::elu(net->trunk(x));
    const torch::Tensor weights = torch::exp(-net->log_variances);
    const torch::Tensor class_loss =
        weights[0] * torch::cross_entropy_loss(net->classes(features), x.slice(1, 0, 3).argmax(1));
    const torch::Tensor value_loss =
        weights[1] * torch::mse_loss(net->value(features).squeeze(1), x.sum(1)) + net->log_variances.sum();
    class_loss.backward({}, /*retain_graph=*/true);
    value_loss.backward();
    optimizer->step();
    run.add_loss(class_loss + value_loss);
  }
  run.add("net", *net);
}

// Three small batches for each update, of which the last one averages.
void accumulation(Run& run) {
  auto net = make_module<Block>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_sgd(run, ddp, net->parameters(), 0.1, 0.9);
  constexpr int kSmallBatches = 3;
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    for (int i = 0; i < kSmallBatches; ++i) {
      const torch::Tensor x = run.part(normal(kSmallBatches * step + i, {kGlobalBatch, 6}));
      const torch::Tensor loss = torch::mse_loss(net->forward(x), x.roll(1, 1)) / kSmallBatches;
      if (i + 1 < kSmallBatches) {
        const auto guard = ddp.no_sync();
        loss.backward();
      } else {
        loss.backward();
      }
      run.add_loss(loss);
    }
    clip_grad_value(*optimizer, 0.2);
    optimizer->step();
  }
  run.add("net", *net);
}

// LBFGS, whose closure is called several times per step, as often as the loss requires. All ranks must see one loss.
void lbfgs(Run& run) {
  auto net = make_module<Block>(run);
  DistributedDataParallel ddp(net, run.world);
  torch::optim::LBFGS optimizer(
      net->parameters(), torch::optim::LBFGSOptions(0.5).max_iter(4).line_search_fn(std::string("strong_wolfe")));
  const torch::Tensor x = run.part(normal(0, {kGlobalBatch, 6}));
  int calls = 0;
  for (int step = 0; step < 4; ++step) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const torch::Tensor loss = torch::mse_loss(net->forward(x), x.roll(2, 1));
      loss.backward();
      ++calls;
      return torch::tensor(run.add_loss(loss), torch::kFloat64);
    });
  }
  run.add("calls", calls);
  run.add("net", *net);
}

// Model-agnostic meta-learning: each sample is a task; the loss is that of weights after one step of its own, and its
// gradient goes through that step.
void meta_learning(Run& run) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  torch::nn::Linear net(3, 2);
  net->to(torch::kFloat64);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.05);
  const auto predict = [](const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias) {
    return torch::tanh(torch::nn::functional::linear(x, weight, bias));
  };
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor tasks = run.part(normal(step, {kGlobalBatch, 2, 4, 3}));
    optimizer->zero_grad();
    torch::Tensor loss = torch::zeros({}, torch::kFloat64);
    for (const torch::Tensor& task : tasks.unbind(0)) {
      const torch::Tensor support = task[0], query = task[1];
      const auto target = [&](const torch::Tensor& x) { return x.slice(1, 0, 2) * support[0][0]; };
      const torch::Tensor inner = torch::mse_loss(predict(support, net->weight, net->bias), target(support));
      const auto gradients = torch::autograd::grad({inner}, {net->weight, net->bias}, {}, /*retain_graph=*/true,
                                                   /*create_graph=*/true);
      loss = loss + torch::mse_loss(predict(query, net->weight - 0.3 * gradients[0], net->bias - 0.3 * gradients[1]),
                                    target(query));
    }
    loss = loss / static_cast<double>(tasks.size(0));
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// The norm of the gradient as a part of the loss, from a backward pass that creates a graph. The gradients are averages
// when the norm is computed.
void gradient_norm(Run& run) {
  auto net = make_module<Block>(run);
  DistributedDataParallel ddp(net, run.world);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 6}));
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(x), x.roll(1, 1));
    loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    torch::Tensor squares = torch::zeros({}, torch::kFloat64);
    for (const torch::Tensor& parameter : net->parameters()) squares = squares + parameter.grad().pow(2).sum();
    (0.2 * squares).backward();
    optimizer.step();
    for (const torch::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();  // they have a graph
    run.add_loss(loss);
    run.add("squares", squares.item<double>());
  }
  run.add("net", *net);
}

}  // namespace
}  // namespace lockstep::tests::programs::autograd

namespace lockstep::tests::programs {

std::vector<Program> autograd_programs() {
  std::vector<Program> programs;
  const auto add = [&](const std::vector<Program>& more) { programs.insert(programs.end(), more.begin(), more.end()); };
  add(with_both_optimizers("reentrant_checkpoint", autograd::reentrant_checkpoint));
  add(with_both_optimizers("reentrant_checkpoint_twice", autograd::reentrant_checkpoint_twice));
  add(with_all_optimizers("branches", autograd::branches));
  add(with_both_optimizers("branches_zeroed", autograd::branches_zeroed));
  add(with_both_optimizers("multi_task", autograd::multi_task));
  add(with_both_optimizers("accumulation", autograd::accumulation));
  programs.push_back({.name = "lbfgs", .train = autograd::lbfgs, .tolerance = 1e-7});
  add(with_both_optimizers("meta_learning", autograd::meta_learning));
  programs.push_back({.name = "gradient_norm",
                      .train = autograd::gradient_norm,
                      .warning = "Using backward() with create_graph=True"});
  return programs;
}

}  // namespace lockstep::tests::programs
