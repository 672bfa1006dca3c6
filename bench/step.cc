// One training step of an MLP on every rank, by Lockstep, by PyTorch's own c10d::Reducer driven from C++, or by nobody.
// Started by bench/compare_step.py under `lockstep run`, all in the same way, at the same time: each line of the named pipe
// TURNS.<rank> says how many steps to run now, and rank 0 prints their seconds as a line of JSON. Ends with the pipe.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>

#include "lockstep/base/env.h"
#include "lockstep/base/parse.h"

namespace {

struct Model {
  const char* name;
  std::int64_t width;
  int layers;
  std::int64_t batch;
};
constexpr Model kModels[] = {{"mlp-6m", 1024, 6, 64}, {"mlp-50m", 4096, 3, 16}};

torch::nn::Sequential make_net(const Model& model) {
  torch::nn::Sequential net;
  for (int i = 0; i < model.layers; ++i) {
    net->push_back(torch::nn::Linear(model.width, model.width));
    if (i + 1 < model.layers) net->push_back(torch::nn::ReLU());
  }
  return net;
}

/// What is called around forward() and backward().
struct Sync {
  std::function<void()> before_forward = [] {};
  std::function<void(const at::Tensor&)> before_backward = [](const at::Tensor&) {};
};

/// PyTorch's DDP as its Python class drives it: broadcast at the start, buckets of 1 and 25 MiB, rebuilt after the first step.
class Reducer {
 public:
  Reducer(torch::nn::Module& net, bool bucket_views) {
    const auto& env = lockstep::base::Env::process();
    const int rank = static_cast<int>(lockstep::base::parse_int(env.rank.value_or("0")).value_or(0));
    const int size = static_cast<int>(lockstep::base::parse_int(env.world_size.value_or("1")).value_or(1));
    c10d::TCPStoreOptions store_options;
    store_options.port = static_cast<std::uint16_t>(lockstep::base::parse_int(env.master_port.value_or("0")).value_or(0));
    store_options.isServer = rank == 0;
    auto store = c10::make_intrusive<c10d::TCPStore>(env.master_addr.value_or("127.0.0.1"), store_options);
    auto options = c10d::ProcessGroupGloo::Options::create();
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
    group_ = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
    group_->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
    group_->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    for (at::Tensor& p : net.parameters()) {
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> one{p.detach()};
      gloo->broadcast(one)->wait();  // bounded: by the process group's own timeout
    }
    const auto parameters = net.parameters();
    std::unordered_map<std::size_t, std::string> names;
    for (const auto& item : net.named_parameters()) names[names.size()] = item.key();
    const std::vector<std::size_t> caps{std::size_t{1} << 20, std::size_t{25} << 20};
    auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(parameters, caps, std::vector<bool>(parameters.size(), false));
    std::reverse(buckets.begin(), buckets.end());
    reducer_ = std::make_unique<c10d::Reducer>(parameters, buckets, group_, std::vector<bool>(parameters.size(), false),
                                               std::int64_t{25} << 20, /*find_unused_parameters=*/false, bucket_views, names,
                                               std::int64_t{1} << 20, /*skip_all_reduce_unused_params=*/false,
                                               /*use_python_reducer=*/false, std::vector<std::int64_t>{});
  }
  Sync sync() {
    return {[this] {
              reducer_->prepare_for_forward();
              reducer_->rebuild_buckets();
            },
            [this](const at::Tensor& output) { reducer_->prepare_for_backward({output}); }};
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::unique_ptr<c10d::Reducer> reducer_;
};

void run(const std::string& impl, const Model& model, const std::string& turns) {
  torch::manual_seed(1);
  auto net = make_net(model);
  std::unique_ptr<lockstep::DistributedDataParallel> ddp;
  std::unique_ptr<Reducer> reducer;
  Sync sync;
  if (impl == "lockstep") {
    ddp = std::make_unique<lockstep::DistributedDataParallel>(net, lockstep::init());
  } else if (impl != "local") {
    reducer = std::make_unique<Reducer>(*net, impl == "reducer-views");
    sync = reducer->sync();
  }
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  const at::Tensor x = torch::randn({model.batch, model.width});
  const at::Tensor y = torch::randn({model.batch, model.width});
  const std::string rank = lockstep::base::Env::process().rank.value_or("0");
  std::ifstream pipe(turns + "." + rank);
  for (int steps = 0; pipe >> steps;) {
    std::string seconds;
    for (int step = 0; step < steps; ++step) {
      const auto begin = std::chrono::steady_clock::now();
      net->zero_grad();  // Optimizer::zero_grad() would detach the reducer's bucket views, which throws
      sync.before_forward();
      const at::Tensor out = net->forward(x);
      sync.before_backward(out);
      torch::mse_loss(out, y).backward();
      optimizer.step();
      seconds += (step == 0 ? "" : ", ") + std::to_string(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    if (rank == "0") {
      std::printf("{\"impl\": \"%s\", \"model\": \"%s\", \"seconds\": [%s]}\n", impl.c_str(), model.name, seconds.c_str());
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string impl = argc > 1 ? argv[1] : "";
  for (const Model& model : kModels)
    if (argc == 4 && std::string(argv[2]) == model.name && (impl == "lockstep" || impl == "reducer" || impl == "reducer-views" || impl == "local")) {
      run(impl, model, argv[3]);
      return 0;
    }
  std::fprintf(stderr, "usage: bench_step lockstep|reducer|reducer-views|local mlp-6m|mlp-50m TURNS\n");
  return 64;
}
