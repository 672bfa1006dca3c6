// A rank that trains. train_probe asks: until somebody asks all to stop. train_probe slow RANK: 200 steps, of which RANK's take longer.
// train_probe injected: 200 steps, with all checks.
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "lockstep/comm/failure.h"
#include "lockstep/comm/init.h"
#include "lockstep/ddp/ddp.h"

namespace {

int run(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "";
  const int slow = argc > 2 ? std::atoi(argv[2]) : -1;
  lockstep::comm::Group world = lockstep::comm::init();
  torch::nn::Linear net(8, 8);
  lockstep::ddp::DistributedDataParallel ddp(net, world, {.compare_every = 10, .check_finite = true});
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  const bool asks = how == "asks";
  if (asks) world.stop_requested();  // from here on signals are wishes
  std::printf("rank %d pid %d\n", world.rank(), static_cast<int>(::getpid()));
  std::fflush(stdout);
  const int steps = asks ? 100000 : 200;
  for (int step = 0; step < steps; ++step) {
    std::this_thread::sleep_for(std::chrono::milliseconds(world.rank() == slow ? 40 : 5));
    optimizer.zero_grad();
    net->forward(torch::ones({4, 8}) * (world.rank() + 1)).sum().backward();
    optimizer.step();
    if (asks && world.stop_requested()) {
      std::printf("left after step %d with %.9g\n", step, net->weight.sum().item<double>());
      return lockstep::comm::kPreemptedExitCode;
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return lockstep::comm::main(argc, argv, run); }
