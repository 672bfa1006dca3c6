// A fault on purpose, so that users and tests see a program fail well.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::job {

enum class Fault {
  kNone,
  kKill,     ///< SIGKILL
  kStop,     ///< SIGSTOP
  kSegv,     ///< SIGSEGV
  kLoop,     ///< it computes for ever
  kThrow,    ///< an exception out of backward()
  kDesync,   ///< it says that it is in another step
  kCorrupt,  ///< a NaN in a gradient of its own
  kFlip,     ///< one bit of one mean, on this rank alone
  kSlow,     ///< from then on each step takes 0.2 s longer
};

struct Injection {
  Fault fault = Fault::kNone;
  int rank = -1;
  std::int64_t step = 0;  ///< the exchange of gradients of that process in which it happens, from 1
};

/// Of "KIND@rank=R,step=S". Throws UsageError, naming `what` (the option or variable), the value got and what is
/// allowed. Pure.
Injection parse_injection(const char* what, const std::string& text);

}  // namespace lockstep::job
