// Tells which checkpoints of a directory are whole, without reading the same bytes twice.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/saved_checkpoint.h"

namespace lockstep::checkpoint {

/// Remembers checkpoints whose bytes have been verified, by the inode, size and times of their files. Used by one
/// thread at a time.
class VerifiedCheckpoints {
 public:
  /// The inode, size and times of the manifest and of each file that it lists.
  using FileStates = std::vector<std::int64_t>;
  static FileStates file_states(const SavedCheckpoint& checkpoint);

  /// Returns whether the checkpoint at `path` has a valid manifest and files with the hashes that it lists. Reads all
  /// bytes, unless it has done so before and the files have not changed since. Does not throw.
  bool is_whole(const std::string& path);
  /// Remembers that all bytes of `checkpoint` have been verified. `states`: those of its files before they were read.
  void add(const SavedCheckpoint& checkpoint, FileStates states) { verified_[checkpoint.path()] = std::move(states); }
  void forget(const std::string& path) { verified_.erase(path); }

 private:
  std::map<std::string, FileStates> verified_;  // by path
};

}  // namespace lockstep::checkpoint
