// TCP connections with deadlines, and the addresses of this host. Every descriptor is close-on-exec and non-blocking. A
// function that takes a Deadline blocks until it is done or the deadline expires; the others block only while
// getaddrinfo(3) resolves a host name. If that fails, they throw UsageError, except source_address_for().
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"

namespace lockstep::base::net {

/// A host (a name or a numeric address, IPv6 without brackets) and a port.
struct Address {
  std::string host;
  std::uint16_t port = 0;
};

/// Returns "host:port" or "[v6]:port".
std::string to_string(const Address& address);

/// Parses "host:port" or "[v6]:port" with a port from 1 to 65535. Throws a UsageError that names `what` and the text.
Address parse_address(std::string_view what, std::string_view text);

/// Listens on exactly `address`; port 0 picks a free port. Throws SystemError, with kPortInUse if the port is taken.
Fd listen_on(const Address& address);

/// Binds `address` with SO_REUSEADDR without listening. The kernel then assigns the port to no other process, while a
/// program that also sets SO_REUSEADDR (as c10d does) can still listen on it. Throws SystemError as listen_on() does.
Fd reserve_port(const Address& address);

/// Returns the numeric address to which `fd` is bound. Throws SystemError.
Address local_address(int fd);
/// Returns the numeric address of the peer of `fd`. Throws SystemError.
Address peer_address(int fd);

/// How long a host may send no packet before its connections end: kPeerHostTimeout unless set_host_timeout() was
/// called. One value per process, for all connections of this file. Any thread may call it.
std::chrono::milliseconds host_timeout();
/// Sets host_timeout() for connections that are made from now on; at least 1 s.
void set_host_timeout(std::chrono::milliseconds timeout);
/// "5 s", for messages.
std::string host_timeout_text();

/// Accepts a pending connection. Returns an empty Fd, with errno from accept4(2), if there is none or the call failed.
/// The connection times out as described at connect_to().
Fd try_accept(int listener);

/// Returns whether the `error_number` of a SystemError means that the peer's host is unreachable. For all other values,
/// the host may be up and only the process there may have ended.
bool is_unreachable(int error_number);

/// Blocks until the host name of `address` can be resolved: in a cluster, it may be known only some time after its
/// processes have started. Logs a warning once if it cannot. Throws UsageError at the deadline.
void wait_for_name(const Address& address, Deadline deadline);

/// Connects to `address`. Retries until the deadline, because its name may not be known and the peer not listen yet. If
/// `refusal_is_final` is set, a refused connection is an error at once; use it for an address where a process has
/// listened before. Throws PeerLostError (kCoordinatorLost) with the address and the last error, and Error (kResource)
/// at once if the interface lo is down and the address is on it. The connection has TCP_NODELAY. It fails with
/// ETIMEDOUT within 2 s after the peer's host has sent no packet for host_timeout(), even if no data was in flight. An
/// interruption of the network that is shorter than host_timeout() only delays it (before Linux 6.15: than half of it,
/// because the kernel doubles the time between retransmissions).
Fd connect_to(const Address& address, Deadline deadline, bool refusal_is_final = false);

/// Lets the connection stay while the peer leaves what has been sent to it unread, because it is busy, for however
/// long; and while its host is silent, for at least three times host_timeout().
void allow_pauses(int fd);

/// Starts connecting to the numeric `address`, from the address `source` unless that is empty. The descriptor becomes
/// writable when the attempt has completed; connect_error() then returns its result. Throws SystemError if the attempt
/// fails immediately.
Fd start_connect(const Address& address, const std::string& source);
/// Returns the pending error of the socket: 0, or the errno with which the connection or its attempt failed. Clears it.
int connect_error(int fd);

/// Sends all of `bytes`. Throws SystemError, with cause kPeerUnreachable if the connection ended and kRankStuck at the
/// deadline.
void send_all(int fd, std::string_view bytes, Deadline deadline);

/// Receives exactly `size` bytes. Returns false if the peer closed the connection before the first byte. Throws
/// SystemError, with cause kPeerUnreachable if the connection ends later and kRankStuck at the deadline.
bool recv_all(int fd, void* data, std::size_t size, Deadline deadline);

/// Blocks until `fd` is readable. Returns false at the deadline. Throws SystemError.
bool wait_readable(int fd, Deadline deadline);
/// Blocks until `fd` is writable. Returns false at the deadline. Throws SystemError.
bool wait_writable(int fd, Deadline deadline);

/// A numeric address of one of this host's network interfaces.
struct InterfaceAddress {
  std::string interface;
  std::string address;  ///< numeric; a link-local address includes its %scope
  bool loopback = false;
};
/// Returns the addresses of all interfaces that are up: first IPv4, then IPv6, each in the kernel's order. Returns none
/// if the kernel cannot list them.
std::vector<InterfaceAddress> interface_addresses();

/// Returns a numeric address of the interface `name`; for an empty name, of the first interface that is up and not a
/// loopback. Returns "" if there is none.
std::string address_of_interface(const std::string& name);

/// Returns the local address from which the kernel would send to `target`, or `target.host` if it cannot be determined.
/// Sends nothing.
std::string source_address_for(const Address& target);

/// Returns this machine's name from uname(2).
std::string host_name();

}  // namespace lockstep::base::net
