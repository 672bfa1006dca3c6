// One save by all ranks of a group.
#pragma once

#include <exception>
#include <string>

#include "lockstep/checkpoint/checkpointer.h"

namespace lockstep::checkpoint {

struct SaveRequest {
  std::string folder;
  std::int64_t step = 0;
  int keep = 2;
  std::exception_ptr error = nullptr;  ///< this rank has come so far and no further
};

/// What `action` throws; null for nothing.
template <typename Action>
std::exception_ptr capture_exception(Action action) {
  try {
    action();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

/// Waits for the other ranks. Throws as Checkpointer::save() does. The report's `stall` is not set.
SaveReport save_collective(comm::Group& group, const SaveRequest& plan, const CheckpointParts& mine);

/// What each of the ranks has to say of something that all of them did: "" is good. Throws the first one's error on
/// all, with its rank, after `what`.
void throw_if_any_failed(comm::Group& group, const std::string& what, const std::exception_ptr& error);

}  // namespace lockstep::checkpoint
