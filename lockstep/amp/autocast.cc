#include "lockstep/amp/autocast.h"

#include <ATen/autocast_mode.h>

#include <fstream>
#include <iterator>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::amp {
namespace {

namespace autocast = at::autocast;

at::DeviceType validated_device(const AutocastOptions& options) {
  if (options.device != at::kCPU && options.device != at::kCUDA)
    throw base::UsageError("Autocast: device is " + c10::DeviceTypeName(options.device, true) +
                           "; expected cpu or cuda");
  const at::ScalarType dtype = options.dtype.value_or(at::kHalf);
  if (dtype != at::kBFloat16 && dtype != at::kHalf)
    throw base::UsageError(std::string("Autocast: dtype is ") + c10::toString(dtype) + " on " +
                               c10::DeviceTypeName(options.device, true) + "; expected BFloat16 or Half",
                           "set enabled = false to compute in the dtype of the inputs");
  return options.device;
}

/// Logs each warning once per process.
void warn_if_slow(at::ScalarType dtype) {
  if (dtype == at::kHalf) {
    [[maybe_unused]] static const bool warned = [] {
      base::log_warning(
          "Autocast: float16 on a CPU is slow: linear layers measured 50 times slower than in float32, and LSTM fails "
          "with a oneDNN error. Use bfloat16");
      return true;
    }();
  } else if (dtype == at::kBFloat16) {
    [[maybe_unused]] static const bool warned = [] {
      std::ifstream cpuinfo("/proc/cpuinfo");
      if (!supports_bfloat16(std::string(std::istreambuf_iterator<char>(cpuinfo), {})))
        base::log_warning(
            "Autocast: bfloat16 is slow on this CPU, which has neither avx512_bf16 nor amx_bf16: measured 2 times "
            "slower than float32");
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
      previous_enabled_(autocast::is_autocast_enabled(device_)),
      previous_dtype_(autocast::get_autocast_dtype(device_)),
      previous_cache_(autocast::is_autocast_cache_enabled()) {
  const at::ScalarType dtype = options.dtype.value_or(previous_dtype_);
  if (options.enabled && device_ == at::kCPU) warn_if_slow(dtype);
  // torch's cache of casts is keyed by the weight alone, not by the dtype.
  changes_dtype_ = options.enabled && dtype != previous_dtype_;
  if (changes_dtype_) autocast::clear_cache();
  autocast::set_autocast_enabled(device_, options.enabled);
  autocast::set_autocast_dtype(device_, dtype);
  autocast::set_autocast_cache_enabled(options.cache);
  autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (autocast::decrement_nesting() == 0 || changes_dtype_) autocast::clear_cache();
  autocast::set_autocast_enabled(device_, previous_enabled_);
  autocast::set_autocast_dtype(device_, previous_dtype_);
  autocast::set_autocast_cache_enabled(previous_cache_);
}

}  // namespace lockstep::amp
