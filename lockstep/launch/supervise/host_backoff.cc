#include "lockstep/launch/supervise/host_backoff.h"

#include <algorithm>

namespace lockstep::launcher::supervise {
namespace {

constexpr std::chrono::seconds kMinBackoff{10}, kMaxBackoff{600};

}  // namespace

void HostBackoff::record_failure(std::size_t host, Time now) {
  Backoff& one = hosts_.at(host);
  one.last = std::clamp(2 * one.last, kMinBackoff, kMaxBackoff);
  one.until = now + one.last;
}

std::vector<std::size_t> HostBackoff::available(Time now) const {
  std::vector<std::size_t> numbers;
  for (std::size_t host = 0; host < hosts_.size(); ++host)
    if (hosts_[host].until <= now) numbers.push_back(host);
  return numbers;
}

HostBackoff::Time HostBackoff::when_available(std::size_t count) const {
  if (count == 0) return {};
  std::vector<Time> times;
  for (const Backoff& one : hosts_) times.push_back(one.until);
  const auto last = times.begin() + static_cast<std::ptrdiff_t>(std::min(count, times.size()) - 1);
  std::nth_element(times.begin(), last, times.end());
  return *last;
}

}  // namespace lockstep::launcher::supervise
