// Trains three steps with DataParallel and prints its memory by device as lines of JSON. Started by proof.py.
//   bench_gpu_data_parallel DEVICE...     such as cuda:0, or cpu cpu
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>
#include <nlohmann/json.hpp>

namespace {

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { NetImpl::reset(); }
  void reset() override {
    using Conv = torch::nn::Conv2dOptions;
    body = register_module(
        "body", torch::nn::Sequential(torch::nn::Conv2d(Conv(3, 32, 3).padding(1)), torch::nn::BatchNorm2d(32),
                                      torch::nn::ReLU(), torch::nn::MaxPool2d(4), torch::nn::Flatten(),
                                      torch::nn::Linear(32 * 64, 10)));
  }
  at::Tensor forward(const at::Tensor& x) { return body->forward(x); }
  torch::nn::Sequential body{nullptr};
};
TORCH_MODULE(Net);

int run(int argc, char** argv) {
  const lockstep::Group world = lockstep::init();
  std::vector<at::Device> devices;
  for (int i = 1; i < argc; ++i) devices.emplace_back(argv[i]);
  if (devices.empty()) throw lockstep::UsageError("usage: bench_gpu_data_parallel DEVICE...");
  Net net;
  net->to(devices[0]);
  lockstep::DataParallel parallel(net, {.devices = devices});
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    parallel(torch::randn({32, 3, 32, 32}, devices[0])).pow(2).mean().backward();
    optimizer.step();
  }
  for (const auto& one : parallel.device_usage())
    std::cout << nlohmann::json{{"device", one.device.str()},
                                {"replicas", one.replicas},
                                {"samples", one.samples},
                                {"peak_bytes", one.peak_bytes ? nlohmann::json(*one.peak_bytes) : nlohmann::json()}}
              << '\n';
  std::cout << lockstep::nn::format_device_usage(parallel.device_usage());
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return lockstep::main(argc, argv, run); }
