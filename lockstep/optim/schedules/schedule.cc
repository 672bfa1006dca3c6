#include "lockstep/optim/schedules/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "lockstep/base/error.h"

namespace lockstep::optim::inline schedules {
namespace {

void require_steps(std::int64_t steps, const std::string& schedule, const std::string& option) {
  base::check_option(steps >= 1, schedule, option, static_cast<double>(steps), "1 or more");
}
void require_rate(double rate, const std::string& schedule, const std::string& option) {
  base::check_option(rate >= 0 && std::isfinite(rate), schedule, option, rate, "0 or more");
}

double cosine_interpolation(double start, double end, double fraction) {
  return end + (start - end) / 2 * (1 + std::cos(std::numbers::pi * fraction));
}
double linear_interpolation(double start, double end, double fraction) { return (end - start) * fraction + start; }

}  // namespace

Schedule lambda_schedule(std::function<double(std::int64_t step)> factor) {
  if (!factor) throw base::UsageError("lambda_schedule: factor is empty; expected a function of the step");
  return [factor = std::move(factor)](std::int64_t step, double base) { return base * factor(step); };
}

Schedule constant() {
  return [](std::int64_t, double base) { return base; };
}

Schedule step_decay(const StepDecayOptions& options) {
  require_steps(options.every, "step_decay", "every");
  require_rate(options.factor, "step_decay", "factor");
  return [options](std::int64_t step, double base) {
    return base * std::pow(options.factor, static_cast<double>(step / options.every));
  };
}

Schedule multi_step_decay(const MultiStepDecayOptions& options) {
  require_rate(options.factor, "multi_step_decay", "factor");
  for (std::size_t i = 0; i < options.milestones.size(); ++i) {
    const auto milestone = options.milestones[i];
    const std::int64_t least = i == 0 ? 1 : options.milestones[i - 1];
    base::check_option(milestone >= least, "multi_step_decay", "milestone " + std::to_string(i),
                       static_cast<double>(milestone), std::to_string(least) + " or more");
  }
  return [options](std::int64_t step, double base) {
    const auto passed =
        std::upper_bound(options.milestones.begin(), options.milestones.end(), step) - options.milestones.begin();
    return base * std::pow(options.factor, static_cast<double>(passed));
  };
}

Schedule linear(const LinearOptions& options) {
  require_steps(options.steps, "linear", "steps");
  require_rate(options.from, "linear", "from");
  require_rate(options.to, "linear", "to");
  return [options](std::int64_t step, double base) {
    const auto fraction = static_cast<double>(std::min(step, options.steps)) / static_cast<double>(options.steps);
    return base * linear_interpolation(options.from, options.to, fraction);
  };
}

Schedule cosine_decay(const CosineDecayOptions& options) {
  require_steps(options.steps, "cosine_decay", "steps");
  require_rate(options.min_lr, "cosine_decay", "min_lr");
  return [options](std::int64_t step, double base) {
    const double angle =
        std::numbers::pi * static_cast<double>(std::min(step, options.steps)) / static_cast<double>(options.steps);
    return options.min_lr + (base - options.min_lr) * (1 + std::cos(angle)) / 2;
  };
}

Schedule polynomial_decay(const PolynomialDecayOptions& options) {
  require_steps(options.steps, "polynomial_decay", "steps");
  require_rate(options.power, "polynomial_decay", "power");
  return [options](std::int64_t step, double base) {
    const auto steps = static_cast<double>(options.steps);
    return base * std::pow(1 - static_cast<double>(std::min(step, options.steps)) / steps, options.power);
  };
}

Schedule one_cycle(const OneCycleOptions& options) {
  require_steps(options.steps, "one_cycle", "steps");
  const double most = options.three_phase ? 0.5 : 1;
  base::check_option(options.pct_start >= 0 && options.pct_start <= most, "one_cycle", "pct_start", options.pct_start,
                     options.three_phase ? "0 to 0.5 with three_phase" : "0 to 1");
  base::check_option(options.div_factor > 0, "one_cycle", "div_factor", options.div_factor, "more than 0");
  base::check_option(options.final_div_factor > 0, "one_cycle", "final_div_factor", options.final_div_factor,
                     "more than 0");
  return [options](std::int64_t step, double base) {
    const double start = base / options.div_factor, end = start / options.final_div_factor;
    const auto steps = static_cast<double>(options.steps);
    const double now = std::min(static_cast<double>(step), steps - 1), last = steps - 1;
    const double top = options.pct_start * steps - 1;  // the step with the base rate
    const double down =
        options.three_phase ? 2 * options.pct_start * steps - 2 : last;  // the step at which the rate has fallen
    const auto between = options.linear ? linear_interpolation : cosine_interpolation;
    if (now <= top) return top > 0 ? between(start, base, now / top) : base;
    if (!options.three_phase) return last > top ? between(base, end, (now - top) / (last - top)) : end;
    if (now <= down) return between(base, start, (now - top) / (down - top));
    return last > down ? between(start, end, (now - down) / (last - down)) : end;
  };
}

Schedule sequential(Schedule first, std::int64_t steps, Schedule next) {
  base::check_option(steps >= 0, "sequential", "steps", static_cast<double>(steps), "0 or more");
  if (!first || !next) throw base::UsageError("sequential: a schedule is empty; expected two functions");
  return [first = std::move(first), steps, next = std::move(next)](std::int64_t step, double base) {
    return step < steps ? first(step, base) : next(step - steps, base);
  };
}

Schedule warmup(std::int64_t steps, Schedule next, double from) {
  return sequential(linear({.steps = steps, .from = from}), steps, std::move(next));
}

}  // namespace lockstep::optim::inline schedules
