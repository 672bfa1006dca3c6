// Pixels, and the PNG files that they become.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::train {

/// Bytes row after row without gaps, height * width * channels of them.
struct Image {
  int width = 0;
  int height = 0;
  int channels = 3;  ///< 1: grey, 3: red, green, blue, 4: with opacity
  std::vector<std::uint8_t> bytes;
};

/// A PNG file. Throws UsageError for an image that is none.
std::string encode_png(const Image& image);

}  // namespace lockstep::train
