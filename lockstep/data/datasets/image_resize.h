// Pixels to other sizes and places.
#pragma once

#include <cstdint>

#include "lockstep/data/jpeg/jpeg.h"

namespace lockstep::data {

/// `from` as width x height pixels of RGB at `to`, by torch's bilinear filter with antialias, within one level what
/// PIL's does.
void resize(const Pixels& from, std::int64_t width, std::int64_t height, std::uint8_t* to);

/// Left becomes right, in each row.
void flip_horizontal(std::uint8_t* rgb, std::int64_t width, std::int64_t height);

/// Rows of `box` out of a picture `width` wide.
void crop(const std::uint8_t* rgb, std::int64_t width, const Box& box, std::uint8_t* to);

}  // namespace lockstep::data
