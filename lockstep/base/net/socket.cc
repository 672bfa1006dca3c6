#include "lockstep/base/net/socket.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"

namespace lockstep::base::net {
namespace {

using AddrInfo = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddrInfo resolve(const Address& address, bool passive) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) throw UsageError("cannot resolve host " + quoted(address.host, 256) + ": " + ::gai_strerror(error));
  return {found, &::freeaddrinfo};
}

/// Tries until the deadline; see wait_for_name().
AddrInfo resolve_until(const Address& address, Deadline deadline) {
  constexpr std::chrono::milliseconds pause(500);
  for (bool is_first = true;; is_first = false) {
    try {
      return resolve(address, false);
    } catch (const UsageError& error) {
      if (deadline.remaining() <= pause) throw;
      if (is_first) log_warning(std::string(error.what()) + "; trying again for " + seconds_text(deadline.remaining()));
    }
    std::this_thread::sleep_for(pause);
  }
}

Fd new_socket(const addrinfo& info) {
  Fd fd(::socket(info.ai_family, info.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, info.ai_protocol));
  if (!fd) throw SystemError("cannot create a socket", errno);
  return fd;
}

std::atomic<std::int64_t> host_timeout_ms{std::chrono::milliseconds(kPeerHostTimeout).count()};

constexpr std::chrono::seconds kConnectAttempt{1};
constexpr int kTcpRtoMaxMs = 44;  // TCP_RTO_MAX_MS of Linux 6.15, which few headers define

void set_options(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // Keepalive, which probes every second, detects a silent host on an idle connection. The user timeout ends a
  // connection with unacknowledged data; it also replaces keepalive's probe count (RFC 5482, tcp(7)).
  const auto silent_ms = static_cast<unsigned>((host_timeout() + kHostTimeoutMargin).count());
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silent_ms, sizeof silent_ms);
  // The kernel doubles the time between retransmissions, so after the network works again it may wait for as long as
  // the interruption lasted. Where it can, it retransmits every second.
  const int rto_max_ms = 1000;  // the least that it accepts
  ::setsockopt(fd, IPPROTO_TCP, kTcpRtoMaxMs, &rto_max_ms, sizeof rto_max_ms);
}

Address numeric_address(const sockaddr_storage& storage, socklen_t length) {
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  const int error = ::getnameinfo(reinterpret_cast<const sockaddr*>(&storage), length, host, sizeof host, port,
                                  sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  if (error != 0) throw SystemError(std::string("cannot format an address: ") + ::gai_strerror(error), EINVAL);
  return {host, static_cast<std::uint16_t>(parse_int(port).value_or(0))};
}

Address address_by(decltype(::getsockname)& call, const char* name, int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (call(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) throw SystemError(name, errno);
  return numeric_address(storage, length);
}

bool wait_for(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, deadline.poll_ms());
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw SystemError("poll", errno);
    if (deadline.expired()) return false;
  }
}

/// Makes one attempt to connect and stores the socket in `fd`. Returns 0 or the errno of the failure.
int try_connect(const addrinfo& info, Fd& fd, Deadline deadline) {
  fd = new_socket(info);
  if (::connect(fd.get(), info.ai_addr, info.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  if (!wait_writable(fd.get(), deadline)) return ETIMEDOUT;
  return connect_error(fd.get());
}

bool is_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  const auto& in = reinterpret_cast<const sockaddr_in&>(address);
  return address.sa_family == AF_INET && ntohl(in.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

}  // namespace

std::chrono::milliseconds host_timeout() { return std::chrono::milliseconds(host_timeout_ms.load()); }
void set_host_timeout(std::chrono::milliseconds timeout) { host_timeout_ms.store(timeout.count()); }
std::string host_timeout_text() { return seconds_text(host_timeout()); }

std::string to_string(const Address& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  return (v6 ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
}

Address parse_address(std::string_view what, std::string_view text) {
  const std::size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  if (colon == std::string_view::npos || host.empty())
    throw UsageError(std::string(what) + " is " + quoted(text, 256) + "; expected host:port");
  return {std::string(host), static_cast<std::uint16_t>(parse_int_in_range("the port in " + std::string(what),
                                                                           text.substr(colon + 1), 1, 65535))};
}

Fd listen_on(const Address& address) {
  Fd fd = reserve_port(address);
  if (::listen(fd.get(), SOMAXCONN) != 0)
    throw SystemError("cannot listen on " + to_string(address), errno,
                      errno == EADDRINUSE ? Cause::kPortInUse : Cause::kResource);
  return fd;
}

Fd reserve_port(const Address& address) {
  const AddrInfo info = resolve(address, true);
  Fd fd = new_socket(*info);
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd.get(), info->ai_addr, info->ai_addrlen) != 0)
    throw SystemError("cannot bind " + to_string(address), errno,
                      errno == EADDRINUSE ? Cause::kPortInUse : Cause::kResource);
  return fd;
}

Address local_address(int fd) { return address_by(::getsockname, "getsockname", fd); }
Address peer_address(int fd) { return address_by(::getpeername, "getpeername", fd); }

Fd try_accept(int listener) {
  Fd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd) set_options(fd.get());
  return fd;
}

bool is_unreachable(int error_number) {
  return error_number == ETIMEDOUT || error_number == EHOSTUNREACH || error_number == ENETUNREACH ||
         error_number == ENETDOWN || error_number == EHOSTDOWN;
}

void wait_for_name(const Address& address, Deadline deadline) { resolve_until(address, deadline); }

Fd connect_to(const Address& address, Deadline deadline, bool refusal_is_final) {
  const AddrInfo info = resolve_until(address, deadline);
  Deadline report = Deadline::in(kJoinReportInterval);
  for (auto pause = std::chrono::milliseconds(1);; pause = std::min(2 * pause, std::chrono::milliseconds(50))) {
    int error = 0;
    bool lo_is_down = true;
    for (const addrinfo* entry = info.get(); entry; entry = entry->ai_next) {
      Fd fd;
      // A new attempt is faster than the kernel's next packet: it doubles the time between them.
      error = try_connect(*entry, fd, earlier(deadline, Deadline::in(kConnectAttempt)));
      if (error == 0) {
        set_options(fd.get());
        return fd;
      }
      lo_is_down &= error == ENETUNREACH && is_loopback(*entry->ai_addr);
    }
    if (lo_is_down)
      throw Error(Cause::kResource, "cannot connect to " + to_string(address) + ": " + std::strerror(error),
                  "the interface lo is down: ip link set lo up");
    if (deadline.expired() || (refusal_is_final && error == ECONNREFUSED))
      throw PeerLostError(Cause::kCoordinatorLost, "connect", -1, -1,
                          "cannot connect to " + to_string(address) + ": " + std::strerror(error));
    if (report.expired()) {
      log_warning("cannot connect to " + to_string(address) + ": " + std::strerror(error) + "; trying again for " +
                  seconds_text(deadline.remaining()));
      report = Deadline::in(kJoinReportInterval);
    }
    std::this_thread::sleep_for(std::min(pause, deadline.remaining()));
  }
}

void allow_pauses(int fd) {
  const int off = 0;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &off, sizeof off);
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &off, sizeof off);
  // Without a user timeout, the kernel gives up after some 13 times the longest time between retransmissions.
  const int rto_max_ms = static_cast<int>(std::max<std::int64_t>(1000, host_timeout().count() / 4));
  ::setsockopt(fd, IPPROTO_TCP, kTcpRtoMaxMs, &rto_max_ms, sizeof rto_max_ms);
}

Fd start_connect(const Address& address, const std::string& source) {
  const AddrInfo info = resolve(address, false);
  Fd fd = new_socket(*info);
  set_options(fd.get());
  if (!source.empty()) {
    const AddrInfo from = resolve({source, 0}, false);
    if (::bind(fd.get(), from->ai_addr, from->ai_addrlen) != 0)
      throw SystemError("cannot connect from " + quoted(source, 80), errno);
  }
  if (::connect(fd.get(), info->ai_addr, info->ai_addrlen) != 0 && errno != EINPROGRESS)
    throw SystemError("cannot connect to " + to_string(address), errno);
  return fd;
}

int connect_error(int fd) {
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

void send_all(int fd, std::string_view bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      if (!wait_writable(fd, deadline)) throw SystemError("send", ETIMEDOUT, Cause::kRankStuck);
    } else if (errno != EINTR) {
      throw SystemError("send", errno, Cause::kPeerUnreachable);
    }
  }
}

bool recv_all(int fd, void* data, std::size_t size, Deadline deadline) {
  auto* to = static_cast<char*>(data);
  for (std::size_t have = 0; have < size;) {
    const ssize_t received = ::recv(fd, to + have, size - have, 0);
    if (received > 0) {
      have += static_cast<std::size_t>(received);
    } else if (received == 0) {
      if (have == 0) return false;
      throw SystemError("the connection ended inside a message", ECONNRESET, Cause::kPeerUnreachable);
    } else if (errno == EAGAIN) {
      if (!wait_readable(fd, deadline)) throw SystemError("receive", ETIMEDOUT, Cause::kRankStuck);
    } else if (errno != EINTR) {
      throw SystemError("receive", errno, Cause::kPeerUnreachable);
    }
  }
  return true;
}

bool wait_readable(int fd, Deadline deadline) { return wait_for(fd, POLLIN, deadline); }
bool wait_writable(int fd, Deadline deadline) { return wait_for(fd, POLLOUT, deadline); }

std::vector<InterfaceAddress> interface_addresses() {
  ifaddrs* first = nullptr;
  std::vector<InterfaceAddress> found;
  if (::getifaddrs(&first) != 0) return found;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> all(first, &::freeifaddrs);
  for (const int family : {AF_INET, AF_INET6})
    for (const ifaddrs* entry = first; entry; entry = entry->ifa_next) {
      if (!entry->ifa_addr || entry->ifa_addr->sa_family != family || !(entry->ifa_flags & IFF_UP)) continue;
      const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      sockaddr_storage storage{};
      std::memcpy(&storage, entry->ifa_addr, length);
      found.push_back({entry->ifa_name, numeric_address(storage, length).host, (entry->ifa_flags & IFF_LOOPBACK) != 0});
    }
  return found;
}

std::string address_of_interface(const std::string& name) {
  for (const InterfaceAddress& entry : interface_addresses())
    if (name.empty() ? !entry.loopback : name == entry.interface) return entry.address;
  return "";
}

std::string source_address_for(const Address& target) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(target.host.c_str(), std::to_string(target.port).c_str(), &hints, &found) != 0) return target.host;
  const Fd probe(::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const bool connected = probe && ::connect(probe.get(), found->ai_addr, found->ai_addrlen) == 0;
  ::freeaddrinfo(found);
  return connected ? local_address(probe.get()).host : target.host;
}

std::string host_name() {
  utsname names{};
  ::uname(&names);
  return names.nodename;
}

}  // namespace lockstep::base::net
