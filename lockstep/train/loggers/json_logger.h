// Numbers, texts and histograms as JSON, an object a line.
#pragma once

#include <optional>

#include "lockstep/train/loggers/logger.h"
#include "lockstep/train/loggers/record_file.h"

namespace lockstep::train {

///   {"step":12,"time":1763900000.123,"loss":1.482,"lr":0.1}
///   {"step":12,"time":1763900000.123,"text":{"sample":"To be"}}
///   {"step":12,"time":1763900000.123,"histogram":{"fc.weight":{"min":…,"max":…,"sum":…,"sum_squares":…,"finite":…,"nan":…,"infinite":…,"limits":[…],"counts":[…]}}}
/// JSON has no NaN and no infinities: they are the strings "NaN", "Infinity" and "-Infinity", as in protobuf's JSON. A
/// file that is there goes on.
class JsonLogger final : public Logger {
 public:
  /// Lines of an earlier run of `first_step` and later are left out. Touches nothing yet.
  JsonLogger(const std::string& path, std::optional<std::int64_t> first_step) : file_(path), first_step_(first_step) {}

  void log_scalars(const LogTimestamp& at, const NamedValues& values) override;
  void text(const LogTimestamp& at, const std::string& name, const std::string& text) override;
  void histogram(const LogTimestamp& at, const std::string& name, const Histogram& histogram) override;
  void image(const LogTimestamp&, const std::string&, const Image&) override {}
  void flush() override { file_.flush(); }

 private:
  std::string line_prefix(const LogTimestamp& at) const;
  void write(std::string line);

  RecordFile file_;
  std::optional<std::int64_t> first_step_;
  bool has_adopted_file_ = false;  // what was there before this run
};

}  // namespace lockstep::train
