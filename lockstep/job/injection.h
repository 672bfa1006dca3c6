// Fault injection, so that users and tests can observe how a program fails.
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
  kLoop,     ///< an infinite loop
  kThrow,    ///< backward() throws an exception
  kDesync,   ///< the rank reports a wrong step number
  kCorrupt,  ///< a NaN in one of the rank's gradients
  kFlip,     ///< one flipped bit in an averaged gradient, on this rank only
  kSlow,     ///< every later step takes 0.2 s longer
};

struct Injection {
  Fault fault = Fault::kNone;
  int rank = -1;
  std::int64_t step = 0;  ///< the gradient reduction of that process in which the fault occurs, from 1
};

/// Parses "KIND@rank=R,step=S". Throws a UsageError that names `what` (the option or variable), the value received and
/// the values expected. Pure.
Injection parse_injection(const char* what, const std::string& text);

}  // namespace lockstep::job
