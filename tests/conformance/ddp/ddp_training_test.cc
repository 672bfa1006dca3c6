// Tests BufferMode, join(), the state of optimizers, and actions of one rank alone.
#include <sstream>

#include "lockstep/ddp/replicas.h"
#include "tests/conformance/ddp/test_models.h"

namespace lockstep::tests::ddp_training_test {
namespace {

using ddp::BufferMode;
using ddp::DistributedDataParallel;
using ddp::join;

struct NormNetImpl : torch::nn::Module {
  NormNetImpl() {
    fc = register_module("fc", torch::nn::Linear(4, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(fc(x)); }
  torch::nn::Linear fc{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(NormNet);

TEST(DdpBuffers, BroadcastFromRank0) {
  NormNet net;
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 4; ++step) {
    const auto y = net->forward(batch_of(world().rank(), step, {8, 4}));
    at::Tensor first = net->norm->running_mean.clone();
    world().broadcast(first, 0);
    y.pow(2).sum().backward();
    EXPECT_TRUE(torch::equal(first, net->norm->running_mean));
    EXPECT_TRUE(same_bits(net->norm->running_var));
    EXPECT_EQ(net->norm->num_batches_tracked.item<std::int64_t>(), step + 1);
  }
}

TEST(DdpBuffers, Mean) {
  NormNet net;
  DistributedDataParallel ddp(net, world(), {.buffers = BufferMode::kMean});
  for (int step = 0; step < 3; ++step) {
    const auto y = net->forward(batch_of(world().rank(), step, {8, 4}));
    at::Tensor mean = net->norm->running_mean.clone();
    world().all_reduce(mean, comm::ReduceOp::kMean);
    y.pow(2).sum().backward();
    EXPECT_TRUE(torch::allclose(mean, net->norm->running_mean, 1e-6, 1e-7));
    EXPECT_TRUE(same_bits(net->norm->running_mean));
  }
}

TEST(DdpBuffers, Local) {
  NormNet net;
  DistributedDataParallel ddp(net, world(), {.buffers = BufferMode::kLocal});
  const auto y = net->forward(batch_of(world().rank(), 0, {8, 4}));
  const at::Tensor mine = net->norm->running_mean.clone();
  y.pow(2).sum().backward();
  EXPECT_TRUE(torch::equal(mine, net->norm->running_mean));
}

TEST(DdpBuffers, PendingGraphSurvivesBufferSync) {
  NormNet net;
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    const auto waiting = net->forward(batch_of(world().rank(), step, {8, 4}));
    net->eval();
    const auto evaluated = net->forward(batch_of(world().rank(), step + 9, {8, 4}));  // saves the running statistics
    net->train();
    net->forward(batch_of(world().rank(), step + 20, {8, 4})).pow(2).sum().backward();  // writes the buffers
    EXPECT_NO_THROW(waiting.pow(2).sum().backward());
    EXPECT_NO_THROW(evaluated.pow(2).sum().backward());
    EXPECT_TRUE(same_bits(net->fc->weight.grad()));
  }
}

TEST(DdpTraining, OneRankMayEvaluateAndSave) {
  NormNet net;
  DistributedDataParallel ddp(net, world());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    net->forward(batch_of(world().rank(), step, {8, 4})).pow(2).sum().backward();
    optimizer.step();
    if (world().rank() == step % world().size()) {
      const at::NoGradGuard no_grad;
      net->eval();
      for (int i = 0; i <= step; ++i) net->forward(batch_of(9, i, {8, 4}));
      std::stringstream file;
      torch::save(net, file);
      net->train();
    }
  }
  for (const auto& p : net->parameters()) EXPECT_TRUE(same_bits(p.detach()));
}

TEST(DdpTraining, OptimizerCreatedBetweenBackwardAndStep) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
    torch::optim::SGD(net->parameters(), 0.1).step();
    for (const auto& p : net->parameters()) EXPECT_TRUE(same_bits(p.detach()));
  }
}

TEST(DdpTraining, ShardedBatchEqualsSingleProcessOnWholeBatch) {
  const int size = world().size();
  Mlp net, alone;
  DistributedDataParallel ddp(net, world());
  copy_values(*net, *alone);
  torch::optim::Adam together(net->parameters(), 0.01);
  torch::optim::Adam single(alone->parameters(), 0.01);
  for (int step = 0; step < 10; ++step) {
    const at::Tensor whole = batch_of(77, step, {4 * size, 7});
    together.zero_grad();
    single.zero_grad();
    net->forward(whole.narrow(0, 4 * world().rank(), 4)).pow(2).mean().backward();
    alone->forward(whole).pow(2).mean().backward();
    together.step();
    single.step();
    const auto a = net->parameters();
    const auto b = alone->parameters();
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::allclose(a[i], b[i], 1e-4, 1e-5)) << step;
  }
}

TEST(DdpTraining, IgnoredParametersAreNeitherBroadcastNorReduced) {
  torch::manual_seed(1 + world().rank());
  Mlp net;
  const at::Tensor mine = net->second->weight.detach().clone();
  DistributedDataParallel ddp(net, world(), {.ignore = {"second.weight"}});
  EXPECT_TRUE(torch::equal(mine, net->second->weight));
  net->forward(batch_of(world().rank(), 0, {4, 7})).pow(2).sum().backward();
  EXPECT_TRUE(same_bits(net->first->weight.grad()));
  if (world().size() > 1) {
    EXPECT_FALSE(same_bits(net->second->weight.grad()));
  }
  EXPECT_THROW(DistributedDataParallel(net, world(), {.ignore = {"secnod.weight"}}), base::UsageError);
}

TEST(DdpTraining, ModelWithoutTrainableParametersIsRejected) {
  Mlp net;
  for (at::Tensor p : net->parameters()) p.requires_grad_(false);
  EXPECT_THROW(DistributedDataParallel(net, world()), base::UsageError);
}

TEST(DdpTraining, UserHooksReceiveLocalGradients) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  int calls = 0;
  at::Tensor seen;
  net->first->weight.register_hook([&](const at::Tensor& g) {
    ++calls;
    seen = g.clone();
    return g * 2;
  });
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
    Mlp alone;
    copy_values(*net, *alone);
    alone->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
    EXPECT_TRUE(torch::allclose(seen, alone->first->weight.grad()));
    const auto mean = mean_over_ranks([&](int rank) {
      Mlp other;
      copy_values(*net, *other);
      other->forward(batch_of(rank, step, {4, 7})).pow(2).sum().backward();
      return std::vector<at::Tensor>{other->first->weight.grad() * 2};
    });
    EXPECT_TRUE(torch::allclose(net->first->weight.grad(), mean[0], 1e-5, 1e-6));
  }
  EXPECT_EQ(calls, 3);
}

TEST(DdpJoin, DividesByInitialOrActiveRanks) {
  for (const bool initial : {true, false}) {
    struct OneImpl : torch::nn::Module {
      OneImpl() { w = register_parameter("w", torch::ones({1})); }
      at::Tensor w;
    } net;
    DistributedDataParallel ddp(net, world());
    const int steps = world().rank() == 0 ? 1 : 3;
    const float size = static_cast<float>(world().size());
    join(ddp,
         [&] {
           for (int step = 0; step < steps; ++step) {
             net.zero_grad();
             (net.w * 50).sum().backward();
             const bool rank_0_joined = step > 0 && world().size() > 1;
             const float expected = rank_0_joined && initial ? 50 * (size - 1) / size : 50;
             EXPECT_NEAR(net.w.grad().item<float>(), expected, 1e-4) << step;
           }
         },
         {.divide_by_initial_world_size = initial});
  }
}

TEST(DdpJoin, UnevenBatchesEndWithEqualModels) {
  NormNet net;
  DistributedDataParallel ddp(net, world());
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  for (int epoch = 0; epoch < 2; ++epoch) {
    int steps = 0;
    join(ddp, [&] {
      for (; steps < 2 * (world().size() - world().rank()); ++steps) {
        optimizer.zero_grad();
        net->forward(batch_of(world().rank(), steps, {8, 4})).pow(2).sum().backward();
        optimizer.step();
      }
    });
    EXPECT_EQ(steps, 2 * (world().size() - world().rank()));
    for (const auto& p : net->parameters()) EXPECT_TRUE(same_bits(p.detach()));
    for (const auto& b : net->buffers()) EXPECT_TRUE(same_bits(b));
  }
}

TEST(DdpJoin, BuffersComeFromAnActiveRank) {
  NormNet net;
  DistributedDataParallel ddp(net, world());
  const int steps = world().rank() == 0 ? 1 : 3;
  join(ddp, [&] {
    for (int step = 0; step < steps; ++step) {
      net->zero_grad();
      net->forward(batch_of(world().rank(), step, {8, 4})).pow(2).sum().backward();
      EXPECT_EQ(net->norm->num_batches_tracked.item<std::int64_t>(), step + 1);
    }
  });
  EXPECT_EQ(net->norm->num_batches_tracked.item<std::int64_t>(), world().size() == 1 ? 1 : 3);
}

TEST(DdpJoin, EqualsLocalRunOfSummedSteps) {
  // Rank r trains 2 (r + 1) steps of SGD. The gradient of each step is the sum over the ranks that have not joined,
  // divided by the initial number of ranks.
  Mlp net, alone;
  DistributedDataParallel ddp(net, world());
  copy_values(*net, *alone);
  const int size = world().size();
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  join(ddp, [&] {
    for (int step = 0; step < 2 * (world().rank() + 1); ++step) {
      optimizer.zero_grad();
      net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).mean().backward();
      optimizer.step();
    }
  });
  torch::optim::SGD single(alone->parameters(), 0.05);
  for (int step = 0; step < 2 * size; ++step) {
    single.zero_grad();
    at::Tensor loss = torch::zeros({});
    for (int rank = 0; rank < size; ++rank)
      if (step < 2 * (rank + 1)) loss = loss + alone->forward(batch_of(rank, step, {4, 7})).pow(2).mean() / size;
    loss.backward();
    single.step();
  }
  const auto a = net->parameters();
  const auto b = alone->parameters();
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::allclose(a[i], b[i], 1e-4, 1e-5));
}

TEST(DdpJoin, StateOfOptimizersComesFromARankThatTrainedToTheEnd) {
  Mlp net;
  DistributedDataParallel ddp(net, world(), {.compare_replicas_every = 1});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  const auto train = [&](int steps) {
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).mean().backward();
      optimizer.step();
    }
  };
  const int last = world().size() - 1;
  for (int epoch = 0; epoch < 2; ++epoch) {
    const auto root = join(ddp, [&] { train(2 * world().rank()); }, {.optimizers = {&optimizer}});
    EXPECT_EQ(root, last == 0 ? std::nullopt : std::optional(last));
  }
  train(10);  // compares the replicas
  for (const auto& p : net->parameters()) EXPECT_TRUE(same_bits(p.detach()));
}

TEST(DdpReplicas, MayDifferBetweenBackwardAndTheEndOfTheStep) {
  Mlp net;
  DistributedDataParallel ddp(net, world(), {.compare_replicas_every = 1});
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  for (int step = 0; step < 12; ++step) {
    std::vector<at::Tensor> before;
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& p : net->parameters()) {
        before.push_back(p.clone());
        p.add_(0.01 * world().rank());
      }
    }
    optimizer.zero_grad();
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).mean().backward();
    {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < before.size(); ++i) net->parameters()[i].copy_(before[i]);
    }
    optimizer.step();
    world().step();
  }
  for (const auto& p : net->parameters()) EXPECT_TRUE(same_bits(p.detach()));
}

TEST(DdpJoin, SeveralModels) {
  Mlp first, second;
  DistributedDataParallel a(first, world());
  DistributedDataParallel b(second, world());
  join({&a, &b}, [&] {
    for (int step = 0; step < 1 + world().rank(); ++step)
      for (Mlp* net : {&first, &second, &first}) {
        (*net)->zero_grad();
        (*net)->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
        torch::optim::SGD((*net)->parameters(), 0.01).step();
      }
  });
  for (Mlp* net : {&first, &second})
    for (const auto& p : (*net)->parameters()) EXPECT_TRUE(same_bits(p.detach()));
}

/// Keeps slow weights, which its constructor cloned, and pulls the fast ones towards them in each step.
class Lookahead : public torch::optim::SGD {
 public:
  Lookahead(const std::vector<at::Tensor>& parameters, double lr) : torch::optim::SGD(parameters, lr) {
    for (const at::Tensor& p : parameters) slow_.push_back(p.detach().clone());
  }
  at::Tensor step(LossClosure closure = nullptr) override {
    torch::optim::SGD::step(closure);
    const at::NoGradGuard no_grad;
    const auto& parameters = param_groups()[0].params();
    for (std::size_t i = 0; i < slow_.size(); ++i) {
      slow_[i].lerp_(parameters[i], 0.5);
      at::Tensor(parameters[i]).copy_(slow_[i]);
    }
    return {};
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    for (std::size_t i = 0; i < slow_.size(); ++i) archive.write("slow" + std::to_string(i), slow_[i]);
  }
  void load(torch::serialize::InputArchive& archive) override {
    for (std::size_t i = 0; i < slow_.size(); ++i) archive.read("slow" + std::to_string(i), slow_[i]);
  }

 private:
  std::vector<at::Tensor> slow_;
};

TEST(DdpOptimizer, StateDerivedFromInitialParametersIsBroadcast) {
  torch::manual_seed(1 + world().rank());
  Mlp net;
  Lookahead optimizer(net->parameters(), 0.05);  // constructed before the parameters are equal
  DistributedDataParallel ddp(net, world());
  ddp::broadcast_optimizer_state(optimizer, world());
  for (int step = 0; step < 12; ++step) {
    optimizer.zero_grad();
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).mean().backward();
    optimizer.step();
    for (const auto& p : net->parameters()) EXPECT_TRUE(same_bits(p.detach()));
  }
}

TEST(DdpOptimizer, StateOfTorchsOwnOptimizersIsBroadcast) {
  torch::manual_seed(1 + world().rank());
  Mlp net;
  torch::optim::AdamW optimizer(net->parameters(),
                                torch::optim::AdamWOptions(0.01 * (1 + world().rank())).betas({0.8, 0.9}));
  for (int step = 0; step < 3; ++step) {  // a different history on each rank
    optimizer.zero_grad();
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).mean().backward();
    optimizer.step();
  }
  DistributedDataParallel ddp(net, world());
  ddp::broadcast_optimizer_state(optimizer, world());
  const auto& options = static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options());
  EXPECT_DOUBLE_EQ(options.lr(), 0.01);
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).mean().backward();
    optimizer.step();
    for (const auto& p : net->parameters()) EXPECT_TRUE(same_bits(p.detach()));
  }
}

}  // namespace
}  // namespace lockstep::tests::ddp_training_test
