// The position of a training run: the part of a checkpoint besides weights, optimizers and user state.
#pragma once

#include <cstdint>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"
#include "lockstep/train/metrics/metrics.h"
#include "lockstep/train/training_state.h"

namespace lockstep::training {

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
