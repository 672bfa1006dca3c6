// Exponential moving averages of a module's weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/nn/module_ref.h"

namespace lockstep::optim {

struct EmaOptions {
  double decay = 0.999;  ///< 0 to 1: the fraction of an average that each update keeps
  /// Replaces `decay`: a function of the number of earlier updates, for example ema_warmup(0.999).
  std::function<double(std::int64_t)> decay_schedule = nullptr;
  bool buffers = false;  ///< also average floating-point buffers, such as running means
};
/// min(decay, (1 + n) / (10 + n)): gives early, untrained weights little influence. Throws UsageError for a decay
/// outside 0 to 1.
std::function<double(std::int64_t)> ema_warmup(double decay);

/// average = decay * average + (1 - decay) * weight, for all floating-point parameters (Polyak and Juditsky, SIAM J.
/// Control Optim. 30, 1992, with exponentially decaying weights). The averages start as copies of the weights. Averages
/// of bfloat16 and half weights are in float, so that small changes accumulate. Each rank keeps its own averages, which
/// have the same bits on all ranks if the weights do. While this object exists, the module's parameters must remain the
/// same objects on the same devices. Does not block. Not thread-safe.
class Ema final : public checkpoint::Stateful {
 public:
  /// Throws UsageError for a decay outside 0 to 1, for a module without floating-point parameters, and for an averaged
  /// tensor named "n_averaged".
  explicit Ema(nn::ModuleRef module, EmaOptions options = {});

  /// Updates the averages; call it after each optimizer.step(). Throws UsageError, and changes nothing, if the averages
  /// are swapped in or if decay_schedule returns a value outside 0 to 1.
  void update();
  std::int64_t updates() const { return updates_; }

  /// RAII guard: while it exists, the module's parameters hold the averages, and the guard keeps the weights. Do not
  /// call an optimizer's step() during that time.
  class SwapGuard {
   public:
    ~SwapGuard();
    SwapGuard(const SwapGuard&) = delete;
    SwapGuard& operator=(const SwapGuard&) = delete;

   private:
    friend class Ema;
    explicit SwapGuard(Ema& ema);
    Ema& ema_;
    std::vector<at::Tensor> weights_;
  };
  /// Swaps the averages in, for evaluation. Copies only where averages and weights have different dtypes, and never
  /// writes to memory that ranks share. Throws UsageError if the averages are already swapped in.
  [[nodiscard]] SwapGuard swap();

  /// Returns the averages, under the module's names for the parameters, and "n_averaged", the number of updates. The
  /// tensors are the ones in use: copy or write them before the next update().
  checkpoint::StateDict state_dict() const override;
  /// Restores that state. Throws UsageError, and changes nothing, for missing or unknown names and for other shapes.
  void load_state_dict(const checkpoint::StateDict& state) override;

 private:
  struct AveragedTensor {
    std::string name;
    at::Tensor weight, value;
  };
  void add(const std::string& name, const at::Tensor& weight);

  const EmaOptions options_;
  std::vector<AveragedTensor> averages_;
  std::int64_t updates_ = 0;
  bool swapped_ = false;
};

}  // namespace lockstep::optim
