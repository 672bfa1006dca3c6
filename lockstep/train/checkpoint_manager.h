// The directory of a run, when and how its checkpoints are saved, and what they say of its progress.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"
#include "lockstep/train/metrics/metrics.h"
#include "lockstep/train/trainer_options.h"
#include "lockstep/train/training_state.h"

namespace lockstep::training {

/// Chooses the run's directory, decides when checkpoints are due, and saves them. Its functions are collective unless
/// stated otherwise: all ranks construct it and call them in the same order. Used by one thread.
class CheckpointManager {
 public:
  /// Rank 0 chooses the directory. Blocks until all ranks have the result. Throws UsageError for a path without a
  /// checkpoint and SystemError for a file system error, on all ranks. `fit_number` counts the fit() calls of the
  /// Trainer, from 1.
  CheckpointManager(comm::Group world, const TrainerOptions& options, int fit_number);

  /// Directory of this run; empty when nothing is written. Local.
  const std::string& folder() const { return folder_; }
  /// The state of the run, with the checkpoint that it resumes from. Local.
  TrainingState& state() { return state_; }

  /// Local; returns the same on all ranks.
  bool should_save_after_step(std::int64_t step) const;
  bool should_save_after_epoch(std::int64_t epochs) const;
  /// Saves a checkpoint of `step`. With `durable`, or without TrainerOptions.save_async, it blocks until the checkpoint
  /// is on the disk. A disk error is a warning or, with TrainerOptions.on_disk_error kStop, a SystemError on all ranks.
  /// Throws UsageError for state that cannot be saved.
  void save(std::int64_t step, bool durable, const SaveStateOptions& options);
  /// Checks, without blocking, whether an asynchronous save has finished; called in each step. A disk error is a
  /// warning or, with kStop, a CommError that fails the job, because ranks may observe it in different steps.
  void check_in_flight_save();
  /// Blocks until a save in flight has finished. Errors as in check_in_flight_save().
  void wait_for_save();
  /// Returns whether a checkpoint is due at the end of fit(): true unless checkpoints are disabled or the latest one is
  /// of this step. Local.
  bool should_save_at_end(std::int64_t step) const {
    return !folder_.empty() && newest_step_ != step &&
           (options_.save_every_n_steps > 0 || options_.save_every_n_epochs > 0);
  }

  /// Calls `write` on rank 0 and blocks until all ranks have its result. Returns true on all ranks if it succeeded;
  /// disk errors are handled as in save(). `what` describes the operation in errors.
  bool write_on_rank_0(const std::string& what, const std::function<void()>& write);

 private:
  std::string open_folder(int fit_number);
  void handle_disk_error(const base::SystemError& error);

  comm::Group world_;
  const TrainerOptions options_;
  const std::string folder_;
  TrainingState state_;
  bool in_flight_ = false;
  std::int64_t newest_step_ = -1;  // step of the latest save that did not fail; -1: none
};

/// Counters and metrics of a training run that are saved in its checkpoints.
struct FitProgress {
  std::int64_t epoch = 0, step = 0;         ///< completed
  bool in_epoch = false;                    ///< the loader's position is inside `epoch`
  bool validation_due = false;              ///< the run stopped just before a validation
  double seconds = 0;                       ///< total duration of the earlier runs that this run continues
  std::int64_t last_logged_step = 0;        ///< step of the last log_metrics()
  Metrics unlogged_metrics, epoch_metrics;  ///< of this rank: since last_logged_step, and earlier in this epoch
  NamedValues train_values, val_values;     ///< of the last epoch and the last validation
};

/// Returns the state that is equal on all ranks. `seconds` is the total duration, including the current run.
checkpoint::StateDict to_state_dict(const FitProgress& progress, double seconds);
/// Restores that state. Throws UsageError for missing keys.
void load_fit_progress(FitProgress& progress, const checkpoint::StateDict& state);

/// Returns the metric sums of this rank.
checkpoint::StateDict metric_sums(const FitProgress& progress);
/// Restores the sums from the parts that all ranks of the previous job wrote. With a different number of ranks, the
/// sums are redistributed so that none is lost.
void load_metric_sums(FitProgress& progress, const TrainingState& state, const std::string& part,
                      const comm::Group& world);

}  // namespace lockstep::training
