// How fast two hosts are to each other: round trips and bytes over one TCP connection.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::launcher {

/// To an agent: listen on `host`, one of its addresses, for the agent with the number `caller`, and serve it.
struct ListenRequest {
  int self = 0;
  int caller = 0;
  std::string token;  ///< for ConnectivityProbe; of this pair alone
  std::string host;
};

/// Its answer, before it serves.
struct ListenReply {
  base::Address address;
  std::string error;  ///< when it cannot listen
};

/// To the other agent: call it and measure.
struct MeasureRequest {
  int self = 0;
  int peer = 0;
  std::string token;
  base::Address address;
};

struct LinkSpeed {
  std::int64_t round_trip_ns = 0;  ///< of 64 bytes: the median of 100, or of those in the first second
  std::uint64_t bytes = 0;         ///< that came in `ns`: 64 MiB, or what came in a second
  std::int64_t ns = 0;
  std::string error;  ///< why there is no measurement
};

/// The caller's part and the other's, over a connection that is non-blocking. Both end at `deadline`. Throws
/// SystemError.
LinkSpeed measure_link(int fd, base::Deadline deadline);
void serve_link(int fd, base::Deadline deadline);

}  // namespace lockstep::launcher
