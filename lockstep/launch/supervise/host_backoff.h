// Exponential backoff for hosts that have failed: 10 s, doubled with each failure, at most 600 s.
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

namespace lockstep::launcher::supervise {

/// Determines which hosts may be used. Identifies hosts by their numbers, from 0. Has no clock: callers pass the time.
class HostBackoff {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit HostBackoff(std::size_t num_hosts) : hosts_(num_hosts) {}

  /// Makes `host` unavailable for its next backoff time.
  void record_failure(std::size_t host, Time now);
  /// Call it when a job has made progress on `host`. Resets the backoff time of the host to 10 s.
  void record_success(std::size_t host) { hosts_.at(host) = {}; }
  /// Returns the hosts that may be used at `now`, in ascending order.
  std::vector<std::size_t> available(Time now) const;
  /// Returns the time from which `count` hosts may be used. `count` must not exceed the number of hosts.
  Time when_available(std::size_t count) const;

 private:
  struct Backoff {
    Time until{};
    std::chrono::seconds last{0};  // the last backoff time; 0: the host has not failed
  };
  std::vector<Backoff> hosts_;
};

}  // namespace lockstep::launcher::supervise
