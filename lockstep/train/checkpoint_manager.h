// The directory of a run, its checkpoints, and the checkpoint that it resumes from.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/comm/group.h"
#include "lockstep/train/trainer_options.h"

namespace lockstep::training {

/// Chooses the run's directory, decides when checkpoints are due, and saves them. Its functions are collective unless
/// stated otherwise: all ranks construct it and call them in the same order. Used by one thread.
class CheckpointManager {
 public:
  /// Rank 0 chooses the directory and, when the run resumes, finds its latest valid checkpoint. Blocks until all ranks
  /// have the result. Throws UsageError for a path without a checkpoint and SystemError for a file system error, on all
  /// ranks. `fit_number` counts the fit() calls of the Trainer, from 1.
  CheckpointManager(comm::Group world, const TrainerOptions& options, int fit_number);

  /// Directory of this run; empty when nothing is written. Local.
  const std::string& folder() const { return folder_; }
  /// The checkpoint that the run resumes from; nullopt for a new run. Local.
  const std::optional<checkpoint::SavedCheckpoint>& resume_checkpoint() const { return resume_checkpoint_; }

  /// Local; returns the same on all ranks.
  bool should_save_after_step(std::int64_t step) const;
  bool should_save_after_epoch(std::int64_t epochs) const;
  /// Saves a checkpoint of `step`; `parts` returns the parts that this rank writes. With `durable`, or without
  /// TrainerOptions.save_async, it blocks until the checkpoint is on the disk. A disk error is a warning or, with
  /// TrainerOptions.on_disk_error kStop, a SystemError on all ranks. Throws UsageError for parts that cannot be saved.
  /// Returns the seconds for which this rank was blocked.
  double save(std::int64_t step, const std::function<checkpoint::CheckpointParts()>& parts, bool durable);
  /// Checks, without blocking, whether an asynchronous save has finished; called in each step. A disk error is a
  /// warning or, with kStop, a CommError that fails the job, because ranks may observe it in different steps.
  void check_in_flight_save();
  /// Blocks until a save in flight has finished. Errors as in check_in_flight_save().
  void wait_for_save();
  /// Returns whether a checkpoint is due at the end of fit(): true unless checkpoints are disabled or the latest one is
  /// of this step. Local.
  bool should_save_at_end(std::int64_t step) const {
    return checkpoints_ && newest_step_ != step &&
           (options_.save_every_n_steps > 0 || options_.save_every_n_epochs > 0);
  }

  /// Calls `write` on rank 0 and blocks until all ranks have its result. Returns true on all ranks if it succeeded;
  /// disk errors are handled as in save(). `what` describes the operation in errors.
  bool write_on_rank_0(const std::string& what, const std::function<void()>& write);

 private:
  void find_resume_checkpoint(const std::string& resume, bool is_resumed);
  void finish_in_flight_save();
  void handle_disk_error(const base::SystemError& error);

  comm::Group world_;
  const TrainerOptions options_;
  std::string folder_;
  std::unique_ptr<checkpoint::Checkpointer> checkpoints_;
  std::optional<checkpoint::SavedCheckpoint> resume_checkpoint_;
  bool in_flight_ = false;
  std::int64_t newest_step_ = -1;  // step of the latest save that did not fail; -1: none
};

}  // namespace lockstep::training
