#include "lockstep/data/sampler.h"

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <string>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/data/sample_rng.h"

namespace lockstep::data {
namespace {

// With fewer bits per half, a round function has too few outputs to mix well. Smaller ranges therefore apply the
// network more often, which is cheap because the network then permutes only 256 values.
constexpr int kMinHalfBits = 4;

// Returns the number of samples of one rank when `remaining` samples are distributed.
std::uint64_t shard_size(std::uint64_t remaining, DataShard shard, ShardMode mode) {
  const auto size = static_cast<std::uint64_t>(shard.size);
  const std::uint64_t rest = remaining % size;
  const std::uint64_t even = remaining / size;
  switch (mode) {
    case ShardMode::kPad: return even + (rest > 0 ? 1 : 0);
    case ShardMode::kDrop: return even;
    case ShardMode::kExact: return even + (static_cast<std::uint64_t>(shard.rank) < rest ? 1 : 0);
  }
  return 0;
}

}  // namespace

Permutation::Permutation(std::uint64_t n, std::uint64_t seed, std::uint64_t epoch) : n_(n) {
  LOCKSTEP_CHECK(n >= 1 && n <= std::uint64_t{1} << 62);
  half_bits_ = std::max(kMinHalfBits, (static_cast<int>(std::bit_width(n - 1)) + 1) / 2);
  half_mask_ = (std::uint64_t{1} << half_bits_) - 1;
  // The epoch is mixed separately, so that (seed 1, epoch 2) and (seed 2, epoch 1) differ.
  std::uint64_t state = mix64(mix64(seed + kGoldenGamma) + epoch * kGoldenGamma + 1);
  for (auto& key : keys_) key = mix64(state += kGoldenGamma);
}

std::uint64_t Permutation::encrypt(std::uint64_t value) const {
  std::uint64_t left = value >> half_bits_;
  std::uint64_t right = value & half_mask_;
  for (const auto key : keys_) {
    const std::uint64_t next = left ^ (mix64(right + key) & half_mask_);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

std::uint64_t Permutation::operator[](std::uint64_t i) const {
  LOCKSTEP_CHECK(i < n_);
  do i = encrypt(i);
  while (i >= n_);
  return i;
}

EpochOrder::EpochOrder(std::uint64_t num_samples, DataShard shard, const SamplerOptions& options, std::uint64_t epoch,
                       std::uint64_t position)
    : num_samples_(num_samples),
      shard_(shard),
      position_(position),
      size_(shard_size(num_samples - position, shard, options.mode)) {
  if (options.shuffle) permutation_.emplace(num_samples, options.seed, epoch);
}

std::uint64_t EpochOrder::operator[](std::uint64_t k) const {
  LOCKSTEP_CHECK(k < size_);
  const std::uint64_t number =
      position_ + k * static_cast<std::uint64_t>(shard_.size) + static_cast<std::uint64_t>(shard_.rank);
  const std::uint64_t index = number % num_samples_;
  return permutation_ ? (*permutation_)[index] : index;
}

Sampler::Sampler(std::uint64_t num_samples, DataShard shard, const SamplerOptions& options)
    : num_samples_(num_samples), shard_(shard), options_(options) {
  if (num_samples < 1 || num_samples > std::uint64_t{1} << 62)
    throw base::UsageError("the dataset has " + std::to_string(num_samples) + " samples; expected 1 to 2^62");
  if (shard.size < 1 || shard.rank < 0 || shard.rank >= shard.size)
    throw base::UsageError("DataShard.rank is " + std::to_string(shard.rank) + " with size " +
                           std::to_string(shard.size) + "; expected a rank from 0 to size - 1");
}

EpochOrder Sampler::epoch(std::uint64_t epoch, std::uint64_t position) const {
  if (position > num_samples_)
    throw base::UsageError("Sampler::epoch: position is " + std::to_string(position) + "; expected at most " +
                           std::to_string(num_samples_) + ", the number of samples");
  return EpochOrder(num_samples_, shard_, options_, epoch, position);
}

BatchPlan::BatchPlan(EpochOrder order, std::uint64_t batch_size, bool drop_last)
    : order_(std::move(order)), batch_size_(batch_size), num_batches_(order_.size() / batch_size) {
  if (!drop_last && order_.size() % batch_size != 0) ++num_batches_;
}

std::uint64_t BatchPlan::num_samples(std::uint64_t batch) const {
  LOCKSTEP_CHECK(batch < num_batches_);
  return std::min(batch_size_, order_.size() - batch * batch_size_);
}

std::vector<std::size_t> BatchPlan::indices(std::uint64_t batch) const {
  const std::uint64_t begin = batch * batch_size_, end = begin + num_samples(batch);
  std::vector<std::size_t> indices;
  indices.reserve(end - begin);
  for (std::uint64_t k = begin; k < end; ++k) indices.push_back(order_[k]);
  return indices;
}

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

OrderFingerprint order_fingerprint(const LoaderPosition& position, std::int64_t batch_size, ShardMode mode) {
  const auto hash_of = [](std::initializer_list<std::uint64_t> values) {
    std::uint32_t hash = 2166136261u;  // FNV-1a
    for (std::uint64_t value : values)
      for (int byte = 0; byte < 8; ++byte, value >>= 8)
        hash = (hash ^ static_cast<std::uint32_t>(value & 0xff)) * 16777619u;
    return hash;
  };
  const auto size = static_cast<std::uint64_t>(batch_size), kind = static_cast<std::uint64_t>(mode);
  const auto part = [&](int index, std::initializer_list<std::uint64_t> values) {
    const std::uint32_t hash = hash_of(values);
    return (hash ^ hash >> 4 ^ hash >> 8 ^ hash >> 16) % 15 << (4 * index);
  };
  const std::uint32_t parts = part(0, {position.seed}) | part(1, {position.epoch}) | part(2, {size}) |
                              part(3, {position.num_samples, std::uint64_t{position.shuffle}, kind});
  return {hash_of({position.seed, position.epoch, size, position.num_samples, std::uint64_t{position.shuffle}, kind}),
          static_cast<std::uint16_t>(parts)};
}

}  // namespace lockstep::data
