// The exchange of a world of one: every gradient is its own mean.
#pragma once

#include "lockstep/comm/interface/gradient_reducer.h"

namespace lockstep::comm {

/// Copies nothing and keeps nothing: the sink gets the gradient that came.
class SingleRankReducer final : public GradientReducer {
 public:
  explicit SingleRankReducer(std::vector<Part> parts) : specs_(std::move(parts)), gradients_(specs_.size()) {}
  void begin(const StepIdentity& step, std::vector<Collective>) override {
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
  std::vector<Part> specs_;
  std::vector<Gradient> gradients_;
  bool joined_ = false;
  ReducerStats stats_;
};

}  // namespace lockstep::comm
