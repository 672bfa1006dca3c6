// Images as pixels, and their encoding as PNG.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::training::inline loggers {

/// height * width * channels bytes, row by row without padding, the channels of a pixel together.
struct Image {
  int width = 0;
  int height = 0;
  int channels = 3;  ///< 1: grey, 3: RGB, 4: RGBA
  std::vector<std::uint8_t> bytes;
};

/// Returns the bytes of a PNG file. Throws UsageError for an invalid size, number of channels or number of bytes.
std::string encode_png(const Image& image);

}  // namespace lockstep::training::inline loggers
