// Tests the errors of ranks that train differently: both sides are reported within seconds, and no gradient of another
// step is applied. Each case is a job of its own.
#include <gmock/gmock.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/data/loader.h"
#include "lockstep/ddp/replicas.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/sgd.h"
#include "tests/conformance/ddp/test_models.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::ddp_failures_test {
namespace {

using base::Cause;
using ddp::DistributedDataParallel;
using Clock = std::chrono::steady_clock;

void forward_backward(Mlp& net, int step) {
  net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
}

TEST(DdpFailures, BackwardAgainstBarrier) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  forward_backward(net, 0);
  expect_error(Cause::kDesync, {"rank 0 called backward()", "barrier"}, [&] {
    if (world().rank() == 0)
      forward_backward(net, 1);
    else
      world().barrier();
  });
}

TEST(DdpFailures, UserAllReduceAgainstBackward) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  forward_backward(net, 0);
  expect_error(Cause::kDesync, {"all_reduce(float32[3])", "backward()"}, [&] {
    if (world().rank() == 0) {
      const at::Tensor t = torch::ones({3});
      world().all_reduce(t);
    } else {
      forward_backward(net, 1);
    }
  });
}

TEST(DdpFailures, ExtraBackwardIsADesync) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const auto step = [&](int number) {
    optimizer.zero_grad();
    forward_backward(net, number);
    if (number == 2 && world().rank() == 0) forward_backward(net, 50);  // an auxiliary loss on rank 0 only
    optimizer.step();
  };
  step(0);
  step(1);
  const at::Tensor before = net->first->weight.detach().clone();
  int done = 1;
  expect_error(Cause::kDesync, {"not in the same step"}, [&] {
    for (int number = 2; number < 6; ++number) {
      step(number);
      ++done;
    }
  });
  EXPECT_LE(done, 2);  // step 2 was correct on the others; no later step was applied on any rank
}

TEST(DdpFailures, FusedOptimizersWithDifferentOptions) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = world().rank() == 0 ? 0.1 : 0.2});
  const at::Tensor before = net->first->weight.detach().clone();
  const at::Tensor sharing = torch::full({1}, optimizer.shares_parameters(), at::kInt);
  world().all_reduce(sharing, comm::ReduceOp::kMax);
  const bool shared = sharing.item<int>() != 0;
  // With a copy on each rank, the comparison of replicas detects the difference.
  expect_error(shared ? Cause::kDesync : Cause::kReplicaDiverged,
               {shared ? "step() on ranks" : "differs between ranks"}, [&] {
                 for (int number = 0; number < 4; ++number) {
                   optimizer.zero_grad();
                   forward_backward(net, number);
                   optimizer.step();
                 }
               });
  if (optimizer.shares_parameters()) {
    EXPECT_TRUE(torch::equal(before, net->first->weight));
  }
}

/// Trains until backward() throws. Returns the number of that step.
int train_until_it_throws(Mlp& net, const std::function<void(int)>& before_step) {
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  for (int number = 0;; ++number) {
    before_step(number);
    optimizer.zero_grad();
    try {
      forward_backward(net, number);
    } catch (const base::Error&) {
      return number;
    }
    optimizer.step();
    if (number > 60) return number;
  }
}

TEST(DdpFailures, DriftingReplicaIsDetectedWithinCompareInterval) {
  Mlp net;
  DistributedDataParallel ddp(net, world(), {.compare_replicas_every = 10});
  const int last = world().size() - 1;
  int found = -1;
  expect_error(
      Cause::kReplicaDiverged,
      {"parameter second.bias differs between ranks", "rank " + std::to_string(last) + " has hash"},
      [&] {
        found = train_until_it_throws(net, [&](int number) {
          if (number != 23 || world().rank() != last) return;
          const torch::NoGradGuard no_grad;
          auto* bits = reinterpret_cast<std::uint32_t*>(net->second->bias.mutable_data_ptr<float>());
          *bits ^= 1 << 12;  // a difference of the last bit might be rounded away before the comparison
        });
        world().barrier();  // closed by the same error
      },
      std::chrono::seconds(60));
  EXPECT_EQ(found, 30);
}

/// Returns a group of all ranks but the first: rank 1 of the group is rank 2 of the world.
comm::Group all_but_the_first() { return world().split(world().rank() == 0 ? 0 : 1); }

TEST(DdpFailures, ReplicaErrorUsesGlobalRank) {
  comm::Group others = all_but_the_first();
  if (others.size() < 2) return;
  Mlp net;
  DistributedDataParallel ddp(net, others, {.compare_replicas_every = 10});
  expect_error(
      Cause::kReplicaDiverged, {"rank 1 has hash", "rank 2 has hash"},
      [&] {
        train_until_it_throws(net, [&](int number) {
          if (number != 23 || world().rank() != 2) return;
          const torch::NoGradGuard no_grad;
          net->second->bias.add_(1e-3);
        });
        try {
          others.barrier();
        } catch (const base::CommError& error) {
          EXPECT_EQ(error.peer(), 2);
          throw;
        }
      },
      std::chrono::seconds(60));
}

TEST(DdpFailures, ModelMismatchUsesGlobalRank) {
  comm::Group others = all_but_the_first();
  if (others.size() < 2) return;
  Mlp net;
  if (world().rank() == 2) net->register_parameter("extra", torch::ones({2}));
  expect_error(Cause::kConfigMismatch, {"rank 1 has ", "rank 2 has parameter extra"},
               [&] { DistributedDataParallel ddp(net, others); });
}

TEST(DdpFailures, StepDesyncUsesGlobalRank) {
  comm::Group others = all_but_the_first();
  if (others.size() < 2) return;
  Mlp net;
  DistributedDataParallel ddp(net, others);
  if (world().rank() == 2) comm::GroupAccess::count_batch(others);
  expect_error(Cause::kDesync, {"rank 1 has drawn 0 batches, rank 2 has drawn 1 batch"},
               [&] { forward_backward(net, 0); });
}

/// Draws batches and trains with them.
template <typename Loader>
void train_with(Loader& loader, Mlp& net, std::uint64_t epoch) {
  for (const auto& batch : loader.epoch(epoch)) net->forward(batch.data).pow(2).sum().backward();
}

data::Example make_example(std::size_t index) {
  return {torch::full({7}, static_cast<double>(index)), torch::tensor(static_cast<std::int64_t>(index))};
}

TEST(DdpFailures, LoaderWithDifferentSeed) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  auto loader = data::make_loader(40, make_example, world(), {.batch_size = 2, .seed = world().rank() == 0 ? 1u : 2u});
  expect_error(Cause::kDesync, {"the loaders of rank 0 and rank 1 have different seeds"},
               [&] { train_with(loader, net, 0); });
}

TEST(DdpFailures, LoaderWithDifferentBatchSize) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  auto loader = data::make_loader(40, make_example, world(), {.batch_size = world().rank() == 0 ? 2 : 3});
  expect_error(Cause::kDesync, {"the loaders of rank 0 and rank 1 have different batch sizes"},
               [&] { train_with(loader, net, 0); });
}

TEST(DdpFailures, LoaderInDifferentEpoch) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  auto loader = data::make_loader(40, make_example, world(), {.batch_size = 2});
  train_with(loader, net, 0);
  expect_error(Cause::kDesync, {"the loaders of rank 0 and rank 1 have different epochs"},
               [&] { train_with(loader, net, world().rank() == 0 ? 1 : 0); });
}

TEST(DdpFailures, CompareEveryZeroDisablesComparison) {
  Mlp net;
  DistributedDataParallel ddp(net, world(), {.compare_replicas_every = 0});
  const int found = train_until_it_throws(net, [&](int number) {
    if ((number != 3 && number != 23) || world().rank() != 0) return;
    const torch::NoGradGuard no_grad;
    net->second->bias.add_(1e-3);
  });
  EXPECT_EQ(found, 61);
}

TEST(DdpFailures, NonFiniteGradientIsReportedBeforeReduction) {
  Mlp net;
  DistributedDataParallel ddp(net, world(), {.check_finite = true});
  const at::Tensor before = net->first->weight.detach().clone();
  const int last = world().size() - 1;
  expect_error(Cause::kNonFinite, {"the gradient of ", "on rank " + std::to_string(last), "not finite"}, [&] {
    auto loss = net->forward(batch_of(world().rank(), 0, {4, 7})).pow(2).sum();
    if (world().rank() == last) loss = loss * std::numeric_limits<double>::infinity();
    loss.backward();
  });
  EXPECT_TRUE(torch::equal(before, net->first->weight));
}

TEST(DdpFailures, ClipOnOneRankAgainstStep) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.1});
  forward_backward(net, 0);
  if (!optimizer.shares_parameters()) return;  // ranks wait for each other only if they share parameters
  expect_error(Cause::kDesync, {"rank 0 computes the norm of gradients", "updates parameters"}, [&] {
    if (world().rank() == 0) optim::clip_grad_norm(optimizer, 1.0);
    optimizer.step();
  });
}

TEST(DdpFailures, UpdateInBackwardOnOneRank) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.1});
  if (!optimizer.shares_parameters() || world().transport() != "shm")
    return;  // over other transports the difference has no effect
  const at::Tensor before = net->first->weight.detach().clone();
  optimizer.update_in_backward(world().rank() == 1);
  expect_error(Cause::kDesync, {"rank 0 updates parameters, rank 1 updates parameters in backward()"}, [&] {
    forward_backward(net, 0);
    optimizer.step();
  });
  EXPECT_TRUE(torch::equal(before, net->first->weight));
}

TEST(DdpFailures, UpdateInBackwardWithDifferentOptions) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.1});
  if (!optimizer.shares_parameters() || world().transport() != "shm") return;
  optimizer.update_in_backward();
  const auto step = [&](int number) {
    optimizer.zero_grad();
    forward_backward(net, number);
    optimizer.step();
  };
  step(0);
  step(1);  // from here on updates start in backward()
  std::vector<at::Tensor> before;
  for (const auto& parameter : net->parameters()) before.push_back(parameter.detach().clone());
  world().barrier();
  optimizer.param_groups()[0].options().set_lr(world().rank() == 0 ? 0.1 : 0.2);
  expect_error(Cause::kDesync, {"backward() on ranks", "have different options, such as the learning rate"}, [&] {
    // The delay makes this rank find all gradients of rank 0, so that it could apply them at once.
    if (world().rank() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    step(2);
  });
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(before[i], net->parameters()[i])) << i;
}

TEST(DdpFailures, AliasOfParameterUpdatedInBackward) {
  torch::manual_seed(1);
  Mlp net(7, 7, 7);
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.1});
  optimizer.update_in_backward();
  const auto run = [&](int number, bool with_alias) {
    optimizer.zero_grad();
    at::Tensor x = net->first->forward(batch_of(world().rank(), number, {4, 7}));
    if (with_alias) x = torch::mm(x, net->second->weight.detach());
    net->second->forward(x).pow(2).sum().backward();
    optimizer.step();
  };
  run(0, false);
  run(1, false);
  EXPECT_THROW(run(2, true),
               std::exception);  // autograd's error, or the error that backward() has failed on another rank
}

TEST(DdpFailures, ExtraBackwardAfterStepIsDetectedByBatchCount) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  int done = 0;
  expect_error(Cause::kDesync, {"has drawn"}, [&] {
    for (int number = 0; number < 6; ++number) {
      comm::GroupAccess::count_batch(world());  // as make_loader does
      optimizer.zero_grad();
      forward_backward(net, number);
      optimizer.step();
      ++done;
      if (number == 2 && world().rank() == 0) {
        optimizer.zero_grad();
        forward_backward(net, 50);
      }
    }
  });
  EXPECT_EQ(done, 3);
}

/// Fails in backward(), before a gradient of the model exists.
struct FailingBackward : torch::autograd::Function<FailingBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("out of memory");
  }
};

TEST(DdpFailures, BackwardThatFailsAndIsCaughtOnOneRank) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  int done = 0;
  expect_error(Cause::kDesync, {"has had 1 backward() call fail", "has had 0 backward() calls fail"}, [&] {
    for (int number = 0; number < 6; ++number) {
      optimizer.zero_grad();
      if (number == 2 && world().rank() == 0) {
        EXPECT_THROW(FailingBackward::apply(net->forward(batch_of(0, number, {4, 7}))).sum().backward(),
                     std::runtime_error);
      } else {
        forward_backward(net, number);
      }
      optimizer.step();
      ++done;
    }
  });
  EXPECT_LE(done, 3);
}

TEST(DdpFailures, RankWithFewerBatchesIsReported) {
  Mlp net;
  auto ddp = std::make_unique<DistributedDataParallel>(net, world());
  forward_backward(net, 0);
  if (world().rank() == 0) {
    ddp.reset();
    leave_world();
    return;
  }
  expect_error(Cause::kUnevenInput, {"rank 0 finished"}, [&] { forward_backward(net, 1); });
}

/// Pulls the parameters towards the copies that its constructor made.
struct AnchoredSgd : torch::optim::SGD {
  explicit AnchoredSgd(const std::vector<at::Tensor>& parameters) : torch::optim::SGD(parameters, 0.05) {
    for (const at::Tensor& p : parameters) anchors.push_back(p.detach().clone());
  }
  at::Tensor step(LossClosure closure = nullptr) override {
    torch::optim::SGD::step(closure);
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < anchors.size(); ++i) at::Tensor(param_groups()[0].params()[i]).lerp_(anchors[i], 0.5);
    return {};
  }
  std::vector<at::Tensor> anchors;
};

TEST(DdpFailures, OptimizerStateOfDifferentInitialParametersIsDetectedAfterFirstStep) {
  torch::manual_seed(1 + world().rank());
  Mlp net;
  AnchoredSgd optimizer(net->parameters());
  DistributedDataParallel ddp(net, world());
  int done = 0;
  expect_error(Cause::kReplicaDiverged, {"parameter first.weight differs between ranks"}, [&] {
    for (; done < 5; ++done) {
      optimizer.zero_grad();
      forward_backward(net, done);
      optimizer.step();
    }
  });
  EXPECT_EQ(done, 1);
}

TEST(DdpFailures, ParameterElementWrittenOnOneRankIsReported) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  forward_backward(net, 0);
  if (world().rank() == world().size() - 1) {
    const at::NoGradGuard no_grad;
    net->second->bias[4].add_(1);
  }
  net->zero_grad();
  expect_error(Cause::kReplicaDiverged, {"parameter second.bias differs between ranks"},
               [&] { forward_backward(net, 1); });
}

/// Throws in its backward if `throws` was true in the forward.
struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, bool throws) {
    context->saved_data["throws"] = throws;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    if (context->saved_data["throws"].toBool()) throw std::logic_error("the user's own error");
    return {grads[0], at::Tensor()};
  }
};

TEST(DdpFailures, ExceptionInBackwardIsPropagatedAndNextWrapperWorks) {
  Mlp net;
  {
    DistributedDataParallel ddp(net, world());
    forward_backward(net, 0);
    net->zero_grad();
    const auto begin = Clock::now();
    // Between the layers: it throws while gradients of the second layer are being reduced.
    const at::Tensor h =
        ThrowInBackward::apply(torch::tanh(net->first(batch_of(world().rank(), 1, {4, 7}))), world().rank() == 0);
    const at::Tensor loss = net->second(h).sum();
    if (world().rank() == 0) {
      EXPECT_THROW(loss.backward(), std::logic_error);
    } else {
      EXPECT_THAT(tests::message_of<base::PeerLostError>([&] { loss.backward(); }),
                  ::testing::HasSubstr("the user's own error"));
    }
    EXPECT_LT(Clock::now() - begin, kErrorLimit);
  }
  net->zero_grad();
  DistributedDataParallel again(net, world());
  forward_backward(net, 2);
  for (const auto& g : gradients(*net)) EXPECT_TRUE(same_bits(g));
}

TEST(DdpFailures, ExceptionInJoinedLoopIsPropagated) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  const auto begin = Clock::now();
  const auto loop = [&] {
    for (int step = 0; step < 5; ++step) {
      if (step == 2 && world().rank() == 0) throw std::logic_error("the user's own error");
      net->zero_grad();
      forward_backward(net, step);
    }
  };
  if (world().rank() == 0) {
    EXPECT_THROW(join(ddp, loop), std::logic_error);
  } else {
    EXPECT_THROW(join(ddp, loop), base::PeerLostError);
  }
  EXPECT_LT(Clock::now() - begin, kErrorLimit);
}

}  // namespace
}  // namespace lockstep::tests::ddp_failures_test
