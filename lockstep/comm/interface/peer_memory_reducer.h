// PeerMemoryReducer: reduces gradients in place, for transports whose ranks can access each other's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "lockstep/base/shared_memory.h"
#include "lockstep/comm/interface/pending.h"

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
  /// publish() or wait for the result.
  virtual void consume(const GradientChunk& chunk) = 0;
  /// Called on every rank, in the same order, for each gradient that some rank has, after all its chunks were consumed.
  virtual void finish_gradient(std::size_t gradient_index) = 0;
};

/// Memory that all ranks share, initially zero. It is freed when the last rank has released it or ended.
struct SharedAllocation {
  std::shared_ptr<const base::SharedMemory> memory;
  bool is_first = true;  // true on exactly one rank
};

/// What the ranks have published of one gradient in a round.
struct GradientPresence {
  bool dense = false;   ///< some rank published a fresh dense gradient
  bool sparse = false;  ///< some rank has a fresh sparse gradient
};

/// The work that ranks may do before the end of a round, on gradients that all ranks have published.
enum class EarlyWork {
  kNone,
  kReduce,
  kConsume,  ///< pass their chunks to sinks, once consume_early() has set the sink
};

/// Reduces a fixed list of gradients, the same on all ranks, in rounds. In each round a rank calls begin_round(), then
/// publish() for each gradient that it has, in any order, then finish() or finish_consuming(). Other ranks may write to
/// a published gradient from publish() until the end of the round, or indefinitely if the round never ends. One thread
/// at a time may use a reducer.
class PeerMemoryReducer {
 public:
  virtual ~PeerMemoryReducer() = default;

  /// Returns whether the other ranks can read and write memory at `address`.
  virtual bool is_peer_accessible(const void* address) const = 0;
  /// Returns an uninitialized tensor that the other ranks can access, with the shape, dtype and device of `example` and
  /// with `strides`.
  virtual at::Tensor make_peer_accessible(const at::Tensor& example, at::IntArrayRef strides) = 0;

  /// Starts a round. `early` must be equal on all ranks that publish in this round. Before the end of the round, a rank
  /// does at most its share of the early work.
  virtual void begin_round(EarlyWork early) = 0;
  /// Sets the sink of a round of EarlyWork::kConsume: from now on publish() passes chunks to `sink`. Call it only if
  /// all ranks publish in this round, and after it is certain that they run the same update. finish_consuming() must
  /// get the same arguments.
  virtual void consume_early(ChunkSink& sink, int divisor) = 0;
  /// Publishes gradient `index` at `data`, contiguous or with the strides that all ranks use for it. If `data` is null,
  /// this rank has a sparse gradient, which is not reduced here. `fresh` as in GradientReducer::ready().
  virtual void publish(std::size_t index, void* data, bool fresh) = 0;
  /// Ends publishing on this rank; does not wait. The result is done when every gradient that is fresh on some rank
  /// holds its mean, on each rank that published it: the sum of the published gradients in rank order, divided by the
  /// number of ranks.
  virtual PendingPtr finish() = 0;
  /// Like finish(), but passes chunks to sinks instead of reducing: once every rank has called it, the chunks of
  /// gradients that are fresh on some rank go to the ranks' sinks, with `divisor`. Done when all chunks were consumed.
  /// A rank whose `sink` is null gets none. With `first_only`, the gradients are equal on all ranks already, and a
  /// chunk contains only the first rank's gradient. If some rank published a sparse gradient, no sink gets any more
  /// chunks.
  virtual PendingPtr finish_consuming(ChunkSink* sink, int divisor, bool first_only) = 0;

  // Valid after finish() or finish_consuming() is done, until the next begin_round():
  /// Returns what the ranks have published, by gradient. The reference stays valid as long as the reducer.
  virtual const std::vector<GradientPresence>& presence() const = 0;
  /// Returns where this rank can read the mean of a dense gradient that it has not published itself.
  virtual const void* mean(std::size_t index) const = 0;
  /// Returns whether some rank has not published a gradient that is dense in presence(). Such a rank reads mean(),
  /// and the other ranks must leave that memory unchanged until it has read it.
  virtual bool has_remote_readers() const = 0;

  /// Allocates memory that all ranks share. All ranks must call it, in the order of their operations; blocks until they
  /// have. Throws CommError.
  virtual SharedAllocation allocate_shared(std::size_t bytes) = 0;
};

}  // namespace lockstep::comm::inline interface
