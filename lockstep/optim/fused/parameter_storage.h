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
class ParameterHome {
 public:
  /// Neighbouring elements of a parameter whose squares are summed apart.
  static constexpr std::size_t kSumElements = comm::Piece::kAlignment;

  /// `shared`: all ranks call it and wait for each other; parameters, which are equal on all of them, move into common
  /// memory with everything that refers to the same storage. Each gets `num_states` tensors of state, zeroed, and room
  /// for `num_sums` sums over each kSumElements. Throws UsageError that names a parameter which has a dtype that no
  /// loop is made for, or holes in its memory; if `shared` also one that shares its storage with what is none of the
  /// parameters. With `shards` (null: none), which outlives this, there is state for their own elements alone.
  ParameterHome(std::shared_ptr<ddp::GradientSource> source, std::size_t num_states, std::size_t num_sums, bool shared,
                const Shards* shards);
  /// Parameters move back into memory of this process alone.
  ~ParameterHome();
  ParameterHome(const ParameterHome&) = delete;
  ParameterHome& operator=(const ParameterHome&) = delete;

  const std::vector<ddp::GradientSource::Parameter>& parameters() const { return parameters_; }
  bool shared() const { return memory_.data != nullptr; }
  /// One of the ranks that share a copy; each rank when nothing is shared.
  bool first() const { return memory_.first; }

  /// Of the parameter's shape and strides, or, with shards, of the elements of own() one after the other; float for
  /// bfloat16 and half. Kept until the end.
  const std::vector<at::Tensor>& states(std::size_t part) const { return states_[part]; }
  /// Of `whole`, which has the parameter's shape, what belongs here becomes state number `i`.
  void keep(std::size_t part, std::size_t i, const at::Tensor& whole);
  /// The elements, in the order in which they lie, of which there is state here.
  Range own(std::size_t part) const {
    return shards_ ? shards_->own(part) : Range{0, static_cast<std::size_t>(parameters_[part].tensor.numel())};
  }
  /// For each kSumElements of a part; whoever shares the memory sees what others wrote.
  double* sums(std::size_t part, std::size_t which = 0) const {
    return sums_ + which * first_sum_.back() + first_sum_[part];
  }
  /// All of them.
  std::span<double> all_sums() const { return {sums_, num_kinds_ * first_sum_.back()}; }
  std::size_t num_sums(std::size_t part) const { return first_sum_[part + 1] - first_sum_[part]; }

  /// Throws UsageError when a parameter is not what it was: another dtype or shape, and, if shared, another place, or
  /// values that somebody wrote, as far as autograd's count of changes tells.
  void require_untouched() const;
  /// Throws UsageError when two parameters have their elements in one storage: then one may be updated while a graph
  /// still needs the other.
  void require_own_storages() const;
  /// This part has been changed with leave: autograd is told, so that a graph which needs the old values fails instead
  /// of using new ones.
  void note_update(std::size_t part);
  /// Whatever has been changed was allowed.
  void note_changes();

 private:
  struct Storage {
    c10::Storage storage;
    std::size_t offset = 0;  // in the common memory
  };
  void check(const ddp::GradientSource::Parameter& parameter) const;
  void check_storages() const;
  std::size_t place_storages();
  void move_in(std::size_t bytes);
  void find_siblings();
  void make_states(std::size_t num_states);
  std::size_t state_bytes(std::size_t part) const;
  void make_sums(std::size_t num_sums);

  const std::shared_ptr<ddp::GradientSource> source_;
  const std::vector<ddp::GradientSource::Parameter> parameters_;
  const Shards* const shards_;
  std::vector<Storage> storages_;
  comm::CommonMemory memory_;
  std::size_t used_ = 0;  // bytes of memory_
  std::vector<std::vector<at::Tensor>> states_;
  std::vector<std::size_t> first_sum_;
  std::vector<double> own_sums_;
  double* sums_ = nullptr;
  std::size_t num_kinds_ = 0;  // of sums
  struct Seen {
    const void* data;
    at::ScalarType dtype;
    std::vector<std::int64_t> strides;
    std::int64_t version;
  };
  std::vector<Seen> seen_;
  std::vector<std::vector<std::size_t>>
      siblings_;  // parameters of the same storage, itself included: views count changes together
};

}  // namespace lockstep::optim
