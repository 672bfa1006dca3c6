// Files and directories that appear complete or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/base/fd.h"

namespace lockstep::checkpoint::files {

/// Writes to a temporary file (O_EXCL, with the permissions that the umask leaves) in the directory of `path` and
/// renames it to `path` when all of it is on disk. Until then, and after any error, `path` is unchanged. A process that
/// is killed may leave its file ".lockstep-tmp-..." behind; readers ignore it.
class AtomicFile {
 public:
  /// Throws SystemError if the directory cannot be used. Throws UsageError if `path` does not name a file, or if its
  /// directory is world-writable without the sticky bit (other users could replace the file).
  explicit AtomicFile(const std::string& path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  /// Removes the temporary file unless commit() succeeded.
  ~AtomicFile();

  /// Appends. Throws SystemError (no space, quota, a failing disk).
  void write(const void* data, std::size_t num_bytes);
  /// Overwrites bytes at `offset` that were written before. Throws SystemError.
  void overwrite(std::uint64_t offset, const void* data, std::size_t num_bytes);

  /// Flushes the contents to disk, renames the file to `path`, and flushes the rename. Throws SystemError.
  void commit();

 private:
  [[noreturn]] void throw_system_error(const char* what) const;

  std::string path_;
  std::string name_;       // name of the file in its directory
  std::string temp_name_;  // empty if there is nothing to remove
  base::Fd directory_;
  base::Fd file_;
  std::uint64_t num_bytes_ = 0;
};

/// Replaces `path` by a file of these bytes, as an AtomicFile does. Throws as AtomicFile does.
void write_file(const std::string& path, std::string_view bytes);

/// A new directory inside `parent`, with the permissions that the umask leaves, with a temporary name that readers
/// ignore; commit() gives it its final name. It is locked (flock) while it is written. If the process is killed, the
/// next AtomicDirectory in the same parent removes the leftovers: the directory and temporary files of AtomicFile. On
/// file systems that do not lock directories, such as NFS, leftover directories remain.
class AtomicDirectory {
 public:
  /// Throws SystemError and UsageError as open_directory() does.
  explicit AtomicDirectory(const std::string& parent);
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;
  /// Removes the directory and its contents unless commit() succeeded.
  ~AtomicDirectory();

  /// The current path. Each file that is created there must be flushed to disk before commit().
  const std::string& path() const { return path_; }

  /// Flushes the directory's entries to disk, renames it to `name`, which must not exist, and flushes the rename.
  /// Throws SystemError.
  void commit(const std::string& name);

 private:
  std::string parent_;
  std::string temp_name_;  // empty if there is nothing to remove
  std::string path_;
  base::Fd parent_directory_;
  base::Fd directory_;
};

/// Removes a directory and its contents. It is renamed first, so readers never find it incomplete; where it cannot be,
/// its file `first` is removed first, without which it is none. Throws SystemError.
void remove_directory(const std::string& parent, const std::string& name, const std::string& first);

}  // namespace lockstep::checkpoint::files
