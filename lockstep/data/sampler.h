// Assigns the samples of an epoch to ranks and batches: a pure function of seed, epoch, position and world size.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/stateful.h"

namespace lockstep::data {

/// A bijection of [0, n) that depends on `seed` and `epoch` only: it is the same on every machine and in every version.
/// Implemented as a balanced Feistel network over the smallest even number of bits that holds n - 1 (Luby and Rackoff,
/// "How to Construct Pseudorandom Permutations from Pseudorandom Functions", SIAM J. Comput. 1988), applied repeatedly
/// until the value falls inside the range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
/// Not for cryptography: its round function is fast, not secure.
class Permutation {
 public:
  /// Requires 1 <= n <= 2^62, which is checked.
  Permutation(std::uint64_t n, std::uint64_t seed, std::uint64_t epoch);

  /// Returns the element at `i`, which must be less than n. Applies the network at most 4 times on average if n >= 64.
  std::uint64_t operator[](std::uint64_t i) const;
  std::uint64_t size() const { return n_; }

 private:
  static constexpr int kRounds = 6;

  std::uint64_t encrypt(std::uint64_t value) const;

  std::uint64_t n_;
  int half_bits_;
  std::uint64_t half_mask_;
  std::array<std::uint64_t, kRounds> keys_;
};

/// How samples are distributed if their number is not a multiple of the number of ranks.
enum class ShardMode {
  kPad,  ///< all ranks draw the same number: the order continues from its beginning, as in PyTorch's DistributedSampler
  kDrop,   ///< all ranks draw the same number: the last samples, fewer than ranks, are omitted
  kExact,  ///< each sample is drawn by exactly one rank; the ranks' counts differ by at most one. For evaluation
};

/// A rank among `size` ranks. The default is a single rank.
struct DataShard {
  int rank = 0;
  int size = 1;
};

struct SamplerOptions {
  std::uint64_t seed = 0;  ///< must be the same on all ranks
  bool shuffle = true;     ///< false: the dataset's own order in every epoch
  ShardMode mode = ShardMode::kPad;
};

/// One rank's share of the rest of an epoch. A small immutable value; any thread may read it.
class EpochOrder {
 public:
  /// The number of samples of this rank.
  std::uint64_t size() const { return size_; }
  /// Returns the dataset index of this rank's k-th sample; k < size().
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

/// Distributes an epoch's order round-robin: the k-th sample of rank r has number position + k * size + r in the order
/// that all ranks share. After every rank has drawn b samples, the ranks together have drawn the next b * size numbers.
/// The count of drawn numbers therefore describes the state of an epoch completely, for every world size.
class Sampler {
 public:
  /// Throws UsageError if there are no samples or if the rank is not in [0, size).
  Sampler(std::uint64_t num_samples, DataShard shard, const SamplerOptions& options);

  /// Returns the samples that this rank draws in `epoch` after all ranks together, in any world size, have drawn
  /// `position` samples of it. Throws UsageError if `position` exceeds the number of samples.
  EpochOrder epoch(std::uint64_t epoch, std::uint64_t position = 0) const;

  std::uint64_t num_samples() const { return num_samples_; }
  DataShard shard() const { return shard_; }

 private:
  std::uint64_t num_samples_;
  DataShard shard_;
  SamplerOptions options_;
};

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

/// The position of a training run in its data, as a value that is saved with a checkpoint. Does not depend on the
/// number of ranks: a run of 4 ranks can be saved and resumed with 3 ranks without losing or repeating a sample.
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

/// The values that must be equal on all ranks for each sample to be drawn once, as hashes.
struct OrderFingerprint {
  std::uint32_t hash = 0;   ///< of all: seed, epoch, batch size, number of samples, shuffle and mode
  std::uint16_t parts = 0;  ///< 4 bits each, from the lowest: of the seed, of the epoch, of the batch size, of the rest
};
/// Pure.
OrderFingerprint order_fingerprint(const LoaderPosition& position, std::int64_t batch_size, ShardMode mode);

}  // namespace lockstep::data
