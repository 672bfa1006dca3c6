// Validates numeric options.
#pragma once

#include <string>

namespace lockstep::base {

/// Throws UsageError("`owner`: `option` is `value`; expected `expected`") unless `good`.
void check_option(bool good, const std::string& owner, const std::string& option, double value,
                  const std::string& expected);

}  // namespace lockstep::base
