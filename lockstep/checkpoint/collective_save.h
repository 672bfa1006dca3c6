// Saves one checkpoint collectively with all ranks of a group, and remembers which checkpoints have been verified.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/checkpointer.h"
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

struct SaveRequest {
  std::string folder;
  std::int64_t step = 0;
  int keep = 2;
  const files::FolderLock* lock = nullptr;  ///< of the directory; on rank 0
  VerifiedCheckpoints* verified = nullptr;  ///< checkpoints that count as whole; on rank 0
  std::exception_ptr error = nullptr;       ///< of this rank, from before the save; it is reported to all ranks
};

/// Calls `action` and returns the exception that it threw, or null.
template <typename Action>
std::exception_ptr capture_exception(Action action) {
  try {
    action();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

/// Collective: waits for the other ranks. Throws as Checkpointer::save() does. Does not set the report's `stall`.
SaveReport save_collective(const comm::Group& group, const SaveRequest& request, const CheckpointParts& mine);

/// Collective: exchanges the ranks' errors; null means success. Throws the error of the first rank that failed on all
/// ranks, prefixed with `what` and that rank.
void throw_if_any_failed(const comm::Group& group, const std::string& what, const std::exception_ptr& error);

}  // namespace lockstep::checkpoint
