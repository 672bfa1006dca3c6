// Tests DistributedDataParallel of models on fake GPUs (tests/support/gpu). The fake GPUs have few kernels, so
// backward() begins at the parameters, with gradients that were computed on the CPU.
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <chrono>

#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/replicas.h"
#include "tests/support/rank_main.h"
#include "tests/support/temp_dir.h"

namespace lockstep::ddp_gpu_test {
namespace {

using ddp::DistributedDataParallel;
using ::testing::AllOf;
using ::testing::HasSubstr;
using tests::world;

constexpr int kParameters = 4;

struct Model : torch::nn::Module {
  explicit Model(at::Device last = world().device()) {
    for (int i = 0; i < kParameters; ++i) {
      const at::Tensor start = at::full({50 + 10 * i}, world().rank() + i, at::kFloat);
      all.push_back(
          register_parameter("p" + std::to_string(i), start.to(i + 1 < kParameters ? world().device() : last)));
    }
    seen = register_buffer("seen", at::full({3}, world().rank(), at::kFloat).to(world().device()));
    count = register_buffer("count", at::full({}, world().rank(), at::kLong).to(world().device()));
  }
  std::vector<at::Tensor> all;
  at::Tensor seen, count;
};

/// Returns the gradient of parameter `i` on rank `rank` in step `step`.
at::Tensor gradient_of(int rank, int step, int i) { return at::arange(50 + 10 * i, at::kFloat) * (rank + 1) + step; }

at::Tensor mean_of(int step, int i) {
  at::Tensor sum = at::zeros({50 + 10 * i});
  for (int rank = 0; rank < world().size(); ++rank) sum += gradient_of(rank, step, i);
  return sum / world().size();
}

/// Runs a backward in which parameter `without` (-1: none) has no gradient.
void backward(Model& model, int step, int without = -1) {
  std::vector<at::Tensor> roots, gradients;
  for (int i = 0; i < kParameters; ++i) {
    if (i == without) continue;
    roots.push_back(model.all[static_cast<std::size_t>(i)]);
    gradients.push_back(gradient_of(world().rank(), step, i).to(roots.back().device()));
  }
  torch::autograd::backward(roots, gradients);
}

void expect_near(const at::Tensor& found, const at::Tensor& expected) {
  EXPECT_TRUE(at::allclose(found.cpu(), expected, 1e-5, 1e-5)) << found.cpu() << expected;
}

TEST(DdpGpu, TrainsAsOneRankWould) {
  Model model;
  const DistributedDataParallel ddp(model, world(), {.bucket_bytes = {100, 300}});
  torch::optim::SGD optimizer(model.parameters(), 0.5);
  std::vector<at::Tensor> expected;
  for (int i = 0; i < kParameters; ++i) expected.push_back(at::full({50 + 10 * i}, i, at::kFloat));  // of rank 0
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    backward(model, step);
    for (std::size_t i = 0; i < kParameters; ++i) {
      EXPECT_EQ(model.all[i].grad().device(), world().device());
      expect_near(model.all[i].grad(), mean_of(step, static_cast<int>(i)));
      expected[i] -= 0.5 * mean_of(step, static_cast<int>(i));
    }
    optimizer.step();
    world().step();
  }
  for (std::size_t i = 0; i < kParameters; ++i) expect_near(model.all[i], expected[i]);
  expect_near(model.seen, at::zeros({3}));
  EXPECT_EQ(model.count.cpu().item<std::int64_t>(), 0);
  if (world().size() == 1) return;
  EXPECT_FALSE(ddp.stats().in_place);
  EXPECT_GT(ddp.stats().bucket_bytes.size(), 1U);
  EXPECT_GT(ddp.stats().started_early, 0);  // during backward, on the thread of autograd for this GPU
}

TEST(DdpGpu, AccumulatesUnderNoSync) {
  Model model;
  DistributedDataParallel ddp(model, world());
  for (int round = 0; round < 2; ++round) {
    model.zero_grad();
    {
      const auto no_sync_guard = ddp.no_sync();
      backward(model, 1);
    }
    backward(model, 2);
    for (int i = 0; i < kParameters; ++i)
      expect_near(model.all[static_cast<std::size_t>(i)].grad(), mean_of(1, i) + mean_of(2, i));
    world().step();
  }
}

TEST(DdpGpu, UnusedParameterCountsAsZero) {
  Model model;
  DistributedDataParallel ddp(model, world(), {.bucket_bytes = {100, 100}});
  for (int step = 0; step < 7; ++step) {
    model.zero_grad();
    // Up to step 4 no rank uses the third parameter; then only rank 0 does.
    backward(model, step, step < 5 || world().rank() > 0 ? 2 : -1);
    expect_near(model.all[1].grad(), mean_of(step, 1));
    if (step < 5)
      EXPECT_FALSE(model.all[2].grad().defined());
    else
      expect_near(model.all[2].grad(), gradient_of(0, step, 2) / world().size());
    world().step();
  }
}

TEST(DdpGpu, SomeParametersOnCpu) {
  Model model(at::kCPU);
  DistributedDataParallel ddp(model, world(), {.gradient_predivide_factor = 2});
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    backward(model, step);
    for (int i = 0; i < kParameters; ++i) expect_near(model.all[static_cast<std::size_t>(i)].grad(), mean_of(step, i));
    EXPECT_TRUE(model.all[kParameters - 1].grad().is_cpu());
    world().step();
  }
}

TEST(DdpGpu, BucketsOfMeasuredSize) {
  Model model;
  DistributedDataParallel ddp(model, world(), {.bucket_bytes = {}});
  backward(model, 0);
  expect_near(model.all[0].grad(), mean_of(0, 0));
}

TEST(DdpGpu, GradientsOfOneBucketOnSeveralStreams) {
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  Model model;
  for (std::size_t i = 0; i < kParameters; ++i) model.all[i].set_requires_grad(i % 2 == 0);
  DistributedDataParallel ddp(model, world());
  for (int step = 0; step < 4; ++step) {
    // Autograd accumulates on the stream on which it first used the parameter.
    const c10::StreamGuard other(guard.getStreamFromGlobalPool(world().device()));
    for (at::Tensor& parameter : model.all) parameter.set_requires_grad(true);
    model.zero_grad();
    backward(model, step);
    for (int i = 0; i < kParameters; ++i) expect_near(model.all[static_cast<std::size_t>(i)].grad(), mean_of(step, i));
    world().step();
  }
}

TEST(DdpGpu, HashesMatchCpu) {
  const at::Tensor numbers = at::arange(30'000'000, at::kFloat);  // more than one chunk
  EXPECT_EQ(ddp::hash_tensors({{"here", numbers}}), ddp::hash_tensors({{"there", numbers.to(world().device())}}));
}

TEST(DdpGpuFailures, ChangedParameterIsReported) {
  if (world().size() == 1) GTEST_SKIP();
  Model model;
  DistributedDataParallel ddp(model, world());
  torch::optim::SGD optimizer(model.parameters(), 0.5);
  const auto error = tests::thrown<base::CommError>([&] {
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      backward(model, step);
      optimizer.step();
      const torch::NoGradGuard no_grad;
      if (world().rank() == 1) model.all[2].add_(model.all[2], 1e-3);
    }
  });
  EXPECT_EQ(error.cause(), base::Cause::kReplicaDiverged);
  EXPECT_THAT(error.what(), HasSubstr("parameter p2 differs between ranks"));
}

TEST(DdpGpuFailures, RankInBarrierIsDetectedAtOnce) {
  if (world().size() == 1) GTEST_SKIP();
  Model model;
  DistributedDataParallel ddp(model, world());
  for (int step = 0; step < 2; ++step) {
    model.zero_grad();
    backward(model, step);
  }
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_THAT(tests::message_of<base::DesyncError>([&] {
                model.zero_grad();
                world().rank() == 1 ? world().barrier() : backward(model, 2);
              }),
              AllOf(HasSubstr("rank 0 called backward()"), HasSubstr("rank 1 called barrier()")));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(20));
}

}  // namespace
}  // namespace lockstep::ddp_gpu_test
