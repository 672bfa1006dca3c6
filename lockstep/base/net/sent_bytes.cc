#include "lockstep/base/net/sent_bytes.h"

#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <memory>
#include <string>
#include <utility>

#include "lockstep/base/parse.h"

namespace lockstep::base::net {
namespace {

/// The beginning of the kernel's tcp_info. That of <netinet/tcp.h> ends before it counts bytes, and <linux/tcp.h>
/// cannot be included with it.
struct TcpInfo {
  char before[120];
  std::uint64_t bytes_acked;
};

/// The address of one end of a connection, without the port; empty for what is not a connection over IP.
template <typename Query>
std::string address_of(int fd, Query query) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (query(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "";
  const auto bytes = [&](const auto& field) {
    return std::string(reinterpret_cast<const char*>(&field), sizeof field);
  };
  if (address.ss_family == AF_INET) return bytes(reinterpret_cast<const sockaddr_in&>(address).sin_addr);
  if (address.ss_family == AF_INET6) return bytes(reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  return "";
}

/// Whether a descriptor is a connection to another host: its ends have different addresses.
bool is_to_other_host(int fd) {
  const std::string peer = address_of(fd, ::getpeername);
  return !peer.empty() && peer != address_of(fd, ::getsockname);
}

}  // namespace

std::uint64_t SentBytes::total() {
  std::map<std::uint64_t, std::uint64_t> now;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir("/proc/self/fd"), ::closedir);
  while (const dirent* entry = entries ? ::readdir(entries.get()) : nullptr) {
    const auto number = base::parse_int(entry->d_name);
    const int fd = number ? static_cast<int>(*number) : -1;
    struct stat status{};
    if (fd < 0 || ::fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode) || !is_to_other_host(fd)) continue;
    TcpInfo info{};
    socklen_t size = sizeof info;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0) now[status.st_ino] = info.bytes_acked;
  }
  for (const auto& [inode, bytes] : now) {
    const auto before = connections_.find(inode);
    const bool same = before != connections_.end() && before->second <= bytes;  // else its inode was used again
    if (has_begun_) total_ += bytes - (same ? before->second : 0);
  }
  connections_ = std::move(now);
  has_begun_ = true;
  return total_;
}

}  // namespace lockstep::base::net
