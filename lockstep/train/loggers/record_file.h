// A file that grows by whole records.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "lockstep/base/fd.h"

namespace lockstep::train {

/// Made by the first flush() of anything, with the folders above it; one that is there grows. A record that the disk
/// does not take is not there in part: the file ends with the last whole one, and later ones may be tried. Used by one
/// thread.
class RecordFile {
 public:
  explicit RecordFile(std::string path) : path_(std::move(path)) {}

  /// Waits for the disk once 64 KiB are there. Throws as flush().
  void append(std::string_view record);
  /// Hands all that waits to the system. Throws SystemError, with how many records are lost: those that waited.
  void flush();
  /// The file is another one now, of the same name.
  void reopen() { file_.reset(); }

  const std::string& path() const { return path_; }

 private:
  void open();

  std::string path_;
  base::Fd file_;
  std::string buffer_;
  std::int64_t num_buffered_ = 0;  // records
};

/// The folder of `path`, and those above it. Throws SystemError.
void create_parent_folders(const std::string& path);

/// Puts a file of these bytes in the place of `path`, in one step: who reads it sees all of the old one or all of the
/// new one. Makes its folder. Throws SystemError.
void replace_file(const std::string& path, std::string_view bytes);

/// The same out of the lines of `path`: `change` gets each, with its \n, and what it leaves of it goes to the new file.
/// A last line without \n, which a process left that was killed, is left out. A file that is not there has no lines; at
/// the end `change` may add some: it is called once more, with nothing.
void rewrite_lines(const std::string& path, const std::function<void(std::string& line)>& change);

}  // namespace lockstep::train
