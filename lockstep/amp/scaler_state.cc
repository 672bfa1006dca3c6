// Conversion of a scaler's state to and from JSON, and its validation.
#include "lockstep/amp/scaler_state.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "lockstep/base/error.h"

namespace lockstep::amp {
namespace {

using base::UsageError;
using nlohmann::json;

constexpr const char* kOperation = "scaler_state_from_json";

const json& number(const json& entries, const char* name, bool whole) {
  const auto found = entries.find(name);
  if (found == entries.end()) throw UsageError(std::string(kOperation) + ": \"" + name + "\" is missing");
  if (whole ? !found->is_number_integer() : !found->is_number())
    throw UsageError(std::string(kOperation) + ": \"" + name + "\" is " + found->dump() + "; expected " +
                     (whole ? "an integer" : "a number"));
  return *found;
}

std::string text_of(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

}  // namespace

std::string to_json(const std::optional<ScalerState>& state) {
  if (!state) return "{}";
  return nlohmann::ordered_json{{"scale", state->scale},
                                {"growth_factor", state->growth_factor},
                                {"backoff_factor", state->backoff_factor},
                                {"growth_interval", state->growth_interval},
                                {"_growth_tracker", state->growth_tracker}}
      .dump();
}

std::optional<ScalerState> scaler_state_from_json(const std::string& text) {
  const json entries = json::parse(text, nullptr, false);
  if (!entries.is_object()) throw UsageError(std::string(kOperation) + ": the text is not a JSON object");
  if (entries.empty()) return std::nullopt;
  const ScalerState state{.scale = number(entries, "scale", false).get<double>(),
                          .growth_factor = number(entries, "growth_factor", false).get<double>(),
                          .backoff_factor = number(entries, "backoff_factor", false).get<double>(),
                          .growth_interval = number(entries, "growth_interval", true).get<std::int64_t>(),
                          .growth_tracker = number(entries, "_growth_tracker", true).get<std::int64_t>()};
  if (entries.size() != 5)
    throw UsageError(std::string(kOperation) + ": " + std::to_string(entries.size()) +
                     " entries; expected scale, growth_factor, backoff_factor, growth_interval and _growth_tracker");
  check(state, kOperation);
  return state;
}

void check(const ScalerState& state, const std::string& operation) {
  const auto require = [&](bool good, const char* name, double value, const char* expected) {
    if (!good) throw UsageError(operation + ": " + name + " is " + text_of(value) + "; expected " + expected);
  };
  // The scale may have fallen to 0 after many non-finite gradients.
  require(state.scale >= 0 && std::isfinite(state.scale), "scale", state.scale, "a finite number, 0 or more");
  require(state.growth_factor > 1 && std::isfinite(state.growth_factor), "growth_factor", state.growth_factor,
          "a finite number, more than 1");
  require(state.backoff_factor > 0 && state.backoff_factor < 1, "backoff_factor", state.backoff_factor,
          "more than 0 and less than 1");
  require(state.growth_interval >= 1, "growth_interval", static_cast<double>(state.growth_interval), "1 or more");
  require(state.growth_tracker >= 0, "growth_tracker", static_cast<double>(state.growth_tracker), "0 or more");
}

}  // namespace lockstep::amp
