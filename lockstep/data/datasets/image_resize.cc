#include "lockstep/data/datasets/image_resize.h"

#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

namespace lockstep::data::inline datasets {
namespace {

/// Returns a view of the pixels as a torch image: (1, 3, height, width), channels last.
at::Tensor as_image(std::uint8_t* rgb, std::int64_t width, std::int64_t height) {
  return at::from_blob(rgb, {1, 3, height, width}, {3 * width * height, 1, 3 * width, 3}, at::kByte);
}

}  // namespace

void resize(const jpeg::RgbImage& from, std::int64_t width, std::int64_t height, std::uint8_t* to) {
  at::Tensor out = as_image(to, width, height);
  const at::Tensor in = as_image(const_cast<std::uint8_t*>(from.rgb.data()), from.width, from.height);
  at::_upsample_bilinear2d_aa_out(out, in, {height, width}, /*align_corners=*/false);
}

void flip_horizontal(std::uint8_t* rgb, std::int64_t width, std::int64_t height) {
  for (std::int64_t y = 0; y < height; ++y, rgb += 3 * width)
    for (std::int64_t a = 0, b = width - 1; a < b; ++a, --b)
      std::swap_ranges(rgb + 3 * a, rgb + 3 * a + 3, rgb + 3 * b);
}

void crop(const std::uint8_t* rgb, std::int64_t width, const jpeg::Box& box, std::uint8_t* to) {
  const std::int64_t row = 3 * std::int64_t{box.width};
  for (std::int64_t y = box.top; y < box.top + box.height; ++y, to += row)
    std::memcpy(to, rgb + 3 * (y * width + box.left), static_cast<std::size_t>(row));
}

}  // namespace lockstep::data::inline datasets
