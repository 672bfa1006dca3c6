// Learning rates as functions of the step.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep::optim {

/// The rate at `step`, counted from 0, of a group of parameters whose own rate is `base`. Pure: the same on every rank,
/// and at any time. Values are those of the class of torch.optim.lr_scheduler that is named with each. Steps before 0
/// do not exist; after the end of a schedule that has one its last rate stays. What makes a schedule throws UsageError
/// for options that it cannot have.
using Schedule = std::function<double(std::int64_t step, double base)>;

/// base * factor(step): LambdaLR.
Schedule lambda_schedule(std::function<double(std::int64_t step)> factor);
/// The base rate, always.
Schedule constant();

struct StepDecayOptions {
  std::int64_t every = 1;  ///< steps
  double factor = 0.1;
};
/// Multiplied by `factor` every so many steps: StepLR; with every = 1, ExponentialLR.
Schedule step_decay(const StepDecayOptions& options);

struct MultiStepDecayOptions {
  std::vector<std::int64_t> milestones;  ///< in ascending order; one that comes twice counts twice
  double factor = 0.1;
};
/// Multiplied by `factor` at each milestone: MultiStepLR.
Schedule multi_step_decay(const MultiStepDecayOptions& options);

struct LinearOptions {
  std::int64_t steps = 1;
  double from = 0;  ///< of the base rate
  double to = 1;
};
/// From one part of the base rate to another: LinearLR.
Schedule linear(const LinearOptions& options);

struct CosineDecayOptions {
  std::int64_t steps = 1;
  double min_lr = 0;
};
/// Half a cosine from the base rate to `min_lr` (Loshchilov and Hutter, arXiv:1608.03983, without restarts):
/// CosineAnnealingLR, which goes up again after the end, where this one stays.
Schedule cosine_decay(const CosineDecayOptions& options);

struct PolynomialDecayOptions {
  std::int64_t steps = 1;
  double power = 1;
};
/// base * (1 - step / steps)^power: PolynomialLR.
Schedule polynomial_decay(const PolynomialDecayOptions& options);

struct OneCycleOptions {
  std::int64_t steps = 1;
  double pct_start = 0.3;         ///< the part of the steps after which the base rate is reached
  double div_factor = 25;         ///< it begins at base / div_factor
  double final_div_factor = 1e4;  ///< and ends at the start's rate / final_div_factor
  bool linear = false;            ///< lines instead of halves of cosines
  bool three_phase = false;       ///< down to the start's rate as fast as up, and then to the end's
};
/// Up to the base rate, which is what OneCycleLR calls max_lr, and down far below where it began (Smith and Topin,
/// arXiv:1708.07120). Rates alone: momentum stays.
Schedule one_cycle(const OneCycleOptions& options);

/// `first` for `steps` steps; then `next`, from its step 0: SequentialLR.
Schedule sequential(Schedule first, std::int64_t steps, Schedule next);
/// A line from `from` of the base rate to all of it in `steps` steps; then `next`, from its step 0. `next` may be any
/// schedule that begins at the base rate.
Schedule warmup(std::int64_t steps, Schedule next, double from = 0);

}  // namespace lockstep::optim
