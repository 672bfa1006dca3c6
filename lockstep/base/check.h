// Checks of invariants that only a defect of Lockstep can violate. A failed check prints its operands and aborts.
#pragma once

#include <sstream>
#include <string>

namespace lockstep::base {

/// Prints "FILE:LINE: check failed: TEXT" to stderr and aborts.
[[noreturn]] void check_failed(const char* file, int line, const std::string& text);

template <typename A, typename B>
[[noreturn]] void check_failed_values(const char* file, int line, const char* expression, const A& a, const B& b) {
  std::ostringstream text;
  text << expression << " (" << a << " against " << b << ")";
  check_failed(file, line, text.str());
}

}  // namespace lockstep::base

#define LOCKSTEP_CHECK(condition)                                                     \
  do {                                                                                \
    if (!(condition)) ::lockstep::base::check_failed(__FILE__, __LINE__, #condition); \
  } while (false)

#define LOCKSTEP_CHECK_EQ(a, b)                                                                        \
  do {                                                                                                 \
    const auto& lockstep_a = (a);                                                                      \
    const auto& lockstep_b = (b);                                                                      \
    if (!(lockstep_a == lockstep_b))                                                                   \
      ::lockstep::base::check_failed_values(__FILE__, __LINE__, #a " == " #b, lockstep_a, lockstep_b); \
  } while (false)
