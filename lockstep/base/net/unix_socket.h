// Descriptors given to other processes of this user on this host.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"

namespace lockstep::base {

/// A Unix socket that listens in a folder of its own (mode 0700), which goes with this object.
class UnixListener {
 public:
  /// Makes the folder in `parent`. Throws SystemError.
  explicit UnixListener(const std::string& parent);
  ~UnixListener();
  UnixListener(const UnixListener&) = delete;
  UnixListener& operator=(const UnixListener&) = delete;

  const std::string& path() const { return path_; }
  /// Waits for somebody to knock. Only processes of this user come in: others are turned away unheard. Throws
  /// SystemError, with kJoinTimeout in it at the deadline.
  Fd accept(Deadline deadline);

 private:
  void remove() noexcept;

  std::string folder_;
  std::string path_;
  Fd listener_;
};

/// Connects to another process's UnixListener, which must be this user's. Throws SystemError.
Fd connect_unix(const std::string& path);

/// A descriptor and a number that says what it is.
struct FdMessage {
  std::uint64_t label = 0;
  Fd fd;
};
/// Sends a copy of `fd`; 16 bytes, so it does not block. Throws SystemError.
void send_fd(int socket, std::uint64_t label, int fd);
/// Throws SystemError when the other side closes or sends something else, with kJoinTimeout at the deadline.
FdMessage receive_fd(int socket, Deadline deadline);

}  // namespace lockstep::base
