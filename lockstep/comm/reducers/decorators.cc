#include "lockstep/comm/reducers/decorators.h"

#include <ATen/ops/aminmax.h>
#include <signal.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::comm::reducers {
namespace {

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
  InPlaceGradientReducer* in_place() override { return inner_->in_place(); }
  void set_needed(std::vector<std::vector<ElementRange>> needed) override { inner_->set_needed(std::move(needed)); }

 private:
  const std::unique_ptr<GradientReducer> inner_;
};

class FiniteCheckReducer final : public ForwardingReducer {
 public:
  FiniteCheckReducer(std::unique_ptr<GradientReducer> inner, std::vector<std::string> names, int rank,
                     std::function<void(const base::CommError&)> fail)
      : ForwardingReducer(std::move(inner)), names_(std::move(names)), rank_(rank), fail_(std::move(fail)) {}

  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override {
    const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
    if (values.numel() > 0) check_values(values, names_[index]);
    return ForwardingReducer::ready(index, gradient, fresh);
  }

 private:
  void check_values(const at::Tensor& values, const std::string& name) {
    const auto [min, max] = at::aminmax(values);
    const double low = min.item<double>(), high = max.item<double>();
    if (std::isfinite(low) && std::isfinite(high)) return;
    fail_({base::Cause::kNonFinite, "backward", rank_, rank_,
           "the gradient of " + name + " on rank " + std::to_string(rank_) +
               " has values that are not finite: minimum " + std::to_string(low) + ", maximum " + std::to_string(high),
           "check this rank's batch and loss; lower the learning rate, or use clip_grad_norm()"});
  }

  const std::vector<std::string> names_;
  const int rank_;
  const std::function<void(const base::CommError&)> fail_;
};

using job::Fault;

constexpr auto kSlowBy = std::chrono::milliseconds(200);

volatile bool keep_looping = true;

[[gnu::noinline]] void injected_endless_loop() {
  while (keep_looping) {
  }
}

class FaultInjectionReducer final : public ForwardingReducer, private GradientSink {
 public:
  FaultInjectionReducer(std::unique_ptr<GradientReducer> inner, const job::Injection& injection)
      : ForwardingReducer(std::move(inner)), injection_(injection) {}

  void begin(const StepIdentity& step, std::vector<Collective> extra_ops, ChunkSink* early_sink) override {
    const auto number =
        static_cast<std::int64_t>(base::telemetry::RankPage::this_process().gradient_reductions.load()) + 1;
    if (number >= injection_.step && injection_.fault == Fault::kSlow) std::this_thread::sleep_for(kSlowBy);
    is_due_ = number >= injection_.step && !std::exchange(done_, number >= injection_.step);
    const bool can = injection_.fault != Fault::kFlip || step.use == GradientUse::kAverage;
    if (is_due_)
      base::log_warning("inject: the fault " +
                        (can ? "happens now, in reduction " + std::to_string(number)
                             : std::string("cannot happen: the ranks of this host share one copy of the parameters")));
    is_due_ &= can;
    StepIdentity injected = step;
    if (is_due_) inject(injected);
    ForwardingReducer::begin(injected, std::move(extra_ops), early_sink);
  }

  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override {
    if (is_due_ && injection_.fault == Fault::kCorrupt && !gradient.is_sparse() && gradient.numel() > 0) {
      gradient.reshape({-1}).fill_(std::numeric_limits<double>::quiet_NaN());
      is_due_ = false;
    }
    return ForwardingReducer::ready(index, gradient, fresh);
  }

  Participation finish(GradientSink& sink) override {
    if (!is_due_ || injection_.fault != Fault::kFlip) return ForwardingReducer::finish(sink);
    sink_ = &sink;
    return ForwardingReducer::finish(*this);
  }

 private:
  void inject(StepIdentity& step) {
    switch (injection_.fault) {
      case Fault::kKill: ::raise(SIGKILL); break;
      case Fault::kStop: ::raise(SIGSTOP); break;
      case Fault::kSegv: ::raise(SIGSEGV); break;
      case Fault::kLoop: injected_endless_loop(); break;
      case Fault::kThrow: throw std::runtime_error("the injected exception (inject)");
      case Fault::kDesync: ++step.batches; break;
      case Fault::kNone: break;
      case Fault::kCorrupt:  // in ready()
      case Fault::kFlip:     // in finish()
      case Fault::kSlow: break;
    }
  }

  /// Flips a bit of the first element of the first mean. The bit is one that an update does not round away: it halves
  /// or doubles a float32.
  void consume(std::size_t index, const at::Tensor& mean) override {
    if (!mean.is_sparse() && mean.numel() > 0 && mean.element_size() > 1 && std::exchange(is_due_, false)) {
      const at::Tensor first = mean.as_strided({1}, {1}, mean.storage_offset()),
                       here = first.cpu();  // the same tensor if it is on the CPU already
      static_cast<unsigned char*>(here.mutable_data_ptr())[here.element_size() - 2] ^= 0x40;
      if (!here.is_same(first)) first.copy_(here);
    }
    sink_->consume(index, mean);
  }

  const job::Injection injection_;
  bool is_due_ = false;  // the fault belongs to this reduction
  bool done_ = false;
  GradientSink* sink_ = nullptr;
};

}  // namespace

std::unique_ptr<GradientReducer> with_finite_check(std::unique_ptr<GradientReducer> inner,
                                                   std::vector<std::string> names, int rank,
                                                   std::function<void(const base::CommError&)> fail) {
  return std::make_unique<FiniteCheckReducer>(std::move(inner), std::move(names), rank, std::move(fail));
}

std::unique_ptr<GradientReducer> with_fault_injection(std::unique_ptr<GradientReducer> inner,
                                                      const job::Injection& injection) {
  return std::make_unique<FaultInjectionReducer>(std::move(inner), injection);
}

}  // namespace lockstep::comm::reducers
