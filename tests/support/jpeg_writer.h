// Writes JPEG files for tests.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>

namespace lockstep::tests {

using Pixel = std::array<std::uint8_t, 4>;  // red, green and blue; or grey alone; or the four inks of CMYK

struct JpegOptions {
  enum class Colors { kRgb, kGrey, kCmyk, kYcck };
  Colors colors = Colors::kRgb;
  int quality = 95;
  int horizontal = 2, vertical = 2;  ///< number of columns and rows that share a colour (chroma subsampling)
  bool progressive = false;
  bool adobe = true;  ///< whether a CMYK or YCCK file has Adobe's marker
};

/// Returns the bytes of a JPEG file of width x height pixels.
std::string jpeg_file(int width, int height, const std::function<Pixel(int x, int y)>& pixel,
                      const JpegOptions& options = {});

/// A pixel function that is smooth in both directions and in all colours.
inline Pixel gradient(int x, int y) {
  return {static_cast<std::uint8_t>(40 + x % 160), static_cast<std::uint8_t>(200 - y % 150),
          static_cast<std::uint8_t>((x + y) / 2 % 200)};
}

}  // namespace lockstep::tests
