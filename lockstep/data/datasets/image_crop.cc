#include "lockstep/data/datasets/image_crop.h"

#include <algorithm>
#include <cmath>

namespace lockstep::data {
namespace {

constexpr int kTries = 10;

// Halves to the even neighbour, as Python's round().
int rounded(double value) { return static_cast<int>(std::nearbyint(value)); }

Box largest_in_the_middle(int width, int height, const CropOptions& options) {
  const double aspect = static_cast<double>(width) / height;
  Box box{0, 0, width, height};
  if (aspect < options.min_aspect) box.height = std::min(height, rounded(width / options.min_aspect));
  if (aspect > options.max_aspect) box.width = std::min(width, rounded(height * options.max_aspect));
  box.left = (width - box.width) / 2;
  box.top = (height - box.height) / 2;
  return box;
}

}  // namespace

Box random_crop(int width, int height, SampleRandom& random, const CropOptions& options) {
  const double area = static_cast<double>(width) * height;
  for (int i = 0; i < kTries; ++i) {
    const double wanted = area * random.between(options.min_area, options.max_area);
    const double aspect = std::exp(random.between(std::log(options.min_aspect), std::log(options.max_aspect)));
    Box box{0, 0, rounded(std::sqrt(wanted * aspect)), rounded(std::sqrt(wanted / aspect))};
    if (box.width < 1 || box.width > width || box.height < 1 || box.height > height) continue;
    box.top = random.below(height - box.height + 1);
    box.left = random.below(width - box.width + 1);
    return box;
  }
  return largest_in_the_middle(width, height, options);
}

std::pair<std::int64_t, std::int64_t> shorter_side_to(int width, int height, int size) {
  const std::int64_t wide = size;
  if (width <= height) return {size, wide * height / width};
  return {wide * width / height, size};
}

Box center_crop(int width, int height, int size) {
  return {rounded((width - size) / 2.0), rounded((height - size) / 2.0), size, size};
}

int shrink_for(const Box& box, int size) {
  int shrink = 8;
  while (shrink > 1 && std::min(box.width, box.height) / shrink < size) shrink /= 2;
  return shrink;
}

}  // namespace lockstep::data
