// Formats the table of device statistics.
#include "lockstep/nn/device_usage.h"

#include <iomanip>
#include <sstream>

namespace lockstep::nn {
namespace {

std::string format_bytes(std::int64_t bytes) {
  const bool few = bytes < (1 << 20);
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << static_cast<double>(bytes) / (few ? 1 << 10 : 1 << 20)
       << (few ? " KiB" : " MiB");
  return text.str();
}

}  // namespace

std::string format_device_usage(const std::vector<DeviceUsage>& device_usage) {
  std::ostringstream text;
  const auto row = [&](const std::string& device, const std::string& replicas, const std::string& samples,
                       const std::string& held, const std::string& received, const std::string& sent,
                       const std::string& peak) {
    text << std::left << std::setw(6) << device << std::right << std::setw(10) << replicas << std::setw(9) << samples;
    for (const auto& bytes : {held, received, sent, peak}) text << std::setw(13) << bytes;
    text << '\n';
  };
  row("device", "replicas", "samples", "held", "received", "sent", "peak");
  for (const DeviceUsage& one : device_usage)
    row(one.device.str(), std::to_string(one.replicas), std::to_string(one.samples), format_bytes(one.held_bytes),
        format_bytes(one.received_bytes), format_bytes(one.sent_bytes),
        one.peak_bytes ? format_bytes(*one.peak_bytes) : "-");
  return text.str();
}

}  // namespace lockstep::nn
