#include "lockstep/base/error.h"

#include <cstdio>
#include <cstring>

namespace lockstep::base {

void check_option(bool good, const std::string& owner, const std::string& option, double value,
                  const std::string& expected) {
  if (good) return;
  char number[32];
  std::snprintf(number, sizeof number, "%.12g", value);
  throw UsageError(owner + ": " + option + " is " + number + "; expected " + expected);
}

SystemError::SystemError(const std::string& message, int error_number, Cause cause)
    : Error(cause, message + ": " + std::strerror(error_number)), error_number_(error_number) {}

}  // namespace lockstep::base
