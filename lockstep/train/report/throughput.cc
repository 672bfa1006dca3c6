#include "lockstep/train/report/throughput.h"

#include <algorithm>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::training::inline report {

Throughput::Throughput(const ThroughputOptions& options) : options_(options) {
  if (options.window < 1)
    throw base::UsageError("ThroughputOptions: window is " + std::to_string(options.window) + "; expected 1 or more");
  // Negated comparisons reject NaN.
  if (!(options.flops_per_step >= 0) || !(options.peak_flops >= 0) ||
      (options.flops_per_step > 0) != (options.peak_flops > 0))
    throw base::UsageError("ThroughputOptions: flops_per_step is " + std::to_string(options.flops_per_step) +
                           ", peak_flops is " + std::to_string(options.peak_flops) +
                           "; expected both above 0, or both 0");
}

void Throughput::add(const StepTimes& times, std::int64_t samples) {
  const Step step{times.seconds(), static_cast<double>(samples), static_cast<double>(times.comm_ns) / 1e9,
                  times.phase_seconds()};
  if (steps_.size() < static_cast<std::size_t>(options_.window)) {
    steps_.push_back(step);
    return;
  }
  steps_[next_] = step;
  next_ = (next_ + 1) % steps_.size();
}

Rates Throughput::rates() const {
  Step sum;
  for (const Step& step : steps_) {
    sum.seconds += step.seconds;
    sum.samples += step.samples;
    sum.comm_seconds += step.comm_seconds;
    for (std::size_t i = 0; i < kNumPhases; ++i) sum.phases[i] += step.phases[i];
  }
  Rates rates;
  if (sum.seconds <= 0) return rates;
  rates.steps_per_second = static_cast<double>(steps_.size()) / sum.seconds;
  rates.samples_per_second = sum.samples / sum.seconds;
  for (std::size_t i = 0; i < kNumPhases; ++i) rates.phase_fractions[i] = sum.phases[i] / sum.seconds;
  rates.comm_fraction = std::clamp(sum.comm_seconds / sum.seconds, 0.0, 1.0);
  if (options_.peak_flops > 0) rates.mfu = options_.flops_per_step * rates.steps_per_second / options_.peak_flops;
  return rates;
}

NamedValues Throughput::values() const {
  const Rates now = rates();
  NamedValues values{{"throughput/steps_per_second", now.steps_per_second},
                     {"throughput/samples_per_second", now.samples_per_second}};
  double other = 1;
  for (std::size_t i = 0; i < kNumPhases; ++i) {
    values.emplace_back("time/" + std::string(kPhaseNames[i]), now.phase_fractions[i]);
    other -= now.phase_fractions[i];
  }
  values.emplace_back("time/other", std::max(0.0, other));
  if (options_.comm) values.emplace_back("time/comm", now.comm_fraction);
  if (now.mfu >= 0) values.emplace_back("throughput/mfu", now.mfu);
  return values;
}

}  // namespace lockstep::training::inline report
