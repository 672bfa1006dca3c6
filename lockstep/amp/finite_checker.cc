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

/// Maps a parameter, a buffer, or a view or cast of one to the name of its module.
using ModuleByTensor = std::unordered_map<const c10::TensorImpl*, std::string>;

std::string module_name_of(const std::string& name) {
  const auto dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot);
}

std::string describe_module(const std::string& module) {
  return module.empty() ? "the model itself" : "module '" + module + "'";
}

/// The defined tensors in `values`, also those in lists.
std::vector<at::Tensor> tensors_in(c10::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : values) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
  }
  std::erase_if(tensors, [](const at::Tensor& tensor) { return !tensor.defined(); });
  return tensors;
}

/// "[2, 8]: min -inf, max 3.5". Empty if all values are finite, or if `tensor` is not a dense tensor of floating-point
/// numbers.
std::string describe_non_finite(const at::Tensor& tensor) {
  if (!at::isFloatingType(tensor.scalar_type()) || tensor.layout() != at::kStrided || tensor.numel() == 0 ||
      tensor.is_meta())
    return {};
  const auto [min_value, max_value] = at::aminmax(tensor.detach());
  const double low = min_value.item<double>(), high = max_value.item<double>();
  if (std::isfinite(low) && std::isfinite(high)) return {};
  std::ostringstream text;
  text << tensor.sizes() << ": min " << low << ", max " << high;
  return text.str();
}

std::string describe_first_non_finite(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors)
    if (std::string text = describe_non_finite(tensor); !text.empty()) return text;
  return {};
}

/// True if the operation's output is uninitialised memory.
bool returns_uninitialized(const char* operation) {
  return std::strstr(operation, "empty") != nullptr || std::strstr(operation, "resize") != nullptr;
}

enum class ModuleUse { kNothing, kOnlyModuleTensors, kModuleAndOthers };

}  // namespace

class FiniteChecker::Observer {
 public:
  explicit Observer(const torch::nn::Module& module) : outer_(innermost) {
    for (const auto& parameter : module.named_parameters()) track(parameter.value(), module_name_of(parameter.key()));
    for (const auto& buffer : module.named_buffers()) track(buffer.value(), module_name_of(buffer.key()));
    // BACKWARD_FUNCTION is included so that operations inside backward() have a depth above 1 and are ignored.
    if (!outer_)
      handle_ =
          at::addThreadLocalCallback(at::RecordFunctionCallback(&Observer::begin, &Observer::end)
                                         .needsInputs(true)
                                         .needsOutputs(true)
                                         .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
    innermost = this;
  }

  ~Observer() {
    innermost = outer_;
    if (!outer_) at::removeCallback(handle_);
  }

  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  std::string fault(const at::Tensor& result) const {
    if (!finding_.empty()) return finding_;
    const at::DisableRecordFunctionGuard off;
    const std::string values = describe_non_finite(result);
    if (values.empty()) return {};
    return first_suspect_.empty() ? "the result is not finite, " + values : first_suspect_;
  }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
    if (++depth > 1 || call.scope() != at::RecordScope::FUNCTION) return nullptr;
    const at::DisableRecordFunctionGuard off;
    const std::vector<at::Tensor> inputs = tensors_in(call.inputs());
    for (Observer* observer = innermost; observer; observer = observer->outer_)
      observer->check_inputs(call.name(), inputs);
    return nullptr;
  }

  static void end(const at::RecordFunction& call, at::ObserverContext*) {
    if (--depth > 0 || call.scope() != at::RecordScope::FUNCTION || returns_uninitialized(call.name())) return;
    const at::DisableRecordFunctionGuard off;
    const std::vector<at::Tensor> outputs = tensors_in(call.outputs());
    for (Observer* observer = innermost; observer; observer = observer->outer_)
      observer->check_outputs(call.name(), outputs);
  }

  std::pair<ModuleUse, std::string> find_module(const std::vector<at::Tensor>& inputs) const {
    std::pair<ModuleUse, std::string> of{ModuleUse::kNothing, {}};
    bool others = false;
    for (const at::Tensor& input : inputs) {
      const auto entry = module_by_tensor_.find(input.unsafeGetTensorImpl());
      if (entry == module_by_tensor_.end())
        others = true;
      else if (of.first == ModuleUse::kNothing)
        of = {ModuleUse::kOnlyModuleTensors, entry->second};
    }
    if (of.first == ModuleUse::kOnlyModuleTensors && others) of.first = ModuleUse::kModuleAndOthers;
    return of;
  }

  void track(const at::Tensor& tensor, const std::string& module) {
    if (module_by_tensor_.emplace(tensor.unsafeGetTensorImpl(), module).second) tracked_.push_back(tensor);
  }

  void check_inputs(const char* operation, const std::vector<at::Tensor>& inputs) {
    current_use_ = find_module(inputs);
    if (current_use_.first != ModuleUse::kModuleAndOthers || !finding_.empty()) return;
    for (const at::Tensor& input : inputs) {
      const std::string values = describe_non_finite(input);
      if (values.empty()) continue;
      const auto entry = module_by_tensor_.find(input.unsafeGetTensorImpl());
      if (entry != module_by_tensor_.end())
        finding_ = "a parameter or buffer of " + describe_module(entry->second) + " is not finite, " + values;
      else
        finding_ = "an input of " + describe_module(current_use_.second) + " (" + operation + ") is not finite, " +
                   values + (first_suspect_.empty() ? "" : "; before that, " + first_suspect_);
      return;
    }
  }

  void check_outputs(const char* operation, const std::vector<at::Tensor>& outputs) {
    const auto& [uses, module] = current_use_;
    if (uses == ModuleUse::kOnlyModuleTensors) {
      for (const at::Tensor& output : outputs) track(output, module);
      return;
    }
    if (!finding_.empty()) return;
    const std::string values = describe_first_non_finite(outputs);
    if (uses == ModuleUse::kModuleAndOthers) {
      last_module_ = describe_module(module);
      first_suspect_.clear();
      if (!values.empty())
        finding_ = "the output of " + last_module_ + " (" + operation + ") is not finite, " + values +
                   "; its inputs were finite";
    } else if (!values.empty() && first_suspect_.empty()) {
      first_suspect_ =
          "the output of " + std::string(operation) + " after " + last_module_ + " is not finite, " + values;
    }
  }

  static inline thread_local Observer* innermost = nullptr;
  static inline thread_local int depth = 0;  // nesting of operations; depth 1 is the call in the user's program

  Observer* const outer_;
  at::CallbackHandle handle_ = 0;  // set in the outermost Observer, whose callbacks serve all
  ModuleByTensor module_by_tensor_;
  std::vector<at::Tensor> tracked_;                // keeps the tensors in module_by_tensor_ alive
  std::pair<ModuleUse, std::string> current_use_;  // of the running operation at depth 1
  std::string last_module_ = "the start";          // the last module that was used
  std::string first_suspect_;                      // the first operation since then with a non-finite result
  std::string finding_;
};

FiniteChecker::FiniteChecker(nn::ConstModuleRef module) : observer_(std::make_unique<Observer>(*module)) {}
FiniteChecker::~FiniteChecker() = default;

void FiniteChecker::check(const at::Tensor& result) const {
  const std::string fault = observer_->fault(result);
  if (!fault.empty())
    throw base::Error(
        base::Cause::kNonFinite, "FiniteChecker: " + fault,
        "check this step's batch, use a smaller learning rate, or put a DisableAutocast around that module");
}

}  // namespace lockstep::amp
