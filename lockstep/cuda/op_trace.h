// Which operations a piece of code calls, with which numbers.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::cuda {

struct OpTrace {
  std::vector<std::string> calls;         ///< "aten::mul(tensor, 0.5)"
  std::optional<std::string> cpu_tensor;  ///< the first call with a tensor of one dimension or more on the CPU
};

/// Runs `body`: its calls, also those of its backward passes, which other threads make. One at a time in a process.
/// Takes about a microsecond a call.
OpTrace trace_ops(const std::function<void()>& body);

/// "call 12, aten::add_(tensor, 0.1), was aten::add_(tensor, 0.2) in the run before" for the first that differs;
/// nothing when the lists are equal. Pure.
std::optional<std::string> find_difference(const OpTrace& before, const OpTrace& after);

}  // namespace lockstep::cuda
