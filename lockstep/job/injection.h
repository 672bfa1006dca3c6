// Fault injection: users and tests make a rank fail in order to observe how a program handles it.
#pragma once

#include <cstdint>
#include <string>

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

/// A fault, and the rank and the step in which it occurs.
struct Injection {
  Fault fault = Fault::kNone;
  int rank = -1;
  std::int64_t step = 0;  ///< the number, from 1, of the rank's gradient reduction in which the fault occurs
};

/// Parses "KIND@rank=R,step=S". Throws a UsageError that names `what` (the option or variable), the value received and
/// the values expected. Pure.
Injection parse_injection(const char* what, const std::string& text);

}  // namespace lockstep::job
