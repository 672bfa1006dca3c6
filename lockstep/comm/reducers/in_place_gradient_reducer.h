// The exchange of ranks that reach each other's memory: gradients are reduced where they lie.
#pragma once

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "lockstep/comm/interface/peer_memory_reducer.h"
#include "lockstep/comm/reducers/reducer_base.h"

namespace lockstep::comm {

/// ready() shows the others where a gradient lies, and reduces this rank's share of what all have shown; finish() the
/// rest. Which parts a rank has travels with what it shows, so that unused ones cost nothing. No gradient is copied but
/// one that the others cannot reach or whose strides are not the parameter's: it is written into memory of the
/// exchange, is counted in copies_in, and rank 0 says so the first time.
class InPlaceGradientReducer final : public ReducerBase, public FusedReducer {
 public:
  InPlaceGradientReducer(std::string name, std::vector<Part> parts, std::unique_ptr<Channel> channel,
                         std::unique_ptr<PeerMemoryReducer> reducer);
  ~InPlaceGradientReducer() override;

  void begin(const StepIdentity& step, std::vector<Collective> extra_ops) override;
  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override;
  bool is_ready(std::size_t index) const override { return states_[index].ready; }
  Participation finish(GradientSink& sink) override;
  ReducerStats stats() const override;

  FusedReducer* pieces() override { return this; }
  Participation finish_fused(ChunkSink& sink) override;
  void set_early_sink(ChunkSink& sink) override { early_sink_ = &sink; }
  SharedAllocation allocate_shared(std::size_t bytes) override { return reducer_->allocate_shared(bytes); }

 private:
  struct State {
    bool ready = false;
    at::Tensor gradient;  // as it came
    at::Tensor mean;      // where the mean will be: what was shown
  };
  bool can_reduce_in_place(std::size_t index, const at::Tensor& gradient) const;
  void report_copies();
  template <typename Work>
  Participation end(const Work& work);
  void consume_early();
  void reduce_all();
  void consume_all(ChunkSink& sink);
  void read_peer_means();
  void deliver(GradientSink& sink);

  const std::unique_ptr<PeerMemoryReducer> reducer_;
  std::vector<std::vector<std::int64_t>> strides_;  // in which all ranks show a part
  std::vector<State> states_;
  std::unordered_set<const void*> published_;  // in this exchange: two parameters may have one gradient
  bool open_ = false;
  ChunkSink* early_sink_ = nullptr;  // that gets nothing yet
  bool averaged_ = false;            // what is shown in this exchange, already
  std::vector<std::size_t> order_;   // of the last exchange
  std::vector<std::size_t> copied_;  // in this exchange, because they do not lie well
  bool has_reported_copies_ = false;
};

}  // namespace lockstep::comm
