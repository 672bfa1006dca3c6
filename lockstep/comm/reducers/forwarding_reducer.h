// ForwardingReducer: base class for decorators of a GradientReducer.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/interface/gradient_reducer.h"

namespace lockstep::comm::reducers {

/// Forwards every call to `inner`.
class ForwardingReducer : public GradientReducer {
 public:
  explicit ForwardingReducer(std::unique_ptr<GradientReducer> inner) : inner_(std::move(inner)) {}

  void begin(const StepIdentity& step, std::vector<Collective> extra_ops, ChunkSink* early_sink) override {
    inner_->begin(step, std::move(extra_ops), early_sink);
  }
  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override {
    return inner_->ready(index, gradient, fresh);
  }
  bool is_ready(std::size_t index) const override { return inner_->is_ready(index); }
  Participation finish(GradientSink& sink) override { return inner_->finish(sink); }
  bool has_begun_on_all_ranks() const override { return inner_->has_begun_on_all_ranks(); }
  void abandon(const std::string& why) noexcept override { inner_->abandon(why); }
  ReducerStats stats() const override { return inner_->stats(); }
  FusedReducer* fused() override { return inner_->fused(); }

 private:
  const std::unique_ptr<GradientReducer> inner_;
};

}  // namespace lockstep::comm::reducers
