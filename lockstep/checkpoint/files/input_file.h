// A file that is read at any place, and checked by whoever reads it.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/fd.h"

namespace lockstep::checkpoint {

class InputFile {
 public:
  /// Throws SystemError when the file cannot be read, and UsageError when it is no regular file.
  explicit InputFile(const std::string& path);

  const std::string& path() const { return path_; }
  std::uint64_t num_bytes() const { return num_bytes_; }

  /// Throws SystemError, and FormatError when the file has become shorter than this.
  void read(std::uint64_t offset, void* data, std::uint64_t num_bytes) const;

  /// Throws FormatError "FILE:OFFSET: reason".
  [[noreturn]] void throw_format_error(std::uint64_t offset, const std::string& reason) const;

 private:
  std::string path_;
  base::Fd file_;
  std::uint64_t num_bytes_ = 0;
};

}  // namespace lockstep::checkpoint
