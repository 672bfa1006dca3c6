// All that a run writes down, from one call.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/train/loggers/logger.h"

namespace lockstep::train {

/// When the disk does not take what is to be written.
enum class DiskErrorPolicy {
  kContinue,  ///< say so once on stderr, and once more when it takes it again, with how often it did not; the training
              ///< goes on
  kStop,      ///< throw SystemError
};

struct LoggerOptions {
  std::string directory;                        ///< "runs/mnist": made with the first value, with the folders above it
  bool csv = true;                              ///< metrics.csv: numbers
  bool json_lines = false;                      ///< metrics.jsonl: numbers, texts, histograms
  bool tensorboard = true;                      ///< events.out.tfevents.*: all of it
  std::optional<std::int64_t> first_step = {};  ///< of a run that goes on from a checkpoint: what was written of this
                                                ///< step and later by one that died is taken back
  DiskErrorPolicy on_disk_error = DiskErrorPolicy::kContinue;
  std::chrono::milliseconds flush_interval{2000};  ///< what a killed process may lose
};

/// Does something on rank 0 alone, and there makes no file before there is something to write. A number takes about
/// half a microsecond, and no call waits for the disk to have it. Used by one thread.
class LoggerCollection {
 public:
  /// Throws UsageError for options that make no sense.
  LoggerCollection(int rank, const LoggerOptions& options);
  /// Writes what waits; a disk that does not take it is a warning.
  ~LoggerCollection();
  LoggerCollection(const LoggerCollection&) = delete;
  LoggerCollection& operator=(const LoggerCollection&) = delete;

  /// One more, of the user's own.
  void add(std::unique_ptr<Logger> logger);
  /// Whether calls do something: what costs time to make need not be made when not.
  bool is_active() const { return rank_ == 0 && !loggers_.empty(); }

  /// Names: not empty, each once, and none of step, time, text and histogram; a / makes groups in TensorBoard. Throws
  /// UsageError for others, or a negative step; SystemError with kStop.
  void log_scalars(std::int64_t step, const NamedValues& values);
  void text(std::int64_t step, const std::string& name, const std::string& text);
  void histogram(std::int64_t step, const std::string& name, const Histogram& histogram);
  void image(std::int64_t step, const std::string& name, const Image& image);
  void flush();

 private:
  struct LoggerState {
    std::unique_ptr<Logger> logger;
    std::int64_t failures = 0;         // since the disk last took something
    bool wrote_since_failure = false;  // something was handed over after the last of them
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

}  // namespace lockstep::train
