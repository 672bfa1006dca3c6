// The memory that holds parameters and the state of their optimizer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/base/shared_memory.h"
#include "lockstep/ddp/gradient_source.h"
#include "lockstep/optim/fused/state_sharding.h"

namespace lockstep::optim::inline fused {

/// Holds parameters and state once per host, in memory that the ranks of the host share; or, where ranks share no
/// memory, in each rank's own memory.
///
/// Each rank's tensors of shared parameters are in a private view of that memory: a write to them concerns this rank
/// alone, as without sharing, until accept_writes(). The optimizer writes to memory_of().
class ParameterStorage {
 public:
  /// Squares are summed separately for each run of this many adjacent elements of a parameter.
  static constexpr std::size_t kElementsPerSum = comm::GradientChunk::kAlignment;

  /// Allocates `num_states` zeroed tensors of state per parameter, and `num_partial_sums` sums for each kElementsPerSum
  /// of its elements. `share`: moves the parameters, which must be equal on all ranks, into shared memory together with
  /// every tensor that uses the same storage; a collective of all ranks. `shards` (null: none) must outlive this
  /// object; with it, state covers only the elements of shard_of(). Throws UsageError, which names the parameter, for a
  /// dtype without a kernel, for a parameter whose memory has gaps, and with `share` for a parameter whose storage also
  /// holds anything that is not a parameter.
  ParameterStorage(std::shared_ptr<ddp::GradientSource> source, std::size_t num_states, std::size_t num_partial_sums,
                   bool share, const StateSharding* shards);
  /// Moves the parameters back into memory of this process.
  ~ParameterStorage();
  ParameterStorage(const ParameterStorage&) = delete;
  ParameterStorage& operator=(const ParameterStorage&) = delete;

  const std::vector<ddp::GradientSource::Parameter>& parameters() const { return parameters_; }
  bool is_shared() const { return view_ != nullptr; }
  /// True on exactly one of the ranks that share a copy; true on every rank if nothing is shared.
  bool is_primary() const { return allocation_.is_first; }

  /// The state tensors of a parameter: in its shape and strides, or with shards a flat tensor of the elements of
  /// shard_of(). Float for bfloat16 and half. The tensors stay the same for the lifetime of this object.
  const std::vector<at::Tensor>& states(std::size_t index) const { return states_[index]; }
  /// Copies `whole`, which has the parameter's shape, or this owner's shard of it, into state tensor `i`.
  void set_state(std::size_t index, std::size_t i, const at::Tensor& whole);
  /// The range of elements, in memory order, whose state is here.
  ElementRange shard_of(std::size_t index) const {
    return shards_ ? shards_->shard_of(index)
                   : ElementRange{0, static_cast<std::size_t>(parameters_[index].tensor.numel())};
  }
  /// Sums of kind `which` for each kElementsPerSum of a parameter. Ranks that share the memory share the sums.
  double* partial_sums(std::size_t index, std::size_t which = 0) const {
    return sums_ + which * sum_offsets_.back() + sum_offsets_[index];
  }
  /// The sums of all kinds and parameters.
  std::span<double> all_partial_sums() const { return {sums_, num_sum_kinds_ * sum_offsets_.back()}; }
  std::size_t num_partial_sums(std::size_t index) const { return sum_offsets_[index + 1] - sum_offsets_[index]; }

  /// The memory of a parameter, into which the optimizer writes: that which the ranks share, if they share any.
  char* memory_of(std::size_t index) const {
    char* const data = static_cast<char*>(parameters_[index].tensor.mutable_data_ptr());
    return view_ ? shared_memory() + (data - view_->data()) : data;
  }

  /// The gradient of a parameter, in its strides and dtype. Throws UsageError if it is sparse.
  at::Tensor dense_gradient(std::size_t index) const;

  /// Throws UsageError if a parameter's dtype or strides have changed; if parameters are shared, also if its address
  /// has changed.
  void require_same_layout() const;
  /// Throws UsageError, which names the parameter, if shared parameters have been written since accept_writes().
  void require_unwritten();
  /// If shared parameters have been written since the last call, to the same values on all ranks that share them, these
  /// become the shared values; in that case a collective of these ranks. Throws UsageError, which names a parameter, on
  /// all of them if the values differ; a rank that has written nothing makes another call, so that the others throw
  /// DesyncError, which names the parameter as well.
  void accept_writes();
  /// A collective: makes what `change` writes on the primary rank the shared values. Not called on other ranks.
  void change(const std::function<void()>& change);
  /// Throws UsageError if two parameters use the same storage: their views share a version counter, so one of them
  /// could be updated while a graph still needs the other.
  void require_unaliased() const;

 private:
  struct StorageSlot {
    c10::Storage storage;
    std::size_t offset = 0;  // in allocation_
  };
  char* shared_memory() const { return allocation_.memory->data(); }
  const std::string& first_changed(const std::vector<base::PrivateView::Range>& changes) const;
  void publish(const std::vector<base::PrivateView::Range>& changes) const;
  void check_parameter(const ddp::GradientSource::Parameter& parameter) const;
  void check_storages() const;
  std::size_t assign_offsets();
  void move_to_shared_memory(std::size_t bytes);
  void allocate_states(std::size_t num_states);
  std::size_t state_bytes(std::size_t index) const;
  void allocate_sums(std::size_t num_partial_sums);

  const std::shared_ptr<ddp::GradientSource> source_;
  const std::vector<ddp::GradientSource::Parameter> parameters_;
  const StateSharding* const shards_;
  std::vector<StorageSlot> storages_;
  comm::SharedAllocation allocation_;
  std::shared_ptr<base::PrivateView> view_;  // of the parameters; null: nothing is shared
  std::size_t used_bytes_ = 0;               // bytes of allocation_ that are in use
  std::vector<std::vector<at::Tensor>> states_;
  std::vector<std::size_t> sum_offsets_;
  std::vector<double> local_sums_;
  double* sums_ = nullptr;
  std::size_t num_sum_kinds_ = 0;  // kinds of sums per parameter
  struct Snapshot {
    const void* data;
    at::ScalarType dtype;
    std::vector<std::int64_t> strides;
  };
  std::vector<Snapshot> snapshots_;
};

}  // namespace lockstep::optim::inline fused
