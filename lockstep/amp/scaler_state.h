// The state of a GradScaler, for checkpoints.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::amp {

/// The entries of PyTorch's GradScaler.state_dict().
struct ScalerState {
  double scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  std::int64_t growth_tracker =
      0;  ///< steps since the scale changed, all with finite gradients; "_growth_tracker" in PyTorch
  bool operator==(const ScalerState&) const = default;
};

/// Formats the state as json.dumps(scaler.state_dict()) does in Python; "{}" for nullopt, the state of a disabled
/// scaler.
std::string to_json(const std::optional<ScalerState>& state);
/// Parses what to_json() returns. Throws UsageError for text that is not JSON, and for entries that are missing,
/// unknown or of another type.
std::optional<ScalerState> scaler_state_from_json(const std::string& text);

/// Throws UsageError ("`operation`: NAME is VALUE; expected VALUES") unless a GradScaler can resume from `state`.
void check(const ScalerState& state, const std::string& operation);

}  // namespace lockstep::amp
