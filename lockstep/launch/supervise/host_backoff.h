// Hosts that have failed rest: 10 s at first, each time twice as long, 600 s at most.
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

namespace lockstep::launcher {

/// Hosts are named by their numbers, from 0. Knows no clock: whoever asks says what time it is.
class HostBackoff {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit HostBackoff(std::size_t num_hosts) : hosts_(num_hosts) {}

  /// `host` is not to be used for a while.
  void failed(std::size_t host, Time now);
  /// A job has got on there: its next rest is the shortest again.
  void record_success(std::size_t host) { hosts_.at(host) = {}; }
  /// Those that may be used at `now`, in their order.
  std::vector<std::size_t> available(Time now) const;
  /// From when on `count` of them may be used, at most all.
  Time when_available(std::size_t count) const;

 private:
  struct Backoff {
    Time until{};
    std::chrono::seconds last{0};  // how long; 0: it has not failed
  };
  std::vector<Backoff> hosts_;
};

}  // namespace lockstep::launcher
