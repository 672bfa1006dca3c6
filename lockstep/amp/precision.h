// Named presets of mixed-precision settings.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "lockstep/nn/module_ref.h"

namespace lockstep::amp {

struct Precision {
  std::optional<at::ScalarType> autocast = {};  ///< dtype of an Autocast around forward and loss; empty: no Autocast
  at::ScalarType weights = at::kFloat;          ///< dtype of parameters and buffers
  bool batch_norm_fp32 = true;                  ///< parameters and buffers of BatchNorm stay float32
  bool master_weights = false;                  ///< the optimizer updates float32 copies (MasterWeights)
  bool loss_scaling = false;                    ///< use a GradScaler
  bool operator==(const Precision&) const = default;
};

/// Settings that replace those of the preset.
struct PrecisionOverrides {
  std::optional<bool> batch_norm_fp32 = {}, master_weights = {}, loss_scaling = {};
};

/// | name             | autocast | weights | BatchNorm | master weights | loss scaling |
/// |------------------|----------|---------|-----------|----------------|--------------|
/// | "32", "O0"       |          | fp32    | fp32      |                |              |
/// | "bf16-mixed"     | bf16     | fp32    | fp32      |                |              |
/// | "fp16-mixed", "O1" | fp16   | fp32    | fp32      |                | yes          |
/// | "bf16"           |          | bf16    | bf16      |                |              |
/// | "fp16", "O3"     |          | fp16    | fp16      |                |              |
/// | "O2"             |          | fp16    | fp32      | yes            | yes          |
///
/// Returns the settings of a preset; O0 to O3 are those of Apex. Throws UsageError for an unknown name, and for
/// contradictory overrides, with the reason. Pure.
Precision parse_precision(const std::string& name, const PrecisionOverrides& overrides = {});

/// Casts floating-point parameters and buffers to `precision.weights`; those of BatchNorm layers (modules with running
/// statistics) become float32 if `precision.batch_norm_fp32`. Where the result would be float32, float64 stays float64:
/// a model in double precision trains in double precision. Call it before constructing a DistributedDataParallel or an
/// optimizer.
void cast(nn::ModuleRef module, const Precision& precision);

}  // namespace lockstep::amp
