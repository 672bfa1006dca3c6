// Which operations a piece of code calls, with which numbers.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::cuda {

struct CallList {
  std::vector<std::string> calls;         ///< "aten::mul(tensor, 0.5)"
  std::optional<std::string> cpu_tensor;  ///< the first call with a tensor of one dimension or more on the CPU
};

/// Runs `body`: its calls, also those of its backward passes, which other threads make. One at a time in a process.
/// Takes about a microsecond a call.
CallList calls_of(const std::function<void()>& body);

/// "call 12, aten::add_(tensor, 0.1), was aten::add_(tensor, 0.2) in the run before" for the first that differs;
/// nothing when the lists are equal. Pure.
std::optional<std::string> difference(const CallList& before, const CallList& after);

}  // namespace lockstep::cuda
