// A file for reading at arbitrary offsets.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/fd.h"

namespace lockstep::checkpoint::files {

class InputFile {
 public:
  /// Throws SystemError if the file cannot be read, and UsageError if it is not a regular file.
  explicit InputFile(const std::string& path);

  const std::string& path() const { return path_; }
  std::uint64_t num_bytes() const { return num_bytes_; }

  /// Reads exactly `num_bytes`. Throws SystemError, and FormatError if the file has become shorter. Thread-safe.
  void read(std::uint64_t offset, void* data, std::uint64_t num_bytes) const;

  /// Throws FormatError "FILE:OFFSET: reason".
  [[noreturn]] void throw_format_error(std::uint64_t offset, const std::string& reason) const;

 private:
  std::string path_;
  base::Fd file_;
  std::uint64_t num_bytes_ = 0;
};

}  // namespace lockstep::checkpoint::files
