// The check that every host reaches the launcher and every other host, at the addresses that the ranks will use. It
// runs before the ranks start.
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

/// To an agent: connect to the launcher.
struct RouteRequest {
  int self = 0;           ///< number of the agent's host
  std::string token;      ///< of the job, for ConnectivityProbe
  std::string interface;  ///< as parse_interface_filter() parses it; empty: the address that routes to the launcher
  std::vector<base::Address> launcher;  ///< where the launcher listens; the host may reach some of them only
};

/// A route from an agent to the launcher.
struct Route {
  int launcher = 0;              ///< index in RouteRequest::launcher
  std::uint32_t connection = 0;  ///< number of the agent's connection
  base::Address address;         ///< of the agent's host on this route, at which it listens for the other hosts
  std::string interface;         ///< that has this address
};

/// The agent's reply: all routes that it has found.
struct RouteReply {
  std::vector<Route> routes;
  std::string error;  ///< the reason if there are no routes
};

/// To an agent: connect to all other hosts. The first connection to the launcher at index `launcher` remains open for
/// the job; when it ends, the agent ends its ranks.
struct ProbeRequest {
  int launcher = 0;
  std::vector<base::Address> peers;  ///< one per host of the job
};

/// The agent's reply contains one of these for each host that it does not reach.
struct ProbeFailure {
  int node = 0;
  std::string why;
};

/// The result of the check.
struct NetworkPlan {
  std::string launcher;                ///< address at which all hosts reach the launcher
  std::vector<Route> routes;           ///< one per host
  std::vector<base::Fd> liveness_fds;  ///< one connection per agent; it ends within base::kPeerHostTimeout if the host
                                       ///< becomes unreachable
};

/// Some hosts do not reach each other (kPeerUnreachable). Without the hosts in agents(), the others may.
class Unreachable : public base::Error {
 public:
  Unreachable(const std::string& what, const std::string& hint, std::vector<std::size_t> agents)
      : base::Error(base::Cause::kPeerUnreachable, what, hint), agents_(std::move(agents)) {}
  const std::vector<std::size_t>& agents() const { return agents_; }

 private:
  std::vector<std::size_t> agents_;
};

/// Returns a small set of hosts without which no failure is left; `failures` holds the failures of each host. Chooses
/// the hosts with the most failures, and the last of equals. Pure.
std::vector<std::size_t> blocking_hosts(const std::vector<std::vector<ProbeFailure>>& failures);

/// Checks the connections between all agents and the launcher, and returns the addresses to use. `interfaces` is
/// RouteRequest::interface of each agent, `own` that of this host, and `signals` is as for start_agents(). Blocks for
/// at most 15 s. Prints one line for each host that does not reach the launcher or another host. Throws Unreachable,
/// whose hint is the remedy.
NetworkPlan check_network(std::vector<AgentLink>& agents, const std::vector<std::string>& interfaces,
                          const std::string& own, int signals);

/// Returns the addresses at which other hosts may reach this one. `own` may name interfaces of other hosts: it is
/// ignored if it matches no interface of this host. Throws Error kPeerUnreachable if there is no address.
std::vector<base::InterfaceAddress> launcher_addresses(const std::string& own);

}  // namespace lockstep::launcher
