#include "lockstep/data/jpeg/jpeg.h"

#include <csetjmp>
#include <cstddef>
#include <cstdio>
// jpeglib.h requires the headers above.
#include <jerror.h>
#include <jpeglib.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"

namespace lockstep::data::jpeg {
namespace {

constexpr int kMaxScans = 500;  // A file of a few kilobytes can declare thousands of scans, each as slow as a decoding.
                                // libjpeg-turbo's own fuzzers use this limit.
constexpr int kUpsamplingMargin = 2;  // columns beside the region that the upsampling of colours reads

/// libjpeg reports errors by longjmp, which must not skip destructors: the functions that call setjmp (read_header,
/// start_decompress, skip_rows, read_row) have no local objects with destructors.
struct LibjpegDecoder {
  jpeg_decompress_struct info{};
  jpeg_error_mgr errors{};
  jpeg_progress_mgr progress{};
  std::jmp_buf failed;
  std::array<char, JMSG_LENGTH_MAX> reason{};

  LibjpegDecoder() = default;
  LibjpegDecoder(const LibjpegDecoder&) = delete;
  LibjpegDecoder& operator=(const LibjpegDecoder&) = delete;
  ~LibjpegDecoder() { jpeg_destroy_decompress(&info); }
};

LibjpegDecoder& decoder_of(j_common_ptr info) { return *static_cast<LibjpegDecoder*>(info->client_data); }

[[noreturn]] void error_exit(j_common_ptr info) {
  LibjpegDecoder& decoder = decoder_of(info);
  info->err->format_message(info, decoder.reason.data());
  std::longjmp(decoder.failed, 1);
}

/// After these warnings libjpeg continues with wrong pixels. Other warnings are harmless.
bool is_damage(int code) {
  constexpr std::array kDamage{JWRN_JPEG_EOF, JWRN_HIT_MARKER, JWRN_HUFF_BAD_CODE, JWRN_MUST_RESYNC};
  return std::find(kDamage.begin(), kDamage.end(), code) != kDamage.end();
}

void emit_message(j_common_ptr info, int level) {
  if (level < 0 && is_damage(info->err->msg_code)) error_exit(info);
}

void count_scans(j_common_ptr info) {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number <= kMaxScans) return;
  LibjpegDecoder& decoder = decoder_of(info);
  std::snprintf(decoder.reason.data(), decoder.reason.size(), "more than %d scans", kMaxScans);
  std::longjmp(decoder.failed, 1);
}

bool read_header(LibjpegDecoder& decoder, std::string_view bytes) {
  jpeg_decompress_struct& info = decoder.info;
  info.err = jpeg_std_error(&decoder.errors);
  decoder.errors.error_exit = error_exit;
  decoder.errors.emit_message = emit_message;
  info.client_data = &decoder;
  if (setjmp(decoder.failed) != 0) return false;
  jpeg_create_decompress(&info);
  decoder.progress.progress_monitor = count_scans;
  info.progress = &decoder.progress;
  jpeg_mem_src(&info, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  jpeg_read_header(&info, TRUE);
  return true;
}

/// `left` and `columns` refer to the reduced image. They are rounded to what libjpeg decodes.
bool start_decompress(LibjpegDecoder& decoder, int shrink, JDIMENSION& left, JDIMENSION& columns) {
  jpeg_decompress_struct& info = decoder.info;
  if (setjmp(decoder.failed) != 0) return false;
  info.scale_num = 1;
  info.scale_denom = static_cast<unsigned>(shrink);
  info.out_color_space = info.num_components == 4 ? JCS_CMYK : JCS_RGB;
  jpeg_start_decompress(&info);
  if (columns < info.output_width) jpeg_crop_scanline(&info, &left, &columns);
  return true;
}

bool skip_rows(LibjpegDecoder& decoder, JDIMENSION count) {
  if (setjmp(decoder.failed) != 0) return false;
  if (count > 0) jpeg_skip_scanlines(&decoder.info, count);
  return true;
}

bool read_row(LibjpegDecoder& decoder, JSAMPLE* row) {
  if (setjmp(decoder.failed) != 0) return false;
  jpeg_read_scanlines(&decoder.info, &row, 1);
  return true;
}

/// Returns the type of a file by its first bytes; empty if it is unknown.
std::string file_type_of(std::string_view bytes) {
  struct FileType {
    std::string_view magic, name;
  };
  using namespace std::string_view_literals;
  constexpr std::array kFileTypes{FileType{"\x89PNG"sv, "a PNG"},
                                  FileType{"GIF8"sv, "a GIF"},
                                  FileType{"BM"sv, "a BMP"},
                                  FileType{"RIFF"sv, "a WebP or another RIFF"},
                                  FileType{"II*\0"sv, "a TIFF"},
                                  FileType{"MM\0*"sv, "a TIFF"},
                                  FileType{"<"sv, "a page of HTML or XML"},
                                  FileType{"%PDF"sv, "a PDF"}};
  for (const FileType& type : kFileTypes)
    if (bytes.starts_with(type.magic)) return std::string(type.name);
  return {};
}

/// One JPEG file; converts libjpeg's errors to exceptions.
class JpegFile {
 public:
  JpegFile(std::string_view bytes, const std::string& name) : bytes_(bytes), name_(name) {
    if (bytes.empty()) throw_format_error(0, "the file is empty");
    if (!bytes.starts_with("\xff\xd8")) {
      const std::string type = file_type_of(bytes);
      throw_format_error(0, type.empty() ? "not a JPEG" : "not a JPEG but " + type);
    }
    if (!read_header(decoder_, bytes)) throw_format_error();
    const jpeg_decompress_struct& info = decoder_.info;
    if (std::int64_t{info.image_width} * info.image_height > kMaxJpegPixels)
      throw_format_error(offset(), "the image has " + std::to_string(info.image_width) + " x " +
                                       std::to_string(info.image_height) + " pixels; expected at most " +
                                       std::to_string(kMaxJpegPixels));
    // The end marker does not occur inside an image's data, but it may occur before, in a thumbnail.
    const std::size_t end = bytes.rfind("\xff\xd9");
    if (end == std::string_view::npos || end < offset())
      throw_format_error(bytes.size(), "the file is truncated: it has no end marker");
  }

  int width() const { return static_cast<int>(decoder_.info.image_width); }
  int height() const { return static_cast<int>(decoder_.info.image_height); }

  void decode(const JpegRegion& region, RgbImage& out) {
    const Box box{region.box.left / region.shrink, region.box.top / region.shrink, region.box.width / region.shrink,
                  region.box.height / region.shrink};
    auto left = static_cast<JDIMENSION>(std::max(0, box.left - kUpsamplingMargin));
    const int whole = (width() + region.shrink - 1) / region.shrink;
    auto columns = static_cast<JDIMENSION>(std::min(whole, box.left + box.width + kUpsamplingMargin)) - left;
    if (!start_decompress(decoder_, region.shrink, left, columns) ||
        !skip_rows(decoder_, static_cast<JDIMENSION>(box.top)))
      throw_format_error();
    const jpeg_decompress_struct& info = decoder_.info;
    row_.resize(std::size_t{info.output_width} * static_cast<std::size_t>(info.output_components));
    out.width = box.width;
    out.height = box.height;
    out.rgb.resize(3 * static_cast<std::size_t>(box.width) * static_cast<std::size_t>(box.height));
    std::uint8_t* to = out.rgb.data();
    const std::size_t first =
        (static_cast<std::size_t>(box.left) - left) * static_cast<std::size_t>(info.output_components);
    for (int y = 0; y < box.height; ++y, to += 3 * box.width) {
      if (!read_row(decoder_, row_.data())) throw_format_error();
      if (info.output_components == 4)
        convert_cmyk(row_.data() + first, box.width, to);
      else
        std::memcpy(to, row_.data() + first, 3 * static_cast<std::size_t>(box.width));
    }
  }

 private:
  /// Adobe's programs, which write nearly all CMYK files, store the complement. As in PIL, each colour is reduced by
  /// its ink and by black.
  void convert_cmyk(const JSAMPLE* cmyk, int count, std::uint8_t* rgb) const {
    const int flip = decoder_.info.saw_Adobe_marker ? 0 : 255;
    for (int x = 0; x < count; ++x, cmyk += 4)
      for (int color = 0; color < 3; ++color)
        *rgb++ = static_cast<std::uint8_t>(((cmyk[color] ^ flip) * (cmyk[3] ^ flip) + 127) / 255);
  }

  std::size_t offset() const {
    return bytes_.size() - (decoder_.info.src ? decoder_.info.src->bytes_in_buffer : bytes_.size());
  }
  [[noreturn]] void throw_format_error() const {
    throw_format_error(std::min(offset(), bytes_.size()), decoder_.reason.data());
  }
  [[noreturn]] void throw_format_error(std::size_t at, const std::string& reason) const {
    throw base::FormatError(name_ + ":" + std::to_string(at) + ": " + reason);
  }

  std::string_view bytes_;
  const std::string& name_;
  LibjpegDecoder decoder_;
  std::vector<JSAMPLE> row_;
};

bool is_inside(const JpegRegion& region, int width, int height) {
  const Box& box = region.box;
  const int s = region.shrink;
  return (s == 1 || s == 2 || s == 4 || s == 8) && box.left >= 0 && box.top >= 0 && box.width >= s && box.height >= s &&
         box.width <= width - box.left && box.height <= height - box.top;
}

}  // namespace

std::string jpeg_unavailable_reason() { return {}; }

void decode_jpeg(std::string_view bytes, const std::string& name,
                 const std::function<JpegRegion(int, int)>& choose_region, RgbImage& out) {
  JpegFile file(bytes, name);
  const JpegRegion region = choose_region(file.width(), file.height());
  LOCKSTEP_CHECK(is_inside(region, file.width(), file.height()));
  file.decode(region, out);
}

}  // namespace lockstep::data::jpeg
