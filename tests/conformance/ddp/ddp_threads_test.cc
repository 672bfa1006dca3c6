// Tests that a backward() concerns only the models whose parameters it reaches, on whatever thread it runs.
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/optim/sgd.h"
#include "tests/conformance/ddp/test_models.h"

namespace lockstep::tests::ddp_threads_test {
namespace {

using ddp::DistributedDataParallel;

constexpr int kSteps = 12;

void forward_backward(Mlp& net, int rank, int step) {
  net->forward(batch_of(rank, step, {4, 7})).pow(2).mean().backward();
}

/// The parameters after training by one process on the batches of all ranks.
std::vector<at::Tensor> train_alone(int seed, int num_steps = kSteps) {
  torch::manual_seed(seed);
  Mlp net;
  net->to(at::kDouble);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < num_steps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < world().size(); ++rank)
      (net->forward(batch_of(rank, step + seed, {4, 7}, at::kDouble)).pow(2).mean() / world().size()).backward();
    optimizer.step();
  }
  return net->parameters();
}

void expect_parameters(Mlp& net, const std::vector<at::Tensor>& expected) {
  const auto parameters = net->parameters();
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(torch::allclose(parameters[i].to(at::kDouble), expected[i], 1e-5, 1e-6)) << i;
}

/// Trains as train_alone() does, with this rank's batches. Calls `between` before each step.
void train(Mlp& net, const comm::Group& group, int seed, bool fused, const std::function<void(int)>& between = {}) {
  DistributedDataParallel ddp(net, group);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (fused)
    optimizer = std::make_unique<optim::SGD>(ddp, optim::SGDOptions{.lr = 0.1});
  else
    optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    if (between) between(step);
    optimizer->zero_grad();
    forward_backward(net, group.rank(), step + seed);
    optimizer->step();
  }
}

Mlp make_net(int seed) {
  torch::manual_seed(seed);
  return Mlp();
}

TEST(DdpThreads, LocalModelTrainsOnAnotherThread) {
  const auto expected = train_alone(1);
  for (const bool fused : {false, true}) {
    Mlp net = make_net(1);
    std::atomic<bool> stop{false};
    std::atomic<int> num_local{0};
    std::thread local([&] {
      Mlp other;
      torch::optim::SGD optimizer(other->parameters(), 0.1);
      while (!stop) {
        optimizer.zero_grad();
        forward_backward(other, 50 + world().rank(), num_local++);
        optimizer.step();
      }
    });
    while (num_local == 0) std::this_thread::yield();
    train(net, world(), 1, fused);
    stop = true;
    local.join();
    expect_parameters(net, expected);
  }
}

TEST(DdpThreads, TwoModelsTrainOnTwoThreads) {
  const auto first_expected = train_alone(1), second_expected = train_alone(2);
  for (const bool fused : {false, true}) {
    Mlp first = make_net(1), second = make_net(2);
    const comm::Group first_group = world().split(0), second_group = world().split(0);
    std::thread other([&] { train(second, second_group, 2, fused); });
    train(first, first_group, 1, fused);
    other.join();
    expect_parameters(first, first_expected);
    expect_parameters(second, second_expected);
  }
}

TEST(DdpThreads, TrainsOnAnotherThreadThanTheOneThatMadeIt) {
  Mlp net = make_net(1);
  DistributedDataParallel ddp(net, world());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step)  // each step on a new thread
    std::thread([&] {
      optimizer.zero_grad();
      forward_backward(net, world().rank(), step + 1);
      optimizer.step();
    }).join();
  expect_parameters(net, train_alone(1));
}

TEST(DdpThreads, OneRankFitsAProbeBetweenTheSteps) {
  for (const bool fused : {false, true}) {
    Mlp net = make_net(1);
    at::Tensor probe = torch::zeros({13}, at::requires_grad());
    train(net, world(), 1, fused, [&](int step) {
      if (world().rank() != step % world().size()) return;
      for (int i = 0; i <= step % 3; ++i)
        (net->first->forward(batch_of(0, 1, {4, 7})).detach() - probe).pow(2).sum().backward();
    });
    expect_parameters(net, train_alone(1));
  }
}

/// Throws in backward(), before a gradient of the model exists.
struct Throwing : torch::autograd::Function<Throwing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("out of memory");
  }
};

TEST(DdpThreads, BackwardThatFailsOnAllRanksIsSkippedByAll) {
  Mlp net = make_net(1);
  train(net, world(), 1, false, [&](int step) {
    if (step % 4 != 1) return;
    EXPECT_THROW(Throwing::apply(net->forward(batch_of(world().rank(), step, {4, 7}))).sum().backward(),
                 std::runtime_error);
  });
  expect_parameters(net, train_alone(1));
}

/// Throws what is not a std::exception, after the gradients of the second layer exist.
struct ThrowingNumber : torch::autograd::Function<ThrowingNumber> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw 7;
  }
};

TEST(DdpThreads, ExceptionThatIsNotAStdExceptionEndsTheBackward) {
  if (world().size() > 1) return;  // the first error closes the reductions of several ranks
  Mlp net = make_net(1);
  DistributedDataParallel ddp(net, world());
  const at::Tensor x = batch_of(0, 1, {4, 7});
  for (int i = 0; i < 3; ++i) {
    net->zero_grad();
    EXPECT_THROW(net->second(ThrowingNumber::apply(torch::tanh(net->first(x)))).sum().backward(), int);
    net->zero_grad();
    std::thread([&] { forward_backward(net, 0, i); }).join();  // another thread may follow
    EXPECT_TRUE(net->first->weight.grad().defined());
  }
}

TEST(DdpThreads, BackwardOfAnotherGraphFailsOnOneRank) {
  Mlp net = make_net(1);
  train(net, world(), 1, false, [&](int step) {
    const at::Tensor probe = torch::ones({3}, at::requires_grad());
    if (world().rank() != step % world().size()) return;
    EXPECT_THROW(Throwing::apply(probe * 2).sum().backward(), std::runtime_error);
  });
  expect_parameters(net, train_alone(1));
}

TEST(DdpThreads, TwoThreadsInOneModelAreRefused) {
  if (world().size() > 1) return;  // the other ranks would wait; one rank shows it
  Mlp net = make_net(1);
  DistributedDataParallel ddp(net, world());
  at::Tensor x = batch_of(0, 0, {4, 7}).requires_grad_();
  // A second thread calls backward() while the first one is in the middle of its own.
  bool was_refused = false, is_first = true;
  net->first->weight.register_hook([&](const at::Tensor& gradient) {
    if (std::exchange(is_first, false))
      std::thread([&] {
        try {
          forward_backward(net, 0, 1);
        } catch (const base::UsageError& error) {
          was_refused = std::string(error.what()).find("two threads run backward()") != std::string::npos;
        }
      }).join();
    return gradient;
  });
  forward_backward(net, 0, 0);
  EXPECT_TRUE(was_refused);
}

}  // namespace
}  // namespace lockstep::tests::ddp_threads_test
