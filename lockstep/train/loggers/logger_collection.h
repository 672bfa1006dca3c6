// The set of loggers of a run, called as one.
#pragma once

#include <chrono>
#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/loggers/logger.h"

namespace lockstep::training::inline loggers {

/// How loggers handle data that cannot be written to the disk.
enum class DiskErrorPolicy {
  kContinue,  ///< warn on stderr, and once more, with the number of failures, when writing succeeds again
  kStop,      ///< throw SystemError
};

struct LoggerOptions {
  std::string directory = {};                   ///< "runs/mnist": created with the first value
  bool csv = true;                              ///< metrics.csv: scalars
  bool json_lines = false;                      ///< metrics.jsonl: scalars, texts, histograms
  bool tensorboard = true;                      ///< events.out.tfevents.*: all kinds of data
  std::optional<std::int64_t> first_step = {};  ///< of a run that resumes from a checkpoint: data of this step and
                                                ///< later, written by a failed run, is removed
  DiskErrorPolicy on_disk_error = DiskErrorPolicy::kContinue;
  std::chrono::milliseconds flush_interval{2000};  ///< a killed process loses at most this much
};

/// Passes each call to its loggers on rank 0 and does nothing on other ranks. Creates no file before the first value. A
/// scalar takes about half a microsecond; no call waits for the data to reach the disk. Used by one thread.
class LoggerCollection {
 public:
  /// Throws UsageError for invalid options.
  LoggerCollection(int rank, const LoggerOptions& options);
  /// Flushes; logs a warning for a disk error.
  ~LoggerCollection();
  LoggerCollection(const LoggerCollection&) = delete;
  LoggerCollection& operator=(const LoggerCollection&) = delete;

  /// Adds a logger and returns it.
  template <std::derived_from<Logger> L>
  L& add(std::unique_ptr<L> logger) {
    L& added = *logger;
    loggers_.push_back({std::move(logger)});
    return added;
  }
  /// Returns whether calls have an effect; if not, the caller can skip computing expensive values.
  bool is_active() const { return rank_ == 0 && !loggers_.empty(); }

  /// A name must not be empty, must be unique in a call, and must not be step, time, text or histogram; a / groups
  /// names in TensorBoard. Throws UsageError for an invalid name or a negative step, and SystemError with kStop.
  void log_scalars(std::int64_t step, const NamedValues& values);
  void log_text(std::int64_t step, const std::string& name, const std::string& text);
  void log_histogram(std::int64_t step, const std::string& name, const Histogram& histogram);
  void log_image(std::int64_t step, const std::string& name, const Image& image);
  void flush();

 private:
  struct LoggerState {
    std::unique_ptr<Logger> logger;
    std::int64_t failures = 0;         // since the last successful write
    bool wrote_since_failure = false;  // a call succeeded after the last failure
  };
  void write(std::int64_t step, const std::string& name,
             const std::function<void(Logger&, const LogTimestamp&)>& write_to);
  bool call_logger(LoggerState& entry, const std::function<void(Logger&)>& action);
  void flush_all();

  LoggerOptions options_;
  int rank_;
  std::vector<LoggerState> loggers_;
  std::chrono::steady_clock::time_point flushed_at_;
};

}  // namespace lockstep::training::inline loggers
