#include "lockstep/nn/recompute.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/custom_class.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_set>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using NodePointer = decltype(torch::autograd::Edge::function);  // its class differs between versions of torch
using ForwardFunction = std::function<variable_list(const variable_list& inputs)>;

/// The state of a default generator.
struct GeneratorState {
  explicit GeneratorState(at::Device on) : device(on) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    state = generator.get_state();
  }
  void restore() const {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
  at::Device device;
  at::Tensor state;
};

/// Returns the states for the CPU and for the other devices of `tensors`.
std::vector<GeneratorState> generator_states(const variable_list& tensors) {
  std::vector<GeneratorState> states = {GeneratorState(at::kCPU)};
  for (const at::Tensor& tensor : tensors) {
    const auto is_there = [&](const GeneratorState& state) { return state.device == tensor.device(); };
    if (!tensor.device().is_cpu() && std::none_of(states.begin(), states.end(), is_there))
      states.emplace_back(tensor.device());
  }
  return states;
}

/// Saved in the graph for backward().
struct SavedCall : torch::CustomClassHolder {
  std::shared_ptr<torch::nn::Module> module;
  ForwardFunction forward;
  std::vector<GeneratorState> generators;
  at::ThreadLocalState thread_state;  // with the settings of autocast
  std::vector<std::vector<std::int64_t>> output_sizes;
};

/// Autocast keeps the cast weights of a block, of which one has a graph and the other does not.
class NoAutocastCache {
 public:
  NoAutocastCache() { at::autocast::set_autocast_cache_enabled(false); }
  ~NoAutocastCache() { at::autocast::set_autocast_cache_enabled(was_); }
  NoAutocastCache(const NoAutocastCache&) = delete;
  NoAutocastCache& operator=(const NoAutocastCache&) = delete;

 private:
  bool was_ = at::autocast::is_autocast_cache_enabled();
};

/// While it exists, the random numbers of the first call are drawn again.
class SameRandomNumbers {
 public:
  explicit SameRandomNumbers(const std::vector<GeneratorState>& first) {
    for (const GeneratorState& state : first) now_.emplace_back(state.device);
    for (const GeneratorState& state : first) state.restore();
  }
  ~SameRandomNumbers() {
    for (const GeneratorState& state : now_) state.restore();
  }
  SameRandomNumbers(const SameRandomNumbers&) = delete;
  SameRandomNumbers& operator=(const SameRandomNumbers&) = delete;

 private:
  std::vector<GeneratorState> now_;
};

/// Keeps the values of the module's buffers and restores them, without counting as a change of them: other parts of the
/// graph may have saved them, with these values.
class SameBuffers {
 public:
  explicit SameBuffers(const torch::nn::Module& module) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& buffer : module.buffers()) buffers_.emplace_back(buffer, buffer.clone());
  }
  ~SameBuffers() {
    try {
      restore();
    } catch (...) {  // the error that ends this scope is the cause
    }
  }
  SameBuffers(const SameBuffers&) = delete;
  SameBuffers& operator=(const SameBuffers&) = delete;

  void restore() {
    const at::AutoDispatchBelowADInplaceOrView uncounted;
    for (auto& [buffer, value] : std::exchange(buffers_, {})) buffer.copy_(value);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
};

/// While it exists, the hooks of `parameters` on their gradients do not run: the outer backward() runs them.
class NoTensorHooks {
 public:
  explicit NoTensorHooks(const variable_list& parameters) {
    for (const at::Tensor& parameter : parameters)
      if (auto* meta = torch::autograd::impl::get_autograd_meta(parameter); meta && !meta->hooks_.empty())
        hooks_.emplace_back(&meta->hooks_, std::exchange(meta->hooks_, {}));
  }
  ~NoTensorHooks() {
    for (auto& [place, hooks] : hooks_) *place = std::move(hooks);
  }
  NoTensorHooks(const NoTensorHooks&) = delete;
  NoTensorHooks& operator=(const NoTensorHooks&) = delete;

 private:
  using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;
  std::vector<std::pair<Hooks*, Hooks>> hooks_;
};

/// Throws UsageError if the graph of `outputs` has a leaf that is not in the graph of one of `known`.
void require_known_leaves(const variable_list& outputs, const variable_list& known) {
  std::vector<NodePointer> found;  // owns the nodes: a leaf does not own its own
  std::unordered_set<torch::autograd::Node*> seen;
  const auto visit = [&](const NodePointer& node) {
    if (node && seen.insert(node.get()).second) found.push_back(node);
  };
  for (const at::Tensor& tensor : known) visit(torch::autograd::impl::gradient_edge(tensor).function);
  std::size_t next = found.size();  // the graphs of `known` are not searched
  for (const at::Tensor& output : outputs) visit(torch::autograd::impl::gradient_edge(output).function);
  while (next < found.size()) {
    const NodePointer node = found[next++];
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node.get())) {
      std::ostringstream sizes;
      sizes << leaf->variable.sizes();
      throw base::UsageError("recompute(): the function uses a tensor of size " + sizes.str() +
                                 " that requires a gradient and is neither an input nor a parameter of the module",
                             "pass it as an input");
    }
    for (const auto& edge : node->next_edges()) visit(edge.function);
  }
}

/// Its inputs are those of the function, then the module's parameters, whose gradients it returns: they are accumulated
/// by the outer backward(), as without recompute(), where DistributedDataParallel finds them.
struct RecomputeFunction : torch::autograd::Function<RecomputeFunction> {
  static variable_list forward(AutogradContext* context, at::TensorList tensors, std::int64_t num_inputs,
                               const c10::intrusive_ptr<SavedCall>& call) {
    const NoAutocastCache no_cache;
    std::vector<std::uint32_t> versions;
    for (const at::Tensor& tensor : tensors) versions.push_back(tensor._version());
    variable_list outputs = call->forward(tensors.slice(0, static_cast<std::size_t>(num_inputs)).vec());
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (tensors[i]._version() != versions[i])
        throw base::UsageError(
            "recompute(): the function changes an input or a parameter in place, which the second "
            "call would do again",
            "change a copy of it");
    for (const at::Tensor& output : outputs) call->output_sizes.push_back(output.sizes().vec());
    context->set_materialize_grads(false);  // an output without a gradient stays one
    context->save_for_backward(tensors.vec());
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->saved_data["inputs"] = num_inputs;
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (at::GradMode::is_enabled())
      throw base::UsageError("recompute(): backward() with create_graph has no second derivative here",
                             "call the module without recompute()");
    auto capsule = context->saved_data["call"].toCapsule();
    auto& call = static_cast<SavedCall&>(*capsule);
    variable_list tensors = context->get_saved_variables();  // throws if one was changed in place
    const auto num_inputs = static_cast<std::size_t>(context->saved_data["inputs"].toInt());
    for (std::size_t i = 0; i < num_inputs; ++i)
      tensors[i] = tensors[i].detach().requires_grad_(tensors[i].requires_grad());

    SameBuffers buffers(*call.module);
    variable_list outputs =
        call_again(call, {tensors.begin(), tensors.begin() + static_cast<std::ptrdiff_t>(num_inputs)});
    variable_list roots, root_gradients, wanted;
    for (std::size_t i = 0; i < outputs.size(); ++i)
      if (gradients[i].defined() && outputs[i].requires_grad()) {
        roots.push_back(outputs[i]);
        root_gradients.push_back(gradients[i]);
      }
    require_known_leaves(roots, tensors);
    for (const at::Tensor& tensor : tensors)
      if (tensor.requires_grad()) wanted.push_back(tensor);
    variable_list found;
    if (!roots.empty()) {
      outputs.clear();
      const NoTensorHooks no_hooks({tensors.begin() + static_cast<std::ptrdiff_t>(num_inputs), tensors.end()});
      found = torch::autograd::grad(roots, wanted, root_gradients, /*retain_graph=*/false, /*create_graph=*/false,
                                    /*allow_unused=*/true);
    }
    buffers.restore();
    variable_list result(tensors.size() + 2);  // the last two arguments of forward() are no tensors
    if (!found.empty())
      for (std::size_t i = 0, next = 0; i < tensors.size(); ++i)
        if (tensors[i].requires_grad()) result[i] = found[next++];
    return result;
  }

 private:
  static variable_list call_again(const SavedCall& call, const variable_list& inputs) {
    const at::ThreadLocalStateGuard first_state(call.thread_state);
    const at::AutoGradMode with_graph(true);
    const NoAutocastCache no_cache;
    const SameRandomNumbers random(call.generators);
    variable_list outputs = call.forward(inputs);
    bool same = outputs.size() == call.output_sizes.size();
    for (std::size_t i = 0; same && i < outputs.size(); ++i) same = outputs[i].sizes() == call.output_sizes[i];
    if (!same)
      throw base::UsageError("recompute(): the function returned " + std::to_string(call.output_sizes.size()) +
                                 " outputs in forward() and others, or of other sizes, in backward()",
                             "the function must do the same each time");
    return outputs;
  }
};

}  // namespace

variable_list recompute_outputs(std::shared_ptr<torch::nn::Module> module, ForwardFunction forward,
                                const variable_list& inputs) {
  for (const at::Tensor& input : inputs)
    if (!input.defined()) throw base::UsageError("recompute(): an input is an undefined tensor");
  variable_list tensors = inputs;
  std::unordered_set<const at::TensorImpl*> listed;  // a tied parameter has several names
  for (const at::Tensor& parameter : module->parameters())
    if (listed.insert(parameter.unsafeGetTensorImpl()).second) tensors.push_back(parameter);
  const auto needs_gradient = [](const at::Tensor& tensor) { return tensor.requires_grad(); };
  if (!at::GradMode::is_enabled() || std::none_of(tensors.begin(), tensors.end(), needs_gradient))
    return forward(inputs);
  auto call = c10::make_intrusive<SavedCall>();
  call->module = std::move(module);
  call->forward = std::move(forward);
  call->generators = generator_states(tensors);
  return RecomputeFunction::apply(at::TensorList(tensors), static_cast<std::int64_t>(inputs.size()), call);
}

}  // namespace lockstep::nn
