// Saves one checkpoint collectively with all ranks of a group.
#pragma once

#include <exception>
#include <string>

#include "lockstep/checkpoint/checkpointer.h"

namespace lockstep::checkpoint {

struct SaveRequest {
  std::string folder;
  std::int64_t step = 0;
  int keep = 2;
  const files::FolderLock* lock = nullptr;  ///< of the directory; on rank 0
  VerifiedCheckpoints* verified = nullptr;  ///< checkpoints that count as whole; on rank 0
  std::exception_ptr error =
      nullptr;  ///< error that occurred on this rank before the save; it is reported to all ranks
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
