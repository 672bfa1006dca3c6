// The bytes that this process has sent to other hosts.
#pragma once

#include <cstdint>
#include <map>

namespace lockstep::base::net {

/// Counts what this process sends over TCP, whichever library has opened the connections. Connections within the host
/// do not count, nor do those that were opened and closed between two calls. Used by one thread.
class SentBytes {
 public:
  /// Returns the bytes that other hosts have acknowledged since the first call. Takes some microseconds for each open
  /// file of the process.
  std::uint64_t total();

 private:
  std::map<std::uint64_t, std::uint64_t> connections_;  // the bytes of each at the last call, by inode
  std::uint64_t total_ = 0;
  bool has_begun_ = false;
};

}  // namespace lockstep::base::net
