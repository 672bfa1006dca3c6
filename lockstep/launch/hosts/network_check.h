// Checks, before the ranks start, that every host reaches the launcher and other hosts at the addresses that the ranks
// will use.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/launch/protocol/network_messages.h"

namespace lockstep::launcher::hosts {

class AgentLink;

struct NetworkPlan {
  std::string launcher;                 ///< address at which all hosts reach the launcher
  std::vector<protocol::Route> routes;  ///< one per host
  std::vector<base::Fd> liveness_fds;   ///< one connection per agent; it ends within 2 s after
                                        ///< base::net::host_timeout() if the host becomes unreachable
};

/// Thrown if hosts do not reach each other (kPeerUnreachable). Without the hosts in agents(), the others may do so.
class Unreachable : public base::Error {
 public:
  Unreachable(const std::string& what, const std::string& hint, std::vector<std::size_t> agents)
      : base::Error(base::Cause::kPeerUnreachable, what, hint), agents_(std::move(agents)) {}
  const std::vector<std::size_t>& agents() const { return agents_; }

 private:
  std::vector<std::size_t> agents_;
};

/// Returns a small set of hosts without which no failure is left. `failures` has the failures of each host. Repeatedly
/// removes the host with the most failures; of several, the last. Pure.
std::vector<std::size_t> blocking_hosts(const std::vector<protocol::ProbeReply>& failures);

/// Of so many hosts, at most, a check tries all pairs.
inline constexpr std::size_t kMaxHostsInPairs = 16;

/// The other hosts that host `self` of `count` connects to in a check: all, of up to kMaxHostsInPairs. Of more, the
/// four at the distances of 1 and of the square root of `count`, so that the check of n hosts takes 4 n connections,
/// and a host few entries of its table of neighbours, which by default holds 1024 on Linux. Each host is checked from
/// those four, too. Pure.
std::vector<std::size_t> checked_peers(std::size_t self, std::size_t count);

/// Checks the connections between the launcher and all agents, and between these (checked_peers()), and returns the
/// addresses to use. `interfaces` has the RouteRequest::interface of each agent, and `own` is that of this host. Blocks
/// for at most 15 s. Prints one line for each host that does not reach the launcher or another host, and then throws
/// Unreachable, whose hint is the remedy. On a user's signal, throws as check_interrupted(signals) does.
NetworkPlan check_network(std::vector<AgentLink>& agents, const std::vector<std::string>& interfaces,
                          const std::string& own, int signals);

/// Returns those of the addresses of a host that other hosts may reach: without loopback and link-local ones. Pure.
std::vector<base::net::InterfaceAddress> reachable_addresses(std::vector<base::net::InterfaceAddress> addresses);
/// Returns "10.0.0.1 (eth0), ...". Pure.
std::string text_of(const std::vector<base::net::InterfaceAddress>& addresses);

/// Returns the addresses at which other hosts may reach this one. `own` may name interfaces of other hosts; if it
/// matches no interface of this host, it is ignored. Throws Error kPeerUnreachable if there is no address.
std::vector<base::net::InterfaceAddress> launcher_addresses(const std::string& own);

}  // namespace lockstep::launcher::hosts
