// Which samples make which batch of a rank: a pure function of the rank's order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/data/sampler.h"

namespace lockstep::data {

/// A small value; any thread may read it.
class BatchPlan {
 public:
  /// batch_size >= 1. `drop_last` leaves out a last batch that is not full. Where all ranks draw equally many samples,
  /// their batches are equally many and equally long.
  BatchPlan(EpochOrder order, std::uint64_t batch_size, bool drop_last);

  std::uint64_t num_batches() const { return num_batches_; }
  /// Indices into the dataset of batch number `batch`, which must be less than num_batches().
  std::vector<std::size_t> indices(std::uint64_t batch) const;

 private:
  EpochOrder order_;
  std::uint64_t batch_size_;
  std::uint64_t num_batches_;
};

}  // namespace lockstep::data
