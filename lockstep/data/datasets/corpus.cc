#include "lockstep/data/datasets/corpus.h"

#include <algorithm>
#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/data/datasets/file_contents.h"

namespace lockstep::data::inline datasets {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> list_files(const std::string& folder, const CorpusOptions& options) {
  std::vector<std::string> files;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error);
  while (!error && entry != fs::recursive_directory_iterator()) {
    const fs::path& path = entry->path();
    const bool is_selected =
        options.extensions.empty() || std::find(options.extensions.begin(), options.extensions.end(),
                                                path.extension().string()) != options.extensions.end();
    if (is_selected && entry->symlink_status().type() == fs::file_type::regular) files.push_back(path.string());
    entry.increment(error);
  }
  if (error) throw base::SystemError("cannot list the directory " + folder, error.value());
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

std::string read_corpus(const std::string& path, const CorpusOptions& options) {
  if (options.max_bytes < 1) throw base::UsageError("CorpusOptions.max_bytes is 0; expected at least 1");
  std::error_code error;
  const auto status = fs::status(path, error);
  if (!fs::exists(status)) throw base::UsageError("read_corpus: " + path + " does not exist");
  std::string text;
  if (!fs::is_directory(status)) {
    append_file_contents(path, options.max_bytes, text);
  } else {
    const auto files = list_files(path, options);
    if (files.empty())
      throw base::UsageError("read_corpus: the directory " + path + " has no file" +
                             (options.extensions.empty() ? "" : " that ends in " + base::joined(options.extensions)));
    for (const auto& file : files) {
      if (text.size() >= options.max_bytes) break;
      append_file_contents(file, options.max_bytes, text);
    }
  }
  if (text.empty()) throw base::UsageError("read_corpus: " + path + " contains no text");
  return text;
}

}  // namespace lockstep::data::inline datasets
