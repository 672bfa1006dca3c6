#include "lockstep/train/fit_progress.h"

#include <string>

namespace lockstep::training {
namespace {

using checkpoint::StateDict;
using checkpoint::value_of;

constexpr const char* kTrainValuePrefix = "train_value.";  // followed by the name of the value
constexpr const char* kValValuePrefix = "val_value.";

void put_values(StateDict& state, const char* prefix, const NamedValues& values) {
  for (const auto& [name, value] : values) state[prefix + name] = value;
}

NamedValues get_values(const StateDict& state, const std::string& prefix) {
  NamedValues values;
  for (const auto& [name, value] : state)
    if (name.starts_with(prefix)) values.emplace_back(name.substr(prefix.size()), value_of<double>(state, name));
  return values;
}

}  // namespace

StateDict to_state_dict(const FitProgress& progress, double seconds) {
  StateDict state = {{"epoch", progress.epoch},
                     {"step", progress.step},
                     {"validation_due", progress.validation_due},
                     {"seconds", seconds},
                     {"told_at", progress.last_logged_step}};
  put_values(state, kTrainValuePrefix, progress.train_values);
  put_values(state, kValValuePrefix, progress.val_values);
  return state;
}

void load_fit_progress(FitProgress& progress, const StateDict& state) {
  progress.epoch = value_of<std::int64_t>(state, "epoch");
  progress.step = value_of<std::int64_t>(state, "step");
  progress.validation_due = value_of<bool>(state, "validation_due");
  progress.seconds = value_of<double>(state, "seconds");
  progress.last_logged_step = value_of<std::int64_t>(state, "told_at");
  progress.train_values = get_values(state, kTrainValuePrefix);
  progress.val_values = get_values(state, kValValuePrefix);
}

StateDict metric_sums(const FitProgress& progress) {
  return {{"sums", to_text(progress.unlogged_metrics.sums())}, {"epoch_sums", to_text(progress.epoch_metrics.sums())}};
}

void load_metric_sums(FitProgress& progress, const TrainingState& state, const std::string& part,
                      const comm::Group& world) {
  for (int rank = world.rank(); rank < state.found()->world_size(); rank += world.size()) {
    const StateDict sums = state.read(part, rank);
    progress.unlogged_metrics.add(sums_from_text(value_of<std::string>(sums, "sums")));
    progress.epoch_metrics.add(sums_from_text(value_of<std::string>(sums, "epoch_sums")));
  }
}

}  // namespace lockstep::training
