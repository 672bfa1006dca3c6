// Tells which checkpoints of a directory are whole, without reading the same bytes twice.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lockstep::checkpoint {

/// Remembers checkpoints whose bytes have been verified, by the inode, size and times of their files. Used by one
/// thread at a time.
class VerifiedCheckpoints {
 public:
  /// Returns whether the checkpoint at `path` has a valid manifest and files with the hashes that it lists. Reads all
  /// bytes, unless it has done so before and the files have not changed since. Does not throw.
  bool is_whole(const std::string& path);
  void forget(const std::string& path) { verified_.erase(path); }

 private:
  std::map<std::string, std::vector<std::int64_t>> verified_;  // the state of the files, by path
};

}  // namespace lockstep::checkpoint
