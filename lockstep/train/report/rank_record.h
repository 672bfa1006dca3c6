// What one rank remembers of a run for its report and trace.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "lockstep/train/report/curve.h"
#include "lockstep/train/report/phase_timer.h"
#include "lockstep/train/report/resource_usage.h"

namespace lockstep::train {

/// An operation between ranks, as its rank saw it: from its call to its end there.
struct OperationSpan {
  std::string channel;    ///< empty: a part of one
  std::uint64_t seq = 0;  ///< its number there: the same on all ranks
  std::string kind;       ///< "gradients", "all_reduce", ...; of parts "bucket" (from its start until it is there) and
                          ///< "wait" (for it, when it was not there yet)
  std::string name;
  std::uint64_t bytes = 0;
  std::int64_t begin_ns = 0;  ///< of this host's monotonic clock
  std::int64_t end_ns = 0;
};

struct StepRecord {
  std::int64_t step = 0;
  StepTimes times;
};

/// Plain values, which travel to rank 0 as text.
struct RankRecord {
  int rank = 0;
  std::string host;
  std::string clock;              ///< whose monotonic clock its times are of: equal where they can be compared
  std::int64_t monotonic_ns = 0;  ///< the same moment
  std::int64_t unix_ns = 0;       ///< by both clocks
  std::int64_t num_steps = 0;
  double seconds = 0;  ///< of all steps
  std::array<double, kNumPhases> phase_seconds{};
  std::uint64_t peak_bytes = 0;  ///< of memory
  // Over the steps.
  Curve step_ms, cpu_cores, memory_mib, device_mib;
  std::array<Curve, kNumPhases> phase_ms;
  std::vector<StepRecord> steps;          ///< the newest
  std::vector<OperationSpan> operations;  ///< that were there meanwhile, and have ended
};

/// As JSON, and back. Throws FormatError, naming the place, for other text.
std::string to_text(const RankRecord& record);
RankRecord rank_record_from_text(const std::string& text);

struct RankRecorderOptions {
  int rank = 0;
  std::int64_t keep_steps =
      32;  ///< the newest so many with all their times: a step of the report's timeline, or those of a trace
  std::chrono::milliseconds sample_interval{1000};  ///< CPU and memory of the process
  std::size_t curve_points = 100;                   ///< a curve at most
  bool trace = false;  ///< buckets of gradients, too, of transports that have some: gloo, mpi and nccl
};

/// Every rank has one, whether there will be a report or not: some tens of KB, about 150 ns a step, and what
/// ResourceUsage takes once a second. Used by one thread.
class RankRecorder {
 public:
  /// Throws UsageError for numbers below 1.
  explicit RankRecorder(const RankRecorderOptions& options);

  /// Step number `step` took that. `device_bytes`: memory of a GPU that is in use, where there is one.
  void add(std::int64_t step, const StepTimes& times, std::uint64_t device_bytes = 0);
  /// All of it until now, with the operations of the process's flight recorder.
  RankRecord record() const;

 private:
  void sample(std::int64_t step, std::int64_t now_ns, std::uint64_t device_bytes);

  RankRecorderOptions options_;
  RankRecord record_;  // without its steps and operations
  std::deque<StepRecord> steps_;
  std::int64_t last_sample_ns_;
  ResourceUsage last_sample_;
};

}  // namespace lockstep::train
