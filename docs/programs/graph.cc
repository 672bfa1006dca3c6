// The program of docs/how-to/cuda-graphs.md. Without a GPU it runs unchanged on the CPU.
#include <lockstep/cuda/graphed_step.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  lockstep::Group world = lockstep::init();
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(16, 32), torch::nn::ReLU(), torch::nn::Linear(32, 4));
  net->to(world.device());
  const auto sample = [](std::size_t i) {
    const auto kind = static_cast<std::int64_t>(i % 4);
    return lockstep::data::Example{torch::ones({16}) * static_cast<double>(kind), torch::tensor(kind)};
  };
  torch::Tensor last;

  // docs: begin copies
  auto loader =
      lockstep::data::make_loader(640, sample, world, {.batch_size = 32, .num_workers = 2, .device = world.device()});
  // docs: end copies

  // docs: begin graph
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  lockstep::cuda::GraphedStep step(world.device(),
                                   [&](const std::vector<torch::Tensor>& batch) -> std::vector<torch::Tensor> {
                                     optimizer.zero_grad();
                                     torch::Tensor loss;
                                     {
                                       const lockstep::Autocast autocast({.device = world.device().type()});
                                       loss = torch::nn::functional::cross_entropy(net->forward(batch[0]), batch[1]);
                                     }
                                     loss.backward();
                                     optimizer.step();
                                     return {loss.detach()};
                                   });

  for (int epoch = 0; epoch < 3; ++epoch)
    for (auto& batch : loader) last = step({batch.data, batch.target})[0];
  // docs: end graph

  std::cout << "loss " << last.item<double>() << " on " << world.device() << ", " << step.stats().replayed << " of "
            << step.stats().replayed + step.stats().eager << " steps replayed from a graph\n";
  if (last.item<double>() > 1) throw std::runtime_error("the loss is too high");
}
