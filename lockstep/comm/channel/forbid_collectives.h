// Code whose part on the host is left out later, when a CUDA graph repeats what the GPU did: ranks could not agree
// there on what they call.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::comm {

/// While one lives, operations of all groups are a UsageError that names them and `what`, on whichever thread they are
/// called: autograd has threads of its own. One at a time.
class [[nodiscard]] ForbidCollectives {
 public:
  explicit ForbidCollectives(std::string what);
  ~ForbidCollectives();
  ForbidCollectives(const ForbidCollectives&) = delete;
  ForbidCollectives& operator=(const ForbidCollectives&) = delete;
};

/// For those who begin an operation.
void check_collectives_allowed(std::string_view operation);

}  // namespace lockstep::comm
