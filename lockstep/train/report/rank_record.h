// The record that each rank keeps of a run for the report and the trace.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "lockstep/train/report/curve.h"
#include "lockstep/train/report/phase_timer.h"
#include "lockstep/train/report/resource_usage.h"

namespace lockstep::training::inline report {

/// An operation between ranks on one rank, from its call to its end.
struct OperationSpan {
  std::string channel;    ///< empty for a part of an operation
  std::uint64_t seq = 0;  ///< number in its channel, equal on all ranks
  std::string kind;       ///< "gradients", "all_reduce", ...; for parts "bucket" (from its start to its end) and "wait"
                          ///< (blocked on an unfinished bucket)
  std::string name;
  std::uint64_t bytes = 0;
  std::int64_t begin_ns = 0;  ///< on this host's monotonic clock
  std::int64_t end_ns = 0;
};

/// The times of a step.
struct StepRecord {
  std::int64_t step = 0;
  StepTimes times;
};

/// The record of one rank. Ranks send it to rank 0 as text.
struct RankRecord {
  int rank = 0;
  std::string host;
  std::string clock;  ///< identity of the monotonic clock; times of records with the same clock are comparable
  std::int64_t monotonic_ns = 0;  ///< time of the record on the monotonic clock
  std::int64_t unix_ns = 0;       ///< the same time on the wall clock
  std::int64_t num_steps = 0;
  double seconds = 0;  ///< duration of all steps
  std::array<double, kNumPhases> phase_seconds{};
  double comm_seconds = 0;       ///< of them, in operations between ranks; 0: unknown, or one rank
  std::uint64_t peak_bytes = 0;  ///< peak resident memory
  // Curves over the steps.
  Curve step_ms, cpu_cores, memory_mib, device_mib;
  std::array<Curve, kNumPhases> phase_ms;
  std::vector<StepRecord> steps;          ///< the most recent steps
  std::vector<OperationSpan> operations;  ///< finished operations since the first of `steps`
};

/// Serializes a record as JSON, and parses it. Parsing throws a FormatError with the position for malformed text.
std::string to_text(const RankRecord& record);
RankRecord rank_record_from_text(const std::string& text);

struct RankRecorderOptions {
  int rank = 0;
  std::int64_t keep_steps = 32;  ///< number of most recent steps kept with all times, for the timeline and the trace
  std::chrono::milliseconds sample_interval{1000};  ///< between two samples of CPU and memory use
  std::size_t curve_points = 100;                   ///< maximum size of a curve
  bool trace = false;  ///< also record gradient buckets, on transports that have them: tcp, mpi and nccl
};

/// Records the steps of one rank. Takes tens of KB, about 150 ns per step, and one ResourceUsage::now() per
/// sample_interval. Used by one thread.
class RankRecorder {
 public:
  /// Throws UsageError for keep_steps or sample_interval below 1 and curve_points below 2.
  explicit RankRecorder(const RankRecorderOptions& options);

  /// Adds a step. `device_bytes`: GPU memory in use; 0: none.
  void add(std::int64_t step, const StepTimes& times, std::uint64_t device_bytes = 0);
  /// Returns the record so far, with the operations in the flight recorder of the process.
  RankRecord record() const;

 private:
  void sample(std::int64_t step, std::int64_t now_ns, std::uint64_t device_bytes);

  RankRecorderOptions options_;
  RankRecord record_;  // without steps and operations
  std::deque<StepRecord> steps_;
  std::int64_t last_sample_ns_;
  ResourceUsage last_sample_;
};

}  // namespace lockstep::training::inline report
