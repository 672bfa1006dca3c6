// Detects changes of gradients after backward().
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace lockstep::ddp {

/// Records a few values of each gradient and its autograd version counter. A change that bypasses the version counter
/// (through .data(), as in torch::nn::utils::clip_grad_norm_) is detected if it changes one of the recorded values.
/// Scaling changes them unless all of them are zero.
class GradientFingerprint {
 public:
  /// Records gradient `index` as it is now. Undefined gradients, sparse gradients and gradients on a device are not
  /// checked.
  void record(std::size_t index, const at::Tensor& gradient);
  void clear() { snapshots_.clear(); }
  /// False if gradient `index` was recorded, is defined, and has changed since.
  bool is_unchanged(std::size_t index, const at::Tensor& gradient) const;

 private:
  struct Snapshot {
    bool is_recorded = false;
    std::int64_t version = 0;
    std::array<std::uint64_t, 4> values{};
  };
  static Snapshot take_snapshot(const at::Tensor& gradient);
  std::vector<Snapshot> snapshots_;
};

}  // namespace lockstep::ddp
