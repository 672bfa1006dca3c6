#include "lockstep/train/fit_progress.h"

#include <string>

#include "lockstep/train/random_state.h"

namespace lockstep::train {
namespace {

using checkpoint::StateDict;
using checkpoint::value_of;

constexpr const char* kTrainValue = "train_value.";  // in front of their names
constexpr const char* kValValue = "val_value.";

void put(StateDict& state, const char* prefix, const NamedValues& values) {
  for (const auto& [name, value] : values) state[prefix + name] = value;
}

NamedValues taken(const StateDict& state, const std::string& prefix) {
  NamedValues values;
  for (const auto& [name, value] : state)
    if (name.starts_with(prefix)) values.emplace_back(name.substr(prefix.size()), value_of<double>(state, name));
  return values;
}

}  // namespace

StateDict state_of(const FitPlace& place, const Batches& data, double seconds) {
  StateDict state = {{"epoch", place.epoch},
                     {"step", place.step},
                     {"validation_due", place.validation_due},
                     {"seconds", seconds},
                     {"told_at", place.told_at}};
  state["position"] = place.in_epoch ? data::to_text(data.position()) : std::string();
  put(state, kTrainValue, place.train_values);
  put(state, kValValue, place.val_values);
  return state;
}

void load_place(FitPlace& place, Batches& data, const StateDict& state) {
  place.epoch = value_of<std::int64_t>(state, "epoch");
  place.step = value_of<std::int64_t>(state, "step");
  place.validation_due = value_of<bool>(state, "validation_due");
  place.seconds = value_of<double>(state, "seconds");
  place.told_at = value_of<std::int64_t>(state, "told_at");
  place.train_values = taken(state, kTrainValue);
  place.val_values = taken(state, kValValue);
  const auto& position = value_of<std::string>(state, "position");
  if (!position.empty()) data.restore(data::parse_position(position));
}

StateDict own_state(const FitPlace& place, at::Device device) {
  StateDict state = random_state(device);
  state["sums"] = to_text(place.window.sums());
  state["epoch_sums"] = to_text(place.epoch_metrics.sums());
  return state;
}

void load_own_state(FitPlace& place, const checkpoint::SavedCheckpoint& saved, const std::string& part,
                    const comm::Group& world) {
  for (int rank = world.rank(); rank < saved.world_size(); rank += world.size()) {
    const StateDict state = saved.read(part, rank);
    place.window.add(sums_from_text(value_of<std::string>(state, "sums")));
    place.epoch_metrics.add(sums_from_text(value_of<std::string>(state, "epoch_sums")));
  }
  if (world.rank() < saved.world_size())
    load_random_state(saved.read(part, world.rank()), world.device());
  else
    derive_random_state(saved.read(part, 0), static_cast<std::uint64_t>(world.rank()));
}

}  // namespace lockstep::train
