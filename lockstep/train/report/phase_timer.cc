#include "lockstep/train/report/phase_timer.h"

namespace lockstep::training::inline report {

std::array<double, kNumPhases> StepTimes::phase_seconds() const {
  std::array<double, kNumPhases> seconds{};
  for (const PhaseSpan& span : spans)
    seconds[static_cast<std::size_t>(span.phase)] += static_cast<double>(span.end_ns - span.begin_ns) / 1e9;
  return seconds;
}

void PhaseTimer::begin_step() {
  current_.begin_ns = base::monotonic_ns();
  current_.spans.clear();
}

const StepTimes& PhaseTimer::end_step() {
  current_.end_ns = base::monotonic_ns();
  std::swap(finished_, current_);
  current_.begin_ns = finished_.end_ns;
  current_.spans.clear();
  return finished_;
}

}  // namespace lockstep::training::inline report
