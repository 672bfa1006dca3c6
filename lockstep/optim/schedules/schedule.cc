#include "lockstep/optim/schedules/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "lockstep/base/error.h"
#include "lockstep/base/option_check.h"

namespace lockstep::optim {
namespace {

void require_steps(std::int64_t steps, const std::string& schedule, const std::string& option) {
  require(steps >= 1, schedule, option, static_cast<double>(steps), "1 or more");
}
void require_rate(double rate, const std::string& schedule, const std::string& option) {
  require(rate >= 0 && std::isfinite(rate), schedule, option, rate, "0 or more");
}

double half_cosine(double start, double end, double part) {
  return end + (start - end) / 2 * (1 + std::cos(std::numbers::pi * part));
}
double line(double start, double end, double part) { return (end - start) * part + start; }

}  // namespace

Schedule by_factor(std::function<double(std::int64_t step)> factor) {
  if (!factor) throw base::UsageError("by_factor: there is no function; allowed is one from the step to a factor");
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
    require(milestone >= least, "multi_step_decay", "milestone " + std::to_string(i), static_cast<double>(milestone),
            std::to_string(least) + " or more");
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
    const auto part = static_cast<double>(std::min(step, options.steps)) / static_cast<double>(options.steps);
    return base * line(options.from, options.to, part);
  };
}

Schedule cosine_decay(const CosineDecayOptions& options) {
  require_steps(options.steps, "cosine_decay", "steps");
  require_rate(options.min_rate, "cosine_decay", "min_rate");
  return [options](std::int64_t step, double base) {
    const double angle =
        std::numbers::pi * static_cast<double>(std::min(step, options.steps)) / static_cast<double>(options.steps);
    return options.min_rate + (base - options.min_rate) * (1 + std::cos(angle)) / 2;
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
  const double most = options.three_phases ? 0.5 : 1;
  require(options.rise >= 0 && options.rise <= most, "one_cycle", "rise", options.rise,
          options.three_phases ? "0 to 0.5 with three_phases" : "0 to 1");
  require(options.start_divisor > 0, "one_cycle", "start_divisor", options.start_divisor, "more than 0");
  require(options.final_divisor > 0, "one_cycle", "final_divisor", options.final_divisor, "more than 0");
  return [options](std::int64_t step, double base) {
    const double start = base / options.start_divisor, end = start / options.final_divisor;
    const auto steps = static_cast<double>(options.steps);
    const double now = std::min(static_cast<double>(step), steps - 1), last = steps - 1;
    const double top = options.rise * steps - 1;                                     // the step of the base rate
    const double down = options.three_phases ? 2 * options.rise * steps - 2 : last;  // where it has come down
    const auto between = options.linear ? line : half_cosine;
    if (now <= top) return top > 0 ? between(start, base, now / top) : base;
    if (!options.three_phases) return last > top ? between(base, end, (now - top) / (last - top)) : end;
    if (now <= down) return between(base, start, (now - top) / (down - top));
    return last > down ? between(start, end, (now - down) / (last - down)) : end;
  };
}

Schedule then(Schedule first, std::int64_t steps, Schedule next) {
  require(steps >= 0, "then", "steps", static_cast<double>(steps), "0 or more");
  if (!first || !next) throw base::UsageError("then: there is no schedule; allowed are two");
  return [first = std::move(first), steps, next = std::move(next)](std::int64_t step, double base) {
    return step < steps ? first(step, base) : next(step - steps, base);
  };
}

Schedule warm_up(std::int64_t steps, Schedule next, double from) {
  return then(linear({.steps = steps, .from = from}), steps, std::move(next));
}

}  // namespace lockstep::optim
