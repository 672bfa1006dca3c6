// Samples for a network from a folder of JPEG images.
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

namespace lockstep::data {

/// What happens where a file is no JPEG, or a damaged one.
enum class BrokenImagePolicy {
  kThrow,    ///< FormatError that names the file
  kReplace,  ///< a warning, once a file, and another image of the folder in its place: batches stay as large, and all
             ///< ranks have equally many. For training
  kIgnore,   ///< a warning, once a file, and a black picture whose target is kIgnoreIndex, which cross_entropy() and an
             ///< honest count pass over. For evaluation
};

/// torch's ignore_index.
inline constexpr std::int64_t kIgnoreIndex = -100;

struct ImageOptions {
  std::int64_t size = 224;  ///< of a sample's sides, 8 to 4096
  /// A random crop, and a flip in every second one; false: the middle of the picture, whose shorter side becomes
  /// `resize` first.
  bool augment = false;
  std::int64_t resize = 0;  ///< size to 8192; 0: 8/7 of size, which is 256 for 224
  CropOptions crop;         ///< with augment
  std::uint64_t seed = 0;   ///< of crops and flips
  BrokenImagePolicy broken_images = BrokenImagePolicy::kThrow;
  /// With augment, a crop that is at least twice as large as a sample is decoded in half the size, or a quarter, or an
  /// eighth. false: resized from the whole, always.
  bool shrink_in_decoder = true;
};

/// Each image as bytes: data uint8 [3, size, size], target int64 []. Batches are channels last, and so is what
/// normalize_images() makes of them. Bytes travel to a device in a quarter of the time of floats, and are normalized
/// there.
///
/// Pixels are a function of ImageOptions.seed, the epoch, which a Loader tells, and the index: however many workers
/// make them, and after a restart in the middle of an epoch. A file that cannot be opened is a SystemError always: a
/// disk that is gone is no broken image.
class ImageDataset {
 public:
  /// Throws UsageError for an option out of its range, and where JPEG files cannot be read (jpeg_unavailable_reason()).
  ImageDataset(ImageFolder folder, const ImageOptions& options);

  Example get(std::size_t index);
  Example get_batch(const std::vector<std::size_t>& indices);
  std::size_t size() const { return folder_->size(); }
  /// Called by a Loader for each epoch.
  void set_epoch(std::uint64_t epoch) { epoch_ = epoch; }

  const ImageFolder& folder() const { return *folder_; }

 private:
  class WarnOnce;

  void load_sample(std::size_t index, std::uint8_t* rgb, std::int64_t& target);
  void load_augmented(std::size_t index, SampleRng& random, std::uint8_t* rgb);
  void load_center_crop(std::size_t index, std::uint8_t* rgb);
  const std::string& read_file(std::size_t index, std::string& path);

  std::shared_ptr<const ImageFolder> folder_;  // copies share it, and who has been told of what
  std::shared_ptr<WarnOnce> warn_once_;
  ImageOptions options_;
  std::uint64_t epoch_ = 0;
  std::string bytes_;
  Pixels pixels_;
  std::vector<std::uint8_t> resized_;
};

/// Bytes of a batch as numbers of `dtype`, on the batch's device and in its layout: from 0 to 1, less the mean and by
/// the deviation of ImageNet's red, green and blue, as torchvision's models expect them.
at::Tensor normalize_images(const at::Tensor& bytes, at::ScalarType dtype = at::kFloat);

}  // namespace lockstep::data
