#include "lockstep/optim/schedules/reduce_lr_on_plateau.h"

#include <torch/optim/optimizer.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/optim/schedules/scheduler.h"

namespace lockstep::optim::inline schedules {
namespace {

const std::string kRatePrefix = "rate.";  // followed by the number of the group

bool is_better(const ReduceLROnPlateauOptions& options, double value, double best) {
  const double margin = options.absolute_threshold ? options.threshold : 0;
  const double fraction = options.absolute_threshold ? 0 : options.threshold;
  return options.maximize ? value > best * (1 + fraction) + margin : value < best * (1 - fraction) - margin;
}

void check(const ReduceLROnPlateauOptions& options) {
  base::check_option(options.factor >= 0 && options.factor < 1, "ReduceLROnPlateau", "factor", options.factor,
                     "0 or more and less than 1");
  const auto check_not_negative = [](const char* name, auto value) {
    base::check_option(value >= 0, "ReduceLROnPlateau", name, static_cast<double>(value), "0 or more");
  };
  check_not_negative("patience", options.patience);
  check_not_negative("threshold", options.threshold);
  check_not_negative("cooldown", options.cooldown);
  check_not_negative("min_lr", options.min_lr);
  check_not_negative("eps", options.eps);
}

}  // namespace

PlateauDecision evaluate_plateau(const ReduceLROnPlateauOptions& options, PlateauState state, double value) {
  if (is_better(options, value, state.best)) {
    state.best = value;
    state.num_bad_values = 0;
  } else {
    ++state.num_bad_values;
  }
  if (state.cooldown_left > 0) {
    --state.cooldown_left;
    state.num_bad_values = 0;
  }
  if (state.num_bad_values <= options.patience) return {state, false};
  state.num_bad_values = 0;
  state.cooldown_left = options.cooldown;
  return {state, true};
}

ReduceLROnPlateau::ReduceLROnPlateau(torch::optim::Optimizer& optimizer, const ReduceLROnPlateauOptions& options)
    : optimizer_(optimizer), options_(options) {
  check(options_);
  if (options_.maximize) state_.best = -state_.best;
}

bool ReduceLROnPlateau::step(double value) {
  const PlateauDecision decision = evaluate_plateau(options_, state_, value);
  state_ = decision.state;
  if (!decision.reduce) return false;
  std::vector<double> rates = get_learning_rates(optimizer_);
  bool changed = false;
  for (double& rate : rates) {
    const double reduced = std::max(rate * options_.factor, options_.min_lr);
    if (rate - reduced <= options_.eps) continue;
    rate = reduced;
    changed = true;
  }
  set_learning_rates(optimizer_, rates, "ReduceLROnPlateau");
  return changed;
}

checkpoint::StateDict ReduceLROnPlateau::state_dict() const {
  checkpoint::StateDict state = {
      {"best", state_.best}, {"num_bad_values", state_.num_bad_values}, {"cooldown_left", state_.cooldown_left}};
  const std::vector<double> rates = get_learning_rates(optimizer_);
  for (std::size_t i = 0; i < rates.size(); ++i) state[kRatePrefix + std::to_string(i)] = rates[i];
  return state;
}

void ReduceLROnPlateau::load_state_dict(const checkpoint::StateDict& state) {
  const PlateauState loaded{.best = checkpoint::value_of<double>(state, "best"),
                            .num_bad_values = checkpoint::value_of<std::int64_t>(state, "num_bad_values"),
                            .cooldown_left = checkpoint::value_of<std::int64_t>(state, "cooldown_left")};
  std::vector<double> rates;
  for (std::size_t i = 0; i + 3 < state.size(); ++i)
    rates.push_back(checkpoint::value_of<double>(state, kRatePrefix + std::to_string(i)));
  set_learning_rates(optimizer_, rates, "ReduceLROnPlateau");
  state_ = loaded;
}

}  // namespace lockstep::optim::inline schedules
