// A folder of images, one folder a class: what is in it, without opening any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::data {

/// As torchvision's ImageFolder: each folder in `path` is a class, labels are the places of their names in order, and
/// all files below that end in .jpg or .jpeg, in any case, are its images, folder by folder, in order. Order is that of
/// the names' bytes, the same on every machine.
class ImageFolder {
 public:
  /// Links are followed. Throws UsageError when there is no such folder, no class in it, a class without an image, or
  /// folders more than 32 deep; SystemError for a folder that cannot be read. Warns of images of other kinds, which are
  /// left out.
  explicit ImageFolder(const std::string& path);

  std::size_t size() const { return labels_.size(); }
  const std::vector<std::string>& classes() const { return classes_; }
  /// index < size().
  std::string path(std::size_t index) const;
  std::int64_t label(std::size_t index) const { return labels_[index]; }

 private:
  void add(std::string_view file, std::int32_t label);

  std::string root_;
  std::vector<std::string> classes_;
  // A million names one after the other are 40 MB; as strings they would be three times that.
  std::string files_;
  std::vector<std::uint64_t> ends_;
  std::vector<std::int32_t> labels_;
};

}  // namespace lockstep::data
