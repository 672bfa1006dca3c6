// Code whose part on the host is left out later, when a CUDA graph repeats what the GPU did: ranks could not agree
// there on what they call.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::comm {

/// While one lives, operations of all groups are a UsageError that names them and `what`, on whichever thread they are
/// called: autograd has threads of its own. One at a time.
class [[nodiscard]] NoHostPart {
 public:
  explicit NoHostPart(std::string what);
  ~NoHostPart();
  NoHostPart(const NoHostPart&) = delete;
  NoHostPart& operator=(const NoHostPart&) = delete;
};

/// For those who begin an operation.
void expect_host_part(std::string_view operation);

}  // namespace lockstep::comm
