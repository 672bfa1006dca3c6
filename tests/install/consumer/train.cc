// The program of the README with a small model: two ranks with different batches end with bit-equal weights.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  lockstep::Group world = lockstep::init();
  torch::manual_seed(world.rank());  // different on purpose: DDP broadcasts rank 0's initial weights
  torch::nn::Linear net(4, 2);
  lockstep::DistributedDataParallel ddp(*net, world);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    net->forward(torch::randn({8, 4})).square().mean().backward();
    optimizer.step();
  }
  std::cout << "weights of rank " << world.rank() << " of " << world.size() << ": " << net->weight.sum().item<double>()
            << std::endl;
}
