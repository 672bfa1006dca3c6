// Gradients that are reduced where they lie, by a transport whose ranks reach each other's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "lockstep/comm/interface/pending.h"

namespace lockstep::comm {

/// Elements of one part, in the order in which they lie, and where the ranks that have a gradient of it keep theirs.
struct Piece {
  static constexpr std::size_t kAlignment = 65536;
  std::size_t part = 0;
  std::size_t first = 0;  // of all its elements; a multiple of kAlignment
  std::size_t count = 0;
  const void* const* gradients = nullptr;  // of each rank that has one, in the order of the ranks, at `first`
  std::size_t num_gradients = 0;
  int divisor = 1;  // the mean is their sum, added in this order, divided by it
};

/// What is done with pieces while they are in cache. Gradients are only read.
class ChunkSink {
 public:
  virtual ~ChunkSink() = default;
  /// Each piece goes to one rank, whichever has time.
  virtual void take(const Piece& piece) = 0;
  /// On every rank, in the same order, for each part of which some rank had a gradient: all its pieces have been taken.
  virtual void finish_gradient(std::size_t part) = 0;
};

/// Memory that all ranks see, zeroed; it goes when the last of them lets go of it, or ends.
struct SharedAllocation {
  std::shared_ptr<void> data;  // aligned to pages
  bool first = true;           // on one of the ranks
};

/// What is done during a round, before its end, with the parts that all ranks have shown.
enum class EarlyWork {
  kNone,
  kReduce,
  kConsume,  ///< their pieces go to sinks, once consume_early() has said where to
};

/// A fixed list of parts, the same on all ranks. One round after another: open(), show() for each part that this rank
/// has, in any order, then finish(). Neighbours write into what was shown from then until the end of the round, or for
/// ever if the round is never ended.
class PeerMemoryReducer {
 public:
  virtual ~PeerMemoryReducer() = default;

  /// Whether the other ranks can read and write at this address.
  virtual bool is_peer_accessible(const void* address) const = 0;
  /// A tensor that they can reach, like `part` and in `strides`, contents unspecified.
  virtual at::Tensor make_peer_accessible(const at::Tensor& part, at::IntArrayRef strides) = 0;

  /// `early` is the same on all ranks that show something in this round. Before the end a rank does at most its share
  /// of it.
  virtual void open(EarlyWork early) = 0;
  /// In a round of EarlyWork::kConsume in which all ranks show something, when they are known to do the same: from now
  /// on show() gives pieces to `sink`. finish_consuming() gets the same arguments.
  virtual void consume_early(ChunkSink& sink, int divisor) = 0;
  /// Part `index` lies at `data`, contiguous or in the strides that all ranks use for it; null: this rank has a sparse
  /// gradient, which is not reduced here. `fresh` as in GradientReducer::ready().
  virtual void show(std::size_t index, void* data, bool fresh) = 0;
  /// This rank has shown what it has. Done when every part that is fresh somewhere holds the mean, on each rank that
  /// showed it: the sum in the order of the ranks of what was shown, divided by the number of ranks.
  virtual PendingPtr finish() = 0;
  /// The same without reducing: once every rank has called it, the pieces of parts that are fresh somewhere go to the
  /// ranks' sinks, to be divided by `divisor`; done when all have been taken. None goes to a rank without a sink. With
  /// `first_only` ranks hold the same gradients already, and a piece has those of the first rank alone. Not when a rank
  /// has shown a sparse one: then no sink gets anything any more.
  virtual PendingPtr finish_consuming(ChunkSink* sink, int divisor, bool first_only) = 0;

  // After finish() or finish_consuming() is done, until the next open():
  /// Some rank has shown it, fresh.
  virtual bool dense(std::size_t index) const = 0;
  /// Some rank has a sparse gradient.
  virtual bool sparse(std::size_t index) const = 0;
  /// Where this rank can read the mean of a dense part that it has not shown itself.
  virtual const void* mean(std::size_t index) const = 0;
  /// Some rank has not shown a part that is dense: it reads mean(), and the others must let it.
  virtual bool has_remote_readers() const = 0;

  /// All ranks call it, in the order of their operations, and wait for each other. Throws CommError.
  virtual SharedAllocation allocate_shared(std::size_t bytes) = 0;
};

}  // namespace lockstep::comm
