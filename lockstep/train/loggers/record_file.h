// Files that are appended to in whole records, or replaced atomically.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "lockstep/base/fd.h"

namespace lockstep::training::inline loggers {

/// A buffered file of records. The first flush() with data creates it and its parent directories; an existing file is
/// appended to. After a failed write the file still ends with its last complete record, and later records may succeed.
/// Used by one thread.
class RecordFile {
 public:
  explicit RecordFile(std::string path) : path_(std::move(path)) {}

  /// Buffers the record; flushes when 64 KiB are buffered. Throws like flush().
  void append(std::string_view record);
  /// Writes the buffered records to the file, without fsync. Throws a SystemError that names the number of lost
  /// records: all that were buffered.
  void flush();
  /// Reopens the file at the next flush(), after another file has taken its name.
  void reopen() { file_.reset(); }

  const std::string& path() const { return path_; }

 private:
  void open();

  std::string path_;
  base::Fd file_;
  std::string buffer_;
  std::int64_t num_buffered_ = 0;  // records
};

/// Creates the parent directory of `path` and those above it. Throws SystemError.
void create_parent_directories(const std::string& path);

/// Replaces `path` atomically by a file of these bytes: a reader finds either the whole old file or the whole new one.
/// Creates its parent directory. Does not fsync. Throws SystemError.
void replace_file(const std::string& path, std::string_view bytes);

/// Replaces `path` atomically by its edited lines: `change` receives each line with its \n and may modify or clear it.
/// A last line without \n, left by a killed process, is removed. A missing file has no lines. After the last line,
/// `change` is called once more with an empty line, to which it may append. Throws SystemError.
void rewrite_lines(const std::string& path, const std::function<void(std::string& line)>& change);

}  // namespace lockstep::training::inline loggers
