// Lists the images in a directory with one subdirectory per class, without opening them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::data::inline datasets {

/// The image files below a directory, as torchvision's ImageFolder lists them: each subdirectory of `path` is a class,
/// and labels number the sorted class names. The images of a class are all files below its directory that end in .jpg
/// or .jpeg (in upper or lower case), sorted by directory and then by name. Names are compared as bytes, so the order
/// is the same on every machine.
class ImageFolder {
 public:
  /// Follows links. Throws UsageError if the directory does not exist, has no class, has a class without an image, or
  /// is more than 32 levels deep, and SystemError if a directory cannot be read. Warns about images in other formats,
  /// which are omitted.
  explicit ImageFolder(const std::string& path);

  std::size_t size() const { return labels_.size(); }
  const std::vector<std::string>& classes() const { return classes_; }
  /// `index` must be less than size().
  std::string path(std::size_t index) const;
  std::int64_t label(std::size_t index) const { return labels_[index]; }

 private:
  std::string root_;
  std::vector<std::string> classes_;
  // One million names take 40 MB as one string, and three times as much as separate strings.
  std::string files_;
  std::vector<std::uint64_t> ends_;
  std::vector<std::int32_t> labels_;
};

}  // namespace lockstep::data::inline datasets
