// Tests lockstep::optim's optimizers in steps that are CUDA graphs: on a fake GPU (tests/support/gpu), which has Adam's
// kernels only, and, in the suite GraphedOptimizerRealGpu, on a real GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/init.h"
#include "lockstep/cuda/graphed_step.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/optim/adagrad.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/lamb.h"
#include "lockstep/optim/lars.h"
#include "lockstep/optim/sgd.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/cuda/tensor_values.h"

namespace lockstep::cuda {
namespace {

using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;
using tests::message_of;
using Tensors = GraphedStep::Tensors;

void set_lr(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

/// A weight whose gradient is twice the input: what the fake GPU can compute.
struct Weight : torch::nn::Module {
  explicit Weight(at::Device device)
      : weight(register_parameter("weight", torch::tensor({1.F, 2.F, 3.F}).to(device))) {}
  at::Tensor weight;
};

struct FakeTraining {
  explicit FakeTraining(const comm::Group& world, bool graph)
      : net(world.device()),
        ddp(net, world),
        optimizer(std::make_unique<optim::AdamW>(ddp, optim::AdamWOptions{.lr = 0.1, .weight_decay = 0.1})),
        step(world.device(),
             [this](const Tensors& inputs) -> Tensors {
               if (net.weight.grad().defined()) net.weight.mutable_grad().zero_();
               (net.weight * 2).backward(inputs[0]);
               optimizer->step();
               return {};
             },
             {.enabled = graph}) {}
  void run(int i) { step({torch::tensor({1.F, static_cast<float>(i), -0.5F}).to(net.weight.device())}); }

  Weight net;
  ddp::DistributedDataParallel ddp;
  std::unique_ptr<optim::AdamW> optimizer;
  GraphedStep step;
};

class GraphedOptimizerFakeGpu : public testing::Test {
 protected:
  const comm::Group world = comm::init({.device = "cuda"});
};

TEST_F(GraphedOptimizerFakeGpu, CountsStepsAndFollowsLearningRate) {
  FakeTraining eager(world, false), graphed(world, true);
  for (int i = 0; i < 9; ++i) {
    for (FakeTraining* one : {&eager, &graphed}) {
      set_lr(*one->optimizer, i < 2 ? 0.1 : 0.1 / i);
      one->run(i);
    }
    EXPECT_THAT(values(graphed.net.weight), Pointwise(FloatNear(1e-6F), values(eager.net.weight))) << i;
  }
  EXPECT_EQ(graphed.step.stats().replayed, 6);
  const auto expected = eager.optimizer->state_dict(), found = graphed.optimizer->state_dict();
  EXPECT_EQ(checkpoint::value_of<at::Tensor>(found, "weight.step").item<std::int64_t>(), 9);
  for (const char* name : {"weight.exp_avg", "weight.exp_avg_sq"})
    EXPECT_THAT(values(checkpoint::value_of<at::Tensor>(found, name)),
                Pointwise(FloatNear(1e-6F), values(checkpoint::value_of<at::Tensor>(expected, name))));
}

TEST_F(GraphedOptimizerFakeGpu, LoadedStepCountIsUsedByReplays) {
  FakeTraining eager(world, false), graphed(world, true);
  for (int i = 0; i < 6; ++i)
    for (FakeTraining* one : {&eager, &graphed}) one->run(i);
  checkpoint::StateDict saved;
  for (const auto& [name, value] : eager.optimizer->state_dict())
    saved[name] = checkpoint::value_of<at::Tensor>(eager.optimizer->state_dict(), name).cpu().clone();
  saved["weight.step"] = at::scalar_tensor(2, at::kLong);
  for (FakeTraining* one : {&eager, &graphed}) {
    one->optimizer->load_state_dict(saved);
    for (int i = 0; i < 3; ++i) one->run(i);
  }
  EXPECT_THAT(values(graphed.net.weight), Pointwise(FloatNear(1e-6F), values(eager.net.weight)));
  EXPECT_EQ(checkpoint::value_of<at::Tensor>(graphed.optimizer->state_dict(), "weight.step").item<std::int64_t>(), 5);
}

TEST_F(GraphedOptimizerFakeGpu, OtherChangesAreRejected) {
  FakeTraining training(world, true);
  for (int i = 0; i < 5; ++i) training.run(i);
  auto& options = static_cast<torch::optim::AdamWOptions&>(training.optimizer->param_groups()[0].options());
  options.betas({0.8, 0.999});
  EXPECT_THAT(message_of<base::UsageError>([&] { training.run(5); }),
              HasSubstr("an option has been changed since the step was captured as a CUDA graph"));
  options.betas({0.9, 0.999});
  training.run(5);
  training.optimizer.reset();
  EXPECT_THAT(message_of<base::UsageError>([&] { training.run(6); }),
              HasSubstr("the optimizer of the captured step has been destroyed"));
}

// Skipped without a GPU.
class GraphedOptimizerRealGpu : public testing::TestWithParam<const char*> {};

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(ddp::DistributedDataParallel&)>;

MakeOptimizer maker_of(const std::string& name) {
  if (name == "SGD")
    return [](auto& ddp) { return std::make_unique<optim::SGD>(ddp, optim::SGDOptions{.lr = 0.1, .momentum = 0.9}); };
  if (name == "Adam")
    return [](auto& ddp) { return std::make_unique<optim::Adam>(ddp, optim::AdamOptions{.lr = 0.01}); };
  if (name == "AdamW")
    return [](auto& ddp) { return std::make_unique<optim::AdamW>(ddp, optim::AdamWOptions{.lr = 0.01}); };
  if (name == "Adagrad")
    return [](auto& ddp) { return std::make_unique<optim::Adagrad>(ddp, optim::AdagradOptions{.lr = 0.05}); };
  if (name == "LAMB")
    return [](auto& ddp) { return std::make_unique<optim::LAMB>(ddp, optim::LAMBOptions{.lr = 0.01}); };
  return [](auto& ddp) { return std::make_unique<optim::LARS>(ddp, optim::LARSOptions{.lr = 0.1}); };
}

std::vector<double> losses_on_gpu(const comm::Group& world, const MakeOptimizer& make, bool graph, bool half) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(64, 128), torch::nn::ReLU(), torch::nn::Linear(128, 10));
  net->to(world.device());
  ddp::DistributedDataParallel ddp(*net, world);
  const auto optimizer = make(ddp);
  amp::GradScaler scaler({.init_scale = 1024, .growth_interval = 4, .enabled = half});
  GraphedStep step(world.device(),
                   [&](const Tensors& batch) -> Tensors {
                     optimizer->zero_grad();
                     at::Tensor loss;
                     {
                       const amp::Autocast autocast({.device = at::kCUDA, .dtype = torch::kHalf, .enabled = half});
                       loss = torch::nn::functional::cross_entropy(net->forward(batch[0]), batch[1]);
                     }
                     scaler.scale(loss).backward();
                     scaler.step(*optimizer);
                     scaler.update();
                     return {loss.detach()};
                   },
                   {.enabled = graph});
  std::vector<double> losses;
  for (int i = 0; i < 20; ++i) {
    torch::manual_seed(100 + i);
    set_lr(*optimizer, 0.02 / (1 + i));
    const at::Tensor x = torch::randn({32, 64}).to(world.device());
    losses.push_back(step({x, torch::randint(10, {32}, torch::kLong).to(world.device())})[0].item<double>());
  }
  EXPECT_EQ(step.stats().captured, graph ? 1 : 0);
  return losses;
}

TEST_P(GraphedOptimizerRealGpu, MatchesEagerTraining) {
  const comm::Group world = comm::init();
  if (!world.device().is_cuda()) GTEST_SKIP() << "no GPU: optimizers in graphs on a real GPU are not tested";
  for (const bool half : {false, true}) {
    const auto expected = losses_on_gpu(world, maker_of(GetParam()), false, half),
               found = losses_on_gpu(world, maker_of(GetParam()), true, half);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(found[i], expected[i], 2e-3) << i << (half ? " in half precision" : "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, GraphedOptimizerRealGpu,
                         testing::Values("SGD", "Adam", "AdamW", "Adagrad", "LAMB", "LARS"),
                         [](const auto& variant) { return std::string(variant.param); });

}  // namespace
}  // namespace lockstep::cuda
