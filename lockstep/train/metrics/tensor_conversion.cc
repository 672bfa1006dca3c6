#include "lockstep/train/metrics/tensor_conversion.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <sstream>

#include "lockstep/base/error.h"

namespace lockstep::training::inline metrics {
namespace {

[[noreturn]] void throw_unsupported(const char* function, const at::Tensor& tensor, const char* expected) {
  std::ostringstream text;
  text << function << ": the tensor is " << tensor.scalar_type() << tensor.sizes() << "; expected " << expected;
  throw base::UsageError(text.str());
}

}  // namespace

Histogram make_histogram(const at::Tensor& tensor) {
  if (tensor.is_complex()) throw_unsupported("make_histogram()", tensor, "a real dtype");
  const at::NoGradGuard no_grad;
  const bool wide =
      tensor.scalar_type() == at::kDouble || tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt;
  const at::Tensor host = tensor.detach().to(at::kCPU, wide ? at::kDouble : at::kFloat).contiguous();
  const auto count = static_cast<std::size_t>(host.numel());
  return wide ? loggers::make_histogram(std::span(host.const_data_ptr<double>(), count))
              : loggers::make_histogram(std::span(host.const_data_ptr<float>(), count));
}

Image make_image(const at::Tensor& tensor) {
  const bool bytes = tensor.scalar_type() == at::kByte;
  const at::Tensor planes = tensor.dim() == 2 ? tensor.unsqueeze(0) : tensor;
  if (planes.dim() != 3 || (!bytes && !tensor.is_floating_point()) ||
      (planes.size(0) != 1 && planes.size(0) != 3 && planes.size(0) != 4) || tensor.numel() == 0)
    throw_unsupported(
        "make_image()", tensor,
        "[channels, height, width] or [height, width] of uint8 or floating point, with 1, 3 or 4 channels");
  const at::NoGradGuard no_grad;
  at::Tensor pixels = planes.detach().permute({1, 2, 0});
  if (!bytes) pixels = pixels.to(at::kFloat).nan_to_num(0).clamp(0, 1).mul(255).round().to(at::kByte);
  pixels = pixels.to(at::kCPU).contiguous();
  Image image{.width = static_cast<int>(pixels.size(1)),
              .height = static_cast<int>(pixels.size(0)),
              .channels = static_cast<int>(pixels.size(2))};
  image.bytes.assign(pixels.const_data_ptr<std::uint8_t>(), pixels.const_data_ptr<std::uint8_t>() + pixels.numel());
  return image;
}

}  // namespace lockstep::training::inline metrics
