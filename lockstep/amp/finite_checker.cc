#include "lockstep/amp/finite_checker.h"

#include <ATen/ops/aminmax.h>
#include <ATen/record_function.h>
#include <torch/nn/module.h>

#include <cmath>
#include <cstring>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::amp {
namespace {

/// Of which module a tensor is a parameter, a buffer, or a view or cast of one.
using Owners = std::unordered_map<const c10::TensorImpl*, std::string>;

std::string owner_of(const std::string& name) {
  const auto dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot);
}

std::string said(const std::string& module) { return module.empty() ? "the model itself" : "module '" + module + "'"; }

void add_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) tensors.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (at::Tensor& tensor : value.toTensorVector())
      if (tensor.defined()) tensors.push_back(std::move(tensor));
  }
}

std::vector<at::Tensor> tensors_in(c10::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : values) add_tensors(value, tensors);
  return tensors;
}

/// "[2, 8]: least -inf, greatest 3.5"; empty when all values are finite, or it is no tensor of real numbers in memory.
std::string not_finite(const at::Tensor& tensor) {
  if (!at::isFloatingType(tensor.scalar_type()) || tensor.layout() != at::kStrided || tensor.numel() == 0 ||
      tensor.is_meta())
    return {};
  const auto [least, greatest] = at::aminmax(tensor.detach());
  const double low = least.item<double>(), high = greatest.item<double>();
  if (std::isfinite(low) && std::isfinite(high)) return {};
  std::ostringstream text;
  text << tensor.sizes() << ": least " << low << ", greatest " << high;
  return text.str();
}

std::string first_not_finite(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors)
    if (std::string text = not_finite(tensor); !text.empty()) return text;
  return {};
}

/// What it puts out is whatever was in memory.
bool fills_nothing(const char* operation) {
  return std::strstr(operation, "empty") != nullptr || std::strstr(operation, "resize") != nullptr;
}

enum class Uses { kNothing, kOnlyModule, kModule };

}  // namespace

class CheckFinite::Watch {
 public:
  explicit Watch(const torch::nn::Module& module);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  std::string found(const at::Tensor& result) const;

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call);
  static void end(const at::RecordFunction& call, at::ObserverContext* context);
  std::pair<Uses, std::string> module_of(const std::vector<at::Tensor>& inputs) const;
  void keep(const at::Tensor& tensor, const std::string& module);
  void look_at_inputs(const char* operation, const std::vector<at::Tensor>& inputs);
  void look_at_outputs(const char* operation, const std::vector<at::Tensor>& outputs);

  static inline thread_local Watch* innermost = nullptr;
  static inline thread_local int depth =
      0;  // of calls within calls; the outermost is the one that a program's text has

  Watch* const outer_;
  at::CallbackHandle handle_ = 0;  // of the outermost Watch, which calls for all
  Owners owners_;
  std::vector<at::Tensor> kept_;          // those in owners_
  std::pair<Uses, std::string> running_;  // of the call at depth 1
  std::string after_ = "the beginning";   // the last module that was used
  std::string suspect_;                   // the first operation since then whose result was not finite
  std::string found_;
};

CheckFinite::Watch::Watch(const torch::nn::Module& module) : outer_(innermost) {
  for (const auto& parameter : module.named_parameters()) keep(parameter.value(), owner_of(parameter.key()));
  for (const auto& buffer : module.named_buffers()) keep(buffer.value(), owner_of(buffer.key()));
  // What is called inside a function of backward is deeper than that, and so not looked at.
  if (!outer_)
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&Watch::begin, &Watch::end)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  innermost = this;
}

CheckFinite::Watch::~Watch() {
  innermost = outer_;
  if (!outer_) at::removeCallback(handle_);
}

std::string CheckFinite::Watch::found(const at::Tensor& result) const {
  if (!found_.empty()) return found_;
  const at::DisableRecordFunctionGuard off;
  const std::string values = not_finite(result);
  if (values.empty()) return {};
  return suspect_.empty() ? "the result is not finite, " + values : suspect_;
}

std::unique_ptr<at::ObserverContext> CheckFinite::Watch::begin(const at::RecordFunction& call) {
  if (++depth > 1 || call.scope() != at::RecordScope::FUNCTION) return nullptr;
  const at::DisableRecordFunctionGuard off;
  const std::vector<at::Tensor> inputs = tensors_in(call.inputs());
  for (Watch* watch = innermost; watch; watch = watch->outer_) watch->look_at_inputs(call.name(), inputs);
  return nullptr;
}

void CheckFinite::Watch::end(const at::RecordFunction& call, at::ObserverContext*) {
  if (--depth > 0 || call.scope() != at::RecordScope::FUNCTION || fills_nothing(call.name())) return;
  const at::DisableRecordFunctionGuard off;
  const std::vector<at::Tensor> outputs = tensors_in(call.outputs());
  for (Watch* watch = innermost; watch; watch = watch->outer_) watch->look_at_outputs(call.name(), outputs);
}

std::pair<Uses, std::string> CheckFinite::Watch::module_of(const std::vector<at::Tensor>& inputs) const {
  std::pair<Uses, std::string> of{Uses::kNothing, {}};
  bool others = false;
  for (const at::Tensor& input : inputs) {
    const auto owner = owners_.find(input.unsafeGetTensorImpl());
    if (owner == owners_.end())
      others = true;
    else if (of.first == Uses::kNothing)
      of = {Uses::kOnlyModule, owner->second};
  }
  if (of.first == Uses::kOnlyModule && others) of.first = Uses::kModule;
  return of;
}

void CheckFinite::Watch::keep(const at::Tensor& tensor, const std::string& module) {
  if (owners_.emplace(tensor.unsafeGetTensorImpl(), module).second) kept_.push_back(tensor);
}

void CheckFinite::Watch::look_at_inputs(const char* operation, const std::vector<at::Tensor>& inputs) {
  running_ = module_of(inputs);
  if (running_.first != Uses::kModule || !found_.empty()) return;
  for (const at::Tensor& input : inputs) {
    const std::string values = not_finite(input);
    if (values.empty()) continue;
    const auto owner = owners_.find(input.unsafeGetTensorImpl());
    if (owner != owners_.end())
      found_ = "a parameter or buffer of " + said(owner->second) + " is not finite, " + values;
    else
      found_ = "what " + said(running_.second) + " (" + operation + ") was given is not finite, " + values +
               (suspect_.empty() ? "" : "; first " + suspect_);
    return;
  }
}

void CheckFinite::Watch::look_at_outputs(const char* operation, const std::vector<at::Tensor>& outputs) {
  const auto& [uses, module] = running_;
  if (uses == Uses::kOnlyModule) {
    for (const at::Tensor& output : outputs) keep(output, module);
    return;
  }
  if (!found_.empty()) return;
  const std::string values = first_not_finite(outputs);
  if (uses == Uses::kModule) {
    after_ = said(module);
    suspect_.clear();
    if (!values.empty())
      found_ = "the output of " + after_ + " (" + operation + ") is not finite, " + values + "; what it was given was";
  } else if (!values.empty() && suspect_.empty()) {
    suspect_ = "the output of " + std::string(operation) + " after " + after_ + " is not finite, " + values;
  }
}

CheckFinite::CheckFinite(const torch::nn::Module& module) : watch_(std::make_unique<Watch>(module)) {}
CheckFinite::~CheckFinite() = default;

void CheckFinite::check(const at::Tensor& result) const {
  const std::string found = watch_->found(result);
  if (!found.empty())
    throw base::Error(base::Cause::kNonFinite, "CheckFinite: " + found,
                      "look at this step's batch; a smaller learning rate, or KeepFp32 around that module");
}

}  // namespace lockstep::amp
