#include "lockstep/data/seed.h"

#include <torch/utils.h>

#include <cstdlib>

namespace lockstep::data {

void seed_everything(std::uint64_t seed) {
  torch::manual_seed(seed);
  std::srand(static_cast<unsigned>(seed));
}

}  // namespace lockstep::data
