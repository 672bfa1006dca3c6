// State of an optimizer that is divided between owners: stage 1 of ZeRO (Rajbhandari et al., arXiv:1910.02054).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/ddp/gradient_source.h"
#include "lockstep/optim/fused/shard_plan.h"

namespace lockstep::optim {

/// An owner is a rank, or the ranks of a host that share memory. Each updates the elements whose state it has, and then
/// gives them to the others.
class StateSharding {
 public:
  /// All ranks call it alike, and wait for each other.
  explicit StateSharding(ddp::GradientSource& source);

  /// False where there is one owner, which has everything.
  bool is_sharded() const { return owners_.count > 1; }
  /// What this rank's owner has of a parameter.
  const ElementRange& own(std::size_t index) const { return ranges_[static_cast<std::size_t>(owners_.index)][index]; }

  /// After an update: every owner's elements reach all. `options` is a fingerprint of the update; ranks that differ in
  /// it get a DesyncError. All ranks call it alike; waits for them. Takes (owners + 1) times 1 MiB of memory at most.
  void all_gather_parameters(std::uint64_t options);
  /// Sums over each owner's own elements become sums over all, the same bits on all ranks. Where an owner is several
  /// ranks they have these in one place. All ranks call it alike, and wait for each other.
  void all_reduce_sums(std::span<double> sums);
  /// A tensor of state of all elements, in the parameter's shape and strides, from each owner's own. All ranks call it
  /// alike, and wait for each other.
  at::Tensor gather_state(std::size_t index, const at::Tensor& own);

 private:
  void all_gather_rounds(std::uint64_t options);
  void check_fingerprints(std::uint64_t options) const;
  void gather_and_check_fingerprints(std::uint64_t options) const;
  void copy(void* to, const void* from, std::size_t bytes) const;
  [[noreturn]] void fail_on_mismatch(int owner, std::uint64_t other, std::uint64_t options) const;
  template <typename Copy>
  void for_each_segment(std::size_t owner, std::size_t begin, std::size_t size, const Copy& copy) const;

  ddp::GradientSource& source_;
  const std::vector<ddp::GradientSource::Parameter> parameters_;
  const ddp::GradientSource::ShardOwners owners_;
  std::vector<std::vector<ElementRange>> ranges_;  // of each owner
  std::vector<std::vector<std::size_t>> ends_;     // of each owner: bytes up to the end of each part
  std::size_t chunk_bytes_ = 0;                    // bytes of an owner in one operation
  std::size_t rounds_ = 0;
  at::Device device_ = at::kCPU;  // of the parameters
  at::Tensor input_, output_;
};

}  // namespace lockstep::optim
