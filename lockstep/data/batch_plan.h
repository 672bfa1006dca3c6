// Assigns the samples of a rank to batches: a pure function of the rank's sample order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/data/sampler.h"

namespace lockstep::data {

/// The batches of one rank in one epoch. A small immutable value; any thread may read it.
class BatchPlan {
 public:
  /// `batch_size` must be at least 1. `drop_last` omits a last batch that is not full. If all ranks draw the same
  /// number of samples, they have the same number of batches, and batches of the same number have the same size.
  BatchPlan(EpochOrder order, std::uint64_t batch_size, bool drop_last);

  std::uint64_t num_batches() const { return num_batches_; }
  /// Returns the number of samples of batch number `batch`, which must be less than num_batches().
  std::uint64_t num_samples(std::uint64_t batch) const;
  /// Returns the dataset indices of batch number `batch`, which must be less than num_batches().
  std::vector<std::size_t> indices(std::uint64_t batch) const;

 private:
  EpochOrder order_;
  std::uint64_t batch_size_;
  std::uint64_t num_batches_;
};

}  // namespace lockstep::data
