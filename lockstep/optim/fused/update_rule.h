// UpdateRule: the interface between the fused pass and one optimizer's update.
#pragma once

#include <ATen/core/Tensor.h>

#include <bit>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "lockstep/optim/kernels/foreach_update.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::inline fused {

/// A 64-bit hash of the numbers' bits, in their order. Two lists that differ in exactly one number never have the same
/// hash.
inline std::uint64_t fingerprint(std::span<const double> numbers) {
  std::uint64_t hash = 14695981039346656037U;
  for (const double number : numbers) {  // each step is a bijection, so no difference is lost
    hash = (hash ^ std::bit_cast<std::uint64_t>(number)) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 32;
  }
  return hash;
}
inline std::uint64_t fingerprint(std::initializer_list<double> numbers) {
  return fingerprint(std::span(numbers.begin(), numbers.size()));
}

/// An optimizer's options, state and arithmetic. `index` is a parameter's position in GradientSource::parameters().
///
/// A rule has two functions more, which are not virtual, because a pass calls them for each chunk (FusedUpdateOf), on
/// any of its threads: the kernel that updates a range of elements, with the states in the order of state_names(), and
/// its arguments for a parameter, valid after prepare():
///     void (*kernel() const)(const kernels::KernelArgs& args, const Scalars& scalars);
///     const Scalars& scalars(std::size_t index) const;
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;

  /// Names of the state tensors, as in PyTorch's state_dict(); each has the parameter's shape.
  virtual const std::vector<std::string>& state_names() const = 0;

  /// Begins an update: reads the options. Returns a hash of everything that must be equal on all ranks. Throws
  /// UsageError for options that this optimizer cannot use.
  virtual std::uint64_t prepare() = 0;
  /// Updates a batch of parameters on a device; `index` is one of them.
  virtual void update(std::size_t index, const kernels::ForeachArgs& args) const = 0;
  /// Valid after prepare(): parameters with the same key have the same options and step count.
  virtual std::size_t batch_key(std::size_t index) const = 0;
  /// Valid after prepare(): the learning rate of a parameter.
  virtual double lr(std::size_t index) const = 0;
  /// Valid after prepare(): a hash of everything that prepare() returns a hash of, except learning rates and step
  /// counts.
  virtual std::uint64_t hash_of_constants() const = 0;
  /// Valid after prepare(): true if ForeachArgs::found_inf alone is enough to skip this update.
  virtual bool can_skip() const = 0;
  /// Called after all elements of the parameter have been updated; `states` are its state tensors.
  virtual void on_updated(std::size_t index, const std::vector<at::Tensor>& states) = 0;

  /// The value of all state elements before a parameter's first update.
  virtual double initial_state() const { return 0; }

  // If an update depends on norms of whole parameters (needs_norms()), a pass over all gradients computes them between
  // prepare() and update():
  virtual bool needs_norms() const { return false; }
  /// Returns the sums of squares for a range of at most ParameterStorage::kElementsPerSum elements.
  virtual kernels::SquaredNorms measure_norms(std::size_t, const kernels::KernelArgs&) const { return {}; }
  /// Receives the sums over the whole parameter, on every rank.
  virtual void set_norms(std::size_t, const kernels::SquaredNorms&) {}

  // Access to the state that torch::optim::Optimizer holds:
  /// Number of updates of a parameter. An optimizer without a step count returns 1 for any number above 0.
  virtual std::int64_t steps(std::size_t index) const = 0;
  /// The state tensors; undefined tensors if the parameter has no state.
  virtual std::vector<at::Tensor> states(std::size_t index) const = 0;
  virtual void set_states(std::size_t index, std::int64_t steps, const std::vector<at::Tensor>& states) = 0;
};

}  // namespace lockstep::optim::inline fused
