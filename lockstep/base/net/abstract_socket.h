// Unix sockets in the abstract namespace, by which processes of one user on one host find each other. Such a socket has
// no file: it disappears with its process, however that ends.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"

namespace lockstep::base::net {

/// A listening Unix socket whose name is a prefix and random digits. Not thread-safe.
class AbstractListener {
 public:
  /// Throws SystemError.
  explicit AbstractListener(std::string_view prefix);

  /// Returns the name, by which this user's processes in this network namespace can connect.
  const std::string& name() const { return name_; }
  /// Returns the descriptor to poll for reading.
  int fd() const { return listener_.get(); }
  /// Returns the next pending connection; an empty Fd if there is none, or if it is that of another user, which is
  /// closed unread. Does not block.
  Fd try_accept() const;
  /// Blocks until a process of this user connects; connections of other users are closed unread. Throws SystemError,
  /// with kJoinTimeout at the deadline.
  Fd accept(Deadline deadline) const;

 private:
  std::string name_;
  Fd listener_;
};

/// Connects to the AbstractListener with this name, which must belong to this user. Throws SystemError.
Fd connect_abstract(const std::string& name);

/// A connection to an AbstractListener.
struct AbstractConnection {
  Fd fd;
  pid_t pid = 0;  ///< the process that listens
};
/// Connects to all listeners of this user in this network namespace whose names begin with `prefix`. Leaves out those
/// that cannot be connected to, for example because they have just ended. Does not block. Throws SystemError if this
/// process has too many descriptors.
std::vector<AbstractConnection> connect_to_all(std::string_view prefix);

}  // namespace lockstep::base::net
