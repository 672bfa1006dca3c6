#include "lockstep/train/random_state.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <cstring>
#include <mutex>

#include "lockstep/data/sample_rng.h"
#include "lockstep/data/seed.h"

namespace lockstep::training {
namespace {

at::Tensor get_generator_state(at::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(at::Device device, const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state.cpu().contiguous());
}

}  // namespace

checkpoint::StateDict RandomState::state_dict() const {
  checkpoint::StateDict state = {{"cpu", get_generator_state(at::kCPU)}};
  if (!device_.is_cpu()) state["device"] = get_generator_state(device_);
  return state;
}

void RandomState::load_state_dict(const checkpoint::StateDict& state) {
  set_generator_state(at::kCPU, checkpoint::value_of<at::Tensor>(state, "cpu"));
  if (!device_.is_cpu() && state.contains("device"))
    set_generator_state(device_, checkpoint::value_of<at::Tensor>(state, "device"));
}

void RandomState::derive(const checkpoint::StateDict& state, std::uint64_t rank) {
  const at::Tensor bytes = checkpoint::value_of<at::Tensor>(state, "cpu").contiguous();
  std::uint64_t seed = rank;
  const auto size = static_cast<std::size_t>(bytes.nbytes());
  for (std::size_t at = 0; at + sizeof seed <= size; at += sizeof seed) {
    std::uint64_t word = 0;
    std::memcpy(&word, static_cast<const char*>(bytes.const_data_ptr()) + at, sizeof word);
    seed = data::mix64(seed ^ word);
  }
  data::seed_everything(seed);
}

}  // namespace lockstep::training
