// Measures the link between two hosts: round trips and throughput of one TCP connection.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::launcher {

/// Request to an agent: listen on `host`, one of its addresses, for the agent with the number `caller`, and serve a
/// measurement.
struct ListenRequest {
  int self = 0;
  int caller = 0;
  std::string token;  ///< for ConnectivityProbe; used for this pair alone
  std::string host;
};

/// The reply to ListenRequest, sent before the measurement.
struct ListenReply {
  base::Address address;
  std::string error;  ///< why it cannot listen; empty: it listens
};

/// Request to the other agent: connect to `peer` and measure.
struct MeasureRequest {
  int self = 0;
  int peer = 0;
  std::string token;
  base::Address address;
};

/// The result of a measurement.
struct LinkSpeed {
  std::int64_t round_trip_ns = 0;  ///< of 64 bytes: the median of 100 round trips, or of those in the first second
  std::uint64_t bytes = 0;         ///< bytes received in `ns`: 64 MiB, or what arrived within one second
  std::int64_t ns = 0;
  std::string error;  ///< why there is no measurement; empty: there is one
};

/// The connecting and the listening side, over a non-blocking connection. Both block until `deadline` at the latest.
/// Throw SystemError.
LinkSpeed measure_link(int fd, base::Deadline deadline);
void serve_link(int fd, base::Deadline deadline);

}  // namespace lockstep::launcher
