#include "lockstep/launch/hosts/network_check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "lockstep/base/net/connectivity_probe.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/cli/interface_filter.h"
#include "lockstep/launch/hosts/agent_link.h"
#include "lockstep/launch/hosts/agent_query.h"

namespace lockstep::launcher::hosts {
namespace {

using namespace std::chrono_literals;

constexpr int kLauncher = -1;  // the launcher's number in a ConnectivityProbe
constexpr const char* kFirewallHint =
    "check for a firewall; --interface NAME, or a network such as 10.0.0.0/8, selects the addresses to use";

class NetworkChecker {
 public:
  NetworkChecker(std::vector<AgentLink>& agents, int signals)
      : agents_(agents),
        connectivity_(kLauncher, token_),
        query_(agents, connectivity_, signals, [&](std::size_t i, const std::string& why) {
          throw Unreachable("host " + base::quoted(agents_[i].host(), 253) + ": " + why, "", {i});
        }) {}

  NetworkPlan run(const std::vector<std::string>& interfaces, const std::string& own) {
    const std::vector<base::net::InterfaceAddress> addresses = launcher_addresses(own);
    std::vector<base::net::Address> listen_addresses;
    for (const base::net::InterfaceAddress& address : addresses)
      listen_addresses.push_back(connectivity_.listen(address.address));
    std::vector<protocol::RouteReply> replies(agents_.size());
    const auto make_request = [&](std::size_t i) {
      return protocol::encoded(protocol::RouteRequest{static_cast<int>(i), token_, interfaces[i],
                                                      static_cast<std::int32_t>(base::net::host_timeout().count()),
                                                      listen_addresses});
    };
    ask_all(protocol::FrameKind::kRouteRequest, make_request, protocol::FrameKind::kRouteReply,
            [&](std::size_t i, const auto& payload) { replies[i] = protocol::decoded<protocol::RouteReply>(payload); });
    const int address_index = common_address(replies, addresses);

    NetworkPlan network{
        .launcher = addresses[static_cast<std::size_t>(address_index)].address, .routes = {}, .liveness_fds = {}};
    for (const protocol::RouteReply& reply : replies)
      network.routes.push_back(*std::ranges::find(reply.routes, address_index, &protocol::Route::launcher));
    for (std::size_t i = 0; i < agents_.size(); ++i)
      network.liveness_fds.push_back(connectivity_.take_incoming(
          static_cast<int>(i), static_cast<std::size_t>(address_index), network.routes[i].connection));
    std::vector<protocol::ProbeReply> failures(agents_.size());
    ask_all(
        protocol::FrameKind::kProbeRequest,
        [&](std::size_t i) {
          protocol::ProbeRequest probe{.launcher = address_index, .peers = {}};
          for (const std::size_t peer : checked_peers(i, agents_.size()))
            probe.peers.push_back({static_cast<int>(peer), network.routes[peer].address});
          return protocol::encoded(probe);
        },
        protocol::FrameKind::kProbeReply,
        [&](std::size_t i, const auto& payload) { failures[i] = protocol::decoded<protocol::ProbeReply>(payload); });
    check(failures, network);
    return network;
  }

 private:
  void ask_all(protocol::FrameKind request, const AgentQuery::MakePayload& payload, protocol::FrameKind reply,
               const AgentQuery::OnReply& take) {
    std::vector<std::size_t> all(agents_.size());
    std::iota(all.begin(), all.end(), 0);
    query_.ask(all, request, payload, reply, base::kNetworkReplyTimeout, take);
  }

  /// Returns the index of the first of the launcher's addresses that all hosts reach.
  int common_address(const std::vector<protocol::RouteReply>& replies,
                     const std::vector<base::net::InterfaceAddress>& own) const {
    const auto reaches = [](const protocol::RouteReply& reply, int address_index) {
      return std::ranges::find(reply.routes, address_index, &protocol::Route::launcher) != reply.routes.end();
    };
    for (int address_index = 0; address_index < static_cast<int>(own.size()); ++address_index)
      if (std::ranges::all_of(replies,
                              [&](const protocol::RouteReply& reply) { return reaches(reply, address_index); }))
        return address_index;
    std::string first;
    std::vector<std::size_t> lost;
    for (std::size_t i = 0; i < replies.size(); ++i) {
      if (replies[i].error.empty()) continue;
      lost.push_back(i);
      const std::string line =
          "host " + base::quoted(agents_[i].host(), 253) + " cannot reach this host: " + replies[i].error;
      std::fprintf(stderr, "lockstep: %s\n", line.c_str());
      if (first.empty()) first = line;
    }
    throw Unreachable(first.empty() ? "no address of this host is reachable from all hosts: " + text_of(own) : first,
                      kFirewallHint, std::move(lost));
  }

  void check(const std::vector<protocol::ProbeReply>& failures, const NetworkPlan& network) const {
    const auto name = [&](std::size_t node) {
      return base::quoted(agents_[node].host(), 253) + " (" + network.routes[node].address.host + ", " +
             network.routes[node].interface + ")";
    };
    std::string first;
    int count = 0;
    for (std::size_t i = 0; i < failures.size(); ++i)
      for (const protocol::ProbeFailure& failure : failures[i]) {
        if (failure.node < 0 || failure.node >= static_cast<int>(agents_.size())) continue;
        const std::string line =
            "host " + name(i) + " cannot reach " + name(static_cast<std::size_t>(failure.node)) + ": " + failure.why;
        if (++count <= 100) std::fprintf(stderr, "lockstep: %s\n", line.c_str());
        if (first.empty()) first = line;
      }
    if (count > 0)
      throw Unreachable(first + (count > 1 ? ", and " + std::to_string(count - 1) + " more" : ""), kFirewallHint,
                        blocking_hosts(failures));
  }

  std::vector<AgentLink>& agents_;
  std::string token_ = base::net::ConnectivityProbe::make_token();
  base::net::ConnectivityProbe connectivity_;
  AgentQuery query_;
};

}  // namespace

std::vector<std::size_t> checked_peers(std::size_t self, std::size_t count) {
  std::vector<std::size_t> peers;
  if (count <= kMaxHostsInPairs) {
    for (std::size_t peer = 0; peer < count; ++peer)
      if (peer != self) peers.push_back(peer);
    return peers;
  }
  for (const std::size_t distance : {std::size_t{1}, static_cast<std::size_t>(std::sqrt(count))}) {
    peers.push_back((self + distance) % count);
    peers.push_back((self + count - distance) % count);
  }
  return peers;
}

std::vector<std::size_t> blocking_hosts(const std::vector<protocol::ProbeReply>& failures) {
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  for (std::size_t from = 0; from < failures.size(); ++from)
    for (const protocol::ProbeFailure& failure : failures[from])
      if (failure.node >= 0 && static_cast<std::size_t>(failure.node) < failures.size())
        pairs.emplace_back(from, failure.node);
  std::vector<std::size_t> found;
  while (!pairs.empty()) {
    std::vector<int> counts(failures.size());
    for (const auto& [from, to] : pairs) {
      ++counts[from];
      ++counts[to];
    }
    const auto most =
        static_cast<std::size_t>(std::max_element(counts.rbegin(), counts.rend()).base() - counts.begin()) -
        1;  // the last of the hosts with the most failures
    std::erase_if(pairs, [&](const auto& pair) { return pair.first == most || pair.second == most; });
    found.push_back(most);
  }
  return found;
}

std::vector<base::net::InterfaceAddress> reachable_addresses(std::vector<base::net::InterfaceAddress> addresses) {
  std::erase_if(addresses, [](const base::net::InterfaceAddress& address) {
    return address.loopback || address.address.find('%') != std::string::npos;
  });
  return addresses;
}

std::string text_of(const std::vector<base::net::InterfaceAddress>& addresses) {
  return base::joined(addresses, ", ",
                      [](const auto& address) { return address.address + " (" + address.interface + ")"; });
}

std::vector<base::net::InterfaceAddress> launcher_addresses(const std::string& own) {
  const std::vector<base::net::InterfaceAddress> all = reachable_addresses(base::net::interface_addresses());
  if (all.empty())
    throw base::Error(base::Cause::kPeerUnreachable,
                      "this host has only loopback addresses, so no other host can reach it",
                      "check that its network is up");
  if (own.empty()) return all;
  const cli::InterfaceFilter filter = cli::parse_interface_filter("--interface", own);
  std::vector<base::net::InterfaceAddress> chosen;
  for (const base::net::InterfaceAddress& address : all)
    if (cli::allows(filter, address.interface, address.address)) chosen.push_back(address);
  return chosen.empty() ? all : chosen;
}

NetworkPlan check_network(std::vector<AgentLink>& agents, const std::vector<std::string>& interfaces,
                          const std::string& own, int signals) {
  return NetworkChecker(agents, signals).run(interfaces, own);
}

}  // namespace lockstep::launcher::hosts
