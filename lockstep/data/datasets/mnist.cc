#include "lockstep/data/datasets/mnist.h"

#include <torch/types.h>

#include <cstring>
#include <filesystem>
#include <optional>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/data/datasets/idx.h"

namespace lockstep::data::inline datasets {
namespace {

struct MnistFiles {
  const char* images;
  const char* labels;
};

MnistFiles file_names(Mnist::Mode mode) {
  if (mode == Mnist::Mode::kTrain) return {"train-images-idx3-ubyte", "train-labels-idx1-ubyte"};
  return {"t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"};
}

std::optional<std::string> find_file(const std::string& folder, const std::string& name) {
  for (const char* const suffix : {"", ".gz"}) {
    const std::string path = (std::filesystem::path(folder) / (name + suffix)).string();
    std::error_code error;
    if (std::filesystem::is_regular_file(path, error)) return path;
  }
  return std::nullopt;
}

std::string find_file_or_throw(const std::string& folder, const std::string& name) {
  if (auto path = find_file(folder, name)) return *path;
  throw base::UsageError("Mnist::load: the directory " + folder + " has neither " + name + " nor " + name + ".gz");
}

// Reads a file; throws FormatError unless it has `num_dimensions` dimensions and at least one value.
IdxArray read_idx_checked(const std::string& path, std::size_t num_dimensions) {
  IdxArray idx = read_idx(path);
  if (idx.shape.size() != num_dimensions)
    throw base::FormatError(path + ":3: the file has " + std::to_string(idx.shape.size()) + " dimensions; expected " +
                            std::to_string(num_dimensions));
  if (idx.values.empty()) throw base::FormatError(path + ":4: a dimension is 0; expected at least 1");
  return idx;
}

at::Tensor as_tensor(const IdxArray& idx) {
  at::Tensor tensor = torch::empty(idx.shape, torch::kUInt8);
  std::memcpy(tensor.data_ptr<std::uint8_t>(), idx.values.data(), idx.values.size());
  return tensor;
}

}  // namespace

bool Mnist::exists(const std::string& folder, Mode mode) {
  const MnistFiles names = file_names(mode);
  return find_file(folder, names.images) && find_file(folder, names.labels);
}

Mnist Mnist::load(const std::string& folder, Mode mode) {
  const MnistFiles names = file_names(mode);
  const std::string images_path = find_file_or_throw(folder, names.images);
  const std::string labels_path = find_file_or_throw(folder, names.labels);
  const IdxArray images = read_idx_checked(images_path, 3);
  const IdxArray labels = read_idx_checked(labels_path, 1);
  if (images.shape[0] != labels.shape[0])
    throw base::FormatError(labels_path + ":4: " + std::to_string(labels.shape[0]) + " labels for the " +
                            std::to_string(images.shape[0]) + " images of " + images_path);
  for (std::size_t i = 0; i < labels.values.size(); ++i)
    if (labels.values[i] > 9)
      throw base::FormatError(labels_path + ":" + std::to_string(labels.values_offset + i) + ": label is " +
                              std::to_string(labels.values[i]) + "; expected 0 to 9");
  return Mnist(as_tensor(images), as_tensor(labels));
}

Mnist Mnist::slice(std::size_t first, std::size_t count) const {
  if (count < 1 || first > size() || count > size() - first)
    throw base::UsageError("Mnist::slice: " + std::to_string(count) + " images from number " + std::to_string(first) +
                           "; expected at least 1 image of the " + std::to_string(size()));
  const auto begin = static_cast<std::int64_t>(first);
  const auto end = static_cast<std::int64_t>(first + count);
  return Mnist(images_.slice(0, begin, end), labels_.slice(0, begin, end));
}

Example Mnist::get(std::size_t index) const {
  Example batch = get_batch({index});
  return {batch.data[0], batch.target[0]};
}

Example Mnist::get_batch(const std::vector<std::size_t>& indices) const {
  const std::int64_t rows = images_.size(1), columns = images_.size(2);
  const auto count = static_cast<std::int64_t>(indices.size());
  Example batch{torch::empty({count, 1, rows, columns}, torch::kFloat32), torch::empty({count}, torch::kInt64)};
  const auto num_pixels = static_cast<std::size_t>(rows * columns);
  const auto* const pixels = images_.const_data_ptr<std::uint8_t>();
  const auto* const labels = labels_.const_data_ptr<std::uint8_t>();
  auto* out = batch.data.data_ptr<float>();
  auto* target = batch.target.data_ptr<std::int64_t>();
  for (const std::size_t index : indices) {
    LOCKSTEP_CHECK(index < size());
    const std::uint8_t* const image = pixels + index * num_pixels;
    for (std::size_t i = 0; i < num_pixels; ++i) *out++ = static_cast<float>(image[i]) / 255.0f;
    *target++ = labels[index];
  }
  return batch;
}

}  // namespace lockstep::data::inline datasets
