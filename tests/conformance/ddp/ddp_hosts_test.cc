// Tests DistributedDataParallel across hosts: the wire dtype, early buckets, and averaging every few steps. The ranks
// simulate several hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/comm/interface/gradient_hook.h"
#include "lockstep/ddp/ddp.h"
#include "tests/support/rank_main.h"
#include "tests/support/temp_dir.h"

namespace lockstep::ddp::ddp_hosts_test {
namespace {

using tests::world;

constexpr std::int64_t kWidth = 200;  // of a layer whose gradient is large enough to be sent in slices

torch::nn::Sequential make_net() {
  torch::manual_seed(7);
  return torch::nn::Sequential(torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh(), torch::nn::Linear(kWidth, kWidth));
}

at::Tensor batch_of(int rank, int step) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 * step + rank));
  return torch::randn({4, kWidth});
}

void backward_on(torch::nn::Sequential& net, const at::Tensor& batch) { net->forward(batch).pow(2).mean().backward(); }

std::vector<at::Tensor> gradients_of(torch::nn::Sequential& net, const at::Tensor& batch) {
  net->zero_grad();
  backward_on(net, batch);
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : net->parameters()) gradients.push_back(parameter.grad().clone());
  return gradients;
}

std::vector<int> hosts_of_ranks() {
  const at::Tensor all = at::empty({world().size()}, at::kInt);
  world().all_gather(all, at::full({1}, world().node_rank(), at::kInt));
  return {all.const_data_ptr<int>(), all.const_data_ptr<int>() + all.numel()};
}

void expect_equal_on_all(const at::Tensor& tensor, const comm::Group& group, const char* what) {
  const at::Tensor all = at::empty({group.size() * tensor.numel()}, tensor.options());
  group.all_gather(all, tensor.flatten().contiguous());
  for (int r = 0; r < group.size(); ++r)
    EXPECT_TRUE(all.narrow(0, r * tensor.numel(), tensor.numel()).equal(tensor.flatten())) << what << ", rank " << r;
}

TEST(DdpHosts, WireDtypeRoundsGradientsEqually) {
  auto reference = make_net();
  auto net = make_net();
  DistributedDataParallel ddp(net, world(), {.wire_dtype = at::kBFloat16});
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    backward_on(net, batch_of(world().rank(), step));
  }
  std::vector<at::Tensor> means;
  for (int r = 0; r < world().size(); ++r) {
    const auto one = gradients_of(reference, batch_of(r, 2));
    for (std::size_t i = 0; i < one.size(); ++i)
      r == 0 ? means.push_back(one[i]) : static_cast<void>(means[i].add_(one[i]));
  }
  for (std::size_t i = 0; i < means.size(); ++i) {
    const at::Tensor got = net->parameters()[i].grad();
    const at::Tensor mean = means[i] / world().size();
    EXPECT_LT((got - mean).abs().max().item<float>(), 0.02 * mean.abs().max().item<float>());
    EXPECT_TRUE(got.equal(got.to(at::kBFloat16).to(at::kFloat))) << "the gradient was sent as bfloat16";
    expect_equal_on_all(got, world(), "gradient");
  }
}

/// Sums buckets, and starts the second one only after the sum of the first has been written to memory. Polls the memory
/// instead of waiting for the operation, because a thread that waits also executes the operation.
class DelaySecondBucketHook final : public comm::GradientHook {
 public:
  std::string name() const override { return "delay second bucket"; }
  comm::PendingPtr start(comm::Bucket& bucket, comm::HookContext& context) override {
    if (bucket.index == 1)
      for (const auto limit = base::Deadline::in(std::chrono::seconds(20));
           !first_bucket_arrived_ && !limit.expired();) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        // Checks the first and the last element, because different ranks reduce the first and the last slice.
        first_bucket_arrived_ = first_bucket_[0].item<float>() != first_before_[0].item<float>() &&
                                first_bucket_[-1].item<float>() != first_before_[-1].item<float>();
      }
    if (bucket.index == 0) {
      first_bucket_ = bucket.buffer;
      first_before_ = first_bucket_.clone();
    }
    return context.all_reduce(bucket.buffer);
  }
  void finish(comm::Bucket&, comm::HookContext&) override {}
  bool first_bucket_arrived() const { return first_bucket_arrived_; }

 private:
  at::Tensor first_bucket_;
  at::Tensor first_before_;
  bool first_bucket_arrived_ = false;
};

TEST(DdpHosts, BucketCompletesDuringBackward) {
  auto net = make_net();
  const auto hook = std::make_shared<DelaySecondBucketHook>();
  DistributedDataParallel ddp(net, world(), {.bucket_bytes = {kWidth * kWidth * 4}, .hook = hook});
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    backward_on(net, batch_of(world().rank(), step));
  }
  EXPECT_GE(ddp.stats().bucket_bytes.size(), 2U);
  EXPECT_TRUE(hook->first_bucket_arrived());
}

// `calls_step`: the program tells that it has updated the parameters; otherwise the next backward() makes up for it.
void test_averages(bool calls_step) {
  constexpr int kEvery = 3, kSteps = 7;
  constexpr double kRate = 0.5;
  const std::vector<int> hosts = hosts_of_ranks();
  auto net = make_net();
  DistributedDataParallel ddp(net, world(), {.average_hosts_every = kEvery});
  for (int step = 0; step < kSteps; ++step) {
    net->zero_grad();
    backward_on(net, batch_of(world().rank(), step));
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : net->parameters()) parameter.sub_(parameter.grad(), kRate);
    if (calls_step) world().step();
  }
  // Computes the same in one process, with a model for each host.
  std::vector<torch::nn::Sequential> models;
  for (int host = 0; host < world().num_nodes(); ++host) models.push_back(make_net());
  const auto average = [&] {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < models[0]->parameters().size(); ++i) {
      at::Tensor sum = at::zeros_like(models[0]->parameters()[i]);
      for (const int host : hosts) sum += models[static_cast<std::size_t>(host)]->parameters()[i];
      for (auto& model : models) model->parameters()[i].copy_(sum / static_cast<double>(hosts.size()));
    }
  };
  for (int step = 0; step < kSteps; ++step) {
    std::vector<std::vector<at::Tensor>> means(models.size());
    for (std::size_t host = 0; host < models.size(); ++host) {
      int ranks = 0;
      for (int r = 0; r < world().size(); ++r) {
        if (hosts[static_cast<std::size_t>(r)] != static_cast<int>(host)) continue;
        const auto one = gradients_of(models[host], batch_of(r, step));
        for (std::size_t i = 0; i < one.size(); ++i)
          ranks == 0 ? means[host].push_back(one[i]) : static_cast<void>(means[host][i].add_(one[i]));
        ++ranks;
      }
      for (at::Tensor& mean : means[host]) mean.div_(ranks);
    }
    if (!calls_step && step > 0 && step % kEvery == 0) average();
    const at::NoGradGuard no_grad;
    for (std::size_t host = 0; host < models.size(); ++host)
      for (std::size_t i = 0; i < means[host].size(); ++i) models[host]->parameters()[i].sub_(means[host][i], kRate);
    if (calls_step && step % kEvery == kEvery - 1) average();
  }
  const auto expect_as = [&](const char* when) {
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(net->parameters()[i].allclose(models[static_cast<std::size_t>(world().node_rank())]->parameters()[i],
                                                1e-4, 1e-6))
          << when << i;
  };
  expect_as("before ");
  EXPECT_FALSE(models[0]->parameters()[0].allclose(models[1]->parameters()[0], 1e-4, 1e-6))
      << "hosts differ between averages";
  ddp.average_hosts();
  average();
  expect_as("after ");
  for (const at::Tensor& parameter : net->parameters()) expect_equal_on_all(parameter.detach(), world(), "parameter");
}

TEST(DdpHosts, ParametersAreAveragedBetweenHostsEveryNthStep) { test_averages(true); }
TEST(DdpHosts, ParametersAreAveragedInTheNextBackward) { test_averages(false); }

// Also where the program averages more often than is due, so that the hosts exchange nothing else.
TEST(DdpHosts, StopRequestTravelsWithAverageHosts) {
  auto net = make_net();
  DistributedDataParallel ddp(net, world(), {.average_hosts_every = 100});
  EXPECT_FALSE(world().stop_requested());
  if (world().rank() == world().size() - 1) std::raise(SIGUSR1);
  backward_on(net, batch_of(world().rank(), 0));
  ddp.average_hosts();
  EXPECT_TRUE(world().stop_requested());
}

TEST(DdpHosts, IncompatibleOptionsAreRejected) {
  auto net = make_net();
  const auto error_of = [&](DdpOptions options) -> std::string {
    return tests::message_of<base::UsageError>([&] { DistributedDataParallel ddp(net, world(), std::move(options)); });
  };
  EXPECT_THAT(error_of({.wire_dtype = at::kDouble}), ::testing::HasSubstr("DdpOptions.wire_dtype is Double; expected"));
  EXPECT_THAT(error_of({.hook = std::make_shared<DelaySecondBucketHook>(), .wire_dtype = at::kHalf}),
              ::testing::HasSubstr("expected float32 with a hook"));
  EXPECT_THAT(error_of({.average_hosts_every = 0}),
              ::testing::HasSubstr("DdpOptions.average_hosts_every is 0; expected 1 or more"));
  DistributedDataParallel ddp(net, world(), {.average_hosts_every = 2});
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { join(ddp, [] {}); }),
              ::testing::HasSubstr("join: DdpOptions.average_hosts_every is 2; expected 1"));
}

}  // namespace
}  // namespace lockstep::ddp::ddp_hosts_test
