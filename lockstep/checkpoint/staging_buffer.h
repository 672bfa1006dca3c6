// Where the values of a checkpoint wait for the thread that writes them.
#pragma once

#include <cstddef>
#include <memory>

#include "lockstep/checkpoint/checkpointer.h"

namespace lockstep::checkpoint {

/// Memory of this process alone, kept from one copy to the next: making new pages takes longer than the copy.
class Stage {
 public:
  /// `parts` with the values of now; tensors lie in this memory, on the CPU, until the next call. Tensors that cannot
  /// be saved stay as they are: the writer says so. Throws SystemError when there is no memory.
  Parts copied(const Parts& parts);

 private:
  struct Unmap {
    std::size_t num_bytes;
    void operator()(char* memory) const;
  };
  void reserve(std::size_t num_bytes);

  std::unique_ptr<char, Unmap> memory_{nullptr, Unmap{0}};
};

}  // namespace lockstep::checkpoint
