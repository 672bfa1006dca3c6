// Unix sockets that pass file descriptors between processes of one user on one host.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"

namespace lockstep::base::net {

/// A listening Unix socket in a directory of its own (mode 0700). The destructor removes both.
class UnixListener {
 public:
  /// Creates the directory below `parent` and listens in it. Throws SystemError.
  explicit UnixListener(const std::string& parent);
  ~UnixListener();
  UnixListener(const UnixListener&) = delete;
  UnixListener& operator=(const UnixListener&) = delete;

  const std::string& path() const { return path_; }
  /// Blocks until a process of this user connects; connections of other users are closed unread. Throws SystemError,
  /// with kJoinTimeout at the deadline.
  Fd accept(Deadline deadline);

 private:
  void remove() noexcept;

  std::string folder_;
  std::string path_;
  Fd listener_;
};

/// Connects to the UnixListener of another process, which must belong to this user. Throws SystemError.
Fd connect_unix(const std::string& path);

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
