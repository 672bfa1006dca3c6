#include "tests/support/jpeg_writer.h"

#include <cstddef>
#include <cstdio>
#include <cstdlib>
// jpeglib.h needs the headers above.
#include <jpeglib.h>

#include <vector>

namespace lockstep::tests {
namespace {

void choose_colors(jpeg_compress_struct& info, const JpegOptions& options) {
  using Colors = JpegOptions::Colors;
  const bool inks = options.colors == Colors::kCmyk || options.colors == Colors::kYcck;
  info.input_components = inks ? 4 : options.colors == Colors::kGrey ? 1 : 3;
  info.in_color_space = inks ? JCS_CMYK : options.colors == Colors::kGrey ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_set_defaults(&info);
  if (options.colors == Colors::kYcck) jpeg_set_colorspace(&info, JCS_YCCK);
  if (inks) info.write_Adobe_marker = options.adobe;
  if (options.colors == Colors::kRgb) {
    info.comp_info[0].h_samp_factor = options.horizontal;
    info.comp_info[0].v_samp_factor = options.vertical;
  }
}

}  // namespace

std::string jpeg_file(int width, int height, const std::function<Pixel(int x, int y)>& pixel,
                      const JpegOptions& options) {
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  info.err = jpeg_std_error(&errors);  // an error of libjpeg ends the test
  jpeg_create_compress(&info);
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &bytes, &size);
  info.image_width = static_cast<JDIMENSION>(width);
  info.image_height = static_cast<JDIMENSION>(height);
  choose_colors(info, options);
  jpeg_set_quality(&info, options.quality, TRUE);
  if (options.progressive) jpeg_simple_progression(&info);
  jpeg_start_compress(&info, TRUE);
  std::vector<JSAMPLE> row(static_cast<std::size_t>(width * info.input_components));
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x)
      for (int i = 0; i < info.input_components; ++i)
        row[static_cast<std::size_t>(x * info.input_components + i)] = pixel(x, y)[static_cast<std::size_t>(i)];
    JSAMPLE* const rows = row.data();
    jpeg_write_scanlines(&info, const_cast<JSAMPARRAY>(&rows), 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
  std::string file(reinterpret_cast<const char*>(bytes), size);
  std::free(bytes);  // NOLINT: libjpeg's
  return file;
}

}  // namespace lockstep::tests
