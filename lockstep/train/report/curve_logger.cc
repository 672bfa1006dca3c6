#include "lockstep/train/report/curve_logger.h"

namespace lockstep::train {

void CurveLogger::log_scalars(const LogTimestamp& at, const NamedValues& values) {
  for (const auto& [name, value] : values) {
    auto place = curve_index_.find(name);
    if (place == curve_index_.end()) {
      if (curves_.size() == kMaxNames) {
        if (dropped_names_.size() < kMaxNames) dropped_names_.insert(name);
        continue;
      }
      place = curve_index_.emplace(name, curves_.size()).first;
      curves_.emplace_back(name, Curve());
    }
    curves_[place->second].second.add(static_cast<double>(at.step), value);
  }
}

}  // namespace lockstep::train
