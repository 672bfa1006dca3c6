// Tests DistributedDataParallel with unused parameters, branches, several forwards and backwards, several models,
// frozen and tied parameters, and sparse gradients.
#include "tests/conformance/ddp/test_models.h"

namespace lockstep::tests::ddp_branches_test {
namespace {

using ddp::DistributedDataParallel;

std::vector<at::Tensor> local_branch_gradients(MultiHeadImpl& like, int rank, int step, int head) {
  MultiHead alone;
  copy_values(like, *alone);
  alone->forward(batch_of(rank, step, {3, 6}), head).sum().backward();
  return gradients(*alone);
}

void train_and_compare(MultiHead& net, int steps, const std::function<int(int rank, int step)>& head) {
  for (int step = 0; step < steps; ++step) {
    net->zero_grad();
    net->forward(batch_of(world().rank(), step, {3, 6}), head(world().rank(), step)).sum().backward();
    expect_gradients(
        *net, mean_over_ranks([&](int rank) { return local_branch_gradients(*net, rank, step, head(rank, step)); }));
  }
}

TEST(DdpBranches, UnusedOnAllRanksStaysUndefined) {
  MultiHead net;
  DistributedDataParallel ddp(net, world());
  train_and_compare(net, 4, [](int, int) { return 1; });
}

TEST(DdpBranches, DifferentHeadOnEachRank) {
  MultiHead net;
  DistributedDataParallel ddp(net, world());
  train_and_compare(net, 6, [](int rank, int) { return rank % 3; });
}

TEST(DdpBranches, DifferentHeadOnEachRankAndStep) {
  MultiHead net;
  DistributedDataParallel ddp(net, world(), {.bucket_bytes = {1, 64}});
  train_and_compare(net, 20, [](int rank, int step) { return (rank * 7 + step * 5) % 4 - 1; });
}

TEST(DdpBranches, SameHeadOnAllRanksDifferentEachStep) {
  MultiHead net;
  DistributedDataParallel ddp(net, world());
  train_and_compare(net, 12, [](int, int step) { return step / 2 % 3; });
}

TEST(DdpBranches, UnusedInTheFirstStepOnly) {
  MultiHead net;
  DistributedDataParallel ddp(net, world());
  train_and_compare(net, 5, [](int, int step) { return step == 0 ? -1 : 2; });
}

TEST(DdpBranches, UnusedParametersAreNotReduced) {
  MultiHead net;
  DistributedDataParallel ddp(net, world());
  train_and_compare(net, 3, [](int, int step) { return step; });  // uses each parameter once
  const auto all = ddp.stats();
  train_and_compare(net, 8, [](int, int) { return 0; });
  const auto few = ddp.stats();
  if (world().size() == 1) return;
  EXPECT_EQ(few.order.size(), 4u);  // trunk and head0, weights and biases
  if (few.in_place) {
    EXPECT_EQ((few.bytes - all.bytes) / 8, all.bytes / 3) << "unused gradients are not sent";
  } else {
    EXPECT_LT(few.bucket_bytes[0], all.bucket_bytes[0]);
  }
  train_and_compare(net, 2, [](int, int) { return 2; });        // gradients of head2 are reduced again
  EXPECT_EQ(ddp.stats().order.size(), few.in_place ? 4u : 6u);  // buckets still contain head0, used recently
}

TEST(DdpBranches, UntouchedOldGradientsAreUnchanged) {
  MultiHead net;
  DistributedDataParallel ddp(net, world());
  train_and_compare(net, 2, [](int, int) { return 0; });
  {
    const at::NoGradGuard no_grad;
    net->heads[0]->weight.mutable_grad().mul_(1 + world().rank());  // differs on each rank, so a mean would change it
  }
  const at::Tensor before = net->heads[0]->weight.grad().clone();
  for (int step = 0; step < 6; ++step)  // no zero_grad: head0 keeps its old gradients
    net->forward(batch_of(world().rank(), step, {3, 6}), 1).sum().backward();
  EXPECT_TRUE(torch::equal(before, net->heads[0]->weight.grad()));
  EXPECT_TRUE(same_bits(net->heads[1]->weight.grad()));
}

TEST(DdpBranches, AccumulatingGradientTouchedOnSomeRanks) {
  MultiHead net;
  DistributedDataParallel ddp(net, world());
  std::vector<at::Tensor> expected;
  for (int step = 0; step < 4; ++step) {
    net->forward(batch_of(world().rank(), step, {3, 6}), (world().rank() + step) % 3).sum().backward();
    const auto more =
        mean_over_ranks([&](int rank) { return local_branch_gradients(*net, rank, step, (rank + step) % 3); });
    expected.resize(more.size());
    for (std::size_t i = 0; i < more.size(); ++i)
      if (more[i].defined()) expected[i] = expected[i].defined() ? expected[i] + more[i] : more[i];
    expect_gradients(*net, expected);
  }
}

TEST(DdpBranches, TwoForwardsOneBackward) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    const int me = world().rank();
    const auto loss = [&](MlpImpl& n, int rank) {
      const auto a = n.forward(batch_of(rank, step, {4, 7}));
      const auto b = n.forward(batch_of(rank, step + 50, {4, 7}));
      return (a * b).sum();
    };
    loss(*net, me).backward();
    expect_gradients(*net, mean_over_ranks([&](int rank) {
      Mlp alone;
      copy_values(*net, *alone);
      loss(*alone, rank).backward();
      return gradients(*alone);
    }));
  }
}

TEST(DdpBranches, TwoBackwardsAfterOneForward) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  const auto run = [](MlpImpl& n, int rank, int step) {
    const auto y = n.forward(batch_of(rank, step, {4, 7}));
    y.pow(2).sum().backward({}, /*retain_graph=*/true);
    y.sum().backward();
  };
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    run(*net, world().rank(), step);
    expect_gradients(*net, mean_over_ranks([&](int rank) {
      Mlp alone;
      copy_values(*net, *alone);
      run(*alone, rank, step);
      return gradients(*alone);
    }));
  }
  EXPECT_EQ(ddp.stats().reductions, 6);
}

TEST(DdpBranches, GanWithTwoModels) {
  Mlp generator(3, 8, 7);
  Mlp critic(7, 8, 1);
  DistributedDataParallel ddp_g(generator, world());
  DistributedDataParallel ddp_c(critic, world());
  torch::optim::SGD opt_g(generator->parameters(), 0.05);
  torch::optim::SGD opt_c(critic->parameters(), 0.05);
  for (int step = 0; step < 6; ++step) {
    const auto noise = batch_of(world().rank(), step, {4, 3});
    opt_c.zero_grad();
    (critic->forward(batch_of(world().rank(), step + 30, {4, 7})).mean() -
     critic->forward(generator->forward(noise).detach()).mean())
        .backward();
    opt_c.step();
    opt_g.zero_grad();
    critic->forward(generator->forward(noise)).mean().backward();  // reaches both models
    opt_g.step();
  }
  for (const auto& p : generator->parameters()) EXPECT_TRUE(same_bits(p.detach()));
  for (const auto& p : critic->parameters()) EXPECT_TRUE(same_bits(p.detach()));
  if (world().size() > 1) {
    EXPECT_GT(generator->first->weight.grad().abs().sum().item<float>(), 0);
  }
}

TEST(DdpBranches, TiedParametersAreReducedOnce) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      embed = register_module("embed", torch::nn::Linear(5, 5));
      out = register_module("out", torch::nn::Linear(5, 5));
      out->weight = out->register_parameter("tied", embed->weight);  // one tensor with two names
    }
    at::Tensor forward(const at::Tensor& x) { return torch::linear(torch::tanh(embed(x)), out->weight); }
    torch::nn::Linear embed{nullptr}, out{nullptr};
  } net;
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 3; ++step) {
    net.zero_grad();
    net.forward(batch_of(world().rank(), step, {3, 5})).sum().backward();
    const auto expected = mean_over_ranks([&](int rank) {
      at::Tensor w = net.embed->weight.detach().clone().requires_grad_();
      torch::linear(torch::tanh(torch::linear(batch_of(rank, step, {3, 5}), w, net.embed->bias.detach())), w)
          .sum()
          .backward();
      return std::vector<at::Tensor>{w.grad()};
    });
    EXPECT_TRUE(torch::allclose(net.embed->weight.grad(), expected[0], 1e-5, 1e-6));
    EXPECT_TRUE(same_bits(net.embed->weight.grad()));
  }
}

TEST(DdpBranches, FreezingAndUnfreezingBetweenSteps) {
  MultiHead net;
  net->heads[0]->weight.requires_grad_(false);
  DistributedDataParallel ddp(net, world());
  for (int step = 0; step < 12; ++step) {
    net->zero_grad();
    net->heads[0]->weight.requires_grad_(step / 4 % 2 == 1);
    net->trunk->weight.requires_grad_(step / 3 % 2 == 0);
    net->forward(batch_of(world().rank(), step, {3, 6}), 0).sum().backward();
    expect_gradients(*net, mean_over_ranks([&](int rank) {
      auto all = local_branch_gradients(*net, rank, step, 0);
      const auto named = net->parameters();
      for (std::size_t i = 0; i < all.size(); ++i)
        if (!named[i].requires_grad()) all[i] = at::Tensor();
      return all;
    }));
  }
}

TEST(DdpBranches, ReentrantBackwardOfGradientCheckpointing) {
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      shared = register_module("shared", torch::nn::Linear(5, 5));
      last = register_module("last", torch::nn::Linear(5, 1));
    }
    at::Tensor forward(const at::Tensor& x, bool checkpointed) {
      at::Tensor h = x;
      for (int i = 0; i < 3; ++i)
        h = checkpointed ? CheckpointedLinear::apply(h, reinterpret_cast<std::int64_t>(shared.get()))
                         : torch::tanh(shared(h));
      return last(h);
    }
    torch::nn::Linear shared{nullptr}, last{nullptr};
  } net;
  DistributedDataParallel ddp(net, world(), {.bucket_bytes = {1, 1}});
  for (int step = 0; step < 4; ++step) {
    net.zero_grad();
    net.forward(batch_of(world().rank(), step, {2, 5}).requires_grad_(), true).sum().backward();
    const auto got = gradients(net);
    const auto expected = mean_over_ranks([&](int rank) {
      NetImpl alone;
      copy_values(net, alone);
      alone.forward(batch_of(rank, step, {2, 5}), false).sum().backward();
      return gradients(alone);
    });
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(torch::allclose(got[i], expected[i], 1e-5, 1e-6)) << i;
      EXPECT_TRUE(same_bits(got[i]));
    }
  }
  EXPECT_EQ(ddp.stats().reductions, 4);
}

TEST(DdpBranches, SparseGradientsOfEmbeddings) {
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 4).sparse(true)));
      plain = register_module("plain", torch::nn::Embedding(11, 4));
    }
    at::Tensor forward(const at::Tensor& index, bool use_table) {
      return use_table ? table(index) * plain(index) : plain(index);
    }
    torch::nn::Embedding table{nullptr}, plain{nullptr};
  } net;
  DistributedDataParallel ddp(net, world());
  const auto index_of = [](int rank, int step) { return (torch::arange(5) * (rank + 2) + step) % 11; };
  for (int step = 0; step < 6; ++step) {
    net.zero_grad();
    const auto uses = [&](int rank) { return step != 3 && (rank + step) % 2 == 0; };
    net.forward(index_of(world().rank(), step), uses(world().rank())).sum().backward();
    if (net.table->weight.grad().defined()) {
      EXPECT_TRUE(net.table->weight.grad().is_sparse());
    }
    expect_gradients(net, mean_over_ranks([&](int rank) {
                       NetImpl alone;
                       copy_values(net, alone);
                       alone.forward(index_of(rank, step), uses(rank)).sum().backward();
                       return gradients(alone);
                     }));
  }
}

TEST(DdpBranches, SeveralLossesThroughSeveralMethods) {
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      a = register_module("a", torch::nn::Linear(4, 4));
      b = register_module("b", torch::nn::Linear(4, 4));
    }
    at::Tensor encode(const at::Tensor& x) { return torch::tanh(a(x)); }
    at::Tensor score(const at::Tensor& h) { return b(h); }
    torch::nn::Linear a{nullptr}, b{nullptr};
  };
  auto net = std::make_shared<NetImpl>();
  DistributedDataParallel ddp(*net, world());
  const auto second_handle = net;  // another handle to the same parameters
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    const auto run = [&](NetImpl& n, int rank) {
      const auto h = n.encode(batch_of(rank, step, {2, 4}));
      h.pow(2).sum().backward({}, true);
      n.score(h).sum().backward();
    };
    run(*second_handle, world().rank());
    expect_gradients(*net, mean_over_ranks([&](int rank) {
      NetImpl alone;
      copy_values(*net, alone);
      run(alone, rank);
      return gradients(alone);
    }));
  }
}

}  // namespace
}  // namespace lockstep::tests::ddp_branches_test
