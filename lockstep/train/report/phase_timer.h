// What the time of a step is spent on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/monotonic.h"

namespace lockstep::train {

enum class Phase : std::uint8_t {
  kData,  ///< waiting for the next batch, and bringing it to the device
  kForward,
  kBackward,  ///< with what of the exchange of gradients is not hidden behind it
  kOptimizer,
};
inline constexpr std::size_t kNumPhases = 4;
inline constexpr std::array<std::string_view, kNumPhases> kPhaseNames = {"data", "forward", "backward", "optimizer"};

/// Times as in base/monotonic.h.
struct PhaseSpan {
  Phase phase = Phase::kData;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

/// One step.
struct StepTimes {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::vector<PhaseSpan> spans;  ///< in the order in which they ended

  double seconds() const { return static_cast<double>(end_ns - begin_ns) / 1e9; }
  /// In each phase; what is left of the step is nobody's.
  std::array<double, kNumPhases> phase_seconds() const;
};

/// Measures the steps of one rank, on the CPU: work that goes on on a GPU counts where somebody waits for it. Two clock
/// reads a phase, about 90 ns. Used by one thread.
class PhaseTimer {
 public:
  PhaseTimer() { begin(); }

  /// From now on this is a step: what lies between two steps, as an evaluation, is none.
  void begin();
  /// Until it goes this rank is in that phase. Not within another one; several of the same in a step add up.
  class [[nodiscard]] In {
   public:
    In(PhaseTimer& timer, Phase phase) : timer_(timer), phase_(phase), begin_ns_(base::monotonic_ns()) {}
    ~In() { timer_.current_.spans.push_back({phase_, begin_ns_, base::monotonic_ns()}); }
    In(const In&) = delete;
    In& operator=(const In&) = delete;

   private:
    PhaseTimer& timer_;
    Phase phase_;
    std::int64_t begin_ns_;
  };
  In in(Phase phase) { return {*this, phase}; }
  /// The step is over, and the next one begins. What it returns lives until the next call.
  const StepTimes& end_step();

 private:
  StepTimes current_;
  StepTimes finished_;
};

}  // namespace lockstep::train
