// What all optimizers of lockstep::optim can do besides torch's.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/amp/unscaling.h"

namespace lockstep::ddp {
class GradientSource;
}

namespace lockstep::optim {

class FusedUpdate;
class UpdateRule;

/// What concerns an optimizer as a whole.
struct FusedOptions {
  /// ZeRO's first stage: each rank keeps the state of its part of the elements, updates these, and gets the others' new
  /// values from their owners at the end of step(). Where ranks of a host share one copy of everything these hosts are
  /// the owners; on a single such host there is nothing left to divide. Between hosts and over gloo or mpi it costs one
  /// more pass of all parameters over the wire. Not together with join().
  bool shard_state = false;
  /// Updates by ATen's operations on whole lists of tensors (_fused_adamw_, _foreach_…) instead of loops of our own,
  /// from gradients that backward() averages; nothing is shared then. Where a parameter is not on the CPU it is always
  /// so.
  bool foreach = false;
};

/// An optimizer made from a DistributedDataParallel that updates parameters in the pass that reads all ranks'
/// gradients. All ranks make it alike, and call step() and what is here alike; each waits for the others.
///
/// Ranks of one host that reach each other's memory (the transport is shm, or hierarchy between hosts) have one copy of
/// parameters and state, from construction to destruction; each updates what it has time for. Between steps that means:
///  - parameters may be read at any time but during step(). A write by the user reaches all ranks of the host: it is a
///  UsageError of the next step(), unless
///    it was made in change_parameters(). Loading weights, too. A write through .data() is not noticed.
///  - a child made by fork() must not touch them.
///  - parameters that are part of a larger tensor are a UsageError.
/// When all ranks are of one host (shm), also between backward() and step():
///  - after backward() gradients are this rank's own, their mean is never stored. Whoever wants it calls
///  average_gradients() first. A gradient
///    that was changed without it is a UsageError of step(), as far as it can be seen. Several backward() calls add up;
///    no_sync() is not needed, and changes nothing.
/// Elsewhere backward() averages gradients, and each rank updates its own parameters from them in one pass. Sparse
/// gradients are a UsageError everywhere.
///
/// Parameters on a device are updated by ATen's operations (FusedOptions.foreach) from gradients that backward()
/// has averaged. Nobody waits for the device there: not in step(), not in clipping, which then writes .grad(), and not
/// in GradScaler::step(), but for the first update of SGD with dampening.
///
/// Results are torch::optim's on the averaged gradients within rounding, and the same bits on every rank and in every
/// run. Gradients, options and state may be of any dtype that a loop is made for (loops.h); of bfloat16 and half, sums
/// and state are in float. Ranks that share parameters, or divide state, and whose options differ get a DesyncError in
/// step(). An update is told to autograd: backward() through a graph that was made before it fails, as in Python.
/// step() ends the step of the group (Group::step()).
class FusedOptimizer : public amp::UnscalingOptimizer {
 public:
  FusedOptimizer(const FusedOptimizer&) = delete;
  FusedOptimizer& operator=(const FusedOptimizer&) = delete;

  /// Makes each gradient the mean over the ranks, where backward() has not. It may be read and changed then, on all
  /// ranks alike.
  void average_gradients();
  /// The 2-norm of all averaged gradients together, as torch::nn::utils::clip_grad_norm_ computes it; the next step()
  /// scales them by min(1, max_norm / (norm + 1e-6)), unless another backward() comes first. What .grad() shows does
  /// not change. A float64 scalar, on the gradients' device. After amp::GradScaler's unscale_() the norm is that of the
  /// unscaled gradients.
  at::Tensor clip_grad_norm(double max_norm);
  /// The next step() takes what is more than `max` in any averaged gradient as `max`, and what is less than -max as
  /// -max, unless another backward() comes first; a NaN stays. What .grad() shows does not change, and no pass over it
  /// is made. After clip_grad_norm() and GradScaler's unscale_(), where these are called, it clips what they leave.
  /// Waits for nobody.
  void clip_grad_value(double max);
  /// Calls `change` once for each copy of the parameters, which it may write; on some ranks it is not called at all. It
  /// must not call anything that waits for other ranks.
  void change_parameters(const std::function<void()>& change);
  /// From now on parameters are updated in backward(): where all ranks are on one host (shm) each as soon as all ranks
  /// have its gradient, while others are still computed; elsewhere at the end. When backward() returns all are updated,
  /// by options as they were at its beginning; step() ends the step. It saves a pass over memory that is cold by then
  /// where gradients are large and few; measure it. Some things cannot be had with it: UsageError of whatever comes
  /// first are clip_grad_norm(), average_gradients(), no_sync(), gradients that were there before backward(), a second
  /// backward() before step(), a model that runs backward() inside backward() (gradient checkpointing), parameters that
  /// share a storage, gradients changed before step(). A graph that uses a parameter's values without needing its
  /// gradient (W.detach()) fails as autograd's other writes in place do; one that uses W.variable_data() computes with
  /// new values. After an error of backward() parameters are unspecified. All ranks call it alike, between steps; waits
  /// for nobody.
  void update_in_backward(bool on = true);
  /// True when the ranks of this host have one copy of the parameters.
  bool shares_parameters() const;

  /// "fc.weight.exp_avg", "fc.weight.step" …: copies, whole, of parameters that have been updated. Waits for nobody;
  /// with FusedOptions.shard_state all ranks call it alike, and wait for each other. It can be loaded with any number
  /// of ranks. Without `copies` tensors are those in use where this rank has the whole of them: who saves them copies
  /// them before its next step, as Checkpointer::save_async() does.
  std::vector<std::pair<std::string, at::Tensor>> state_dict(bool copies = true) const;
  /// The reverse, on all ranks with the same values. Throws UsageError for names that are missing or belong to no
  /// parameter: nothing has changed then.
  void load_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& state);

 protected:
  FusedOptimizer();
  ~FusedOptimizer();
  void initialize(std::shared_ptr<ddp::GradientSource> gradients, std::unique_ptr<UpdateRule> rule,
                  const FusedOptions& options);
  at::Tensor step_fused(const std::function<at::Tensor()>& closure);
  void import_loaded_state();
  /// Before torch's counts of steps are saved. Waits for the device.
  void sync_step_counts() const;

 private:
  amp::UnscaleResult unscale(double inverse_scale) override;
  bool step_unless_found_inf(const at::Tensor& found_inf) override;
  void skip_step() override;

  std::unique_ptr<UpdateRule> rule_;
  std::unique_ptr<FusedUpdate> update_;
};

}  // namespace lockstep::optim
