#include "lockstep/data/datasets/image_crop.h"

#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace lockstep::data::inline datasets {
namespace {

/// Returns a view of the pixels as a torch image: (1, 3, height, width), channels last.
at::Tensor as_image(std::uint8_t* rgb, std::int64_t width, std::int64_t height) {
  return at::from_blob(rgb, {1, 3, height, width}, {3 * width * height, 1, 3 * width, 3}, at::kByte);
}

constexpr int kMaxAttempts = 10;

// Rounds halves to the even number, as Python's round() does.
int round_half_even(double value) { return static_cast<int>(std::nearbyint(value)); }

jpeg::Box largest_center_crop(int width, int height, const CropOptions& options) {
  const double aspect = static_cast<double>(width) / height;
  jpeg::Box box{0, 0, width, height};
  if (aspect < options.min_aspect) box.height = std::min(height, round_half_even(width / options.min_aspect));
  if (aspect > options.max_aspect) box.width = std::min(width, round_half_even(height * options.max_aspect));
  box.left = (width - box.width) / 2;
  box.top = (height - box.height) / 2;
  return box;
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

jpeg::Box random_crop(int width, int height, SampleRng& random, const CropOptions& options) {
  const double area = static_cast<double>(width) * height;
  for (int i = 0; i < kMaxAttempts; ++i) {
    const double target_area = area * random.uniform(options.min_area, options.max_area);
    const double aspect = std::exp(random.uniform(std::log(options.min_aspect), std::log(options.max_aspect)));
    jpeg::Box box{0, 0, round_half_even(std::sqrt(target_area * aspect)),
                  round_half_even(std::sqrt(target_area / aspect))};
    if (box.width < 1 || box.width > width || box.height < 1 || box.height > height) continue;
    box.top = random.uniform_int(height - box.height + 1);
    box.left = random.uniform_int(width - box.width + 1);
    return box;
  }
  return largest_center_crop(width, height, options);
}

std::pair<std::int64_t, std::int64_t> resized_size(int width, int height, int size) {
  const std::int64_t target = size;
  if (width <= height) return {size, target * height / width};
  return {target * width / height, size};
}

jpeg::Box center_crop(int width, int height, int size) {
  return {round_half_even((width - size) / 2.0), round_half_even((height - size) / 2.0), size, size};
}

int shrink_factor(const jpeg::Box& box, int size) {
  int shrink = 8;
  while (shrink > 1 && std::min(box.width, box.height) / shrink < size) shrink /= 2;
  return shrink;
}

}  // namespace lockstep::data::inline datasets
