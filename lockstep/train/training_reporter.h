// What people look at: the line, the files of values, the report and the trace of a training.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/train/loggers/logger_collection.h"
#include "lockstep/train/report/curve_logger.h"
#include "lockstep/train/report/phase_timer.h"
#include "lockstep/train/report/progress_bar.h"
#include "lockstep/train/report/rank_record.h"
#include "lockstep/train/report/throughput.h"
#include "lockstep/train/trainer_options.h"

namespace lockstep::train {

/// Where the training stands when it begins, and how long it is.
struct ReporterOptions {
  std::string folder;     ///< of the run; empty: no files
  std::int64_t step = 0;  ///< updates made before
  std::int64_t steps_per_epoch = 1;
  std::int64_t num_epochs = 1;
  bool is_resumed = false;  ///< what a run that died had written of later steps is taken back
};

/// Every rank has one; it writes on rank 0 alone. Numbers of the training are called train/loss in files, those of a
/// validation val/loss; a name with a / stays. What the disk does not take is dealt with as
/// TrainerOptions.on_disk_error says; with kStop rank 0 throws SystemError.
class TrainingReporter {
 public:
  TrainingReporter(comm::Group world, const TrainerOptions& options, const ReporterOptions& plan);

  /// Of this rank's step.
  PhaseTimer& timer() { return timer_; }
  LoggerCollection& loggers() { return loggers_; }

  /// A step of so many samples of this rank is over; `shown` stands in the line. Waits for nobody.
  void step(std::int64_t step, std::int64_t samples, const NamedValues& progress_values);
  /// Values of the training, means over ranks since the last time, and rates.
  void values(std::int64_t step, const NamedValues& means, const NamedValues& learning_rates);
  void log_validation(std::int64_t step, const NamedValues& means);
  /// What comes now is a step again: a validation or a checkpoint was none.
  void resume_step_timing() { timer_.begin(); }
  /// report.html and trace.json. All ranks call it, and wait for it.
  void end(std::int64_t steps, const std::string& stop_reason);

 private:
  struct FinishedStep {
    std::int64_t step = 0, samples = 0;
    StepTimes times;
  };

  std::uint64_t device_bytes() const;
  void record_pending_steps();

  comm::Group world_;
  const TrainerOptions options_;
  const ReporterOptions plan_;
  PhaseTimer timer_;
  std::array<FinishedStep, 16>
      pending_steps_;  // the first num_pending_steps_: steps that the next two have not seen yet
  std::size_t num_pending_steps_ = 0;
  Throughput throughput_;
  std::optional<RankRecorder> recorder_;
  LoggerCollection loggers_;
  const CurveLogger* curves_ = nullptr;  // one of them
  std::optional<Progress> progress_;
};

}  // namespace lockstep::train
