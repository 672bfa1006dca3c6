// A logger that keeps scalars in memory for the report.
#pragma once

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/train/loggers/logger.h"
#include "lockstep/train/report/curve.h"

namespace lockstep::training::inline report {

/// Keeps a curve of at most 16 KB per name, for the first 100 names.
class CurveLogger final : public Logger {
 public:
  static constexpr std::size_t kMaxNames = 100;
  using Curves = std::vector<std::pair<std::string, Curve>>;  ///< in the order of the first value of each name

  void log_scalars(const LogTimestamp& at, const NamedValues& values) override {
    for (const auto& [name, value] : values) {
      auto found = curve_index_.find(name);
      if (found == curve_index_.end()) {
        if (curves_.size() == kMaxNames) {
          if (dropped_names_.size() < kMaxNames) dropped_names_.insert(name);
          continue;
        }
        found = curve_index_.emplace(name, curves_.size()).first;
        curves_.emplace_back(name, Curve());
      }
      curves_[found->second].second.add(static_cast<double>(at.step), value);
    }
  }
  void flush() override {}

  const Curves& curves() const { return curves_; }
  /// Number of names without a curve, counted up to kMaxNames.
  std::size_t num_dropped_names() const { return dropped_names_.size(); }

 private:
  Curves curves_;
  std::unordered_map<std::string, std::size_t> curve_index_;
  std::unordered_set<std::string> dropped_names_;
};

}  // namespace lockstep::training::inline report
