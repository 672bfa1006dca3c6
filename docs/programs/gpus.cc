// The program of docs/15-gpus.md; without a GPU it runs on the CPU.
//   lockstep run -n 2 docs_gpus
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  // docs: begin train
  lockstep::Group world = lockstep::init();  // takes a GPU for this rank, before anything is on one
  torch::manual_seed(world.rank());          // after init(): it asks libtorch for GPUs
  torch::nn::Linear net(4, 2);
  net->to(world.device());  // "cuda:K", or "cpu" where there is none
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), 0.1);

  for (int step = 0; step < 3; ++step) {
    const torch::Tensor x = torch::randn({8, 4}).to(world.device());
    optimizer.zero_grad();
    net->forward(x).pow(2).mean().backward();  // gradients are summed on the GPU while backward() goes on
    optimizer.step();
  }
  // docs: end train
  const torch::Tensor weight = net->weight.detach().clone();
  world.broadcast(weight, 0);
  if (!weight.equal(net->weight)) throw std::runtime_error("ranks differ");
  if (world.rank() == 0) std::cout << "trained on " << world.device() << '\n';
}
