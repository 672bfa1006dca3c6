// A rank of a job that trains on GPUs, in which one rank has a fault. bench/gpu/failures_stage.py starts it, on a real
// or a fake GPU.
//   procs_gpu_fault_probe FAULT RANK STEP
//
// In step STEP, RANK has FAULT:
//   none      nothing; the job must be ended from outside
//   desync    calls a barrier instead of the all_reduce
//   memory    allocates more memory than the GPU has
//   device    uses a GPU that does not exist
// Each rank prints "PID is training" after step 5, and trains until it is ended.
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "lockstep/comm/init.h"
#include "lockstep/comm/uncaught_exception.h"
#include "lockstep/ddp/ddp.h"

namespace {

using lockstep::comm::Group;

/// A weight whose gradient is twice the weight of the loss: what a fake GPU can compute.
struct Model : torch::nn::Module {
  explicit Model(at::Device device) : weight(register_parameter("weight", torch::ones({1 << 16}).to(device))) {}
  at::Tensor weight;
};

void inject_fault(const std::string& fault, const Group& world) {
  const at::TensorOptions gpu = at::TensorOptions(world.device()).dtype(at::kByte);
  if (fault == "desync") world.barrier();
  if (fault == "memory") at::empty({std::int64_t{1} << 50}, gpu);
  if (fault == "device") at::empty({1}, gpu.device(at::Device(at::kCUDA, 100)));
}

int run(int argc, char** argv) {
  if (argc != 4) throw lockstep::base::UsageError("usage: procs_gpu_fault_probe FAULT RANK STEP");
  const std::string fault = argv[1];
  const int rank = std::atoi(argv[2]), fault_step = std::atoi(argv[3]);
  Group world = lockstep::comm::init({.device = "cuda"});
  Model model(world.device());
  const lockstep::ddp::DistributedDataParallel ddp(model, world);
  for (int step = 0;; ++step) {
    if (model.weight.grad().defined()) model.weight.mutable_grad().zero_();
    (model.weight * 2).backward(torch::ones({1 << 16}).to(world.device()));
    {
      const at::NoGradGuard no_grad;
      model.weight.add_(model.weight.grad(), -0.001);
    }
    if (world.rank() == rank && step == fault_step) inject_fault(fault, world);
    const at::Tensor loss = torch::ones({1}).to(world.device());
    world.all_reduce(loss, lockstep::comm::ReduceOp::kMean, {.name = "loss"});
    loss.cpu();
    world.step();
    if (step == 5) {
      std::printf("%d is training\n", static_cast<int>(::getpid()));
      std::fflush(stdout);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

int main(int argc, char** argv) { return lockstep::comm::main(argc, argv, run); }
