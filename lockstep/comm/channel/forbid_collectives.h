// ForbidCollectives: rejects collectives while a CUDA graph is captured. A replayed graph repeats only the GPU's work,
// so ranks could not compare their calls on the host.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::comm::channel {

/// While an instance exists, starting an operation of any group throws a UsageError that names the operation and
/// `what`. This applies to all threads, because autograd has threads of its own. At most one instance may exist at a
/// time.
class [[nodiscard]] ForbidCollectives {
 public:
  explicit ForbidCollectives(std::string what);
  ~ForbidCollectives();
  ForbidCollectives(const ForbidCollectives&) = delete;
  ForbidCollectives& operator=(const ForbidCollectives&) = delete;
};

/// Throws the UsageError if a ForbidCollectives exists. Called at the start of every operation.
void check_collectives_allowed(std::string_view operation);

}  // namespace lockstep::comm::channel
