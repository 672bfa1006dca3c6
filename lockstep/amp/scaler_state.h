// What a GradScaler remembers, for a checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::amp {

/// The entries of Python's torch.amp.GradScaler.state_dict().
struct ScalerState {
  double scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  std::int64_t growth_tracker = 0;  ///< steps without an infinity since the scale changed; "_growth_tracker" in Python
  bool operator==(const ScalerState&) const = default;
};

/// As json.dumps(scaler.state_dict()) writes it; "{}" for nullopt, the state of one that is disabled.
std::string to_json(const std::optional<ScalerState>& state);
/// The reverse. Throws UsageError for a text that is no JSON, and for entries that are missing, unknown or of another
/// type.
std::optional<ScalerState> scaler_state_from_json(const std::string& text);

/// Throws UsageError: "`operation`: `name` is ...; allowed is ...", unless GradScaler can go on from here.
void check(const ScalerState& state, const std::string& operation);

}  // namespace lockstep::amp
