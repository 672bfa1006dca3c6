#include "lockstep/base/option_check.h"

#include <cstdio>

#include "lockstep/base/error.h"

namespace lockstep::base {

void check_option(bool good, const std::string& owner, const std::string& option, double value,
                  const std::string& expected) {
  if (good) return;
  char number[32];
  std::snprintf(number, sizeof number, "%.12g", value);
  throw UsageError(owner + ": " + option + " is " + number + "; expected " + expected);
}

}  // namespace lockstep::base
