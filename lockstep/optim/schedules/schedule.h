// Learning rate schedules as functions of the step.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep::optim::inline schedules {

/// The learning rate at `step` >= 0 of a parameter group whose base rate is `base`. Pure: returns the same value on
/// every rank and at any time. Values equal those of the class of torch.optim.lr_scheduler that each function names.
/// After its end, a schedule keeps its last rate. The functions below throw UsageError for invalid options.
using Schedule = std::function<double(std::int64_t step, double base)>;

/// base * factor(step): LambdaLR.
Schedule lambda_schedule(std::function<double(std::int64_t step)> factor);
/// The base rate at every step: ConstantLR with factor 1.
Schedule constant();

struct StepDecayOptions {
  std::int64_t every = 1;  ///< steps
  double factor = 0.1;
};
/// Multiplies the rate by `factor` every `every` steps: StepLR; with every = 1, ExponentialLR.
Schedule step_decay(const StepDecayOptions& options);

struct MultiStepDecayOptions {
  std::vector<std::int64_t> milestones = {};  ///< in ascending order; a repeated milestone counts twice
  double factor = 0.1;
};
/// Multiplies the rate by `factor` at each milestone: MultiStepLR.
Schedule multi_step_decay(const MultiStepDecayOptions& options);

struct LinearOptions {
  std::int64_t steps = 1;
  double from = 0;  ///< fraction of the base rate at the start
  double to = 1;    ///< fraction of the base rate at the end
};
/// Interpolates linearly between two fractions of the base rate: LinearLR.
Schedule linear(const LinearOptions& options);

struct CosineDecayOptions {
  std::int64_t steps = 1;
  double min_lr = 0;
};
/// Half a cosine from the base rate to `min_lr` (Loshchilov and Hutter, arXiv:1608.03983, without restarts):
/// CosineAnnealingLR, except that the rate stays at `min_lr` after the end instead of rising again.
Schedule cosine_decay(const CosineDecayOptions& options);

struct PolynomialDecayOptions {
  std::int64_t steps = 1;
  double power = 1;
};
/// base * (1 - step / steps)^power: PolynomialLR.
Schedule polynomial_decay(const PolynomialDecayOptions& options);

struct OneCycleOptions {
  std::int64_t steps = 1;
  double pct_start = 0.3;         ///< fraction of the steps in which the rate rises
  double div_factor = 25;         ///< the initial rate is base / div_factor
  double final_div_factor = 1e4;  ///< the final rate is the initial rate / final_div_factor
  bool linear = false;            ///< linear instead of cosine annealing
  bool three_phase = false;       ///< falls to the initial rate as fast as it rose, then to the final one
};
/// OneCycleLR (Smith and Topin, arXiv:1708.07120): rises to the base rate, which OneCycleLR calls max_lr, and falls far
/// below the initial rate. Does not change momentum.
Schedule one_cycle(const OneCycleOptions& options);

/// `first` for `steps` steps, then `next` from its step 0 on: SequentialLR.
Schedule sequential(Schedule first, std::int64_t steps, Schedule next);
/// Rises linearly from the fraction `from` of the base rate to the base rate in `steps` steps, then continues with
/// `next` from its step 0 on. `next` should begin at the base rate.
Schedule warmup(std::int64_t steps, Schedule next, double from = 0);

}  // namespace lockstep::optim::inline schedules
