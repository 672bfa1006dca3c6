// The model and data that the programs of several pages train.
#pragma once

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <stdexcept>
#include <string>

inline torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(8, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
}

/// Returns a batch, which differs on each rank and in each step.
inline torch::Tensor batch(const lockstep::Group& world, int step) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + world.rank()));
  return torch::randn({16, 8});
}

inline void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("expected: " + what);
}
