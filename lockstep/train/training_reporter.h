// The outputs of a training run: progress bar, metric files, report and trace.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/train/loggers/logger_collection.h"
#include "lockstep/train/metrics/metrics.h"
#include "lockstep/train/report/curve_logger.h"
#include "lockstep/train/report/phase_timer.h"
#include "lockstep/train/report/progress_bar.h"
#include "lockstep/train/report/rank_record.h"
#include "lockstep/train/report/resource_usage.h"
#include "lockstep/train/report/throughput.h"
#include "lockstep/train/trainer_options.h"

namespace lockstep::training {

/// The position at which the run starts, and its length.
struct ReporterOptions {
  std::string folder = {};  ///< directory of the run; empty: no files
  std::int64_t step = 0;    ///< updates of earlier runs
  std::int64_t steps_per_epoch = 1;
  std::int64_t num_epochs = 1;
  bool is_resumed = false;  ///< remove metrics of later steps that a failed run wrote
};

/// Every rank has one; only rank 0 writes. Files contain training metrics as train/NAME and validation metrics as
/// val/NAME; a name that contains a / is not changed. Disk errors are handled according to
/// TrainerOptions.on_disk_error: with kStop, rank 0 throws SystemError. Used by one thread.
class TrainingReporter {
 public:
  TrainingReporter(comm::Group world, const TrainerOptions& options, const ReporterOptions& plan);

  /// Times the phases of this rank's steps.
  PhaseTimer& timer() { return timer_; }
  LoggerCollection& loggers() { return loggers_; }

  /// Records the end of a step with `samples` samples on this rank; the progress bar displays `progress_values`. Does
  /// not block.
  void record_step(std::int64_t step, std::int64_t samples, const NamedValues& progress_values);
  /// Adds what this rank uses to `metrics`, for a mean over all ranks: what it sends to other hosts, if there are
  /// some, and how busy its GPU is and what it has in memory, if there is one. Both at most once per second.
  void add_usage(Metrics& metrics);
  /// Removes what add_usage() has added from the means, and remembers it for log_metrics().
  void take_usage(NamedValues& means);
  /// Logs training metrics, which are means over ranks since the previous call, with learning rates, throughput, and
  /// usage.
  void log_metrics(std::int64_t step, const NamedValues& means, const NamedValues& learning_rates);
  void log_validation(std::int64_t step, const NamedValues& means);
  /// Resumes step timing after a validation or a checkpoint, which do not count as steps.
  void resume_step_timing() { timer_.begin_step(); }
  /// Writes report.html and trace.json on rank 0. Collective: gathers the records of all ranks.
  void finish(std::int64_t steps, const std::string& stop_reason);

 private:
  struct FinishedStep {
    std::int64_t step = 0, samples = 0;
    StepTimes times;
  };

  /// The values of add_usage() and when they were read.
  struct Usage {
    int num_reads = 0;
    std::int64_t read_ns = 0;
    std::uint64_t sent_bytes = 0;
    double megabytes_per_second = 0;
    std::optional<GpuUse> gpu;
  };

  std::uint64_t device_bytes() const;
  void read_usage();
  void record_pending_steps();

  comm::Group world_;
  const TrainerOptions options_;
  const ReporterOptions plan_;
  PhaseTimer timer_;
  std::array<FinishedStep, 16>
      pending_steps_;  // the first num_pending_steps_: steps not yet passed to throughput_ and recorder_
  std::size_t num_pending_steps_ = 0;
  Throughput throughput_;
  std::optional<RankRecorder> recorder_;
  LoggerCollection loggers_;
  SentBytes sent_bytes_;
  std::optional<GpuMonitor> gpu_monitor_;
  Usage usage_;
  NamedValues mean_usage_;
  const CurveLogger* curves_ = nullptr;  // owned by loggers_
  std::optional<ProgressBar> progress_;
};

}  // namespace lockstep::training
