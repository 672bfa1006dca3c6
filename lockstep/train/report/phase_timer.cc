#include "lockstep/train/report/phase_timer.h"

namespace lockstep::train {

std::array<double, kNumPhases> StepTimes::phase_seconds() const {
  std::array<double, kNumPhases> seconds{};
  for (const PhaseSpan& span : spans)
    seconds[static_cast<std::size_t>(span.phase)] += static_cast<double>(span.end_ns - span.begin_ns) / 1e9;
  return seconds;
}

void PhaseTimer::begin() {
  now_.begin_ns = base::monotonic_ns();
  now_.spans.clear();
}

const StepTimes& PhaseTimer::end_step() {
  now_.end_ns = base::monotonic_ns();
  std::swap(last_, now_);
  now_.begin_ns = last_.end_ns;
  now_.spans.clear();
  return last_;
}

}  // namespace lockstep::train
