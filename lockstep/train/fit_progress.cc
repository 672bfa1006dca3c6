#include "lockstep/train/fit_progress.h"

#include <string>

#include "lockstep/train/random_state.h"

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

StateDict to_state_dict(const FitProgress& progress, const BatchRunner& data, double seconds) {
  StateDict state = {{"epoch", progress.epoch},
                     {"step", progress.step},
                     {"validation_due", progress.validation_due},
                     {"seconds", seconds},
                     {"told_at", progress.last_logged_step}};
  state["position"] = progress.in_epoch ? data::to_text(data.position()) : std::string();
  put_values(state, kTrainValuePrefix, progress.train_values);
  put_values(state, kValValuePrefix, progress.val_values);
  return state;
}

void load_fit_progress(FitProgress& progress, BatchRunner& data, const StateDict& state) {
  progress.epoch = value_of<std::int64_t>(state, "epoch");
  progress.step = value_of<std::int64_t>(state, "step");
  progress.validation_due = value_of<bool>(state, "validation_due");
  progress.seconds = value_of<double>(state, "seconds");
  progress.last_logged_step = value_of<std::int64_t>(state, "told_at");
  progress.train_values = get_values(state, kTrainValuePrefix);
  progress.val_values = get_values(state, kValValuePrefix);
  const auto& position = value_of<std::string>(state, "position");
  if (!position.empty()) data.restore(data::parse_position(position));
}

StateDict rank_state_dict(const FitProgress& progress, at::Device device) {
  StateDict state = random_state(device);
  state["sums"] = to_text(progress.unlogged_metrics.sums());
  state["epoch_sums"] = to_text(progress.epoch_metrics.sums());
  return state;
}

void load_rank_state(FitProgress& progress, const checkpoint::SavedCheckpoint& saved, const std::string& part,
                     const comm::Group& world) {
  for (int rank = world.rank(); rank < saved.world_size(); rank += world.size()) {
    const StateDict state = saved.read(part, rank);
    progress.unlogged_metrics.add(sums_from_text(value_of<std::string>(state, "sums")));
    progress.epoch_metrics.add(sums_from_text(value_of<std::string>(state, "epoch_sums")));
  }
  if (world.rank() < saved.world_size())
    load_random_state(saved.read(part, world.rank()), world.device());
  else
    derive_random_state(saved.read(part, 0), static_cast<std::uint64_t>(world.rank()));
}

}  // namespace lockstep::training
