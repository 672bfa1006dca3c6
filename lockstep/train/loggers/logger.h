// The interface of loggers, and the values that they get.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/loggers/histogram.h"
#include "lockstep/train/loggers/image.h"

namespace lockstep::training::inline loggers {

/// Scalars with names, displayed and written in this order: {"loss", 1.482}, {"acc", 0.551}.
using NamedValues = std::vector<std::pair<std::string, double>>;

/// The step and the time of a logged value.
struct LogTimestamp {
  std::int64_t step = 0;
  double seconds = 0;  ///< since 1970
};

/// Writes to one kind of file, or to a service. Used by one thread of rank 0. Each call may throw SystemError when the
/// data is lost; later calls may succeed. A logger ignores the kinds of data that its format does not support: it does
/// not override their functions, which do nothing here. The table is in docs/how-to/monitoring.md.
class Logger {
 public:
  Logger() = default;
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;
  virtual ~Logger() = default;

  virtual void log_scalars(const LogTimestamp& at, const NamedValues& values) = 0;
  virtual void log_text(const LogTimestamp&, const std::string& /*name*/, const std::string& /*text*/) {}
  virtual void log_histogram(const LogTimestamp&, const std::string& /*name*/, const Histogram&) {}
  virtual void log_image(const LogTimestamp&, const std::string& /*name*/, const Image&) {}
  /// Passes all buffered data to the operating system or the service.
  virtual void flush() = 0;
};

}  // namespace lockstep::training::inline loggers
