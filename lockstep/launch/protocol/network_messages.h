// Before ranks start, every host shows that it reaches the launcher and every other host, at the address that the ranks
// will use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::launcher {

class AgentLink;

/// To an agent: reach the launcher.
struct RouteRequest {
  int self = 0;           ///< the agent's number
  std::string token;      ///< of the job, for ConnectivityProbe
  std::string interface;  ///< as parse_interface_filter() takes it; empty: the address that routes to the launcher
  std::vector<base::Address> launcher;  ///< where it listens: any of them may be the one that this host reaches
};

/// A way from an agent to the launcher.
struct Route {
  int launcher = 0;              ///< index in RouteRequest::launcher
  std::uint32_t connection = 0;  ///< which of the agent's connections it is
  base::Address address;         ///< of the agent's host on this way; there it listens for the other hosts
  std::string interface;         ///< which has that address
};

/// Its answer: all the ways that it has found.
struct RouteReply {
  std::vector<Route> routes;
  std::string error;  ///< when there is none
};

/// To an agent: reach all others. The first connection to the launcher at this index stays for the job: when it ends,
/// the agent's ranks do.
struct ProbeRequest {
  int launcher = 0;
  std::vector<base::Address> peers;  ///< of each host of the job
};

/// Its answer: whom it does not reach.
struct ProbeFailure {
  int node = 0;
  std::string why;
};

/// What the hosts have found.
struct NetworkPlan {
  std::string launcher;                ///< address at which all hosts reach this one
  std::vector<Route> routes;           ///< of each host
  std::vector<base::Fd> liveness_fds;  ///< a connection to each agent, which ends within base::kPeerHostTimeout when
                                       ///< its host cannot be reached
};

/// They have not met (kPeerUnreachable). `agents`: numbers of those without whom the others may.
class Unreachable : public base::Error {
 public:
  Unreachable(const std::string& what, const std::string& hint, std::vector<std::size_t> agents)
      : base::Error(base::Cause::kPeerUnreachable, what, hint), agents_(std::move(agents)) {}
  const std::vector<std::size_t>& agents() const { return agents_; }

 private:
  std::vector<std::size_t> agents_;
};

/// Few hosts without which none of `failures`, whom each does not reach, is left: those with the most, of equals the
/// later. Pure.
std::vector<std::size_t> blocking_hosts(const std::vector<std::vector<ProbeFailure>>& failures);

/// Lets the agents meet. `interfaces` of each: as RouteRequest has it; `own`: the choice here. Waits 15 s at most. A
/// host that does not reach the launcher or another one is told in a line each; what is thrown (Unreachable) says what
/// to do. `signals` as for gather().
NetworkPlan check_network(std::vector<AgentLink>& agents, const std::vector<std::string>& interfaces,
                          const std::string& own, int signals);

/// Where other hosts may reach this one. The choice names interfaces of other hosts too, so one that fits nothing here
/// excludes nothing. Throws Error kPeerUnreachable when there is no address.
std::vector<base::InterfaceAddress> launcher_addresses(const std::string& own);

}  // namespace lockstep::launcher
