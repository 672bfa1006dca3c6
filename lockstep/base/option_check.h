// Options are what they may be.
#pragma once

#include <string>

namespace lockstep::optim {

/// Throws UsageError: "`owner`: `option` is `value`; allowed is `allowed`", unless `good`.
void require(bool good, const std::string& owner, const std::string& option, double value, const std::string& expected);

}  // namespace lockstep::optim
