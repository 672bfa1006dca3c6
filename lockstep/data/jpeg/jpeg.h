// JPEG files to pixels, by libjpeg-turbo.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

/// A rectangle of pixels.
struct Box {
  int left = 0;
  int top = 0;
  int width = 0;
  int height = 0;
  bool operator==(const Box&) const = default;
};

/// Red, green, blue, a byte each, row after row without gaps: 3 * width * height bytes.
struct RgbImage {
  int width = 0;
  int height = 0;
  std::vector<std::uint8_t> rgb;
};

/// What is wanted of a picture: the part inside `box`, which lies in it, each side divided by `shrink`.
struct JpegRegion {
  Box box;
  /// 1, 2, 4 or 8, at most the sides of the box. A smaller picture comes out of the same coefficients in a fraction of
  /// the time, each of its pixels the mean of what it stands for.
  int shrink = 1;
};

/// 2^27: 400 MB as RGB. PIL refuses from 1.8e8 pixels on.
inline constexpr std::int64_t kMaxJpegPixels = std::int64_t{1} << 27;

/// Empty when JPEG files can be read, else why not.
std::string jpeg_unavailable_reason();

/// Decodes the part that `choose` names when it is told the picture's width and height. Greyscale, YCbCr, CMYK and YCCK
/// become RGB; profiles and orientation tags are not looked at, as PIL does it. The same bits as that part of the whole
/// picture. `out` keeps its memory for the next one. Any thread.
///
/// Throws FormatError "NAME:OFFSET: reason" for what is no JPEG, saying what it is if that can be seen; for a file that
/// ends early (its end mark is missing); for damaged data, as far as the part needs them; for more than kMaxJpegPixels,
/// before memory is taken. Memory: that of the part; for a progressive file also 2 bytes for each sample of the
/// picture. Throws UsageError where jpeg_unavailable_reason().
void decode_jpeg(std::string_view bytes, const std::string& name,
                 const std::function<JpegRegion(int width, int height)>& choose_region, RgbImage& out);

}  // namespace lockstep::data
