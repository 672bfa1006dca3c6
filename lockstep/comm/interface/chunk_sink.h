// ChunkSink: receives ranges of the gradients of ranks that can access each other's memory.
#pragma once

#include <cstddef>
#include <memory>

#include "lockstep/base/shared_memory.h"

namespace lockstep::comm::inline interface {

/// A contiguous range of the elements of one gradient, in memory order, on every rank that has that gradient.
struct GradientChunk {
  static constexpr std::size_t kAlignment = 65536;
  std::size_t gradient_index = 0;
  std::size_t offset = 0;  // first element of the range; a multiple of kAlignment
  std::size_t count = 0;
  const void* const* gradients = nullptr;  // addresses of the range on each rank that has the gradient, in rank order
  std::size_t num_gradients = 0;
  int divisor = 1;  // the mean is the sum of the ranks' gradients, added in this order, divided by `divisor`
};

/// Consumes chunks of gradients while they are in cache. Must not write to the gradients.
class ChunkSink {
 public:
  virtual ~ChunkSink() = default;
  /// Receives a chunk. Each chunk goes to exactly one rank, the first that claims it. Called on the threads that call
  /// GradientReducer::ready() or wait for the result.
  virtual void consume(const GradientChunk& chunk) = 0;
  /// Called on every rank, in the same order, for each gradient that some rank has, after all its chunks were consumed.
  virtual void finish_gradient(std::size_t gradient_index) = 0;
};

/// Memory that all ranks share, initially zero. It is freed when the last rank has released it or ended.
struct SharedAllocation {
  std::shared_ptr<const base::SharedMemory> memory;
  bool is_first = true;  // true on exactly one rank
};

}  // namespace lockstep::comm::inline interface
