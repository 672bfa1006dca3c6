// Checks of invariants that only a defect of Lockstep can violate. A failed check prints its text and aborts.
#pragma once

#include <string>

namespace lockstep::base {

/// Prints "FILE:LINE: check failed: TEXT" to stderr and aborts.
[[noreturn]] void check_failed(const char* file, int line, const std::string& text);

}  // namespace lockstep::base

#define LOCKSTEP_CHECK(condition)                                                     \
  do {                                                                                \
    if (!(condition)) ::lockstep::base::check_failed(__FILE__, __LINE__, #condition); \
  } while (false)
