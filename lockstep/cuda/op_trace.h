// Records the operations that a piece of code calls, with their numeric arguments.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::cuda {

struct OpTrace {
  std::vector<std::string> calls;         ///< "aten::mul(tensor, 0.5)"
  std::optional<std::string> cpu_tensor;  ///< the first call with a CPU tensor of one or more dimensions
};

/// Runs `body` and records its calls, including those of backward passes on other threads. Calls of trace_ops() on
/// several threads are serialised. Costs about one microsecond per recorded call.
OpTrace trace_ops(const std::function<void()>& body);

/// Describes the first difference: "call 12, aten::add_(tensor, 0.1), was aten::add_(tensor, 0.2) in the previous run".
/// Returns nullopt if the traces are equal. Pure.
std::optional<std::string> find_difference(const OpTrace& before, const OpTrace& after);

}  // namespace lockstep::cuda
