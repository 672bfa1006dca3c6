// MNIST, and datasets in the same file format (Fashion-MNIST, KMNIST).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/data/collate.h"

namespace lockstep::data::inline datasets {

/// Images and their labels, held in memory as bytes. Copies share the memory.
class Mnist {
 public:
  enum class Mode { kTrain, kTest };

  /// Reads train-images-idx3-ubyte and train-labels-idx1-ubyte, or the two t10k- files, from `folder`; each may be
  /// plain or compressed (.gz). Throws UsageError, which lists the expected names, if a file is missing. Throws
  /// FormatError as read_idx() does, and if there are no images, if the numbers of labels and images differ, or if a
  /// label is above 9.
  static Mnist load(const std::string& folder, Mode mode);
  /// Returns whether both files exist.
  static bool exists(const std::string& folder, Mode mode);

  /// Returns the `count` images from number `first`; the result shares the memory. Throws UsageError if the range is
  /// empty or exceeds the dataset.
  Mnist slice(std::size_t first, std::size_t count) const;

  /// Returns one image. data: float32 [1, rows, columns] between 0 and 1; target: int64 []. Both are on the CPU.
  Example get(std::size_t index) const;
  /// Returns several images in one pass, stacked along a new first dimension.
  Example get_batch(const std::vector<std::size_t>& indices) const;
  std::size_t size() const { return static_cast<std::size_t>(labels_.size(0)); }

 private:
  Mnist(at::Tensor images, at::Tensor labels) : images_(std::move(images)), labels_(std::move(labels)) {}

  at::Tensor images_;  // uint8 [n, rows, columns]
  at::Tensor labels_;  // uint8 [n]
};

}  // namespace lockstep::data::inline datasets
