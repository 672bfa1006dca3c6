#include "lockstep/base/net/abstract_socket.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <optional>
#include <set>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/net/unix_socket.h"
#include "lockstep/base/parse.h"

namespace lockstep::base::net {
namespace {

constexpr int kMaxPending = 128;
constexpr std::size_t kRandomBytes = 8;

struct AbstractAddress {
  sockaddr_un address{};
  socklen_t size = 0;
};

/// Returns nullopt if the name is too long.
std::optional<AbstractAddress> abstract_address(std::string_view name) {
  AbstractAddress result;
  if (name.size() + 1 > sizeof result.address.sun_path) return std::nullopt;
  result.address.sun_family = AF_UNIX;
  std::memcpy(result.address.sun_path + 1, name.data(), name.size());  // after a zero byte
  result.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

/// Returns 0 or the errno of the failure.
int try_connect(const Fd& fd, const std::string& name) {
  const auto address = abstract_address(name);
  if (!address) return ENAMETOOLONG;
  return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address->address), address->size) == 0 ? 0 : errno;
}

/// Returns the names of all abstract sockets, from lines such as
/// "0000000000000000: 00000002 00000000 00010000 0001 01 4711 @name". Connections have the name of their listener.
std::set<std::string> abstract_names(std::string_view prefix) {
  std::set<std::string> names;
  std::ifstream file("/proc/self/net/unix");
  for (std::string line; std::getline(file, line);) {
    const std::size_t at = line.rfind(" @");
    if (at == std::string::npos) continue;
    std::string name = line.substr(at + 2);
    if (name.starts_with(prefix)) names.insert(std::move(name));
  }
  return names;
}

}  // namespace

AbstractListener::AbstractListener(std::string_view prefix) : listener_(make_unix_socket()) {
  std::string random(kRandomBytes, '\0');
  const bool has_random = ::getrandom(random.data(), random.size(), 0) == static_cast<ssize_t>(random.size());
  name_ = std::string(prefix) + to_hex(random);
  const auto address = abstract_address(name_);
  if (!has_random || !address ||
      ::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address->address), address->size) != 0 ||
      ::listen(listener_.get(), kMaxPending) != 0)
    throw SystemError("cannot listen on a Unix socket", address ? errno : ENAMETOOLONG);
}

Fd AbstractListener::try_accept() const {
  Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  return fd && pid_of_same_user(fd.get()) ? std::move(fd) : Fd();
}

Fd AbstractListener::accept(Deadline deadline) const {
  for (;;) {
    if (!wait_readable(listener_.get(), deadline))
      throw SystemError("no process connected to the Unix socket @" + name_, ETIMEDOUT, Cause::kJoinTimeout);
    if (Fd fd = try_accept()) return fd;
  }
}

Fd connect_abstract(const std::string& name) {
  Fd fd = make_unix_socket();
  if (const int error = try_connect(fd, name)) throw SystemError("cannot connect to the Unix socket @" + name, error);
  if (!pid_of_same_user(fd.get())) throw SystemError("the Unix socket @" + name + " is another user's", EPERM);
  return fd;
}

std::vector<AbstractConnection> connect_to_all(std::string_view prefix) {
  std::vector<AbstractConnection> connections;
  for (const std::string& name : abstract_names(prefix)) {
    Fd fd = make_unix_socket();
    if (try_connect(fd, name) != 0) continue;
    if (const auto pid = pid_of_same_user(fd.get())) connections.push_back({std::move(fd), *pid});
  }
  return connections;
}

}  // namespace lockstep::base::net
