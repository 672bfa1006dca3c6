// InPlaceGradientReducer: reduces gradients in place, for ranks that can access each other's memory.
#pragma once

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "lockstep/comm/interface/chunk_sink.h"
#include "lockstep/comm/reducers/reducer_base.h"

namespace lockstep::comm::shm {
class GradientTable;
}  // namespace lockstep::comm::shm

namespace lockstep::comm::reducers {

/// ready() publishes the address of a gradient to the other ranks and reduces this rank's share of the gradients that
/// all ranks have published; finish() reduces the rest. A rank publishes only the gradients that it has, so unused
/// gradients cost nothing. A gradient is copied only if the other ranks cannot access it, if its strides are not the
/// parameter's, or if two gradients share memory: it is then written into memory of the reducer and counted in
/// copies_in, and rank 0 logs the first such reduction.
class InPlaceGradientReducer final : public ReducerBase {
 public:
  InPlaceGradientReducer(std::string name, std::vector<GradientSpec> specs, std::unique_ptr<channel::Channel> channel,
                         std::shared_ptr<shm::GradientTable> table);
  ~InPlaceGradientReducer() override;

  void begin(const StepIdentity& step, std::vector<Collective> extra_ops, ChunkSink* early_sink) override;
  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override;
  bool is_ready(std::size_t index) const override { return states_[index].ready; }
  Participation finish(GradientSink& sink) override;
  ReducerStats stats() const override;

  InPlaceGradientReducer* in_place() override { return this; }
  /// Replaces finish() if begin() was called with a use other than kAverage: passes the gradients to `sink` in the same
  /// pass over memory that would reduce them; the gradients themselves stay unchanged on every rank. A rank that has
  /// joined gets no chunks, and finish_gradient() only for an update. Throws like finish(). If some rank has a sparse
  /// gradient, throws UsageError on all ranks, and no sink has received anything (except early; see
  /// GradientReducer::begin()).
  Participation finish_fused(ChunkSink& sink);
  /// See shm::GradientTable. All ranks must call it, between reductions; blocks until they have. Throws CommError.
  SharedAllocation allocate_shared(std::size_t bytes);

 private:
  struct State {
    bool ready = false;
    at::Tensor gradient;  // as passed to ready()
    at::Tensor mean;      // the published tensor, which will hold the mean
  };
  bool can_reduce_in_place(std::size_t index, const at::Tensor& gradient) const;
  void report_copies();
  Participation end_round();
  void consume_early();
  void reduce_all();
  void read_peer_means();
  void deliver(GradientSink& sink);

  const std::shared_ptr<shm::GradientTable> table_;
  std::vector<std::vector<std::int64_t>> strides_;  // the strides with which all ranks publish each gradient
  std::vector<State> states_;
  std::unordered_set<const void*> published_;  // addresses, in this reduction: two parameters may share one gradient
  bool open_ = false;
  ChunkSink* early_sink_ = nullptr;  // from begin() until consume_early()
  bool averaged_ = false;            // StepIdentity::already_averaged of this reduction
  std::vector<std::size_t> order_;   // of the last reduction
  std::vector<std::size_t> copied_;  // in this reduction, because they cannot be reduced in place
  bool has_reported_copies_ = false;
};

}  // namespace lockstep::comm::reducers
