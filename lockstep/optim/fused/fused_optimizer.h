// FusedOptimizer: the functions that all optimizers of lockstep::optim have in addition to those of torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/amp/unscaling.h"
#include "lockstep/checkpoint/stateful.h"

namespace lockstep::ddp {
class GradientSource;
}  // namespace lockstep::ddp

namespace torch::optim {
class Optimizer;
class OptimizerParamGroup;
}  // namespace torch::optim

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace lockstep::optim {
at::Tensor clip_grad_norm(torch::optim::Optimizer& optimizer, double max_norm);
void clip_grad_value(torch::optim::Optimizer& optimizer, double max);
}  // namespace lockstep::optim

namespace lockstep::optim::inline fused {

class FusedUpdate;
class UpdateRule;

/// Options of a fused optimizer as a whole, in addition to those of its parameter groups.
struct FusedOptions {
  /// ZeRO stage 1: each rank holds the state of its own shard of the elements, updates these, and receives the other
  /// elements from their owners at the end of step(). Where the ranks of a host share one copy of parameters and state,
  /// the owners are the hosts; with a single such host, the state is not divided. Between such hosts, backward() sends
  /// each host only the gradients of its shard, so that a step of float32 sends no more than without; .grad() is then
  /// the mean in the shard and unspecified elsewhere, until average_gradients(). Over TCP or MPI, and with a hook, all
  /// parameters are sent once more per step. Cannot be combined with join().
  bool shard_state = false;
  /// Updates with ATen's operations on lists of tensors (_fused_adamw_, _foreach_…) instead of this library's kernels,
  /// from gradients that backward() averages; ranks then share no memory. Always on if a parameter is not on the CPU.
  bool foreach = false;
};

/// An optimizer that is constructed from a DistributedDataParallel and updates parameters in the same pass that reads
/// all ranks' gradients. All ranks construct it with the same arguments and make the same calls in the same order.
/// Construction, step() and every function below that is not documented otherwise are collectives: they block until all
/// ranks have called them, and throw CommError.
///
/// Ranks of one host that can access each other's memory (transport shm, or hierarchy between hosts) share one copy of
/// parameters and state from construction to destruction, and the ranks divide the update dynamically: each rank claims
/// chunks until none are left. Therefore:
///  - Parameters may be read at any time except during step(). A write by the user, also through .data(), concerns this
///    rank alone until the next step(): if all ranks have written the same values, these become the shared ones (a
///    collective more), and writes that were undone have no effect; otherwise step() throws UsageError or DesyncError,
///    which name the parameter. Faster, and without copies of what is written: change_parameters(). A tensor that was
///    given other memory (set_data()) is an error of step().
///  - A child process created by fork() gets a copy of the parameters and the state (comm/arena/fork_copies.h).
///  - Construction throws UsageError for a parameter that is part of a larger tensor.
/// If all ranks are on one host (transport shm), the following also holds between backward() and step():
///  - After backward(), .grad() is this rank's own gradient. The mean is never stored; call average_gradients() to
///    obtain it. If a gradient is changed without that call, step() throws UsageError, unless the change cannot be
///    detected (ddp/gradient_fingerprint.h). Several backward() calls accumulate. step() compares the number of those
///    outside no_sync() between the ranks; no_sync() has no other effect.
/// Otherwise backward() averages gradients (see also FusedOptions.shard_state), and step() updates the parameters from
/// them in one pass.
/// Sparse gradients throw UsageError with every transport.
///
/// Parameters on a device are updated by ATen's operations (FusedOptions.foreach) from gradients that backward() has
/// averaged. The host does not wait for the device in step(), in clipping (which then writes .grad()) or in
/// GradScaler::step(), with one exception: the first update of SGD with dampening under a GradScaler. In the body of a
/// cuda::GraphedStep, step counts and learning rates (as floats) are on the device: each replay uses the learning rates
/// of that time and is counted. The optimizer must then outlive the last replay, and no other option may change.
///
/// Results equal those of torch::optim on the averaged gradients within rounding, and have the same bits on every rank
/// and in every run. Gradients, options and state may have any dtype that has a kernel (kernels/kernels.h); for
/// bfloat16 and half, sums and state are in float. If options differ between ranks that share parameters or divide
/// state, step() throws DesyncError. An update bumps the parameters' version counters: backward() through a graph that
/// was built before the update fails, as in Python. step() also ends the step of the group (Group::step()).
class FusedOptimizer : public amp::UnscalingOptimizer, public checkpoint::Stateful {
 public:
  FusedOptimizer(const FusedOptimizer&) = delete;
  FusedOptimizer& operator=(const FusedOptimizer&) = delete;

  /// Makes each .grad() the mean over the ranks, if backward() has not done so. Afterwards gradients may be read, and
  /// changed if all ranks change them alike.
  void average_gradients();
  /// Calls `change` once per copy of the parameters, on one of the ranks that share it; `change` may write the
  /// parameters, with what the ranks have written since the last step(). It must not call a collective.
  void change_parameters(const std::function<void()>& change);
  /// Switches updates in backward() on or off. If on, backward() updates the parameters: where all ranks are on one
  /// host (transport shm), each parameter as soon as all ranks have its gradient, while other gradients are still being
  /// computed; elsewhere at the end. When backward() returns, all parameters are updated, with the options as they were
  /// at its beginning; step() then only ends the step. This saves a pass over memory that is no longer in cache if
  /// gradients are large and few; measure it.
  ///
  /// The following throw UsageError in this mode: clip_grad_norm(), clip_grad_value(), average_gradients(), no_sync(),
  /// GradScaler::unscale_(), gradients that exist before backward(), a second backward() before step(), a nested
  /// backward() (gradient checkpointing), parameters that share a storage, and gradients changed before step(). A graph
  /// that uses a parameter's values but not its gradient (W.detach()) fails, as after any other in-place write; one
  /// that uses W.variable_data() computes with the new values. After an error in backward(), the contents of parameters
  /// are unspecified. All ranks must call it alike, between steps. Does not block.
  void update_in_backward(bool on = true);
  /// True if the ranks of this host share one copy of the parameters. Does not block.
  bool shares_parameters() const;

  /// Returns the state of all parameters that have been updated, as "fc.weight.exp_avg", "fc.weight.step" and so on, in
  /// whole tensors that can be loaded with any number of ranks. Does not wait for other ranks, except with
  /// FusedOptions.shard_state, where it is a collective. Waits for a device only if updates may have been skipped
  /// there. Tensors that this rank holds as a whole alias the optimizer's state: the caller must copy them before the
  /// next step, as Checkpointer::save_async() does, and must not use them after the destruction of the optimizer.
  checkpoint::StateDict state_dict() const override;
  /// Loads what state_dict() returned; all ranks pass the same values. Throws UsageError, and changes nothing, for
  /// missing or unknown names and for other shapes.
  void load_state_dict(const checkpoint::StateDict& state) override;

 protected:
  FusedOptimizer();
  ~FusedOptimizer();
  /// Defined in fused_update.h.
  template <typename Rule>
  void initialize(std::shared_ptr<ddp::GradientSource> gradients, std::unique_ptr<Rule> rule,
                  const FusedOptions& options);

  std::shared_ptr<FusedUpdate> update_;  // not destroyed by a child made by fork()

 private:
  // For clip_grad_norm() and clip_grad_value() of optim/clip_grad.h.
  friend at::Tensor optim::clip_grad_norm(torch::optim::Optimizer& optimizer, double max_norm);
  friend void optim::clip_grad_value(torch::optim::Optimizer& optimizer, double max);
  at::Tensor clip_norm(double max_norm);
  void clip_value(double max);

  amp::UnscaleResult unscale(const at::Tensor& inverse_scale) override;
  bool step_unless_found_inf(const at::Tensor& found_inf) override;
  void skip_step() override;

  std::unique_ptr<UpdateRule> rule_;
};

/// A fused optimizer with the interface of `TorchOptimizer`. It optimizes all parameters of the DistributedDataParallel
/// that its constructor gets; those that none of its `groups` lists use its `options`. The constructor throws
/// UsageError for invalid options, groups or parameters, and CommError. The functions that are not defined here are in
/// fused_update.h: each optimizer declares its instantiation `extern` and makes it in its source.
template <typename TorchOptimizer, typename Options>
class FusedOptimizerOf : public TorchOptimizer, public FusedOptimizer {
 public:
  /// A parameter group with its own options.
  struct Group {
    std::vector<at::Tensor> parameters;
    Options options;
  };

  /// A collective: blocks until all ranks have called it. Throws UsageError, and CommError or an error derived from it,
  /// after which the contents of parameters are unspecified.
  at::Tensor step(std::function<at::Tensor()> closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  /// All ranks must load the same archive, or call broadcast_optimizer_state() afterwards. With
  /// FusedOptions.shard_state use load_state_dict() instead.
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  /// `groups` is a vector of torch's OptimizerParamGroup.
  template <typename Groups, typename TorchOptions>
  FusedOptimizerOf(const Groups& groups, const TorchOptions& defaults) : TorchOptimizer(groups, defaults) {
    // The constructor of torch 2.15 replaces options of a group that equal those of a new object, and all of a type
    // that it does not know, by `defaults`.
    for (std::size_t i = 0; i < groups.size(); ++i)
      if (groups[i].has_options()) this->param_groups()[i].set_options(groups[i].options().clone());
  }
};

}  // namespace lockstep::optim::inline fused
