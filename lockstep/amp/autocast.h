// Automatic mixed precision: torch's autocast as an RAII guard.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace lockstep::amp {

struct AutocastOptions {
  at::DeviceType device = at::kCPU;          ///< cpu or cuda
  std::optional<at::ScalarType> dtype = {};  ///< bfloat16 or float16; empty: torch's current autocast dtype, by default
                                             ///< bfloat16 on cpu and float16 on cuda
  bool enabled = true;  ///< false: operations compute in the dtype of their inputs, even inside another Autocast
  bool cache = true;    ///< cast each weight once instead of once per use
};

/// While it exists, operations of this thread on `device` choose their precision as under torch.autocast: matrix
/// products and convolutions compute in `dtype`, losses and other operations that need range in float32, and the rest
/// in the dtype of their inputs. Put the forward pass and the loss inside its scope. Put backward(), which computes in
/// the dtype of each forward operation, and optimizer steps outside, because cached casts do not reflect changes of a
/// weight.
///
/// Guards may be nested. The destructor restores the previous settings, including after an exception. Cached casts are
/// dropped when the outermost guard is destroyed, and at both ends of a nested guard with another dtype. A guard must
/// be created and destroyed on the same thread; other threads are not affected, and a new thread starts without
/// autocast. Throws UsageError for another device or dtype.
///
/// Logs a warning, once per process, for float16 on a CPU (linear layers measured 50 times slower than in float32; LSTM
/// fails with a oneDNN error) and for bfloat16 on a CPU without bfloat16 instructions (measured 2 times slower).
class [[nodiscard]] Autocast {
 public:
  explicit Autocast(const AutocastOptions& options = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const at::DeviceType device_;
  const bool previous_enabled_;  // the settings to restore
  const at::ScalarType previous_dtype_;
  const bool previous_cache_;
  bool changes_dtype_ = false;  // compared with the enclosing Autocast
};

/// Disables autocast in a scope: operations compute in the dtype of their inputs again. A result from the enclosing
/// Autocast may have lower precision; pass `x.to(at::kFloat)`.
class [[nodiscard]] DisableAutocast {
 public:
  explicit DisableAutocast(at::DeviceType device = at::kCPU) : disabled_({.device = device, .enabled = false}) {}

 private:
  const Autocast disabled_;
};

/// True if the processor that the text of /proc/cpuinfo describes has bfloat16 instructions: avx512_bf16 or amx_bf16.
/// Pure.
bool supports_bfloat16(std::string_view cpuinfo);

}  // namespace lockstep::amp
