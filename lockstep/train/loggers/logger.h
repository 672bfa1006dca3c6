// What a run writes down while it goes on, and the interface of those who write it.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/train/loggers/histogram.h"
#include "lockstep/train/loggers/image.h"
#include "lockstep/train/loggers/named_values.h"

namespace lockstep::train {

/// When something was so.
struct LogTimestamp {
  std::int64_t step = 0;
  double seconds = 0;  ///< since 1970
};

/// Writes one kind of file, or to somebody's service. Used by one thread, of rank 0. Each call may throw SystemError
/// when what was to be written is lost; it may be called again afterwards. What a kind has no place for it leaves out:
/// docs/18 has the table.
class Logger {
 public:
  Logger() = default;
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;
  virtual ~Logger() = default;

  virtual void log_scalars(const LogTimestamp& at, const NamedValues& values) = 0;
  virtual void text(const LogTimestamp& at, const std::string& name, const std::string& text) = 0;
  virtual void histogram(const LogTimestamp& at, const std::string& name, const Histogram& histogram) = 0;
  virtual void image(const LogTimestamp& at, const std::string& name, const Image& image) = 0;
  /// What was handed over is on its way when this returns.
  virtual void flush() = 0;
};

}  // namespace lockstep::train
