// Tests fused optimizers that update parameters in backward(): equal results, and errors for unsupported combinations.
#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/sgd.h"
#include "tests/conformance/optim/optim_reference.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::optim_backward_test {
namespace {

using ddp::DistributedDataParallel;

/// An identity whose backward() waits until `changed` returns true, for at most 10 s. `seen` counts how often it did.
struct WaitInBackward final : torch::autograd::Function<WaitInBackward> {
  static inline std::function<bool()> changed;
  static inline int seen = 0;
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!changed() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    seen += changed();
    return gradients;
  }
};

/// A network with parameters of more chunks than there are ranks, small parameters, a transposed one, and unused ones.
struct DeepImpl : torch::nn::Module {
  DeepImpl() {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(40, 1100));
    second = register_module("second", torch::nn::Linear(1100, 1000));
    unused = register_module("unused", torch::nn::Linear(3, 3));
    third = register_parameter("third", torch::randn({1000, 7}).t());
  }
  at::Tensor hidden(int rank, int step) { return torch::relu(first->forward(batch_of(rank, step, {4, 40}))); }
  at::Tensor loss(const at::Tensor& h) {
    return torch::mm(torch::relu(second->forward(h)), third.t()).pow(2).mean() * 1e-3;
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, unused{nullptr};
  at::Tensor third;
};
TORCH_MODULE(Deep);

using Loss = std::function<at::Tensor(DeepImpl& net, int step)>;

at::Tensor whole_loss(DeepImpl& net, int step) { return net.loss(net.hidden(world().rank(), step)); }
/// Returns a loss with which every second rank has no gradient of the first layer; the ranks alternate between steps.
at::Tensor branching_loss(DeepImpl& net, int step) {
  const at::Tensor h = net.hidden(world().rank(), step);
  return net.loss((world().rank() + step) % 2 == 1 ? h.detach() : h);
}

template <typename Optimizer, typename Options>
void expect_equals_step(const Options& options, const Loss& loss, const ddp::DdpOptions& ddp_options = {}) {
  const auto train = [&](bool in_backward) {
    Deep net;
    DistributedDataParallel ddp(net, world(), ddp_options);
    Optimizer optimizer(ddp, options);
    optimizer.update_in_backward(in_backward);
    for (int step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      loss(*net, step).backward();
      optimizer.step();
      optimizer.param_groups()[0].options().set_lr(options.lr / (step + 2));
    }
    std::vector<at::Tensor> all;
    for (const at::Tensor& parameter : net->parameters()) all.push_back(parameter.detach().clone());
    return all;
  };
  const auto got = train(true);
  const auto expected = train(false);
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(torch::equal(got[i], expected[i])) << i;
    EXPECT_TRUE(same_bits(got[i])) << i;
  }
  EXPECT_FALSE(torch::equal(got[0], Deep()->first->weight));
}

TEST(OptimBackward, EqualsStepBitwise) {
  expect_equals_step<optim::SGD>(optim::SGDOptions{.lr = 0.05, .momentum = 0.9}, whole_loss);
  expect_equals_step<optim::AdamW>(optim::AdamWOptions{.lr = 0.01}, whole_loss);
}
TEST(OptimBackward, EqualsStepBitwiseWithDifferentBranches) {
  expect_equals_step<optim::AdamW>(optim::AdamWOptions{.lr = 0.01}, branching_loss);
}
TEST(OptimBackward, EqualsStepBitwiseWithoutOverlap) {
  expect_equals_step<optim::SGD>(optim::SGDOptions{.lr = 0.05}, whole_loss, {.overlap = false});
}

TEST(OptimBackward, ParametersChangeDuringBackward) {
  if (!on_shm()) return;
  Deep net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.5});
  optimizer.update_in_backward();
  at::Tensor before;
  WaitInBackward::seen = 0;
  WaitInBackward::changed = [&] { return !torch::equal(net->second->weight.detach(), before); };
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    before = net->second->weight.detach().clone();
    world().barrier();
    const at::Tensor h = net->hidden(world().rank(), step);
    // In the first step no update starts early.
    net->loss(step == 0 ? h : WaitInBackward::apply(h)).backward();
    optimizer.step();
  }
  EXPECT_EQ(WaitInBackward::seen, 3);
}

/// Runs `call`, which must throw a UsageError that contains `text` and change nothing.
template <typename Call>
void expect_usage_error(const std::string& text, const Call& call) {
  EXPECT_THAT(tests::message_of<base::UsageError>(call), ::testing::HasSubstr(text));
}

TEST(OptimBackward, UnsupportedCombinationsAreRejected) {
  Deep net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.1});
  const auto run = [&](int step) { whole_loss(*net, step).backward(); };
  {
    const auto no_sync_guard = ddp.no_sync();
    expect_usage_error("update_in_backward(): called under no_sync()", [&] { optimizer.update_in_backward(); });
  }
  run(0);
  optimizer.update_in_backward();
  expect_usage_error("gradients of an earlier backward() exist", [&] { run(1); });
  optimizer.zero_grad();
  expect_usage_error("no_sync()", [&] { const auto no_sync_guard = ddp.no_sync(); });
  expect_usage_error("clip_grad_norm()", [&] { optim::clip_grad_norm(optimizer, 1); });
  expect_usage_error("clip_grad_value()", [&] { optim::clip_grad_value(optimizer, 1); });
  expect_usage_error("average_gradients()", [&] { optimizer.average_gradients(); });
  run(1);
  const at::Tensor after = net->second->weight.detach().clone();
  optimizer.zero_grad();
  expect_usage_error("step() has not been called since", [&] { run(2); });
  optimizer.zero_grad();
  optimizer.step();
  EXPECT_TRUE(torch::equal(net->second->weight, after));  // backward() has updated it
  world().barrier();
  run(3);
  torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-3);
  expect_usage_error("was changed between backward() and step()", [&] { optimizer.step(); });
  optimizer.zero_grad();
  optimizer.update_in_backward(false);
  run(4);
  EXPECT_GT(optim::clip_grad_norm(optimizer, 1).item<double>(), 0);
  optimizer.step();
  EXPECT_TRUE(same_bits(net->second->weight.detach()));
}

TEST(OptimBackward, ParametersSharingAStorageAreRejected) {
  WideImpl net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.1});
  expect_usage_error("parameters left and right are in one storage", [&] { optimizer.update_in_backward(); });
}

TEST(OptimBackward, GradientCheckpointingIsRejected) {
  struct NetImpl : torch::nn::Module {
    NetImpl() { layer = register_module("layer", torch::nn::Linear(5, 5)); }
    torch::nn::Linear layer{nullptr};
  } net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.1});
  optimizer.update_in_backward();
  const at::Tensor x = batch_of(world().rank(), 0, {2, 5}).requires_grad_();
  expect_usage_error("backward() inside backward()", [&] {
    CheckpointedLinear::apply(x, reinterpret_cast<std::int64_t>(net.layer.get())).sum().backward();
  });
}

TEST(OptimBackward, JoinedRanksShadowOthers) {
  if (world().transport() == "hierarchy") return;  // join() is not supported there
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::AdamW optimizer(ddp, {.lr = 0.01});
  optimizer.update_in_backward();
  ddp::join(ddp, [&] {
    for (int step = 0; step < 3 + world().rank(); ++step) {
      optimizer.zero_grad();
      backward(*net, world().rank(), step);
      optimizer.step();
    }
  });
  for (const auto& item : net->named_parameters()) EXPECT_TRUE(same_bits(item.value().detach())) << item.key();
  for (const auto& [name, state] : optimizer.state_dict())
    EXPECT_TRUE(!on_shm() || !name.ends_with(".step") ||
                std::get<at::Tensor>(state).item<std::int64_t>() == 2 + world().size())
        << name;
}

}  // namespace
}  // namespace lockstep::tests::optim_backward_test
