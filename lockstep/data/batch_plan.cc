#include "lockstep/data/batch_plan.h"

#include <algorithm>

#include "lockstep/base/check.h"

namespace lockstep::data {

BatchPlan::BatchPlan(EpochOrder order, std::uint64_t batch_size, bool drop_last)
    : order_(std::move(order)), batch_size_(batch_size), num_batches_(order_.size() / batch_size) {
  if (!drop_last && order_.size() % batch_size != 0) ++num_batches_;
}

std::uint64_t BatchPlan::num_samples(std::uint64_t batch) const {
  LOCKSTEP_CHECK(batch < num_batches_);
  return std::min(batch_size_, order_.size() - batch * batch_size_);
}

std::vector<std::size_t> BatchPlan::indices(std::uint64_t batch) const {
  LOCKSTEP_CHECK(batch < num_batches_);
  const std::uint64_t begin = batch * batch_size_;
  const std::uint64_t end = std::min(order_.size(), begin + batch_size_);
  std::vector<std::size_t> indices;
  indices.reserve(end - begin);
  for (std::uint64_t k = begin; k < end; ++k) indices.push_back(order_[k]);
  return indices;
}

}  // namespace lockstep::data
