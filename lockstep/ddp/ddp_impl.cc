// The hooks of DistributedDataParallel on the autograd nodes that accumulate the gradients of parameters.
#include "lockstep/ddp/ddp_impl.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "lockstep/base/error.h"

namespace lockstep::ddp {
namespace {

using base::UsageError;

/// Runs a hook of autograd. Its exception ends the backward().
template <typename Hook>
void run_hook(const Hook& hook) {
  const HookScope scope;
  try {
    hook();
  } catch (...) {
    if (Backward* const now = Backward::current()) now->record_error();
    throw;
  }
}

}  // namespace

// detach_module() removes the hooks before `impl` is destroyed.

class DistributedDataParallel::Impl::BeforeAccumulateHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAccumulateHook(Impl& impl) : impl_(impl) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    run_hook([&] { impl_.on_gradient_arrives(); });
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
    run_hook([&] { impl_.on_gradient_accumulated(index_); });
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
