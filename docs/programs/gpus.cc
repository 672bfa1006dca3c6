// The program of docs/how-to/gpus.md. Without a GPU it runs on the CPU.
//   lockstep run -n 2 docs_gpus
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  // docs: begin train
  lockstep::Group world = lockstep::init();  // selects the GPU of this rank; call it before any use of GPUs
  torch::manual_seed(world.rank());          // after init(), because it initializes CUDA
  torch::nn::Linear net(4, 2);
  net->to(world.device());  // "cuda:K", or "cpu" without a GPU
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), 0.1);

  for (int step = 0; step < 3; ++step) {
    const torch::Tensor x = torch::randn({8, 4}).to(world.device());
    optimizer.zero_grad();
    net->forward(x).pow(2).mean().backward();  // gradients are reduced on the GPU during backward()
    optimizer.step();
  }
  // docs: end train
  const torch::Tensor weight = net->weight.detach().clone();
  world.broadcast(weight, 0);
  if (!weight.equal(net->weight)) throw std::runtime_error("ranks differ");
  if (world.rank() == 0) std::cout << "trained on " << world.device() << '\n';
}
