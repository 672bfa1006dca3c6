#include "lockstep/data/datasets/image_dataset.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/data/datasets/file_contents.h"

namespace lockstep::data::inline datasets {
namespace {

constexpr std::uint64_t kMaxFileBytes = std::uint64_t{256} << 20;  // ImageNet's largest has 15 MB
constexpr int kMaxReplacements = 16;

void require(const char* option, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high)
    throw base::UsageError("ImageOptions." + std::string(option) + " is " + std::to_string(value) + "; expected " +
                           std::to_string(low) + " to " + std::to_string(high));
}

ImageOptions validated(ImageOptions options) {
  if (const std::string missing = jpeg::jpeg_unavailable_reason(); !missing.empty()) throw base::UsageError(missing);
  require("size", options.size, 8, 4096);
  if (options.resize == 0) options.resize = options.size * 8 / 7;
  require("resize", options.resize, options.size, 8192);
  const CropOptions& crop = options.crop;
  if (!(crop.min_area > 0 && crop.min_area <= crop.max_area && crop.max_area <= 1))
    throw base::UsageError("ImageOptions.crop has areas from " + std::to_string(crop.min_area) + " to " +
                           std::to_string(crop.max_area) + "; expected 0 < min_area <= max_area <= 1");
  if (!(crop.min_aspect > 0 && crop.min_aspect <= crop.max_aspect))
    throw base::UsageError("ImageOptions.crop has aspect ratios from " + std::to_string(crop.min_aspect) + " to " +
                           std::to_string(crop.max_aspect) + "; expected 0 < min_aspect <= max_aspect");
  return options;
}

}  // namespace

/// Writes one warning per file. Thread-safe.
class ImageDataset::WarnOnce {
 public:
  void warn(std::size_t index, const char* reason, const char* consequence) {
    {
      const std::lock_guard lock(mutex_);
      if (!files_.insert(index).second) return;
    }
    base::log_warning(std::string(reason) + "; " + consequence);
  }

 private:
  std::mutex mutex_;
  std::set<std::size_t> files_;  // guarded by mutex_
};

ImageDataset::ImageDataset(ImageFolder folder, const ImageOptions& options)
    : folder_(std::make_shared<const ImageFolder>(std::move(folder))),
      warn_once_(std::make_shared<WarnOnce>()),
      options_(validated(options)) {}

void ImageDataset::read_file(const std::string& path) {
  bytes_.clear();
  append_file_contents(path, kMaxFileBytes + 1, bytes_);
  if (bytes_.size() > kMaxFileBytes)
    throw base::FormatError(path + ":0: the file is larger than the limit of " + std::to_string(kMaxFileBytes) +
                            " bytes");
}

void ImageDataset::load_augmented(const std::string& path, SampleRng& random, std::uint8_t* rgb) {
  const auto size = static_cast<int>(options_.size);
  const auto choose_region = [&](int width, int height) {
    const jpeg::Box box = random_crop(width, height, random, options_.crop);
    return jpeg::JpegRegion{box, options_.shrink_in_decoder ? shrink_factor(box, size) : 1};
  };
  jpeg::decode_jpeg(bytes_, path, choose_region, pixels_);
  resize(pixels_, size, size, rgb);
  if (random.uniform_int(2) == 1) flip_horizontal(rgb, size, size);
}

void ImageDataset::load_center_crop(const std::string& path, std::uint8_t* rgb) {
  std::pair<std::int64_t, std::int64_t> sides;
  const auto choose_region = [&](int width, int height) {
    sides = resized_size(width, height, static_cast<int>(options_.resize));
    if (sides.first * sides.second > jpeg::kMaxJpegPixels)
      throw base::FormatError(path + ":0: the image has " + std::to_string(width) + " x " + std::to_string(height) +
                              " pixels, which are too many after its shorter side is scaled to " +
                              std::to_string(options_.resize));
    return jpeg::JpegRegion{{0, 0, width, height}};
  };
  jpeg::decode_jpeg(bytes_, path, choose_region, pixels_);
  resized_.resize(static_cast<std::size_t>(3 * sides.first * sides.second));
  resize(pixels_, sides.first, sides.second, resized_.data());
  crop(resized_.data(), sides.first,
       center_crop(static_cast<int>(sides.first), static_cast<int>(sides.second), static_cast<int>(options_.size)),
       rgb);
}

void ImageDataset::load_sample(std::size_t index, std::uint8_t* rgb, std::int64_t& target) {
  SampleRng random(options_.seed, epoch_, index);
  for (int num_attempts = 0;; ++num_attempts) {
    try {
      const std::string path = folder_->path(index);
      read_file(path);
      options_.augment ? load_augmented(path, random, rgb) : load_center_crop(path, rgb);
      target = folder_->label(index);
      return;
    } catch (const base::FormatError& error) {
      if (options_.broken_images == BrokenImagePolicy::kThrow || num_attempts == kMaxReplacements) throw;
      if (options_.broken_images == BrokenImagePolicy::kIgnore) {
        warn_once_->warn(index, error.what(), "the sample is ignored");
        std::fill_n(rgb, 3 * options_.size * options_.size, std::uint8_t{0});
        target = kIgnoreIndex;
        return;
      }
      warn_once_->warn(index, error.what(), "another image is used instead");
    }
    index = static_cast<std::size_t>(random.next() % size());
  }
}

Example ImageDataset::get(std::size_t index) {
  const Example batch = get_batch({index});
  return {batch.data[0], batch.target[0]};
}

Example ImageDataset::get_batch(const std::vector<std::size_t>& indices) {
  const auto count = static_cast<std::int64_t>(indices.size());
  Example batch{at::empty({count, 3, options_.size, options_.size},
                          at::dtype(at::kByte).memory_format(at::MemoryFormat::ChannelsLast)),
                at::empty({count}, at::dtype(at::kLong))};
  auto* rgb = batch.data.data_ptr<std::uint8_t>();
  auto* target = batch.target.data_ptr<std::int64_t>();
  for (const std::size_t index : indices) {
    load_sample(index, rgb, *target++);
    rgb += 3 * options_.size * options_.size;
  }
  return batch;
}

at::Tensor normalize_images(const at::Tensor& bytes, at::ScalarType dtype) {
  const auto colors = [&](double red, double green, double blue) {
    return at::tensor({red, green, blue}, at::kFloat).mul_(255).to(bytes.device(), /*non_blocking=*/true);
  };
  const at::Tensor mean = colors(0.485, 0.456, 0.406), deviation = colors(0.229, 0.224, 0.225);
  at::Tensor numbers = bytes.to(at::kFloat);
  if (numbers.dim() == 4 && numbers.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    // The three colours of a pixel are adjacent. Treating each image row as one row of width * 3 numbers lets an
    // operation process a whole row at once instead of three numbers. 64 images of 224 x 224 on one core take 26 ms
    // instead of 60 ms.
    const std::int64_t width = numbers.size(3);
    numbers.permute({0, 2, 3, 1})
        .view({numbers.size(0) * numbers.size(2), width * 3})
        .sub_(mean.repeat({width}))
        .div_(deviation.repeat({width}));
  } else {
    numbers.sub_(mean.view({3, 1, 1})).div_(deviation.view({3, 1, 1}));
  }
  return numbers.to(dtype);
}

}  // namespace lockstep::data::inline datasets
