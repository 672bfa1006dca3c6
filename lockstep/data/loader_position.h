// Where in the data a training stands, as a value that is saved with a checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::data {

/// Independent of the number of ranks: a run of 4 ranks that is saved goes on with 3 without losing or repeating a
/// sample.
struct LoaderPosition {
  std::uint64_t seed = 0;
  std::uint64_t epoch = 0;
  std::uint64_t samples_drawn = 0;  ///< drawn in this epoch by all ranks together
  std::uint64_t num_samples = 0;    ///< of the dataset; a position does not fit a dataset of another size
  bool shuffle = true;

  bool operator==(const LoaderPosition&) const = default;
};

/// "seed=1 epoch=2 samples=300 num_samples=1000 shuffle=1"
std::string to_text(const LoaderPosition& position);

/// Reads to_text()'s form and no other. Throws UsageError that shows the text and the form.
LoaderPosition parse_position(std::string_view text);

}  // namespace lockstep::data
