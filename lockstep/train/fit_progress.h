// Where a training stands: what a checkpoint holds of it besides weights, optimizers and what belongs to users.
#pragma once

#include <cstdint>

#include "lockstep/checkpoint/saved_checkpoint.h"
#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"
#include "lockstep/train/batch_runner.h"
#include "lockstep/train/metrics/metrics.h"

namespace lockstep::train {

struct FitProgress {
  std::int64_t epoch = 0, step = 0;         ///< that came to their end
  bool in_epoch = false;                    ///< the data has a place in it
  bool validation_due = false;              ///< it was stopped just then
  double seconds = 0;                       ///< of the runs that this one goes on from
  std::int64_t told_at = 0;                 ///< the step after which values were looked at
  Metrics unlogged_metrics, epoch_metrics;  ///< of this rank: since then, and before that in this epoch
  NamedValues train_values, val_values;     ///< of the last epoch, and of the last validation
};

/// What is the same on all ranks. `seconds`: of this run as well.
checkpoint::StateDict to_state_dict(const FitProgress& progress, const Batches& data, double seconds);
/// The reverse; `data` will go on there. Throws UsageError, also for other data.
void load_fit_progress(FitProgress& progress, Batches& data, const checkpoint::StateDict& state);

/// What each rank has of its own: its sums, and the random numbers.
checkpoint::StateDict rank_state_dict(const FitProgress& progress, at::Device device);
/// The reverse, from what all ranks of the job before have written. Where these are others, sums are handed on, and a
/// rank that was not there before has random numbers of its own.
void load_rank_state(FitProgress& progress, const checkpoint::SavedCheckpoint& saved, const std::string& part,
                     const comm::Group& world);

}  // namespace lockstep::train
