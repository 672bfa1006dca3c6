// A file that appears whole, or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/base/fd.h"

namespace lockstep::checkpoint {

/// Writes beside `path`, in a file that nobody else has (O_EXCL, mode 0600), and puts it in the place of `path` in one
/// step when all of it is on the disk. Until then, and after any error, `path` is as it was before. A process that is
/// killed may leave its file ".lockstep-tmp-..." behind; it is never taken for `path`.
class AtomicFile {
 public:
  /// Throws SystemError when the folder cannot be used, and UsageError when `path` names no file, or its folder is
  /// writable for everybody and without the sticky bit (there others could exchange what was written).
  explicit AtomicFile(const std::string& path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  /// Without commit(): removes what was written.
  ~AtomicFile();

  /// Appends. Throws SystemError: no space, quota, a failing disk.
  void write(const void* data, std::size_t num_bytes);
  /// Writes over what was written at `offset`. Throws SystemError.
  void overwrite(std::uint64_t offset, const void* data, std::size_t num_bytes);

  /// Waits until the disk has the bytes, moves the file to `path`, and waits until the disk has that too. Throws
  /// SystemError.
  void commit();

 private:
  [[noreturn]] void throw_system_error(const char* what) const;

  std::string path_;
  std::string name_;       // of the file in its folder
  std::string temp_name_;  // empty: nothing to remove
  base::Fd directory_;
  base::Fd file_;
  std::uint64_t num_bytes_ = 0;
};

}  // namespace lockstep::checkpoint
