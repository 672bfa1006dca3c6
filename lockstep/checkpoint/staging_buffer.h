// Where the values of a checkpoint wait for the thread that writes them.
#pragma once

#include <cstddef>
#include <memory>

#include "lockstep/checkpoint/checkpointer.h"

namespace lockstep::checkpoint {

/// Memory of this process alone, kept from one copy to the next: making new pages takes longer than the copy.
class StagingBuffer {
 public:
  /// `parts` with the values of now; tensors lie in this memory, on the CPU, until the next call. Tensors that cannot
  /// be saved stay as they are: the writer says so. Throws SystemError when there is no memory.
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
