#include "lockstep/base/net/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::base {
namespace {

constexpr std::uint64_t kMagic = 0x4c4f434b53544550;  // "LOCKSTEP"
constexpr int kBacklog = 128;
constexpr const char* kDoor = "/door";
constexpr const char* kRandomPart = "XXXXXX";  // what mkdtemp() replaces

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    throw SystemError("the path " + path + " is too long for a socket", ENAMETOOLONG);
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

Fd local_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw SystemError("cannot make a socket", errno);
  return fd;
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
}

}  // namespace

PrivateDoor::PrivateDoor(const std::string& parent) {
  folder_ = parent + "/lockstep-" + kRandomPart;
  address_of(folder_ + kDoor);  // throws when it is too long, before there is a folder
  listener_ = local_socket();
  if (!::mkdtemp(folder_.data())) throw SystemError("cannot make a folder in " + parent, errno);
  path_ = folder_ + kDoor;
  const sockaddr_un address = address_of(path_);
  if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener_.get(), kBacklog) != 0) {
    const int error = errno;
    remove();
    throw SystemError("cannot listen at " + path_, error);
  }
}

PrivateDoor::~PrivateDoor() { remove(); }

void PrivateDoor::remove() noexcept {
  ::unlink(path_.c_str());
  ::rmdir(folder_.c_str());
}

Fd PrivateDoor::accept(Deadline deadline) {
  for (;;) {
    if (!wait_readable(listener_.get(), deadline))
      throw SystemError("nobody came to " + path_, ETIMEDOUT, Cause::kJoinTimeout);
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd && same_user(fd.get())) return fd;
  }
}

Fd knock(const std::string& path) {
  Fd fd = local_socket();
  const sockaddr_un address = address_of(path);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    throw SystemError("cannot connect to " + path, errno);
  if (!same_user(fd.get())) throw SystemError(path + " belongs to another user", EPERM);
  return fd;
}

void send_parcel(int socket, std::uint64_t label, int fd) {
  std::array<std::uint64_t, 2> words{kMagic, label};
  iovec part{words.data(), sizeof words};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (::sendmsg(socket, &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof words))
    throw SystemError("cannot hand a descriptor to another process", errno);
}

Parcel receive_parcel(int socket, Deadline deadline) {
  if (!wait_readable(socket, deadline))
    throw SystemError("another process of this host did not answer", ETIMEDOUT, Cause::kJoinTimeout);
  std::array<std::uint64_t, 2> words{};
  iovec part{words.data(), sizeof words};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  Parcel parcel;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header))
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
        header->cmsg_len == CMSG_LEN(sizeof(int))) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
      parcel.fd.reset(fd);
    }
  if (got != static_cast<ssize_t>(sizeof words) || words[0] != kMagic || !parcel.fd)
    throw SystemError("another process of this host gave no descriptor", got < 0 ? errno : EPROTO);
  parcel.label = words[1];
  return parcel;
}

}  // namespace lockstep::base
