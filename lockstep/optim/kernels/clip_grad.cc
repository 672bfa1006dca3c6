// Clips gradients in blocks, on several threads, with a fixed order of additions.
#include "lockstep/optim/kernels/clip_grad.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::kernels {
namespace {

using base::UsageError;

constexpr std::size_t kBlockElements = 32768;        // each block has its own sum, whichever thread computes it
constexpr std::size_t kElementsPerThread = 1 << 16;  // fewer do not justify waking a thread

/// A contiguous range of a gradient's memory.
struct GradientBlock {
  at::ScalarType dtype;
  char* data;
  std::size_t count;
};

struct GradientBlocks {
  std::vector<GradientBlock> blocks;  // of dense gradients on the CPU
  std::size_t num_elements = 0;       // in `blocks`
  std::vector<at::Tensor> all;
  std::vector<at::Tensor> unblocked;  // gradients that are not in `blocks`
  at::Device device = at::kCPU;
};

void add_blocks(GradientBlocks& to, const at::Tensor& gradient) {
  const std::size_t element = gradient.element_size();
  const auto count = static_cast<std::size_t>(gradient.numel());
  auto* data = static_cast<char*>(gradient.mutable_data_ptr());
  for (std::size_t begin = 0; begin < count; begin += kBlockElements)
    to.blocks.push_back({gradient.scalar_type(), data + begin * element, std::min(kBlockElements, count - begin)});
  to.num_elements += count;
}

GradientBlocks collect_gradients(const std::vector<at::Tensor>& parameters, const std::string& call) {
  GradientBlocks found;
  found.all.reserve(parameters.size());
  found.blocks.reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    if (!gradient.defined()) continue;
    const auto refuse = [&](const std::string& what, const std::string& expected) {
      throw UsageError(call + ": the gradient of parameter " + std::to_string(i) + " is " + what + "; expected " +
                       expected);
    };
    if (gradient.layout() != at::kStrided) refuse("sparse", "a dense gradient");
    if (!gradient.is_floating_point())
      refuse(std::string("of ") + c10::toString(gradient.scalar_type()), "a floating dtype");
    if (found.all.empty()) found.device = gradient.device();
    if (gradient.device() != found.device)
      refuse("on " + gradient.device().str(), "the device of the first gradient, " + found.device.str());
    if (has_kernel(gradient.scalar_type()) && gradient.is_cpu() && gradient.is_non_overlapping_and_dense())
      add_blocks(found, gradient);
    else
      found.unblocked.push_back(gradient);
    found.all.push_back(gradient);
  }
  return found;
}

enum class BlockOrder {
  kForwards,
  kBackwards
};  // of a thread's blocks; kBackwards begins with the blocks that the previous pass left in cache

template <typename Body>
void for_each_block(const GradientBlocks& gradients, BlockOrder order, const Body& body) {
  const auto range = [&](std::size_t begin, std::size_t end) {
    for (std::size_t k = begin; k < end; ++k) {
      const std::size_t i = order == BlockOrder::kForwards ? k : end - 1 - (k - begin);
      body(i, gradients.blocks[i]);
    }
  };
  const auto count = gradients.blocks.size();
  if (gradients.num_elements < 2 * kElementsPerThread || at::get_num_threads() == 1) return range(0, count);
  const std::size_t grain = std::max<std::size_t>(1, count * kElementsPerThread / gradients.num_elements);
  at::parallel_for(0, static_cast<std::int64_t>(count), static_cast<std::int64_t>(grain),
                   [&](std::int64_t begin, std::int64_t end) {
                     range(static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
                   });
}

double sum_of_squares(const GradientBlocks& gradients) {
  std::vector<double> sums(gradients.blocks.size());
  for_each_block(gradients, BlockOrder::kForwards, [&](std::size_t i, const GradientBlock& block) {
    sums[i] = kernels().tensor_sum_of_squares(block.dtype, block.data, block.count);
  });
  double sum = 0;
  for (const double of_block : sums) sum += of_block;
  return sum;
}

/// Bumps the version counters, so that autograd and GradientFingerprint detect the write.
void bump_versions(const GradientBlocks& gradients) {
  for (const at::Tensor& gradient : gradients.all)
    if (!gradient.is_inference()) torch::autograd::impl::bump_version(gradient);
}

at::Tensor norm_of_unblocked(const GradientBlocks& gradients) {
  const auto dtype = gradients.device.is_mps() ? at::kFloat : at::kDouble;
  const auto norms = at::_foreach_norm(gradients.unblocked, 2, dtype);
  return at::stack(norms).norm();
}

void scale_unblocked(const GradientBlocks& gradients, const at::Tensor& coefficient) {
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const at::Tensor& gradient : gradients.unblocked) by_dtype[gradient.scalar_type()].push_back(gradient);
  for (const auto& [dtype, some] : by_dtype) at::_foreach_mul_(some, coefficient.to(dtype));
}

}  // namespace

at::Tensor clip_norm(const std::vector<at::Tensor>& parameters, double max_norm) {
  base::check_option(max_norm > 0, "clip_grad_norm", "max_norm", max_norm, "more than 0");
  const at::NoGradGuard no_grad;
  const GradientBlocks gradients = collect_gradients(parameters, "clip_grad_norm");
  if (!gradients.device.is_cpu()) {
    const at::Tensor norm = norm_of_unblocked(gradients);
    scale_unblocked(gradients, (max_norm / (norm + kClipEpsilon)).clamp_max(1));
    return norm;
  }
  double sum = sum_of_squares(gradients);
  if (!gradients.unblocked.empty()) sum += std::pow(norm_of_unblocked(gradients).item<double>(), 2);
  const double norm = std::sqrt(sum);
  const double coefficient = max_norm / (norm + kClipEpsilon);
  if (!(coefficient >= 1)) {
    for_each_block(gradients, BlockOrder::kBackwards, [&](std::size_t, const GradientBlock& block) {
      kernels().scale(block.dtype, block.data, block.count, coefficient);
    });
    if (!gradients.unblocked.empty()) scale_unblocked(gradients, at::scalar_tensor(coefficient, at::kDouble));
    bump_versions(gradients);
  }
  return at::scalar_tensor(norm, at::kDouble);
}

void clip_value(const std::vector<at::Tensor>& parameters, double max) {
  base::check_option(max > 0, "clip_grad_value", "max", max, "more than 0");
  const at::NoGradGuard no_grad;
  const GradientBlocks gradients = collect_gradients(parameters, "clip_grad_value");
  for_each_block(gradients, BlockOrder::kForwards, [&](std::size_t, const GradientBlock& block) {
    kernels().clamp(block.dtype, block.data, block.count, max);
  });
  if (!gradients.unblocked.empty()) {
    at::_foreach_clamp_max_(gradients.unblocked, max);
    at::_foreach_clamp_min_(gradients.unblocked, -max);
  }
  bump_versions(gradients);
}

}  // namespace lockstep::optim::kernels
