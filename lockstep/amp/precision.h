// Names for what a training computes in, and what they stand for.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

namespace torch::nn {
class Module;
}

namespace lockstep::amp {

struct Precision {
  std::optional<at::ScalarType>
      autocast;                         ///< what an Autocast around forward and loss computes in; empty: there is none
  at::ScalarType weights = at::kFloat;  ///< of parameters and buffers
  bool batch_norm_fp32 = true;          ///< those of BatchNorm stay float32
  bool master_weights = false;          ///< the optimizer updates copies in float32 (MasterWeights)
  bool loss_scaling = false;            ///< a GradScaler
  bool operator==(const Precision&) const = default;
};

/// What is wanted otherwise than the name says.
struct PrecisionOverrides {
  std::optional<bool> batch_norm_fp32, master_weights, loss_scaling;
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
/// O0 to O3 are Apex's. Throws UsageError for another name, and for changes that make no sense, with the reason.
Precision parse_precision(const std::string& name, const PrecisionOverrides& overrides = {});

/// Gives parameters and buffers of floating point the dtype of `precision.weights`, those of BatchNorm (whatever has
/// running statistics) float32 if wanted. Before a DistributedDataParallel or an optimizer is made.
void cast(torch::nn::Module& module, const Precision& precision);

}  // namespace lockstep::amp
