// The program of the README on a small model: two ranks that saw different batches end with the same bits.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  lockstep::Group world = lockstep::init();
  torch::manual_seed(world.rank());  // on purpose: the start is the same on every rank all the same
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
