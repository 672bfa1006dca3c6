// Operations in lower precision where that is safe: torch's autocast, entered and left as a scope.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace lockstep::amp {

struct AutocastOptions {
  at::DeviceType device = at::kCPU;  ///< cpu or cuda
  std::optional<at::ScalarType>
      dtype;            ///< bfloat16 or float16; empty: the device's, which is bfloat16 for cpu and float16 for cuda
  bool enabled = true;  ///< false: what runs inside computes in the dtype of its inputs, also inside another Autocast
  bool cache = true;    ///< weights are cast once, not once for each use
};

/// While it lives, operations of this thread on `device` choose their precision as torch.autocast lets them: matrix
/// products and convolutions compute in `dtype`, losses and what needs range in float32, the rest in what they get.
/// Forward and loss belong inside; backward(), which computes in the dtype of each forward operation, and optimizer
/// steps outside: a weight that changes while casts are kept goes on being used as it was.
///
/// Nests. Everything is as before when it goes, also by an exception; casts are dropped when the outermost one goes,
/// and where a nested one has another dtype. Made and destroyed on one thread; other threads are not affected, and a
/// new one begins without. Throws UsageError for another device or dtype.
///
/// On a CPU a warning, once a process, tells of float16 (linear layers were measured to be 50 times slower than in
/// float32, and LSTM throws an error of oneDNN) and, where the processor multiplies no bfloat16, of bfloat16 (measured
/// to be 2 times slower there).
class [[nodiscard]] Autocast {
 public:
  explicit Autocast(const AutocastOptions& options = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const at::DeviceType device_;
  const bool previous_enabled_;  // these are what was before
  const at::ScalarType previous_dtype_;
  const bool previous_cache_;
  bool changes_dtype_ = false;  // than the Autocast around it
};

/// Inside an Autocast: operations compute in the dtype of their inputs again. What an operation inside has computed may
/// be of lower precision: hand on `x.to(at::kFloat)`.
class [[nodiscard]] DisableAutocast {
 public:
  explicit DisableAutocast(at::DeviceType device = at::kCPU) : disabled_({.device = device, .enabled = false}) {}

 private:
  const Autocast disabled_;
};

/// Whether the processor that /proc/cpuinfo describes multiplies bfloat16: it has avx512_bf16 or amx_bf16.
bool supports_bfloat16(std::string_view cpuinfo);

}  // namespace lockstep::amp
