#include "lockstep/launch/cli/interface_filter.h"

#include <arpa/inet.h>

#include <algorithm>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::launcher::cli {
namespace {

constexpr std::size_t kMaxPatterns = 64;

/// Returns the 4 or 16 bytes of a numeric address, or an empty vector if `address` is not one.
std::vector<unsigned char> address_bytes(std::string_view address) {
  const std::string text(address.substr(0, address.find('%')));
  unsigned char bytes[16];
  for (const auto& [family, size] : {std::pair{AF_INET, 4}, std::pair{AF_INET6, 16}})
    if (::inet_pton(family, text.c_str(), bytes) == 1) return {bytes, bytes + size};
  return {};
}

struct Network {
  std::vector<unsigned char> bytes;
  std::size_t bits = 0;
};

std::optional<Network> parse_network(std::string_view text) {
  const std::size_t slash = text.find('/');
  if (slash == std::string_view::npos) return std::nullopt;
  Network network{address_bytes(text.substr(0, slash))};
  const auto bits = base::parse_int(text.substr(slash + 1));
  if (network.bytes.empty() || !bits || *bits < 0 || *bits > static_cast<std::int64_t>(8 * network.bytes.size()))
    return std::nullopt;
  network.bits = static_cast<std::size_t>(*bits);
  return network;
}

bool is_name(std::string_view text) {
  constexpr std::size_t kMaxInterfaceName = 15;  // IFNAMSIZ
  return !text.empty() && text.size() <= kMaxInterfaceName && text[0] != '-' && base::is_alnum_or(text, "_-.:@");
}

}  // namespace

InterfaceFilter parse_interface_filter(std::string_view what, std::string_view text) {
  InterfaceFilter filter;
  filter.is_exclusion = !text.empty() && text[0] == '^';
  filter.patterns = base::split(text.substr(filter.is_exclusion ? 1 : 0), ',');
  const bool good = text.size() <= 4096 && filter.patterns.size() <= kMaxPatterns &&
                    std::ranges::all_of(filter.patterns,
                                        [](const std::string& part) { return is_name(part) || parse_network(part); });
  if (!good)
    throw base::UsageError(std::string(what) + " is " + base::quoted(text, 80) +
                           "; expected interface names and networks such as 10.0.0.0/8, separated by commas, with ^ "
                           "before the first to exclude them");
  return filter;
}

bool is_in_network(std::string_view network_text, std::string_view address_text) {
  const auto network = parse_network(network_text);
  const std::vector<unsigned char> address = address_bytes(address_text);
  if (!network || address.size() != network->bytes.size()) return false;
  for (std::size_t bit = 0; bit < network->bits; ++bit)
    if ((address[bit / 8] ^ network->bytes[bit / 8]) >> (7 - bit % 8) & 1) return false;
  return true;
}

bool allows(const InterfaceFilter& filter, std::string_view name, std::string_view address) {
  const bool matches = std::ranges::any_of(
      filter.patterns, [&](const std::string& part) { return part == name || is_in_network(part, address); });
  return !filter || matches != filter.is_exclusion;
}

std::string socket_ifname_error(std::string_view variable, std::string_view value,
                                const std::vector<std::string>& interfaces) {
  const bool nccl = variable == "NCCL_SOCKET_IFNAME";
  const bool whole = !nccl || value.substr(0, 1) == "=" || value.substr(0, 2) == "^=";
  const bool excluded = nccl && value.substr(0, 1) == "^";
  const std::string_view list = nccl ? value.substr(std::min(value.find_first_not_of("^="), value.size())) : value;
  const std::vector<std::string> patterns = base::split(list, ',');
  const auto fits = [&](const std::string& name, const std::string& part) {
    return whole ? name == part : name.rfind(part, 0) == 0;
  };
  const auto matches_any = [&](const std::string& part) {
    return std::ranges::any_of(interfaces, [&](const std::string& name) { return fits(name, part); });
  };
  const auto remains = [&](const std::string& name) {
    return std::ranges::none_of(patterns, [&](const std::string& part) { return fits(name, part); });
  };
  const bool good = excluded ? std::ranges::any_of(interfaces, remains)
                    : nccl   ? std::ranges::any_of(patterns, matches_any)
                             : std::ranges::all_of(patterns, matches_any);
  if (good) return "";
  return std::string(variable) + " is " + base::quoted(value, 80) + ", but this host has " + base::joined(interfaces);
}

}  // namespace lockstep::launcher::cli
