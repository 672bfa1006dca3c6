// Tests training with an outer optimizer between hosts, on one host and on several simulated ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <thread>

#include "lockstep/amp/grad_scaler.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/train/training_state.h"
#include "tests/support/rank_main.h"
#include "tests/support/shared_dir.h"
#include "tests/support/temp_dir.h"

namespace lockstep::ddp::ddp_outer_test {
namespace {

using tests::world;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(20, 300));
    norm = register_module("norm", torch::nn::BatchNorm1d(300));
    last = register_module("last", torch::nn::Linear(300, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return last->forward(torch::tanh(norm->forward(first->forward(x)))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

at::Tensor loss_of(Net& net, int step) {
  const auto seed = static_cast<std::uint64_t>(1000 * step + world().rank());
  const at::Tensor x = at::randn({8, 20}, at::make_generator<at::CPUGeneratorImpl>(seed));
  return torch::mse_loss(net->forward(x), x.narrow(1, 0, 5) * 0.5);
}

std::vector<at::Tensor> copies_of(Net& net) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& parameter : net->parameters()) copies.push_back(parameter.detach().clone());
  return copies;
}

bool are_equal_on_all_ranks(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) parts.push_back(tensor.detach().flatten());
  const at::Tensor own = at::cat(parts), all = at::empty({world().size() * own.numel()});
  world().all_gather(all, own);
  bool equal = true;
  for (int rank = 0; rank < world().size(); ++rank) equal &= all.narrow(0, rank * own.numel(), own.numel()).equal(own);
  return equal;
}

void expect_near(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected, double bound) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_LT((got[i] - expected[i]).abs().max().item<double>(), bound) << i;
}

/// Trains with SGD, of torch or of lockstep, whose step() is followed by Group::step().
std::vector<at::Tensor> train_with_sgd(const DdpOptions& options, int steps, bool is_fused) {
  Net net;
  DistributedDataParallel ddp(net, world(), options);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (is_fused)
    optimizer = std::make_unique<optim::SGD>(ddp, optim::SGDOptions{.lr = 0.1});
  else
    optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    loss_of(net, step).backward();
    optimizer->step();
    if (!is_fused) world().step();
  }
  return copies_of(net);
}

TEST(DdpOuter, EachStepWithRateOneAndWithoutMomentumIsPlainTraining) {
  const std::vector<at::Tensor> plain = train_with_sgd({}, 5, false);
  for (const bool is_fused : {false, true}) {
    const auto outer = train_with_sgd({.outer = DiLoCo{.learning_rate = 1, .momentum = 0}}, 5, is_fused);
    expect_near(outer, plain, 2e-6);
    EXPECT_TRUE(are_equal_on_all_ranks(outer));
  }
}

TEST(DdpOuter, HostsTrainApartAndAreEqualAfterEachRound) {
  for (const OuterMethod& method :
       {OuterMethod(DiLoCo{}), OuterMethod(DiLoCo{.payload = Payload::kInt8}),
        OuterMethod(DiLoCo{.payload = Payload::kInt4, .warm_up = 2}), OuterMethod(SparseLoCo{})})
    for (const bool is_fused : {false, true}) {
      const int warm_up = method.index() == 1 ? std::get<DiLoCo>(method).warm_up : 0;
      const DdpOptions options{.average_hosts_every = 3, .outer = method};
      for (const int steps : {warm_up + 3, warm_up + 6})
        EXPECT_TRUE(are_equal_on_all_ranks(train_with_sgd(options, steps, is_fused))) << steps;
      if (warm_up > 0) {
        EXPECT_TRUE(are_equal_on_all_ranks(train_with_sgd(options, 1, is_fused))) << "in the warm-up";
      }
      EXPECT_EQ(are_equal_on_all_ranks(train_with_sgd(options, warm_up + 5, is_fused)), world().num_nodes() == 1);
    }
}

// The outer step is that of torch.optim.SGD with Nesterov momentum on the mean of what the hosts have learned.
TEST(DdpOuter, RoundsAreTheFormula) {
  constexpr int kEvery = 4, kRounds = 3;
  Net net;
  DistributedDataParallel ddp(net, world(),
                              {.average_hosts_every = kEvery, .outer = DiLoCo{.learning_rate = 0.7, .momentum = 0.9}});
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  std::vector<at::Tensor> copy = copies_of(net);
  std::vector<at::Tensor> outer_parameters;
  for (const at::Tensor& tensor : copy) outer_parameters.push_back(tensor.clone().set_requires_grad(true));
  torch::optim::SGD outer(outer_parameters, torch::optim::SGDOptions(0.7).momentum(0.9).nesterov(true));
  for (int step = 0; step < kEvery * kRounds; ++step) {
    optimizer.zero_grad();
    loss_of(net, step).backward();
    optimizer.step();
    if (step % kEvery == kEvery - 1) {
      for (std::size_t i = 0; i < copy.size(); ++i) {
        at::Tensor learned = outer_parameters[i].detach() - net->parameters()[i].detach();
        world().all_reduce(learned, comm::ReduceOp::kMean);
        outer_parameters[i].mutable_grad() = learned;
      }
      outer.step();
    }
    world().step();
    if (step % kEvery == kEvery - 1) expect_near(copies_of(net), outer_parameters, 2e-6);
  }
}

TEST(DdpOuter, EvaluationUsesTheGlobalCopy) {
  for (const bool is_fused : {false, true}) {
    Net net;
    DistributedDataParallel ddp(net, world(), {.average_hosts_every = 2, .outer = DiLoCo{}});
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (is_fused)
      optimizer = std::make_unique<optim::SGD>(ddp, optim::SGDOptions{.lr = 0.1});
    else
      optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.1));
    std::vector<at::Tensor> after_round;
    for (int step = 0; step < 3; ++step) {
      loss_of(net, step).backward();
      optimizer->step();
      if (!is_fused) world().step();
      if (step == 1) after_round = copies_of(net);
    }
    const std::vector<at::Tensor> own = copies_of(net);
    ddp.with_global_copy([&] { expect_near(copies_of(net), after_round, 1e-12); });
    expect_near(copies_of(net), own, 1e-12);
    EXPECT_THROW(ddp.with_global_copy([] { throw std::runtime_error("evaluation"); }), std::runtime_error);
    expect_near(copies_of(net), own, 1e-12);
  }
}

TEST(DdpOuter, BuffersAreAveraged) {
  Net net;
  DistributedDataParallel ddp(net, world(),
                              {.buffers = BufferMode::kMean, .average_hosts_every = 2, .outer = DiLoCo{}});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 2; ++step) {
    loss_of(net, step).backward();
    optimizer.step();
    if (step == 1) break;
    world().step();
  }
  at::Tensor mean = net->norm->running_mean.clone();
  world().all_reduce(mean, comm::ReduceOp::kMean);
  world().step();
  EXPECT_TRUE(net->norm->running_mean.allclose(mean, 1e-5, 1e-7));
  EXPECT_TRUE(are_equal_on_all_ranks({net->norm->running_mean, net->norm->running_var}));
}

// A host whose scaler skips a step counts it, so the hosts meet in the same rounds.
TEST(DdpOuter, StepThatOneHostSkipsCounts) {
  for (const bool is_fused : {false, true}) {
    Net net;
    DistributedDataParallel ddp(net, world(), {.average_hosts_every = 3, .outer = DiLoCo{}});
    amp::GradScaler scaler({.init_scale = 1, .warn_below = 0});
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (is_fused)
      optimizer = std::make_unique<optim::SGD>(ddp, optim::SGDOptions{.lr = 0.1});
    else
      optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.1));
    int skipped = 0;
    for (int step = 0; step < 9; ++step) {
      optimizer->zero_grad();
      at::Tensor loss = loss_of(net, step);
      if ((step == 1 || step == 5) && world().node_rank() == world().num_nodes() - 1)
        loss = loss * std::numeric_limits<float>::infinity();
      scaler.scale(loss).backward();
      skipped += !scaler.step(*optimizer);
      if (!is_fused) world().step();
      scaler.update();
      at::Tensor sum = at::ones({1});
      world().all_reduce(sum);  // a round that only one host is in would meet it
    }
    ddp.average_hosts();
    EXPECT_EQ(skipped, world().node_rank() == world().num_nodes() - 1 ? 2 : 0);
    EXPECT_TRUE(are_equal_on_all_ranks(copies_of(net)));
    EXPECT_TRUE(net->last->weight.isfinite().all().item<bool>());
  }
}

// The outer optimizer begins when the hosts are equal, whenever the last average of the warm-up came.
TEST(DdpOuter, BeginsFromEqualParametersAfterTheWarmUp) {
  Net net;
  DistributedDataParallel ddp(net, world(), {.average_hosts_every = 3, .outer = DiLoCo{.warm_up = 2}});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 9; ++step) {  // without Group::step(): averages come in the next backward()
    optimizer.zero_grad();
    loss_of(net, step).backward();
    optimizer.step();
  }
  ddp.average_hosts();
  EXPECT_TRUE(are_equal_on_all_ranks(copies_of(net)));
}

// Each host makes its own N steps, however fast; the faster one waits in the round.
TEST(DdpOuter, SlowerHostMakesAsManySteps) {
  Net net;
  DistributedDataParallel ddp(net, world(), {.average_hosts_every = 4, .outer = DiLoCo{}});
  optim::SGD optimizer(ddp, optim::SGDOptions{.lr = 0.1});
  for (int step = 0; step < 8; ++step) {
    optimizer.zero_grad();
    loss_of(net, step).backward();
    if (world().node_rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    optimizer.step();
    EXPECT_TRUE(step % 4 != 3 || are_equal_on_all_ranks(copies_of(net))) << step;
  }
}

TEST(DdpOuter, NoSyncDoesNotCount) {
  Net net;
  DistributedDataParallel ddp(net, world(), {.average_hosts_every = 2, .outer = DiLoCo{}});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    {
      const auto guard = ddp.no_sync();
      loss_of(net, 2 * step).backward();
    }
    loss_of(net, 2 * step + 1).backward();
    optimizer.step();
    world().step();
    EXPECT_EQ(are_equal_on_all_ranks(copies_of(net)), step % 2 == 1 || world().num_nodes() == 1) << step;
  }
}

TEST(DdpOuter, ComplexParametersAreAveraged) {
  for (const bool has_outer : {false, true}) {
    struct ComplexNet : torch::nn::Module {
      at::Tensor weight = register_parameter("weight", at::ones({3}, at::kComplexFloat));
    } net;
    DdpOptions options{.average_hosts_every = 2};
    if (has_outer) options.outer = DiLoCo{.learning_rate = 1, .momentum = 0};
    DistributedDataParallel ddp(net, world(), options);
    torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      (at::real(net.weight) * (world().node_rank() + 1)).sum().backward();
      optimizer.step();
      world().step();
    }
    EXPECT_TRUE(are_equal_on_all_ranks({at::view_as_real(net.weight.detach())}));
  }
}

/// A training whose optimizer has a state of its own on each host.
struct Training {
  Training(const std::string& folder, const OuterMethod& method, bool is_fused)
      : state(world(), folder), net(), ddp(net, world(), {.average_hosts_every = 3, .outer = method}) {
    if (is_fused)
      fused.emplace(ddp, optim::AdamWOptions{.lr = 0.01});
    else
      plain.emplace(net->parameters(), torch::optim::AdamWOptions(0.01));
    if (fused) state.add("optimizer", *fused);
    if (plain) state.add("optimizer", *plain, *net);
    state.add("model", net).add("ddp", ddp);
    state.resume();
  }
  void train(int until) {
    for (auto step = static_cast<int>(state.step()); step < until; ++step) {
      torch::optim::Optimizer& optimizer = fused ? static_cast<torch::optim::Optimizer&>(*fused) : *plain;
      optimizer.zero_grad();
      loss_of(net, step).backward();
      optimizer.step();
      if (plain) world().step();
    }
  }
  training::TrainingState state;
  Net net;
  DistributedDataParallel ddp;
  std::optional<optim::AdamW> fused;
  std::optional<torch::optim::AdamW> plain;
};

TEST(DdpOuter, ResumesBetweenTwoRoundsWithTheSameBits) {
  for (const OuterMethod& method : {OuterMethod(), OuterMethod(DiLoCo{.payload = Payload::kInt8}),
                                    OuterMethod(DiLoCo{.warm_up = 6}), OuterMethod(SparseLoCo{})})
    for (const bool is_fused : {false, true}) {
      std::vector<at::Tensor> straight;
      {
        Training training("", method, is_fused);
        training.train(9);
        straight = copies_of(training.net);
      }
      const tests::SharedDir folder;
      {
        Training training(folder.path(), method, is_fused);
        training.train(5);
        training.state.save(5);
      }
      Training resumed(folder.path(), method, is_fused);
      EXPECT_EQ(resumed.state.step(), 5);
      resumed.train(9);
      const std::vector<at::Tensor> got = copies_of(resumed.net);
      for (std::size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(got[i].equal(straight[i])) << i << " method " << method.index() << " fused " << is_fused;
    }
}

TEST(DdpOuter, IncompatibleOptionsAreRejected) {
  Net net;
  EXPECT_THAT(tests::message_of<base::UsageError>(
                  [&] { DistributedDataParallel ddp(net, world(), {.outer = DiLoCo{.momentum = 2}}); }),
              ::testing::HasSubstr("DdpOptions.outer: momentum is 2.000000; expected 0 or more, less than 1"));
  DistributedDataParallel ddp(net, world(), {.average_hosts_every = 2});
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { ddp.with_global_copy([] {}); }),
              ::testing::HasSubstr("there is no outer optimizer"));
  Net other;
  DistributedDataParallel with_outer(other, world(), {.outer = DiLoCo{}});
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { join(with_outer, [] {}); }),
              ::testing::HasSubstr("join: DdpOptions.outer is set; expected none"));
}

}  // namespace
}  // namespace lockstep::ddp::ddp_outer_test
