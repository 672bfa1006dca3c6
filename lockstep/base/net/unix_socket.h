// Unix sockets that pass file descriptors between processes of one user on one host.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"

namespace lockstep::base::net {

/// Creates a socket that is neither connected nor listening. Throws SystemError.
Fd make_unix_socket();
/// Returns the pid of the process at the other end of a connected socket if it belongs to this user, else nullopt. For
/// the end that has connected, that is the process that listens.
std::optional<pid_t> pid_of_same_user(int socket);

/// A descriptor and a label that identifies it to the receiver.
struct FdMessage {
  std::uint64_t label = 0;
  Fd fd;
};
/// Sends a duplicate of `fd`. Does not block. Throws SystemError, also if the socket's buffer has no space for the 16
/// bytes of the message.
void send_fd(int socket, std::uint64_t label, int fd);
/// Blocks until a descriptor arrives. Throws SystemError if the peer closes the connection or sends anything else, and
/// with kJoinTimeout at the deadline.
FdMessage receive_fd(int socket, Deadline deadline);

}  // namespace lockstep::base::net
