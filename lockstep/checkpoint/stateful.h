// Values under names: what somebody needs to go on where they stopped, and who has such.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>

#include "lockstep/base/error.h"

namespace lockstep::checkpoint {

using StateValue = std::variant<bool, std::int64_t, double, std::string, at::Tensor>;
/// Names are UTF-8 of at most 1 KiB. Numbers may be infinite or NaN.
using StateDict = std::map<std::string, StateValue>;

/// Whoever has state: optimizers, schedules, scalers, averages, samplers, callbacks, a user's own.
class Stateful {
 public:
  /// All that load_state_dict() needs. Tensors may be those that are in use: whoever saves them copies them first, or
  /// waits with the next step. All ranks call it alike where it waits for others.
  virtual StateDict state_dict() const = 0;
  /// Goes on from there. Throws UsageError for names that are missing or unknown and for values of another type:
  /// nothing has changed then.
  virtual void load_state_dict(const StateDict& state) = 0;

 protected:
  ~Stateful() = default;
};

/// The value under `name`. Throws UsageError when it is missing, or no T.
template <typename T>
const T& value_of(const StateDict& state, const std::string& name) {
  static constexpr std::string_view kTypes[] = {"a bool", "an integer", "a number", "a string", "a tensor"};
  const auto found = state.find(name);
  if (found == state.end()) throw base::UsageError("the state has no value \"" + name + "\"");
  if (const T* const value = std::get_if<T>(&found->second)) return *value;
  throw base::UsageError("the state's value \"" + name + "\" is " + std::string(kTypes[found->second.index()]) +
                         "; allowed is " + std::string(kTypes[StateValue(T()).index()]));
}

}  // namespace lockstep::checkpoint
