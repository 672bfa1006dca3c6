// The hooks of DistributedDataParallel on the autograd nodes that accumulate the gradients of parameters, and what a
// model does when they run.
#include "lockstep/ddp/ddp_impl.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/comm/channel/deadlock_detector.h"
#include "lockstep/comm/group_access.h"

namespace lockstep::ddp {

using base::UsageError;

// detach_module() removes the hooks before `impl` is destroyed.

class DistributedDataParallel::Impl::BeforeAccumulateHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAccumulateHook(Impl& impl) : impl_(impl) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const HookScope scope;
    try {
      impl_.on_gradient_arrives();
    } catch (...) {
      Backward::record_error();
      throw;
    }
    return gradients;
  }

 private:
  Impl& impl_;
};

class DistributedDataParallel::Impl::AfterAccumulateHook final : public torch::autograd::FunctionPostHook {
 public:
  AfterAccumulateHook(Impl& impl, std::size_t index) : impl_(impl), index_(index) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    const HookScope scope;
    try {
      impl_.on_gradient_accumulated(index_);
    } catch (...) {
      Backward::record_error();
      throw;
    }
    return outputs;
  }

 private:
  Impl& impl_;
  const std::size_t index_;
};

/// Also for frozen parameters, because they may be unfrozen at any time. The node stays the same then.
void DistributedDataParallel::Impl::register_hooks(std::size_t index) {
  HookedParameter& parameter = parameters_[index];
  const bool requires_grad = parameter.tensor.requires_grad();
  parameter.tensor.set_requires_grad(true);
  auto node = torch::autograd::impl::grad_accumulator(parameter.tensor);
  parameter.tensor.set_requires_grad(requires_grad);
  auto before = std::make_unique<BeforeAccumulateHook>(*this);
  parameter.raw = node.get();
  parameter.before_hook = reinterpret_cast<std::uintptr_t>(before.get());
  node->add_pre_hook(std::move(before));
  parameter.after_hook = node->add_post_hook(std::make_unique<AfterAccumulateHook>(*this, index));
  parameter.node = std::make_shared<decltype(node)>(std::move(node));
}

void DistributedDataParallel::Impl::remove_hooks(HookedParameter& parameter) noexcept {
  std::erase_if(parameter.raw->pre_hooks(), [&](const auto& hook) {
    return reinterpret_cast<std::uintptr_t>(hook.get()) == parameter.before_hook;
  });
  parameter.raw->del_post_hook(parameter.after_hook);
}

void DistributedDataParallel::Impl::check_before_backward() {
  module_watch_.check();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    HookedParameter& parameter = parameters_[i];
    const auto* meta = torch::autograd::impl::get_autograd_meta(parameter.tensor);
    if (meta->grad_accumulator_.lock().get() == parameter.raw) {
      accumulate_on_current_stream(*parameter.raw, parameter.tensor);
      continue;
    }
    // set_data() with other options, as in torch::load() and to(), has removed the node. The tensor is as before:
    // module_watch_ has compared its dtype and sizes.
    remove_hooks(parameter);
    register_hooks(i);
  }
}

void DistributedDataParallel::Impl::on_gradient_arrives() {
  const std::lock_guard lock(gradient_mutex_);
  Backward* const now = Backward::current();
  if (!now)
    throw UsageError(
        "DistributedDataParallel: a gradient of its module was computed by another engine than torch's default engine",
        "call backward() instead");
  if (backward_ == now) return;
  if (backward_)
    throw UsageError("DistributedDataParallel: two threads run backward() of one module at the same time",
                     "use one module and one DistributedDataParallel, on a group of its own, for each thread");
  backward_ = now;
  now->join(*this);
  begin_backward();
}

void DistributedDataParallel::Impl::begin_backward() {
  check_not_shared();
  if (host_averager_ && host_averager_->must_begin()) host_averager_->begin(tensors_to_average(true));
  pass_ = {};
  if (reduction_ == Reduction::kOpen) reduction_ = Reduction::kUnfinished;
  bool any_gradient = false;
  bool any_accumulated_locally = false;
  for (const HookedParameter& parameter : parameters_) {
    any_gradient |= parameter.tensor.grad().defined();
    any_accumulated_locally |= parameter.accumulated_locally;
  }
  // If no_sync() left the existing gradients, accumulating_ keeps the value from before the first of them.
  if (!any_gradient)
    accumulating_ = false;
  else if (!any_accumulated_locally)
    accumulating_ = true;
  if (!any_gradient)
    for (HookedParameter& parameter : parameters_) parameter.accumulated_locally = false;
  if (!any_gradient) optimizer_.means_aside.clear();
  if (any_gradient && has_partial_means()) put_partial_means_aside();
  optimizer_.are_means_partial = false;
  pass_.has_leftover_gradients = any_gradient;
  pass_.is_deferred = reentrant_ || !options_.overlap || num_reductions_ == 0;
}

void DistributedDataParallel::Impl::on_gradient_accumulated(std::size_t index) {
  const std::lock_guard lock(gradient_mutex_);
  const comm::channel::DeadlockDetector::ActingForThread caller(backward_->thread());
  // After a nested backward() a parameter may receive its gradient in several calls, so gradients are submitted at the
  // end only.
  if (backward_->is_nested()) pass_.is_deferred = reentrant_ = true;
  HookedParameter& parameter = parameters_[index];
  if (!parameter.tensor.grad().defined()) return;  // the node received an undefined gradient
  pass_.has_reached_parameter = true;
  if (profile_ && no_sync_depth_ == 0) profile_->on_gradient(profiled_model_, index);
  if (optimizer_.updater) check_backward_update();
  if (no_sync_depth_ > 0 || (keeps_local_gradients() && !optimizer_.updater)) {
    parameter.accumulated_locally = true;
    optimizer_.has_averaged_gradients = false;
    return;
  }
  const at::NoGradGuard no_grad;
  if (reduction_ != Reduction::kOpen)
    optimizer_.updater ? begin_update() : begin_reduction(comm::GroupAccess::step_identity(group_), nullptr);
  if (reducer_->is_ready(index))
    throw UsageError(
        "backward(): the gradient of " + parameter.name + " was accumulated twice, after its reduction had begun",
        "set DdpOptions.overlap to false, because the model runs backward() inside backward()");
  if (!pass_.is_deferred)
    submit_gradient(index, true);
  else if (std::find(pass_.deferred.begin(), pass_.deferred.end(), index) == pass_.deferred.end())
    pass_.deferred.push_back(index);
}

/// Two reducers would average the same gradient, each with what the other has left of it.
void DistributedDataParallel::Impl::check_not_shared() const {
  for (const HookedParameter& parameter : parameters_) {
    const auto& hooks = parameter.raw->pre_hooks();
    if (hooks.size() > 1 && std::count_if(hooks.begin(), hooks.end(), [](const auto& hook) {
                              return dynamic_cast<const BeforeAccumulateHook*>(hook.get()) != nullptr;
                            }) > 1)
      throw UsageError("backward(): parameter " + parameter.name + " belongs to two DistributedDataParallel objects",
                       "if two modules share it, name it in DdpOptions.ignore of one of them; if this "
                       "DistributedDataParallel replaces another one, destroy that first");
  }
}

}  // namespace lockstep::ddp
