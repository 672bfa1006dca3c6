#include "lockstep/data/loader_position.h"

namespace lockstep::data {

std::string to_text(const LoaderPosition& position) {
  return "seed=" + std::to_string(position.seed) + " epoch=" + std::to_string(position.epoch) +
         " samples=" + std::to_string(position.samples_drawn) + " num_samples=" + std::to_string(position.num_samples) +
         " shuffle=" + (position.shuffle ? "1" : "0");
}

checkpoint::StateDict to_state_dict(const LoaderPosition& position) {
  return {{"seed", static_cast<std::int64_t>(position.seed)},
          {"epoch", static_cast<std::int64_t>(position.epoch)},
          {"samples_drawn", static_cast<std::int64_t>(position.samples_drawn)},
          {"num_samples", static_cast<std::int64_t>(position.num_samples)},
          {"shuffle", position.shuffle}};
}

LoaderPosition position_from_state_dict(const checkpoint::StateDict& state) {
  const auto number = [&](const char* name) {
    return static_cast<std::uint64_t>(checkpoint::value_of<std::int64_t>(state, name));
  };
  const LoaderPosition position{number("seed"), number("epoch"), number("samples_drawn"), number("num_samples"),
                                checkpoint::value_of<bool>(state, "shuffle")};
  if (state.size() != 5)
    throw base::UsageError("the state of a loader has " + std::to_string(state.size()) +
                           " values; expected seed, epoch, samples_drawn, num_samples and shuffle");
  return position;
}

}  // namespace lockstep::data
