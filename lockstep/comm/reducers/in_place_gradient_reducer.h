// InPlaceGradientReducer: reduces gradients in place, for ranks that can access each other's memory.
#pragma once

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "lockstep/comm/interface/peer_memory_reducer.h"
#include "lockstep/comm/reducers/reducer_base.h"

namespace lockstep::comm::reducers {

/// ready() publishes the address of a gradient to the other ranks and reduces this rank's share of the gradients that
/// all ranks have published; finish() reduces the rest. A rank publishes only the gradients that it has, so unused
/// gradients cost nothing. A gradient is copied only if the other ranks cannot access it, if its strides are not the
/// parameter's, or if two gradients share memory: it is then written into memory of the reducer and counted in
/// copies_in, and rank 0 logs the first such reduction.
class InPlaceGradientReducer final : public ReducerBase, public FusedReducer {
 public:
  InPlaceGradientReducer(std::string name, std::vector<GradientSpec> specs, std::unique_ptr<channel::Channel> channel,
                         std::unique_ptr<PeerMemoryReducer> reducer);
  ~InPlaceGradientReducer() override;

  void begin(const StepIdentity& step, std::vector<Collective> extra_ops, ChunkSink* early_sink) override;
  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override;
  bool is_ready(std::size_t index) const override { return states_[index].ready; }
  Participation finish(GradientSink& sink) override;
  ReducerStats stats() const override;

  FusedReducer* fused() override { return this; }
  Participation finish_fused(ChunkSink& sink) override;
  SharedAllocation allocate_shared(std::size_t bytes) override { return reducer_->allocate_shared(bytes); }

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
  void consume_all(ChunkSink& sink);
  void read_peer_means();
  void deliver(GradientSink& sink);

  const std::unique_ptr<PeerMemoryReducer> reducer_;
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
