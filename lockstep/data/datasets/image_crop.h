// Which part of a picture becomes a sample: pure functions.
#pragma once

#include <utility>

#include "lockstep/data/jpeg/jpeg.h"
#include "lockstep/data/sample_rng.h"

namespace lockstep::data {

/// As torchvision's RandomResizedCrop has them.
struct CropOptions {
  double min_area = 0.08, max_area = 1;               ///< of the picture's
  double min_aspect = 3.0 / 4, max_aspect = 4.0 / 3;  ///< width by height
};

/// A box whose area and aspect are drawn, the one evenly, the other evenly in its logarithm, and then its place; drawn
/// again when it does not fit, and after ten times the largest box in the middle that the aspects allow (Szegedy et
/// al., arXiv:1409.4842; the numbers are torchvision's).
Box random_crop(int width, int height, SampleRng& random, const CropOptions& options = {});

/// Width and height when the shorter side becomes `size`, and the other, rounded down, keeps the aspect: torchvision's
/// Resize(size).
std::pair<std::int64_t, std::int64_t> resized_size(int width, int height, int size);

/// `size` x `size` from the middle, which must be that large: torchvision's CenterCrop.
Box center_crop(int width, int height, int size);

/// The largest shrink (JpegRegion) after which the box is still at least `size` on both sides.
int shrink_factor(const Box& box, int size);

}  // namespace lockstep::data
