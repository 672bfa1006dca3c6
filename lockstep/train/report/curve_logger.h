// The numbers of a run, kept in memory for its report.
#pragma once

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/train/loggers/logger.h"
#include "lockstep/train/report/curve.h"

namespace lockstep::train {

/// A curve a name, 16 KB at most each; of at most 100 names, those that came first.
class CurveLogger final : public Logger {
 public:
  static constexpr std::size_t kMaxNames = 100;
  using Curves = std::vector<std::pair<std::string, Curve>>;  ///< in the order in which names came

  void log_scalars(const LogTimestamp& at, const NamedValues& values) override;
  void text(const LogTimestamp&, const std::string&, const std::string&) override {}
  void histogram(const LogTimestamp&, const std::string&, const Histogram&) override {}
  void image(const LogTimestamp&, const std::string&, const Image&) override {}
  void flush() override {}

  const Curves& curves() const { return curves_; }
  /// Names that found no place, at most kMaxNames.
  std::size_t num_dropped_names() const { return dropped_names_.size(); }

 private:
  Curves curves_;
  std::unordered_map<std::string, std::size_t> curve_index_;
  std::unordered_set<std::string> dropped_names_;
};

}  // namespace lockstep::train
