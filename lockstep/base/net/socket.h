// TCP with deadlines. Every descriptor is close-on-exec and non-blocking; every wait ends at its deadline.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"

namespace lockstep::base {

/// A host (name or number, IPv6 without brackets) and a port.
struct Address {
  std::string host;
  std::uint16_t port = 0;
};

/// "host:port", "[v6]:port".
std::string to_string(const Address& address);

/// Reads "host:port" or "[v6]:port"; a UsageError names `what` and the text. Port 1 to 65535.
Address parse_address(std::string_view what, std::string_view text);

/// Listens on exactly `address` (port 0: any free one). Throws SystemError, with kPortInUse when it is taken.
Fd listen_on(const Address& address);

/// Binds `address` with SO_REUSEADDR and does not listen: nobody else is given the port by the system, and a program
/// that sets SO_REUSEADDR too (c10d does) can still listen on it.
Fd reserve_port(const Address& address);

/// The address that `fd` is bound to, as numbers.
Address local_address(int fd);
/// The address at the other end.
Address peer_address(int fd);

/// Takes a waiting connection; an empty Fd when there is none. It ends by itself as one of dial() does.
Fd try_accept(int listener);

/// How long the host at the other end may be silent before a connection ends: every host answers by its system, also
/// for a process that is stopped.
inline constexpr std::chrono::seconds kPeerHostTimeout{5};
/// Whether the number of a SystemError says that the other host cannot be reached, not that the process there has
/// ended.
bool is_unreachable(int error_number);

/// Connects, trying again while the host refuses (it may not listen yet) until the deadline. Throws PeerLostError
/// naming the address and the last refusal. TCP_NODELAY is on; the connection ends with ETIMEDOUT kPeerHostTimeout
/// after the last sign of the other host, whether something was under way or not. With `listens` a refusal is final:
/// somebody has listened there before.
Fd connect_to(const Address& address, Deadline deadline, bool refusal_is_final = false);

/// Begins to connect to a numeric `address`, from `source` when that is not empty: writable when it is decided, and
/// connect_error() then says how. Throws SystemError when it fails at once.
Fd start_connect(const Address& address, const std::string& source);
/// 0, or the errno of an attempt that has failed.
int connect_error(int fd);

/// Sends all of `bytes`. Throws SystemError when the connection is gone, kRankStuck in it at the deadline.
void send_all(int fd, std::string_view bytes, Deadline deadline);

/// Fills `size` bytes. False when the peer closed before the first byte; throws SystemError otherwise.
bool recv_all(int fd, void* data, std::size_t size, Deadline deadline);

/// Waits until `fd` can be read. False at the deadline.
bool wait_readable(int fd, Deadline deadline);
/// Waits until `fd` can be written. False at the deadline.
bool wait_writable(int fd, Deadline deadline);

/// An address of one of this host's interfaces that are up.
struct InterfaceAddress {
  std::string interface;
  std::string address;  ///< a number; of a link-local one with its %scope
  bool loopback = false;
};
/// All of them, those of IPv4 first, each in the kernel's order.
std::vector<InterfaceAddress> interface_addresses();

/// A numeric address of this host's interface `name`; with an empty name, of the first that is up and no loopback.
/// Empty when there is none.
std::string address_of_interface(const std::string& name);

/// This host's address on the way to `target`: what the kernel would send from. The target's own when that cannot be
/// told. Nothing is sent.
std::string source_address_for(const Address& target);

/// This machine's name, as uname(2) gives it.
std::string host_name();

}  // namespace lockstep::base
