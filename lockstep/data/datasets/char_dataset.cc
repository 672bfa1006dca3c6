#include "lockstep/data/datasets/char_dataset.h"

#include <torch/types.h>

#include <algorithm>
#include <string>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"

namespace lockstep::data::inline datasets {

CharDataset::CharDataset(std::vector<std::int32_t> ids, const CharOptions& options)
    : CharDataset(std::make_shared<const std::vector<std::int32_t>>(std::move(ids)), 0, 0, options) {}

// `num_ids` 0 means all of them.
CharDataset::CharDataset(std::shared_ptr<const std::vector<std::int32_t>> ids, std::size_t first, std::size_t num_ids,
                         const CharOptions& options)
    : ids_(std::move(ids)), first_(first), num_ids_(num_ids == 0 ? ids_->size() : num_ids), options_(options) {
  if (options_.block_size < 1) throw base::UsageError("CharOptions.block_size is 0; expected at least 1");
  if (options_.stride == 0) options_.stride = options_.block_size;
  if (num_ids_ <= options_.block_size)
    throw base::UsageError("CharDataset: a text of " + std::to_string(num_ids_) +
                           " characters is too short for block_size " + std::to_string(options_.block_size) +
                           "; expected a block_size below the length of the text");
}

std::pair<CharDataset, CharDataset> CharDataset::split(double fraction) const {
  if (!(fraction > 0 && fraction < 1))
    throw base::UsageError("CharDataset::split: fraction is " + std::to_string(fraction) +
                           "; expected more than 0 and less than 1");
  const auto split_at = static_cast<std::size_t>(static_cast<double>(num_ids_) * fraction);
  if (split_at <= options_.block_size || num_ids_ - split_at <= options_.block_size)
    throw base::UsageError("CharDataset::split: " + std::to_string(num_ids_) + " characters split at " +
                           std::to_string(fraction) + " leave a part without a window of " +
                           std::to_string(options_.block_size) + " characters");
  return {CharDataset(ids_, first_, split_at, options_),
          CharDataset(ids_, first_ + split_at, num_ids_ - split_at, options_)};
}

Example CharDataset::get(std::size_t index) const {
  Example batch = get_batch({index});
  return {batch.data[0], batch.target[0]};
}

Example CharDataset::get_batch(const std::vector<std::size_t>& indices) const {
  const auto block = options_.block_size;
  const std::vector<std::int64_t> shape = {static_cast<std::int64_t>(indices.size()), static_cast<std::int64_t>(block)};
  Example batch{torch::empty(shape, torch::kInt64), torch::empty(shape, torch::kInt64)};
  auto* data = batch.data.data_ptr<std::int64_t>();
  auto* target = batch.target.data_ptr<std::int64_t>();
  for (const std::size_t index : indices) {
    LOCKSTEP_CHECK(index < size());
    const auto window = ids_->begin() + static_cast<std::ptrdiff_t>(first_ + index * options_.stride);
    data = std::copy_n(window, block, data);
    target = std::copy_n(window + 1, block, target);
  }
  return batch;
}

}  // namespace lockstep::data::inline datasets
