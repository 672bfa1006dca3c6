// Tests of decode_jpeg() with generated JPEG files.
#include "lockstep/data/jpeg/jpeg.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "lockstep/base/error.h"
#include "tests/support/jpeg_writer.h"
#include "tests/support/temp_dir.h"

namespace lockstep::data::jpeg {
namespace {

using base::FormatError;
using testing::HasSubstr;
using testing::StartsWith;
using tests::gradient;
using tests::jpeg_file;
using tests::JpegOptions;
using tests::message_of;
using tests::Pixel;
using Colors = JpegOptions::Colors;

RgbImage part_of(const std::string& file, const JpegRegion& part) {
  RgbImage pixels;
  decode_jpeg(file, "x.jpg", [&](int, int) { return part; }, pixels);
  return pixels;
}

RgbImage whole(const std::string& file) {
  RgbImage pixels;
  decode_jpeg(file, "x.jpg", [&](int width, int height) { return JpegRegion{{0, 0, width, height}}; }, pixels);
  return pixels;
}

int at(const RgbImage& pixels, int x, int y, int color) {
  return pixels.rgb[static_cast<std::size_t>(3 * (y * pixels.width + x) + color)];
}

void expect_color(const RgbImage& pixels, const Pixel& color, int tolerance) {
  for (int y = 0; y < pixels.height; ++y)
    for (int x = 0; x < pixels.width; ++x)
      for (int i = 0; i < 3; ++i)
        ASSERT_NEAR(at(pixels, x, y, i), color[static_cast<std::size_t>(i)], tolerance) << x << " " << y << " " << i;
}

TEST(DecodeJpeg, ReturnsTheColorsWritten) {
  const RgbImage picture = whole(jpeg_file(70, 50, gradient));
  ASSERT_EQ(picture.width, 70);
  ASSERT_EQ(picture.height, 50);
  for (int y = 0; y < 50; ++y)
    for (int x = 0; x < 70; ++x)
      for (int i = 0; i < 3; ++i)
        ASSERT_NEAR(at(picture, x, y, i), gradient(x, y)[static_cast<std::size_t>(i)], 8) << x << " " << y << " " << i;
  const Pixel orange{230, 120, 20};
  expect_color(whole(jpeg_file(33, 17, [&](int, int) { return orange; })), orange, 2);
}

TEST(DecodeJpeg, ConvertsGreyAndCmykToRgb) {
  expect_color(whole(jpeg_file(20, 20, [](int, int) { return Pixel{77}; }, {.colors = Colors::kGrey})), {77, 77, 77},
               1);
  // In Adobe's files 255 means no ink. The colour (230, 120, 20), reduced to four fifths by black.
  const auto inks = [](int, int) { return Pixel{230, 120, 20, 204}; };
  const Pixel seen{184, 96, 16};
  expect_color(whole(jpeg_file(20, 20, inks, {.colors = Colors::kCmyk})), seen, 2);
  expect_color(whole(jpeg_file(20, 20, inks, {.colors = Colors::kYcck})), seen, 4);
  const auto plain = [](int, int) { return Pixel{25, 135, 235, 51}; };
  expect_color(whole(jpeg_file(20, 20, plain, {.colors = Colors::kCmyk, .adobe = false})), seen, 2);
}

/// A decoded region has the same bits as in the full image, for every kind of chroma subsampling, with one scan and
/// with several.
TEST(DecodeJpeg, RegionsMatchTheFullImage) {
  std::minstd_rand random(1);
  std::minstd_rand noise(2);
  const auto grain = [&](int x, int y) {
    Pixel pixel = gradient(x, y);
    for (auto& color : pixel) color = static_cast<std::uint8_t>(color + noise() % 40);
    return pixel;
  };
  for (const JpegOptions& made : {JpegOptions{.horizontal = 1, .vertical = 1},
                                  {.horizontal = 2, .vertical = 1},
                                  {.horizontal = 1, .vertical = 2},
                                  {},
                                  {.progressive = true},
                                  {.horizontal = 4, .vertical = 1},
                                  {.colors = Colors::kGrey},
                                  {.colors = Colors::kCmyk},
                                  {.colors = Colors::kYcck}})
    for (const int width : {37, 160}) {
      const int height = 121;
      const std::string file = jpeg_file(width, height, grain, made);
      const RgbImage all = whole(file);
      for (int i = 0; i < 60; ++i) {
        Box box;
        box.width = 1 + static_cast<int>(random()) % width;
        box.height = 1 + static_cast<int>(random()) % height;
        box.left = static_cast<int>(random()) % (width - box.width + 1);
        box.top = static_cast<int>(random()) % (height - box.height + 1);
        const RgbImage part = part_of(file, {box});
        ASSERT_EQ(part.width, box.width);
        ASSERT_EQ(part.height, box.height);
        for (int y = 0; y < box.height; ++y)
          for (int x = 0; x < box.width; ++x)
            for (int color = 0; color < 3; ++color)
              ASSERT_EQ(at(part, x, y, color), at(all, box.left + x, box.top + y, color))
                  << "sampling " << made.horizontal << made.vertical << ", box " << box.left << " " << box.top << " "
                  << box.width << " " << box.height << ", at " << x << " " << y << " " << color;
      }
    }
}

TEST(DecodeJpeg, ShrinkAveragesPixels) {
  const std::string file = jpeg_file(131, 90, gradient);
  const RgbImage all = whole(file);
  for (const int shrink : {2, 4, 8}) {
    const RgbImage part = part_of(file, {{24, 16, 99, 70}, shrink});
    ASSERT_EQ(part.width, 99 / shrink);
    ASSERT_EQ(part.height, 70 / shrink);
    for (int y = 0; y < part.height; ++y)
      for (int x = 0; x < part.width; ++x)
        for (int color = 0; color < 3; ++color) {
          int sum = 0;
          for (int v = 0; v < shrink; ++v)
            for (int u = 0; u < shrink; ++u) sum += at(all, 24 + x * shrink + u, 16 + y * shrink + v, color);
          ASSERT_NEAR(at(part, x, y, color), sum / (shrink * shrink), 4) << shrink << ": " << x << " " << y;
        }
  }
  // Boxes at all offsets in an image with odd sides, up to its right edge.
  for (const int shrink : {2, 4, 8})
    for (int left = 0; left + shrink <= 131; left += 7) part_of(file, {{left, 3, 131 - left, 87}, shrink});
}

TEST(DecodeJpeg, ReportsOtherFileTypes) {
  const auto message = [](std::string_view bytes) {
    return message_of<FormatError>([&] { whole(std::string(bytes)); });
  };
  using namespace std::string_view_literals;
  EXPECT_EQ(message(""), "x.jpg:0: the file is empty");
  EXPECT_EQ(message("\x89PNG\r\n\x1a\n"), "x.jpg:0: not a JPEG but a PNG");
  EXPECT_EQ(message("GIF89a"), "x.jpg:0: not a JPEG but a GIF");
  EXPECT_EQ(message("II*\0abc"sv), "x.jpg:0: not a JPEG but a TIFF");
  EXPECT_EQ(message("<!DOCTYPE html>"), "x.jpg:0: not a JPEG but a page of HTML or XML");
  EXPECT_EQ(message("words"), "x.jpg:0: not a JPEG");
  EXPECT_THAT(message("\xff\xd8"), StartsWith("x.jpg:"));
  EXPECT_THAT(message("\xff\xd8words that follow"), StartsWith("x.jpg:"));
}

/// A file truncated at any byte is rejected, also for a region at its very top.
TEST(DecodeJpeg, RejectsTruncatedFiles) {
  for (const bool progressive : {false, true}) {
    const std::string file = jpeg_file(64, 64, gradient, {.progressive = progressive});
    for (std::size_t size = 0; size < file.size(); ++size) {
      const std::string message = message_of<FormatError>([&] { part_of(file.substr(0, size), {{0, 0, 8, 8}}); });
      ASSERT_THAT(message, StartsWith("x.jpg:")) << size << " of " << file.size();
    }
    EXPECT_EQ(message_of<FormatError>([&] { whole(file.substr(0, file.size() - 40)); }),
              "x.jpg:" + std::to_string(file.size() - 40) + ": the file is truncated: it has no end marker");
    EXPECT_EQ(whole(file + "trailing bytes that some programs write").width, 64);
  }
}

TEST(DecodeJpeg, RejectsCorruptData) {
  std::string file = jpeg_file(256, 256, [](int x, int y) {
    return Pixel{static_cast<std::uint8_t>(x * y), static_cast<std::uint8_t>(x ^ y), 9};
  });
  for (std::size_t i = file.size() / 2; i < file.size() / 2 + 400; ++i) file[i] = '\xff';
  const std::string message = message_of<FormatError>([&] { whole(file); });
  EXPECT_THAT(message, HasSubstr("Corrupt JPEG data")) << message;
}

/// 65500 x 65500 is libjpeg's own limit. The header alone is enough to reject the file.
TEST(DecodeJpeg, RejectsTooManyPixelsBeforeAllocating) {
  std::string file = jpeg_file(16, 16, gradient);
  const std::size_t frame = file.find("\xff\xc0");
  ASSERT_NE(frame, std::string::npos);
  file.replace(frame + 5, 4, "\xff\xdc\xff\xdc");
  bool chosen = false;
  RgbImage pixels;
  const auto choose = [&](int, int) {
    chosen = true;
    return JpegRegion{{0, 0, 1, 1}};
  };
  EXPECT_THAT(message_of<FormatError>([&] { decode_jpeg(file, "x.jpg", choose, pixels); }),
              HasSubstr("the image has 65500 x 65500 pixels; expected at most 134217728"));
  EXPECT_FALSE(chosen);
}

/// Many scans of the same image in a small file would take minutes to decode.
TEST(DecodeJpeg, RejectsTooManyScans) {
  const std::string file =
      jpeg_file(16, 16, [](int, int) { return Pixel{90}; }, {.colors = Colors::kGrey, .progressive = true});
  const std::size_t last = file.rfind("\xff\xda");
  std::string many = file.substr(0, file.size() - 2);
  for (int i = 0; i < 600; ++i) many += file.substr(last, file.size() - 2 - last);
  EXPECT_THAT(message_of<FormatError>([&] { whole(many + "\xff\xd9"); }), HasSubstr("more than 500 scans"));
}

TEST(DecodeJpeg, DecodesAfterAnError) {
  const std::string file = jpeg_file(64, 64, gradient);
  const RgbImage before = whole(file);
  EXPECT_NE(message_of<FormatError>([&] { whole(file.substr(0, 300)); }), "");
  EXPECT_EQ(whole(file).rgb, before.rgb);
}

}  // namespace
}  // namespace lockstep::data::jpeg
