// SingleRankReducer: the reducer of a world of one rank, where every gradient is its own mean.
#pragma once

#include "lockstep/comm/interface/gradient_reducer.h"

namespace lockstep::comm::reducers {

/// Copies nothing: the sink receives the gradient that was passed to ready().
class SingleRankReducer final : public GradientReducer {
 public:
  explicit SingleRankReducer(std::vector<GradientSpec> specs) : specs_(std::move(specs)), gradients_(specs_.size()) {}
  void begin(const StepIdentity& step, std::vector<Collective>, ChunkSink*) override {
    gradients_.assign(specs_.size(), {});
    joined_ = step.joined;
  }
  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override {
    gradients_[index] = {gradient, fresh, true};
    return {};
  }
  bool is_ready(std::size_t index) const override { return gradients_[index].ready; }
  Participation finish(GradientSink& sink) override;
  bool has_begun_on_all_ranks() const override { return true; }
  void abandon(const std::string&) noexcept override { gradients_.assign(specs_.size(), {}); }
  ReducerStats stats() const override { return stats_; }

 private:
  struct Gradient {
    at::Tensor tensor;
    bool fresh = false;
    bool ready = false;
  };
  std::vector<GradientSpec> specs_;
  std::vector<Gradient> gradients_;
  bool joined_ = false;
  ReducerStats stats_;
};

}  // namespace lockstep::comm::reducers
