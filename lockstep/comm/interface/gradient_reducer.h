// GradientReducer: a persistent reduction of a fixed list of gradients, planned once and run every step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/interface/chunk_sink.h"
#include "lockstep/comm/interface/collective.h"

namespace lockstep::comm::reducers {
class InPlaceGradientReducer;
}  // namespace lockstep::comm::reducers

namespace lockstep::comm::inline interface {

/// Consumes the means of gradients.
class GradientSink {
 public:
  virtual ~GradientSink() = default;
  /// Receives the mean over the ranks of gradient `index`. `mean` has the shape and dtype of the gradient, and is
  /// sparse if the gradient was. Its memory belongs to the reducer, which keeps it for this gradient: a gradient that
  /// is still in that memory when the next reduction begins is not copied again.
  virtual void consume(std::size_t index, const at::Tensor& mean) = 0;
};

/// One gradient of the list. The list is the same on all ranks.
struct GradientSpec {
  std::string name;
  at::Tensor example;  ///< a tensor with the gradient's shape, strides, dtype and device (the parameter itself)
};

/// The purpose of a reduction.
enum class GradientUse : std::uint8_t {
  kAverage,           ///< replaces gradients by their means
  kNorm,              ///< reads chunks of gradients to compute their norm
  kUpdate,            ///< updates parameters from chunks of gradients
  kUpdateInBackward,  ///< like kUpdate, as soon as all ranks have a gradient, while others are still being computed
};

/// Identifies a step by what a rank can determine without the others. The header of the reduction contains it. If the
/// ranks' values differ, the ranks are not in the same step, and the reduction fails with a DesyncError that reports
/// both values.
struct StepIdentity {
  std::int64_t steps = 0;               ///< calls of Group::step()
  std::int64_t batches = 0;             ///< batches drawn from loaders that give all ranks the same number of batches
  std::uint32_t sample_order_hash = 0;  ///< sum of the hashes of the sample orders from which they were drawn
  /// Four numbers of 4 bits, which are summed in the same way: of the seeds, epochs, batch sizes, and the rest. They
  /// say in which of these the sample orders differ.
  std::uint16_t sample_order_parts = 0;
  std::int64_t optimizer_steps = 0;  ///< steps of optimizers that hold parameters of the model, where they are counted
  /// Calls of backward() outside no_sync() that left this rank its own gradients, for the optimizer to average.
  std::int64_t local_backwards = 0;
  std::int64_t failed_backwards = 0;  ///< backward() calls since the last reduction that failed before they began it
  bool accumulating = false;          ///< gradients existed before backward(), and not because of no_sync()
  bool joined = false;                ///< this rank has no more batches and only follows the other ranks
  bool divide_by_active = false;      ///< with `joined`: means are over the ranks that have not joined
  GradientUse use = GradientUse::kAverage;
  /// For uses other than kAverage: the gradients are means already, equal on all ranks, and a chunk contains only the
  /// first rank's gradient.
  bool already_averaged = false;
  std::uint64_t options_hash = 0;  ///< hash of the optimizer's options and steps; 0 if there is none
  bool stop_requested = false;     ///< this rank was asked to stop; not compared, see Participation
};

/// The ranks that took part in a reduction.
struct Participation {
  int active = 0;               ///< number of ranks that had not joined; if 0, nothing was reduced
  int first_active = 0;         ///< the lowest of them
  bool stop_requested = false;  ///< whether any rank was asked to stop; the same on all ranks
};

/// Counts since the reducer was made.
struct ReducerStats {
  bool in_place = false;           ///< gradients are reduced in place; otherwise they are packed into buckets
  std::int64_t reductions = 0;     ///< finished reductions
  std::int64_t operations = 0;     ///< operations passed to the transport, headers included
  std::int64_t bytes = 0;          ///< bytes of gradients passed to the transport
  std::int64_t copies_in = 0;      ///< gradients written or scaled into memory of the reducer
  std::int64_t copies_out = 0;     ///< gradients copied out of that memory
  std::int64_t started_early = 0;  ///< buckets (in place: gradients) of the last reduction that started before finish()
  std::vector<std::int64_t> bucket_bytes;  ///< sizes of the current buckets
  /// Names of the gradients in the order in which they are reduced (in place: in this rank's last reduction).
  std::vector<std::string> order;
  /// For ReducerOptions.layout: how the next reduction packs gradients. Empty for in-place reducers and before the
  /// first reduction.
  std::string layout;
};

/// Reduces a list of gradients to their means over the ranks.
///
/// All ranks must run the same reductions in the same order. In each reduction, every rank calls begin(), then ready()
/// for each gradient that it has, in any order, then finish(). One thread at a time may use a reducer.
class GradientReducer {
 public:
  virtual ~GradientReducer() = default;

  /// Starts the next reduction. `extra_ops` are broadcasts and reductions to run with it, the same on all ranks; the
  /// root of a broadcast is the first rank that has not joined. `early_sink` is null except with kUpdateInBackward,
  /// where in_place() must not be null: ready() may then pass chunks to it before finish_fused(). If a gradient turns
  /// out to be sparse later, some chunks have been passed already. Does not wait for other ranks.
  virtual void begin(const StepIdentity& step, std::vector<Collective> extra_ops, ChunkSink* early_sink) = 0;

  /// Reports that gradient `index` is complete on this rank, and starts the operations that can start. `fresh`: the
  /// gradient was computed by this backward(), or by one under no_sync() before it. A gradient that is not fresh
  /// existed before and changes only if another rank has a fresh one. Does not wait for other ranks.
  ///
  /// Returns the memory into which the gradient was copied and which will hold its mean. The caller may then release
  /// its own tensor, and must not access the returned memory until finish() returns. Returns an undefined tensor if the
  /// gradient was not copied; then `gradient` must not change until finish() returns.
  virtual at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) = 0;

  /// Returns whether ready(index) was called in this reduction.
  virtual bool is_ready(std::size_t index) const = 0;

  /// Blocks until all operations are done, then passes the mean of each gradient that was fresh on some rank to `sink`,
  /// in the same order on all ranks. Throws CommError and its subclasses; the reducer is closed afterwards.
  virtual Participation finish(GradientSink& sink) = 0;

  /// Returns whether all ranks have begun this reduction, so that finish() would not wait for that.
  virtual bool has_begun_on_all_ranks() const = 0;

  /// Gives up the reduction that this rank has begun, for example because backward() failed. Closes the reducer here
  /// and on the other ranks, whose errors contain `why`.
  virtual void abandon(const std::string& why) noexcept = 0;

  virtual ReducerStats stats() const = 0;

  /// From the next reduction on, the ranks of a host need only these elements of each mean, by host and gradient,
  /// counted in the memory of the gradient; its other elements may have any finite value. Empty: all. The same on all
  /// ranks. A reducer may ignore it.
  virtual void set_needed(std::vector<std::vector<ElementRange>> /*needed*/) {}

  /// Returns the reducer that this one is or forwards to if gradients are reduced in place, else null. Only that one
  /// can pass them to a ChunkSink.
  virtual reducers::InPlaceGradientReducer* in_place() { return nullptr; }
};

}  // namespace lockstep::comm::inline interface
