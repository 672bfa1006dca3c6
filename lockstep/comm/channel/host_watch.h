// Finds out whether other hosts can be reached while this rank waits for them. The launcher notices a host that it has
// lost, but not that two hosts have lost each other.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/fd.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/job/store.h"

namespace lockstep::comm::channel {

/// A connection from this rank to each host that it waits for, made by its first long wait. It carries no data: the
/// kernels of both hosts exchange keepalive probes, also while the processes are busy or stopped. Any thread may call
/// check().
class HostWatch {
 public:
  /// `host_of_rank` has the number of each rank's host. The first rank of each host listens at `address`, and publishes
  /// it in the store. Throws SystemError and CommError.
  HostWatch(std::shared_ptr<job::Store> store, int rank, std::vector<int> host_of_rank, const std::string& address);

  struct LostHost {
    std::string name;        ///< of the host that cannot be reached
    std::string address;     ///< numeric
    std::vector<int> ranks;  ///< its ranks
  };
  /// Called about once per second by a wait for `members` (world ranks). Returns a host of these ranks from which no
  /// packet has arrived for base::net::host_timeout(), of which this wait has observed at least the end. Does nothing
  /// unless this rank is the first of its host in `members`. Blocks only for requests to the store.
  std::optional<LostHost> check(const std::vector<int>& members);

 private:
  using Clock = std::chrono::steady_clock;
  struct Link {
    std::string name;
    base::net::Address address;
    base::Fd fd;
    bool connected = false;
    Clock::time_point attempted{};  // when the connection was started
    Clock::time_point checked{};    // when check() last looked at it
    Clock::time_point silent_since{};
  };
  void accept_connections();
  bool find_address(Link& link, int host);
  bool is_lost(Link& link);
  bool answers(Link& link, Clock::time_point now, bool& timed_out);

  const std::shared_ptr<job::Store> store_;
  const int rank_;
  const std::vector<int> host_of_rank_;
  base::Fd listener_;  // on the first rank of a host; the kernel completes the handshakes
  std::mutex mutex_;   // guards the members below
  std::vector<base::Fd> accepted_;
  std::map<int, Link> links_;  // by host
};

}  // namespace lockstep::comm::channel
