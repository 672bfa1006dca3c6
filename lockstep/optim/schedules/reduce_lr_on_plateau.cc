#include "lockstep/optim/schedules/reduce_lr_on_plateau.h"

#include <torch/optim/optimizer.h>

#include <algorithm>

#include "lockstep/optim/schedules/learning_rates.h"
#include "lockstep/base/option_check.h"

namespace lockstep::optim {
namespace {

bool is_better(const PlateauOptions& options, double value, double best) {
  const double margin = options.absolute_threshold ? options.threshold : 0;
  const double part = options.absolute_threshold ? 0 : options.threshold;
  return options.maximize ? value > best * (1 + part) + margin : value < best * (1 - part) - margin;
}

void check(const PlateauOptions& options) {
  require(options.factor >= 0 && options.factor < 1, "Plateau", "factor", options.factor, "0 or more and less than 1");
  require(options.patience >= 0, "Plateau", "patience", static_cast<double>(options.patience), "0 or more");
  require(options.threshold >= 0, "Plateau", "threshold", options.threshold, "0 or more");
  require(options.cooldown >= 0, "Plateau", "cooldown", static_cast<double>(options.cooldown), "0 or more");
  require(options.min_rate >= 0, "Plateau", "min_rate", options.min_rate, "0 or more");
  require(options.eps >= 0, "Plateau", "eps", options.eps, "0 or more");
}

}  // namespace

PlateauVerdict judge(const PlateauOptions& options, PlateauState state, double value) {
  if (is_better(options, value, state.best)) {
    state.best = value;
    state.bad = 0;
  } else {
    ++state.bad;
  }
  if (state.cooldown_left > 0) {
    --state.cooldown_left;
    state.bad = 0;
  }
  if (state.bad <= options.patience) return {state, false};
  state.bad = 0;
  state.cooldown_left = options.cooldown;
  return {state, true};
}

Plateau::Plateau(torch::optim::Optimizer& optimizer, const PlateauOptions& options)
    : optimizer_(optimizer), options_(options) {
  check(options_);
  if (options_.maximize) state_.best = -state_.best;
}

bool Plateau::step(double value) {
  const PlateauVerdict verdict = judge(options_, state_, value);
  state_ = verdict.state;
  if (!verdict.reduce) return false;
  std::vector<double> rates = rates_of(optimizer_);
  bool changed = false;
  for (double& rate : rates) {
    const double reduced = std::max(rate * options_.factor, options_.min_rate);
    if (rate - reduced <= options_.eps) continue;
    rate = reduced;
    changed = true;
  }
  set_rates(optimizer_, rates, "Plateau");
  return changed;
}

Plateau::Position Plateau::position() const { return {state_, rates_of(optimizer_)}; }

void Plateau::resume(const Position& position) {
  set_rates(optimizer_, position.rates, "Plateau");
  state_ = position.state;
}

}  // namespace lockstep::optim
