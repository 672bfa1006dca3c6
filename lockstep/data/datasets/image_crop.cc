#include "lockstep/data/datasets/image_crop.h"

#include <algorithm>
#include <cmath>

namespace lockstep::data::inline datasets {
namespace {

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
