// The smallest program: each rank joins the job, and all_reduce() replaces a tensor on every rank by the sum over all
// ranks. After `make build`, run it on four ranks from the root of the repository:
//   build/release/bin/lockstep run -n 4 build/release/bin/01_all_reduce
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

#include "examples/arguments.h"

namespace {

int run(int argc, char** argv) {
  examples::Arguments("Adds the numbers of all ranks. Start it with: lockstep run -n 4 01_all_reduce")
      .parse(argc, argv);
  lockstep::Group world = lockstep::init();

  const torch::Tensor numbers = torch::full({3}, world.rank() + 1);
  world.all_reduce(numbers);

  std::cout << "rank " << world.rank() << " of " << world.size() << ": the sum is " << numbers[0].item<int>()
            << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return lockstep::main(argc, argv, run); }
