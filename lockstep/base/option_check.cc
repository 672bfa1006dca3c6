#include "lockstep/base/option_check.h"

#include "lockstep/base/error.h"

namespace lockstep::optim {

void require(bool good, const std::string& owner, const std::string& option, double value,
             const std::string& expected) {
  if (!good)
    throw base::UsageError(owner + ": " + option + " is " + std::to_string(value) + "; allowed is " + expected);
}

}  // namespace lockstep::optim
