#include "lockstep/train/callback.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <system_error>

#include "lockstep/base/error.h"

namespace lockstep::training {

double require_value(const NamedValues& values, const std::string& name, const std::string& caller) {
  std::string names;
  for (const auto& [key, value] : values) {
    if (key == name) return value;
    names += (names.empty() ? "" : ", ") + key;
  }
  throw base::UsageError(caller + ": the validation has no value \"" + name + "\"; expected " +
                         (names.empty() ? "a value that validation_step() logs, and it logs none" : "one of " + names));
}

EarlyStopping::EarlyStopping(const EarlyStoppingOptions& options)
    : options_(options),
      best_(options.maximize ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity()) {
  if (options.patience < 0)
    throw base::UsageError("EarlyStoppingOptions.patience is " + std::to_string(options.patience) +
                           "; expected 0 or more");
  if (!(options.min_delta >= 0))
    throw base::UsageError("EarlyStoppingOptions.min_delta is " + std::to_string(options.min_delta) +
                           "; expected 0 or more");
}

void EarlyStopping::on_validation_end(FitContext& fit, const NamedValues& values) {
  const double value = require_value(values, options_.monitor, "EarlyStopping");
  if (options_.check_finite && !std::isfinite(value)) return fit.stop(StopReason::kCallback);
  const double improvement = options_.maximize ? value - best_ : best_ - value;
  if (improvement > options_.min_delta) {
    best_ = value;
    num_without_improvement_ = 0;
  } else if (++num_without_improvement_ > options_.patience) {
    fit.stop(StopReason::kCallback);
  }
}

void EarlyStopping::load_state_dict(const checkpoint::StateDict& state) {
  const double best = checkpoint::value_of<double>(state, "best");
  num_without_improvement_ = checkpoint::value_of<std::int64_t>(state, "no_better");
  best_ = best;
}

ModelCheckpoint::ModelCheckpoint(const ModelCheckpointOptions& options) : options_(options) {
  if (options.top_k < 1)
    throw base::UsageError("ModelCheckpointOptions.top_k is " + std::to_string(options.top_k) + "; expected 1 or more");
}

void ModelCheckpoint::on_validation_end(FitContext& fit, const NamedValues& values) {
  const double value = require_value(values, options_.monitor, "ModelCheckpoint");
  if (!std::isfinite(value) || fit.folder().empty()) return;
  const auto better = [this](double a, double b) { return options_.maximize ? a > b : a < b; };
  const auto position = std::find_if(saved_models_.begin(), saved_models_.end(),
                                     [&](const SavedModel& saved) { return better(value, saved.value); });
  if (position == saved_models_.end() && saved_models_.size() == static_cast<std::size_t>(options_.top_k)) return;
  char number[32];
  std::snprintf(number, sizeof number, "%.6g", value);
  std::string name = options_.monitor;
  std::replace(name.begin(), name.end(), '/', '_');
  const std::string path =
      fit.folder() + "/best/step-" + std::to_string(fit.step()) + "-" + name + "-" + number + ".safetensors";
  if (!fit.save_weights(path)) return;
  // Written before a restart that repeated this step.
  std::erase_if(saved_models_, [&](const SavedModel& saved) { return saved.path == path; });
  const auto insert_at = std::find_if(saved_models_.begin(), saved_models_.end(),
                                      [&](const SavedModel& saved) { return better(value, saved.value); });
  saved_models_.insert(insert_at, {value, path});
  if (saved_models_.size() <= static_cast<std::size_t>(options_.top_k)) return;
  std::error_code ignored;  // the file may already be deleted
  if (fit.world().rank() == 0) std::filesystem::remove(saved_models_.back().path, ignored);
  saved_models_.pop_back();
}

std::vector<std::string> ModelCheckpoint::paths() const {
  std::vector<std::string> paths;
  for (const SavedModel& saved : saved_models_) paths.push_back(saved.path);
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
  std::vector<SavedModel> saved_models;
  for (std::int64_t i = 0; i < checkpoint::value_of<std::int64_t>(state, "count"); ++i)
    saved_models.push_back({checkpoint::value_of<double>(state, "value." + std::to_string(i)),
                            checkpoint::value_of<std::string>(state, "path." + std::to_string(i))});
  saved_models_ = std::move(saved_models);
}

}  // namespace lockstep::training
