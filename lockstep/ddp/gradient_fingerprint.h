// Whether gradients are still what backward() left.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace lockstep::ddp {

/// Remembers a few values of each gradient, and autograd's count of its changes. A change that passes by that count
/// (through .data(), as torch::nn::utils::clip_grad_norm_ does) shows in the values, if any of those was not zero.
class GradientFingerprint {
 public:
  /// What gradient `index` is now; an undefined or sparse one is not watched.
  void record(std::size_t index, const at::Tensor& gradient);
  void clear() { snapshots_.clear(); }
  /// False when it was noted and is defined, and has changed since.
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
