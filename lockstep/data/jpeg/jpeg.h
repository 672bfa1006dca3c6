// Decodes JPEG files with libjpeg-turbo.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data::jpeg {

/// A rectangle of pixels.
struct Box {
  int left = 0;
  int top = 0;
  int width = 0;
  int height = 0;
  bool operator==(const Box&) const = default;
};

/// Red, green and blue bytes, row by row without padding: 3 * width * height bytes.
struct RgbImage {
  int width = 0;
  int height = 0;
  std::vector<std::uint8_t> rgb;
};

/// The part of an image to decode: the pixels inside `box`, which must lie in the image, with each side divided by
/// `shrink`.
struct JpegRegion {
  Box box;
  /// 1, 2, 4 or 8, and at most the sides of the box. The decoder computes the smaller image from the same coefficients
  /// in a fraction of the time; each of its pixels is the mean of the pixels that it replaces.
  int shrink = 1;
};

/// 2^27 pixels, which are 400 MB as RGB. PIL refuses images from 1.8e8 pixels on.
inline constexpr std::int64_t kMaxJpegPixels = std::int64_t{1} << 27;

/// Returns an empty string if this build can read JPEG files, and the reason otherwise.
std::string jpeg_unavailable_reason();

/// Decodes the region that `choose_region` returns for the image's width and height. Greyscale, YCbCr, CMYK and YCCK
/// are converted to RGB; colour profiles and orientation tags are ignored, as in PIL. The pixels are bit-equal to that
/// part of the full image. `out` reuses its memory. May be called on several threads at once, with different `out`.
///
/// Throws FormatError "NAME:OFFSET: reason" if the file is not a JPEG (the message names its type if it is recognized),
/// if it is truncated (its end marker is missing), if its data are damaged as far as the region needs them, and, before
/// allocating, if it has more than kMaxJpegPixels. Throws UsageError if this build cannot read JPEG files. Memory: that
/// of the region, and for a progressive file 2 bytes per sample of the image.
void decode_jpeg(std::string_view bytes, const std::string& name,
                 const std::function<JpegRegion(int width, int height)>& choose_region, RgbImage& out);

}  // namespace lockstep::data::jpeg
