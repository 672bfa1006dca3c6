// Tests optimizers whose state is sharded between ranks (FusedOptions.shard_state).
#include <gmock/gmock.h>

#include "lockstep/optim/adam.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/lamb.h"
#include "lockstep/optim/sgd.h"
#include "tests/conformance/optim/optim_reference.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::optim_shards_test {
namespace {

using ddp::DistributedDataParallel;
using optim::FusedOptions;

/// Returns the number of owners among which the state is divided.
int num_owners() {
  if (world().transport() == "shm") return 1;
  return world().transport() == "hierarchy" ? world().num_nodes() : world().size();
}

std::int64_t num_state_elements(torch::optim::Optimizer& optimizer) {
  std::int64_t sum = 0;
  for (const auto& [key, state] : optimizer.state()) {
    const auto& one = static_cast<const torch::optim::AdamWParamState&>(*state);
    sum += one.exp_avg().numel() + one.exp_avg_sq().numel();
  }
  return sum;
}

void train_step(WideImpl& net, optim::AdamW& optimizer, int step) {
  optimizer.zero_grad();
  net.loss(world().rank(), step).backward();
  optim::clip_grad_norm(optimizer, 0.5);
  optimizer.step();
}

void expect_same(torch::nn::Module& one, torch::nn::Module& other) {
  const auto others = other.named_parameters();
  for (const auto& item : one.named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), others[item.key()])) << item.key();
    EXPECT_TRUE(same_bits(item.value().detach())) << item.key();
  }
}

/// The parameters have several chunks and transposed strides, and two of them share a storage.
TEST(OptimShards, EqualsUnshardedBitwise) {
  WideImpl whole, divided;
  DistributedDataParallel ddp(whole, world()), other(divided, world());
  optim::AdamW plain(ddp, {.lr = 0.01, .amsgrad = true});
  optim::AdamW sharded(other, {.lr = 0.01, .amsgrad = true}, {}, {.shard_state = true});
  for (int step = 0; step < 50; ++step) {
    train_step(whole, plain, step);
    train_step(divided, sharded, step);
  }
  expect_same(divided, whole);
}

/// Updates with ATen's operations, over each transport. The parameters are not shared, and each rank is an owner.
TEST(OptimShards, ByOperationsEqualsUnshardedBitwise) {
  WideImpl whole, divided;
  DistributedDataParallel ddp(whole, world()), other(divided, world());
  optim::AdamW plain(ddp, {.lr = 0.01, .amsgrad = true}, {}, {.foreach = true});
  optim::AdamW sharded(other, {.lr = 0.01, .amsgrad = true}, {}, {.shard_state = true, .foreach = true});
  EXPECT_FALSE(sharded.shares_parameters());
  for (int step = 0; step < 4; ++step) {
    train_step(whole, plain, step);
    train_step(divided, sharded, step);
  }
  expect_same(divided, whole);
  EXPECT_LE(num_state_elements(sharded) * std::min(world().size(), 2),
            num_state_elements(plain) + 64 * static_cast<std::int64_t>(whole.parameters().size()));
  const auto state = plain.state_dict();
  const auto gathered = sharded.state_dict();
  ASSERT_EQ(gathered.size(), state.size());
  for (const auto& [name, value] : state)
    EXPECT_TRUE(torch::equal(std::get<at::Tensor>(gathered.at(name)), std::get<at::Tensor>(value))) << name;
}

/// Between hosts, a rank has the means of its shard only, and adds to them without a word to other ranks.
TEST(OptimShards, GradientsAccumulateAsWithoutShards) {
  enum Way { kKept, kZeroed, kNoSync, kNoSyncOfOneRank, kAfterNoSync, kPart };
  for (const Way way : {kKept, kZeroed, kNoSync, kNoSyncOfOneRank, kAfterNoSync, kPart}) {
    WideImpl nets[2];
    for (const bool shard_state : {false, true}) {
      WideImpl& net = nets[shard_state];
      DistributedDataParallel ddp(net, world());
      optim::SGD optimizer(ddp, {.lr = 1, .momentum = 0.9}, {}, {.shard_state = shard_state});
      const auto backward_on = [&](int step) { net.loss(world().rank(), step).backward(); };
      const auto accumulate = [&](int step) {
        const auto guard = ddp.no_sync();
        backward_on(step);
      };
      for (int step = 0; step < 12; step += 3) {
        optimizer.zero_grad(/*set_to_none=*/way != kZeroed);
        if (way == kAfterNoSync) accumulate(step);
        backward_on(step + 1);
        if (way == kNoSync || (way == kNoSyncOfOneRank && world().rank() == 0)) accumulate(step);
        if (way == kPart) net.right.sum().backward();  // the others keep theirs
        if (way != kZeroed && way != kPart) backward_on(step + 2);
        optimizer.step();
      }
    }
    expect_equal(nets[1], nets[0], 1e-6);
    EXPECT_GT((nets[0].odd - WideImpl().odd).abs().max().item<double>(), 1e-4) << "the steps are too small";
  }
}

TEST(OptimShards, StepAfterNoSyncAloneIsRefusedBetweenHosts) {
  if (world().transport() != "hierarchy") return;
  WideImpl net;
  DistributedDataParallel ddp(net, world());
  optim::AdamW sharded(ddp, {.lr = 0.01}, {}, {.shard_state = true});
  net.loss(world().rank(), 0).backward();
  {
    const auto guard = ddp.no_sync();
    net.loss(world().rank(), 1).backward();
  }
  for (const auto& call : {std::function<void()>([&] { sharded.step(); }),
                           std::function<void()>([&] { optim::clip_grad_norm(sharded, 1.0); }),
                           std::function<void()>([&] { sharded.average_gradients(); })})
    EXPECT_THAT(message_of<base::UsageError>(call),
                ::testing::HasSubstr("no backward() outside no_sync() has followed"));
  net.loss(world().rank(), 2).backward();
  sharded.step();
  EXPECT_TRUE(same_bits(net.odd.detach()));
}

/// Parameters that have got another layout since the DistributedDataParallel was made.
TEST(OptimShards, ChangedStridesAreCountedRight) {
  WideImpl nets[2];
  for (const bool shard_state : {false, true}) {
    WideImpl& net = nets[shard_state];
    DistributedDataParallel ddp(net, world());
    net.wide->weight.set_data(net.wide->weight.detach().t().contiguous().t());
    optim::AdamW optimizer(ddp, {.lr = 0.01}, {}, {.shard_state = shard_state});
    for (int step = 0; step < 4; ++step) train_step(net, optimizer, step);
  }
  expect_same(nets[1], nets[0]);
}

TEST(OptimShards, AverageGradientsGivesEveryRankTheMeans) {
  WideImpl whole, divided;
  DistributedDataParallel ddp(whole, world()), other(divided, world());
  optim::AdamW plain(ddp, {.lr = 0.01});
  optim::AdamW sharded(other, {.lr = 0.01}, {}, {.shard_state = true});
  for (int step = 0; step < 6; ++step) {  // from the third on, backward() gives the means
    for (auto& [net, optimizer] : {std::pair<WideImpl*, optim::AdamW*>{&whole, &plain}, {&divided, &sharded}}) {
      optimizer->zero_grad();
      net->loss(world().rank(), step).backward();
      optimizer->average_gradients();
      torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01);
    }
    for (std::size_t i = 0; i < whole.parameters().size(); ++i)
      EXPECT_TRUE(divided.parameters()[i].grad().equal(whole.parameters()[i].grad())) << i;
    plain.step();
    sharded.step();
  }
  expect_same(divided, whole);
}

TEST(OptimShards, ChangedGradientsOfHostsAreRefused) {
  if (world().transport() != "hierarchy") return;  // gradients are means, or the ranks share a host
  WideImpl net;
  DistributedDataParallel ddp(net, world());
  optim::AdamW sharded(ddp, {.lr = 0.01}, {}, {.shard_state = true});
  for (int step = 0; step < 2; ++step) {
    sharded.zero_grad();
    net.loss(world().rank(), step).backward();
    torch::nn::utils::clip_grad_norm_(net.parameters(), 1e-3);
    EXPECT_THAT(message_of<base::UsageError>([&] { sharded.step(); }), ::testing::HasSubstr("before it was averaged"));
  }
}

TEST(OptimShards, PartialMeansDoNotOutliveTheOptimizer) {
  WideImpl net;
  DistributedDataParallel ddp(net, world());
  auto sharded = std::make_unique<optim::AdamW>(ddp, optim::AdamWOptions{.lr = 0.01},
                                                std::vector<optim::AdamW::Group>{}, FusedOptions{.shard_state = true});
  net.loss(world().rank(), 0).backward();
  sharded.reset();
  EXPECT_TRUE(!net.odd.grad().defined() || world().transport() != "hierarchy");
  net.zero_grad();
  net.loss(world().rank(), 1).backward();
  EXPECT_TRUE(same_bits(net.odd.grad()));
}

template <typename Options>
void compare_with_unsharded(at::ScalarType dtype, const Options& options, bool early) {
  torch::manual_seed(4);
  Mlp whole, divided;
  whole->to(dtype);
  divided->to(dtype);
  copy_values(*whole, *divided);
  DistributedDataParallel ddp(whole, world()), other(divided, world());
  optim::SGD plain(ddp, options);
  optim::SGD sharded(other, options, {}, {.shard_state = true});
  sharded.update_in_backward(early);
  for (int step = 0; step < 5; ++step) {
    plain.zero_grad();
    sharded.zero_grad();
    backward(*whole, world().rank(), step);
    plain.step();
    backward(*divided, world().rank(), step);
    sharded.step();
  }
  expect_same(*divided, *whole);
}

/// Norms of whole parameters are summed over their owners, in a different order of additions.
TEST(OptimShards, NormsCoverWholeParameters) {
  WideImpl whole, divided;
  DistributedDataParallel ddp(whole, world()), other(divided, world());
  optim::LAMB plain(ddp, {.lr = 0.01});
  optim::LAMB sharded(other, {.lr = 0.01}, {}, {.shard_state = true});
  for (int step = 0; step < 4; ++step) {
    for (auto& [net, optimizer] : {std::pair<WideImpl*, optim::LAMB*>{&whole, &plain}, {&divided, &sharded}}) {
      optimizer->zero_grad();
      net->loss(world().rank(), step).backward();
      optimizer->step();
    }
  }
  expect_equal(divided, whole, 1e-5);
}

TEST(OptimShards, EveryDtype) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    compare_with_unsharded(dtype, optim::SGDOptions{.lr = 0.001, .momentum = 0.9}, false);
}
TEST(OptimShards, OptimizerWithoutState) { compare_with_unsharded(at::kFloat, optim::SGDOptions{.lr = 0.01}, false); }
TEST(OptimShards, UpdatesInBackward) {
  compare_with_unsharded(at::kFloat, optim::SGDOptions{.lr = 0.01, .momentum = 0.9}, true);
}

TEST(OptimShards, StateIsDividedEvenlyBetweenOwners) {
  WideImpl net;
  DistributedDataParallel ddp(net, world());
  optim::AdamW sharded(ddp, {.lr = 0.01}, {}, {.shard_state = true});
  train_step(net, sharded, 0);
  std::int64_t all = 0;
  for (const at::Tensor& parameter : net.parameters()) all += 2 * parameter.numel();
  EXPECT_NEAR(static_cast<double>(num_state_elements(sharded)), static_cast<double>(all) / num_owners(),
              2 * 16 * static_cast<double>(net.parameters().size()));  // a cache line for each of two states
}

TEST(OptimShards, UnusedParametersAreUnchanged) {
  torch::manual_seed(2);
  Mlp net;
  const at::Tensor unused = net->register_parameter("unused", torch::ones({100}));
  DistributedDataParallel ddp(net, world());
  optim::AdamW sharded(ddp, {.lr = 0.01}, {}, {.shard_state = true});
  for (int step = 0; step < 2; ++step) {
    sharded.zero_grad();
    backward(*net, world().rank(), step);
    sharded.step();
  }
  EXPECT_TRUE(torch::equal(unused, torch::ones({100})));
}

/// A sharded optimizer loads the state of an unsharded one and vice versa, and training continues equally.
TEST(OptimShards, StateRoundTrip) {
  for (const bool first : {true, false}) {
    WideImpl net;
    DistributedDataParallel ddp(net, world());
    checkpoint::StateDict saved;
    std::vector<at::Tensor> middle, after;
    {
      optim::AdamW optimizer(ddp, {.lr = 0.01}, {}, {.shard_state = first});
      for (int step = 0; step < 3; ++step) train_step(net, optimizer, step);
      saved = checkpoint::clone_state(optimizer.state_dict());
      for (const at::Tensor& parameter : net.parameters()) middle.push_back(parameter.detach().clone());
      for (int step = 3; step < 5; ++step) train_step(net, optimizer, step);
      for (const at::Tensor& parameter : net.parameters()) after.push_back(parameter.detach().clone());
    }
    for (const auto& [name, value] : saved) EXPECT_TRUE(same_bits(std::get<at::Tensor>(value).contiguous())) << name;
    ASSERT_EQ(saved.size(), net.parameters().size() * 3);
    optim::AdamW again(ddp, {.lr = 0.01}, {}, {.shard_state = !first});
    again.change_parameters([&] {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < middle.size(); ++i) net.parameters()[i].copy_(middle[i]);
    });
    again.load_state_dict(saved);
    for (int step = 3; step < 5; ++step) train_step(net, again, step);
    for (std::size_t i = 0; i < after.size(); ++i)
      EXPECT_TRUE(torch::equal(net.parameters()[i], after[i])) << net.named_parameters()[i].key();
  }
}

TEST(OptimShards, JoinIsRejected) {
  if (num_owners() == 1) return;
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::AdamW sharded(ddp, {.lr = 0.01}, {}, {.shard_state = true});
  EXPECT_THROW(ddp::join(ddp, [] {}), base::UsageError);
}

/// Closes the group.
TEST(OptimShards, DifferentOptionsAreADesync) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::AdamW sharded(ddp, {.lr = world().rank() == 1 ? 0.02 : 0.01}, {}, {.shard_state = true});
  backward(*net, world().rank(), 0);
  EXPECT_THAT(tests::message_of<base::DesyncError>([&] { sharded.step(); }),
              ::testing::HasSubstr("have different options, such as the learning rate"));
}

}  // namespace
}  // namespace lockstep::tests::optim_shards_test
