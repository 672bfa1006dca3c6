// Holds a copy of a checkpoint's values until the background thread has written them.
#pragma once

#include <cstddef>
#include <memory>

#include "lockstep/checkpoint/checkpointer.h"

namespace lockstep::checkpoint {

/// Private memory that is reused from one copy to the next, because mapping new pages takes longer than the copy
/// itself.
class StagingBuffer {
 public:
  /// Returns a copy of `parts` with the current values. Its tensors are on the CPU, in this buffer, and valid until the
  /// next call. Tensors that cannot be saved are not copied; the writer reports them. Throws SystemError if memory
  /// cannot be allocated.
  CheckpointParts copy(const CheckpointParts& parts);

 private:
  struct Unmapper {
    std::size_t num_bytes;
    void operator()(char* memory) const;
  };
  void reserve(std::size_t num_bytes);

  std::unique_ptr<char, Unmapper> memory_{nullptr, Unmapper{0}};
};

}  // namespace lockstep::checkpoint
