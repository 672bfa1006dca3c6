#include "lockstep/comm/reducers/fault_injection.h"

#include <signal.h>

#include <chrono>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/reducers/forwarding_reducer.h"

namespace lockstep::comm {
namespace {

using job::Fault;

constexpr auto kSlowBy = std::chrono::milliseconds(200);

volatile bool for_ever = true;

[[gnu::noinline]] void injected_endless_loop() {
  while (for_ever) {
  }
}

class InjectingExchange final : public ForwardingExchange, private Sink {
 public:
  InjectingExchange(std::unique_ptr<Exchange> inner, const job::Injection& injection)
      : ForwardingExchange(std::move(inner)), injection_(injection) {}

  void begin(const StepIdentity& step, std::vector<Collective> along) override {
    const auto number = static_cast<std::int64_t>(base::RankPage::process().exchanges.load()) + 1;
    if (number >= injection_.step && injection_.fault == Fault::kSlow) std::this_thread::sleep_for(kSlowBy);
    now_ = number >= injection_.step && !std::exchange(done_, number >= injection_.step);
    const bool can = injection_.fault != Fault::kFlip || step.use == Use::kMeans;
    if (now_)
      base::log_warning("the fault that was asked for (inject) " +
                        (can ? "happens now, in exchange " + std::to_string(number)
                             : std::string("cannot happen: the ranks of this host have one copy of the parameters")));
    now_ &= can;
    StepIdentity told = step;
    if (now_) happen(told);
    ForwardingExchange::begin(told, std::move(along));
  }

  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override {
    if (now_ && injection_.fault == Fault::kCorrupt && !gradient.is_sparse() && gradient.numel() > 0) {
      gradient.reshape({-1}).fill_(std::numeric_limits<double>::quiet_NaN());
      now_ = false;
    }
    return ForwardingExchange::ready(index, gradient, fresh);
  }

  Attendance finish(Sink& sink) override {
    if (!now_ || injection_.fault != Fault::kFlip) return ForwardingExchange::finish(sink);
    sink_ = &sink;
    return ForwardingExchange::finish(*this);
  }

 private:
  void happen(StepIdentity& step) {
    switch (injection_.fault) {
      case Fault::kKill: ::raise(SIGKILL); break;
      case Fault::kStop: ::raise(SIGSTOP); break;
      case Fault::kSegv: ::raise(SIGSEGV); break;
      case Fault::kLoop: injected_endless_loop(); break;
      case Fault::kThrow: throw std::runtime_error("the exception that was asked for (inject)");
      case Fault::kDesync: ++step.batches; break;
      default: break;  // in ready() or finish()
    }
  }

  /// A bit of the first number of the first mean, one that an update does not round away: half of a float32's value.
  void take(std::size_t index, const at::Tensor& mean) override {
    if (!mean.is_sparse() && mean.numel() > 0 && mean.element_size() > 1 && std::exchange(now_, false)) {
      const at::Tensor first = mean.as_strided({1}, {1}, mean.storage_offset()),
                       here = first.cpu();  // itself, where it is there already
      static_cast<unsigned char*>(here.mutable_data_ptr())[here.element_size() - 2] ^= 0x40;
      if (!here.is_same(first)) first.copy_(here);
    }
    sink_->take(index, mean);
  }

  const job::Injection injection_;
  bool now_ = false;  // the fault is of this exchange
  bool done_ = false;
  Sink* sink_ = nullptr;
};

}  // namespace

std::unique_ptr<Exchange> with_injection(std::unique_ptr<Exchange> inner, const job::Injection& injection) {
  return std::make_unique<InjectingExchange>(std::move(inner), injection);
}

}  // namespace lockstep::comm
