// The messages with which launcher and agents check, before the ranks start, that every host reaches the launcher and
// other hosts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/net/socket.h"
#include "lockstep/launch/protocol/message_codec.h"

namespace lockstep::launcher::protocol {

/// A request to an agent: connect to the launcher.
struct RouteRequest {
  int self = 0;           ///< number of the agent's host
  std::string token;      ///< the job's token, for ConnectivityProbe
  std::string interface;  ///< as parse_interface_filter() parses it; empty: the address that routes to the launcher
  std::int32_t host_timeout_ms = 0;          ///< base::net::host_timeout() of the launcher
  std::vector<base::net::Address> launcher;  ///< addresses of the launcher; the host may reach only some of them
};
void fields(Is<RouteRequest> auto& request, auto& field) {
  field(request.self);
  field(Raw{request.token});
  field(Raw{request.interface});
  field(request.host_timeout_ms);
  field(request.launcher);
}

/// A route from an agent to the launcher.
struct Route {
  int launcher = 0;              ///< index in RouteRequest::launcher
  std::uint32_t connection = 0;  ///< number of the agent's connection
  base::net::Address address;    ///< the agent's address on this route, where it listens for the other hosts
  std::string interface;         ///< the interface with this address
};
void fields(Is<Route> auto& route, auto& field) {
  field(route.launcher);
  field(route.connection);
  field(route.address);
  field(route.interface);
}

/// The agent's reply: all routes that it has found.
struct RouteReply {
  std::vector<Route> routes;
  std::string error;  ///< why there are no routes; empty: there are some
};
void fields(Is<RouteReply> auto& reply, auto& field) {
  field(reply.error);
  field(reply.routes);
}

/// A host to connect to.
struct ProbePeer {
  int node = 0;
  base::net::Address address;
};
void fields(Is<ProbePeer> auto& peer, auto& field) {
  field(peer.node);
  field(peer.address);
}

/// A request to an agent: connect to other hosts. The first connection to the launcher's address with index
/// `launcher` stays open during the job. When it ends, the agent ends its ranks.
struct ProbeRequest {
  int launcher = 0;
  std::vector<ProbePeer> peers;
};
void fields(Is<ProbeRequest> auto& request, auto& field) {
  field(request.launcher);
  field(request.peers);
}

/// A host that the agent does not reach.
struct ProbeFailure {
  int node = 0;
  std::string why;
};
void fields(Is<ProbeFailure> auto& failure, auto& field) {
  field(failure.node);
  field(failure.why);
}
/// The agent's reply.
using ProbeReply = std::vector<ProbeFailure>;

}  // namespace lockstep::launcher::protocol
