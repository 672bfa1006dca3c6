#include "lockstep/train/callback.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <system_error>

#include "lockstep/base/error.h"

namespace lockstep::train {

double value_of(const NamedValues& values, const std::string& name, const std::string& who) {
  std::string names;
  for (const auto& [key, value] : values) {
    if (key == name) return value;
    names += (names.empty() ? "" : ", ") + key;
  }
  throw base::UsageError(who + ": there is no \"" + name + "\" among the values of the validation; allowed are " +
                         (names.empty() ? "none: nothing was logged" : names));
}

EarlyStopping::EarlyStopping(const EarlyStoppingOptions& options)
    : options_(options),
      best_(options.maximize ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity()) {
  if (options.patience < 0)
    throw base::UsageError("EarlyStoppingOptions.patience is " + std::to_string(options.patience) +
                           "; allowed is 0 or more");
  if (!(options.min_delta >= 0))
    throw base::UsageError("EarlyStoppingOptions.min_delta is " + std::to_string(options.min_delta) +
                           "; allowed is 0 or more");
}

void EarlyStopping::on_validation_end(FitContext& fit, const NamedValues& values) {
  const double value = value_of(values, options_.monitor, "EarlyStopping");
  if (options_.check_finite && !std::isfinite(value)) return fit.end(StopReason::kCallback);
  const double improvement = options_.maximize ? value - best_ : best_ - value;
  if (improvement > options_.min_delta) {
    best_ = value;
    num_without_improvement_ = 0;
  } else if (++num_without_improvement_ > options_.patience) {
    fit.end(StopReason::kCallback);
  }
}

void EarlyStopping::load_state_dict(const checkpoint::StateDict& state) {
  const double best = checkpoint::value_of<double>(state, "best");
  num_without_improvement_ = checkpoint::value_of<std::int64_t>(state, "no_better");
  best_ = best;
}

ModelCheckpoint::ModelCheckpoint(const ModelCheckpointOptions& options) : options_(options) {
  if (options.top_k < 1)
    throw base::UsageError("ModelCheckpointOptions.top_k is " + std::to_string(options.top_k) +
                           "; allowed is 1 or more");
}

void ModelCheckpoint::on_validation_end(FitContext& fit, const NamedValues& values) {
  const double value = value_of(values, options_.monitor, "ModelCheckpoint");
  if (!std::isfinite(value) || fit.folder().empty()) return;
  const auto better = [this](double a, double b) { return options_.maximize ? a > b : a < b; };
  const auto place = std::find_if(saved_models_.begin(), saved_models_.end(),
                                  [&](const SavedModel& kept) { return better(value, kept.value); });
  if (place == saved_models_.end() && saved_models_.size() == static_cast<std::size_t>(options_.top_k)) return;
  char number[32];
  std::snprintf(number, sizeof number, "%.6g", value);
  std::string name = options_.monitor;
  std::replace(name.begin(), name.end(), '/', '_');
  const std::string path =
      fit.folder() + "/best/step-" + std::to_string(fit.step()) + "-" + name + "-" + number + ".safetensors";
  if (!fit.save_weights(path)) return;
  std::erase_if(saved_models_, [&](const SavedModel& kept) {
    return kept.path == path;
  });  // of a run that went back and came here again
  const auto now = std::find_if(saved_models_.begin(), saved_models_.end(),
                                [&](const SavedModel& kept) { return better(value, kept.value); });
  saved_models_.insert(now, {value, path});
  if (saved_models_.size() <= static_cast<std::size_t>(options_.top_k)) return;
  std::error_code ignored;  // a file that somebody took away is gone as well
  if (fit.world().rank() == 0) std::filesystem::remove(saved_models_.back().path, ignored);
  saved_models_.pop_back();
}

std::vector<std::string> ModelCheckpoint::paths() const {
  std::vector<std::string> paths;
  for (const SavedModel& kept : saved_models_) paths.push_back(kept.path);
  return paths;
}

checkpoint::StateDict ModelCheckpoint::state_dict() const {
  checkpoint::StateDict state = {{"count", static_cast<std::int64_t>(saved_models_.size())}};
  for (std::size_t i = 0; i < saved_models_.size(); ++i) {
    state["value." + std::to_string(i)] = saved_models_[i].value;
    state["path." + std::to_string(i)] = saved_models_[i].path;
  }
  return state;
}

void ModelCheckpoint::load_state_dict(const checkpoint::StateDict& state) {
  std::vector<SavedModel> kept;
  for (std::int64_t i = 0; i < checkpoint::value_of<std::int64_t>(state, "count"); ++i)
    kept.push_back({checkpoint::value_of<double>(state, "value." + std::to_string(i)),
                    checkpoint::value_of<std::string>(state, "path." + std::to_string(i))});
  saved_models_ = std::move(kept);
}

}  // namespace lockstep::train
