// Compares the optimizers and the gradient clipping of lockstep::optim with those of torch, in one process:
//   bench_optim [rounds] [threads]
// In each round, each implementation runs once, in alternating order. A time is the median over the rounds; a ratio is
// the median of the ratios of the rounds.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>

namespace {

using Clock = std::chrono::steady_clock;

struct Shape {
  const char* name;
  std::int64_t count, size;
};
constexpr Shape kShapes[] = {{"300 x 64", 300, 64}, {"160 x 10 000", 160, 10000}, {"1 x 1 600 000", 1, 1600000}};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Shape& shape) {
    torch::manual_seed(1);
    for (std::int64_t i = 0; i < shape.count; ++i)
      register_parameter("p" + std::to_string(i), torch::randn({shape.size}));
    for (at::Tensor& one : parameters()) one.mutable_grad() = torch::randn_like(one);
  }
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

double microseconds(const std::function<void()>& run) {
  const auto begin = Clock::now();
  run();
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

/// Compares two functions. `before` runs before each of them and is not measured.
void compare(
    const std::string& what, const Shape& shape, int rounds, const std::function<void()>& ours,
    const std::function<void()>& torchs, const std::function<void()>& before = [] {}) {
  std::vector<double> our_times, torch_times, ratios;
  for (int round = -10; round < rounds; ++round) {
    double our = 0, other = 0;
    for (int i = 0; i < 2; ++i) {
      before();
      ((round + i) % 2 == 0 ? our : other) = microseconds((round + i) % 2 == 0 ? ours : torchs);
    }
    if (round < 0) continue;  // warm up
    our_times.push_back(our);
    torch_times.push_back(other);
    ratios.push_back(other / our);
  }
  std::printf("%-16s %-14s %9.1f us %9.1f us %7.2f\n", what.c_str(), shape.name, median(our_times), median(torch_times),
              median(ratios));
  std::fflush(stdout);  // so that an interrupted run has printed its results
}

void expect_equal(const NetImpl& ours, const NetImpl& torchs, const std::string& what) {
  for (std::size_t i = 0; i < ours.parameters().size(); ++i)
    if (!torch::allclose(ours.parameters()[i], torchs.parameters()[i], 1e-6, 1e-6))
      throw std::runtime_error(what + ": results differ");
}

template <typename Ours, typename Torchs, typename OurOptions, typename TorchOptions>
void compare_optimizers(const lockstep::Group& world, const std::string& what, const Shape& shape, int rounds,
                        const OurOptions& our_options, const TorchOptions& torch_options) {
  NetImpl our_net(shape), torch_net(shape);
  lockstep::DistributedDataParallel ddp(our_net, world);
  Ours ours(ddp, our_options);
  Torchs torchs(torch_net.parameters(), torch_options);
  for (int step = 0; step < 5; ++step) {
    ours.step();
    torchs.step();
  }
  expect_equal(our_net, torch_net, what);
  compare(what, shape, rounds, [&] { ours.step(); }, [&] { torchs.step(); });
}

void compare_clipping(const Shape& shape, int rounds) {
  NetImpl net(shape);
  std::vector<at::Tensor> parameters = net.parameters(), saved;
  for (const at::Tensor& one : parameters) saved.push_back(one.grad().clone());
  const auto restore = [&] {
    for (std::size_t i = 0; i < saved.size(); ++i) parameters[i].mutable_grad().copy_(saved[i]);
  };
  compare(
      "clip_grad_norm", shape, rounds, [&] { lockstep::optim::clip_grad_norm(parameters, 1); },
      [&] { torch::nn::utils::clip_grad_norm_(parameters, 1); }, restore);
  compare(
      "clip_grad_value", shape, rounds, [&] { lockstep::optim::clip_grad_value(parameters, 0.5); },
      [&] { torch::nn::utils::clip_grad_value_(parameters, 0.5); }, restore);
}

void compare_ema(const Shape& shape, int rounds) {
  NetImpl net(shape);
  lockstep::optim::Ema ema(net);
  std::vector<at::Tensor> parameters = net.parameters(), averages;
  for (const at::Tensor& one : parameters) averages.push_back(one.detach().clone());
  const torch::NoGradGuard no_grad;
  compare(
      "Ema", shape, rounds, [&] { ema.update(); },
      [&] {
        for (std::size_t i = 0; i < averages.size(); ++i) averages[i].mul_(0.999).add_(parameters[i], 0.001);
      });
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::stoi(argv[1]) : 200;
  if (argc > 2) at::set_num_threads(std::stoi(argv[2]));
  lockstep::Group world = lockstep::init();
  std::printf("%d threads, %d rounds\n%-16s %-14s %12s %12s %7s\n", at::get_num_threads(), rounds, "", "parameters",
              "lockstep", "torch", "ratio");
  namespace ours = lockstep::optim;
  namespace torchs = torch::optim;
  for (const Shape& shape : kShapes) {
    compare_clipping(shape, rounds);
    compare_ema(shape, rounds);
    compare_optimizers<ours::SGD, torchs::SGD>(world, "SGD", shape, rounds, ours::SGDOptions{.lr = 1e-3},
                                               torchs::SGDOptions(1e-3));
    compare_optimizers<ours::SGD, torchs::SGD>(world, "SGD, momentum", shape, rounds,
                                               ours::SGDOptions{.lr = 1e-3, .momentum = 0.9},
                                               torchs::SGDOptions(1e-3).momentum(0.9));
    compare_optimizers<ours::AdamW, torchs::AdamW>(world, "AdamW", shape, rounds, ours::AdamWOptions{},
                                                   torchs::AdamWOptions(1e-3));
    compare_optimizers<ours::Adagrad, torchs::Adagrad>(world, "Adagrad", shape, rounds, ours::AdagradOptions{},
                                                       torchs::AdagradOptions(1e-2));
  }
}
