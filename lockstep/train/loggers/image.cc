#include "lockstep/train/loggers/image.h"

#include <zlib.h>

#include <string_view>

#include "lockstep/base/error.h"

namespace lockstep::training::inline loggers {
namespace {

std::string big_endian(std::uint32_t number) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(number >> shift & 0xFF);
  return bytes;
}

std::string png_chunk(std::string_view type, const std::string& data) {
  const std::string body = std::string(type) + data;
  const auto sum = ::crc32(0, reinterpret_cast<const Bytef*>(body.data()), static_cast<uInt>(body.size()));
  return big_endian(static_cast<std::uint32_t>(data.size())) + body + big_endian(static_cast<std::uint32_t>(sum));
}

void require_valid(const Image& image) {
  const auto& [width, height, channels, bytes] = image;
  const bool valid_size = width > 0 && height > 0 && width <= 1 << 14 && height <= 1 << 14;
  if (valid_size && (channels == 1 || channels == 3 || channels == 4) &&
      bytes.size() ==
          static_cast<std::size_t>(width) * static_cast<std::size_t>(height) * static_cast<std::size_t>(channels))
    return;
  throw base::UsageError(
      "image: " + std::to_string(width) + " x " + std::to_string(height) + " pixels, " + std::to_string(channels) +
      " channels and " + std::to_string(bytes.size()) +
      " bytes; expected sides of 1 to 16384 pixels, 1, 3 or 4 channels, and one byte per channel and pixel");
}

}  // namespace

std::string encode_png(const Image& image) {
  require_valid(image);
  const std::size_t row = static_cast<std::size_t>(image.width) * static_cast<std::size_t>(image.channels);
  std::string rows;  // each begins with its filter type: 0, none
  for (std::size_t at = 0; at < image.bytes.size(); at += row) {
    rows += '\0';
    rows.append(reinterpret_cast<const char*>(image.bytes.data()) + at, row);
  }
  uLongf size = ::compressBound(rows.size());
  std::string compressed(size, '\0');
  ::compress2(reinterpret_cast<Bytef*>(compressed.data()), &size, reinterpret_cast<const Bytef*>(rows.data()),
              rows.size(), Z_BEST_SPEED);
  compressed.resize(size);
  const char color = image.channels == 1 ? 0 : image.channels == 3 ? 2 : 6;
  const std::string header = big_endian(static_cast<std::uint32_t>(image.width)) +
                             big_endian(static_cast<std::uint32_t>(image.height)) + std::string{8, color, 0, 0, 0};
  return "\x89PNG\r\n\x1a\n" + png_chunk("IHDR", header) + png_chunk("IDAT", compressed) + png_chunk("IEND", "");
}

}  // namespace lockstep::training::inline loggers
