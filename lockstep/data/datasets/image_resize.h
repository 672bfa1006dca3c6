// Resizes, flips and crops RGB images.
#pragma once

#include <cstdint>

#include "lockstep/data/jpeg/jpeg.h"

namespace lockstep::data::inline datasets {

/// Resizes `from` to width x height and writes the RGB pixels to `to`. Uses torch's bilinear filter with antialiasing,
/// which differs from PIL's result by at most one level.
void resize(const jpeg::RgbImage& from, std::int64_t width, std::int64_t height, std::uint8_t* to);

/// Mirrors each row in place.
void flip_horizontal(std::uint8_t* rgb, std::int64_t width, std::int64_t height);

/// Copies the pixels inside `box` from an image that is `width` pixels wide to `to`.
void crop(const std::uint8_t* rgb, std::int64_t width, const jpeg::Box& box, std::uint8_t* to);

}  // namespace lockstep::data::inline datasets
