// Conversion of tensors to the histograms and images that loggers write.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/train/loggers/histogram.h"
#include "lockstep/train/loggers/image.h"

namespace lockstep::training::inline metrics {

/// Makes a histogram of all elements of a tensor of any shape, real dtype and device; blocks on the copy from a device.
/// Throws UsageError for complex tensors.
Histogram make_histogram(const at::Tensor& tensor);

/// Makes an image of a tensor [channels, height, width] or [height, width] with 1, 3 or 4 channels, on any device;
/// blocks on the copy from it. uint8 values are used unchanged; floating-point values from 0 to 1 are scaled to 0 to
/// 255, with values outside clamped and NaN as 0. Throws UsageError for other tensors.
Image make_image(const at::Tensor& tensor);

}  // namespace lockstep::training::inline metrics
