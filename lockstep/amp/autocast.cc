#include "lockstep/amp/autocast.h"

#include <ATen/autocast_mode.h>

#include <fstream>
#include <iterator>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::amp {
namespace {

namespace cast = at::autocast;

at::DeviceType validated_device(const AutocastOptions& options) {
  if (options.device != at::kCPU && options.device != at::kCUDA)
    throw base::UsageError("Autocast: device is " + c10::DeviceTypeName(options.device, true) +
                           "; allowed are cpu and cuda");
  const at::ScalarType dtype = options.dtype.value_or(at::kHalf);
  if (dtype != at::kBFloat16 && dtype != at::kHalf)
    throw base::UsageError(std::string("Autocast: dtype is ") + c10::toString(dtype) + "; allowed on " +
                               c10::DeviceTypeName(options.device, true) + " are BFloat16 and Half",
                           "enabled = false computes in the dtype of the inputs");
  return options.device;
}

bool cpu_supports_bfloat16() {
  std::ifstream file("/proc/cpuinfo");
  return supports_bfloat16(std::string(std::istreambuf_iterator<char>(file), {}));
}

/// Once a process for each text.
void warn_if_slow(at::ScalarType dtype) {
  if (dtype == at::kHalf) {
    [[maybe_unused]] static const bool warned = [] {
      base::log_warning(
          "Autocast to float16 on a CPU: linear layers were measured to be 50 times slower than in float32, and LSTM "
          "throws an error of oneDNN; use bfloat16");
      return true;
    }();
  } else if (dtype == at::kBFloat16) {
    [[maybe_unused]] static const bool warned = [] {
      const bool fast = cpu_supports_bfloat16();
      if (!fast)
        base::log_warning(
            "Autocast to bfloat16 on a CPU with neither avx512_bf16 nor amx_bf16: it was measured to be 2 times slower "
            "than float32 there");
      return true;
    }();
  }
}

}  // namespace

bool supports_bfloat16(std::string_view cpuinfo) {
  for (const std::string_view flag : {" avx512_bf16", " amx_bf16"})
    for (auto at = cpuinfo.find(flag); at != std::string_view::npos; at = cpuinfo.find(flag, at + 1)) {
      const auto end = at + flag.size();
      if (end == cpuinfo.size() || cpuinfo[end] == ' ' || cpuinfo[end] == '\n') return true;
    }
  return false;
}

Autocast::Autocast(const AutocastOptions& options)
    : device_(validated_device(options)),
      previous_enabled_(cast::is_autocast_enabled(device_)),
      previous_dtype_(cast::get_autocast_dtype(device_)),
      previous_cache_(cast::is_autocast_cache_enabled()) {
  const at::ScalarType dtype = options.dtype.value_or(previous_dtype_);
  if (options.enabled && device_ == at::kCPU) warn_if_slow(dtype);
  // torch looks up a kept cast by its weight alone.
  changes_dtype_ = options.enabled && dtype != previous_dtype_;
  if (changes_dtype_) cast::clear_cache();
  cast::set_autocast_enabled(device_, options.enabled);
  cast::set_autocast_dtype(device_, dtype);
  cast::set_autocast_cache_enabled(options.cache);
  cast::increment_nesting();
}

Autocast::~Autocast() {
  if (cast::decrement_nesting() == 0 || changes_dtype_) cast::clear_cache();
  cast::set_autocast_enabled(device_, previous_enabled_);
  cast::set_autocast_dtype(device_, previous_dtype_);
  cast::set_autocast_cache_enabled(previous_cache_);
}

}  // namespace lockstep::amp
