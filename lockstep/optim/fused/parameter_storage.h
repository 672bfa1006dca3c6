// Where parameters and the state of their optimizer lie.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/ddp/gradient_source.h"
#include "lockstep/optim/fused/state_sharding.h"

namespace lockstep::optim {

/// In memory that the ranks of a host have in common, once for all; or, without such memory, where each rank has them.
class ParameterStorage {
 public:
  /// Neighbouring elements of a parameter whose squares are summed apart.
  static constexpr std::size_t kElementsPerSum = comm::Piece::kAlignment;

  /// `shared`: all ranks call it and wait for each other; parameters, which are equal on all of them, move into common
  /// memory with everything that refers to the same storage. Each gets `num_states` tensors of state, zeroed, and room
  /// for `num_partial_sums` sums over each kElementsPerSum. Throws UsageError that names a parameter which has a dtype
  /// that no loop is made for, or holes in its memory; if `shared` also one that shares its storage with what is none
  /// of the parameters. With `shards` (null: none), which outlives this, there is state for their own elements alone.
  ParameterStorage(std::shared_ptr<ddp::GradientSource> source, std::size_t num_states, std::size_t num_partial_sums,
                   bool shared, const StateSharding* shards);
  /// Parameters move back into memory of this process alone.
  ~ParameterStorage();
  ParameterStorage(const ParameterStorage&) = delete;
  ParameterStorage& operator=(const ParameterStorage&) = delete;

  const std::vector<ddp::GradientSource::Parameter>& parameters() const { return parameters_; }
  bool shared() const { return memory_.data != nullptr; }
  /// One of the ranks that share a copy; each rank when nothing is shared.
  bool first() const { return memory_.first; }

  /// Of the parameter's shape and strides, or, with shards, of the elements of own() one after the other; float for
  /// bfloat16 and half. Kept until the end.
  const std::vector<at::Tensor>& states(std::size_t index) const { return states_[index]; }
  /// Of `whole`, which has the parameter's shape, what belongs here becomes state number `i`.
  void set_state(std::size_t index, std::size_t i, const at::Tensor& whole);
  /// The elements, in the order in which they lie, of which there is state here.
  ElementRange own(std::size_t index) const {
    return shards_ ? shards_->own(index) : ElementRange{0, static_cast<std::size_t>(parameters_[index].tensor.numel())};
  }
  /// For each kElementsPerSum of a part; whoever shares the memory sees what others wrote.
  double* partial_sums(std::size_t index, std::size_t which = 0) const {
    return sums_ + which * sum_offsets_.back() + sum_offsets_[index];
  }
  /// All of them.
  std::span<double> all_partial_sums() const { return {sums_, num_sum_kinds_ * sum_offsets_.back()}; }
  std::size_t num_partial_sums(std::size_t index) const { return sum_offsets_[index + 1] - sum_offsets_[index]; }

  /// Throws UsageError when a parameter is not what it was: another dtype or shape, and, if shared, another place, or
  /// values that somebody wrote, as far as autograd's count of changes tells.
  void require_unmodified() const;
  /// Throws UsageError when two parameters have their elements in one storage: then one may be updated while a graph
  /// still needs the other.
  void require_unaliased() const;
  /// This part has been changed with leave: autograd is told, so that a graph which needs the old values fails instead
  /// of using new ones.
  void record_update(std::size_t index);
  /// Whatever has been changed was allowed.
  void record_changes();

 private:
  struct StorageSlot {
    c10::StorageSlot storage;
    std::size_t offset = 0;  // in the common memory
  };
  void check_parameter(const ddp::GradientSource::Parameter& parameter) const;
  void check_storages() const;
  std::size_t assign_offsets();
  void move_to_shared_memory(std::size_t bytes);
  void find_aliases();
  void allocate_states(std::size_t num_states);
  std::size_t state_bytes(std::size_t index) const;
  void allocate_sums(std::size_t num_partial_sums);

  const std::shared_ptr<ddp::GradientSource> source_;
  const std::vector<ddp::GradientSource::Parameter> parameters_;
  const StateSharding* const shards_;
  std::vector<StorageSlot> storages_;
  comm::SharedAllocation memory_;
  std::size_t used_bytes_ = 0;  // bytes of memory_
  std::vector<std::vector<at::Tensor>> states_;
  std::vector<std::size_t> sum_offsets_;
  std::vector<double> local_sums_;
  double* sums_ = nullptr;
  std::size_t num_sum_kinds_ = 0;  // of sums
  struct Snapshot {
    const void* data;
    at::ScalarType dtype;
    std::vector<std::int64_t> strides;
    std::int64_t version;
  };
  std::vector<Snapshot> snapshots_;
  std::vector<std::vector<std::size_t>>
      aliases_;  // parameters of the same storage, itself included: views count changes together
};

}  // namespace lockstep::optim
