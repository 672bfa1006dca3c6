// The option --interface: chooses the addresses of a host that its ranks use. Pure functions.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher::cli {

/// A list of interface names and networks (10.0.0.0/8, fd00::/8). An address passes if it matches one of them, or, for
/// an exclusion, if it matches none.
struct InterfaceFilter {
  std::vector<std::string> patterns;
  bool is_exclusion = false;

  /// Returns false for an empty filter, which passes all addresses.
  explicit operator bool() const { return !patterns.empty(); }
};

/// Parses "eth0", "10.0.0.0/8", "eth0,eth1" or "^docker0,172.17.0.0/16". Throws UsageError with `what`, the value and
/// the values expected.
InterfaceFilter parse_interface_filter(std::string_view what, std::string_view text);

/// Returns whether the filter passes the numeric `address` of the interface `name`.
bool allows(const InterfaceFilter& filter, std::string_view name, std::string_view address);

/// Checks a user's GLOO_SOCKET_IFNAME (names, separated by commas) or NCCL_SOCKET_IFNAME (prefixes of names; after '='
/// whole names; after '^' names to exclude) against the interfaces of a host. Returns the error message, or "" if the
/// value is valid.
std::string socket_ifname_error(std::string_view variable, std::string_view value,
                                const std::vector<std::string>& interfaces);

/// Returns whether the numeric `address` is in `network`, such as 10.0.0.0/8. Returns false if their families differ.
bool is_in_network(std::string_view network, std::string_view address);

}  // namespace lockstep::launcher::cli
