#include "lockstep/data/loader_position.h"

namespace lockstep::data {

std::string to_text(const LoaderPosition& position) {
  return "seed=" + std::to_string(position.seed) + " epoch=" + std::to_string(position.epoch) +
         " samples=" + std::to_string(position.samples_drawn) + " num_samples=" + std::to_string(position.num_samples) +
         " shuffle=" + (position.shuffle ? "1" : "0");
}

}  // namespace lockstep::data
