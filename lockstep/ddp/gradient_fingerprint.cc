// Snapshots of gradients: the version counter and four values spread over the memory.
#include "lockstep/ddp/gradient_fingerprint.h"

#include <cstring>

namespace lockstep::ddp {

GradientFingerprint::Snapshot GradientFingerprint::take_snapshot(const at::Tensor& gradient) {
  Snapshot snapshot;
  if (!gradient.defined() || gradient.layout() != at::kStrided || gradient.numel() == 0 || !gradient.device().is_cpu())
    return snapshot;
  snapshot.is_recorded = true;
  snapshot.version = gradient._version();
  if (!gradient.is_non_overlapping_and_dense()) return snapshot;
  const auto* data = static_cast<const char*>(gradient.const_data_ptr());
  const auto last = static_cast<std::size_t>(gradient.numel()) - 1;
  for (std::size_t i = 0; i < snapshot.values.size(); ++i)
    std::memcpy(&snapshot.values[i], data + last * i / (snapshot.values.size() - 1) * gradient.element_size(),
                gradient.element_size());
  return snapshot;
}

void GradientFingerprint::record(std::size_t index, const at::Tensor& gradient) {
  if (snapshots_.size() <= index) snapshots_.resize(index + 1);
  snapshots_[index] = take_snapshot(gradient);
}

bool GradientFingerprint::is_unchanged(std::size_t index, const at::Tensor& gradient) const {
  if (index >= snapshots_.size() || !snapshots_[index].is_recorded) return true;
  const Snapshot now = take_snapshot(gradient);
  return !now.is_recorded || (now.version == snapshots_[index].version && now.values == snapshots_[index].values);
}

}  // namespace lockstep::ddp
