// Measures the link between two hosts: round trips and throughput of one TCP connection.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::launcher::doctor {

/// A request to an agent: listen on `host`, one of its addresses, accept a connection from the agent with the number
/// `caller`, and serve a measurement.
struct ListenRequest {
  int self = 0;
  int caller = 0;
  std::string token;  ///< for ConnectivityProbe; unique to this pair
  std::string host;
};

/// The reply to ListenRequest. The agent sends it before the measurement.
struct ListenReply {
  base::net::Address address;
  std::string error;  ///< why it cannot listen; empty: it listens
};

/// A request to the other agent: connect to `peer` and measure the link.
struct MeasureRequest {
  int self = 0;
  int peer = 0;
  std::string token;
  base::net::Address address;
};

struct LinkSpeed {
  std::int64_t round_trip_ns = 0;  ///< for 64 bytes: median of 100 round trips, or of those within one second
  std::uint64_t bytes = 0;         ///< number of bytes received in `ns`: 64 MiB, or fewer after one second
  std::int64_t ns = 0;
  std::string error;  ///< why there is no measurement; empty: there is one
};

/// The two sides of a measurement: the connecting host calls measure_link(), and the listening host serve_link(). `fd`
/// is a non-blocking connection. Both block until `deadline` at the latest and throw SystemError.
LinkSpeed measure_link(int fd, base::Deadline deadline);
void serve_link(int fd, base::Deadline deadline);

}  // namespace lockstep::launcher::doctor
