// A logger that writes scalars, texts and histograms as JSON Lines.
#pragma once

#include <optional>

#include "lockstep/train/loggers/logger.h"
#include "lockstep/train/loggers/record_file.h"

namespace lockstep::training::inline loggers {

/// Writes one object per call:
///   {"step":12,"time":1763900000.123,"loss":1.482,"lr":0.1}
///   {"step":12,"time":1763900000.123,"text":{"sample":"To be"}}
///   {"step":12,"time":1763900000.123,"histogram":{"fc.weight":{"min":…,"max":…, …}}}
/// A histogram has the members min, max, sum, sum_squares, finite, nan, infinite, limits and counts.
/// NaN and infinities are written as the strings "NaN", "Infinity" and "-Infinity", as in protobuf's JSON, because JSON
/// has no such numbers. An existing file is continued.
class JsonLogger final : public Logger {
 public:
  /// Lines of an earlier run with step `first_step` or later are removed. The constructor does not access the file.
  JsonLogger(const std::string& path, std::optional<std::int64_t> first_step) : file_(path), first_step_(first_step) {}

  void log_scalars(const LogTimestamp& at, const NamedValues& values) override;
  void log_text(const LogTimestamp& at, const std::string& name, const std::string& text) override;
  void log_histogram(const LogTimestamp& at, const std::string& name, const Histogram& histogram) override;
  void flush() override { file_.flush(); }

 private:
  std::string line_prefix(const LogTimestamp& at) const;
  void write(std::string line);

  RecordFile file_;
  std::optional<std::int64_t> first_step_;
  bool has_adopted_file_ = false;  // lines of an earlier run were read
};

}  // namespace lockstep::training::inline loggers
