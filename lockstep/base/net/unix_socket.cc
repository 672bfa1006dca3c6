#include "lockstep/base/net/unix_socket.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::base::net {
namespace {

constexpr std::uint64_t kMagic = 0x4c4f434b53544550;  // "LOCKSTEP"

/// The memory of a message: kMagic and the label, with a descriptor.
struct Packet {
  std::array<std::uint64_t, 2> words{};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec part{words.data(), sizeof words};
  msghdr message{};

  Packet() {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
};

}  // namespace

Fd make_unix_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw SystemError("cannot create a socket", errno);
  return fd;
}

std::optional<pid_t> pid_of_same_user(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  const bool is_known = ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
  return is_known && peer.uid == ::geteuid() ? std::optional(peer.pid) : std::nullopt;
}

void send_fd(int socket, std::uint64_t label, int fd) {
  Packet packet;
  packet.words = {kMagic, label};
  cmsghdr* header = CMSG_FIRSTHDR(&packet.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (::sendmsg(socket, &packet.message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof packet.words))
    throw SystemError("cannot send a descriptor to another process", errno);
}

FdMessage receive_fd(int socket, Deadline deadline) {
  if (!wait_readable(socket, deadline))
    throw SystemError("another process on this host sent no descriptor in time", ETIMEDOUT, Cause::kJoinTimeout);
  Packet packet;
  const ssize_t received = ::recvmsg(socket, &packet.message, MSG_CMSG_CLOEXEC);
  FdMessage result;
  for (cmsghdr* header = CMSG_FIRSTHDR(&packet.message); header; header = CMSG_NXTHDR(&packet.message, header))
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
        header->cmsg_len == CMSG_LEN(sizeof(int))) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
      result.fd.reset(fd);
    }
  if (received != static_cast<ssize_t>(sizeof packet.words) || packet.words[0] != kMagic || !result.fd)
    throw SystemError("another process on this host sent no descriptor",
                      received < 0    ? errno
                      : received == 0 ? ECONNRESET  // it has closed the connection
                                      : EPROTO);
  result.label = packet.words[1];
  return result;
}

}  // namespace lockstep::base::net
