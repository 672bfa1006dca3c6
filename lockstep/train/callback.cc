#include "lockstep/train/callback.h"

#include <cmath>
#include <limits>

#include "lockstep/base/error.h"

namespace lockstep::train {

double value_of(const NamedValues& values, const std::string& name, const std::string& who) {
  std::string names;
  for (const auto& [key, value] : values) {
    if (key == name) return value;
    names += (names.empty() ? "" : ", ") + key;
  }
  throw base::UsageError(who + ": there is no \"" + name + "\" among the values of the validation; allowed are " + (names.empty() ? "none: nothing was logged" : names));
}

EarlyStopping::EarlyStopping(const EarlyStoppingOptions& options)
    : options_(options), best_(options.maximize ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity()) {
  if (options.patience < 0) throw base::UsageError("EarlyStoppingOptions.patience is " + std::to_string(options.patience) + "; allowed is 0 or more");
  if (!(options.min_delta >= 0)) throw base::UsageError("EarlyStoppingOptions.min_delta is " + std::to_string(options.min_delta) + "; allowed is 0 or more");
}

void EarlyStopping::on_validation_end(Fit& fit, const NamedValues& values) {
  const double value = value_of(values, options_.monitor, "EarlyStopping");
  if (options_.check_finite && !std::isfinite(value)) return fit.end(EndReason::kCallback);
  const double better_by = options_.maximize ? value - best_ : best_ - value;
  if (better_by > options_.min_delta) {
    best_ = value;
    no_better_ = 0;
  } else if (++no_better_ > options_.patience) {
    fit.end(EndReason::kCallback);
  }
}

}  // namespace lockstep::train
