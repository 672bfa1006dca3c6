// The exchange of a world of one: every gradient is its own mean.
#pragma once

#include "lockstep/comm/interface/gradient_reducer.h"

namespace lockstep::comm {

/// Copies nothing and keeps nothing: the sink gets the gradient that came.
class LocalExchange final : public Exchange {
 public:
  explicit LocalExchange(std::vector<Part> parts) : parts_(std::move(parts)), gradients_(parts_.size()) {}
  void begin(const StepIdentity& step, std::vector<Collective>) override {
    gradients_.assign(parts_.size(), {});
    joined_ = step.joined;
  }
  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override {
    gradients_[index] = {gradient, fresh, true};
    return {};
  }
  bool is_ready(std::size_t index) const override { return gradients_[index].ready; }
  Attendance finish(Sink& sink) override;
  bool all_have_begun() const override { return true; }
  void abandon(const std::string&) noexcept override { gradients_.assign(parts_.size(), {}); }
  ExchangeStats stats() const override { return stats_; }

 private:
  struct Gradient {
    at::Tensor tensor;
    bool fresh = false;
    bool ready = false;
  };
  std::vector<Part> parts_;
  std::vector<Gradient> gradients_;
  bool joined_ = false;
  ExchangeStats stats_;
};

}  // namespace lockstep::comm
