// A temporary directory for one test, and reading files and errors.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>

namespace lockstep::tests {

/// Creates a directory of mode 0700 in the system's temporary directory, and removes it with its content.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot create a temporary directory " + name);
    path_ = name;
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  /// Returns the path of `name` inside the directory without creating anything.
  std::string operator/(std::string_view name) const { return path_ + "/" + std::string(name); }

  /// Writes a file, creates its parent directories, and returns its path.
  std::string write(std::string_view name, std::string_view content) const {
    const std::string path = *this / name;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream out(path, std::ios::binary);
    out.write(content.data(), static_cast<std::streamsize>(content.size()));
    if (!out.flush()) throw std::runtime_error("cannot write " + path);
    return path;
  }
  std::size_t num_entries() const {
    return static_cast<std::size_t>(
        std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator()));
  }

 private:
  std::string path_;
};

/// Returns the content of a file.
inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

/// Returns what() of the exception of type E that `action` throws, or "" if it throws none.
template <typename E, typename Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

/// Returns the exception of type E that `action` throws. If it throws none, throws an error that fails the test.
template <typename E, typename Action>
E thrown(Action action) {
  try {
    action();
  } catch (const E& error) {
    return error;
  }
  throw std::logic_error("nothing was thrown");
}

}  // namespace lockstep::tests
