#include "lockstep/data/datasets/image_folder.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <system_error>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxDepth = 32;  // a link to a folder above would otherwise be followed for ever
constexpr std::array<std::string_view, 2> kJpegExtensions{".jpg", ".jpeg"};
constexpr std::array<std::string_view, 7> kOtherExtensions{".png", ".ppm",  ".bmp", ".pgm",
                                                           ".tif", ".tiff", ".webp"};  // what torchvision takes besides

template <typename Endings>
bool has_extension(const std::string& name, const Endings& endings) {
  std::string lower = fs::path(name).extension().string();
  for (char& c : lower)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return std::find(endings.begin(), endings.end(), lower) != endings.end();
}

/// Names in a folder, in order.
struct DirectoryListing {
  std::vector<std::string> folders, files;
};

DirectoryListing list_directory(const std::string& path) {
  DirectoryListing listing;
  std::error_code error;
  fs::directory_iterator entry(path, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::error_code ignored;  // a link that leads nowhere is no folder
    (entry->is_directory(ignored) ? listing.folders : listing.files).push_back(entry->path().filename().string());
  }
  if (error) throw base::SystemError("cannot list the folder " + path, error.value());
  std::sort(listing.folders.begin(), listing.folders.end());
  std::sort(listing.files.begin(), listing.files.end());
  return listing;
}

/// Those below `folder`, a path inside `root`, in the order of their folders' paths.
void collect_directories(const std::string& root, const std::string& folder, int depth,
                         std::vector<std::pair<std::string, DirectoryListing>>& all) {
  if (depth > kMaxDepth)
    throw base::UsageError("the folder " + root + "/" + folder + " is more than " + std::to_string(kMaxDepth) +
                           " folders deep; does a link lead back to a folder above?");
  DirectoryListing listing = list_directory(root + "/" + folder);
  const std::vector<std::string> subdirectories = std::move(listing.folders);
  all.emplace_back(folder, std::move(listing));
  for (const std::string& name : subdirectories) collect_directories(root, folder + "/" + name, depth + 1, all);
}

}  // namespace

ImageFolder::ImageFolder(const std::string& path) : root_(path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) throw base::UsageError("there is no folder " + path);
  classes_ = list_directory(path).folders;
  if (classes_.empty())
    throw base::UsageError("the folder " + path + " holds no folders; allowed is one with a folder for each class");
  std::size_t num_other = 0;
  std::string first_other;
  for (std::size_t label = 0; label < classes_.size(); ++label) {
    const std::size_t before = size();
    std::vector<std::pair<std::string, DirectoryListing>> folders;
    collect_directories(root_, classes_[label], 1, folders);
    std::sort(folders.begin(), folders.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [folder, listing] : folders)
      for (const std::string& file : listing.files) {
        if (has_extension(file, kJpegExtensions)) add(folder + "/" + file, static_cast<std::int32_t>(label));
        if (has_extension(file, kOtherExtensions) && num_other++ == 0) first_other = root_ + "/" + folder + "/" + file;
      }
    if (size() == before)
      throw base::UsageError("the folder " + root_ + "/" + classes_[label] +
                             " holds no image; allowed are files that end in .jpg or .jpeg");
  }
  if (num_other > 0)
    base::log_warning(root_ + ": " + std::to_string(num_other) +
                      " images that are not called .jpg or .jpeg are left out; the first is " + first_other);
}

void ImageFolder::add(std::string_view file, std::int32_t label) {
  files_ += file;
  ends_.push_back(files_.size());
  labels_.push_back(label);
}

std::string ImageFolder::path(std::size_t index) const {
  LOCKSTEP_CHECK(index < size());
  const std::uint64_t begin = index == 0 ? 0 : ends_[index - 1];
  return root_ + "/" + files_.substr(begin, ends_[index] - begin);
}

}  // namespace lockstep::data
