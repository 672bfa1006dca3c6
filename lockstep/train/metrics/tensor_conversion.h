// What loggers write of a tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/train/loggers/histogram.h"
#include "lockstep/train/loggers/image.h"

namespace lockstep::train {

/// Of all its numbers: of any shape, real dtype and device, from which it is copied. Throws UsageError for complex
/// numbers.
Histogram make_histogram(const at::Tensor& tensor);

/// Of an image as models take it: [channels, height, width] or [height, width], on any device; 1, 3 or 4 channels.
/// uint8 is taken as it is, floating point from 0 to 1 (what is beyond is cut, NaN is 0). Throws UsageError for others.
Image make_image(const at::Tensor& tensor);

}  // namespace lockstep::train
