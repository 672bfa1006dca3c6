// Averages of a module's weights over the steps of a training.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace lockstep::optim {

struct EmaOptions {
  double decay = 0.999;  ///< 0 to 1: what stays of an average at each update
  /// Instead of `decay`: of the number of updates before this one; for instance ema_warmup(0.999).
  std::function<double(std::int64_t)> decay_schedule;
  bool buffers = false;  ///< also of floating-point buffers, such as running means
};
/// min(decay, (1 + n) / (10 + n)): averages that begin before the weights are any good forget them soon.
std::function<double(std::int64_t)> ema_warmup(double decay);

/// average = decay * average + (1 - decay) * weight, for all floating-point parameters (Polyak and Juditsky, SIAM J.
/// Control Optim. 30, 1992, with weights that fall). It begins with the weights as they are. Averages of bfloat16 and
/// half are of float, so that small changes add up. Each rank keeps its own, which are the same bits where the weights
/// are. Parameters stay the same objects, and on their devices, while this lives. Waits for nobody; one thread.
class Ema {
 public:
  /// Throws UsageError for a decay that is not of 0 to 1, and for a module without floating-point parameters.
  explicit Ema(torch::nn::Module& module, EmaOptions options = {});

  /// After each optimizer.step(). Throws UsageError while weights are swapped, and when decay_schedule gives what is
  /// not of 0 to 1: nothing has changed then.
  void update();
  std::int64_t updates() const { return updates_; }

  /// While it lives, the module has the averages instead of its weights, and its weights are kept; no step() of an
  /// optimizer may be made.
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
  /// For evaluation. Nothing is copied but where averages are of another dtype than the weights, and nothing is written
  /// to memory that ranks share. Throws UsageError when they are swapped already.
  [[nodiscard]] SwapGuard swap();

  /// All that a checkpoint needs. Copies, under the names that the module has for them.
  struct State {
    std::int64_t updates = 0;
    std::vector<std::pair<std::string, at::Tensor>> averages;
  };
  State state() const;
  /// Goes on from there. Throws UsageError for names that are missing or unknown and for other shapes: nothing has
  /// changed then.
  void resume(const State& state);

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
