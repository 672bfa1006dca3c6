// MNIST, and what comes in the same files (Fashion-MNIST, KMNIST).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/data/collate.h"

namespace lockstep::data {

/// Images and their labels, in memory as bytes. Copies share them.
class Mnist {
 public:
  enum class Mode { kTrain, kTest };

  /// Reads train-images-idx3-ubyte and train-labels-idx1-ubyte, or the two t10k- files, from `folder`, each plain or
  /// with .gz. Throws UsageError listing the names looked for when one is missing, and FormatError as read_idx(), when
  /// there are no images, when labels and images are not equally many, or when a label is above 9.
  static Mnist load(const std::string& folder, Mode mode);
  /// Whether load() would find both files.
  static bool exists(const std::string& folder, Mode mode);

  /// The `count` images from number `first`. Throws UsageError when there are not so many.
  Mnist slice(std::size_t first, std::size_t count) const;

  /// data: float32 [1, rows, columns] from 0 to 1; target: int64 []. CPU.
  Example get(std::size_t index) const;
  /// The same with the dimension [indices] in front, in one pass.
  Example get_batch(const std::vector<std::size_t>& indices) const;
  std::size_t size() const { return static_cast<std::size_t>(labels_.size(0)); }

 private:
  Mnist(at::Tensor images, at::Tensor labels) : images_(std::move(images)), labels_(std::move(labels)) {}

  at::Tensor images_;  // uint8 [n, rows, columns]
  at::Tensor labels_;  // uint8 [n]
};

}  // namespace lockstep::data
