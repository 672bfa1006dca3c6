#include "lockstep/train/checkpoint_manager.h"

#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/collective_save.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/job/identity/identity.h"
#include "lockstep/train/loggers/run_directory.h"

namespace lockstep::training {
namespace {

constexpr const char* kCheckpointsDirectory = "/checkpoints";

TrainingStateOptions state_options(const TrainerOptions& options) {
  return {.keep = options.keep_checkpoints,
          .settings = {{"precision", options.precision}},
          .resume_from = options.resume == "auto" ? "" : options.resume};
}

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

CheckpointManager::CheckpointManager(comm::Group world, const TrainerOptions& options, int fit_number)
    : world_(std::move(world)),
      options_(options),
      folder_(open_folder(fit_number)),
      state_(world_, folder_.empty() ? "" : folder_ + kCheckpointsDirectory, state_options(options_)) {
  if (state_.found() && state_.found()->path().starts_with(folder_ + kCheckpointsDirectory + "/"))
    newest_step_ = state_.step();
}

/// Returns the directory of this run, which rank 0 chooses.
std::string CheckpointManager::open_folder(int fit_number) {
  if (options_.folder.empty()) return "";
  RunDirectory run;
  std::exception_ptr error;
  if (world_.rank() == 0)
    error = checkpoint::capture_exception([&] {
      const job::identity::Identity identity = job::identity::identify(base::Env::this_process());
      run = open_run_directory({.folder = options_.folder,
                                .name = (options_.name.empty() ? program_name() : options_.name) +
                                        (fit_number == 1 ? "" : "." + std::to_string(fit_number)),
                                .resume_newest = options_.resume == "auto",
                                .job = identity.job,
                                .generation = identity.generation});
    });
  checkpoint::throw_if_any_failed(world_, "open the run directory in " + options_.folder, error);
  return world_.broadcast_bytes(run.path, 0, {.name = "run directory"});
}

bool CheckpointManager::should_save_after_step(std::int64_t step) const {
  return !folder_.empty() && options_.save_every_n_steps > 0 && step % options_.save_every_n_steps == 0;
}

bool CheckpointManager::should_save_after_epoch(std::int64_t epochs) const {
  return !folder_.empty() && options_.save_every_n_epochs > 0 && epochs % options_.save_every_n_epochs == 0;
}

void CheckpointManager::save(std::int64_t step, bool durable, const SaveStateOptions& options) {
  if (folder_.empty()) return;
  wait_for_save();
  try {
    if (durable || !options_.save_async) {
      state_.save(step, options);
    } else {
      state_.save_async(step, options);
      in_flight_ = true;
    }
    newest_step_ = step;
  } catch (const base::SystemError& error) {
    handle_disk_error(error);
  }
}

void CheckpointManager::check_in_flight_save() {
  if (in_flight_ && !state_.in_flight()) wait_for_save();
}

void CheckpointManager::wait_for_save() {
  if (!std::exchange(in_flight_, false)) return;
  try {
    state_.wait();  // bounded: the save has finished, or by the timeouts of the group and by the disk
  } catch (const base::SystemError& error) {
    newest_step_ = -1;
    // Other ranks may observe the error a step later, so this rank fails the job without waiting for them.
    if (options_.on_disk_error == DiskErrorPolicy::kStop)
      comm::GroupAccess::fail(
          world_, base::CommError(error.cause(), "checkpoint", world_.rank(), -1, error.what(), error.hint()));
    handle_disk_error(error);
  }
}

void CheckpointManager::handle_disk_error(const base::SystemError& error) {
  if (options_.on_disk_error == DiskErrorPolicy::kStop) throw base::SystemError(error);
  if (world_.rank() == 0)
    base::log_warning(
        std::string(name(error.cause())) + " " + error.what() +
        "; the training continues (TrainerOptions.on_disk_error), and earlier checkpoints are still valid");
}

bool CheckpointManager::write_on_rank_0(const std::string& what, const std::function<void()>& write) {
  std::exception_ptr error;
  if (world_.rank() == 0) error = checkpoint::capture_exception(write);
  try {
    checkpoint::throw_if_any_failed(world_, what, error);
  } catch (const base::SystemError& failure) {
    handle_disk_error(failure);
    return false;
  }
  return true;
}

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
