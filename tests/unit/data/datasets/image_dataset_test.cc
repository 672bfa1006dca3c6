// Tests of ImageDataset, its policies for broken images, and resizing.
#include "lockstep/data/datasets/image_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/data/datasets/image_crop.h"
#include "lockstep/data/loader.h"
#include "tests/support/jpeg_writer.h"
#include "tests/support/temp_dir.h"

namespace lockstep::data {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using tests::gradient;
using tests::jpeg_file;
using tests::message_of;
using tests::Pixel;
using tests::TempDir;

/// Writes six different images of two classes.
void write_images(const TempDir& folder) {
  for (int i = 0; i < 6; ++i)
    folder.write(std::string(i % 2 ? "b/" : "a/") + std::to_string(i) + ".jpg",
                 jpeg_file(60 + 10 * i, 90 - 7 * i, [&](int x, int y) { return gradient(x * (i + 1), y + 30 * i); }));
}

ImageDataset images(const TempDir& folder, const ImageOptions& options) {
  return ImageDataset(ImageFolder(folder.path()), options);
}

std::vector<at::Tensor> collect_image_batches(const ImageDataset& dataset, const LoaderOptions& options,
                                              std::uint64_t epoch) {
  auto loader = make_loader(dataset, DataShard{}, options);
  std::vector<at::Tensor> batches;
  for (auto& batch : loader.epoch(epoch)) {
    batches.push_back(batch.data.clone());
    batches.push_back(batch.target.clone());
  }
  return batches;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return x.equal(y); });
}

TEST(ImageResize, MatchesTorchWithinOneLevel) {
  jpeg::RgbImage from{.width = 71, .height = 53, .rgb = {}};
  for (int i = 0; i < 3 * 71 * 53; ++i) from.rgb.push_back(static_cast<std::uint8_t>(i * 37 + i / 213 * 11));
  const at::Tensor floats =
      torch::from_blob(from.rgb.data(), {1, 53, 71, 3}, torch::kByte).permute({0, 3, 1, 2}).to(torch::kFloat);
  for (const auto& [width, height] : {std::pair<std::int64_t, std::int64_t>{32, 32}, {100, 20}, {71, 53}, {142, 106}}) {
    const at::Tensor got = torch::empty({height, width, 3}, torch::kByte);
    resize(from, width, height, got.data_ptr<std::uint8_t>());
    const at::Tensor wanted = at::_upsample_bilinear2d_aa(floats, {height, width}, false);
    EXPECT_LE((got.permute({2, 0, 1}).to(torch::kFloat) - wanted[0]).abs().max().item<float>(), 1.0f)
        << width << " x " << height;
  }
}

TEST(ImageDataset, ReturnsCenterCrop) {
  const TempDir folder;
  // Red in the middle half of an image twice as wide as high, blue on both sides.
  folder.write(
      "a/x.jpg",
      jpeg_file(256, 128, [](int x, int) { return x >= 64 && x < 192 ? Pixel{220, 10, 10} : Pixel{10, 10, 220}; },
                {.horizontal = 1, .vertical = 1}));
  auto dataset = images(folder, {.size = 64, .resize = 64});
  const Example sample = dataset.get(0);
  ASSERT_EQ(sample.data.sizes(), at::IntArrayRef({3, 64, 64}));
  EXPECT_EQ(sample.data.scalar_type(), torch::kByte);
  EXPECT_EQ(sample.target.item<std::int64_t>(), 0);
  const at::Tensor inner = sample.data.slice(2, 2, 62).to(torch::kInt);
  EXPECT_LE((inner - torch::tensor({220, 10, 10}).view({3, 1, 1})).abs().max().item<int>(), 4);
}

TEST(ImageDataset, ReturnsChannelsLastBatches) {
  const TempDir folder;
  write_images(folder);
  for (const bool augment : {false, true}) {
    auto dataset = images(folder, {.size = 32, .augment = augment});
    const Example batch = dataset.get_batch({5, 0, 3});
    EXPECT_TRUE(batch.data.is_contiguous(at::MemoryFormat::ChannelsLast));
    EXPECT_TRUE(batch.target.equal(torch::tensor({1, 0, 1})));  // a: 0, 2, 4; b: 1, 3, 5
    EXPECT_TRUE(batch.data[0].equal(dataset.get(5).data));
    EXPECT_TRUE(batch.data[2].equal(dataset.get(3).data));
    EXPECT_FALSE(batch.data[0].equal(batch.data[1]));
  }
}

TEST(ImageDataset, FlipsHalfOfTheSamples) {
  const TempDir folder;
  folder.write("a/x.jpg", jpeg_file(64, 64, [](int x, int) { return Pixel{static_cast<std::uint8_t>(2 * x), 0, 0}; }));
  auto dataset = images(folder, {.size = 32, .augment = true});
  int flipped = 0;
  for (std::uint64_t epoch = 0; epoch < 200; ++epoch) {
    dataset.set_epoch(epoch);
    const at::Tensor red = dataset.get(0).data[0].to(torch::kFloat).mean(0);
    flipped += red[0].item<float>() > red[31].item<float>();
  }
  EXPECT_NEAR(flipped, 100, 36);  // five standard deviations
}

TEST(ImageDataset, PixelsDependOnEpochNotOnWorkers) {
  const TempDir folder;
  write_images(folder);
  const auto dataset = images(folder, {.size = 32, .augment = true, .seed = 5});
  const auto inline_made = collect_image_batches(dataset, {.batch_size = 2, .seed = 1}, 3);
  ASSERT_EQ(inline_made.size(), 6u);
  for (const int workers : {1, 3})
    EXPECT_TRUE(
        same(inline_made, collect_image_batches(dataset, {.batch_size = 2, .seed = 1, .num_workers = workers}, 3)))
        << workers;
  EXPECT_FALSE(same(inline_made, collect_image_batches(images(folder, {.size = 32, .augment = true, .seed = 6}),
                                                       {.batch_size = 2, .seed = 1}, 3)));
  // The order is the same in both epochs: only the crops differ.
  const auto third = collect_image_batches(dataset, {.batch_size = 6, .shuffle = false}, 3),
             fourth = collect_image_batches(dataset, {.batch_size = 6, .shuffle = false, .num_workers = 2}, 4);
  EXPECT_TRUE(third[1].equal(fourth[1]));
  for (int i = 0; i < 6; ++i) EXPECT_FALSE(third[0][i].equal(fourth[0][i])) << i;
}

TEST(ImageDataset, DecoderShrinkMatchesFullDecode) {
  const TempDir folder;
  const auto smooth = [](int x, int y) {
    return Pixel{static_cast<std::uint8_t>(x / 2), static_cast<std::uint8_t>(y / 2),
                 static_cast<std::uint8_t>((x + y) / 4)};
  };
  folder.write("a/x.jpg", jpeg_file(500, 400, smooth));
  auto fast = images(folder, {.size = 32, .augment = true}),
       exact = images(folder, {.size = 32, .augment = true, .shrink_in_decoder = false});
  float mean = 0;
  for (std::uint64_t epoch = 0; epoch < 20; ++epoch) {
    fast.set_epoch(epoch);
    exact.set_epoch(epoch);
    mean += (fast.get(0).data.to(torch::kFloat) - exact.get(0).data.to(torch::kFloat)).abs().mean().item<float>() / 20;
  }
  EXPECT_GT(mean, 0.0f);
  EXPECT_LT(mean, 2.0f);
}

TEST(ImageDataset, NormalizesLikeTorchvision) {
  const at::Tensor bytes = torch::tensor({0, 128, 255}, torch::kByte)
                               .view({1, 3, 1, 1})
                               .expand({2, 3, 4, 4})
                               .contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor got = normalize_images(bytes);
  EXPECT_TRUE(got.is_contiguous(at::MemoryFormat::ChannelsLast));
  const at::Tensor wanted =
      torch::tensor({(0 - 0.485) / 0.229, (128 / 255.0 - 0.456) / 0.224, (1 - 0.406) / 0.225}, torch::kFloat);
  EXPECT_TRUE(torch::allclose(got.mean({0, 2, 3}), wanted, 1e-5, 1e-6));
  torch::manual_seed(1);
  const at::Tensor many = torch::randint(256, {2, 3, 5, 7}, torch::kByte);
  const at::Tensor planes = normalize_images(many);
  EXPECT_TRUE(planes.is_contiguous());
  EXPECT_TRUE(torch::equal(planes, normalize_images(many.contiguous(at::MemoryFormat::ChannelsLast))));
  EXPECT_TRUE(torch::equal(planes[1], normalize_images(many[1])));
  EXPECT_EQ(normalize_images(bytes, torch::kBFloat16).scalar_type(), torch::kBFloat16);
}

/// Index 2, a/4.jpg, is a PNG with the wrong extension; index 3, b/1.jpg, is truncated.
std::string write_broken_images(const TempDir& folder) {
  write_images(folder);
  folder.write("a/4.jpg", "\x89PNG\r\n");
  folder.write("b/1.jpg", jpeg_file(60, 60, gradient).substr(0, 700));
  return folder / "a/4.jpg";
}

TEST(BrokenImagePolicy, ThrowNamesTheFile) {
  const TempDir folder;
  const std::string broken = write_broken_images(folder);
  auto dataset = images(folder, {.size = 32});
  EXPECT_EQ(message_of<base::FormatError>([&] { dataset.get(2); }), broken + ":0: not a JPEG but a PNG");
  EXPECT_EQ(message_of<SampleError>([&] { collect_image_batches(dataset, {.batch_size = 1, .shuffle = false}, 0); }),
            "sample 2: " + broken + ":0: not a JPEG but a PNG");
  std::filesystem::remove(broken);
  const ImageFolder listed = dataset.folder();
  for (const BrokenImagePolicy policy :
       {BrokenImagePolicy::kThrow, BrokenImagePolicy::kReplace, BrokenImagePolicy::kIgnore})
    EXPECT_THAT(
        message_of<base::SystemError>([&] { ImageDataset(listed, {.size = 32, .broken_images = policy}).get(2); }),
        HasSubstr("cannot read " + broken));
}

TEST(BrokenImagePolicy, ReplaceUsesAnotherImage) {
  const TempDir folder;
  const std::string broken = write_broken_images(folder);
  testing::internal::CaptureStderr();
  auto dataset = images(folder, {.size = 32, .augment = true, .broken_images = BrokenImagePolicy::kReplace});
  const auto batches = collect_image_batches(dataset, {.batch_size = 6, .shuffle = false, .num_workers = 2}, 0);
  const auto again = collect_image_batches(dataset, {.batch_size = 2, .shuffle = false}, 0);
  const std::string warnings = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(batches[0].equal(torch::cat({again[0], again[2], again[4]})));
  EXPECT_EQ(batches[1].lt(0).sum().item<int>(), 0);
  EXPECT_GT(batches[0][2].to(torch::kFloat).std().item<float>(), 1.0f);
  EXPECT_THAT(warnings,
              HasSubstr("lockstep: warning: " + broken + ":0: not a JPEG but a PNG; another image is used instead\n"));
  EXPECT_THAT(warnings,
              HasSubstr((folder / "b/1.jpg") +
                        ":700: the file is truncated: it has no end marker; another image is used instead\n"));
  EXPECT_EQ(std::count(warnings.begin(), warnings.end(), '\n'), 2) << warnings;
}

TEST(BrokenImagePolicy, IgnoreSetsIgnoreIndex) {
  const TempDir folder;
  write_broken_images(folder);
  testing::internal::CaptureStderr();
  const auto batches = collect_image_batches(images(folder, {.size = 32, .broken_images = BrokenImagePolicy::kIgnore}),
                                             {.batch_size = 6, .shuffle = false}, 0);
  EXPECT_TRUE(batches[1].equal(torch::tensor({0l, 0l, kIgnoreIndex, kIgnoreIndex, 1l, 1l})));
  EXPECT_EQ(batches[0][2].sum().item<std::int64_t>() + batches[0][3].sum().item<std::int64_t>(), 0);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("; the sample is ignored\n"));
}

TEST(BrokenImagePolicy, ReplaceFailsWithoutReadableImage) {
  const TempDir folder;
  folder.write("a/x.jpg", "words");
  testing::internal::CaptureStderr();
  auto dataset = images(folder, {.size = 32, .augment = true, .broken_images = BrokenImagePolicy::kReplace});
  EXPECT_EQ(message_of<base::FormatError>([&] { dataset.get(0); }), (folder / "a/x.jpg") + ":0: not a JPEG");
  testing::internal::GetCapturedStderr();
}

TEST(ImageDataset, RejectsOptionsOutOfRange) {
  const TempDir folder;
  write_images(folder);
  const auto message = [&](const ImageOptions& options) {
    return message_of<base::UsageError>([&] { images(folder, options); });
  };
  EXPECT_EQ(message({.size = 7}), "ImageOptions.size is 7; expected 8 to 4096");
  EXPECT_EQ(message({.size = 32, .resize = 31}), "ImageOptions.resize is 31; expected 32 to 8192");
  EXPECT_THAT(message({.crop = {.min_area = 0}}), HasSubstr("expected 0 < min_area <= max_area <= 1"));
  EXPECT_THAT(message({.crop = {.min_aspect = 2}}), HasSubstr("expected 0 < min_aspect <= max_aspect"));
}

}  // namespace
}  // namespace lockstep::data
