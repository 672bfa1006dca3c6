// Which samples belong to which rank, and in which order: a pure function of seed, epoch, position and world.
#pragma once

#include <cstdint>
#include <optional>

#include "lockstep/data/permutation.h"

namespace lockstep::data {

/// What happens when the samples do not divide evenly among the ranks.
enum class ShardMode {
  kPad,    ///< all ranks draw equally many: the order goes on from its beginning, as PyTorch's DistributedSampler does
  kDrop,   ///< all ranks draw equally many: fewer samples than ranks are left out at the end of the epoch
  kExact,  ///< every sample once over all ranks; counts differ by at most one. For evaluation
};

/// A rank among `size` ranks. The default is a program alone.
struct DataShard {
  int rank = 0;
  int size = 1;
};

struct SamplerOptions {
  std::uint64_t seed = 0;  ///< must be the same on all ranks
  bool shuffle = true;     ///< false: the dataset's own order, every epoch
  ShardMode mode = ShardMode::kPad;
};

/// One rank's part of what remains of an epoch. A small value; any thread may read it.
class EpochOrder {
 public:
  /// Samples of this rank.
  std::uint64_t size() const { return size_; }
  /// Index into the dataset of this rank's k-th sample, k < size().
  std::uint64_t operator[](std::uint64_t k) const;

 private:
  friend class Sampler;
  EpochOrder(std::uint64_t num_samples, DataShard shard, const SamplerOptions& options, std::uint64_t epoch,
             std::uint64_t position);

  std::uint64_t num_samples_;
  DataShard shard_;
  std::uint64_t position_;
  std::uint64_t size_ = 0;
  std::optional<Permutation> permutation_;
};

/// Deals an epoch's order out like cards: the k-th sample of rank r is number position + k * size + r of the order that
/// all ranks share. When every rank has drawn b samples, the ranks together have therefore drawn the next b * size
/// numbers, and "how many numbers are drawn" says all about the state of an epoch: it is the same for any world size.
class Sampler {
 public:
  /// Throws UsageError for no samples, and for a rank outside its world.
  Sampler(std::uint64_t num_samples, DataShard shard, const SamplerOptions& options);

  /// What this rank draws in `epoch` after all ranks together have drawn `position` samples of it, in whatever world.
  /// Throws UsageError when position is beyond the number of samples.
  EpochOrder epoch(std::uint64_t epoch, std::uint64_t position = 0) const;

  std::uint64_t num_samples() const { return num_samples_; }
  DataShard shard() const { return shard_; }
  const SamplerOptions& options() const { return options_; }

 private:
  std::uint64_t num_samples_;
  DataShard shard_;
  SamplerOptions options_;
};

}  // namespace lockstep::data
