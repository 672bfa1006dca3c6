// Compares a training step on two cores in one process, with DataParallel on two replicas, and with
// DistributedDataParallel on two ranks.
//   lockstep run -n 2 --bind none -- bench_data_parallel
// The variants are measured in turns in one run. While rank 0 runs alone, rank 1 sleeps. The table is in
// docs/how-to/sync-batch-norm.md.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iomanip>
#include <iostream>
#include <map>
#include <thread>

namespace {

constexpr int kRounds = 15, kSteps = 6;
constexpr std::int64_t kBatch = 128;

struct CnnImpl : torch::nn::Cloneable<CnnImpl> {
  CnnImpl() { CnnImpl::reset(); }
  void reset() override {
    using Conv = torch::nn::Conv2dOptions;
    body = register_module(
        "body", torch::nn::Sequential(
                    torch::nn::Conv2d(Conv(3, 32, 3).padding(1)), torch::nn::BatchNorm2d(32), torch::nn::ReLU(),
                    torch::nn::MaxPool2d(2), torch::nn::Conv2d(Conv(32, 64, 3).padding(1)), torch::nn::BatchNorm2d(64),
                    torch::nn::ReLU(), torch::nn::MaxPool2d(2), torch::nn::Flatten(), torch::nn::Linear(64 * 64, 10)));
  }
  at::Tensor forward(const at::Tensor& x) { return body->forward(x.view({-1, 3, 32, 32})); }
  torch::nn::Sequential body{nullptr};
};
TORCH_MODULE(Cnn);

struct MlpImpl : torch::nn::Cloneable<MlpImpl> {
  MlpImpl() { MlpImpl::reset(); }
  void reset() override {
    body = register_module(
        "body", torch::nn::Sequential(torch::nn::Linear(3072, 1024), torch::nn::ReLU(), torch::nn::Linear(1024, 1024),
                                      torch::nn::ReLU(), torch::nn::Linear(1024, 10)));
  }
  at::Tensor forward(const at::Tensor& x) { return body->forward(x); }
  torch::nn::Sequential body{nullptr};
};
TORCH_MODULE(Mlp);

using Clock = std::chrono::steady_clock;
using Forward = std::function<at::Tensor(const at::Tensor&)>;

struct Times {
  std::vector<double> forward_ms, step_ms;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Measures kSteps steps, after one step to warm up.
void measure_steps(const Forward& forward, torch::optim::Optimizer& optimizer, std::int64_t samples, Times& times) {
  const at::Tensor x = torch::randn({samples, 3072});
  const at::Tensor y = torch::randint(10, {samples});
  for (int step = 0; step <= kSteps; ++step) {
    const auto begin = Clock::now();
    optimizer.zero_grad();
    const at::Tensor loss = torch::cross_entropy_loss(forward(x), y);
    const auto between = Clock::now();
    loss.backward();
    optimizer.step();
    const auto end = Clock::now();
    if (step == 0) continue;
    times.forward_ms.push_back(std::chrono::duration<double, std::milli>(between - begin).count());
    times.step_ms.push_back(std::chrono::duration<double, std::milli>(end - begin).count());
  }
}

/// Runs `work` on rank 0, on both cores. The other ranks poll every 20 ms for its end, so that they use no CPU time.
void run_on_rank_0(const lockstep::Group& world, const std::filesystem::path& done, const std::function<void()>& work) {
  world.barrier();
  if (world.rank() == 0) {
    at::set_num_threads(2);
    work();
    at::set_num_threads(1);
    std::filesystem::create_directory(done);
  }
  while (!std::filesystem::exists(done)) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  world.barrier();
  if (world.rank() == 0) std::filesystem::remove(done);
}

template <typename Net>
void measure(const std::string& name, bool has_batch_norm, const lockstep::Group& world,
             const std::filesystem::path& done) {
  Net together, synced, single, parallel;
  if (has_batch_norm) lockstep::convert_sync_batch_norm(synced, world);
  lockstep::DistributedDataParallel ddp(together, world), synced_ddp(synced, world);
  lockstep::nn::DataParallel replicas(parallel, {.devices = {at::kCPU, at::kCPU}});
  torch::optim::SGD of_together(together->parameters(), 1e-3), of_synced(synced->parameters(), 1e-3),
      of_single(single->parameters(), 1e-3), of_parallel(parallel->parameters(), 1e-3);
  std::map<std::string, Times> times;
  std::vector<double> clone_ms;
  for (int round = 0; round < kRounds; ++round) {
    world.barrier();
    measure_steps([&](const at::Tensor& x) { return together->forward(x); }, of_together, kBatch / world.size(),
                  times["DDP"]);
    if (has_batch_norm)
      measure_steps([&](const at::Tensor& x) { return synced->forward(x); }, of_synced, kBatch / world.size(),
                    times["DDP, batch norm synced"]);
    run_on_rank_0(world, done, [&] {
      const auto no_sync = ddp.no_sync(),
                 synced_no_sync = synced_ddp.no_sync();  // the backward() calls below are not collective
      measure_steps([&](const at::Tensor& x) { return single->forward(x); }, of_single, kBatch, times["one process"]);
      measure_steps([&](const at::Tensor& x) { return replicas(x); }, of_parallel, kBatch, times["DataParallel"]);
      const auto begin = Clock::now();
      const auto cloned = parallel->clone();
      clone_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
    });
  }
  if (world.rank() != 0) return;
  std::cout << name << ", batch " << kBatch << ", medians of " << kRounds * kSteps << " steps in ms\n"
            << std::fixed << std::setprecision(2);
  for (const auto& [variant, measured] : times)
    std::cout << "  " << std::left << std::setw(26) << variant << "forward " << median(measured.forward_ms) << "  step "
              << median(measured.step_ms) << '\n';
  std::cout << "  one clone() of the module " << median(clone_ms) << '\n'
            << lockstep::nn::format_device_usage(replicas.device_usage()) << std::endl;
}

int run(int, char**) {
  lockstep::Group world = lockstep::init();
  at::set_num_threads(1);
  const auto done = std::filesystem::temp_directory_path() /
                    world.broadcast_bytes("bench_data_parallel." + std::to_string(::getpid()), 0);
  measure<Mlp>("MLP of 4.2 M parameters", false, world, done);
  measure<Cnn>("CNN of 60 thousand parameters", true, world, done);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return lockstep::main(argc, argv, run); }
