// What a user says of a training: how long, on what, how often, and what else.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/train/count_or_fraction.h"
#include "lockstep/train/loggers/logger_collection.h"

namespace lockstep::train {

/// How many ranks on a host, or which GPUs they have: `.devices = 8`, `.devices = {0, 2}`; by default one for each GPU
/// that is there, else one for each physical core.
class Devices {
 public:
  Devices() = default;
  Devices(int count) : count_(count) {}                       // NOLINT(google-explicit-constructor): .devices = 8
  Devices(std::vector<int> gpus) : gpus_(std::move(gpus)) {}  // NOLINT(google-explicit-constructor)
  Devices(std::initializer_list<int> gpus) : gpus_(std::vector<int>(gpus)) {}

  std::optional<int> count() const { return count_; }
  const std::optional<std::vector<int>>& gpus() const { return gpus_; }
  bool operator==(const Devices&) const = default;

 private:
  std::optional<int> count_;
  std::optional<std::vector<int>> gpus_;
};

struct TrainerOptions {
  // Where. When no launcher has started the program the Trainer starts its own ranks.
  int nodes = 1;    ///< hosts, which are those of the SLURM allocation; 1: this one. More than 1 must be what the job
                    ///< has, whoever has started it
  Devices devices;  ///< only looked at when the Trainer starts the ranks
  int max_restarts = 0;  ///< likewise: as `lockstep run --max-restarts`, after a failure that is not the user's

  // How long: what is reached first. Nothing set: 1000 epochs.
  std::int64_t max_epochs = -1;      ///< -1: not limited by epochs; 0: nothing is trained
  std::int64_t max_steps = -1;       ///< updates of the parameters, over all epochs; -1: not limited
  std::chrono::seconds max_time{0};  ///< of fit(), over all its restarts; 0: not limited. The training ends at a step's
                                     ///< edge, is saved, and that is no failure

  // How.
  std::string precision = "32";     ///< amp::parse_precision()'s names
  int accumulate_grad_batches = 1;  ///< batches whose gradients make one step
  double clip_norm = 0;             ///< of all gradients together, before each step; 0: not clipped
  double clip_value = 0;            ///< of each element; 0: not clipped
  bool sync_batch_norm = false;     ///< batch norms become those of all ranks
  double ema = 0;                   ///< decay of averaged weights, with which is validated then; 0: none
  std::optional<std::uint64_t>
      seed;  ///< of every generator, on each rank its own (seed_everything()); the modules of fit() were made before
  bool deterministic = false;  ///< operations that have no deterministic way are errors

  // How much.
  CountOrFraction limit_train_batches = 1.0;  ///< of this rank's batches of an epoch
  CountOrFraction limit_val_batches = 1.0;    ///< 0: no validation
  CountOrFraction val_check_interval = 1.0;   ///< validates after so many batches of an epoch; 1.0: at its end
  int check_val_every_n_epoch = 1;
  int num_sanity_val_steps = 2;  ///< batches of a validation before the training, so that a mistake in it is known
                                 ///< before an epoch has passed; 0: none
  CountOrFraction overfit_batches =
      0;  ///< trains on these first batches alone, always in the same order, and validates on as many; 0: does not
  int fast_dev_run = 0;  ///< so many batches of each kind in one epoch: shows that everything runs; 0: does not

  // What is kept. All ranks see the same folder.
  std::string folder = "runs";  ///< each run makes a folder of its own in it, with checkpoints, values and a report;
                                ///< "": nothing is written
  std::string name;  ///< of that folder; "": as --name of `lockstep run` or LOCKSTEP_NAME says, else the program's
                     ///< name. A run that begins anew where there is one gets the next number: mnist, mnist-2, mnist-3
  std::string resume;  ///< "": begins anew; "auto": goes on from the newest whole checkpoint of the newest run of that
                       ///< name, or begins; or the path of a checkpoint or of a run's folder. A job that its launcher
                       ///< starts again goes on by itself
  std::int64_t save_every_n_steps = 0;   ///< besides at the ends of epochs, and of the training; 0: not
  std::int64_t save_every_n_epochs = 1;  ///< 0: not at the ends of epochs
  int keep_checkpoints = 2;              ///< of the newest whole ones; 2 or more
  bool save_async = true;                ///< the training goes on while a thread writes a copy
  DiskErrorPolicy on_disk_error =
      DiskErrorPolicy::kContinue;  ///< whether the training goes on when the disk takes no checkpoint,
                                   ///< weights or values: the checkpoints before are whole

  // What one sees.
  int log_every_n_steps = 50;
  bool progress_bar = true;
  bool model_summary = true;  ///< a table of the module's parts before the training
  bool csv = true;            ///< metrics.csv, metrics.jsonl, and event files of TensorBoard, in the run's folder
  bool json_lines = false;
  bool tensorboard = true;
  bool report = true;  ///< report.html there, at the end
  bool trace = false;  ///< and trace.json, of all ranks; also when --trace of `lockstep run` or LOCKSTEP_TRACE says so
  double flops_per_step = 0;  ///< of this rank's part of the model, and
  double peak_flops = 0;      ///< of its device: for MFU; 0: none
  bool barebones =
      false;  ///< no bar, no files, no validation before the training: for measuring what a training itself takes
};

/// `options` as they hold together: what fast_dev_run, overfit_batches and barebones mean is written into the others,
/// and "nothing set" has become 1000 epochs. Pure. Throws UsageError that names the option, its value and what is
/// allowed.
TrainerOptions resolve_options(TrainerOptions options);

/// What an epoch consists of, once it is known how many batches there are.
struct EpochPlan {
  std::int64_t train_batches = 0;  ///< of this rank
  std::int64_t val_batches = 0;
  std::int64_t val_interval = 0;  ///< batches between two validations of an epoch; 0: none
  std::int64_t accumulate_grad_batches = 1;
  std::int64_t steps = 0;  ///< updates in an epoch

  /// Of batch `index` from 0: how many batches make the step that it belongs to; fewer at the end of an epoch.
  std::int64_t batches_in_step(std::int64_t index) const;
  /// Whether the step is made after this batch.
  bool is_step_end(std::int64_t index) const;
  bool should_validate_after(std::int64_t epoch, std::int64_t index) const;

  std::int64_t val_epoch_interval = 1;
};

/// Pure. `options` has gone through settle(). Throws UsageError for shares of which nothing is left, and for a
/// validation that would come in the middle of a step.
EpochPlan plan_epoch(const TrainerOptions& options, std::int64_t train_batches, std::int64_t val_batches);

}  // namespace lockstep::train
