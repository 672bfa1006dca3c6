#include "lockstep/cuda/op_trace.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <charconv>
#include <mutex>

namespace lockstep::cuda {
namespace {

struct Recording {
  std::mutex mutex;  // guards what follows
  CallList list;
};
// Callbacks are plain functions.
std::mutex one_at_a_time;
Recording* current = nullptr;  // under one_at_a_time, and read by threads that work for the one that holds it

std::string text_of(double number) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, number).ptr};
}

std::string text_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  if (!tensor.is_cpu()) return "tensor";
  if (tensor.dim() > 0) return "tensor on cpu";
  const at::DisableRecordFunctionGuard guard;
  return text_of(tensor.item().toDouble());  // how a plain number travels
}

std::string text_of(const c10::IValue& value) {
  if (value.isTensor()) return text_of(value.toTensor());
  if (value.isDouble()) return text_of(value.toDouble());
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isBool()) return value.toBool() ? "true" : "false";
  if (value.isList()) {
    std::string text;
    for (const c10::IValue& each : value.toListRef()) text += (text.empty() ? "" : ", ") + text_of(each);
    return "[" + text + "]";
  }
  return "-";
}

std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& call) {
  std::string arguments;
  for (const c10::IValue& value : call.inputs()) arguments += (arguments.empty() ? "" : ", ") + text_of(value);
  std::string text = std::string(call.name()) + "(" + arguments + ")";
  const std::lock_guard lock(current->mutex);
  CallList& list = current->list;
  if (!list.cpu_tensor && text.find("tensor on cpu") != std::string::npos) list.cpu_tensor = text;
  list.calls.push_back(std::move(text));
  return nullptr;
}

/// Torch's threads for backward work with the settings of the thread that called backward(), callbacks among them.
class Callback {
 public:
  Callback()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(note).needsInputs(true).scopes({at::RecordScope::FUNCTION}))) {}
  ~Callback() { at::removeCallback(handle_); }

 private:
  const at::CallbackHandle handle_;
};

}  // namespace

CallList calls_of(const std::function<void()>& body) {
  const std::lock_guard lock(one_at_a_time);
  Recording recording;
  current = &recording;
  const Callback callback;
  body();
  return std::move(recording.list);
}

std::optional<std::string> difference(const CallList& before, const CallList& after) {
  const std::size_t common = std::min(before.calls.size(), after.calls.size());
  for (std::size_t i = 0; i < common; ++i)
    if (before.calls[i] != after.calls[i])
      return "call " + std::to_string(i + 1) + ", " + after.calls[i] + ", was " + before.calls[i] +
             " in the run before";
  if (before.calls.size() == after.calls.size()) return std::nullopt;
  return "there were " + std::to_string(after.calls.size()) + " calls, and " + std::to_string(before.calls.size()) +
         " in the run before";
}

}  // namespace lockstep::cuda
