// Tests DataParallel with replicas on several "devices" that are all the CPU, and on the device meta, which has no
// memory.
#include "lockstep/nn/data_parallel.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <set>
#include <thread>

namespace lockstep::nn {
namespace {

const std::vector<at::Device> kTwo = {at::kCPU, at::kCPU}, kFour = {at::kCPU, at::kCPU, at::kCPU, at::kCPU};

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { NetImpl::reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(4, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    unused = register_module("unused", torch::nn::Linear(2, 2));
    second = register_module("second", torch::nn::Linear(8, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = torch::tanh(first(x));
    return second(norm(h) + norm->weight);
  }
  at::Tensor loss(const at::Tensor& x) { return forward(x).pow(2).mean(); }
  torch::nn::Linear first{nullptr}, second{nullptr}, unused{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

std::vector<at::Tensor> detach_gradients(torch::nn::Module& net) {
  std::vector<at::Tensor> all;
  for (at::Tensor& p : net.parameters()) {
    all.push_back(p.grad());
    p.mutable_grad() = at::Tensor();
  }
  return all;
}

void expect_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    if (!a[i].defined()) continue;
    EXPECT_TRUE(torch::allclose(a[i], b[i], 1e-5, 1e-6)) << i;
  }
}

TEST(DataParallel, MatchesModuleOnWholeBatch) {
  Net net;
  net->eval();  // so that batch normalisation does not depend on the split
  for (const auto& devices : {std::vector<at::Device>{at::kCPU}, kTwo, kFour}) {
    DataParallel parallel(net, {.devices = devices});
    for (const std::int64_t samples : {8, 7, 3, 1, 0}) {
      const at::Tensor x = torch::randn({samples, 4}), y = torch::randn({samples, 3});
      at::Tensor mine = x.clone().requires_grad_(), alone = x.clone().requires_grad_();
      const at::Tensor output = parallel(mine);
      output.backward(y);
      const auto gradients = detach_gradients(*net);
      const at::Tensor expected = net->forward(alone);
      expected.backward(y);
      ASSERT_EQ(output.sizes(), expected.sizes());
      EXPECT_TRUE(torch::allclose(output, expected, 1e-5, 1e-6));
      EXPECT_TRUE(torch::allclose(mine.grad(), alone.grad(), 1e-5, 1e-6));
      expect_same(gradients, detach_gradients(*net));
    }
  }
}

TEST(DataParallel, SplitsEvenlyAndKeepsOrder) {
  Net net;
  std::mutex mutex;
  std::multiset<std::int64_t> parts;
  std::set<std::thread::id> threads;
  DataParallel parallel(net,
                        [&](NetImpl&, const at::Tensor& x) {
                          const std::lock_guard lock(mutex);
                          parts.insert(x.size(1));
                          threads.insert(std::this_thread::get_id());
                          return x * 2;
                        },
                        {.devices = kFour, .dim = 1});
  const at::Tensor x = torch::arange(30).view({3, 10});
  EXPECT_TRUE(torch::equal(parallel.forward(x), x * 2));
  EXPECT_EQ(parts, (std::multiset<std::int64_t>{2, 2, 3, 3}));
  EXPECT_EQ(threads.size(), 4u);
  EXPECT_TRUE(torch::equal(parallel.forward(x), x * 2));
  EXPECT_EQ(threads.size(), 4u) << "threads are kept";
}

TEST(DataParallel, TrainsWithUpdatedParameters) {
  Net net;
  DataParallel parallel(net, {.devices = kTwo});
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  const at::Tensor x = torch::randn({16, 4});
  double first = 0, last = 0;
  for (int step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = (parallel(x) - 1).pow(2).mean();
    loss.backward();
    optimizer.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  EXPECT_LT(last, first / 2);
  net->eval();
  EXPECT_TRUE(torch::allclose(parallel(x), net->forward(x), 1e-5, 1e-6));
  net->to(at::kDouble);
  EXPECT_TRUE(torch::allclose(parallel(x.to(at::kDouble)), net->forward(x.to(at::kDouble))));
}

TEST(DataParallel, AllowsTwoPendingGraphs) {
  Net net;
  DataParallel parallel(net, {.devices = kTwo});
  net->eval();
  const at::Tensor x = torch::randn({4, 4}), y = torch::randn({6, 4});
  const at::Tensor a = parallel(x).sum();
  const at::Tensor b = parallel(y).pow(2).sum();
  b.backward();
  a.backward();
  const auto gradients = detach_gradients(*net);
  (net->forward(x).sum() + net->forward(y).pow(2).sum()).backward();
  expect_same(gradients, detach_gradients(*net));
}

TEST(DataParallel, DetectsWriteBetweenForwardAndBackward) {
  Net net;
  DataParallel parallel(net, {.devices = kTwo});
  const at::Tensor loss = parallel(torch::randn({4, 4})).sum();
  {
    const at::NoGradGuard no_grad;
    net->second->weight.add_(1);
  }
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(DataParallel, TrainsAfterInferenceMode) {
  Net net;
  DataParallel parallel(net, {.devices = kTwo});
  net->eval();
  const at::Tensor x = torch::randn({4, 4});
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(torch::allclose(parallel(x), net->forward(x), 1e-5, 1e-6));
  }
  net->train();
  parallel(x).sum().backward();
  EXPECT_TRUE(net->first->weight.grad().defined());
}

TEST(DataParallel, BuffersFollowFirstReplica) {
  Net net, alone;
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < net->parameters().size(); ++i) alone->parameters()[i].copy_(net->parameters()[i]);
  }
  DataParallel parallel(net, {.devices = kTwo});
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = torch::randn({7, 4});
    parallel(x);
    alone->forward(x.narrow(0, 0, 4));
  }
  EXPECT_TRUE(torch::allclose(net->norm->running_mean, alone->norm->running_mean))
      << net->norm->running_mean << alone->norm->running_mean;
  EXPECT_TRUE(torch::allclose(net->norm->running_var, alone->norm->running_var))
      << net->norm->running_var << alone->norm->running_var;
  EXPECT_EQ(net->norm->num_batches_tracked.item<std::int64_t>(), 3);
}

TEST(DataParallel, GathersScalarsIntoAVector) {
  Net net;
  net->eval();
  DataParallel parallel(net, [](NetImpl& replica, const at::Tensor& x) { return replica.loss(x); }, {.devices = kTwo});
  const at::Tensor x = torch::randn({6, 4});
  const at::Tensor losses = parallel(x);
  ASSERT_EQ(losses.sizes(), at::IntArrayRef({2}));
  EXPECT_TRUE(torch::allclose(losses.mean(), net->loss(x)));
}

TEST(DataParallel, PropagatesGradModeAutocastAndTrainingMode) {
  Net net;
  std::mutex mutex;
  std::vector<std::string> seen;
  DataParallel parallel(
      net,
      [&](NetImpl& replica, const at::Tensor& x) {
        const at::Tensor y = replica.forward(x);
        const std::lock_guard lock(mutex);
        seen.push_back(std::string(c10::toString(y.scalar_type())) + (y.requires_grad() ? " grad" : "") +
                       (replica.is_training() ? " training" : "") + (replica.norm->is_training() ? " norm" : ""));
        return y;
      },
      {.devices = kTwo});
  const auto all_see = [&](const std::string& expected) {
    seen.clear();
    parallel(torch::randn({4, 4}));
    EXPECT_THAT(seen, testing::ElementsAre(expected, expected));
  };
  all_see("Float grad training norm");
  net->norm->eval();
  all_see("Float grad training");
  {
    const at::NoGradGuard no_grad;
    all_see("Float training");
  }
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    all_see(std::string(c10::toString(dtype)) + " grad training");
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
  all_see("Float grad training");
}

TEST(DataParallel, NamesReplicaAndNestsException) {
  Net net;
  DataParallel parallel(net,
                        [](NetImpl& replica, const at::Tensor& x) {
                          if (x[0][0].item<float>() > 5) throw std::out_of_range("too warm");
                          return replica.forward(x);
                        },
                        {.devices = kFour});
  at::Tensor x = torch::zeros({8, 4});
  x.narrow(0, 4, 2).fill_(9);
  try {
    parallel(x);
    FAIL() << "no exception";
  } catch (const ReplicaError& error) {
    EXPECT_STREQ(error.what(), "DataParallel: replica 2 on cpu: too warm");
    EXPECT_EQ(error.replica(), 2);
    EXPECT_EQ(error.device(), at::Device(at::kCPU));
    EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
  }
  EXPECT_EQ(parallel(torch::zeros({8, 4})).size(0), 8) << "forward() works again after an error";
}

TEST(DataParallel, SkipsFrozenParameters) {
  Net net;
  DataParallel parallel(net, {.devices = kTwo});
  parallel(torch::randn({4, 4})).sum().backward();
  detach_gradients(*net);
  net->first->weight.requires_grad_(false);
  parallel(torch::randn({4, 4})).sum().backward();
  EXPECT_FALSE(net->first->weight.grad().defined());
  EXPECT_TRUE(net->second->weight.grad().defined());
  EXPECT_FALSE(net->unused->weight.grad().defined());
}

struct PlainImpl : torch::nn::Module {
  PlainImpl() : layer(register_module("layer", torch::nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  torch::nn::Linear layer;
};

TEST(DataParallel, UsesMakeReplicaForUncloneableModule) {
  const auto plain = std::make_shared<PlainImpl>();
  EXPECT_THROW(DataParallel(plain, {.devices = kTwo}), c10::Error);
  DataParallel parallel(plain, {.devices = kTwo, .make_replica = [] { return std::make_shared<PlainImpl>(); }});
  const at::Tensor x = torch::randn({4, 2});
  EXPECT_TRUE(torch::allclose(parallel(x), plain->forward(x)));
}

TEST(DataParallel, RejectsInvalidArguments) {
  Net net;
  EXPECT_THROW(DataParallel(net, {.devices = {}}), base::UsageError);
  EXPECT_THROW(DataParallel(net, {.devices = {at::kMeta, at::kCPU}}), base::UsageError);
  EXPECT_THROW(DataParallel(net, {.devices = kTwo, .dim = -1}), base::UsageError);
  EXPECT_THROW(DataParallel(torch::nn::Tanh(), {.devices = kTwo}), base::UsageError);
  EXPECT_THROW(DataParallel(net, {.devices = kTwo, .make_replica = [net]() mutable { return net.ptr(); }}),
               base::UsageError);
  EXPECT_THROW(DataParallel(net, {.devices = kTwo, .make_replica = [] { return torch::nn::Linear(1, 1).ptr(); }}),
               base::UsageError);
  DataParallel parallel(net, {.devices = kTwo, .dim = 2});
  EXPECT_THROW(parallel(torch::randn({2, 4})), base::UsageError);
}

/// torch cannot move a module to the device meta, but a module can be constructed there.
struct MetaNetImpl : torch::nn::Cloneable<MetaNetImpl> {
  explicit MetaNetImpl(at::Device where = at::kCPU) : device(where) { MetaNetImpl::reset(); }
  void reset() override { weight = register_parameter("weight", torch::randn({4, 8}, at::TensorOptions(device))); }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight); }
  at::Device device;
  at::Tensor weight;
};
TORCH_MODULE(MetaNet);

TEST(DataParallel, ReportsDeviceUsage) {
  MetaNet net;
  DataParallel same(net, {.devices = kTwo});
  same(torch::randn({6, 4}));
  ASSERT_EQ(same.device_usage().size(), 1u);
  EXPECT_EQ(same.device_usage()[0].replicas, 2);
  EXPECT_EQ(same.device_usage()[0].samples, 6);
  EXPECT_EQ(same.device_usage()[0].held_bytes, 4 * 4 * 8) << "replicas on one device share memory";
  EXPECT_EQ(same.device_usage()[0].received_bytes, 0);

  int num_made = 0;
  DataParallel apart(net,
                     {.devices = {at::kCPU, at::kMeta}, .output_device = at::Device(at::kMeta), .make_replica = [&] {
                        return std::make_shared<MetaNetImpl>(num_made++ == 0 ? at::kCPU : at::kMeta);
                      }});
  EXPECT_EQ(apart(torch::randn({6, 4})).sizes(), at::IntArrayRef({6, 8}));
  const auto device_usage = apart.device_usage();
  ASSERT_EQ(device_usage.size(), 2u);
  EXPECT_EQ(device_usage[0].samples, 3);
  EXPECT_EQ(device_usage[1].samples, 3);
  EXPECT_EQ(device_usage[1].held_bytes, 4 * 4 * 8);
  EXPECT_EQ(device_usage[0].sent_bytes, 4 * 4 * 8 + 4 * 3 * 4 + 4 * 3 * 8)
      << "parameters, half of the input, and half of the output";
  EXPECT_EQ(device_usage[1].received_bytes, device_usage[0].sent_bytes);
  EXPECT_EQ(format_device_usage(device_usage),
            "device  replicas  samples         held     received         sent         peak\n"
            "cpu            1        3      0.1 KiB      0.0 KiB      0.3 KiB            -\n"
            "meta           1        3      0.1 KiB      0.3 KiB      0.0 KiB            -\n");
  EXPECT_EQ(format_device_usage({{.device = at::Device(at::kCUDA, 1),
                                  .replicas = 1,
                                  .samples = 16,
                                  .held_bytes = 4 << 20,
                                  .peak_bytes = 1 << 30}})
                .substr(78),
            "cuda:1         1       16      4.0 MiB      0.0 KiB      0.0 KiB   1024.0 MiB\n");
}

TEST(TransferCounter, CountsForwardAndBackwardTransfers) {
  const auto transfers = std::make_shared<TransferCounter>();
  const at::Tensor x = torch::randn({5}, at::TensorOptions(at::kMeta)).requires_grad_();
  const at::Tensor away = copy_to_device(x, at::kMeta, transfers);
  EXPECT_TRUE(away.is_same(x)) << "it is already on that device";
  const at::Tensor p = torch::ones({3}).requires_grad_();
  const auto replicas = replicate(p, {at::kCPU, at::kMeta, at::kCPU}, transfers);
  EXPECT_EQ(replicas[0].data_ptr(), p.data_ptr());
  EXPECT_EQ(transfers->bytes_of(at::kMeta).received, 12);
  (replicas[0].sum() + 2 * replicas[2].sum()).backward();
  EXPECT_TRUE(torch::equal(p.grad(), torch::full({3}, 3.0F)));
}

}  // namespace
}  // namespace lockstep::nn
