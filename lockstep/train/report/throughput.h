// Steps and samples per second, phase fractions and MFU of a training run.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "lockstep/train/loggers/logger.h"
#include "lockstep/train/report/phase_timer.h"

namespace lockstep::training::inline report {

struct ThroughputOptions {
  int window = 100;           ///< number of most recent steps to average over
  double flops_per_step = 0;  ///< floating-point operations of the model in a step on this rank: about 6 * parameters *
                              ///< tokens for a transformer; 0: no MFU
  double peak_flops = 0;      ///< peak floating-point operations per second of its device; 0: no MFU
  bool comm = false;          ///< also name the time in operations between ranks, on CPUs; it is a part of the phases
};

/// Averages over the window.
struct Rates {
  double steps_per_second = 0;
  double samples_per_second = 0;
  std::array<double, kNumPhases> phase_fractions{};  ///< fractions of the step time; the rest to 1 is outside of phases
  double comm_fraction = 0;  ///< fraction of the step time in operations between ranks; it is part of the phases
  double mfu = -1;           ///< model FLOPs utilization: fraction of peak_flops; negative: unknown
};

/// Averages the speed of the most recent steps. Used by one thread.
class Throughput {
 public:
  /// Throws UsageError for a window below 1, negative numbers, or only one of flops_per_step and peak_flops.
  explicit Throughput(const ThroughputOptions& options);

  /// Adds a step. `samples`: of all ranks together, for the rate of the job.
  void add(const StepTimes& times, std::int64_t samples);
  /// Zeros before the first step.
  Rates rates() const;
  /// The rates by name, for loggers: throughput/steps_per_second, throughput/samples_per_second, time/data ...
  /// time/other and time/comm (fractions of a step), and throughput/mfu if known.
  NamedValues values() const;

 private:
  struct Step {
    double seconds = 0;
    double samples = 0;
    double comm_seconds = 0;
    std::array<double, kNumPhases> phases{};
  };
  ThroughputOptions options_;
  std::vector<Step> steps_;  // a ring of at most `window` entries
  std::size_t next_ = 0;
};

}  // namespace lockstep::training::inline report
