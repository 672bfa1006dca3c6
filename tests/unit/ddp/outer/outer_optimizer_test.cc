// Tests the outer optimizers beside their formulas in float64. The ranks of all hosts are threads of this process.
#include "lockstep/ddp/outer/outer_optimizer.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/ddp/outer/host_averager.h"
#include "tests/support/temp_dir.h"

namespace lockstep::ddp::outer_optimizer_test {
namespace {

using ::testing::HasSubstr;

/// Threads that exchange as ranks of hosts do: `ranks_of_hosts` says how many each host has.
class Hosts {
 public:
  explicit Hosts(std::vector<int> ranks_of_hosts) : ranks_(std::move(ranks_of_hosts)) {
    for (const int ranks : ranks_) {
      num_slices_ = std::min(num_slices_, ranks);
      size_ += ranks;
    }
    for (int slice = 0; slice < num_slices_; ++slice) across_.push_back(std::make_unique<Meeting>(ranks_.size()));
    for (const int ranks : ranks_) inside_.push_back(std::make_unique<Meeting>(static_cast<std::size_t>(ranks)));
  }

  int size() const { return size_; }

  /// Calls run(exchange, host) on a thread for each rank.
  template <typename Run>
  void run(Run&& run) {
    std::vector<std::thread> threads;
    for (int host = 0; host < static_cast<int>(ranks_.size()); ++host)
      for (int slice = 0; slice < ranks_[static_cast<std::size_t>(host)]; ++slice)
        threads.emplace_back([&, host, slice] { run(exchange(host, slice), host); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  struct Meeting {
    explicit Meeting(std::size_t count) : tensors(count), barrier(static_cast<std::ptrdiff_t>(count)) {}
    std::vector<at::Tensor> tensors;
    std::barrier<> barrier;
  };

  HostExchange exchange(int host, int slice) {
    HostExchange result{.num_hosts = static_cast<int>(ranks_.size()),
                        .host = host,
                        .weights = {},
                        .num_slices = num_slices_,
                        .slice = slice};
    for (const int ranks : ranks_) result.weights.push_back(static_cast<float>(ranks) / static_cast<float>(size_));
    Meeting& inside = *inside_[static_cast<std::size_t>(host)];
    result.share = [&inside, slice, slices = num_slices_](const at::Tensor& flat) {
      inside.tensors[static_cast<std::size_t>(slice)] = flat;
      inside.barrier.arrive_and_wait();
      const std::int64_t size = flat.numel() / slices;
      at::Tensor whole = at::empty_like(flat);
      for (int i = 0; i < slices; ++i)
        whole.narrow(0, i * size, size).copy_(inside.tensors[static_cast<std::size_t>(i)].narrow(0, i * size, size));
      inside.barrier.arrive_and_wait();
      flat.copy_(whole);
    };
    if (slice >= num_slices_ || ranks_.size() == 1) return result;
    Meeting& across = *across_[static_cast<std::size_t>(slice)];
    result.all_to_all = [&across, host](const at::Tensor& output, const at::Tensor& input) {
      across.tensors[static_cast<std::size_t>(host)] = input;
      across.barrier.arrive_and_wait();
      const std::int64_t size = input.numel() / static_cast<std::int64_t>(across.tensors.size());
      for (std::size_t i = 0; i < across.tensors.size(); ++i)
        output.narrow(0, static_cast<std::int64_t>(i) * size, size)
            .copy_(across.tensors[i].narrow(0, host * size, size));
      across.barrier.arrive_and_wait();
      return [] {};
    };
    result.all_gather = [&across, host](const at::Tensor& output, const at::Tensor& input) {
      across.tensors[static_cast<std::size_t>(host)] = input;
      across.barrier.arrive_and_wait();
      for (std::size_t i = 0; i < across.tensors.size(); ++i)
        output.narrow(0, static_cast<std::int64_t>(i) * input.numel(), input.numel()).copy_(across.tensors[i]);
      across.barrier.arrive_and_wait();
      return [] {};
    };
    return result;
  }

  std::vector<int> ranks_;
  int num_slices_ = 1000, size_ = 0;
  std::vector<std::unique_ptr<Meeting>> across_, inside_;
};

void copy(const at::Tensor& values, const at::Tensor& tensor) { tensor.copy_(values); }

/// Parameters of several sizes: a transposed one, one of a single number, one that several slices share.
std::vector<at::Tensor> make_parameters() {
  const at::Generator from = at::detail::createCPUGenerator(5);
  return {at::randn({40, 30}, from).t(), at::randn({1}, from), at::randn({3, 1000}, from),
          at::randn({700}, from, at::kDouble)};
}

/// What the inner steps of `host` add to a parameter in a round.
at::Tensor update_of(const at::Tensor& parameter, int host, int round, std::size_t index) {
  const auto seed = static_cast<std::uint64_t>(1000 * host + 10 * round) + index;
  return at::randn(parameter.sizes(), at::detail::createCPUGenerator(seed), at::kDouble) * 0.01;
}
void train(const std::vector<at::Tensor>& parameters, int host, int round) {
  for (std::size_t i = 0; i < parameters.size(); ++i)
    parameters[i].add_(update_of(parameters[i], host, round, i).to(parameters[i].scalar_type()));
}

/// The parameters of each rank after `rounds` rounds.
std::vector<std::vector<at::Tensor>> run_rounds(const std::vector<int>& ranks, const OuterMethod& method, int rounds) {
  Hosts hosts(ranks);
  std::vector<std::vector<at::Tensor>> results;
  std::mutex mutex;
  hosts.run([&](HostExchange exchange, int host) {
    at::set_num_threads(1);
    OuterOptimizer outer(method, std::move(exchange), copy);
    std::vector<at::Tensor> parameters = make_parameters();
    outer.begin(parameters);
    for (int round = 0; round < rounds; ++round) {
      train(parameters, host, round);
      outer.round(parameters);
    }
    const std::lock_guard lock(mutex);
    results.push_back(std::move(parameters));
  });
  return results;
}

void expect_equal(const std::vector<std::vector<at::Tensor>>& results) {
  for (const auto& result : results)
    for (std::size_t i = 0; i < result.size(); ++i) EXPECT_TRUE(result[i].equal(results.front()[i])) << i;
}

/// DiLoCo in float64: torch.optim.SGD with Nesterov momentum on the mean of the differences.
std::vector<at::Tensor> diloco_reference(const std::vector<int>& ranks, const DiLoCo& method, int rounds) {
  int size = 0;
  for (const int count : ranks) size += count;
  std::vector<at::Tensor> copies = make_parameters();
  for (std::size_t i = 0; i < copies.size(); ++i) {
    at::Tensor value = copies[i].to(at::kDouble), velocity = at::zeros_like(value);
    for (int round = 0; round < rounds; ++round) {
      at::Tensor mean = at::zeros_like(value);
      for (std::size_t host = 0; host < ranks.size(); ++host)
        mean -= update_of(value, static_cast<int>(host), round, i) * (static_cast<double>(ranks[host]) / size);
      velocity = method.momentum * velocity + mean;
      value = value - method.learning_rate * (mean + method.momentum * velocity);
    }
    copies[i] = value;
  }
  return copies;
}

class OuterOnHosts : public ::testing::TestWithParam<std::vector<int>> {};

TEST_P(OuterOnHosts, DiLoCoIsItsFormula) {
  const DiLoCo method{.learning_rate = 0.7, .momentum = 0.9};
  const auto results = run_rounds(GetParam(), method, 6);
  expect_equal(results);
  const std::vector<at::Tensor> expected = diloco_reference(GetParam(), method, 6);
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_LT((results.front()[i].to(at::kDouble) - expected[i]).abs().max().item<double>(), 2e-6) << i;
}

TEST_P(OuterOnHosts, SmallPayloadsStayNearTheFormulaAndEqual) {
  for (const auto& [payload, bound] :
       {std::pair{Payload::kBFloat16, 3e-4}, std::pair{Payload::kInt8, 1e-3}, std::pair{Payload::kInt4, 1.5e-2}}) {
    const DiLoCo method{.learning_rate = 0.7, .momentum = 0.9, .payload = payload};
    const auto results = run_rounds(GetParam(), method, 6);
    expect_equal(results);
    const std::vector<at::Tensor> expected = diloco_reference(GetParam(), method, 6);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_LT((results.front()[i].to(at::kDouble) - expected[i]).abs().max().item<double>(), bound)
          << i << " " << static_cast<int>(payload);
  }
}

// The mean of all that was learned arrives, except what the errors still hold. Fails without error feedback.
TEST_P(OuterOnHosts, NothingIsLost) {
  constexpr int kRounds = 20;
  for (const OuterMethod& method : {OuterMethod(DiLoCo{.learning_rate = 1, .momentum = 0, .payload = Payload::kInt4}),
                                    OuterMethod(SparseLoCo{.learning_rate = 0.5, .error_decay = 1})}) {
    const double rate = std::holds_alternative<DiLoCo>(method) ? 1 : 0.5;
    Hosts hosts(GetParam());
    std::mutex mutex;
    at::Tensor left;  // of all errors, as a mean over the hosts
    std::vector<at::Tensor> copies;
    hosts.run([&](const HostExchange& exchange, int host) {
      at::set_num_threads(1);
      OuterOptimizer outer(method, exchange, copy);
      std::vector<at::Tensor> parameters = make_parameters();
      outer.begin(parameters);
      for (int round = 0; round < kRounds; ++round) {
        train(parameters, host, round);
        outer.round(parameters);
      }
      const checkpoint::StateDict state = outer.state_dict();
      if (exchange.slice > 0) return;
      at::Tensor error =
          std::get<at::Tensor>(state.at("error")).to(at::kDouble) * exchange.weights[static_cast<std::size_t>(host)];
      if (state.contains("owner_error")) error += std::get<at::Tensor>(state.at("owner_error")).to(at::kDouble);
      const std::lock_guard lock(mutex);
      left = left.defined() ? left + error : error;
      if (host == 0) copies = parameters;
    });
    std::vector<at::Tensor> moved;
    const std::vector<at::Tensor> begun = make_parameters();
    for (std::size_t i = 0; i < begun.size(); ++i) {
      at::Tensor learned = at::zeros(begun[i].sizes(), at::kDouble);
      for (std::size_t host = 0; host < GetParam().size(); ++host)
        for (int round = 0; round < kRounds; ++round)
          learned += update_of(begun[i], static_cast<int>(host), round, i) *
                     (static_cast<double>(GetParam()[host]) / hosts.size());
      moved.push_back(((copies[i].to(at::kDouble) - begun[i].to(at::kDouble)) / rate - learned).reshape({-1}));
    }
    // `left` has the sign of a gradient: what is left would still be subtracted.
    EXPECT_LT((at::cat(moved) - left).abs().max().item<double>(), 1e-5) << method.index();
    if (GetParam().size() > 1) {
      EXPECT_GT(at::cat(moved).abs().max().item<double>(), 1e-4) << "something is rounded";
    }
  }
}

TEST_P(OuterOnHosts, StateResumesWithTheSameBits) {
  for (const OuterMethod& method : {OuterMethod(DiLoCo{.payload = Payload::kInt8}), OuterMethod(SparseLoCo{})}) {
    const auto straight = run_rounds(GetParam(), method, 6);
    Hosts hosts(GetParam());
    std::vector<std::vector<at::Tensor>> results;
    std::mutex mutex;
    hosts.run([&](const HostExchange& exchange, int host) {
      at::set_num_threads(1);
      std::vector<at::Tensor> parameters = make_parameters();
      OuterOptimizer first(method, exchange, copy);
      first.begin(parameters);
      for (int round = 0; round < 3; ++round) {
        train(parameters, host, round);
        first.round(parameters);
      }
      train(parameters, host, 3);
      OuterOptimizer second(method, exchange, copy);
      second.load_state_dict(checkpoint::clone_state(first.state_dict()), parameters);
      second.round(parameters);
      for (int round = 4; round < 6; ++round) {
        train(parameters, host, round);
        second.round(parameters);
      }
      const std::lock_guard lock(mutex);
      results.push_back(std::move(parameters));
    });
    expect_equal(results);
    for (std::size_t i = 0; i < results.front().size(); ++i)
      EXPECT_TRUE(results.front()[i].equal(straight.front()[i])) << i << " " << method.index();
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, OuterOnHosts,
                         ::testing::Values(std::vector{1}, std::vector{1, 1}, std::vector{2, 2}, std::vector{3, 1, 2},
                                           std::vector{1, 1, 1, 1, 1, 1, 1}));

// A host that joins begins with the common copy and without errors; what the part of a mean lacked is not lost.
TEST(OuterOptimizer, StateOfAnotherNumberOfHosts) {
  checkpoint::StateDict saved[2];
  Hosts two({1, 1});
  two.run([&](const HostExchange& exchange, int host) {
    at::set_num_threads(1);
    std::vector<at::Tensor> parameters = {at::zeros({600})};
    OuterOptimizer outer(DiLoCo{.payload = Payload::kInt4}, exchange, copy);
    outer.begin(parameters);
    parameters[0].add_(at::arange(600) * 1e-3 * (host + 1));
    outer.round(parameters);
    saved[host] = checkpoint::clone_state(outer.state_dict());
  });
  const auto tensor = [](const checkpoint::StateDict& state, const char* name) {
    return std::get<at::Tensor>(state.at(name));
  };
  EXPECT_TRUE(tensor(saved[0], "copy").equal(tensor(saved[1], "copy")));
  EXPECT_TRUE(tensor(saved[0], "momentum").equal(tensor(saved[1], "momentum")));
  Hosts three({1, 1, 1});
  three.run([&](const HostExchange& exchange, int host) {
    at::set_num_threads(1);
    const std::vector<at::Tensor> parameters = {at::zeros({600})};
    OuterOptimizer outer(DiLoCo{.payload = Payload::kInt4}, exchange, copy);
    outer.load_state_dict(saved[host % 2], parameters);
    const checkpoint::StateDict state = outer.state_dict();
    EXPECT_TRUE(tensor(state, "copy").equal(tensor(saved[0], "copy")));
    const at::Tensor error = tensor(state, "error");
    if (host == 2)
      EXPECT_EQ(error.abs().max().item<float>(), 0);
    else
      EXPECT_TRUE(error.allclose(tensor(saved[host], "error") + 3 * tensor(saved[host], "owner_error")));
    EXPECT_EQ(tensor(state, "owner_error").abs().max().item<float>(), 0);
  });
  OuterOptimizer other(DiLoCo{}, {}, copy);
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { other.load_state_dict(saved[0], {at::zeros({7})}); }),
              HasSubstr("another model's \"copy\": 600 numbers; expected 7"));
}

// A parameter of 16 bits that nothing has trained does not move by its own rounding, and the copy keeps what it rounds.
TEST(OuterOptimizer, ParametersOf16Bits) {
  const std::vector<at::Tensor> parameters = {at::full({300}, 1.0 / 3, at::kBFloat16)};
  OuterOptimizer outer(DiLoCo{.learning_rate = 1, .momentum = 0}, {}, copy);
  outer.begin(parameters);
  const at::Tensor before = parameters[0].clone();
  outer.round(parameters);
  EXPECT_TRUE(parameters[0].equal(before));
  checkpoint::StateDict state = outer.state_dict();
  const at::Tensor copy_of = std::get<at::Tensor>(state["copy"]);
  EXPECT_TRUE(copy_of.equal(before.to(at::kFloat)));
  OuterOptimizer slow(DiLoCo{.learning_rate = 0.001, .momentum = 0}, {}, copy);
  slow.begin(parameters);
  for (int round = 0; round < 4; ++round) {
    parameters[0].add_(0.01);
    slow.round(parameters);
    EXPECT_TRUE(parameters[0].equal(before)) << "a step of 1e-5 is less than half of the distance of two numbers";
  }
  EXPECT_GT((std::get<at::Tensor>(slow.state_dict()["copy"]) - before.to(at::kFloat)).min().item<float>(), 3e-5F);
}

TEST(OuterOptimizer, ComplexParameters) {
  // The real one before it has an odd number of elements.
  const std::vector<at::Tensor> parameters = {at::zeros({2, 3}, at::kComplexFloat), at::zeros({3}),
                                              at::zeros({2}, at::kComplexDouble), at::zeros({0})};
  OuterOptimizer outer(DiLoCo{.learning_rate = 0.5, .momentum = 0}, {}, copy);
  outer.begin(parameters);
  parameters[0].add_(c10::complex<double>(2, -4));
  outer.round(parameters);
  EXPECT_TRUE(parameters[0].equal(at::full({2, 3}, c10::complex<float>(1, -2), at::kComplexFloat)));
  EXPECT_TRUE(parameters[2].equal(at::zeros({2}, at::kComplexDouble)));
}

TEST(OuterOptimizer, RateDependsOnTheNumberOfHosts) {
  for (const auto& [hosts, rate] : {std::pair{1, 0.5}, {2, 0.6}, {3, 0.7}, {4, 0.7}, {8, 0.9}}) {
    Hosts all(std::vector<int>(static_cast<std::size_t>(hosts), 1));
    all.run([&, rate = rate](HostExchange exchange, int) {
      at::set_num_threads(1);
      const std::vector<at::Tensor> parameters = {at::zeros({1})};
      OuterOptimizer outer(DiLoCo{.momentum = 0}, std::move(exchange), copy);
      outer.begin(parameters);
      parameters[0].add_(1);
      outer.round(parameters);
      EXPECT_NEAR(parameters[0].item<float>(), rate, 1e-6);
    });
  }
}

TEST(OuterOptimizer, OptionsOutOfRangeAreRefused) {
  const auto message = [](const OuterMethod& method) {
    return tests::message_of<base::UsageError>([&] { OuterOptimizer(method, {}, copy); });
  };
  EXPECT_THAT(message(DiLoCo{.learning_rate = -1}), HasSubstr("learning_rate is -1.000000; expected a finite number"));
  EXPECT_THAT(message(DiLoCo{.momentum = 1}), HasSubstr("momentum is 1.000000; expected 0 or more, less than 1"));
  EXPECT_THAT(message(DiLoCo{.warm_up = -1}), HasSubstr("warm_up is -1; expected 0 or more"));
  EXPECT_THAT(message(SparseLoCo{.learning_rate = 0}),
              HasSubstr("learning_rate is 0.000000; expected a finite number"));
  EXPECT_THAT(message(SparseLoCo{.error_decay = 1.5}), HasSubstr("error_decay is 1.500000; expected 0 to 1"));
  EXPECT_THAT(message(SparseLoCo{.keep = 5000}), HasSubstr("keep is 5000; expected 1 to 4096"));
}

TEST(HostAverager, WarmUpTakesMeansAndThenBegins) {
  HostAverager averager(3, DiLoCo{.learning_rate = 0.5, .momentum = 0, .warm_up = 2}, {}, copy);
  const std::vector<at::Tensor> parameters = {at::zeros({4})};
  for (int step = 0; step < 2; ++step) {
    EXPECT_FALSE(averager.must_begin());
    averager.count_reduction();
    EXPECT_TRUE(averager.is_due()) << "in the warm-up after each step";
    parameters[0].add_(1);
    averager.average(parameters, {}, true);
  }
  EXPECT_EQ(parameters[0][0].item<float>(), 2);
  EXPECT_FALSE(averager.must_begin()) << "it has begun, when the hosts were equal";
  for (int step = 0; step < 3; ++step) {
    EXPECT_FALSE(averager.is_due());
    averager.count_reduction();
    parameters[0].add_(1);
  }
  EXPECT_TRUE(averager.is_due());
  averager.average(parameters, {}, true);
  EXPECT_EQ(parameters[0][0].item<float>(), 3.5);
  averager.average(parameters, {}, true);
  EXPECT_EQ(parameters[0][0].item<float>(), 3.5) << "without a step there is no round";
  parameters[0].add_(1);
  const std::vector<at::Tensor> own = averager.swap_in_copy(parameters);
  EXPECT_EQ(parameters[0][0].item<float>(), 3.5) << "what the hosts have in common";
  averager.put_back(own, parameters);
  EXPECT_EQ(parameters[0][0].item<float>(), 4.5);
}

}  // namespace
}  // namespace lockstep::ddp::outer_optimizer_test
