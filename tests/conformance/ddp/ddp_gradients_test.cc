// Tests that each gradient is the mean over the ranks when backward() returns. docs/internals/conformance.md lists the
// tests of PyTorch's DDP that these cases cover.
#include "lockstep/base/error.h"
#include "tests/conformance/ddp/test_models.h"

namespace lockstep::tests::ddp_gradients_test {
namespace {

using ddp::DdpOptions;
using ddp::DistributedDataParallel;

/// Returns the gradients of one step that rank `rank` computes alone, with the parameters of `like`.
std::vector<at::Tensor> local_step(MlpImpl& like, int rank, int step) {
  Mlp alone;
  alone->to(like.first->weight.scalar_type());
  copy_values(like, *alone);
  alone->forward(batch_of(rank, step, {4, 7}, like.first->weight.scalar_type())).pow(2).sum().backward();
  return gradients(*alone);
}

void train_and_compare(Mlp& net, DistributedDataParallel& ddp, int steps) {
  for (int step = 0; step < steps; ++step) {
    net->zero_grad();
    net->forward(batch_of(world().rank(), step, {4, 7}, net->first->weight.scalar_type())).pow(2).sum().backward();
    expect_gradients(*net, mean_over_ranks([&](int rank) { return local_step(*net, rank, step); }));
    const at::NoGradGuard no_grad;
    for (at::Tensor p : net->parameters()) p.sub_(p.grad(), 0.01);
  }
}

class GradientDtypes : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(GradientDtypes, MeanHasSameBitsOnAllRanks) {
  torch::manual_seed(1 + world().rank());
  Mlp net;
  net->to(GetParam());
  DistributedDataParallel ddp(net, world());
  train_and_compare(net, ddp, 4);
}

INSTANTIATE_TEST_SUITE_P(All, GradientDtypes, ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf));

TEST(DdpGradients, ConstructionBroadcastsParametersFromRank0) {
  torch::manual_seed(1 + world().rank());
  Mlp net;
  const at::Tensor before = net->first->weight.clone();
  DistributedDataParallel ddp(net, world());
  for (const at::Tensor& p : net->parameters()) EXPECT_TRUE(same_bits(p.detach()));
  if (world().rank() == 0) {
    EXPECT_TRUE(torch::equal(before, net->first->weight));
  }
}

TEST(DdpGradients, MixedDtypesInOneModel) {
  struct MixedImpl : torch::nn::Module {
    MixedImpl() {
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
        weights.push_back(register_parameter("w" + std::to_string(weights.size()), torch::ones({3, 5}, dtype)));
      }
    }
    std::vector<at::Tensor> weights;
  } net;
  DistributedDataParallel ddp(net, world(), {.bucket_bytes = {32, 64}});
  for (int step = 0; step < 3; ++step) {
    net.zero_grad();
    at::Tensor loss = torch::zeros({}, at::kDouble);
    for (const at::Tensor& w : net.weights)
      loss = loss + (w.to(at::kDouble) * batch_of(world().rank(), step, {3, 5}, at::kDouble)).sum();
    loss.backward();
    expect_gradients(net, mean_over_ranks([&](int rank) {
                       std::vector<at::Tensor> all;
                       for (const at::Tensor& w : net.weights)
                         all.push_back(batch_of(rank, step, {3, 5}, at::kDouble).to(w.scalar_type()));
                       return all;
                     }));
  }
}

TEST(DdpGradients, TransposedParametersAndGradients) {
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      w = register_parameter("w", torch::ones({4, 6}).t());  // dense, not contiguous
      v = register_parameter("v", torch::ones({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast));
      s = register_parameter("s", torch::ones({}));  // zero-dimensional
    }
    at::Tensor w, v, s;
  } net;
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 3; ++step) {
    net.zero_grad();
    const auto a = [&](int rank) { return batch_of(rank, step, {4, 6}); };
    const auto b = [&](int rank) { return batch_of(rank, step, {2, 3, 4, 5}); };
    const int me = world().rank();
    ((net.w * a(me).t()).sum() * net.s + (net.v * b(me)).sum()).backward();
    expect_gradients(
        net, mean_over_ranks([&](int rank) { return std::vector<at::Tensor>{a(rank).t(), b(rank), a(rank).sum()}; }));
  }
}

TEST(DdpGradients, LargeParameters) {
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      torch::manual_seed(3);
      wide = register_module("wide", torch::nn::Linear(500, 1100));  // 2.2 MB
      narrow = register_module("narrow", torch::nn::Linear(1100, 3));
      odd = register_parameter("odd", torch::randn({1100, 301}).t());  // 1.3 MB, transposed
    }
    at::Tensor loss(int rank, int step) {
      const auto h = torch::relu(wide->forward(batch_of(rank, step, {4, 500})));
      return (narrow->forward(h).pow(2).sum() + torch::mm(h, odd.t()).pow(2).mean()) * 1e-3;
    }
    torch::nn::Linear wide{nullptr}, narrow{nullptr};
    at::Tensor odd;
  } net;
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 4; ++step) {
    net.zero_grad();
    net.loss(world().rank(), step).backward();
    expect_gradients(net, mean_over_ranks([&](int rank) {
                       NetImpl alone;
                       copy_values(net, alone);
                       alone.loss(rank, step).backward();
                       return gradients(alone);
                     }));
  }
}

TEST(DdpGradients, DifferentStridesOnOneRank) {
  struct NetImpl : torch::nn::Module {
    NetImpl() { w = register_parameter("w", torch::ones({6, 4})); }
    at::Tensor w;
  } net;
  DistributedDataParallel ddp(net, world());
  testing::internal::CaptureStderr();
  for (int step = 0; step < 3; ++step) {
    // An existing gradient is accumulated in place, and keeps its strides.
    net.w.mutable_grad() = world().rank() == 0 ? torch::ones({4, 6}).t() : torch::ones({6, 4});
    (net.w * batch_of(world().rank(), step, {6, 4})).sum().backward();
    expect_gradients(
        net, mean_over_ranks([&](int rank) { return std::vector<at::Tensor>{batch_of(rank, step, {6, 4}) + 1}; }));
  }
  const std::string output = testing::internal::GetCapturedStderr();
  const std::string copies = "lockstep: 1 of 1 gradients are copied before they are reduced, w first";
  const bool reports = ddp.stats().in_place && world().rank() == 0;
  EXPECT_EQ(output.find(copies) != std::string::npos, reports) << output;
  EXPECT_EQ(output.find(copies), output.rfind(copies));  // once
}

TEST(DdpGradients, OptionsDoNotChangeTheMean) {
  const std::vector<DdpOptions> all = {{.bucket_bytes = {}},
                                       {.gradient_predivide_factor = 1},
                                       {.bucket_bytes = {1, 100}, .gradient_predivide_factor = 1.5},
                                       {.gradient_predivide_factor = 1000},
                                       {.overlap = false}};
  for (const DdpOptions& options : all) {
    torch::manual_seed(1 + world().rank());
    Mlp net;
    DistributedDataParallel ddp(net, world(), options);
    train_and_compare(net, ddp, 4);
  }
  Mlp net;
  EXPECT_THROW(DistributedDataParallel(net, world(), {.gradient_predivide_factor = -1}), base::UsageError);
}

TEST(DdpGradients, PredivideAvoidsOverflow) {
  for (const double gradient_predivide_factor : {0.0, 1.0}) {
    struct NetImpl : torch::nn::Module {
      NetImpl() { w = register_parameter("w", torch::ones({4}, at::kHalf)); }
      at::Tensor w;
    } net;
    DistributedDataParallel ddp(net, world(), {.gradient_predivide_factor = gradient_predivide_factor});
    (net.w * 6e4).sum().backward();  // the largest half is 65504
    const bool sums_in_half = world().size() > 1 && !ddp.stats().in_place;
    EXPECT_EQ(torch::isfinite(net.w.grad()).all().item<bool>(), gradient_predivide_factor == 0 || !sums_in_half);
  }
}

TEST(DdpGradients, CommunicationBeginsDuringBackward) {
  Mlp net;
  DistributedDataParallel ddp(net, world(), {.bucket_bytes = {1, 1}});
  std::int64_t early = 0;
  for (int step = 0; step < 20; ++step) {
    net->zero_grad();
    at::Tensor x = batch_of(world().rank(), step, {4, 7});
    at::Tensor y = net->forward(x);
    y.pow(2).sum().backward();
    early += ddp.stats().started_early;
  }
  if (world().size() == 1) return;
  const auto stats = ddp.stats();
  EXPECT_EQ(stats.bucket_bytes.size(), stats.in_place ? 0u : 4u);
  EXPECT_EQ(stats.order.size(), 4u);
  // The order in which gradients were ready in the first backward, last layer first; all ranks agreed on it.
  EXPECT_EQ(stats.order.front().rfind("second.", 0), 0u) << stats.order.front();
  EXPECT_EQ(stats.order.back().rfind("first.", 0), 0u) << stats.order.back();
}

TEST(DdpGradients, BucketsStartBeforeLastGradientIsReady) {
  // Barriers in the backward pass force the order of events, so that the test does not depend on time: the pass ends
  // only after the headers of all ranks have arrived.
  struct BarrierInBackward : torch::autograd::Function<BarrierInBackward> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list grads) {
      world().barrier();
      return {grads[0]};
    }
  };
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      a = register_parameter("a", torch::ones({10}));
      b = register_parameter("b", torch::ones({10}));
      c = register_parameter("c", torch::ones({10}));
    }
    at::Tensor a, b, c;
  } net;
  DistributedDataParallel ddp(net, world(), {.bucket_bytes = {1, 1}});
  for (int step = 0; step < 3; ++step) {
    net.zero_grad();
    // The backward pass computes the gradient of c, runs barriers, computes b, runs barriers, and computes a. At the
    // second barrier, all ranks have exchanged the header of c.
    at::Tensor x = net.a * 2;
    for (int i = 0; i < 20; ++i) x = BarrierInBackward::apply(x);
    x = x * net.b;
    for (int i = 0; i < 20; ++i) x = BarrierInBackward::apply(x);
    (x * net.c).sum().backward();
  }
  if (world().size() > 1) {
    EXPECT_GE(ddp.stats().started_early, 1);
  }
}

TEST(DdpGradients, NumberOfPassesAndOperations) {
  Mlp net;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 5; ++step) {
    if (step % 2)
      optimizer.zero_grad(false);
    else
      optimizer.zero_grad();
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
    optimizer.step();
  }
  const auto stats = ddp.stats();
  EXPECT_EQ(stats.reductions, 5);
  EXPECT_EQ(stats.copies_out, 0);
  if (world().size() > 1) {
    EXPECT_EQ(stats.copies_in, stats.in_place ? 0 : 5 * 4);
    // With buckets, each step has three operations (a header, one bucket and the flags), and the first step also
    // exchanges the order. In place, each step has a header and one synchronization.
    EXPECT_EQ(stats.operations,
              (stats.in_place ? 5 * 2 : 5 * 3 + 1) + 4);  // + 4: replica hashes in the steps after the first
  }
}

TEST(DdpGradients, BothZeroGradModes) {
  torch::manual_seed(1);
  Mlp net;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 8; ++step) {
    if (step % 4 == 0) optimizer.zero_grad(true);
    if (step % 4 == 1) optimizer.zero_grad(false);
    if (step % 4 == 2) net->zero_grad(true);
    if (step % 4 == 3) net->zero_grad(false);
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
    expect_gradients(*net, mean_over_ranks([&](int rank) { return local_step(*net, rank, step); }));
  }
}

TEST(DdpGradients, AutogradGradDoesNotCommunicate) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  net->forward(batch_of(world().rank(), 0, {4, 7})).pow(2).sum().backward();
  const auto before = gradients(*net);
  const auto reductions = ddp.stats().reductions;
  if (world().rank() == 0) {
    const auto loss = net->forward(batch_of(5, 5, {4, 7})).pow(2).sum();
    const auto local = torch::autograd::grad({loss}, net->parameters());
    EXPECT_EQ(local.size(), 4u);
  }
  const auto after = gradients(*net);
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(before[i], after[i]));
  EXPECT_EQ(ddp.stats().reductions, reductions);
  net->zero_grad();
  net->forward(batch_of(world().rank(), 1, {4, 7})).pow(2).sum().backward();
  expect_gradients(*net, mean_over_ranks([&](int rank) { return local_step(*net, rank, 1); }));
}

TEST(DdpGradients, GradientsReplacedOrResetByUser) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 5; ++step) {
    for (at::Tensor p : net->parameters()) p.mutable_grad() = torch::zeros_like(p);  // a new tensor of the user
    if (step == 3) net->second->bias.mutable_grad() = at::Tensor();
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
    expect_gradients(*net, mean_over_ranks([&](int rank) { return local_step(*net, rank, step); }));
  }
}

TEST(DdpGradients, TwoBackwardsWithoutZeroGradAccumulate) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  net->forward(batch_of(world().rank(), 0, {4, 7})).pow(2).sum().backward();
  net->forward(batch_of(world().rank(), 1, {4, 7})).pow(2).sum().backward();
  expect_gradients(*net, mean_over_ranks([&](int rank) {
    auto sum = local_step(*net, rank, 0);
    const auto second = local_step(*net, rank, 1);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] + second[i];
    return sum;
  }));
}

TEST(DdpGradients, NoSyncReducesAccumulatedSumOnce) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  constexpr int kBatches = 8;
  net->forward(batch_of(world().rank(), 99, {4, 7})).pow(2).sum().backward();  // plans the buckets
  const auto before = ddp.stats();
  for (int round = 0; round < 3; ++round) {
    net->zero_grad();
    for (int step = 0; step < kBatches; ++step) {
      const auto forward_backward = [&] {
        net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
      };
      if (step + 1 < kBatches) {
        const auto guard = ddp.no_sync();
        forward_backward();
      } else {
        forward_backward();
      }
    }
    expect_gradients(*net, mean_over_ranks([&](int rank) {
      auto sum = local_step(*net, rank, 0);
      for (int step = 1; step < kBatches; ++step) {
        const auto more = local_step(*net, rank, step);
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] + more[i];
      }
      return sum;
    }));
  }
  const auto after = ddp.stats();
  EXPECT_EQ(after.reductions - before.reductions, 3);
  if (world().size() > 1) {
    std::int64_t bytes = 0;
    for (const auto& p : net->parameters()) bytes += static_cast<std::int64_t>(p.nbytes());
    EXPECT_EQ(after.bytes - before.bytes, 3 * (after.in_place ? bytes : after.bucket_bytes[0]));
  }
}

TEST(DdpGradients, GradientsAreLocalInsideNoSync) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  {
    const auto guard = ddp.no_sync();
    net->forward(batch_of(world().rank(), 0, {4, 7})).pow(2).sum().backward();
    const auto local = local_step(*net, world().rank(), 0);
    const auto got = gradients(*net);
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::allclose(got[i], local[i]));
  }
  EXPECT_EQ(ddp.stats().reductions, 0);
}

TEST(DdpGradients, NoSyncOnOneRankDoesNotAffectOthers) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    if (world().rank() == 0) {
      const auto guard = ddp.no_sync();
      net->forward(batch_of(7, 7, {4, 7})).pow(2).sum().backward();
      net->zero_grad();
    }
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
    expect_gradients(*net, mean_over_ranks([&](int rank) { return local_step(*net, rank, step); }));
  }
}

TEST(DdpGradients, NoSyncOfOneModelDoesNotAffectAnother) {
  Mlp other, net;
  DistributedDataParallel ddp_other(other, world());
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    if (world().rank() == 0) {
      const auto guard = ddp_other.no_sync();
      other->forward(batch_of(7, 7, {4, 7})).pow(2).sum().backward();
      other->zero_grad();
    }
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
    expect_gradients(*net, mean_over_ranks([&](int rank) { return local_step(*net, rank, step); }));
  }
}

TEST(DdpGradients, ParameterTouchedOnlyUnderNoSyncIsReduced) {
  MultiHead net;
  DistributedDataParallel ddp(net, world());
  for (int round = 0; round < 5; ++round) {
    net->zero_grad();
    {
      const auto guard = ddp.no_sync();
      net->forward(batch_of(world().rank(), 0, {3, 6}), 1).sum().backward();
    }
    net->forward(batch_of(world().rank(), 1, {3, 6}), 2).sum().backward();
    expect_gradients(*net, mean_over_ranks([&](int rank) {
      MultiHead alone;
      copy_values(*net, *alone);
      alone->forward(batch_of(rank, 0, {3, 6}), 1).sum().backward();
      alone->forward(batch_of(rank, 1, {3, 6}), 2).sum().backward();
      return gradients(*alone);
    }));
  }
}

}  // namespace
}  // namespace lockstep::tests::ddp_gradients_test
