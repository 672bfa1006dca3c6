// Optimizer state divided between owners: stage 1 of ZeRO (Rajbhandari et al., arXiv:1910.02054).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/ddp/gradient_source.h"

namespace lockstep::optim::inline fused {

class ParameterStorage;

/// Allocations and shards begin on a cache line.
constexpr std::size_t kCacheLineBytes = 64;

using comm::ElementRange;

/// The size of one state tensor of a parameter.
struct StateSize {
  std::size_t elements = 0;
  std::size_t bytes_each = 0;
};

/// Divides the state of each parameter into `num_owners` intervals of the same number of bytes, rounded to cache lines,
/// and returns the range of each parameter that belongs to `owner`. So a part of the gradients, whichever, has about as
/// many for each owner. Pure.
std::vector<ElementRange> plan_shard(const std::vector<StateSize>& parameters, int owner, int num_owners);

/// An owner is a rank, or the set of ranks of a host that share memory. Each owner updates the elements whose state it
/// holds and then sends them to the others. All collectives below are called by all ranks in the same order; each call
/// blocks until all ranks have made it. They throw CommError.
class StateSharding {
 public:
  /// A collective. Throws UsageError if parameters are on different devices. `source` must outlive this object.
  explicit StateSharding(ddp::GradientSource& source);

  /// False if there is only one owner, which holds all state.
  bool is_sharded() const { return owners_.count > 1; }
  /// The range of a parameter's elements that this rank's owner holds.
  const ElementRange& shard_of(std::size_t index) const {
    return ranges_[static_cast<std::size_t>(owners_.index)][index];
  }

  /// Tells the source of gradients what each owner needs of them.
  void scatter_means() const { source_.scatter_means(ranges_, owners_.index); }

  /// A collective, for use after an update: sends every owner's elements to all ranks. `options_hash` is a hash of the
  /// update; if it differs between ranks, they throw DesyncError. Uses at most (owners + 1) * 1 MiB of memory.
  /// `storage` holds the parameters.
  void all_gather_parameters(std::uint64_t options_hash, const ParameterStorage& storage);
  /// A collective: adds up the owners' sums in place, with the same bits on all ranks. The ranks of one owner pass the
  /// same shared memory.
  void all_reduce_sums(std::span<double> sums);
  /// A collective: assembles a whole state tensor, in the parameter's shape and strides, from the owners' shards.
  at::Tensor gather_state(std::size_t index, const at::Tensor& shard);

 private:
  void all_gather_rounds(std::uint64_t options_hash, const ParameterStorage& storage);
  void check_fingerprints(std::uint64_t options_hash, const at::Tensor& gathered) const;
  void gather_and_check_fingerprints(std::uint64_t options_hash) const;
  void copy(void* to, const void* from, std::size_t bytes) const;
  [[noreturn]] void fail_on_mismatch(int owner) const;
  template <typename Copy>
  void for_each_segment(const ParameterStorage& storage, std::size_t owner, std::size_t begin, std::size_t size,
                        const Copy& copy) const;

  ddp::GradientSource& source_;
  const std::vector<ddp::GradientSource::Parameter> parameters_;
  const ddp::GradientSource::ShardOwners owners_;
  std::vector<std::vector<ElementRange>> ranges_;  // by owner and parameter
  std::vector<std::vector<std::size_t>> ends_;     // by owner and parameter: bytes up to the end of the shard
  std::size_t chunk_bytes_ = 0;                    // bytes that an owner sends in one round
  std::size_t rounds_ = 0;
  at::Device device_ = at::kCPU;  // of all parameters
  at::Tensor input_, output_;
};

}  // namespace lockstep::optim::inline fused
