// Detects changes of gradients after backward(), by the version counter and four values spread over the memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace lockstep::ddp {

/// Records a few values of each gradient and its autograd version counter. A change that bypasses the version counter
/// (through .data(), as in torch::nn::utils::clip_grad_norm_) is detected if it changes one of the recorded values.
/// Scaling changes them unless all of them are zero.
class GradientFingerprint {
 public:
  /// Records gradient `index` as it is now. Undefined gradients, sparse gradients and gradients on a device are not
  /// checked.
  void record(std::size_t index, const at::Tensor& gradient) {
    if (snapshots_.size() <= index) snapshots_.resize(index + 1);
    snapshots_[index] = take_snapshot(gradient);
  }
  void clear() { snapshots_.clear(); }
  /// False if gradient `index` was recorded, is defined, and has changed since.
  bool is_unchanged(std::size_t index, const at::Tensor& gradient) const {
    if (index >= snapshots_.size() || !snapshots_[index].is_recorded) return true;
    const Snapshot now = take_snapshot(gradient);
    return !now.is_recorded || (now.version == snapshots_[index].version && now.values == snapshots_[index].values);
  }

 private:
  struct Snapshot {
    bool is_recorded = false;
    std::int64_t version = 0;
    std::array<std::uint64_t, 4> values{};
  };
  static Snapshot take_snapshot(const at::Tensor& gradient) {
    Snapshot snapshot;
    if (!gradient.defined() || gradient.layout() != at::kStrided || gradient.numel() == 0 ||
        !gradient.device().is_cpu())
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
  std::vector<Snapshot> snapshots_;
};

}  // namespace lockstep::ddp
