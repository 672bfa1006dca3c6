// Tests steps as CUDA graphs: on a CPU, on a fake GPU (tests/support/gpu), and, in the suite GraphedStepRealGpu, on a
// real GPU.
#include "lockstep/cuda/graphed_step.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/amp/autocast.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/init.h"
#include "lockstep/cuda/op_trace.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/cuda/tensor_values.h"

namespace lockstep::cuda {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using tests::message_of;
using Tensors = GraphedStep::Tensors;

at::Tensor row(at::Device device, std::vector<float> values) { return torch::tensor(values).to(device); }

std::string error_of(GraphedStep& step, const Tensors& inputs, int calls) {
  return message_of<base::UsageError>([&] {
    for (int i = 0; i < calls; ++i) step(inputs);
  });
}

// A weight, its gradient through autograd, and a hand-written SGD update: the operations that the fake GPU supports.
struct LinearModel {
  explicit LinearModel(at::Device device) : weight(row(device, {1, 2, 3}).requires_grad_()) {}

  Tensors step(const Tensors& inputs) {
    ++runs;
    if (weight.grad().defined()) weight.mutable_grad().zero_();
    const at::Tensor y = weight * 2;
    y.backward(inputs[0]);
    const at::NoGradGuard no_grad;
    weight.add_(weight.grad(), -rate);
    return {y.detach() * 1};
  }
  GraphedStep graphed(at::Device device, const GraphedStepOptions& options = {}) {
    return GraphedStep(device, [this](const Tensors& inputs) { return step(inputs); }, options);
  }

  at::Tensor weight;
  double rate = 0.5;
  int runs = 0;
};

TEST(GraphedStep, RunsBodyEagerlyOnCpu) {
  LinearModel plain(at::kCPU), graphed(at::kCPU), off(at::kCPU);
  GraphedStep step = graphed.graphed(at::kCPU), none = off.graphed(at::kCPU, {.enabled = false});
  for (int i = 0; i < 6; ++i) {
    const Tensors inputs = {row(at::kCPU, {1, static_cast<float>(i), 0})};
    const auto expected = values(plain.step(inputs)[0]);
    EXPECT_EQ(values(step(inputs)[0]), expected);
    EXPECT_EQ(values(none(inputs)[0]), expected);
  }
  EXPECT_EQ(values(graphed.weight), values(plain.weight));
  EXPECT_EQ(graphed.runs, 6);
  EXPECT_EQ(step.stats().eager, 6);
  EXPECT_EQ(step.stats().captured + step.stats().replayed, 0);
}

TEST(GraphedStep, RejectsInvalidOptionsAndDevices) {
  const auto make = [](at::Device device, GraphedStepOptions options) {
    GraphedStep(device, [](const Tensors& inputs) { return inputs; }, options);
  };
  EXPECT_EQ(message_of<base::UsageError>([&] { make(at::kCPU, {.warmup = 0}); }),
            "GraphedStepOptions.warmup is 0; expected 1 to 1000");
  EXPECT_EQ(message_of<base::UsageError>([&] { make(at::kCPU, {.max_graphs = 2000}); }),
            "GraphedStepOptions.max_graphs is 2000; expected 1 to 1024");
  EXPECT_EQ(message_of<base::UsageError>([&] { make(at::kMeta, {}); }),
            "GraphedStep: the device is meta; expected cpu or cuda");
}

TEST(OpTrace, RecordsOperationsAndNumbers) {
  const at::Tensor x = torch::ones({2}, torch::kDouble).to(at::kMeta);
  double factor = 0.5;
  const auto list = [&] { return trace_ops([&] { x.mul(factor).sum(0); }); };
  const OpTrace first = list(), again = list();
  EXPECT_EQ(find_difference(first, again), std::nullopt);
  EXPECT_FALSE(first.cpu_tensor);
  factor = 0.25;
  EXPECT_EQ(find_difference(first, list()),
            "call 1, aten::mul(tensor, 0.25), was aten::mul(tensor, 0.5) in the previous run");
  const OpTrace more = trace_ops([&] { x.mul(0.5).sum(0).neg(); });
  EXPECT_EQ(find_difference(first, more), "there were " + std::to_string(more.calls.size()) + " calls, and " +
                                              std::to_string(first.calls.size()) + " in the previous run");
  EXPECT_THAT(trace_ops([] { torch::ones({2}).add(1); }).cpu_tensor.value_or(""), HasSubstr("tensor on cpu"));
}

TEST(OpTrace, RecordsBackwardAndAdamStepCount) {
  torch::nn::Linear net(3, 2);
  torch::optim::Adam optimizer(net->parameters(), 0.1);
  const at::Tensor x = torch::ones({4, 3});
  const auto list = [&] {
    return trace_ops([&] {
      optimizer.zero_grad();
      net->forward(x).sum().backward();
      optimizer.step();
    });
  };
  list();
  const OpTrace second = list(), third = list();
  EXPECT_THAT(second.calls, testing::Contains(HasSubstr("aten::t(")));
  EXPECT_THAT(find_difference(second, third).value_or("equal"), AllOf(HasSubstr("call "), HasSubstr("was aten::")));
}

// Eager attention passes the unused seed of its dropout as a number on the CPU without a value, a captured one on the
// GPU.
TEST(OpTrace, IgnoresSeedsOfAttention) {
  const at::Tensor x = torch::zeros({1, 1, 2, 8}).to(at::kMeta), none = torch::zeros({1}).to(at::kMeta);
  const auto list = [&](std::int64_t seed) {
    return trace_ops([&] {
      try {  // the operation is recorded; libtorch itself has no implementation of it
        at::_scaled_dot_product_fused_attention_overrideable_backward(
            x, x, x, x, {}, {true, true, true, false}, x, none, none, none, 2, 2, 0.0, false,
            at::scalar_tensor(seed, at::kLong), at::scalar_tensor(seed, at::kLong));
      } catch (const c10::Error&) {
      }
    });
  };
  const OpTrace first = list(1);
  EXPECT_THAT(first.calls, testing::Contains(HasSubstr("attention")));
  const auto only = [](OpTrace trace) {
    std::erase_if(trace.calls, [](const std::string& call) { return call.find("attention") == std::string::npos; });
    return trace;
  };
  EXPECT_EQ(find_difference(only(first), only(list(2))), std::nullopt);
}

class GraphedStepFakeGpu : public testing::Test {
 protected:
  const comm::Group world = comm::init({.device = "cuda"});
  const at::Device gpu = world.device();
};

TEST_F(GraphedStepFakeGpu, ReplayMatchesEagerStep) {
  LinearModel plain(gpu), graphed(gpu);
  GraphedStep step = graphed.graphed(gpu);
  for (int i = 0; i < 8; ++i) {
    const Tensors inputs = {row(gpu, {1, static_cast<float>(i), 0.5})};
    const auto expected = values(plain.step(inputs)[0]);
    EXPECT_EQ(values(step(inputs)[0]), expected) << i;
    EXPECT_EQ(values(graphed.weight), values(plain.weight)) << i;
  }
  EXPECT_EQ(graphed.runs, 4);  // three warm-up runs and the capture
  EXPECT_EQ(step.stats().eager, 3);
  EXPECT_EQ(step.stats().captured, 1);
  EXPECT_EQ(step.stats().replayed, 5);
}

TEST_F(GraphedStepFakeGpu, FollowsStreamOrder) {
  LinearModel model(gpu);
  GraphedStep step = model.graphed(gpu, {.warmup = 2});
  const auto other = c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(gpu);
  std::vector<at::Tensor> kept;
  {
    const c10::StreamGuard guard(other);
    at::Tensor input = row(gpu, {1, 1, 1});
    for (int i = 0; i < 6; ++i) {
      for (int k = 0; k < 3; ++k) input = input.clone();  // takes a while; only the stream waits for it
      kept.push_back(step({input})[0].clone());
    }
    for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_EQ(values(kept[i])[2], 6 - 2 * static_cast<float>(i));
  }
}

TEST_F(GraphedStepFakeGpu, CapturesOneGraphPerShapeUpToLimit) {
  GraphedStep step(gpu, [](const Tensors& inputs) -> Tensors { return {inputs[0] * 3}; },
                   {.warmup = 1, .max_graphs = 2});
  testing::internal::CaptureStderr();
  for (int round = 0; round < 4; ++round)
    for (const std::int64_t length : {1, 2, 3})
      EXPECT_EQ(values(step({row(gpu, std::vector<float>(static_cast<std::size_t>(length), 2))})[0]),
                std::vector<float>(static_cast<std::size_t>(length), 6));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(step.stats().captured, 2);
  EXPECT_EQ(step.stats().replayed, 6);
  EXPECT_EQ(step.stats().eager, 2 + 4);
  EXPECT_THAT(said, HasSubstr("the inputs have more than 2 different shapes (max_graphs); steps with further shapes, "
                              "such as Float[3][1], run without a graph"));
  EXPECT_EQ(said.find("max_graphs"), said.rfind("max_graphs"));
  // Inputs of another dtype need another graph.
  GraphedStep one(gpu, [](const Tensors& inputs) { return inputs; }, {.max_graphs = 1});
  one({torch::ones({2}).to(gpu)});
  one({torch::ones({2}, torch::kLong).to(gpu)});
  EXPECT_EQ(one.stats().eager, 2);
}

TEST_F(GraphedStepFakeGpu, RejectsChangingNumber) {
  LinearModel model(gpu);
  GraphedStep step(gpu, [&](const Tensors& inputs) {
    model.rate *= 0.5;
    return model.step(inputs);
  });
  const Tensors inputs = {row(gpu, {1, 1, 1})};
  EXPECT_THAT(
      error_of(step, inputs, 4),
      AllOf(HasSubstr("GraphedStep: the step cannot be captured as a graph: call "),
            HasSubstr(
                "aten::add_(tensor, tensor, -0.03125), was aten::add_(tensor, tensor, -0.0625) in the previous run")));
  EXPECT_EQ(step.stats().captured, 0);
  EXPECT_EQ(step.stats().eager, 3);
  EXPECT_THAT(error_of(step, inputs, 1), HasSubstr("cannot be captured as a graph"));  // later calls fail as well
  // A failed capture does not affect other steps.
  GraphedStep good = model.graphed(gpu);
  for (int i = 0; i < 5; ++i) good(inputs);
  EXPECT_EQ(good.stats().replayed, 2);
}

TEST_F(GraphedStepFakeGpu, RejectsHostReads) {
  GraphedStep step(gpu, [](const Tensors& inputs) -> Tensors { return {inputs[0] * inputs[0][0].item<float>()}; });
  EXPECT_THAT(error_of(step, {row(gpu, {1, 2})}, 4),
              AllOf(HasSubstr("cannot be captured as a graph: "), HasSubstr("capturing")));
  EXPECT_EQ(step.stats().eager, 3);
  GraphedStep good(gpu, [](const Tensors& inputs) -> Tensors { return {inputs[0] * 2}; });
  for (int i = 0; i < 5; ++i) EXPECT_EQ(values(good({row(gpu, {1, 2})})[0])[1], 4);
}

TEST_F(GraphedStepFakeGpu, RejectsCpuTensors) {
  GraphedStep step(gpu, [this](const Tensors& inputs) -> Tensors { return {inputs[0] + torch::ones({2}).to(gpu)}; });
  EXPECT_THAT(error_of(step, {row(gpu, {1, 2})}, 4), AllOf(HasSubstr("has a tensor on the CPU"), HasSubstr("aten::")));
  EXPECT_THAT(error_of(step, {torch::ones({2})}, 1),
              HasSubstr("GraphedStep: input 0 is on cpu; expected a dense tensor on cuda:0 (LoaderOptions.device moves "
                        "batches there)"));
  EXPECT_THAT(error_of(step, {at::Tensor()}, 1), HasSubstr("input 0 is undefined"));
}

TEST_F(GraphedStepFakeGpu, RejectsSurroundingAutocast) {
  GraphedStep step(gpu, [](const Tensors& inputs) -> Tensors { return {inputs[0] * 2}; });
  const amp::Autocast autocast({.device = at::kCUDA});
  EXPECT_THAT(error_of(step, {row(gpu, {1})}, 1), HasSubstr("expected an Autocast inside the body"));
}

TEST_F(GraphedStepFakeGpu, RejectsCollectivesInBody) {
  comm::Group group = world;
  GraphedStep step(gpu, [&](const Tensors& inputs) -> Tensors {
    group.all_reduce(inputs[0]);
    return inputs;
  });
  const at::Tensor input = row(gpu, {1});
  EXPECT_THAT(error_of(step, {input}, 1),
              AllOf(HasSubstr("all_reduce called inside a step that is captured as a CUDA graph"),
                    HasSubstr("Call all_reduce before or after it")));
  group.all_reduce(input);  // the group still works
}

TEST_F(GraphedStepFakeGpu, PropagatesExceptionOfBody) {
  int run = 0;
  GraphedStep step(gpu, [&](const Tensors& inputs) -> Tensors {
    if (++run == 4) throw std::runtime_error("of the body");
    return {inputs[0] * 2};
  });
  const Tensors inputs = {row(gpu, {1, 2})};
  for (int i = 0; i < 3; ++i) step(inputs);
  EXPECT_THROW(step(inputs), std::runtime_error);
  EXPECT_EQ(values(step(inputs)[0])[1], 4);  // the next call captures
  EXPECT_EQ(step.stats().captured, 1);
}

// Skipped without a GPU.
TEST(GraphedStepRealGpu, MatchesEagerTraining) {
  const comm::Group world = comm::init();
  if (!world.device().is_cuda()) GTEST_SKIP() << "no GPU: capture and replay on a real GPU are not tested";
  const auto train = [&](bool enabled) {
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(64, 128), torch::nn::ReLU(), torch::nn::Dropout(0.0),
                              torch::nn::Linear(128, 10));
    net->to(world.device());
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    GraphedStep step(world.device(),
                     [&](const Tensors& batch) -> Tensors {
                       optimizer.zero_grad();
                       at::Tensor loss;
                       {
                         const amp::Autocast autocast({.device = at::kCUDA, .dtype = torch::kBFloat16});
                         loss = torch::nn::functional::cross_entropy(net->forward(batch[0]), batch[1]);
                       }
                       loss.backward();
                       optimizer.step();
                       return {loss.detach()};
                     },
                     {.enabled = enabled});
    std::vector<double> losses;
    for (int i = 0; i < 20; ++i) {
      torch::manual_seed(100 + i);
      const at::Tensor x = torch::randn({i % 5 == 4 ? 16 : 32, 64}).to(world.device());
      losses.push_back(step({x, torch::randint(10, {x.size(0)}, torch::kLong).to(world.device())})[0].item<double>());
    }
    EXPECT_EQ(step.stats().captured, enabled ? 2 : 0);
    return losses;
  };
  const auto expected = train(false), found = train(true);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-4) << i;
}

TEST(GraphedStepRealGpu, CapturesAttention) {
  const comm::Group world = comm::init();
  if (!world.device().is_cuda()) GTEST_SKIP() << "no GPU: attention in a graph is not tested";
  for (const bool half : {false, true}) {
    const auto train = [&](bool enabled) {
      torch::manual_seed(1);
      torch::nn::Linear net(64, 64);
      net->to(world.device());
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      const auto body = [&](const Tensors& batch) -> Tensors {
        optimizer.zero_grad();
        at::Tensor loss;
        {
          const amp::Autocast autocast({.device = at::kCUDA, .dtype = torch::kBFloat16, .enabled = half});
          const at::Tensor x = net->forward(batch[0]).view({4, 16, 4, 16}).transpose(1, 2);
          loss = at::scaled_dot_product_attention(x, x, x, {}, 0.0, /*is_causal=*/true).to(at::kFloat).square().mean();
        }
        loss.backward();
        optimizer.step();
        return {loss.detach()};
      };
      GraphedStep step(world.device(), body, {.enabled = enabled});
      const at::Tensor x = torch::ones({4, 16, 64}).to(world.device());
      std::vector<double> losses;
      for (int i = 0; i < 8; ++i) losses.push_back(step({x * (1 + i)})[0].item<double>());
      EXPECT_EQ(step.stats().captured, enabled ? 1 : 0);
      return losses;
    };
    const auto expected = train(false), found = train(true);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(found[i], expected[i], 1e-3 * expected[i]) << i << (half ? " in bfloat16" : "");
  }
}

}  // namespace
}  // namespace lockstep::cuda
