// What decorators of an Exchange have in common.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/interface/gradient_reducer.h"

namespace lockstep::comm {

/// Does what `inner` does.
class ForwardingExchange : public Exchange {
 public:
  explicit ForwardingExchange(std::unique_ptr<Exchange> inner) : inner_(std::move(inner)) {}

  void begin(const StepIdentity& step, std::vector<Collective> along) override {
    inner_->begin(step, std::move(along));
  }
  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override {
    return inner_->ready(index, gradient, fresh);
  }
  bool is_ready(std::size_t index) const override { return inner_->is_ready(index); }
  Attendance finish(Sink& sink) override { return inner_->finish(sink); }
  bool all_have_begun() const override { return inner_->all_have_begun(); }
  void abandon(const std::string& why) noexcept override { inner_->abandon(why); }
  ExchangeStats stats() const override { return inner_->stats(); }
  PieceExchange* pieces() override { return inner_->pieces(); }

 private:
  const std::unique_ptr<Exchange> inner_;
};

}  // namespace lockstep::comm
