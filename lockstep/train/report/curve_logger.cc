#include "lockstep/train/report/curve_logger.h"

namespace lockstep::training::inline report {

void CurveLogger::log_scalars(const LogTimestamp& at, const NamedValues& values) {
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

}  // namespace lockstep::training::inline report
