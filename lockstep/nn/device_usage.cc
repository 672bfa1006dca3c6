#include "lockstep/nn/device_usage.h"

#include <iomanip>
#include <sstream>

namespace lockstep::nn {
namespace {

std::string readable(std::int64_t bytes) {
  const bool few = bytes < (1 << 20);
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << static_cast<double>(bytes) / (few ? 1 << 10 : 1 << 20)
       << (few ? " KiB" : " MiB");
  return text.str();
}

}  // namespace

std::string use_table(const std::vector<DeviceUse>& use) {
  std::ostringstream text;
  const auto row = [&](const std::string& device, const std::string& replicas, const std::string& samples,
                       const std::string& held, const std::string& received, const std::string& sent,
                       const std::string& peak) {
    text << std::left << std::setw(6) << device << std::right << std::setw(10) << replicas << std::setw(9) << samples;
    for (const auto& bytes : {held, received, sent, peak}) text << std::setw(13) << bytes;
    text << '\n';
  };
  row("device", "replicas", "samples", "held", "received", "sent", "peak");
  for (const DeviceUse& one : use)
    row(one.device.str(), std::to_string(one.replicas), std::to_string(one.samples), readable(one.held_bytes),
        readable(one.received_bytes), readable(one.sent_bytes), one.peak_bytes ? readable(*one.peak_bytes) : "-");
  return text.str();
}

}  // namespace lockstep::nn
