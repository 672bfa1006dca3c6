// The same list of gradients, reduced every step: planned once, run often.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/interface/collective.h"
#include "lockstep/comm/interface/peer_memory_reducer.h"

namespace lockstep::comm {

/// What is done with a gradient when its mean over the ranks is known.
class GradientSink {
 public:
  virtual ~GradientSink() = default;
  /// `mean` has the gradient's shape and dtype, or is sparse when it was. It lives in memory that the exchange keeps
  /// for this gradient: a gradient that is still there when the next exchange begins is not copied again.
  virtual void take(std::size_t index, const at::Tensor& mean) = 0;
};

/// One gradient of the list, the same on all ranks.
struct Part {
  std::string name;
  at::Tensor like;  ///< a tensor of the gradient's shape, strides, dtype and device (the parameter itself)
};

/// What an exchange is for.
enum class GradientUse : std::uint8_t {
  kAverage,           ///< gradients become their means
  kNorm,              ///< their pieces are looked at
  kUpdate,            ///< parameters are updated from their pieces
  kUpdateInBackward,  ///< as soon as all ranks have a gradient, while others are still computed
};

/// Which step this is, as far as each rank can tell by itself. It travels in the exchange's header; ranks that differ
/// in it are not in the same step, and the exchange fails with a DesyncError that prints both values.
struct StepIdentity {
  std::int64_t steps = 0;    ///< calls of Group::step()
  std::int64_t batches = 0;  ///< batches drawn from loaders that give all ranks equally many
  std::uint32_t order = 0;   ///< the sum of the fingerprints of the orders of samples from which they were drawn
  std::int64_t empty_backwards = 0;  ///< backward() calls since the last exchange that reached none of its parameters
  bool accumulating = false;         ///< gradients were there before this backward, and no no_sync() explains them
  bool joined = false;               ///< this rank has no more batches and only keeps the others company
  bool divide_by_active = false;     ///< with joined: means are over the ranks that have not joined
  GradientUse use = GradientUse::kAverage;
  bool already_averaged =
      false;  ///< not with kAverage: they are means already, the same on all ranks, and pieces have the first rank's
  std::uint64_t options = 0;    ///< a fingerprint of what is done with pieces
  bool stop_requested = false;  ///< somebody has asked this rank to leave; not compared: see Participation
};

/// Who took part in an exchange.
struct Participation {
  int active = 0;               ///< ranks that had not joined; when it is 0, nothing was exchanged
  int first = 0;                ///< the lowest of them
  bool stop_requested = false;  ///< of any rank, the same on all
};

/// Counts since the exchange was made, for tests and for the curious.
struct ReducerStats {
  bool in_place = false;           ///< gradients are reduced where they lie; otherwise they are packed into buckets
  std::int64_t exchanges = 0;      ///< finished exchanges
  std::int64_t operations = 0;     ///< operations given to the transport, headers included
  std::int64_t bytes = 0;          ///< bytes of gradients given to the transport
  std::int64_t copies_in = 0;      ///< gradients written or scaled into memory of the exchange
  std::int64_t copies_out = 0;     ///< gradients copied out of it
  std::int64_t started_early = 0;  ///< buckets (in place: gradients) of the last exchange that left before its finish()
  std::int64_t plans = 0;          ///< times that the buckets were laid out
  std::vector<std::int64_t> bucket_bytes;  ///< of the plan in force
  std::vector<std::string>
      order;           ///< names of the parts in buckets (in place: of this rank's last exchange) as they travel
  std::string layout;  ///< for ReducerOptions.layout: how the next exchange packs them. Empty in place, and before the
                       ///< first one
};

/// What an exchange can do besides where gradients are reduced in place: give them to a sink in the pass that would
/// reduce them. They stay what they are on each rank.
class FusedReducer {
 public:
  virtual ~FusedReducer() = default;
  /// Instead of GradientReducer::finish(), when begin() was told another use than kAverage. A rank that keeps company
  /// gets no pieces, and taken() only of an update. Throws as finish() does, and UsageError, on all ranks, when some
  /// rank has a sparse gradient: no sink got anything then.
  virtual Participation finish_fused(ChunkSink& sink) = 0;
  /// After begin() with kUpdateInBackward: ready() may give pieces, too. When a gradient turns out to be sparse later,
  /// some have been given.
  virtual void set_early_sink(ChunkSink& sink) = 0;
  /// Memory that all ranks of the exchange see. All call it, between exchanges. Throws CommError.
  virtual SharedAllocation allocate_shared(std::size_t bytes) = 0;
};

/// Reduces a list of gradients to their means. All ranks make the same exchanges in the same order; within one, each
/// calls ready() for the parts it has, in any order, then finish(). One thread at a time.
class GradientReducer {
 public:
  virtual ~GradientReducer() = default;

  /// Opens the next exchange. `along` are broadcasts and reductions that travel with it, the same on all ranks; the
  /// root of a broadcast is the first rank that has not joined.
  virtual void begin(const StepIdentity& step, std::vector<Collective> extra_ops) = 0;

  /// Part `index` is known on this rank. `fresh`: this backward, or one under no_sync() before it, computed it; a part
  /// that is not fresh was there before, and is touched only if another rank has a fresh one. Starts what can start;
  /// does not wait. Returns the memory in which this gradient travels and its mean will be, when it has been written
  /// there: the caller may release its own tensor then, and must not touch that memory until finish(). Otherwise an
  /// undefined tensor, and the gradient must not change until finish().
  virtual at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) = 0;

  /// True once ready(index) has come in this exchange.
  virtual bool is_ready(std::size_t index) const = 0;

  /// Waits for everything and gives the mean of each part that was fresh on some rank to `sink`, in the same order on
  /// all ranks. Throws CommError and its kin; the exchange is closed then.
  virtual Participation finish(GradientSink& sink) = 0;

  /// True when finish() would not wait for another rank to begin this exchange.
  virtual bool has_begun_on_all_ranks() const = 0;

  /// This rank cannot go on with the exchange that it began: a backward() failed. The exchange is closed, here and on
  /// the other ranks, whose errors carry `why`.
  virtual void abandon(const std::string& why) noexcept = 0;

  virtual ReducerStats stats() const = 0;

  /// Null where gradients are not reduced in place.
  virtual FusedReducer* pieces() { return nullptr; }
};

}  // namespace lockstep::comm
