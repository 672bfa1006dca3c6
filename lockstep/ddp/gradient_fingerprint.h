// Whether gradients are still what backward() left.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace lockstep::ddp {

/// Remembers a few values of each gradient, and autograd's count of its changes. A change that passes by that count
/// (through .data(), as torch::nn::utils::clip_grad_norm_ does) shows in the values, if any of those was not zero.
class GradientWitness {
 public:
  /// What gradient `index` is now; an undefined or sparse one is not watched.
  void note(std::size_t index, const at::Tensor& gradient);
  void forget() { seen_.clear(); }
  /// False when it was noted and is defined, and has changed since.
  bool unchanged(std::size_t index, const at::Tensor& gradient) const;

 private:
  struct Seen {
    bool noted = false;
    std::int64_t version = 0;
    std::array<std::uint64_t, 4> values{};
  };
  static Seen look(const at::Tensor& gradient);
  std::vector<Seen> seen_;
};

}  // namespace lockstep::ddp
