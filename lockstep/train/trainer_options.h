// Options of the Trainer, and the plan of an epoch that follows from them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/train/loggers/logger_collection.h"

namespace lockstep::training {

/// An integer is a count of batches, a floating-point number is a fraction of them: 10 means ten batches, 0.1 a tenth
/// of the batches, 1.0 all of them.
class CountOrFraction {
 public:
  constexpr CountOrFraction(int count)
      : count_(count) {}  // NOLINT(google-explicit-constructor): .limit_train_batches = 10
  constexpr CountOrFraction(std::int64_t count) : count_(count) {}  // NOLINT(google-explicit-constructor)
  constexpr CountOrFraction(double fraction)
      : fraction_(fraction), is_fraction_(true) {}  // NOLINT(google-explicit-constructor)

  /// Returns the number of batches out of `num_batches`, rounded down. A count is capped at `num_batches`. Throws a
  /// UsageError that begins with `option` for a negative count, a fraction outside 0 to 1, and a fraction above 0 that
  /// is less than one batch.
  std::int64_t resolve(std::int64_t num_batches, const std::string& option) const;

  /// "10", "0.1".
  std::string to_string() const;
  bool operator==(const CountOrFraction&) const = default;

 private:
  std::int64_t count_ = 0;
  double fraction_ = 0;
  bool is_fraction_ = false;
};

/// The number of ranks per host, or the GPUs that they use: `.devices = 8`, `.devices = {0, 2}`. The default is one
/// rank for each GPU or, on a host without GPUs, for each physical core.
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

/// Options of a Trainer.
struct TrainerOptions {
  // Ranks. Used when no launcher has started the program, so that the Trainer starts its own ranks.
  int nodes = 1;  ///< hosts of the SLURM allocation; 1: this host. A value above 1 must equal the number of hosts of
                  ///< the job, also under a launcher
  Devices devices = {};  ///< used only when the Trainer starts the ranks
  int max_restarts = 0;  ///< likewise; as `lockstep run --max-restarts`

  // Duration. Training ends at the first limit that it reaches; without any limit, after 1000 epochs.
  std::int64_t max_epochs = -1;      ///< -1: no limit; 0: train nothing
  std::int64_t max_steps = -1;       ///< updates of the parameters, over all epochs; -1: no limit
  std::chrono::seconds max_time{0};  ///< duration of fit(), over all restarts; 0: no limit. Training ends after a
                                     ///< step, with a checkpoint; the program's exit code is 0

  // Training.
  std::string precision = "32";            ///< a name of amp::parse_precision(); with "32", float64 weights stay
                                           ///< float64
  int accumulate_grad_batches = 1;         ///< batches whose gradients make one step
  double clip_norm = 0;                    ///< maximum norm of all gradients together, before each step; 0: off
  double clip_value = 0;                   ///< maximum absolute value of each element; 0: off
  bool sync_batch_norm = false;            ///< batch norm statistics over all ranks
  double ema = 0;                          ///< decay of averaged weights, which validation then uses; 0: off
  std::optional<std::uint64_t> seed = {};  ///< seeds all generators at the start of fit(), differently on each rank
                                           ///< (seed_everything()); modules exist before that
  bool deterministic = false;              ///< operations without a deterministic implementation throw

  // Amount of data.
  CountOrFraction limit_train_batches = 1.0;  ///< of this rank's batches in an epoch
  CountOrFraction limit_val_batches = 1.0;    ///< 0: no validation
  CountOrFraction val_check_interval = 1.0;   ///< batches between two validations; 1.0: at the end of the epoch
  int check_val_every_n_epoch = 1;
  int num_sanity_val_steps = 2;  ///< validation batches before the training, so that an error in validation_step()
                                 ///< is found at once; 0: none
  CountOrFraction overfit_batches = 0;  ///< train only on these first batches, always in the same order, and validate
                                        ///< on as many; 0: off
  int fast_dev_run = 0;                 ///< run one epoch of this many batches of each kind, to test a program; 0: off

  // Files. All ranks must be able to access the same directory.
  std::string folder = "runs";  ///< each run creates a directory in it, with checkpoints, metrics and a report; "":
                                ///< write nothing
  /// Name of the run's directory; "": --name of `lockstep run` or LOCKSTEP_NAME, else the program's name. A new run
  /// whose name is taken gets the next number: mnist, mnist-2, mnist-3.
  std::string name = {};
  std::string resume = {};  ///< "": start a new training; "auto": resume from the latest valid checkpoint of the newest
                            ///< run of that name, if there is one; or the path of a checkpoint or of a run's directory.
                            ///< A job that its launcher restarts resumes automatically
  std::int64_t save_every_n_steps = 0;   ///< additional checkpoints between the ends of epochs; 0: none
  std::int64_t save_every_n_epochs = 1;  ///< 0: no checkpoints at the ends of epochs
  int keep_checkpoints = 2;              ///< number of valid checkpoints to keep; at least 2
  bool save_async = true;                ///< write checkpoints in a thread while the training continues
  DiskErrorPolicy on_disk_error = DiskErrorPolicy::kContinue;  ///< what happens when a checkpoint, weights or metrics
                                                               ///< cannot be written; earlier checkpoints stay valid

  // Output.
  int log_every_n_steps = 50;
  bool progress_bar = true;
  bool model_summary = true;  ///< print a table of the module's layers before the training
  bool csv = true;            ///< write metrics.csv in the run's directory
  bool json_lines = false;    ///< write metrics.jsonl
  bool tensorboard = true;    ///< write TensorBoard event files
  bool report = true;         ///< write report.html at the end
  bool trace = false;         ///< write trace.json of all ranks at the end; also set by --trace of `lockstep run` or
                              ///< LOCKSTEP_TRACE
  double flops_per_step = 0;  ///< floating-point operations of a step on this rank, for MFU; 0: no MFU
  double peak_flops = 0;      ///< peak floating-point operations per second of its device, for MFU; 0: no MFU
  bool barebones = false;     ///< no progress bar, summary, files or sanity validation, to measure the training alone
};

/// Validates the options and resolves their combinations: applies fast_dev_run, overfit_batches and barebones to the
/// options that they change, and sets a limit of 1000 epochs if there is no other. Pure. Throws a UsageError that names
/// the option, its value and the expected values.
TrainerOptions resolve_options(TrainerOptions options);

/// The numbers of batches and steps of an epoch, computed from the options and the sizes of the loaders.
struct EpochPlan {
  std::int64_t train_batches = 0;  ///< of this rank
  std::int64_t val_batches = 0;
  std::int64_t val_interval = 0;  ///< batches between two validations of an epoch; 0: none
  std::int64_t accumulate_grad_batches = 1;
  std::int64_t steps = 0;  ///< updates in an epoch

  /// Returns the number of batches of the step that batch `index` (from 0) belongs to; it is smaller in the last step
  /// of an epoch.
  std::int64_t batches_in_step(std::int64_t index) const;
  /// Returns whether batch `index` is the last of its step.
  bool is_step_end(std::int64_t index) const;
  bool should_validate_after(std::int64_t epoch, std::int64_t index) const;

  std::int64_t val_epoch_interval = 1;
};

/// Computes the plan. `options` must come from resolve_options(). Pure. Throws UsageError for fractions of less than
/// one batch and for a validation interval that ends inside a step.
EpochPlan plan_epoch(const TrainerOptions& options, std::int64_t train_batches, std::int64_t val_batches);

}  // namespace lockstep::training
