#include "lockstep/data/datasets/image_folder.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::data::inline datasets {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxDepth = 32;  // ends the recursion if a link leads to a parent directory
constexpr std::array<std::string_view, 2> kJpegExtensions{".jpg", ".jpeg"};
constexpr std::array<std::string_view, 7> kOtherExtensions{
    ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"};  // further formats that torchvision reads

template <typename Endings>
bool has_extension(const std::string& name, const Endings& endings) {
  std::string lower = fs::path(name).extension().string();
  for (char& c : lower)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return std::find(endings.begin(), endings.end(), lower) != endings.end();
}

/// The sorted names in a directory.
struct DirectoryListing {
  std::vector<std::string> folders, files;
};

DirectoryListing list_directory(const std::string& path) {
  DirectoryListing listing;
  std::error_code error;
  fs::directory_iterator entry(path, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::error_code ignored;  // a dangling link is not a directory
    (entry->is_directory(ignored) ? listing.folders : listing.files).push_back(entry->path().filename().string());
  }
  if (error) throw base::SystemError("cannot list the directory " + path, error.value());
  std::sort(listing.folders.begin(), listing.folders.end());
  std::sort(listing.files.begin(), listing.files.end());
  return listing;
}

/// Appends the listings of `folder`, a path inside `root`, and of the directories below it to `all`.
void collect_directories(const std::string& root, const std::string& folder, int depth,
                         std::vector<std::pair<std::string, DirectoryListing>>& all) {
  if (depth > kMaxDepth)
    throw base::UsageError("ImageFolder: " + root + "/" + folder + " is more than " + std::to_string(kMaxDepth) +
                           " levels deep. Remove links to parent directories.");
  DirectoryListing listing = list_directory(root + "/" + folder);
  const std::vector<std::string> subdirectories = std::move(listing.folders);
  all.emplace_back(folder, std::move(listing));
  for (const std::string& name : subdirectories) collect_directories(root, folder + "/" + name, depth + 1, all);
}

}  // namespace

ImageFolder::ImageFolder(const std::string& path) : root_(path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) throw base::UsageError("ImageFolder: the directory " + path + " does not exist");
  classes_ = list_directory(path).folders;
  if (classes_.empty())
    throw base::UsageError("ImageFolder: the directory " + path + " has no subdirectories; expected one per class");
  std::size_t num_other = 0;
  std::string first_other;
  for (std::size_t label = 0; label < classes_.size(); ++label) {
    const std::size_t before = size();
    std::vector<std::pair<std::string, DirectoryListing>> folders;
    collect_directories(root_, classes_[label], 1, folders);
    std::sort(folders.begin(), folders.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [folder, listing] : folders)
      for (const std::string& file : listing.files) {
        if (has_extension(file, kJpegExtensions)) {
          files_ += folder + "/" + file;
          ends_.push_back(files_.size());
          labels_.push_back(static_cast<std::int32_t>(label));
        }
        if (has_extension(file, kOtherExtensions) && num_other++ == 0) first_other = root_ + "/" + folder + "/" + file;
      }
    if (size() == before)
      throw base::UsageError("ImageFolder: the directory " + root_ + "/" + classes_[label] +
                             " has no image; expected files that end in .jpg or .jpeg");
  }
  if (num_other > 0)
    base::log_warning(root_ + ": " + std::to_string(num_other) +
                      " images that do not end in .jpg or .jpeg are skipped; the first is " + first_other);
}

std::string ImageFolder::path(std::size_t index) const {
  LOCKSTEP_CHECK(index < size());
  const std::uint64_t begin = index == 0 ? 0 : ends_[index - 1];
  return root_ + "/" + files_.substr(begin, ends_[index] - begin);
}

}  // namespace lockstep::data::inline datasets
