// What one optimizer does, as its fused pass asks it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/optim/kernels/foreach_update.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim {

/// `part` is a parameter's place in GradientSource::parameters().
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;

  /// Names of the tensors of state, as in a state_dict of Python; their shape is the parameter's.
  virtual const std::vector<std::string>& state_names() const = 0;

  /// An update begins: options are read. Returns a fingerprint of everything that must be equal on all ranks. Throws
  /// UsageError.
  virtual std::uint64_t prepare() = 0;
  /// `run.states` are in the order of state_names().
  virtual void update(std::size_t index, const KernelArgs& args) const = 0;
  /// Where parameters are on a device: of parts that are alike, `part` being one of them.
  virtual void update(std::size_t index, const ForeachArgs& args) const = 0;
  /// After prepare(): parts of the same number are updated alike.
  virtual std::size_t batch_key(std::size_t index) const = 0;
  /// After prepare(): what a ForeachArgs's `skip` leaves as it was is all there is to skip an update.
  virtual bool can_skip() const = 0;
  /// All of this part has been updated; its state is in `states`.
  virtual void updated(std::size_t index, const std::vector<at::Tensor>& states) = 0;

  /// All elements of the tensors of state of a part that has not been updated.
  virtual double initial_state() const { return 0; }

  // Where an update depends on norms of whole parameters (measures()), a pass over all parts comes before it, after
  // prepare():
  virtual bool needs_norms() const { return false; }
  /// Of at most ParameterStorage::kElementsPerSum elements.
  virtual SquaredNorms measure_norms(std::size_t, const KernelArgs&) const { return {}; }
  /// The sums over all of this part, on every rank.
  virtual void set_norms(std::size_t, const SquaredNorms&) {}

  // What torch::optim::Optimizer keeps:
  /// How many updates a part has had; 1 for any number where that is not counted.
  virtual std::int64_t steps(std::size_t index) const = 0;
  /// Undefined where there is none.
  virtual std::vector<at::Tensor> states(std::size_t index) const = 0;
  virtual void set_states(std::size_t index, std::int64_t steps, const std::vector<at::Tensor>& states) = 0;
};

}  // namespace lockstep::optim
