// How fast a training is.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "lockstep/train/loggers/named_values.h"
#include "lockstep/train/report/phase_timer.h"

namespace lockstep::train {

struct ThroughputOptions {
  int window = 100;           ///< steps, the newest ones, over which is averaged
  double flops_per_step = 0;  ///< floating-point operations that this rank's part of the model needs in a step: 6 times
                              ///< parameters times tokens of a transformer; 0: no MFU
  double peak_flops = 0;      ///< what its device does in a second at best, as its maker says; 0: no MFU
};

/// Averages over a window.
struct Rates {
  double steps_per_second = 0;
  double samples_per_second = 0;
  std::array<double, kNumPhases> phase_fractions{};  ///< of the time of a step; what is left of 1 is nobody's
  double mfu = -1;  ///< part of the peak that the model's own operations use; negative: not known
};

/// Used by one thread.
class Throughput {
 public:
  /// Throws UsageError for a window below 1, negative numbers, or one of flops_per_step and peak_flops alone.
  explicit Throughput(const ThroughputOptions& options);

  /// A step of so many samples; of all ranks together for the rate of the job.
  void add(const StepTimes& times, std::int64_t samples);
  /// Zeros when there was no step yet.
  Rates rates() const;
  /// The same for loggers: throughput/steps_per_second, throughput/samples_per_second, time/data ... time/other (parts
  /// of a step), throughput/mfu when known.
  NamedValues values() const;

 private:
  struct Step {
    double seconds = 0;
    double samples = 0;
    std::array<double, kNumPhases> phases{};
  };
  ThroughputOptions options_;
  std::vector<Step> steps_;  // a ring, `window` long at last
  std::size_t next_ = 0;
};

}  // namespace lockstep::train
