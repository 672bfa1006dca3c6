// --interface: which of a host's addresses its ranks use. Pure.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher {

/// Names of interfaces and networks (10.0.0.0/8, fd00::/8), of which an address must be in one; or, after a '^', in
/// none.
struct InterfaceFilter {
  std::vector<std::string> patterns;
  bool excluded = false;

  /// Whether somebody has chosen.
  explicit operator bool() const { return !patterns.empty(); }
};

/// Reads "eth0", "10.0.0.0/8", "eth0,eth1", "^docker0,172.17.0.0/16". Throws UsageError that names `what`, the value
/// and what is allowed.
InterfaceFilter parse_interface_filter(std::string_view what, std::string_view text);

/// Whether the choice, if there is one, allows `address` (a number) of the interface `name`.
bool allows(const InterfaceFilter& filter, std::string_view name, std::string_view address);

/// What is wrong with a user's GLOO_SOCKET_IFNAME (names, with commas between) or NCCL_SOCKET_IFNAME (beginnings of
/// names; after '=' whole ones; after '^' those to leave out) on a host with these interfaces; empty: nothing.
std::string socket_ifname_error(std::string_view variable, std::string_view value,
                                const std::vector<std::string>& interfaces);

/// Whether `address` is in `network`, both numbers of one family, the network with the length of its prefix.
bool is_in_network(std::string_view network, std::string_view address);

}  // namespace lockstep::launcher
