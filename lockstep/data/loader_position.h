// The position of a training run in its data, as a value that is saved with a checkpoint.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/checkpoint/stateful.h"

namespace lockstep::data {

/// Does not depend on the number of ranks: a run of 4 ranks can be saved and resumed with 3 ranks without losing or
/// repeating a sample.
struct LoaderPosition {
  std::uint64_t seed = 0;
  std::uint64_t epoch = 0;
  std::uint64_t samples_drawn = 0;  ///< samples drawn in this epoch by all ranks together
  std::uint64_t num_samples = 0;    ///< size of the dataset; a position is not valid for a dataset of another size
  bool shuffle = true;

  bool operator==(const LoaderPosition&) const = default;
};

/// "seed=1 epoch=2 samples=300 num_samples=1000 shuffle=1"
std::string to_text(const LoaderPosition& position);

/// Returns the fields as "seed", "epoch", "samples_drawn", "num_samples" and "shuffle". A seed above the largest signed
/// integer is stored as a negative number.
checkpoint::StateDict to_state_dict(const LoaderPosition& position);
/// Returns the position that to_state_dict() stored. Throws UsageError for missing or unknown names and for values of
/// another type.
LoaderPosition position_from_state_dict(const checkpoint::StateDict& state);

}  // namespace lockstep::data
