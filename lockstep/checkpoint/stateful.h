// The named values that an object needs to resume, and the interface of such objects.
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

/// An object with a state to save: an optimizer of lockstep::optim, a schedule, a GradScaler, an Ema, a loader, the
/// random number generators (training::RandomState), a callback, or your own. training::TrainingState gathers such
/// objects.
class Stateful {
 public:
  /// Returns everything that load_state_dict() needs. The tensors may be the ones in use: the caller must write them,
  /// or copy them with clone_state(), before the next step. If an implementation is collective, all ranks must call it
  /// in the same order.
  virtual StateDict state_dict() const = 0;
  /// Restores the state. Throws UsageError for missing or unknown names and for values of another type; the object is
  /// then unchanged.
  virtual void load_state_dict(const StateDict& state) = 0;

 protected:
  ~Stateful() = default;
};

/// Returns the value under `name`. Throws UsageError if it is missing or not a T.
template <typename T>
const T& value_of(const StateDict& state, const std::string& name) {
  static constexpr std::string_view kTypes[] = {"a bool", "an integer", "a number", "a string", "a tensor"};
  static_assert(std::size(kTypes) == std::variant_size_v<StateValue>, "one name per type");
  const auto found = state.find(name);
  if (found == state.end()) throw base::UsageError("the state has no value \"" + name + "\"");
  if (const T* const value = std::get_if<T>(&found->second)) return *value;
  throw base::UsageError("the state's value \"" + name + "\" is " + std::string(kTypes[found->second.index()]) +
                         "; expected " + std::string(kTypes[StateValue(T()).index()]));
}

/// Returns the state with copies of its tensors, which later steps do not change.
inline StateDict clone_state(const StateDict& state) {
  StateDict copy = state;
  for (auto& [name, value] : copy)
    if (auto* const tensor = std::get_if<at::Tensor>(&value)) *tensor = tensor->clone();
  return copy;
}

}  // namespace lockstep::checkpoint
