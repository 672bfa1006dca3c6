#include "lockstep/train/count_or_fraction.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "lockstep/base/error.h"

namespace lockstep::training {

std::string CountOrFraction::to_string() const {
  std::ostringstream text;
  if (is_fraction_)
    text << fraction_ << (fraction_ == std::floor(fraction_) ? ".0" : "");
  else
    text << count_;
  return text.str();
}

std::int64_t CountOrFraction::resolve(std::int64_t num_batches, const std::string& option) const {
  if (is_fraction_ ? !(fraction_ >= 0 && fraction_ <= 1) : count_ < 0)
    throw base::UsageError(option + " is " + to_string() +
                           "; expected a count of batches, 0 or more, or a fraction of them, 0.0 to 1.0");
  if (!is_fraction_) return std::min(count_, num_batches);
  const auto whole = static_cast<std::int64_t>(fraction_ * static_cast<double>(num_batches));
  if (whole == 0 && fraction_ > 0 && num_batches > 0)
    throw base::UsageError(option + " is " + to_string() + ", which is less than one of " +
                           std::to_string(num_batches) + " batches; expected 0.0, a fraction of at least " +
                           std::to_string(1.0 / static_cast<double>(num_batches)) + ", or a count");
  return whole;
}

}  // namespace lockstep::training
