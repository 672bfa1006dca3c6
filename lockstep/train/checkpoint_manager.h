// What a run keeps, and where: its folder, its checkpoints, and the one that it goes on from.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/comm/group.h"
#include "lockstep/train/trainer_options.h"

namespace lockstep::train {

/// All ranks make it and call what is here alike.
class CheckpointManager {
 public:
  /// Chooses the folder on rank 0, and finds the newest whole checkpoint where the run goes on. Waits for the other
  /// ranks. Throws UsageError for a path without a checkpoint, and SystemError, on all ranks. `number`: of the training
  /// among those of its Trainer.
  CheckpointManager(comm::Group world, const TrainerOptions& options, int fit_number);

  /// Of this run; empty when nothing is written.
  const std::string& folder() const { return folder_; }
  /// Where the training goes on; nothing when it begins anew.
  const std::optional<checkpoint::SavedCheckpoint>& resume_checkpoint() const { return resume_checkpoint_; }

  bool should_save_after_step(std::int64_t step) const;
  bool should_save_after_epoch(std::int64_t epochs) const;
  /// `parts` gives what this rank writes. With `durable` returns when it is on the disk. When that takes no more: on
  /// all ranks a warning, or the SystemError, as TrainerOptions.on_disk_error says; what cannot be saved at all is a
  /// UsageError. How long this rank was kept, in seconds.
  double save(std::int64_t step, const std::function<checkpoint::CheckpointParts()>& parts, bool durable);
  /// Whether one that is on its way went wrong: a warning, or, as ranks may see it in different steps, a CommError that
  /// is the job's first cause. Waits for nobody; in each step.
  void check_in_flight_save();
  /// Waits for the one that is on its way.
  void wait_for_save();
  /// Unless the newest one is of this step, or there are to be none at all.
  bool should_save_at_end(std::int64_t step) const {
    return checkpoints_ && newest_step_ != step &&
           (options_.save_every_n_steps > 0 || options_.save_every_n_epochs > 0);
  }

  /// What `write` does on rank 0, which learns whether the disk took it. True on all ranks when it did; else as save().
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
  std::int64_t newest_step_ = -1;  // of what was handed over, and not lost
};

}  // namespace lockstep::train
