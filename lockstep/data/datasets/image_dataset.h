// A dataset of the JPEG images in a directory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/data/collate.h"
#include "lockstep/data/datasets/image_crop.h"
#include "lockstep/data/datasets/image_folder.h"

namespace lockstep::data::inline datasets {

/// How ImageDataset handles a file that is damaged or not a JPEG.
enum class BrokenImagePolicy {
  kThrow,    ///< throws FormatError, which names the file
  kReplace,  ///< warns once per file and uses another image of the directory instead: batches keep their size, and all
             ///< ranks keep the same number of samples. Throws FormatError if 16 replacements in a row are damaged.
             ///< For training
  kIgnore,  ///< warns once per file and returns a black image whose target is kIgnoreIndex, which cross_entropy() skips
            ///< and an accuracy count must skip. For evaluation
};

/// The default ignore_index of torch's loss functions.
inline constexpr std::int64_t kIgnoreIndex = -100;

struct ImageOptions {
  std::int64_t size = 224;  ///< width and height of a sample, 8 to 4096
  /// true: a random crop, flipped horizontally with probability 1/2. false: the centre of the image after its shorter
  /// side is scaled to `resize`.
  bool augment = false;
  std::int64_t resize = 0;  ///< `size` to 8192; 0: 8/7 of size, which is 256 for 224
  CropOptions crop = {};    ///< used with augment
  std::uint64_t seed = 0;   ///< seed of crops and flips
  BrokenImagePolicy broken_images = BrokenImagePolicy::kThrow;
  /// With augment, the decoder reduces a crop that is at least twice as large as a sample to 1/2, 1/4 or 1/8 of its
  /// size. false: every crop is decoded at full size and then resized.
  bool shrink_in_decoder = true;
};

/// A dataset of images as bytes: data uint8 [3, size, size], target int64 []. Batches are in channels-last layout,
/// which normalize_images() keeps. Copying bytes to a device takes a quarter of the time of copying floats;
/// normalize_images() then converts them there.
///
/// The pixels of a sample are a function of ImageOptions.seed, the epoch (set by the Loader) and the index. They do not
/// depend on the number of workers, and they are the same after a restart in the middle of an epoch. Under every
/// policy, a file that cannot be opened throws SystemError, because a missing disk is not a broken image.
class ImageDataset {
 public:
  /// Throws UsageError if an option is out of range, or if this build cannot read JPEG files
  /// (jpeg_unavailable_reason()).
  ImageDataset(ImageFolder folder, const ImageOptions& options);

  Example get(std::size_t index);
  Example get_batch(const std::vector<std::size_t>& indices);
  std::size_t size() const { return folder_->size(); }
  /// Sets the epoch that crops and flips depend on. A Loader calls it once per epoch, before the first sample.
  void set_epoch(std::uint64_t epoch) { epoch_ = epoch; }

  const ImageFolder& folder() const { return *folder_; }

 private:
  class WarnOnce;

  void load_sample(std::size_t index, std::uint8_t* rgb, std::int64_t& target);
  void read_file(const std::string& path);  // into bytes_
  void load_augmented(const std::string& path, SampleRng& random, std::uint8_t* rgb);
  void load_center_crop(const std::string& path, std::uint8_t* rgb);

  std::shared_ptr<const ImageFolder> folder_;  // shared by copies, as is warn_once_
  std::shared_ptr<WarnOnce> warn_once_;
  ImageOptions options_;
  std::uint64_t epoch_ = 0;
  std::string bytes_;
  jpeg::RgbImage pixels_;
  std::vector<std::uint8_t> resized_;
};

/// Converts a batch of bytes to `dtype` and normalizes it as torchvision's models expect: scaled to [0, 1], minus
/// ImageNet's mean, divided by ImageNet's standard deviation, for red, green and blue. The result keeps the device and
/// the layout of `bytes`.
at::Tensor normalize_images(const at::Tensor& bytes, at::ScalarType dtype = at::kFloat);

}  // namespace lockstep::data::inline datasets
