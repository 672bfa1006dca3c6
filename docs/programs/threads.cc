// The program of docs/how-to/threads.md: operations of a second thread.
//   lockstep run -n 2 docs_threads
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <thread>

#include "docs/programs/small_training.h"

int main() {
  lockstep::Group world = lockstep::init();
  torch::Tensor sums = torch::ones({2});
  // docs: begin second
  lockstep::Group for_metrics = world.split(0);  // all ranks call it, in the same order as other operations
  std::thread metrics([&] { for_metrics.all_reduce(sums); });
  // docs: end second
  torch::Tensor other = torch::ones({3});
  world.all_reduce(other);  // at the same time
  metrics.join();
  expect(sums[0].item<int>() == world.size() && other[0].item<int>() == world.size(), "both sums");
}
