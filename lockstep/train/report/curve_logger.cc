#include "lockstep/train/report/curve_logger.h"

namespace lockstep::train {

void CurveLogger::scalars(const Moment& at, const NamedValues& values) {
  for (const auto& [name, value] : values) {
    auto place = places_.find(name);
    if (place == places_.end()) {
      if (curves_.size() == kMaxNames) {
        if (left_out_.size() < kMaxNames) left_out_.insert(name);
        continue;
      }
      place = places_.emplace(name, curves_.size()).first;
      curves_.emplace_back(name, Curve());
    }
    curves_[place->second].second.add(static_cast<double>(at.step), value);
  }
}

}  // namespace lockstep::train
