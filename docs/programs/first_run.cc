// The program of docs/guide/01-first-run.md.
// docs: begin all
#include <lockstep/launch/launch.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

int main(int argc, char** argv) try {
  lockstep::launch({.ranks = 2}, argc, argv);  // without a launcher: starts itself with `lockstep run -n 2`
  lockstep::Group world = lockstep::init();

  const torch::Tensor number = torch::tensor({world.rank() + 1.0});
  world.all_reduce(number);
  std::cout << "rank " << world.rank() << " of " << world.size() << ": the sum is " << number.item<double>()
            << std::endl;
} catch (const lockstep::Error& error) {
  std::cerr << "first_run: " << error.what() << std::endl;
  return lockstep::base::exit_code(error.cause());
}
// docs: end all
