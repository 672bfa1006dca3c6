#include "lockstep/base/option_check.h"

#include "lockstep/base/error.h"

namespace lockstep::base {

void check_option(bool good, const std::string& owner, const std::string& option, double value,
                  const std::string& expected) {
  if (!good) throw UsageError(owner + ": " + option + " is " + std::to_string(value) + "; expected " + expected);
}

}  // namespace lockstep::base
