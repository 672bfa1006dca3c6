// Timing of the phases of a step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/monotonic.h"
#include "lockstep/base/telemetry/comm_time.h"

namespace lockstep::training::inline report {

enum class Phase : std::uint8_t {
  kData,  ///< waiting for the next batch, and copying it to the device
  kForward,
  kBackward,  ///< including the part of the gradient reduction that it does not hide
  kOptimizer,
};
inline constexpr std::size_t kNumPhases = 4;
inline constexpr std::array<std::string_view, kNumPhases> kPhaseNames = {"data", "forward", "backward", "optimizer"};

/// One interval in a phase, in nanoseconds of base::monotonic_ns().
struct PhaseSpan {
  Phase phase = Phase::kData;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

/// The times of one step.
struct StepTimes {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::vector<PhaseSpan> spans;  ///< in the order of their ends
  std::int64_t comm_ns = 0;      ///< of CommTime; it is part of the phases and of the rest

  double seconds() const { return static_cast<double>(end_ns - begin_ns) / 1e9; }
  /// Seconds in each phase. Time outside of phases is not included.
  std::array<double, kNumPhases> phase_seconds() const {
    std::array<double, kNumPhases> sums{};
    for (const PhaseSpan& span : spans)
      sums[static_cast<std::size_t>(span.phase)] += static_cast<double>(span.end_ns - span.begin_ns) / 1e9;
    return sums;
  }
};

/// Measures the steps of one rank on the CPU: work on a GPU is counted in the phase that blocks on it. A phase takes
/// two clock reads, about 90 ns. Used by one thread.
class PhaseTimer {
 public:
  PhaseTimer() { begin_step(); }

  /// Starts a step now, so that time since the previous step, such as an evaluation, is not counted.
  void begin_step() {
    current_.begin_ns = base::monotonic_ns();
    current_.spans.clear();
    comm_before_ = base::telemetry::CommTime::total_ns();
  }
  /// The rank is in a phase while a PhaseScope exists. Phases do not nest; several scopes of one phase in a step add
  /// up.
  class [[nodiscard]] PhaseScope {
   public:
    PhaseScope(PhaseTimer& timer, Phase phase) : timer_(timer), phase_(phase), begin_ns_(base::monotonic_ns()) {}
    ~PhaseScope() { timer_.current_.spans.push_back({phase_, begin_ns_, base::monotonic_ns()}); }
    PhaseScope(const PhaseScope&) = delete;
    PhaseScope& operator=(const PhaseScope&) = delete;

   private:
    PhaseTimer& timer_;
    Phase phase_;
    std::int64_t begin_ns_;
  };
  PhaseScope enter(Phase phase) { return {*this, phase}; }
  /// Ends the step and starts the next one. The result is valid until the next call.
  const StepTimes& end_step() {
    current_.end_ns = base::monotonic_ns();
    const std::int64_t comm_ns = base::telemetry::CommTime::total_ns();
    current_.comm_ns = comm_ns - std::exchange(comm_before_, comm_ns);
    std::swap(finished_, current_);
    current_.begin_ns = finished_.end_ns;
    current_.spans.clear();
    return finished_;
  }

 private:
  StepTimes current_;
  StepTimes finished_;
  std::int64_t comm_before_ = 0;  // at the start of the step
};

}  // namespace lockstep::training::inline report
