// Records operations through thread-local RecordFunction callbacks.
#include "lockstep/cuda/op_trace.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <charconv>
#include <mutex>
#include <string_view>
#include <utility>

#include "lockstep/base/parse.h"

namespace lockstep::cuda {
namespace {

// Global, because RecordFunction callbacks are plain functions, and autograd's threads call them too.
std::mutex trace_mutex;  // held by the thread that traces
std::mutex calls_mutex;  // guards recorded
OpTrace recorded;

std::string to_text(double number) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, number).ptr};
}

std::string to_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  if (!tensor.is_cpu()) return "tensor";
  if (tensor.dim() > 0) return "tensor on cpu";
  const at::DisableRecordFunctionGuard guard;
  return to_text(tensor.item().toDouble());  // numbers are passed as zero-dimensional CPU tensors
}

std::string to_text(const c10::IValue& value) {
  if (value.isTensor()) return to_text(value.toTensor());
  if (value.isDouble()) return to_text(value.toDouble());
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isBool()) return value.toBool() ? "true" : "false";
  if (value.isList())
    return "[" + base::joined(value.toListRef(), ", ", [](const c10::IValue& each) { return to_text(each); }) + "]";
  return "-";
}

/// libtorch's attention passes the seed of its dropout, also without dropout, as a tensor that is on the CPU in an
/// eager run, with no value, and on the GPU in a capture.
std::string argument_text(const c10::IValue& value, bool is_attention) {
  const bool is_seed = is_attention && value.isTensor() && value.toTensor().defined() && value.toTensor().dim() == 0;
  return is_seed ? "tensor" : to_text(value);
}

std::unique_ptr<at::ObserverContext> record_op(const at::RecordFunction& call) {
  const bool is_attention = std::string_view(call.name()).find("attention") != std::string_view::npos;
  const std::string arguments =
      base::joined(call.inputs(), ", ", [&](const c10::IValue& value) { return argument_text(value, is_attention); });
  std::string text = std::string(call.name()) + "(" + arguments + ")";
  const std::lock_guard lock(calls_mutex);
  if (!recorded.cpu_tensor && text.find("tensor on cpu") != std::string::npos) recorded.cpu_tensor = text;
  recorded.calls.push_back(std::move(text));
  return nullptr;
}

}  // namespace

OpTrace trace_ops(const std::function<void()>& body) {
  const std::lock_guard lock(trace_mutex);
  const auto take = [] {
    const std::lock_guard calls_lock(calls_mutex);
    return std::exchange(recorded, {});
  };
  take();  // what a body that threw has left
  // torch's backward threads inherit the thread-local state of the thread that called backward(), including its
  // callbacks.
  const at::CallbackHandle callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback(record_op).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  const auto remove = c10::make_scope_exit([callback] { at::removeCallback(callback); });
  body();
  return take();
}

std::optional<std::string> find_difference(const OpTrace& before, const OpTrace& after) {
  const std::size_t common = std::min(before.calls.size(), after.calls.size());
  for (std::size_t i = 0; i < common; ++i)
    if (before.calls[i] != after.calls[i])
      return "call " + std::to_string(i + 1) + ", " + after.calls[i] + ", was " + before.calls[i] +
             " in the previous run";
  if (before.calls.size() == after.calls.size()) return std::nullopt;
  return "there were " + std::to_string(after.calls.size()) + " calls, and " + std::to_string(before.calls.size()) +
         " in the previous run";
}

}  // namespace lockstep::cuda
