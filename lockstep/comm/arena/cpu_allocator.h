// Makes libtorch allocate CPU tensors in the arena.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace lockstep::comm::arena {

/// The exception of a tensor that does not fit into memory, with the text and the hint of ArenaFull.
class TensorOutOfMemory : public c10::OutOfMemoryError {
 public:
  TensorOutOfMemory(c10::SourceLocation location, std::string text, std::string hint)
      : c10::OutOfMemoryError(location, std::move(text)), hint_(std::move(hint)) {}
  const std::string& hint() const { return hint_; }

 private:
  std::string hint_;
};

/// From now on libtorch allocates every new CPU tensor of this process in Arena::this_process(); existing tensors stay
/// where they are. Idempotent. May be called from any thread. When memory runs out, the allocation throws
/// TensorOutOfMemory.
void install_arena();

}  // namespace lockstep::comm::arena
