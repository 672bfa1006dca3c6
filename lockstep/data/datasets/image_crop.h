// Chooses the part of an image that becomes a sample, and resizes it. All functions are pure.
#pragma once

#include <cstdint>
#include <utility>

#include "lockstep/data/jpeg/jpeg.h"
#include "lockstep/data/sample_rng.h"

namespace lockstep::data::inline datasets {

/// Resizes `from` to width x height and writes the RGB pixels to `to`. Uses torch's bilinear filter with antialiasing,
/// which differs from PIL's result by at most one level.
void resize(const jpeg::RgbImage& from, std::int64_t width, std::int64_t height, std::uint8_t* to);

/// Mirrors each row in place.
void flip_horizontal(std::uint8_t* rgb, std::int64_t width, std::int64_t height);

/// Copies the pixels inside `box` from an image that is `width` pixels wide to `to`.
void crop(const std::uint8_t* rgb, std::int64_t width, const jpeg::Box& box, std::uint8_t* to);

/// The bounds of a random crop, with the defaults of torchvision's RandomResizedCrop.
struct CropOptions {
  double min_area = 0.08, max_area = 1;               ///< as a fraction of the image's area
  double min_aspect = 3.0 / 4, max_aspect = 4.0 / 3;  ///< width / height
};

/// Draws a box: its area uniformly, its aspect ratio uniformly in the logarithm, then its position. A box that does not
/// fit into the image is drawn again; after ten attempts the function returns the largest centred box that the aspect
/// bounds allow (Szegedy et al., arXiv:1409.4842; the constants are torchvision's).
jpeg::Box random_crop(int width, int height, SampleRng& random, const CropOptions& options = {});

/// Returns the width and height of the image after its shorter side is scaled to `size` and the other one, rounded
/// down, in proportion: torchvision's Resize(size).
std::pair<std::int64_t, std::int64_t> resized_size(int width, int height, int size);

/// Returns the centred box of `size` x `size`, which must fit into the image: torchvision's CenterCrop.
jpeg::Box center_crop(int width, int height, int size);

/// Returns the largest JpegRegion::shrink that leaves the box at least `size` on both sides.
int shrink_factor(const jpeg::Box& box, int size);

}  // namespace lockstep::data::inline datasets
